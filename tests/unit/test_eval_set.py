"""Evaluation sets: what loads, what is refused, and the set that comes with the project."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rag_embfilter import EvalSet
from rag_embfilter.errors import EvalSetError

FAQ = Path(__file__).parents[2] / "eval_sets" / "faq"
CORPUS = [{"_id": "p1", "title": "Leave", "text": "25 days."}, {"_id": "p2", "text": "Ask payroll."}]
QUERIES = [{"_id": "q1", "text": "how much leave?"}]
QRELS = "query-id\tcorpus-id\tscore\nq1\tp1\t2\nq1\tp2\t0\n"


def write_set(
    folder: Path,
    corpus: list[Any] | str | bytes = CORPUS,
    queries: list[Any] | str | bytes = QUERIES,
    qrels: str | bytes = QRELS,
) -> Path:
    """A set's three files; lists become JSON lines, text and bytes are written as they are."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, content in (("corpus.jsonl", corpus), ("queries.jsonl", queries), ("qrels/test.tsv", qrels)):
        if isinstance(content, list):
            content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in content)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def faults_of(folder: Path, **files: Any) -> str:
    with pytest.raises(EvalSetError) as caught:
        EvalSet.load(write_set(folder, **files))
    return str(caught.value)


def test_a_good_set_loads_as_written(tmp_path: Path) -> None:
    loaded = EvalSet.load(write_set(tmp_path / "leave"))
    assert loaded.name == "leave"
    assert loaded.passages() == {"p1": "Leave 25 days.", "p2": "Ask payroll."}
    assert loaded.queries == {"q1": "how much leave?"}
    assert loaded.qrels == {"q1": {"p1": 2, "p2": 0}}
    assert loaded.answers == {}


def test_a_byte_order_mark_crlf_and_a_missing_header_change_nothing(tmp_path: Path) -> None:
    plain = EvalSet.load(write_set(tmp_path / "plain"))
    corpus = "\ufeff" + "".join(json.dumps(record) + "\r\n" for record in CORPUS)
    other = EvalSet.load(
        write_set(
            tmp_path / "windows",
            corpus=corpus,
            queries="\ufeff\n" + json.dumps(QUERIES[0]),
            qrels="\ufeff" + QRELS.split("\n", 1)[1].replace("\n", "\r\n"),
        )
    )
    assert (other.corpus, other.queries, other.qrels) == (plain.corpus, plain.queries, plain.qrels)


def test_numeric_ids_meet_their_judgements_as_text(tmp_path: Path) -> None:
    folder = write_set(tmp_path, [{"_id": 7, "text": "a"}], [{"_id": 1, "text": "b"}], "1\t7\t1\n")
    loaded = EvalSet.load(folder)
    assert (list(loaded.corpus), list(loaded.queries), loaded.qrels) == (["7"], ["1"], {"1": {"7": 1}})


def test_a_title_alone_is_a_passage(tmp_path: Path) -> None:
    corpus = [{"_id": "p1", "title": " Opening hours ", "text": ""}, {"_id": "p2", "text": " x "}]
    assert EvalSet.load(write_set(tmp_path, corpus)).passages() == {"p1": "Opening hours", "p2": "x"}


