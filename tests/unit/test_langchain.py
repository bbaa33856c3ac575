"""LangChain's own classes over our embedder and over a collection that the command line wrote."""

from __future__ import annotations

import asyncio
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("langchain_qdrant")
from qdrant_client import models

from pipelines.app import main
from rag_embfilter import EmbFilterEmbedding, Store
from rag_embfilter.errors import ConfigError, FingerprintMismatch, MissingExtraError, StoreError
from rag_embfilter.langchain import EmbFilterEmbeddings, vector_store

TEXTS = [
    "A stolen laptop is reported to security.",
    "Holiday requests go to your manager.",
    "Bikes are kept in the cellar.",
    "분실한 노트북은 보안팀에 신고합니다.",
]


@pytest.fixture(scope="module")
def embeddings(llama):
    return EmbFilterEmbeddings(model_name=str(llama), query_template="search", device="cpu")


@pytest.fixture(scope="module")
def filled(llama, tmp_path_factory):
    """A store that `ingest` filled from four files."""
    root = tmp_path_factory.mktemp("langchain")
    (root / "docs").mkdir()
    for i, text in enumerate(TEXTS):
        (root / f"docs/{i}.txt").write_text(text, encoding="utf-8")
    where = ["--backbone", str(llama), "--device", "cpu", "--qdrant-path", str(root / "qdrant")]
    assert main(["ingest", str(root / "docs"), "--root", str(root), "--collection", "docs", *where]) == 0
    with Store(path=root / "qdrant") as store:
        yield store


def test_both_roles_in_both_ways(embeddings):
    documents, query = embeddings.embed_documents(TEXTS), embeddings.embed_query(TEXTS[0])
    inner = embeddings.embedding
    raw = inner.encoder.encode_documents(TEXTS)
    np.testing.assert_allclose(documents, inner.filter.apply(raw), atol=1e-6)
    raw = inner.encoder.encode_queries(TEXTS[:1])
    np.testing.assert_allclose([query], inner.filter.apply(raw, "query"), atol=1e-6)
    assert np.abs(np.array(query) - documents[0]).max() > 0.01

    async def both():
        return await embeddings.aembed_documents(TEXTS), await embeddings.aembed_query(TEXTS[0])

    assert asyncio.run(both()) == (documents, query)
    with pytest.raises(ConfigError, match="one of them"):
        EmbFilterEmbeddings(inner, filter_ratio=4)


def test_async_calls_stay_off_the_event_loop(embeddings, monkeypatch):
    seen = []
    monkeypatch.setattr(
        EmbFilterEmbedding,
        "_get_query_embedding",
        lambda self, text: seen.append(threading.get_ident()) or [1.0],
    )
    asyncio.run(embeddings.aembed_query("a"))
    assert seen and threading.get_ident() not in seen


@pytest.mark.parametrize("name", ["docs-raw", "docs-edge-r2"])
def test_a_search_finds_what_the_store_finds(filled, name):
    chain = vector_store(filled, name)
    inner = chain.embeddings.embedding
    question = "Where do I report a stolen laptop?"
    (hits,) = filled.search(
        name, inner.filter.apply(inner.encoder.encode_queries([question]), "query"), limit=3
    )
    found = chain.similarity_search_with_score(question, k=3)
    assert [document.id for document, _ in found] == [hit.id for hit in hits]
    assert [score for _, score in found] == pytest.approx([hit.score for hit in hits], abs=1e-6)
    assert [document.page_content for document, _ in found] == [hit.text for hit in hits]
    assert found[0][0].metadata["source"] == hits[0].node.metadata["source"]
    again = asyncio.run(chain.as_retriever(search_kwargs={"k": 3}).ainvoke(question))
    assert again == [document for document, _ in found]
    assert chain.get_by_ids([hits[0].id])[0].page_content == hits[0].text


def test_conditions_and_mmr(filled):
    chain = vector_store(filled, "docs-edge-r2")
    only = models.Filter(
        must=[models.FieldCondition(key="source", match=models.MatchValue(value="docs/2.txt"))]
    )
    assert [d.page_content for d in chain.similarity_search("bikes", filter=only)] == [TEXTS[2]]
    assert len(chain.max_marginal_relevance_search("laptop", k=2)) == 2


def test_other_embeddings_and_writing_are_refused(filled, embeddings):
    with pytest.raises(FingerprintMismatch, match="query_template"):
        vector_store(filled, "docs-edge-r2", embeddings)
    with pytest.raises(StoreError):
        vector_store(filled, "nowhere")
    chain = vector_store(filled, "docs-edge-r2")
    for write in (lambda: chain.add_texts(["x"]), lambda: chain.delete(["1"])):
        with pytest.raises(StoreError, match="ingest"):
            write()
    assert filled.info("docs-edge-r2").points == 4


def test_a_missing_extra_is_named(filled, monkeypatch):
    monkeypatch.setitem(sys.modules, "langchain_qdrant", None)
    with pytest.raises(MissingExtraError, match=r"rag-embfilter\[langchain\]"):
        vector_store(filled, "docs-edge-r2")
    monkeypatch.setitem(sys.modules, "langchain_core.embeddings", None)
    monkeypatch.delitem(sys.modules, "rag_embfilter.langchain")
    with pytest.raises(MissingExtraError, match=r"rag-embfilter\[langchain\]"):
        import rag_embfilter.langchain  # noqa: F401
