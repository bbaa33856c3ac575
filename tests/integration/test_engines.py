"""Qdrant Edge, and a server by REST and gRPC, give what the embedded Qdrant gives.

Where the server is: see the fixture `qdrant`.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from llama_index.core.schema import Document, TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import models

from rag_embfilter import EmbFilter, EmbFilterVectorStore, Encoder, Store, ingest
from rag_embfilter.errors import FingerprintMismatch, StoreError
from rag_embfilter.refiltering import Refiltered, refilter
from rag_embfilter.store import Bm25, Layout
from tests import tiny

SERVER = [pytest.param(name, marks=pytest.mark.qdrant) for name in ("rest", "grpc")]


@pytest.fixture(params=["edge", *SERVER])
def engine(request, tmp_path) -> Iterator[tuple[Store, str]]:
    """A store of each engine, and a base name of this test's own; what a server got is removed."""
    yield from _store(request, tmp_path)


@pytest.fixture(params=SERVER)
def server(request, tmp_path) -> Iterator[tuple[Store, str]]:
    """As `engine`, servers only."""
    yield from _store(request, tmp_path)


def _store(request, folder) -> Iterator[tuple[Store, str]]:
    base = f"test-{uuid.uuid4().hex[:12]}"
    if request.param == "edge":
        pytest.importorskip("qdrant_edge", reason="the edge extra is not installed")
        with Store(path=folder / "edge", edge=True) as store:
            yield store, base
        return
    where = request.getfixturevalue("qdrant")
    with Store(**where, grpc=request.param == "grpc") as store:
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


def test_the_embedded_one_agrees(engine, encoder, tmp_path):
    store, base = engine
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


def test_what_one_way_wrote_the_other_reads(server, qdrant, encoder):
    """Fingerprints, settings, payloads and vectors pass through REST and gRPC alike."""
    store, base = server
    filters = [EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 2))]
    ingest(_documents(300), encoder, filters, store, base)
    with Store(**qdrant, grpc=not store.client._client._prefer_grpc) as other:
        with tiny.ForwardCounter(encoder) as counter:
            again = ingest(_documents(300), encoder, filters, other, base)
        assert (counter.texts, again.unchanged, again.points_removed) == (0, 300, 0)
        for name in again.collections:
            ours, theirs = store.info(name), other.info(name)
            assert ours == theirs and ours.fingerprint is not None
            first, second = ([page for page in s.pages(name)] for s in (store, other))
            assert [page.ids for page in first] == [page.ids for page in second]
            assert [page.payloads for page in first] == [page.payloads for page in second]
            for a, b in zip(first, second, strict=True):
                np.testing.assert_allclose(a.vectors, b.vectors, atol=1e-6)


def test_what_a_server_refuses_is_one_line(server):
    store, base = server
    with pytest.raises(StoreError, match=r"^Qdrant at \S+ answered (404|NOT_FOUND): .*") as caught:
        store.count(f"{base}-absent")
    assert "\n" not in str(caught.value)


def test_second_run_changed_document_and_refused_filter(engine, encoder):
    store, base = engine
    edge = EmbFilter.from_encoder(encoder, "edge", 4)
    ingest(_documents(10), encoder, [edge], store, base)
    with tiny.ForwardCounter(encoder) as counter:
        again = ingest(_documents(10), encoder, [edge], store, base)
    assert (counter.texts, again.unchanged, again.nodes_unchanged) == (0, 10, 10)
    changed = _documents(10)
    changed[3].set_content("other words")
    report = ingest(changed, encoder, [edge], store, base)
    assert (report.encoded, report.points_removed, store.info(f"{base}-edge-r4").points) == (1, 1, 10)
    assert (report.added, report.changed, report.removed, report.unchanged) == (0, 1, 0, 9)
    tail = EmbFilter.from_encoder(encoder, "tail", 4)
    with pytest.raises(FingerprintMismatch):
        store.require(f"{base}-edge-r4", encoder.fingerprint | tail.fingerprint, tail.dim, writing=True)


def test_adoption_is_kept_and_llama_index_reads_it(engine, encoder):
    store, base = engine
    edge, tail = (EmbFilter.from_encoder(encoder, t, 4) for t in ("edge", "tail"))
    (name,) = ingest(_documents(3), encoder, [edge], store, base).collections
    store.adopt(name, encoder, tail, override=True)
    assert store.info(name).fingerprint == encoder.fingerprint | tail.fingerprint
    nodes = QdrantVectorStore(collection_name=name, client=store.client).get_nodes(
        node_ids=list(store.points_of(name, ["s0", "s1", "s2"]))
    )
    assert sorted(node.text for node in nodes) == [f"text number {i}" for i in range(3)]