def test_answers_are_lists_of_text(tmp_path: Path) -> None:
    queries = [
        {"_id": "q1", "text": "a", "metadata": {"answers": ["25 days", 25]}},
        {"_id": "q2", "text": "b", "metadata": {"answers": "one"}},
        {"_id": "q3", "text": "c", "metadata": {"answers": []}},
        {"_id": "q4", "text": "d", "metadata": None},
    ]
    qrels = "".join(f"q{i}\tp1\t1\n" for i in range(1, 5))
    loaded = EvalSet.load(write_set(tmp_path, queries=queries, qrels=qrels))
    assert loaded.answers == {"q1": ["25 days", "25"], "q2": ["one"]}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            {"corpus": '{"_id": "p1", "text": "a"}\n{"_id": \n'},
            "lines that are not JSON (1): corpus.jsonl line 2",
        ),
        (
            {"corpus": b'{"_id": "p1", "text": "Gr\xfc\xdfe"}\n'},
            "lines that are not UTF-8 (1): corpus.jsonl line 1",
        ),
        ({"corpus": [*CORPUS, {"text": "a"}]}, "records without an _id (1): corpus.jsonl line 3"),
        ({"corpus": [*CORPUS, {"_id": "", "text": "a"}]}, "records without an _id (1): corpus.jsonl line 3"),
        (
            {"corpus": [*CORPUS, {"_id": True, "text": "a"}]},
            "records without an _id (1): corpus.jsonl line 3",
        ),
        ({"corpus": [*CORPUS, ["p3", "a"]]}, "records without an _id (1): corpus.jsonl line 3"),
        ({"corpus": [*CORPUS, CORPUS[0]]}, "duplicate ids (1): p1 (corpus.jsonl line 3)"),
        ({"corpus": [*CORPUS, {"_id": "p3", "text": " \n"}]}, "empty texts (1): p3 (corpus.jsonl)"),
        ({"corpus": [*CORPUS, {"_id": "p3", "text": ["a"]}]}, "values that are not text (1): text of p3"),
        ({"queries": [*QUERIES, {"_id": "q2"}]}, "empty texts (1): q2 (queries.jsonl)"),
        ({"queries": [*QUERIES, {"_id": "q2", "text": "a"}]}, "queries without a relevant passage (1): q2"),
        ({"qrels": "q1\tp1\t0\n"}, "queries without a relevant passage (1): q1"),
        ({"qrels": QRELS + "q9\tp1\t1\n"}, "unknown query ids (1): q9 (test.tsv line 4)"),
        ({"qrels": QRELS + "q1\tp9\t1\n"}, "unknown passage ids (1): p9 (test.tsv line 4)"),
        ({"qrels": QRELS + "q1\tp1\t1\n"}, "judgements that contradict an earlier one (1): test.tsv line 4"),
        ({"qrels": QRELS + "q1\tp1\n"}, "grade (0 to 20) (1): test.tsv line 4"),
        ({"qrels": QRELS + "q1 0 p1 1\n"}, "grade (0 to 20) (1): test.tsv line 4"),
        ({"qrels": QRELS + "q1\tp2\t-1\n"}, "grade (0 to 20) (1): test.tsv line 4"),
        ({"qrels": QRELS + "q1\tp2\t0.5\n"}, "grade (0 to 20) (1): test.tsv line 4"),
        ({"qrels": QRELS + "q1\tp2\t21\n"}, "grade (0 to 20) (1): test.tsv line 4"),
        ({"corpus": "", "queries": "\n", "qrels": ""}, "empty files (2): corpus.jsonl, queries.jsonl"),
    ],
)
def test_every_fault_is_named_with_its_place(tmp_path: Path, files: dict[str, Any], told: str) -> None:
    assert told in faults_of(tmp_path, **files)


def test_all_faults_come_in_one_error_and_long_lists_are_cut(tmp_path: Path) -> None:
    message = faults_of(
        tmp_path,
        corpus=[*CORPUS, *({"_id": f"e{i}", "text": ""} for i in range(8))],
        queries=[*QUERIES, *QUERIES],
        qrels=QRELS + "q1\tp9\t1\nq1\tp1\tx\n",
    )
    assert "empty texts (8): e0 (corpus.jsonl)" in message
    assert "e4 (corpus.jsonl) and 3 more" in message
    for kind in ("duplicate ids (1)", "unknown passage ids (1)", "judgements that are not"):
        assert kind in message
    assert message.endswith("Mend its files and try again.")


def test_the_same_judgement_twice_is_no_fault(tmp_path: Path) -> None:
    assert EvalSet.load(write_set(tmp_path, qrels=QRELS + "q1\tp1\t2\n")).qrels["q1"]["p1"] == 2


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "queries.jsonl").touch()
    with pytest.raises(EvalSetError, match=r"corpus\.jsonl, qrels.test\.tsv missing"):
        EvalSet.load(tmp_path)


def test_digest_follows_each_file_and_nothing_else(tmp_path: Path) -> None:
    base = EvalSet.load(write_set(tmp_path / "a")).digest
    assert len(base) == 16
    assert EvalSet.load(write_set(tmp_path / "b")).digest == base
    changed = [
        write_set(tmp_path / "c", corpus=[CORPUS[0], {"_id": "p2", "text": "Ask Payroll."}]),
        write_set(tmp_path / "d", queries=[{"_id": "q1", "text": "how much leave"}]),
        write_set(tmp_path / "e", qrels=QRELS.replace("p1\t2", "p1\t1")),
    ]
    digests = {EvalSet.load(folder).digest for folder in changed}
    assert len(digests) == 3
    assert base not in digests


def test_the_faq_set_is_what_its_readme_says() -> None:
    faq = EvalSet.load(FAQ)
    assert (faq.name, len(faq.corpus), len(faq.queries)) == ("faq", 159, 98)
    grades = Counter(grade for judged in faq.qrels.values() for grade in judged.values())
    assert grades == {2: 99, 1: 49}
    assert sum(1 in judged.values() for judged in faq.qrels.values()) == 45
    assert all(2 in judged.values() for judged in faq.qrels.values())
    words = [len(passage.text.split()) for passage in faq.corpus.values()]
    assert (min(words), max(words)) == (59, 78)
    assert {q: len(answers) for q, answers in faq.answers.items()} == dict.fromkeys(faq.queries, 1)


def test_the_faq_set_repeats_no_text() -> None:
    faq = EvalSet.load(FAQ)
    assert len(set(faq.passages().values())) == 159
    assert len({passage.title.lower() for passage in faq.corpus.values()}) == 159
    assert len({query.lower() for query in faq.queries.values()}) == 98
