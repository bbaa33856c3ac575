"""A team's documents as an evaluation set: drafted, edited by a person, read back."""

from __future__ import annotations

import csv
import io
import json

import pytest

from pipelines.make_cmd import about_tokens
from rag_embfilter import EvalSet
from tests.fake_openai import FakeOpenAI
from tests.unit.cli.checks import refused

LEAVE = (
    "Leave is asked for in Nook. " + "Your manager answers within three days, or it counts as granted. " * 4
)
BIKES = (
    "Bikes are kept below. " + "The gate opens with a badge, from six in the morning until ten at night. " * 4
)
SHORT = "자전거는 지하에 둡니다. 문은 배지로 엽니다."


@pytest.fixture
def team(tmp_path):
    """Two texts that are worth a question, and a short Korean one."""
    folder = tmp_path / "team"
    folder.mkdir()
    for name, text in (("leave.txt", LEAVE), ("bikes.txt", BIKES), ("ko.txt", SHORT)):
        (folder / name).write_text(text)
    return folder


def _rows(review):
    return list(csv.DictReader(io.StringIO(review.read_text("utf-8-sig"))))


def _save(review, rows):
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    review.write_text(sheet.getvalue(), "utf-8-sig")


def test_first_sentences_ask_until_a_person_says_otherwise(run, team, tmp_path):
    out = tmp_path / "set"
    done = run("make-eval-set", team, "--output", out)
    assert done.code == 0 and "3 passages, 3 questions, 3 judgements" in done.out
    made = EvalSet.load(out)
    assert set(made.queries.values()) == {
        "Leave is asked for in Nook.",
        "Bikes are kept below.",
        "자전거는 지하에 둡니다.",
    }
    assert not any("asked for in Nook" in passage.text for passage in made.corpus.values())

    rows = _rows(out / "review.csv")
    by_passage = {row["passage_id"]: row for row in rows}
    by_passage["ko.txt#0"]["keep"] = "no"
    by_passage["leave.txt#0"] |= {"question": "how do I get  a day off?", "answer": "In Nook."}
    also = by_passage["leave.txt#0"] | {"passage_id": "bikes.txt#0", "grade": "1"}
    _save(out / "review.csv", [*rows, also])
    done = run("make-eval-set", "--review", out / "review.csv")
    assert done.code == 0 and "3 passages, 2 questions, 3 judgements" in done.out
    edited = EvalSet.load(out)
    (query,) = [key for key, text in edited.queries.items() if text == "how do I get a day off?"]
    assert edited.qrels[query] == {"leave.txt#0": 2, "bikes.txt#0": 1}
    assert edited.answers[query] == ["In Nook."]
    assert edited.corpus == made.corpus


def test_a_model_writes_questions_and_what_it_fails_at_is_counted(run, team, tmp_path, monkeypatch):
    monkeypatch.setenv("EMBFILTER_CACHE", str(tmp_path / "cache"))

    def rule(prompt, times):
        if "Bikes" in prompt:
            return "I would rather not."
        return 'Sure: {"question": "who lets me  take a day off?", "answer": "Your manager."}'

    with FakeOpenAI(rule) as server:
        words = ("make-eval-set", team, "--generator", server.spec)
        done = run(*words, "--output", tmp_path / "set")
    assert done.code == 0 and "3 passages, 1 questions" in done.out
    assert "unparseable answer: 1 passages" in done.err
    made = EvalSet.load(tmp_path / "set")
    assert list(made.queries.values()) == ["who lets me take a day off?"]
    assert made.qrels == {"q0001": {"leave.txt#0": 2}} and made.answers == {"q0001": ["Your manager."]}
    assert made.corpus["leave.txt#0"].text == LEAVE.strip()  # whole: the question is not taken from it


def test_what_is_no_set_and_no_review_is_refused(run, team, tmp_path):
    refused(run("make-eval-set", team), "give SOURCE... and --output")
    out = tmp_path / "set"
    assert run("make-eval-set", team, "--output", out).code == 0
    refused(run("make-eval-set", team, "--output", out), "holds an evaluation set")
    review = out / "review.csv"
    refused(run("make-eval-set", team, "--review", review), "leave the sources and --output out")
    whole = review.read_text("utf-8-sig")
    before = EvalSet.load(out)
    for text, said in (
        (whole.replace("yes", "no"), "no question is kept"),
        (whole.replace(",", ";"), "expected rows with the columns.*commas"),
        ("", "missing: all rows"),
        (whole.replace(",2,", ",two,", 1), "row 2: .*grade 'two'"),
    ):
        review.write_text(text, "utf-8-sig")
        refused(run("make-eval-set", "--review", review), said)
        assert EvalSet.load(out) == before
    review.write_bytes(b"\xff\xfe\x00\xd8")
    refused(run("make-eval-set", "--review", review), "is not CSV in UTF-8")
    (tmp_path / "r.csv").write_text(whole)
    refused(run("make-eval-set", "--review", tmp_path / "r.csv"), "no corpus.jsonl beside")


def test_tokens_by_rule_of_thumb_are_near_a_tokenizers(encoder):
    assert about_tokens("one two three") == 4 and about_tokens("") == 0
    assert 4 <= about_tokens("東京都に行く人たち") <= 9


def test_the_projects_own_sets_have_nothing_to_mend(run, tmp_path):
    pytest.importorskip("qdrant_edge", reason="the edge extra is not installed")
    from pathlib import Path

    sets = sorted(folder for folder in (Path(__file__).parents[3] / "eval_sets").iterdir() if folder.is_dir())
    for language in ("english", "multilingual"):
        chosen = [folder for folder in sets if (folder.name == "products") == (language == "multilingual")]
        if chosen:
            done = run("check-eval-set", *chosen, "--bm25", language, "--json", tmp_path / "c.json")
            assert done.code == 0, done.out
            for report in json.loads((tmp_path / "c.json").read_text()).values():
                assert report["passages"] >= 100 and report["questions"] >= 60 and report["bm25"] < 0.85
                assert report["answered"] == report["questions"] and set(report["grades"]) == {"1", "2"}