def test_a_large_batch_stays_under_the_servers_limit(engine, encoder):
    store, base = engine
    edge = EmbFilter.from_encoder(encoder, "edge", 2)
    documents = [Document(id_=f"d{i}", text=f"{i} " + "x" * 1_000_000) for i in range(40)]
    report = ingest(documents, encoder, [edge], store, base, chunk_size=None)
    assert store.info(report.collections[0]).points == 40


@pytest.mark.parametrize("quantization", ["scalar", "binary"])
def test_quantised_collections_rank_again_with_whole_vectors(engine, encoder, quantization):
    store, base = engine
    store.layout = Layout(quantization=quantization, on_disk=True, float16=True, hnsw_m=8, shards=1)
    raw, edge = (EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 2)))
    ingest(_documents(300), encoder, [raw, edge], store, base)
    name = f"{base}-edge-r2"
    assert store.info(name).quantization == quantization
    assert store.info(f"{base}-raw").quantization == "none"
    stored = store.client.get_collection(name).config.params.vectors["text-dense"]
    assert stored.on_disk and stored.datatype == models.Datatype.FLOAT16
    queries = edge.apply(encoder.encode_queries([f"text number {i}" for i in range(20)]))
    found, exact = (store.search(name, queries, 1, exact=exact) for exact in (False, True))
    for i, ((ours,), (theirs,), query) in enumerate(zip(found, exact, queries, strict=True)):
        assert theirs.text == f"text number {i}"
        # A bit for each of 16 dimensions finds what it finds; but whole vectors give the scores.
        assert ours.text == theirs.text or quantization == "binary"
        assert ours.score == pytest.approx(float(query @ store.vectors(name, [ours.id])[0]), abs=1e-3)


def test_refilter_agrees_with_ingest_and_takes_what_somebody_else_stored(engine, encoder):
    store, base = engine
    raw, edge = (EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 4)))
    ingest(_documents(300), encoder, [raw, edge], store, base)
    store.create(f"{base}-again", encoder, edge, base)
    done = refilter(store, f"{base}-raw", {f"{base}-again": edge})
    assert done == {f"{base}-again": Refiltered(written=300)}
    found = [
        {i: v for page in store.pages(name) for i, v in zip(page.ids, page.vectors, strict=True)}
        for name in (f"{base}-edge-r4", f"{base}-again")
    ]
    assert found[0].keys() == found[1].keys()
    for key, vector in found[0].items():
        np.testing.assert_allclose(found[1][key], vector, atol=1e-5)
    vectors = encoder.encode_documents([f"text number {i}" for i in range(5)])
    size = models.VectorParams(size=32, distance=models.Distance.COSINE)
    store.client.create_collection(f"{base}-theirs", vectors_config=size)
    points = [models.PointStruct(id=i, vector=v, payload={"n": i}) for i, v in enumerate(vectors.tolist())]
    store.client.upsert(f"{base}-theirs", points, wait=True)
    assert store.only_vector(f"{base}-theirs") == ("", 32)
    store.create(f"{base}-mine", encoder, edge, base)
    refilter(store, f"{base}-theirs", {f"{base}-mine": edge}, vector="")
    (page,) = store.pages(f"{base}-mine")
    assert page.ids == list(range(5)) and page.payloads[3] == {"n": 3}
    np.testing.assert_allclose(page.vectors, edge.apply(vectors), atol=1e-5)


def _texts(n: int) -> list[Document]:
    """Passages with terms that few of them share, each of its own length: no two score alike."""
    colours = "red green blue yellow black white".split()
    texts = [
        f"the {colours[i % 6]} cats of house {i} are running, said {i * 7}" + " and dogs" * i
        for i in range(n - 1)
    ]
    return [
        Document(id_=f"d{i}", text=text, metadata={"source": f"s{i}", "even": i % 2 == 0})
        for i, text in enumerate([*texts, "the and of"])
    ]


def _hits(found) -> list[dict[str, float]]:
    """Scores by text: equal ones are in no order."""
    return [{h.text: h.score for h in each} for each in found]


