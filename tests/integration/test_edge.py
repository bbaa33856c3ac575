"""Qdrant Edge behind the store's calls: what it keeps, what it refuses, what it costs."""

from __future__ import annotations

import pickle
import shutil
import threading

import numpy as np
import pytest
from llama_index.core.schema import Document, TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode
from qdrant_client import models

from rag_embfilter import EmbFilter, EmbFilterVectorStore, Encoder, Store, ingest
from rag_embfilter.errors import ConfigError, EncodingError, FingerprintMismatch, StoreError
from rag_embfilter.fitting import siblings
from rag_embfilter.store import Bm25, Layout
from tests import tiny

pytest.importorskip("qdrant_edge", reason="the edge extra is not installed")
from rag_embfilter.store.cost import measure

TEXTS = [f"text number {i} of {i % 7}" for i in range(300)]


@pytest.fixture
def encoder(tmp_path) -> Encoder:
    """A tiny random model."""
    return Encoder(str(tiny.save_model(tmp_path / "model")), device="cpu")


@pytest.fixture
def filters(encoder) -> list[EmbFilter]:
    """Raw and one that halves."""
    return [EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 2))]


def _documents() -> list[Document]:
    return [Document(id_=f"d{i}", text=text, metadata={"n": i}) for i, text in enumerate(TEXTS)]


def test_all_survives_a_reopening_and_the_top_ten_are_the_embedded_ones(encoder, filters, tmp_path):
    queries = filters[1].apply(encoder.encode_queries(TEXTS[:20]))
    found = {}
    for kind in ("embedded", "edge"):
        with Store(path=tmp_path / kind, edge=kind == "edge") as store:
            ingest(_documents(), encoder, filters, store, "c")
            store.switch("live", "c-edge-r2")
            before = store.info("live")
        with Store(path=tmp_path / kind) as store:
            assert store.info("live") == before and store.names() == ["c-edge-r2", "c-raw"]
            hits = store.search("live", queries, 10, exact=True)
            found[kind] = [[(hit.id, hit.node.text) for hit in each] for each in hits]
            scores = np.array([[hit.score for hit in each] for each in hits])
            wanted = np.sort(queries @ filters[1].apply(encoder.encode_documents(TEXTS)).T)[:, :-11:-1]
            np.testing.assert_allclose(scores, wanted, atol=1e-5)
    assert found["edge"] == found["embedded"]


def test_a_folder_opens_as_what_it_is_and_as_nothing_else(encoder, filters, tmp_path):
    with Store(path=tmp_path / "e", edge=True) as store:
        assert not store.embedded and store.in_process
    with Store(path=tmp_path / "e") as store:
        assert not store.embedded
        with pytest.raises(StoreError, match="in use by another process"):
            Store(path=tmp_path / "e")
    with pytest.raises(StoreError, match="is a store of Qdrant Edge, and the embedded one cannot read it"):
        Store(path=tmp_path / "e", edge=False)
    with Store(path=tmp_path / "q") as store:
        assert store.embedded
    with Store(path=tmp_path / "q", edge=True) as store:  # nothing was in it
        assert not store.embedded
    with Store(path=tmp_path / "r") as store:
        store.create("c-raw", encoder, filters[0], "c")
    with pytest.raises(StoreError, match="is a store of the embedded Qdrant, and Qdrant Edge cannot"):
        Store(path=tmp_path / "r", edge=True)


def test_collections_on_their_way_are_all_there_or_not(encoder, filters, tmp_path):
    with Store(path=tmp_path / "e", edge=True) as store:
        store.create("c-raw", encoder, filters[0], "c")
        store.switch("live", "c-raw")
        with pytest.raises(StoreError, match="exists already"):
            store.client.create_collection("c-raw", {})
        store.delete("c-raw", force=True)
        assert store.names() == [] and store.aliases() == {} and not store.exists("live")
    left = tmp_path / "e" / "making" / "half"
    left.mkdir(parents=True)
    with Store(path=tmp_path / "e") as store:
        assert store.names() == [] and not left.exists()


@pytest.mark.parametrize("file", ["edge.json", "collections/c-raw/collection.json"])
def test_a_damaged_file_is_named(encoder, filters, tmp_path, file):
    with Store(path=tmp_path / "e", edge=True) as store:
        store.create("c-raw", encoder, filters[0], "c")
    (tmp_path / "e" / file).write_text("{")
    with Store(path=tmp_path / "e") as store, pytest.raises(StoreError, match=r"\.json' is damaged"):
        store.info("c-raw")


