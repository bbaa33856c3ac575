"""Fitted filters on a store: fitted once, found again, refitted on the query side, searched from anywhere."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llama_index.core.schema import Document

from pipelines.app import main
from rag_embfilter import EmbFilter, EmbFilterEmbedding, Store, ingest
from rag_embfilter.errors import FingerprintMismatch, StoreError
from rag_embfilter.fitting import FilterSpec, fit, sample, stand_in_questions
from tests import tiny

DOCUMENTS = [Document(id_=f"d{i}", text=f"Topic {i} is number {i * 7}. More on it.") for i in range(60)]
QUESTIONS = [f"what about {i}?" for i in range(8)]
SPEC = FilterSpec("calibrated", 4)


@pytest.fixture
def filled(store, encoder) -> Store:
    ingest(DOCUMENTS, encoder, [EmbFilter.from_encoder(encoder, "raw")], store, "c")
    return store


def test_fitted_on_the_raw_collection_without_a_pass_over_passages(filled, encoder):
    with tiny.ForwardCounter(encoder) as counter:
        made = fit(SPEC, encoder, filled, "c", QUESTIONS)
    assert counter.texts == len(QUESTIONS)
    direct = EmbFilter.from_encoder(
        encoder,
        "calibrated",
        4,
        corpus=encoder.encode_documents([d.text for d in DOCUMENTS]),
        queries=encoder.encode_queries(QUESTIONS),
    )
    x = encoder.encode_documents(["Topic 3", "elsewhere"])
    np.testing.assert_allclose(made.apply(x), direct.apply(x), atol=1e-3)
    np.testing.assert_allclose(made.query_mean, direct.query_mean, atol=1e-6)


def test_the_collection_keeps_its_filter_and_new_documents_join_it(filled, encoder):
    made = fit(SPEC, encoder, filled, "c", QUESTIONS)
    ingest(DOCUMENTS, encoder, [made], filled, "c")
    more = [*DOCUMENTS, Document(id_="new", text="A new one.")]
    ingest(more, encoder, [EmbFilter.from_encoder(encoder, "raw")], filled, "c")
    with tiny.ForwardCounter(encoder) as counter:
        again = fit(SPEC, encoder, filled, "c")  # no questions: the kept ones stay
    assert counter.texts == 0
    assert again.fingerprint.digest == made.fingerprint.digest
    np.testing.assert_array_equal(again.query_mean, made.query_mean)
    report = ingest(more, encoder, [again], filled, "c")
    assert (report.refiltered, report.encoded) == (1, 0)
    assert filled.info("c-calibrated-r4").points == 61


def test_refitting_the_query_mean_touches_no_vector(filled, encoder):
    made = fit(SPEC, encoder, filled, "c", QUESTIONS)
    ingest(DOCUMENTS, encoder, [made], filled, "c")
    ids = sorted(filled.points_of("c-calibrated-r4", [d.id_ for d in DOCUMENTS]))
    before = filled.vectors("c-calibrated-r4", ids)
    other = made.with_queries(encoder.encode_queries(QUESTIONS[:5]))
    filled.set_query_mean("c-calibrated-r4", other)
    np.testing.assert_array_equal(filled.vectors("c-calibrated-r4", ids), before)
    np.testing.assert_array_equal(filled.filter_of("c-calibrated-r4").query_mean, other.query_mean)
    assert filled.info("c-calibrated-r4").fingerprint == encoder.fingerprint | made.fingerprint


def test_another_fit_cannot_join_nor_give_its_mean(filled, encoder):
    made = fit(SPEC, encoder, filled, "c", QUESTIONS)
    ingest(DOCUMENTS, encoder, [made], filled, "c")
    other = EmbFilter.from_encoder(
        encoder, "calibrated", 4, corpus=encoder.encode_documents([f"x{i}" for i in range(40)])
    )
    with pytest.raises(FingerprintMismatch, match="fit: "):
        ingest(DOCUMENTS, encoder, [other], filled, "c")
    with pytest.raises(FingerprintMismatch, match="fit: "):
        filled.set_query_mean("c-calibrated-r4", other)


def test_a_missing_filter_file_says_where_it_should_be(filled, encoder):
    made = fit(SPEC, encoder, filled, "c", QUESTIONS)
    ingest(DOCUMENTS, encoder, [made], filled, "c")
    for file in filled.filter_dir.iterdir():
        file.unlink()
    with pytest.raises(StoreError, match=r"needs its fitted filter, .*safetensors.*--filter-dir"):
        filled.filter_of("c-calibrated-r4")


def test_no_raw_collection_is_a_clear_error(store, encoder):
    with pytest.raises(StoreError, match="'c-raw', which is not there; ingest raw"):
        fit(SPEC, encoder, store, "c")


def test_the_embedder_of_a_fitted_collection_queries_apart(filled, encoder):
    made = fit(SPEC, encoder, filled, "c", QUESTIONS)
    ingest(DOCUMENTS, encoder, [made], filled, "c")
    info = filled.info("c-calibrated-r4")
    embedding = EmbFilterEmbedding(**info.settings, fingerprint=info.fingerprint.digest)
    query = made.apply(encoder.encode_queries(["Topic 3"]), role="query")[0]
    np.testing.assert_allclose(embedding.get_query_embedding("Topic 3"), query, atol=1e-5)
    document = made.apply(encoder.encode_documents(["Topic 3"]))[0]
    np.testing.assert_allclose(embedding.get_text_embedding("Topic 3"), document, atol=1e-5)
    assert not np.allclose(query, document, atol=1e-2)


def test_stand_ins_are_first_sentences_and_openings_of_drawn_passages():
    passages = [f"First {i}. Second {i}." for i in range(200)]
    drawn = stand_in_questions(iter(passages), n=30)
    assert len(set(drawn)) == 60 and set(drawn[:30]) <= {f"First {i}." for i in range(200)}
    assert drawn[30:] == [f"first {sentence[6:-1]}?" for sentence in drawn[:30]]
    assert drawn == stand_in_questions(iter(passages), n=30)
    assert stand_in_questions(["첫 문장입니다。두 번째。", "Title\nbody", "  "]) == [
        "첫 문장입니다。", "Title", "첫 문장입니다?", "title?",
    ]  # fmt: skip
    assert stand_in_questions(["What is it? A thing.", "One two, three four five six, seven eight."]) == [
        "What is it?", "One two, three four five six, seven eight.", "one two, three four five six?",
    ]  # fmt: skip


def test_stand_ins_that_say_nothing_are_not_asked():
    assert stand_in_questions(["...", "Is it so?! Yes.", "NASA launches it. More."]) == [
        "...", "Is it so?!", "NASA launches it.", "NASA launches it?",
    ]  # fmt: skip


def test_a_sample_is_not_the_first_of_its_stream():
    drawn = sample((str(i) for i in range(1000)), 100)
    assert len(set(drawn)) == 100 and drawn == sorted(drawn, key=int)
    assert 400 < np.mean([int(each) for each in drawn]) < 600
    assert sample(iter(["a", "b"]), 5) == ["a", "b"]


@pytest.mark.parametrize("kind", ["pca", "whitened", "mean_removed", "all_but_the_top"])
def test_a_collection_of_a_fitted_baseline_can_be_searched(llama, tmp_path, capsys, kind):
    records = [json.dumps({"_id": d.id_, "text": d.text}) for d in DOCUMENTS]
    (tmp_path / "d.jsonl").write_text("\n".join(records))
    common = ["--collection", "c", "--qdrant-path", str(tmp_path / "q"), "--filter-types", kind]
    arguments = ["ingest", str(tmp_path / "d.jsonl"), "--backbone", str(llama), *common]
    assert main(arguments) == 0
    with Store(path=tmp_path / "q") as store:
        (name,) = [name for name in store.names() if kind in name]
    (tmp_path / "q.txt").write_text("\n".join(QUESTIONS))
    assert main([*arguments, "--example-questions", str(tmp_path / "q.txt")]) == 0  # centres nothing here
    search = ["search", DOCUMENTS[4].text, "--collection", name, "--qdrant-path", str(tmp_path / "q")]
    assert main(search) == 0
    assert capsys.readouterr().out.splitlines()[-1]


def test_the_command_line_from_ingest_to_search(llama, tmp_path, capsys):
    folder = tmp_path / "docs"
    folder.mkdir()
    for document in DOCUMENTS:
        (folder / f"{document.id_}.txt").write_text(document.text)
    (tmp_path / "questions.txt").write_text("\n".join(QUESTIONS))
    common = ["--collection", "c", "--qdrant-path", str(tmp_path / "q")]
    arguments = [
        "ingest",
        str(folder),
        "--backbone",
        str(llama),
        "--filter-types",
        "edge",
        "calibrated",
        "--filter-ratios",
        "2",
        "4",
        "--example-questions",
        str(tmp_path / "questions.txt"),
        *common,
    ]
    for run in range(2):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert f"{60 if run == 0 else 0} encoded" in out
    with Store(path=tmp_path / "q") as store:
        assert store.names() == [
            f"c-{n}" for n in ("calibrated-r2", "calibrated-r4", "edge-r2", "edge-r4", "raw")
        ]
        assert {store.info(name).points for name in store.names()} == {60}
    assert main(["search", "Topic 7", "--filter-types", "calibrated", "--filter-ratios", "4", *common]) == 0
    assert capsys.readouterr().out.count(".txt, chunk 0") == 5
    (tmp_path / "filters").rename(tmp_path / "moved")
    assert main(["search", "Topic 7", "--filter-types", "calibrated", "--filter-ratios", "4", *common]) == 1
    assert "--filter-dir" in capsys.readouterr().err
    moved = ["--filter-dir", str(tmp_path / "moved")]
    assert main(["search", "Topic 7", "--filter-types", "calibrated", *common, *moved]) == 0


def test_evaluate_fits_on_passages_and_says_what_stood_in(llama, tmp_path, capsys, caplog):
    folder = tmp_path / "set"
    (folder / "qrels").mkdir(parents=True)
    import json

    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": d.id_, "text": d.text}) + "\n" for d in DOCUMENTS)
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{i}", "text": f"Topic {i}?"}) + "\n" for i in range(25))
    )
    (folder / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td{i}\t1\n" for i in range(25))
    )
    arguments = [
        "evaluate",
        str(folder),
        "--backbone",
        str(llama),
        "--qdrant-path",
        str(tmp_path / "q"),
        "--no-ragas",
        "--filter-types",
        "pca",
        "calibrated",
        "mean_removed",
        "--filter-ratios",
        "4",
    ]
    assert main([*arguments, "--json", str(tmp_path / "r.json")]) == 0
    (page,) = json.loads((tmp_path / "r.json").read_text())["sets"]
    names = [result["filter"] for result in page["results"]]
    assert names == ["raw", "pca-r4", "calibrated-r4", "mean_removed-r1"]


def test_new_questions_given_to_ingest_move_the_query_mean_alone(llama, tmp_path, capsys):
    folder = tmp_path / "docs"
    folder.mkdir()
    for document in DOCUMENTS:
        (folder / f"{document.id_}.txt").write_text(document.text)
    arguments = [
        "ingest",
        str(folder),
        "--backbone",
        str(llama),
        "--filter-types",
        "calibrated",
        "--collection",
        "c",
    ]
    arguments += [
        "--qdrant-path",
        str(tmp_path / "q"),
        "--example-questions",
        str(tmp_path / "questions.txt"),
    ]
    means, fingerprints = [], []
    for start in (0, 3):
        (tmp_path / "questions.txt").write_text("\n".join(QUESTIONS[start:]))
        assert main(arguments) == 0
        with Store(path=tmp_path / "q") as store:
            means.append(store.info("c-calibrated-r2").settings["query_mean"])
            fingerprints.append(store.info("c-calibrated-r2").fingerprint)
    assert means[0] != means[1] and fingerprints[0] == fingerprints[1]