def test_bm25_and_hybrid_search_agree(engine, encoder, tmp_path):
    store, base = engine
    filters = [EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 2))]
    questions = ["does a green cat run in house 7?", "the", "119", "yellow"]
    vectors = filters[1].apply(encoder.encode_queries(questions))
    name = f"{base}-edge-r2"
    with Store(path=tmp_path / "q") as embedded:
        for each in (store, embedded):
            ingest(_texts(60), encoder, filters, each, base, chunk_size=None, bm25=Bm25())
            assert each.info(name).bm25 == each.info(f"{base}-raw").bm25 == Bm25()
        for limit, where in ((60, None), (60, {"even": "true"})):
            ours, theirs = (_hits(s.search_text(name, questions, limit, where)) for s in (store, embedded))
            for a, b in zip(ours, theirs, strict=True):
                assert a == pytest.approx(b, abs=1e-4)
            # All have a cat, one is of house 17: "119".
            assert [len(found) for found in ours] == ([59, 0, 1, 10] if where is None else [30, 0, 0, 0])
        ours, theirs = (s.search(name, vectors, 60, texts=questions, exact=True) for s in (store, embedded))
        for a, b in zip(ours, theirs, strict=True):
            # Sums of ranks may be equal, and equal ones are in no order.
            assert {h.id: h.score for h in a} == pytest.approx({h.id: h.score for h in b}, abs=1e-5)
            assert [h.score for h in a] == sorted((h.score for h in a), reverse=True)
        # A question without terms is answered by its vectors alone.
        alone = store.search(name, vectors[1:2], 5, exact=True)
        assert [h.id for h in ours[1][:5]] == [h.id for h in alone[0]]


def test_llama_index_searches_both_ways_at_once(engine, encoder):
    store, base = engine
    raw, edge = (EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 2)))
    ingest(_texts(60), encoder, [raw, edge], store, base, chunk_size=None, bm25=Bm25())
    question = "a blue cat of house 14"
    (vector,) = edge.apply(encoder.encode_queries([question]))
    vectors = EmbFilterVectorStore(store, f"{base}-edge-r2")
    (wanted,) = store.search(f"{base}-edge-r2", vector[None], 60, texts=[question], exact=True)
    scores = {hit.id: hit.score for hit in wanted}
    asked = VectorStoreQuery(vector.tolist(), 5, query_str=question, mode=VectorStoreQueryMode.HYBRID)
    for found in (vectors.query(asked), asyncio.run(vectors.aquery(asked))):
        np.testing.assert_allclose(found.similarities, [hit.score for hit in wanted[:5]], atol=1e-5)
        np.testing.assert_allclose(found.similarities, [scores[i] for i in found.ids], atol=1e-5)
    sparse = vectors.query(replace(asked, mode=VectorStoreQueryMode.SPARSE))
    assert sparse.nodes[0].text.startswith("the blue cats of house 2 are running, said 14 ")
    node = TextNode(text="the purple cats", id_=str(uuid.uuid4()), embedding=vector.tolist())
    asyncio.run(vectors.async_add([node]))
    (hit,) = store.search_text(f"{base}-edge-r2", ["purple"])[0]
    assert hit.id == node.id_
    vectors.delete_nodes([node.id_])
    assert store.count(f"{base}-edge-r2") == 60 and not vectors.get_nodes([node.id_])


def test_readers_through_an_alias_never_mix_filters_while_it_is_switched(engine, encoder):
    store, base = engine
    filters = {name: EmbFilter.from_encoder(encoder, name, 4) for name in ("edge", "tail")}
    ingest(_documents(50), encoder, list(filters.values()), store, base)
    names = [f"{base}-{name}-r4" for name in filters]
    alias = f"{base}-live"
    store.switch(alias, names[0])
    raw = encoder.encode_queries(["text number 7"])
    faults: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            info = store.info(alias)
            embfilter = filters[str(info.settings["filter_type"])]
            (hits,) = store.search(info.name, embfilter.apply(raw), 1, fingerprint=info.fingerprint)
            if hits[0].text != "text number 7" or hits[0].score < 0.999:
                faults.append(f"{info.name}: {hits[0]}")

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(20):
        assert store.switch(alias, names[(turn + 1) % 2]) == names[turn % 2]
    stop.set()
    reader.join()
    assert faults == []