def test_damaged_points_are_an_error_that_names_the_collection(encoder, filters, tmp_path):
    with Store(path=tmp_path / "e", edge=True) as store:
        store.create("c-raw", encoder, filters[0], "c")
    for segment in (tmp_path / "e/collections/c-raw/shard/segments").glob("*/segment.json"):
        segment.write_text("{")
    with Store(path=tmp_path / "e") as store, pytest.raises(StoreError, match="Edge, collection 'c-raw': "):
        store.info("c-raw")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.query_points(
            "c", models.RecommendQuery(recommend=models.RecommendInput()), using="v"
        ),
        lambda client: client.update_collection("c", hnsw_config=models.HnswConfigDiff(m=4)),
        lambda client: client.scroll("c", order_by="n"),
        lambda client: client.create_collection("d", {}, shard_number=2),
        lambda client: client.scroll(
            "c", models.Filter(min_should=models.MinShould(conditions=[], min_count=1))
        ),
    ],
)
def test_what_edge_does_not_take_is_refused_and_never_left_out(tmp_path, call):
    with Store(path=tmp_path / "e", edge=True) as store:
        size = models.VectorParams(size=4, distance=models.Distance.COSINE)
        store.client.create_collection("c", {"v": size})
        with pytest.raises(StoreError, match="Qdrant Edge does not take"):
            call(store.client)


def test_every_filter_finds_what_the_embedded_one_finds(tmp_path):
    """Also truth values beside numbers, nested conditions, and fields that are empty or absent."""
    values = [True, False, 1, 0, "true", "a b", None, [1, "x"], 2.5]
    points = [
        models.PointStruct(id=i, vector={"v": [1.0, i]}, payload={"f": value, "n": i})
        for i, value in enumerate(values)
    ] + [models.PointStruct(id=99, vector={"v": [1.0, 99]}, payload={})]
    fields, matches = models.FieldCondition, (True, False, 1, 0, "true", "x")
    conditions = [
        *(fields(key="f", match=models.MatchValue(value=value)) for value in matches),
        fields(key="f", match=models.MatchAny(any=["true", "x"])),
        fields(key="f", match=models.MatchExcept(**{"except": [1]})),
        fields(key="n", range=models.Range(gt=2, lte=6)),
        models.IsEmptyCondition(is_empty=models.PayloadField(key="f")),
        models.IsNullCondition(is_null=models.PayloadField(key="f")),
        models.HasIdCondition(has_id=[2, 99]),
    ]
    nested = models.Filter(must=models.Filter(should=conditions[:2]), must_not=[conditions[-1]])
    filters = [models.Filter(must=[each]) for each in conditions] + [nested]
    found = []
    for kind in ("embedded", "edge"):
        with Store(path=tmp_path / kind, edge=kind == "edge") as store:
            size = models.VectorParams(size=2, distance=models.Distance.COSINE)
            store.client.create_collection("c", {"v": size})
            store.client.upsert("c", points)
            found.append([{r.id for r in store.client.scroll("c", each, limit=50)[0]} for each in filters])
    assert found[0] == found[1]
    assert found[1][:4] == [{0}, {1}, {2, 7}, {3}]


def test_threads_share_a_store(encoder, filters, tmp_path):
    faults: list[BaseException] = []
    with Store(path=tmp_path / "e", edge=True) as store:
        ingest(_documents(), encoder, filters, store, "c")
        query = filters[1].apply(encoder.encode_queries(TEXTS[:1]))

        def search() -> None:
            try:
                for _ in range(30):
                    assert store.search("c-edge-r2", query, 1)[0][0].text == TEXTS[0]
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=search) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            ingest(_documents(), encoder, filters, store, "c")
        for thread in threads:
            thread.join()
    assert faults == []


def test_cost_counts_bytes_and_what_the_index_misses(tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3000, 64), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    done: list[int] = []
    found = measure(vectors[:-50], vectors[-50:], Layout(), tmp_path / "none", done.append)
    assert sum(done) == found.points == 2950 and found.dim == 64 and not found.indexed
    assert 2950 * 64 * 4 <= found.vectors_bytes < 1.5 * 2950 * 64 * 4 + (1 << 20)
    assert (found.index_bytes, found.quantized_bytes, found.recall_at_10) == (0, 0, 1.0)
    assert 0 < found.p50_ms <= found.p95_ms and found.build_seconds > 0
    assert found.searched_bytes == found.vectors_bytes
    binary = measure(vectors[:-50], vectors[-50:], Layout("binary"), tmp_path / "binary")
    assert binary.recall_at_10 < 0.95


