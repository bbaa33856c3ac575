"""The LlamaIndex embedder: roles, caches (C08, C09), copies, async, and swapping it in."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.schema import TextNode
from llama_index.core.storage.kvstore import SimpleKVStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from pydantic import ValidationError
from qdrant_client import QdrantClient

from rag_embfilter import EmbFilter, EmbFilterEmbedding, Encoder
from rag_embfilter.errors import ConfigError, FingerprintMismatch
from rag_embfilter.passes import Passes
from tests import tiny


@pytest.fixture(scope="module")
def embedding(llama) -> EmbFilterEmbedding:
    return EmbFilterEmbedding(model_name=str(llama), query_template="question", device="cpu")


def test_equals_encoder_and_filter_in_each_role(llama, embedding):
    encoder = Encoder(str(llama), query_template="question", device="cpu")
    embfilter = EmbFilter.from_encoder(encoder)
    document = embfilter.apply(encoder.encode_documents(["Paris", "Rome"]))
    query = embfilter.apply(encoder.encode_queries(["Paris"]), role="query")
    np.testing.assert_allclose(embedding.get_text_embedding_batch(["Paris", "Rome"]), document, atol=1e-6)
    np.testing.assert_allclose(embedding.get_text_embedding("Paris"), document[0], atol=1e-6)
    np.testing.assert_allclose(embedding.get_query_embedding("Paris"), query[0], atol=1e-6)
    assert not np.allclose(query, document[0], atol=1e-2)


def test_async_gives_the_same_and_stays_off_the_event_loop(embedding, monkeypatch):
    threads = set()
    real = Passes.forward

    def noting(self, *arguments):
        threads.add(threading.get_ident())
        return real(self, *arguments)

    monkeypatch.setattr(Passes, "forward", noting)

    async def ask():
        return (
            await embedding.aget_query_embedding("Paris"),
            await embedding.aget_text_embedding("Paris"),
            await embedding.aget_text_embedding_batch(["Paris", "Rome"]),
        )

    query, document, batch = asyncio.run(ask())
    assert threading.get_ident() not in threads and threads
    np.testing.assert_allclose(query, embedding.get_query_embedding("Paris"), atol=1e-6)
    np.testing.assert_allclose(document, embedding.get_text_embedding("Paris"), atol=1e-6)
    np.testing.assert_allclose(batch[0], document, atol=1e-5)


@pytest.mark.parametrize("first", ["query", "document"])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_c08_roles_survive_a_cache(llama, embedding, first, way):
    cached = EmbFilterEmbedding(
        model_name=str(llama), query_template="question", device="cpu", embeddings_cache=SimpleKVStore()
    )

    def ask(role):
        if way == "sync":
            call = cached.get_query_embedding if role == "query" else cached.get_text_embedding
            return call("Paris")
        call = cached.aget_query_embedding if role == "query" else cached.aget_text_embedding
        return asyncio.run(call("Paris"))

    order = [first, "document" if first == "query" else "query"]
    for role in [*order, *order]:  # the second time from the cache
        plain = embedding.get_query_embedding if role == "query" else embedding.get_text_embedding
        np.testing.assert_allclose(ask(role), plain("Paris"), atol=1e-6)
    with tiny.ForwardCounter(cached.encoder) as counter:
        ask("query"), ask("document"), cached.get_text_embedding_batch(["Paris"])
    assert counter.texts == 0


def test_c08_two_embedders_may_share_a_cache(llama, embedding):
    shared = SimpleKVStore()
    common = {"model_name": str(llama), "device": "cpu", "embeddings_cache": shared}
    first = EmbFilterEmbedding(**common).get_text_embedding("Paris")
    second = EmbFilterEmbedding(**common, filter_type="tail").get_text_embedding("Paris")
    assert not np.allclose(first, second, atol=1e-2)


@pytest.mark.parametrize(
    "change",
    [
        {"filter_type": "tail"},
        {"filter_ratio": 4},
        {"band_start": 0},
        {"pooling": "mean"},
        {"template": "echo"},
        {"query_template": "topic"},
        {"max_length": 99},
    ],
)
def test_c09_what_changes_a_vector_changes_the_cache_key(llama, change):
    nodes = [TextNode(text="a")]
    base = EmbFilterEmbedding(model_name=str(llama), device="cpu")
    other = EmbFilterEmbedding(model_name=str(llama), device="cpu", **change)
    assert get_transformation_hash(nodes, base) != get_transformation_hash(nodes, other)


def test_c09_other_weights_under_one_path_change_the_cache_key(tmp_path):
    keys = set()
    for seed in (1, 2):
        folder = tiny.save_model(tmp_path / "m", seed=seed)
        keys.add(get_transformation_hash([TextNode(text="a")], EmbFilterEmbedding(model_name=str(folder))))
    assert len(keys) == 2


@pytest.mark.parametrize(
    "change", [{"embed_batch_size": 3}, {"batch_tokens": 50}, {"device": "cpu"}, {"num_workers": 2}]
)
def test_c09_what_changes_no_vector_keeps_the_cache_key(llama, change):
    nodes = [TextNode(text="a")]
    base = EmbFilterEmbedding(model_name=str(llama))
    other = EmbFilterEmbedding(model_name=str(llama), **change)
    assert get_transformation_hash(nodes, base) == get_transformation_hash(nodes, other)


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        copy.copy,
        lambda e: pickle.loads(pickle.dumps(e)),
        lambda e: EmbFilterEmbedding.from_dict(e.to_dict()),
        lambda e: EmbFilterEmbedding.from_json(e.to_json()),
    ],
    ids=["deepcopy", "copy", "pickle", "to_dict", "to_json"],
)
def test_copies_keep_fingerprint_and_vectors(embedding, again):
    other = again(embedding)
    assert other.fingerprint == embedding.fingerprint
    assert other.encoder.backbone is embedding.encoder.backbone
    np.testing.assert_allclose(other.get_query_embedding("a"), embedding.get_query_embedding("a"), atol=1e-6)
    np.testing.assert_allclose(other.get_text_embedding("a"), embedding.get_text_embedding("a"), atol=1e-6)


def test_a_dict_that_leads_to_other_vectors_is_refused(tmp_path):
    folder = tiny.save_model(tmp_path / "m", seed=1)
    saved = EmbFilterEmbedding(model_name=str(folder)).to_dict()
    tiny.save_model(folder, seed=2)
    with pytest.raises(FingerprintMismatch, match="not what they were"):
        EmbFilterEmbedding.from_dict(saved)


def test_a_filter_file_gives_the_same_vectors_and_belongs_to_its_backbone(llama, tmp_path):
    encoder = Encoder(str(llama), device="cpu")
    EmbFilter.from_encoder(encoder, "tail", 4).save(tmp_path / "f.safetensors")
    loaded = EmbFilterEmbedding(model_name=str(llama), filter_file=str(tmp_path / "f.safetensors"))
    direct = EmbFilterEmbedding(model_name=str(llama), filter_type="tail", filter_ratio=4)
    assert (loaded.filter_type, loaded.filter_ratio) == ("tail", 4)
    assert loaded.fingerprint == direct.fingerprint
    np.testing.assert_allclose(loaded.get_text_embedding("a"), direct.get_text_embedding("a"), atol=1e-6)
    other = tiny.save_model(tmp_path / "m", seed=5)
    with pytest.raises(FingerprintMismatch, match="another unembedding"):
        EmbFilterEmbedding(model_name=str(other), filter_file=str(tmp_path / "f.safetensors"))


def test_unknown_and_bad_arguments_are_refused(llama):
    with pytest.raises(ValidationError, match="filter_ration"):
        EmbFilterEmbedding(model_name=str(llama), filter_ration=4)
    with pytest.raises(ConfigError, match="expected one of raw, edge"):
        EmbFilterEmbedding(model_name=str(llama), filter_type="egde")


def test_every_argument_is_a_described_field():
    undescribed = [
        name
        for name, info in EmbFilterEmbedding.model_fields.items()
        if not info.description and name not in ("callback_manager", "rate_limiter")
    ]
    assert undescribed == []


@pytest.mark.parametrize("text", ["", "  "])
def test_c11_an_empty_text_is_a_value_error(embedding, text):
    with pytest.raises(ValueError, match="empty"):
        embedding.get_query_embedding(text)
    with pytest.raises(ValueError, match="empty"):
        embedding.get_text_embedding_batch(["a", text])


def test_swapped_into_an_index_with_a_qdrant_store(embedding, no_key, monkeypatch):
    monkeypatch.setattr(Settings, "_embed_model", None)
    nodes = [
        TextNode(text=f"{name} is a town", id_=f"{i:032x}")
        for i, name in enumerate(["Paris", "Rome", "Bonn"])
    ]
    vectors = QdrantVectorStore(collection_name="towns", client=QdrantClient(location=":memory:"))
    from llama_index.core import StorageContext

    index = VectorStoreIndex(
        nodes, embed_model=embedding, storage_context=StorageContext.from_defaults(vector_store=vectors)
    )
    found = index.as_retriever(similarity_top_k=3).retrieve("Rome")
    expected = np.array(embedding.get_text_embedding_batch([n.text for n in nodes])) @ np.array(
        embedding.get_query_embedding("Rome")
    )
    assert [n.node.text for n in found] == [nodes[i].text for i in np.argsort(-expected)]
    np.testing.assert_allclose([n.score for n in found], np.sort(expected)[::-1], atol=1e-5)


def test_importing_the_package_is_light():
    code = (
        "import sys, rag_embfilter; dir(rag_embfilter);"
        "heavy = {'torch', 'transformers', 'llama_index', 'qdrant_client', 'ragas'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
