"""The report of an evaluation, the comparison of two, and the check of a set, from the command line."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from pipelines.report import pareto_front, write_report
from rag_embfilter import EmbFilter, EvalSet, compare, rank_metrics
from rag_embfilter.evaluation import Evaluation, FilterResult
from rag_embfilter.ingestion import IngestReport
from tests.unit.cli.checks import HOLIDAY, LAPTOP, refused

HOSTILE = "<script>alert('&')</script> {{ 7 * 7 }}"


class _Page(HTMLParser):
    """Tags that are opened, and addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for key, value in attrs:
            if (key in ("src", "href", "xlink:href") and not value.startswith("#")) or tag in (
                "link",
                "script",
            ):
                self.fetched.append(f"{tag} {key}={value}")


@pytest.fixture
def hostile_set(eval_set):
    """The tiny set with a question and a title that would be markup if they could."""
    for name, field in (("corpus.jsonl", "title"), ("queries.jsonl", "text")):
        lines = [json.loads(line) for line in (eval_set / name).read_text().splitlines()]
        lines[1][field] = f"{HOSTILE} {lines[1][field]}"
        (eval_set / name).write_text("\n".join(map(json.dumps, lines)))
    return eval_set


def test_the_report_is_one_page_that_fetches_nothing_and_shows_both_sides(run, hostile_set, tmp_path):
    done = run(
        "evaluate", hostile_set, "--filter-ratios", "2", "4", "--no-ragas", "--report", tmp_path / "out"
    )
    assert done.code == 0 and "Report: " in done.out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.html", "results.json", "quality.png"}
    page = (tmp_path / "out" / "report.html").read_text()
    read = _Page()
    read.feed(page)
    assert read.fetched == [] and "script" not in read.tags and read.tags.count("svg") == 2
    assert "var(--ink)" in page and "#1f2933" not in page.split("</style>")[1]
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["sets"]
    for row in result["results"]:
        assert f"<b>{100 * row['metrics']['ndcg_at_10']:.1f}</b>" in page
        assert row["filter"] in page
    assert result["digest"] and "fingerprint" in page


def test_questions_that_moved_stand_with_what_both_sides_found(hostile_set, encoder, tmp_path):
    loaded = EvalSet.load(hostile_set)
    runs = {"raw": {"q1": ["p1", "p2"], "q2": ["p1", "p2"]}, "edge": {"q1": ["p2", "p1"], "q2": ["p2", "p1"]}}
    evaluation = Evaluation(loaded, encoder, IngestReport())
    for filter_type, run in runs.items():
        embfilter = EmbFilter.from_encoder(encoder, filter_type, 2)
        metrics = rank_metrics(loaded.qrels, run)
        versus = None
        if evaluation.results:
            versus = compare(
                metrics.per_query["ndcg_at_10"], evaluation.results[0].metrics.per_query["ndcg_at_10"]
            )
        evaluation.results.append(FilterResult(embfilter, "c", "f", run, metrics, versus))
    write_report(tmp_path / "r.html", [evaluation], {"versions": {"torch": "2"}, "command": ["a", "<b>"]})
    page = (tmp_path / "r.html").read_text()
    read = _Page()
    read.feed(page)
    assert "script" not in read.tags and "&lt;script&gt;alert" in page and "{{ 7 * 7 }}" in page
    cases = page.split('<div class="case">')[1:]
    # q2 wants p2, which only the filter puts first; q1 wants p1, which only raw does.
    assert [
        re.search(r"(q\d) · nDCG@10 (\d+) → </span><span\s+class=\"(\w+)\">(\d+)", case).groups()
        for case in cases
    ] == [
        ("q2", "63", "better", "100"),
        ("q1", "100", "worse", "63"),
    ]
    raw, ours = (side.split("</ol>")[0] for side in cases[1].split("<ol>")[1:])
    assert raw.index("relevant, grade 1") < raw.index(LAPTOP) < raw.index(HOLIDAY) and ours.index(
        HOLIDAY
    ) < ours.index(LAPTOP)
    assert "<dt>versions: torch</dt><dd>2</dd>" in page and "a &lt;b&gt;" in page