def test_bm25_has_a_language_it_knows_and_words_of_scripts_without_spaces():
    with pytest.raises(ConfigError, match="BM25 language 'klingon': expected one of arabic, "):
        Bm25("klingon")
    with pytest.raises(ConfigError, match="average_terms 0: expected a positive number"):
        Bm25(average_terms=0)
    (english,), (cats,) = Bm25().documents(["the cats"]), Bm25().queries(["a cat"])
    assert english.indices == cats.indices and cats.values == [1.0]
    (both,) = Bm25("multilingual").documents(["\u6771\u4eac\u90fd\u306b\u884c\u304f the"])
    assert len(both.indices) > 3
    # One term once in a passage of 2 terms: tf (k + 1) / (tf + k (1 - b + b n / average)), k 1.2, b 0.75.
    (vector,) = Bm25(average_terms=4).documents(["garden fence"])
    np.testing.assert_allclose(vector.values, [2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 4))] * 2, rtol=1e-6)


def test_a_closed_store_stays_closed_and_gives_its_folder_back(encoder, filters, tmp_path):
    first = Store(path=tmp_path / "e", edge=True)
    ingest(_documents()[:5], encoder, filters, first, "c")
    first.close()
    first.close()
    with Store(path=tmp_path / "e") as second:
        for call in (first.names, lambda: first.info("c-raw"), lambda: first.delete("c-raw")):
            with pytest.raises(StoreError, match="is closed"):
                call()
        assert second.names() == ["c-edge-r2", "c-raw"]


@pytest.mark.parametrize("name", ["../c-raw", "../../e/collections/c-raw", "a/b", "..", "x" * 300, "nul\0"])
def test_a_name_is_never_a_path(encoder, filters, tmp_path, name):
    with Store(path=tmp_path / "e", edge=True) as store:
        store.create("c-raw", encoder, filters[0], "c")
        assert not store.exists(name)
        with pytest.raises(StoreError):
            store.info(name)
        with pytest.raises(ConfigError, match="collection name"):
            store.client.create_collection(name, {})


def test_a_lost_mark_hides_nothing(encoder, filters, tmp_path, caplog):
    with Store(path=tmp_path / "e", edge=True) as store:
        ingest(_documents()[:5], encoder, filters, store, "c")
    (tmp_path / "e" / "edge.json").unlink()
    with Store(path=tmp_path / "e") as store:
        assert not store.embedded and store.count("c-raw") == 5
    assert "edge.json was missing" in caplog.text


def test_a_folder_without_its_description_is_named_and_left_alone(encoder, filters, tmp_path):
    with Store(path=tmp_path / "e", edge=True) as store:
        store.create("c-raw", encoder, filters[0], "c")
    folder = tmp_path / "e" / "collections" / "c-raw"
    (folder / "collection.json").unlink()
    with (
        Store(path=tmp_path / "e") as store,
        pytest.raises(StoreError, match=r"c-raw' holds no collection\.json"),
    ):
        store.create("c-raw", encoder, filters[0], "c")
    assert (folder / "shard").is_dir()


