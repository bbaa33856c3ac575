"""Local folders as benchmark tasks: what each layout holds, limits, and every refusal. No MTEB needed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rag_embfilter.benchmark import read_folder
from rag_embfilter.benchmark.running import AVERAGE, TaskScores, category_means
from rag_embfilter.errors import ConfigError, EvalSetError


def write(folder: Path, **tables: str) -> Path:
    """A folder with tables; `|` stands for a tab and `;` for the end of a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        text = table.replace("|", "\t").replace(";", "\n") + "\n"
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    return folder


def beir(folder: Path) -> Path:
    """Three passages, two questions."""
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"p{i}", "title": "", "text": f"passage {i}"} for i in range(3)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    queries = [{"_id": f"q{i}", "text": f"question {i}"} for i in range(2)]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    write(folder / "qrels", test="query-id|corpus-id|score;q0|p0|1;q1|p1|1")
    return folder


def test_pairs_with_scores_are_sts(tmp_path):
    folder = write(tmp_path / "sts", test="sentence1|sentence2|score;a b|c|2.5;\u2028d|'e\"|0")
    (task,) = read_folder(folder)
    assert (task.name, task.category) == ("sts", "STS")
    assert task.splits == {
        "test": {"sentence1": ["a b", "\u2028d"], "sentence2": ["c", "'e\""], "score": [2.5, 0.0]}
    }


def test_pairs_with_labels_are_pair_classification(tmp_path):
    (task,) = read_folder(write(tmp_path / "pairs", test="sentence1|sentence2|label;a|b|1;c|d|0"))
    assert task.category == "PairClassification"
    assert task.splits["test"] == {"sentence1": ["a", "c"], "sentence2": ["b", "d"], "labels": [1, 0]}


def test_labelled_texts_are_classification_and_clustering(tmp_path):
    folder = write(tmp_path / "c", train="text|label;a|red;b|blue", test="text|label;c|red;d|green")
    classification, clustering = read_folder(folder)
    assert classification.splits == {
        "train": {"text": ["a", "b"], "label": [2, 0]},
        "test": {"text": ["c", "d"], "label": [2, 1]},
    }
    assert clustering.splits == {"test": {"sentences": [["c", "d"]], "labels": [["red", "green"]]}}
    (folder / "train.tsv").unlink()
    assert [task.category for task in read_folder(folder)] == ["Clustering"]


def test_beir_files_are_retrieval_and_labels_beside_them_two_tasks_more(tmp_path):
    folder = beir(tmp_path / "faq")
    write(folder / "labels", train="text|label;a|x;b|y", test="text|label;c|x;d|y")
    assert [(task.name, task.category) for task in read_folder(folder)] == [
        ("faq", "Retrieval"),
        ("faq", "Classification"),
        ("faq", "Clustering"),
    ]


def test_beir_files_with_candidates_are_reranking(tmp_path):
    folder = beir(tmp_path / "faq")
    (retrieval,) = read_folder(folder)
    write(folder, candidates="query-id|corpus-id;q0|p2;q0|p0;q1|p1;q0|p2")
    (reranking,) = read_folder(folder)
    assert reranking.category == "Reranking" and reranking.digest != retrieval.digest
    assert reranking.candidates == {"q0": ["p2", "p0"], "q1": ["p1"]}


def test_a_limit_draws_evenly_over_the_labels_and_the_same_every_time(tmp_path):
    lines = [f"text {i}|{'rare' if i == 90 else 'a' if i % 3 else 'b'}" for i in range(100)]
    folder = write(tmp_path / "c", test=";".join(["text|label", *lines]))
    (whole,), (some,), (again,) = (read_folder(folder, limit) for limit in (None, 11, 11))
    assert Counter(some.splits["test"]["labels"][0]) == {"a": 5, "b": 5, "rare": 1}
    assert some == again and some.digest != whole.digest
    texts = some.splits["test"]["sentences"][0]
    assert texts == sorted(texts, key=lambda text: int(text.split()[1]))
    assert len(whole.splits["test"]["labels"][0]) == 100
    with pytest.raises(ConfigError, match="limit 0: expected 1 or more"):
        read_folder(folder, 0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("sentence1|score;a|1", "the header of .* is sentence1, score. Expected corpus.jsonl"),
        ("", "is empty. Expected corpus.jsonl"),
        (
            "sentence1|sentence2|score;a|b|x;c| |2;d|3",
            "line 2: score 'x', expected a number; line 3: an empty",
        ),
        ("sentence1|sentence2|score;a|b|nan;c|d|2", "line 2: score 'nan', expected a number"),
        ("sentence1|sentence2|score;a|b|1;d|3", "line 3: 2 columns, expected 3"),
        ("sentence1|sentence2|score;a|b|1", "1 rows, expected 2 or more"),
        ("sentence1|sentence2|label;a|b|2;a|b|1", "line 2: label '2', expected 0 or 1"),
        ("text|label;a|;b|x", "line 2: label '', expected a label"),
        ("text|label" + ";|x" * 7, "line 6: an empty text; and 2 more"),
    ],
)
def test_faults_of_a_table_are_named(tmp_path, table, message):
    with pytest.raises(EvalSetError, match=message):
        read_folder(write(tmp_path / "x", test=table))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("q|p;q0|p0", "the header of .* expected query-id, corpus-id"),
        ("query-id|corpus-id;q0|p0;q0|p9;q1|p1", "line 3: unknown id, q0 or p9"),
        ("query-id|corpus-id;q0|p0", "q1: a question without candidates"),
    ],
)
def test_faults_of_candidates_are_named(tmp_path, table, message):
    with pytest.raises(EvalSetError, match=message):
        read_folder(write(beir(tmp_path / "x"), candidates=table))


def test_a_folder_of_none_of_these_and_one_that_is_not_utf8(tmp_path):
    with pytest.raises(EvalSetError, match="holds no task that is known here. Expected corpus.jsonl"):
        read_folder(tmp_path)
    (tmp_path / "test.tsv").write_bytes(b"text\tlabel\n\xff\tx\n")
    with pytest.raises(EvalSetError, match="is not UTF-8"):
        read_folder(tmp_path)


def test_the_table_averages_tasks_within_a_category_and_over_all_as_the_paper_does():
    def task(category: str, raw: float, edge: float, failure: str | None = None) -> TaskScores:
        scores = {"raw": raw, "edge-r2": edge}
        return TaskScores("t", category, "m", "folder", "0", scores, failure=failure)

    tasks = [task("Retrieval", 0.3, 0.5), task("STS", 0.2, 0.4), task("STS", 0.4, 0.6), task("Odd", 0.1, 0.1)]
    tasks.append(TaskScores("gone", "Clustering", "m", "hub", "0", failure="no hub"))
    means = category_means(tasks)
    assert list(means) == ["STS", "Retrieval", "Odd", AVERAGE]
    assert means["STS"] == pytest.approx({"raw": 0.3, "edge-r2": 0.5})
    assert means[AVERAGE] == pytest.approx({"raw": 0.25, "edge-r2": 0.4})
    assert category_means(tasks[-1:]) == {}
