"""Ingestion: one pass for all filters, nothing twice, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from llama_index.core.schema import Document

from rag_embfilter import EmbFilter, Encoder, ingest
from rag_embfilter.errors import ConfigError
from rag_embfilter.passes import Passes
from rag_embfilter.refiltering import Refiltered, refilter
from tests import tiny


@pytest.fixture(scope="module")
def filters(encoder) -> list[EmbFilter]:
    return [
        EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 2), ("edge", 4), ("tail", 4))
    ]


NAMES = ["c-raw", "c-edge-r2", "c-edge-r4", "c-tail-r4"]


def _corpus(**texts: str) -> list[Document]:
    return [Document(id_=name, text=text) for name, text in texts.items()]


def _contents(store, name):
    """Text by document id."""
    records, _ = store.client.scroll(name, limit=1000)
    return sorted((r.payload["doc_id"], r.payload["chunk"], str(r.id)) for r in records)


def _counts(report):
    """Documents added, changed, removed, unchanged, failed."""
    failed = len({document for document, _ in report.failed})
    return report.added, report.changed, report.removed, report.unchanged, failed


def test_one_pass_fills_every_collection_with_the_same_points(store, encoder, filters):
    with tiny.ForwardCounter(encoder) as counter:
        report = ingest(_corpus(a="alpha", b="beta", c="gamma"), encoder, filters, store, "c")
    assert counter.texts == 3
    assert report.collections == NAMES
    assert (report.documents, report.nodes, report.encoded, report.nodes_unchanged) == (3, 3, 3, 0)
    contents = [_contents(store, name) for name in NAMES]
    assert all(content == contents[0] for content in contents) and len(contents[0]) == 3
    raw = store.vectors("c-raw", [point for _, _, point in contents[0]])
    for embfilter, name in zip(filters, NAMES, strict=True):
        stored = store.vectors(name, [point for _, _, point in contents[0]])
        np.testing.assert_allclose(stored, embfilter.apply(raw), atol=1e-6)


def test_c03_again_changed_and_emptied(store, encoder, filters):
    texts = {f"d{i}": f"text number {i}" for i in range(5)}
    ingest(_corpus(**texts), encoder, filters, store, "c")
    before = _contents(store, "c-raw")
    with tiny.ForwardCounter(encoder) as counter:
        again = ingest(_corpus(**texts), encoder, filters, store, "c")
    assert (counter.texts, again.nodes_unchanged, again.points_removed) == (0, 5, 0)
    assert _contents(store, "c-raw") == before

    texts["d2"] = "something else"
    with tiny.ForwardCounter(encoder) as counter:
        changed = ingest(_corpus(**texts), encoder, filters, store, "c")
    assert (counter.texts, changed.encoded, changed.nodes_unchanged) == (1, 1, 4)
    assert changed.points_removed == len(NAMES)  # one former point in each collection
    for name in NAMES:
        after = _contents(store, name)
        assert [c for c in after if c[0] != "d2"] == [c for c in before if c[0] != "d2"]
        assert len(after) == 5


def test_each_document_is_counted_once_whatever_its_chunks_and_windows(store, encoder, filters, monkeypatch):
    """Sources of three documents of two or three chunks each, in windows that cut through both."""
    monkeypatch.setattr("rag_embfilter.ingestion.WINDOW", 4)

    def run(filters=filters[:2], incomplete=(), **texts):
        documents = [Document(id_=name, text=t, metadata={"source": name[0]}) for name, t in texts.items()]
        sizes = {"chunk_size": 20, "chunk_overlap": 0}
        return _counts(ingest(documents, encoder, filters, store, "c", incomplete=incomplete, **sizes))

    texts = {f"{s}{i}": f"Part one of {s}{i}. Part two of {s}{i}." for s in "ab" for i in range(3)}
    assert run(**texts) == (6, 0, 0, 0, 0)
    assert run(**texts) == (0, 0, 0, 6, 0)
    assert run(filters, **texts) == (0, 0, 0, 6, 0)  # a filter that only lacked them changes none
    longer = texts | {"a1": texts["a1"] + " Part three of a1."}
    assert run(**longer) == (0, 1, 0, 5, 0)
    assert run(**texts) == (0, 1, 0, 5, 0)  # a chunk less, none new
    del texts["a0"], texts["b2"]
    new = {"a9": "Something new.", "b1": "", "c0": "One more."}
    assert run(incomplete={"a"}, **dict(sorted((texts | new).items()))) == (2, 0, 1, 3, 1)
    assert run(**dict(sorted((texts | new).items()))) == (0, 0, 1, 5, 1)


def test_what_only_the_raw_collection_holds_is_no_new_document(store, encoder, filters):
    ingest(_corpus(a="alpha", b="beta"), encoder, filters[:1], store, "c")
    report = ingest(_corpus(a="alpha", b="beta two", c="gamma"), encoder, filters[1:], store, "c")
    assert _counts(report) == (1, 1, 0, 1, 0)


def test_a_run_asks_the_store_little(store, encoder, filters, monkeypatch):
    """Two look-ups a collection and window: what is there, and what was there before."""
    corpus = _corpus(**{f"d{i}": f"text {i}" for i in range(40)})
    ingest(corpus, encoder, filters, store, "c")
    corpus[3].set_content("another text")
    asked = []
    for name in ("retrieve", "scroll"):
        real = getattr(store.client, name)
        monkeypatch.setattr(
            store.client, name, lambda *a, real=real, name=name, **k: asked.append(name) or real(*a, **k)
        )
    ingest(corpus, encoder, filters, store, "c")
    assert sorted(asked) == ["retrieve"] * len(NAMES) + ["scroll"] * len(NAMES)


def test_c04_an_encoder_that_raises_loses_nothing(store, encoder, filters):
    """(a) the former version stays until a run succeeds; (b) an empty store gets all of the second run."""

    def dying(*args, **kwargs):
        raise RuntimeError("the device is gone")

    def texts():
        return [[node.text for page in store.pages(name) for node in page.nodes] for name in NAMES]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="the device is gone"):
        patch.setattr(Passes, "forward", dying)
        ingest(_corpus(d="version one"), encoder, filters, store, "c")
    assert texts() == [[]] * 4
    assert _counts(ingest(_corpus(d="version one"), encoder, filters, store, "c")) == (1, 0, 0, 0, 0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(Passes, "forward", dying)
        ingest(_corpus(d="version two"), encoder, filters, store, "c")
    assert texts() == [["version one"]] * 4
    (hits,) = store.search("c-edge-r2", filters[1].apply(encoder.encode_queries(["version one"])))
    assert [hit.text for hit in hits] == ["version one"]
    assert _counts(ingest(_corpus(d="version two"), encoder, filters, store, "c")) == (0, 1, 0, 0, 0)
    assert texts() == [["version two"]] * 4


def test_c04_the_sixth_of_ten_documents_fails(store, encoder, filters):
    corpus = _corpus(**{f"d{i}": f"text {i}" + " #" * (i == 5) for i in range(10)})
    with tiny.Spoil(encoder, "#", float("nan")):
        report = ingest(corpus, encoder, filters, store, "c")
    assert [document for document, _ in report.failed] == ["d5"] and _counts(report) == (9, 0, 0, 0, 1)
    with tiny.ForwardCounter(encoder) as counter:
        report = ingest(corpus, encoder, filters, store, "c")
    assert counter.texts == 1 and _counts(report) == (1, 0, 0, 9, 0)


def test_two_documents_with_one_text_stay_two(store, encoder, filters):
    report = ingest(_corpus(a="same", b="same"), encoder, filters, store, "c")
    assert report.encoded == 2
    assert [c[0] for c in _contents(store, "c-edge-r2")] == ["a", "b"]


def test_a_document_that_shrinks_loses_only_its_last_chunks(store, encoder, filters):
    long = " ".join(f"Sentence number {i} stands here." for i in range(12))
    ingest(_corpus(a=long, b=long), encoder, filters, store, "c", chunk_size=64, chunk_overlap=0)
    full = _contents(store, "c-raw")
    short = long[: len(long) // 2]
    ingest(_corpus(a=short, b=long), encoder, filters, store, "c", chunk_size=64, chunk_overlap=0)
    after = _contents(store, "c-raw")
    assert [c for c in after if c[0] == "b"] == [c for c in full if c[0] == "b"]
    assert 0 < len([c for c in after if c[0] == "a"]) < len([c for c in full if c[0] == "a"])


def test_a_new_filter_comes_from_the_raw_collection_without_a_pass(store, encoder, filters):
    corpus = _corpus(a="alpha", b="beta")
    ingest(corpus, encoder, filters[:1], store, "c")
    with tiny.ForwardCounter(encoder) as counter:
        report = ingest(corpus, encoder, filters, store, "c")
    assert (counter.texts, report.refiltered, report.encoded) == (0, 2, 0)
    ids = [point for _, _, point in _contents(store, "c-raw")]
    expected = filters[3].apply(encoder.encode_documents(["alpha", "beta"]))
    stored = dict(zip(ids, store.vectors("c-tail-r4", ids), strict=True))
    for (doc, _, point), row in zip(_contents(store, "c-raw"), expected, strict=True):
        np.testing.assert_allclose(stored[point], row, atol=1e-5, err_msg=doc)


def test_a_raw_collection_of_another_encoder_is_no_source(store, llama, encoder, filters):
    ingest(_corpus(a="alpha"), encoder, filters[:1], store, "c")
    other = Encoder(str(llama), template="echo", device="cpu")
    report = ingest(_corpus(a="alpha"), other, [EmbFilter.from_encoder(other, "edge", 2)], store, "c")
    assert (report.refiltered, report.encoded) == (0, 1)


def test_c04_a_failing_document_keeps_its_former_version_and_the_rest_is_stored(store, encoder, filters):
    ingest(_corpus(a="alpha", b="beta one"), encoder, filters, store, "c")
    former = [c for c in _contents(store, "c-raw") if c[0] == "b"]
    with tiny.Spoil(encoder, "#", float("nan")):
        report = ingest(_corpus(a="alpha two", b="beta # two", c="gamma"), encoder, filters, store, "c")
    ((document, reason),) = report.failed
    assert document == "b" and "NaN" in reason and _counts(report) == (1, 1, 0, 0, 1)
    for name in NAMES:
        assert [c for c in _contents(store, name) if c[0] == "b"] == former
        assert [c[0] for c in _contents(store, name)] == ["a", "b", "c"]
    with tiny.ForwardCounter(encoder) as counter:
        ingest(_corpus(a="alpha two", b="beta # two", c="gamma"), encoder, filters, store, "c")
    assert counter.texts == 1  # only what was missing
    after = [c for c in _contents(store, "c-raw") if c[0] == "b"]
    assert len(after) == 1 and after != former


def test_c04_a_run_that_dies_converges_on_the_next(store, encoder, filters, monkeypatch):
    """Killed after some collections were written: no duplicates, no gaps, and no second pass."""
    real, calls = store.upsert, []

    def dying(name, nodes, vectors):
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(name, nodes, vectors)

    corpus = _corpus(**{f"d{i}": f"text {i}" for i in range(10)})
    monkeypatch.setattr(store, "upsert", dying)
    with pytest.raises(KeyboardInterrupt):
        ingest(corpus, encoder, filters, store, "c")
    monkeypatch.setattr(store, "upsert", real)
    with tiny.ForwardCounter(encoder) as counter:
        report = ingest(corpus, encoder, filters, store, "c")
    assert (counter.texts, report.refiltered, report.failed) == (0, 10, [])
    assert all(store.info(name).points == 10 for name in NAMES)


def test_c11_empty_documents_are_skipped_and_reported(store, encoder, filters):
    report = ingest(_corpus(a="alpha", b="", c=" \n", d="x\ud800"), encoder, filters, store, "c")
    empty = "the text is empty or only white space"
    invalid = "the text is not valid Unicode (surrogates not allowed at 1)"
    assert report.failed == [("b", empty), ("c", empty), ("d", invalid)]
    assert store.info("c-raw").points == 1


def test_a_vector_that_one_filter_removes_fails_for_that_filter_alone(store, encoder, filters, monkeypatch):
    direction = encoder.spectrum().directions[0]  # removed by edge, kept by raw and tail

    def forced(texts, **kwargs):
        return np.stack([direction if text == "gone" else np.roll(direction, 1) for text in texts])

    monkeypatch.setattr(encoder, "encode_documents", forced)
    report = ingest(_corpus(a="alpha", b="gone"), encoder, filters, store, "c")
    assert [store.info(name).points for name in NAMES] == [2, 1, 1, 2]
    assert {document for document, _ in report.failed} == {"b"}


def test_sources_not_read_whole_lose_nothing(store, encoder, filters):
    def records(*names):
        return [Document(id_=f"f#{n}", text=f"text {n}", metadata={"source": "f"}) for n in names]

    ingest(records("1", "2", "3"), encoder, filters, store, "c")
    ingest(records("1"), encoder, filters, store, "c", incomplete={"f"})
    assert store.info("c-raw").points == 3
    ingest(records("1"), encoder, filters, store, "c")
    assert store.info("c-raw").points == 1


def test_documents_of_a_source_must_follow_each_other(store, encoder, filters, monkeypatch):
    monkeypatch.setattr("rag_embfilter.ingestion.WINDOW", 1)
    documents = [Document(id_=f"{s}{i}", text=f"{s}{i}", metadata={"source": s}) for i, s in enumerate("aba")]
    with pytest.raises(ConfigError, match="sort the documents by source"):
        ingest(documents, encoder, filters, store, "c")


def test_many_windows_with_sources_across_them(store, encoder, filters, monkeypatch):
    monkeypatch.setattr("rag_embfilter.ingestion.WINDOW", 4)

    def documents(skip=()):
        return [
            Document(id_=f"{s}#{i}", text=f"text {s} {i}", metadata={"source": s})
            for s in "abc"
            for i in range(5)
            if (s, i) not in skip
        ]

    ingest(documents(), encoder, filters, store, "c")
    assert store.info("c-raw").points == 15
    report = ingest(documents(skip={("a", 0), ("b", 4)}), encoder, filters, store, "c")
    assert report.points_removed == 2 * len(NAMES)
    assert _counts(report) == (0, 0, 2, 13, 0)
    assert {c[0] for c in _contents(store, "c-tail-r4")} == {d.id_ for d in documents({("a", 0), ("b", 4)})}


def test_no_filter_or_one_twice_is_refused(store, encoder, filters):
    for bad in ([], [filters[1], filters[1]]):
        with pytest.raises(ConfigError, match="at least one, and no two alike"):
            ingest(_corpus(a="alpha"), encoder, bad, store, "c")


def test_chunk_size_over_max_length_is_refused(store, encoder, filters):
    with pytest.raises(ConfigError, match="over the encoder's max_length 512"):
        ingest(_corpus(a="alpha"), encoder, filters, store, "c", chunk_size=513)
    assert store.names() == []


def test_progress_counts_every_node_once(store, encoder, filters):
    for _ in range(2):
        seen = []
        ingest(_corpus(a="alpha", b="beta", c=""), encoder, filters, store, "c", progress=seen.append)
        assert sum(seen) == 2


def test_refilter_leaves_out_what_a_filter_removes_and_brings_the_rest(store, encoder, filters, monkeypatch):
    direction = encoder.spectrum().directions[0]  # removed by edge

    def forced(texts, **kwargs):
        return np.stack([direction if text == "gone" else np.roll(direction, 1) for text in texts])

    monkeypatch.setattr(encoder, "encode_documents", forced)
    ingest(_corpus(a="alpha", b="gone"), encoder, filters[:1], store, "c")
    store.create("c-edge-r2", encoder, filters[1], "c")
    assert refilter(store, "c-raw", {"c-edge-r2": filters[1]})["c-edge-r2"] == Refiltered(
        written=1, left_out=1
    )
    assert [c[0] for c in _contents(store, "c-edge-r2")] == ["a"]


def test_a_window_that_a_filter_removes_whole_is_reported(store, encoder, filters, monkeypatch):
    direction = encoder.spectrum().directions[0]
    monkeypatch.setattr(
        encoder, "encode_documents", lambda texts, **kwargs: np.stack([direction] * len(texts))
    )
    report = ingest(_corpus(a="gone"), encoder, filters[:2], store, "c")
    assert [document for document, _ in report.failed] == ["a"]
    assert (store.info("c-raw").points, store.info("c-edge-r2").points) == (1, 0)