def test_a_nearly_full_disk_is_said_before_edge_dies_of_it(encoder, filters, tmp_path, monkeypatch):
    with Store(path=tmp_path / "e", edge=True) as store:
        ingest(_documents()[:5], encoder, filters, store, "c")
        full = shutil.disk_usage(tmp_path)._replace(free=10 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(StoreError, match="is full: 10 MiB are left, and Qdrant Edge needs 256"):
            ingest(_documents(), encoder, filters, store, "c")
    with Store(path=tmp_path / "e") as store:
        with pytest.raises(StoreError, match="Make room"):
            store.count("c-raw")
        store.delete("c-raw")  # which makes room
    monkeypatch.undo()
    with Store(path=tmp_path / "e") as store:
        ingest(_documents(), encoder, filters, store, "c")
        assert store.count("c-raw") == store.count("c-edge-r2") == 300


def test_equal_scores_stand_in_one_order_on_every_engine_and_every_time(encoder, filters, tmp_path):
    """Passages in fives of one wording, so that terms score them alike, and sums of ranks meet."""
    texts = [f"garden fence in colour{i % 9}" + " and more" * (i % 4) for i in range(180)]
    documents = [Document(id_=f"d{i}", text=text) for i, text in enumerate(texts)]
    questions = [f"colour{i} please" for i in range(9)]
    vectors = filters[1].apply(encoder.encode_queries(questions))
    found = []
    for kind in ("embedded", "edge", "again"):
        with Store(path=tmp_path / kind, edge=kind != "embedded") as store:
            ingest(documents, encoder, filters, store, "c", bm25=Bm25())
            for _ in range(2):
                both = store.search("c-edge-r2", vectors, 20, texts=questions, exact=True)
                words = store.search_text("c-edge-r2", questions, 100)
                found.append([[hit.id for hit in each] for each in [*both, *words]])
            ours = EmbFilterVectorStore(store, "c-edge-r2")
            asked = VectorStoreQuery(
                vectors[0].tolist(), 20, query_str=questions[0], mode=VectorStoreQueryMode.HYBRID
            )
            assert ours.query(asked).ids == found[-1][0]
    assert all(each == found[0] for each in found)


def test_the_vector_store_refuses_what_it_cannot_serve(encoder, filters, tmp_path):
    with Store(path=tmp_path / "e", edge=True) as store:
        ingest(_documents()[:20], encoder, filters, store, "plain")
        ingest(_documents()[:20], encoder, filters, store, "words", bm25=Bm25())
        plain, words = (EmbFilterVectorStore(store, f"{base}-edge-r2") for base in ("plain", "words"))
        vector = filters[1].apply(encoder.encode_queries(["text"]))[0].tolist()
        hybrid = VectorStoreQueryMode.HYBRID
        for asked, vectors, said in (
            (VectorStoreQuery(vector, 5, query_str="text", mode=hybrid), plain, "has no BM25 vectors"),
            (VectorStoreQuery(vector, 5, mode=hybrid), words, "needs query_str"),
            (
                VectorStoreQuery(vector, 5, mode=VectorStoreQueryMode.MMR),
                words,
                "expected default, hybrid or sparse",
            ),
        ):
            with pytest.raises(ConfigError, match=said):
                vectors.query(asked)
        assert words.query(VectorStoreQuery(vector, 0, query_str="text", mode=hybrid)).ids == []
        for bad in ([float("nan")] * 16, [0.0] * 16):
            with pytest.raises(EncodingError):
                words.add([TextNode(text="x", embedding=bad)])
        with pytest.raises(FingerprintMismatch, match="16 dimensions"):
            words.add([TextNode(text="x", embedding=[1.0] * 4)])
        with pytest.raises(TypeError, match="holds an open store"):
            pickle.dumps(words)
        assert store.count("words-edge-r2") == 20
        words.clear()
        with pytest.raises(StoreError, match="is not in"):
            words.add([TextNode(text="x", embedding=vector)])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"limit": 0}, "limit 0: expected a whole number from 1"),
        ({"limit": 10**20}, "expected a whole number"),
        ({"where": {'a"b': "1"}}, "without quotation marks"),
        ({"texts": "text"}, "expected a list"),
        ({"vectors": np.full((1, 16), np.nan, np.float32)}, r"query vectors \[0\] hold NaN"),
    ],
)
def test_what_cannot_be_searched_for_is_refused_in_one_line(encoder, filters, tmp_path, wrong, said):
    with Store(path=tmp_path / "e", edge=True) as store:
        ingest(_documents()[:5], encoder, filters, store, "c", bm25=Bm25())
        given = {"vectors": filters[1].apply(encoder.encode_queries(["text"])), **wrong}
        with pytest.raises(ConfigError, match=said) as caught:
            store.search("c-edge-r2", **given)
        assert "\n" not in str(caught.value)
        ones = np.ones((1, 16), np.float32)
        assert store.search("c-edge-r2", ones, where={"source": "\ud800"}) == [[]]
        assert store.search_text("c-edge-r2", ["caf\udcff text"], 1)[0]


def test_somebody_elses_collection_blocks_no_base_and_its_metadata_no_look(encoder, filters, tmp_path):
    with Store(path=tmp_path / "e", edge=True) as store:
        size = models.VectorParams(size=4, distance=models.Distance.COSINE)
        store.client.create_collection("c-theirs", size)
        store.client.create_collection("c-odd", {"text-dense": size}, metadata={"embfilter": "x"})
        assert siblings(encoder, store, "c", ()) == ([], [])
        assert store.info("c-odd").fingerprint is None
        ingest(_documents()[:5], encoder, filters, store, "c")
        store.switch("live", "c-raw")
        with pytest.raises(StoreError, match="readers find as 'live'"):
            store.delete("c-raw")
        store.delete("c-raw", force=True)
        assert store.aliases() == {}
