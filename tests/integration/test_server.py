"""A real Qdrant server gives what the embedded one gives. Runs when QDRANT_URL names one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from llama_index.core.schema import Document
from llama_index.vector_stores.qdrant import QdrantVectorStore

from rag_embfilter import EmbFilter, Encoder, Store, ingest
from rag_embfilter.errors import FingerprintMismatch
from tests import tiny

pytestmark = pytest.mark.qdrant


@pytest.fixture
def server() -> Iterator[tuple[Store, str]]:
    """A server's store and a base name of this test's own; its collections are removed afterwards."""
    url = os.environ.get("QDRANT_URL")
    if not url:
        pytest.skip("QDRANT_URL does not name a Qdrant server")
    base = f"test-{uuid.uuid4().hex[:12]}"
    with Store(url=url, api_key=os.environ.get("QDRANT_API_KEY")) as store:
        yield store, base
        for name in store.names():
            if name.startswith(base):
                store.delete(name)


@pytest.fixture
def encoder(tmp_path) -> Encoder:
    """A tiny random model."""
    return Encoder(str(tiny.save_model(tmp_path / "model")), device="cpu")


def _documents(n: int) -> list[Document]:
    return [
        Document(id_=f"d{i}", text=f"text number {i}", metadata={"year": 2000 + i % 3, "source": f"s{i}"})
        for i in range(n)
    ]


def test_server_and_embedded_agree(server, encoder, tmp_path):
    store, base = server
    assert not store.embedded
    filters = [EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 2), ("tail", 4))]
    queries = encoder.encode_queries(["text number 7", "another"])
    with Store(path=tmp_path / "q") as embedded:
        reports = [ingest(_documents(300), encoder, filters, s, base) for s in (store, embedded)]
        assert vars(reports[0]) == vars(reports[1])
        for embfilter, name in zip(filters, reports[0].collections, strict=True):
            assert store.info(name).points == embedded.info(name).points == 300
            assert store.info(name).fingerprint == embedded.info(name).fingerprint
            for where in (None, {"year": "2001"}):
                ours, theirs = (
                    s.search(name, embfilter.apply(queries), limit=10, where=where, exact=True)
                    for s in (store, embedded)
                )
                for a, b in zip(ours, theirs, strict=True):
                    assert [h.id for h in a] == [h.id for h in b]
                    np.testing.assert_allclose([h.score for h in a], [h.score for h in b], atol=1e-5)


def test_second_run_changed_document_and_refused_filter(server, encoder):
    store, base = server
    edge = EmbFilter.from_encoder(encoder, "edge", 4)
    ingest(_documents(10), encoder, [edge], store, base)
    with tiny.ForwardCounter(encoder) as counter:
        again = ingest(_documents(10), encoder, [edge], store, base)
    assert (counter.texts, again.unchanged) == (0, 10)
    changed = _documents(10)
    changed[3].set_content("other words")
    report = ingest(changed, encoder, [edge], store, base)
    assert (report.encoded, report.removed, store.info(f"{base}-edge-r4").points) == (1, 1, 10)
    tail = EmbFilter.from_encoder(encoder, "tail", 4)
    with pytest.raises(FingerprintMismatch):
        store.require(f"{base}-edge-r4", encoder.fingerprint | tail.fingerprint, tail.dim, writing=True)


def test_adoption_is_kept_and_llama_index_reads_it(server, encoder):
    store, base = server
    edge, tail = (EmbFilter.from_encoder(encoder, t, 4) for t in ("edge", "tail"))
    (name,) = ingest(_documents(3), encoder, [edge], store, base).collections
    store.adopt(name, encoder, tail, override=True)
    assert store.info(name).fingerprint == encoder.fingerprint | tail.fingerprint
    nodes = QdrantVectorStore(collection_name=name, client=store.client).get_nodes(
        node_ids=list(store.points_of(name, ["s0", "s1", "s2"]))
    )
    assert sorted(node.text for node in nodes) == [f"text number {i}" for i in range(3)]


def test_a_large_batch_stays_under_the_servers_limit(server, encoder):
    store, base = server
    edge = EmbFilter.from_encoder(encoder, "edge", 2)
    documents = [Document(id_=f"d{i}", text=f"{i} " + "x" * 1_000_000) for i in range(40)]
    report = ingest(documents, encoder, [edge], store, base, chunk_size=None)
    assert store.info(report.collections[0]).points == 40
