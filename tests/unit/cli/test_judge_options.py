"""`evaluate` with a judge: from the options to the table, the file and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines import judge_options
from pipelines.lists import expand_lists
from pipelines.options import filter_specs
from tests import tiny
from tests.fake_openai import FakeOpenAI, good
from tests.unit.cli.checks import HOLIDAY, LAPTOP, refused

pytestmark = pytest.mark.usefixtures("no_key")


@pytest.fixture(autouse=True)
def cache_of_this_test(tmp_path, monkeypatch):
    """A later server may get the port of an earlier one, and with it the answers that were kept."""
    monkeypatch.setenv("EMBFILTER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def asked_set(tmp_path: Path) -> Path:
    """Three questions with reference answers over two passages."""
    pytest.importorskip("ragas")
    folder = tmp_path / "sets" / "asked"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": "p1", "title": "", "text": LAPTOP}, {"_id": "p2", "title": "", "text": HOLIDAY}]
    queries = [
        {"_id": f"q{i}", "text": text, "metadata": {"answers": [f"Reference {i}."]}}
        for i, text in enumerate(["Stolen laptop?", "Days off?", "Who signs a holiday request?"])
    ]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    grades = "q0\tp1\t1\nq1\tp2\t1\nq2\tp2\t1\n"
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{grades}")
    return folder


def page(file: Path) -> dict:
    (only,) = json.loads(file.read_text())["sets"]
    return only


def test_judged_rows_are_shown_and_written(run, asked_set, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    file = tmp_path / "result.json"

    def rule(prompt: str, times: int):
        return "no JSON" if "Reference 1." in prompt and "verify if" in prompt else good(prompt)

    with FakeOpenAI(rule) as server:
        words = ("evaluate", asked_set, "--filter-ratios", "2", "--judge", server.spec, "--json", file)
        done = run(*words, "--judge-filters", "all", "--max-failed", "0.5")
        again = run(*words, "--judge-filters", "all", "--max-failed", "0.5")
        calls = len(server.prompts)
        assert calls == len(set(server.prompts))
        assert run(*words, "--no-judge-cache").code == 1 and len(server.prompts) > calls
    assert (done.code, again.code) == (0, 0)
    assert f"RAGAS, judged by {server.spec}, asked, first 5 passages" in " ".join(done.out.split())
    lines = [line.split() for line in done.out.partition("RAGAS, judged by")[2].splitlines()]
    (raw,) = [line for line in lines if line and line[0] == "raw"]
    # Average precision of right passages only is 1.
    assert raw[1:9] == ["1.00", "(2", "of", "3)", "1.00", "(3", "of", "3)"]
    assert "not scored, edge-r2, context_precision: unparseable answer 1" in done.out
    written = page(file)
    assert [row["filter"] for row in written["results"]] == ["raw", "edge-r2"]
    row = written["results"][0]
    assert list(row["ragas"])[:4] == [
        "id_based_context_precision",
        "id_based_context_recall",
        "non_llm_context_precision_with_reference",
        "non_llm_context_recall",
    ]
    precision = row["ragas"]["context_precision"]
    assert precision == {
        "mean": pytest.approx(1),
        "scored": 2,
        "failed": 1,
        "reasons": {"unparseable answer": 1},
        "scores": {"q0": pytest.approx(1), "q2": pytest.approx(1)},
        "failures": {"q1": "unparseable answer"},
    }
    assert set(row["answers"]) == {"q0", "q1", "q2"}
    assert row["answers"]["q0"]["text"].startswith("Answer ")
    assert row["answers"]["q0"]["passages"] == row["run"]["q0"]
    assert written["judge"]["judge"] == written["judge"]["generator"] == server.spec
    assert server.keys == {"Bearer sk-very-secret"}
    assert "sk-very-secret" not in file.read_text() + done.out + done.err


def test_by_default_raw_and_the_recommended_row_are_judged(run, asked_set, tmp_path):
    file = tmp_path / "result.json"
    with FakeOpenAI() as server:
        words = ("--judge", server.spec, "--judged-metrics", "context_recall", "--json", file)
        assert run("evaluate", asked_set, "--filter-ratios", "2", "4", *words).code == 0
        judged = [row["filter"] for row in page(file)["results"] if "answers" in row]
        assert judged == ["raw"]  # three questions recommend nothing else
        assert len(server.prompts) == 3
        words = (*words, "--judge-filters", "bm25", "edge-r2+bm25", "--modes", "bm25", "hybrid")
        assert run("evaluate", asked_set, "--filter-ratios", "2", "4", *words).code == 0
    judged = [row["filter"] for row in page(file)["results"] if "answers" in row]
    assert judged == ["bm25", "edge-r2+bm25"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (judge_options.DEFAULT_FILTERS, {"raw", "calibrated-r4-k0.5"}),
        (["calibrated-r4"], {"calibrated-r4-k0.5"}),
        (["calibrated-r4-k0.5"], {"calibrated-r4-k0.5"}),
        (["edge-r2", "raw"], {"raw", "edge-r2"}),
        (["all", "raw"], {"raw", "edge-r2", "calibrated-r4-k0.5"}),
    ],
)
def test_rows_are_picked_by_name_or_by_what_is_recommended(filters, expected):
    results = [SimpleNamespace(name=name) for name in ("raw", "edge-r2", "calibrated-r4-k0.5")]
    evaluation = SimpleNamespace(results=results, best=lambda: results[2])
    assert judge_options.JudgeRun(None, filters, 0.2)._names(evaluation) == expected


def test_too_many_failures_end_with_exit_code_1_and_everything_written(run, asked_set, tmp_path):
    file = tmp_path / "result.json"
    with FakeOpenAI(lambda prompt, times: "no JSON" if "Days off?" in prompt else good(prompt)) as server:
        words = ("evaluate", asked_set, "--judge", server.spec, "--json", file, "--judge-filters", "raw")
        failed = run(*words, "--judged-metrics", "context_recall")
        assert run(*words, "--judged-metrics", "context_recall", "--max-failed", "0.34").code == 0
    assert failed.code == 1
    assert "too many scores failed (over --max-failed 0.2)" in failed.err
    assert "asked, raw, context_recall: unparseable answer 1" in failed.err
    assert page(file)["results"][0]["ragas"]["context_recall"]["failed"] == 1
    assert "JSON:" in failed.out


def test_a_dry_run_asks_nobody_embeds_nothing_and_is_right(run, asked_set, encoder, tmp_path):
    with FakeOpenAI() as server, tiny.ForwardCounter(encoder) as passes:
        words = ("evaluate", asked_set, "--judge", server.spec, "--judge-filters", "raw")
        dry = run(*words, "--dry-run")
        assert (dry.code, server.prompts, passes.texts) == (0, [], 0)
        assert not (tmp_path / "qdrant").exists()
        rows = {line.split()[0]: line.split()[1:] for line in dry.out.splitlines() if line.split()}
        assert rows["asked:"] == ["3", "questions,", "1", "of", "4", "rows", "judged"]
        assert (rows["generator"][0], rows["context_precision"][0], rows["faithfulness"][0]) == (
            "3",
            "6",
            "6",
        )
        assert run(*words).code == 0
        assert len(server.prompts) == int(rows["total"][0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--judged-metrics", "faithfulness"], r"faithfulness is scored by a judge, and none is configured"),
        (["--dry-run"], "--dry-run goes with a judge"),
        (["--generator", "openai:x@http://localhost:1/v1"], "--generator goes with a judge"),
        (["--judge", "gpt-4o"], "'gpt-4o': expected openai:MODEL"),
        (["--judge", "openai:gpt-4o"], "openai:gpt-4o needs a key: set OPENAI_API_KEY"),
        (
            ["--judge", "openai:x@http://localhost:1/v1", "--generator", "openai:gpt-4o"],
            "openai:gpt-4o needs a key",
        ),
        (
            ["--judge", "openai:x@http://localhost:1/v1", "--judged-metrics", "faith"],
            "'faith': expected some",
        ),
        (
            ["--judge", "openai:x@http://localhost:1/v1", "--judge-filters", "edge-r3"],
            "'edge-r3': expected all, recommended, or one of raw, edge-r2, edge-r4, edge-r8",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_is_encoded(
    run, asked_set, encoder, tmp_path, words, message
):
    with tiny.ForwardCounter(encoder) as passes:
        result = run("evaluate", asked_set, *words)
    result.err = " ".join(result.err.split())
    refused(result, message)
    assert passes.texts == 0 and not (tmp_path / "qdrant").exists()


def test_a_set_without_references_refuses_what_needs_them(run, eval_set, tmp_path):
    words = (
        "--judge",
        "openai:x@http://localhost:1/v1",
        "--judged-metrics",
        "faithfulness",
        "context_recall",
    )
    refused(run("evaluate", eval_set, *words), "context_recall needs reference answers, and eval set 'tiny'")


def test_without_ragas_a_judge_is_refused_and_all_else_works(run, eval_set, monkeypatch):
    for name in [name for name in sys.modules if name == "ragas" or name.startswith("ragas.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ragas", None)
    refused(
        run("evaluate", eval_set, "--judge", "openai:x@http://localhost:1/v1"),
        r"--judge: RAGAS cannot be imported .*pip install 'rag-embfilter\[eval\]'",
    )
    plain = run("evaluate", eval_set)
    assert plain.code == 0 and "RAGAS metrics left out" in plain.err


def test_list_options_of_the_judge_take_several_words_and_leave_paths_alone():
    given = [
        "--judged-metrics",
        "faithfulness",
        "context_recall",
        "faq",
        "--judge-filters",
        "raw",
        "edge-r2+bm25",
    ]
    expanded = expand_lists([*given, "sets/faq"])
    assert expanded == [
        *("--judged-metrics", "faithfulness", "--judged-metrics", "context_recall", "faq"),
        *("--judge-filters", "raw", "--judge-filters", "edge-r2+bm25", "sets/faq"),
    ]


def test_rows_are_known_beforehand(run, eval_set, tmp_path):
    """The names that are promised before anything is encoded are those that come."""
    types, modes = ["edge", "tail", "rand"], ["dense", "bm25", "hybrid"]
    words = ["--filter-types", *types, "--filter-ratios", "2", "4", "--modes", *modes]
    file = tmp_path / "result.json"
    assert run("evaluate", eval_set, *words, "--no-ragas", "--json", file).code == 0
    found = [row["filter"] for row in page(file)["results"]]
    assert found == judge_options.table_rows(filter_specs(["raw", *types], [2, 4], 1.0), modes)
    assert len(found) == 1 + 1 + 1 + 6 * 2


@pytest.mark.parametrize(
    "name", ["calibrated-r4-k0.5", "calibrated-r4-k0.5-w0.3", "rand-r4-s7", "edge-r4-b12"]
)
def test_settings_in_a_name_are_left_out(name):
    assert judge_options.SETTINGS.sub("", f"{name}+bm25") == f"{name.rpartition('-r4')[0]}-r4+bm25"