def test_the_front_holds_what_no_smaller_row_beats(make_result):
    rows = [
        make_result("raw", 32, 0.5),
        make_result("a", 16, 0.6),
        make_result("b", 8, 0.4),
        make_result("c", 8, 0.3),
    ]
    assert pareto_front(rows) == ["b", "a"]
    assert pareto_front([make_result("bm25", 0, 0.9), rows[0]]) == ["raw"]


@pytest.fixture
def make_result():
    """A row with a name, a size and a mean, all that the front looks at."""

    class Row:
        def __init__(self, name, dim, mean):
            self.name, self.dim, self.mean_value = name, dim, mean
            self.metrics = self

        def mean(self):
            return self.mean_value

    return Row


def _result(path, name="faq", digest="d1", scores=(1.0, 0.0), row="edge-r2"):
    """A result file of one row over forty questions, half of which score one and half the other."""
    per_query = {"ndcg_at_10": {f"q{i}": scores[i % 2] for i in range(40)}}
    sets = [{"eval_set": name, "digest": digest, "results": [{"filter": row, "per_query": per_query}]}]
    path.write_text(json.dumps({"sets": sets}))
    return path


def test_two_results_are_compared_question_by_question(run, tmp_path):
    a = _result(tmp_path / "a.json", scores=(0.5, 0.5))
    b = _result(tmp_path / "b.json", scores=(0.9, 0.6))
    done = run("compare", a, b, "--json", tmp_path / "c.json")
    assert done.code == 0 and "better" in done.out and "+25.0" in done.out
    (found,) = json.loads((tmp_path / "c.json").read_text())["comparisons"]
    assert found["means"] == pytest.approx([0.5, 0.75])
    versus = found["b_minus_a"]
    assert (versus["n"], versus["wins"], versus["losses"]) == (40, 40, 0)
    assert versus["difference"] == pytest.approx(0.25) and versus["low"] > 0.2
    back = run("compare", b, a)
    assert "worse" in back.out and "-25.0" in back.out


def test_what_cannot_be_compared_is_refused(run, tmp_path):
    a = _result(tmp_path / "a.json")
    refused(run("compare", a, _result(tmp_path / "b.json", digest="d2")), "'faq' is not the same.*d1 and d2")
    refused(run("compare", a, _result(tmp_path / "c.json", name="legal")), "no set is in both files")
    other = _result(tmp_path / "d.json", row="tail-r2")
    refused(run("compare", a, other), "no row has the same name.*--filter-a")
    assert run("compare", a, other, "--filter-a", "edge-r2", "--filter-b", "tail-r2").code == 0
    refused(run("compare", a, other, "--filter-b", "edge-r9"), "no row 'edge-r9' in file A")
    refused(run("compare", a, a, "--metric", "ndcg"), "metric 'ndcg': expected one of ndcg_at_10")
    (tmp_path / "e.json").write_text("[]")
    refused(run("compare", a, tmp_path / "e.json"), "is not a result of `evaluate --json`")


def test_a_set_is_looked_over(run, eval_set, tmp_path):
    pytest.importorskip("qdrant_edge", reason="the edge extra is not installed")
    words = ("check-eval-set", eval_set, "--json", tmp_path / "c.json")
    found = run(*words)
    # Both questions are a passage's own text, and the same one.
    assert found.code == 1 and re.search(r"questions with the same text: q1 = q2", found.out)
    assert "copy 7 words or more of a relevant passage: q1" in found.out
    report = json.loads((tmp_path / "c.json").read_text())["tiny"]
    assert (report["passages"], report["questions"], report["grades"]) == (2, 2, {"1": 2})
    # BM25 finds p1 for both, which answers q1 alone.
    assert report["bm25"] == pytest.approx(0.5) and report["near"] == 0
    queries = [{"_id": "q1", "text": "my notebook was pinched"}, {"_id": "q2", "text": "laptop boss days"}]
    (eval_set / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    mended = run(*words)
    assert mended.code == 0 and LAPTOP not in mended.out
