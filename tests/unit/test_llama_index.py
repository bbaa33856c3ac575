"""LlamaIndex's own index and retriever over collections that the command line wrote."""

from __future__ import annotations

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.vector_stores.qdrant import QdrantVectorStore

from pipelines.app import main
from rag_embfilter import EmbFilterEmbedding, Store

TEXTS = [
    "A stolen laptop is reported to security.",
    "Holiday requests go to your manager.",
    "Bikes are kept in the cellar.",
    "분실한 노트북은 보안팀에 신고합니다.",
    "Trains run late on Mondays.",
]


@pytest.mark.parametrize("name", ["docs-raw", "docs-edge-r2"])
def test_a_retriever_finds_what_the_store_finds(tmp_path, llama, name):
    """Same nodes, same order, same scores, over a collection that `ingest` wrote."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for i, text in enumerate(TEXTS):
        (docs / f"{i}.txt").write_text(text, encoding="utf-8")
    where = ["--backbone", str(llama), "--device", "cpu", "--qdrant-path", str(tmp_path / "qdrant")]
    assert main(["ingest", str(docs), "--collection", "docs", *where]) == 0
    with Store(path=tmp_path / "qdrant") as store:
        info = store.info(name)
        embedding = EmbFilterEmbedding(**info.settings, device="cpu", fingerprint=info.fingerprint.digest)
        index = VectorStoreIndex.from_vector_store(
            QdrantVectorStore(collection_name=name, client=store.client), embed_model=embedding
        )
        retriever = index.as_retriever(similarity_top_k=4)
        for question in ("Where do I report a stolen laptop?", TEXTS[3]):
            vectors = embedding.filter.apply(embedding.encoder.encode_queries([question]), role="query")
            (hits,) = store.search(name, vectors, limit=4)
            found = retriever.retrieve(question)
            assert len(found) == 4 and [one.node.node_id for one in found] == [hit.id for hit in hits]
            assert [one.score for one in found] == pytest.approx([hit.score for hit in hits], abs=1e-6)
            assert [one.node.get_content() for one in found] == [hit.text for hit in hits]
            assert [one.node.metadata["source"] for one in found] == [
                hit.node.metadata["source"] for hit in hits
            ]
        assert found[0].node.get_content() == TEXTS[3]  # the question is this passage itself
