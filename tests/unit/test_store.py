"""The store: fingerprints before everything (C01, C02), what is written, and what LlamaIndex reads."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
from llama_index.core.schema import Document, TextNode
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient, models

from rag_embfilter import EmbFilter, Encoder, Store, ingest
from rag_embfilter.errors import ConfigError, EncodingError, FingerprintMismatch, StoreError
from rag_embfilter.store import collection_name
from rag_embfilter.store.points import BATCH_BYTES, BATCH_POINTS, Page
from tests import tiny


@pytest.fixture(scope="module")
def edge(encoder) -> EmbFilter:
    return EmbFilter.from_encoder(encoder, "edge", 4)  # 8 dimensions


@pytest.fixture(scope="module")
def tail(encoder) -> EmbFilter:
    return EmbFilter.from_encoder(encoder, "tail", 4)  # 8 dimensions too


def _documents(*texts: str) -> list[Document]:
    return [Document(id_=f"d{i}", text=text) for i, text in enumerate(texts)]


def _nodes(*texts: str) -> list[TextNode]:
    return [
        TextNode(text=text, id_=f"{i:032x}", metadata={"source": f"s{i}"}) for i, text in enumerate(texts)
    ]


def _require(store, name, encoder, embfilter, writing):
    store.require(name, encoder.fingerprint | embfilter.fingerprint, embfilter.dim, writing)


def test_c01_same_size_other_filter_is_refused_before_a_forward_pass(store, encoder, edge, tail):
    ingest(_documents("one", "two", "three"), encoder, [edge], store, "c")
    name = collection_name("c", edge)
    with tiny.ForwardCounter(encoder) as counter:
        with pytest.raises(FingerprintMismatch) as caught:
            _require(store, name, encoder, tail, writing=True)
        with pytest.raises(FingerprintMismatch):
            _require(store, name, encoder, tail, writing=False)
    ours, stored = (
        (encoder.fingerprint | tail.fingerprint).digest,
        (encoder.fingerprint | edge.fingerprint).digest,
    )
    assert ours in str(caught.value) and stored in str(caught.value)
    assert "filter_type: 'tail' != 'edge'" in str(caught.value)
    assert counter.texts == 0
    assert store.info(name).points == 3


@pytest.mark.parametrize(
    ("other", "part"),
    [
        ({"template": "echo"}, "template"),
        ({"max_length": 99}, "truncation"),
        ({"pooling": "mean"}, "pooling"),
    ],
)
def test_c01_another_encoder_is_refused_by_ingest_itself(store, llama, encoder, edge, other, part):
    ingest(_documents("one", "two", "three"), encoder, [edge], store, "c")
    changed = Encoder(str(llama), device="cpu", **other)
    with tiny.ForwardCounter(changed) as counter, pytest.raises(FingerprintMismatch, match=f"  {part}: "):
        ingest(_documents("four"), changed, [edge], store, "c", chunk_size=64)
    assert counter.texts == 0
    assert store.info("c-edge-r4").points == 3


def test_c01_a_refused_run_makes_no_new_collection(store, llama, encoder, edge, tail):
    ingest(_documents("one"), encoder, [edge], store, "c")
    changed = Encoder(str(llama), device="cpu", template="echo")
    with pytest.raises(FingerprintMismatch):
        ingest(_documents("one"), changed, [tail, edge], store, "c")
    assert store.names() == ["c-edge-r4"]


def _foreign(store: Store, name: str, dim: int) -> None:
    """A collection that somebody else made, with three points and no fingerprint."""
    vectors = {"text-dense": models.VectorParams(size=dim, distance=models.Distance.COSINE)}
    store.client.create_collection(name, vectors_config=vectors)
    store.upsert(name, _nodes("a", "b", "c"), np.eye(3, dim, dtype=np.float32))


def test_c01_without_a_fingerprint_reading_warns_and_writing_needs_adoption(store, encoder, edge, caplog):
    _foreign(store, "c-edge-r4", 8)
    _require(store, "c-edge-r4", encoder, edge, writing=False)
    assert "no fingerprint" in caplog.text
    with tiny.ForwardCounter(encoder) as counter, pytest.raises(FingerprintMismatch, match="Adopt it"):
        ingest(_documents("one"), encoder, [edge], store, "c")
    assert counter.texts == 0
    store.adopt("c-edge-r4", encoder, edge)
    ingest(_documents("one"), encoder, [edge], store, "c")
    assert store.info("c-edge-r4").points == 4


def test_c01_the_override_exists_and_is_logged(store, encoder, edge, tail, caplog):
    ingest(_documents("one"), encoder, [edge], store, "c")
    with pytest.raises(FingerprintMismatch, match="filter_type"):
        store.adopt("c-edge-r4", encoder, tail)
    with caplog.at_level(logging.WARNING):
        store.adopt("c-edge-r4", encoder, tail, override=True)
    assert (encoder.fingerprint | tail.fingerprint).digest in caplog.text
    _require(store, "c-edge-r4", encoder, tail, writing=True)


def test_c02_another_size_is_refused_first_and_nothing_dropped(store, encoder, edge):
    _foreign(store, "c-edge-r4", 4)
    documents = _documents(*[f"text {i}" for i in range(50)])
    with tiny.ForwardCounter(encoder) as counter, pytest.raises(FingerprintMismatch) as caught:
        ingest(documents, encoder, [edge], store, "c")
    for part in ("c-edge-r4", "4 dimensions", "these have 8", "another collection name", "ingest again"):
        assert part in str(caught.value)
    with pytest.raises(FingerprintMismatch):
        _require(store, "c-edge-r4", encoder, edge, writing=False)
    assert counter.texts == 0
    assert store.info("c-edge-r4").points == 3
    with pytest.raises(FingerprintMismatch, match="cannot be adopted"):
        store.adopt("c-edge-r4", encoder, edge)


def test_the_collection_says_what_made_it(store, encoder, edge):
    ingest(_documents("one"), encoder, [edge], store, "c")
    info = store.info("c-edge-r4")
    assert info.fingerprint == encoder.fingerprint | edge.fingerprint
    assert info.settings["model_name"] == encoder.backbone.name
    assert {
        k: info.settings[k] for k in ("template", "pooling", "max_length", "filter_type", "filter_ratio")
    } == {
        "template": "prompteol",
        "pooling": "last",
        "max_length": 512,
        "filter_type": "edge",
        "filter_ratio": 4,
    }
    assert info.made["compute_dtype"] == "float32"


def test_everything_survives_a_reopen(tmp_path, encoder, edge):
    with Store(path=tmp_path / "q") as store:
        ingest(_documents("one", "two"), encoder, [edge], store, "c")
        before = store.info("c-edge-r4")
    with Store(path=tmp_path / "q") as store:
        assert store.info("c-edge-r4") == before


def test_stored_vectors_are_the_filtered_ones(store, encoder, edge):
    ingest(_documents("one", "two"), encoder, [edge], store, "c")
    expected = edge.apply(encoder.encode_documents(["one", "two"]))
    ids = sorted(
        store.points_of("c-edge-r4", ["d0", "d1"]),
        key=lambda i: store.points_of("c-edge-r4", ["d0"]).get(i) is None,
    )
    np.testing.assert_allclose(store.vectors("c-edge-r4", ids), expected, atol=1e-6)


def test_search_is_exact_cosine_with_places_and_filters(store):
    vectors = models.VectorParams(size=3, distance=models.Distance.COSINE)
    store.client.create_collection("c", vectors_config={"text-dense": vectors})
    nodes = [
        TextNode(
            text="a", id_=f"{1:032x}", metadata={"source": "f.pdf", "page": "3", "year": 2024, "draft": True}
        ),
        TextNode(
            text="b", id_=f"{2:032x}", metadata={"source": "g.txt", "line": 7, "year": "2024", "draft": False}
        ),
        TextNode(text="c", id_=f"{3:032x}", metadata={"source": "h.md", "chunk": 0, "year": 2023}),
    ]
    store.upsert("c", nodes, np.array([[1, 0, 0], [0, 2, 0], [1, 1, 0]], dtype=np.float32))
    (hits,) = store.search("c", np.array([[1, 0.2, 0]], dtype=np.float32))
    assert [h.text for h in hits] == ["a", "c", "b"]
    np.testing.assert_allclose(
        [h.score for h in hits], [1 / 1.04**0.5, 1.2 / (2 * 1.04) ** 0.5, 0.2 / 1.04**0.5], atol=1e-6
    )
    assert [h.place for h in hits] == ["f.pdf, page 3", "h.md, chunk 0", "g.txt, line 7"]

    def where(**conditions):
        (found,) = store.search("c", np.array([[1, 0, 0]], dtype=np.float32), where=conditions)
        return sorted(h.text for h in found)

    assert where(year="2024") == ["a", "b"]
    assert where(draft="true") == ["a"]
    assert where(year="2024", source="g.txt") == ["b"]
    assert where(nothing="1") == []


def test_llama_index_reads_the_payload_back_whole(store, encoder, edge):
    document = Document(id_="d", text="body", metadata={"title": "Head", "source": "s.txt", "tag": "x"})
    ingest([document], encoder, [edge], store, "c")
    vector_store = QdrantVectorStore(collection_name="c-edge-r4", client=store.client)
    assert vector_store.dense_vector_name == "text-dense"
    (node,) = vector_store.get_nodes(filters=None, node_ids=list(store.points_of("c-edge-r4", ["s.txt"])))
    assert node.text == "Head body"
    assert node.ref_doc_id == "d"
    assert node.metadata == {"title": "Head", "source": "s.txt", "tag": "x", "chunk": 0}
    vector_store.delete("d")
    assert store.info("c-edge-r4").points == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_c11_no_bad_vector_is_ever_sent(store, value):
    _foreign(store, "c", 8)
    vectors = np.ones((3, 8), dtype=np.float32)
    vectors[1] = value
    with pytest.raises(EncodingError, match="item 1"):
        store.upsert("c", [TextNode(text=t, id_=f"{9 + i:032x}") for i, t in enumerate("xyz")], vectors)
    assert store.info("c").points == 3


def test_batches_are_bounded_in_number_and_in_bytes():
    small = [TextNode(text="t") for _ in range(600)]
    sizes = [len(b) for b in Page.of_nodes(small, np.ones((600, 4), np.float32)).batches()]
    assert sizes == [BATCH_POINTS, BATCH_POINTS, 600 - 2 * BATCH_POINTS]
    large = [TextNode(text="글" * 500_000) for _ in range(12)]
    batches = list(Page.of_nodes(large, np.ones((12, 4), np.float32)).batches())
    for batch in batches:
        assert sum(len(json.dumps(p.model_dump(mode="json"))) for p in batch) < 32 << 20
    assert sum(map(len, batches)) == 12 and BATCH_BYTES < 32 << 20


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", "a:b", "a\nb", "x" * 300, 'q"'])
def test_names_that_cannot_be(store, encoder, edge, name):
    with pytest.raises(ConfigError, match="collection name"):
        store.create(name, encoder, edge, "base")


def test_a_korean_name_is_fine(store, encoder, edge):
    ingest(_documents("one"), encoder, [edge], store, "문서")
    assert store.names() == ["문서-edge-r4"]


def test_a_missing_collection_lists_what_is_there(store, encoder, edge):
    ingest(_documents("one"), encoder, [edge], store, "c")
    for call in (store.info, store.delete):
        with pytest.raises(StoreError, match=r"'nope' is not in .*c-edge-r4"):
            call("nope")


def test_a_second_process_gets_one_clear_message(tmp_path):
    code = (
        "import sys; from rag_embfilter import Store\n"
        "from rag_embfilter.errors import StoreError\n"
        "try: Store(path=sys.argv[1])\n"
        "except StoreError as e: print(e)"
    )
    with Store(path=tmp_path / "q"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "q")], capture_output=True, text=True, check=True
        )
    assert "in use by another process" in done.stdout and "--qdrant-url" in done.stdout


def test_paths_that_cannot_be_a_store(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        Store(path=tmp_path / "file")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "meta.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(path=tmp_path / "bad")
    with pytest.raises(ConfigError, match="exactly one"):
        Store()
    with pytest.raises(ConfigError, match="exactly one"):
        Store(path=tmp_path, url="http://localhost:1")


def test_a_server_that_is_not_there():
    with pytest.raises(StoreError, match=r"cannot reach Qdrant at http://localhost:9.*docker compose up"):
        Store(url="http://localhost:9", timeout=2)


def test_a_server_without_collection_metadata_is_refused_and_left_clean(store, encoder, edge, monkeypatch):
    real = store.client.create_collection

    def old_server(name, *, metadata=None, **kwargs):  # accepts the field and forgets it
        return real(name, **kwargs)

    monkeypatch.setattr(store.client, "create_collection", old_server)
    with pytest.raises(StoreError, match=r"Qdrant 1\.16 or later"):
        ingest(_documents("one"), encoder, [edge], store, "c")
    assert store.names() == []


def test_a_given_client_is_not_closed(encoder, edge):
    client = QdrantClient(location=":memory:")
    with Store(client=client) as store:
        ingest(_documents("one"), encoder, [edge], store, "c")
    assert client.get_collection("c-edge-r4").points_count == 1


def test_threads_take_turns(store, encoder, edge):
    ingest(_documents(*[f"text {i}" for i in range(40)]), encoder, [edge], store, "c")
    vectors = edge.apply(encoder.encode_queries(["text 3"]))
    failures = []

    def read_and_write(n):
        try:
            for i in range(10):
                store.upsert("c-edge-r4", [TextNode(text="n", id_=f"{1000 + 10 * n + i:032x}")], vectors)
                assert len(store.search("c-edge-r4", vectors, limit=5)[0]) == 5
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read_and_write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.info("c-edge-r4").points == 80


def test_an_alias_is_switched_in_one_step_back_and_never_to_something_else(store, encoder, edge, tail):
    nodes = [TextNode(text=t, id_=f"{9 + i:032x}") for i, t in enumerate("xyz")]
    raw = encoder.encode_documents(["x", "y", "z"])
    for embfilter in (edge, tail):
        store.create(f"c-{embfilter.name}", encoder, embfilter, "c")
        store.upsert(f"c-{embfilter.name}", nodes, embfilter.apply(raw))
    old, new = f"c-{edge.name}", f"c-{tail.name}"
    assert store.switch("live", old) is None
    reader = store.info("live")  # a reader that began before the switch
    assert reader.name == old
    assert store.switch("live", new) == old and store.info("live").name == new
    hits = store.search(reader.name, edge.apply(raw[:1]), fingerprint=reader.fingerprint)
    assert hits[0][0].text == "x"
    assert store.switch("live", old) == new
    store.remove(new, [nodes[0].id_])
    with pytest.raises(StoreError, match="holds 2 points, and 'c-.*', which 'live' stands for, 3"):
        store.switch("live", new)
    assert store.aliases() == {"live": old}
    assert store.switch("live", new, force=True) == old
    with pytest.raises(StoreError, match="is a collection; an alias needs"):
        store.switch(old, new)
    with pytest.raises(StoreError, match="'zz' is not in"):
        store.switch("live", "zz")
    _foreign(store, "theirs", 8)
    with pytest.raises(StoreError, match="has no fingerprint; adopt it first"):
        store.switch("live", "theirs")


def test_an_alias_is_read_through_and_never_deleted(store, encoder, edge):
    ingest(_documents("one"), encoder, [edge], store, "c")
    change = models.CreateAlias(collection_name="c-edge-r4", alias_name="live")
    store.client.update_collection_aliases([models.CreateAliasOperation(create_alias=change)])
    assert store.info("live").fingerprint == encoder.fingerprint | edge.fingerprint
    assert len(store.search("live", edge.apply(encoder.encode_queries(["one"])))[0]) == 1
    with pytest.raises(StoreError, match="is an alias"):
        store.delete("live")
    assert store.names() == ["c-edge-r4"]


def test_a_collection_with_an_unnamed_vector_is_refused(store):
    store.client.create_collection("c", models.VectorParams(size=3, distance=models.Distance.COSINE))
    with pytest.raises(StoreError, match="no vector named 'text-dense'"):
        store.info("c")


def test_a_relative_backbone_path_is_kept_absolute(store, llama, monkeypatch):
    monkeypatch.chdir(llama.parent)
    encoder = Encoder(llama.name, device="cpu")
    ingest(_documents("one"), encoder, [EmbFilter.from_encoder(encoder)], store, "c")
    assert store.info("c-edge-r2").settings["model_name"] == str(llama.resolve())
