"""The report of an evaluation: one HTML page that needs nothing else, for people who decide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from pipelines import plot
from pipelines.evaluate_cmd import sentence
from rag_embfilter.eval_set import EvalSet
from rag_embfilter.evaluation import Evaluation, FilterResult
from rag_embfilter.files import write_text
from rag_embfilter.yardstick import YardstickResult

TEMPLATE = Path(__file__).with_name("report.html.j2")
CASES = 3  # questions shown of those that gained, and of those that lost
PASSAGES = 3
LONGEST = 420  # characters of a passage
FLOAT32 = 4


def write_report(path: Path, evaluations: Sequence[Evaluation], provenance: Mapping[str, Any]) -> None:
    """Write the page; `provenance` is what the results file says of where it comes from."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    names = ", ".join(evaluation.eval_set.name for evaluation in evaluations)
    page = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=f"Retrieval on {names}",
        backbone=evaluations[0].encoder.backbone.name if evaluations else "",
        created=provenance.get("created", ""),
        sets=[_set(evaluation) for evaluation in evaluations],
        provenance=list(_flat(provenance)),
    )
    write_text(path, page)


def _set(evaluation: Evaluation) -> dict[str, Any]:
    raw, *others = evaluation.results
    front = pareto_front(evaluation.results)
    best = max(others, key=lambda result: result.metrics.mean(), default=None)
    return {
        "name": evaluation.eval_set.name,
        "questions": len(evaluation.eval_set.queries),
        "passages": len(evaluation.eval_set.corpus),
        "sentence": Text.from_markup(sentence(evaluation)).plain,
        "quality": plot.as_svg(plot.quality_panel, evaluation),
        "pareto": plot.as_svg(plot.pareto_panel, evaluation.results, front),
        "rows": [_row(result, result.name in front) for result in evaluation.rows],
        "moved": [_moved(evaluation.eval_set, raw, result, result is best) for result in others],
    }


def pareto_front(results: Sequence[FilterResult]) -> list[str]:
    """Names of rows, smallest first, that are better than every row of as many dimensions or fewer."""
    front: list[str] = []
    highest = -1.0
    for result in sorted(results, key=lambda r: (r.dim, -r.metrics.mean())):
        if result.dim and result.metrics.mean() > highest:
            front.append(result.name)
            highest = result.metrics.mean()
    return front


def _row(result: FilterResult | YardstickResult, front: bool) -> dict[str, Any]:
    means, versus = result.metrics.means(), result.versus_raw
    others = ("recall_at_10", "recall_at_100", "mrr_at_10", "map_at_100")
    interval = versus and "{:+.1f} [{:+.1f}, {:+.1f}]".format(
        *(100 * value for value in (versus.difference, versus.low, versus.high))
    )
    return {
        "name": result.name,
        "front": front,
        "dim": result.dim,
        "bytes": FLOAT32 * result.dim,
        "ndcg": f"{100 * means['ndcg_at_10']:.1f}",
        "versus": interval or "",
        "verdict": versus.verdict if versus else "",
        "p": f"{versus.p_value:.4f}" if versus else "",
        "wtl": f"{versus.wins}/{versus.ties}/{versus.losses}" if versus else "",
        "others": [f"{100 * means[name]:.1f}" for name in others],
    }


def _moved(eval_set: EvalSet, raw: FilterResult, ours: FilterResult, shown: bool) -> dict[str, Any]:
    """The questions whose nDCG@10 a row raised most against raw, and those it lowered most."""
    before, after = (result.metrics.per_query["ndcg_at_10"] for result in (raw, ours))
    by_gain = sorted(before, key=lambda query: before[query] - after[query])
    gained = [query for query in by_gain[:CASES] if after[query] > before[query]]
    lost = [query for query in reversed(by_gain[-CASES:]) if after[query] < before[query]]
    versus = ours.versus_raw
    return {
        "name": ours.name,
        "open": shown,
        "wins": versus.wins if versus else 0,
        "losses": versus.losses if versus else 0,
        "cases": [_case(eval_set, raw, ours, query) for query in [*gained, *lost]],
    }


def _case(eval_set: EvalSet, raw: FilterResult, ours: FilterResult, query: str) -> dict[str, Any]:
    before, after = (result.metrics.per_query["ndcg_at_10"][query] for result in (raw, ours))
    answers = eval_set.answers.get(query) or []
    return {
        "id": query,
        "question": eval_set.queries[query],
        "answer": answers[0] if answers else "",
        "raw": f"{100 * before:.0f}",
        "ours": f"{100 * after:.0f}",
        "gained": after > before,
        "sides": [
            {"name": result.name, "passages": _passages(eval_set, query, result.run[query][:PASSAGES])}
            for result in (raw, ours)
        ],
    }


def _passages(eval_set: EvalSet, query: str, found: Sequence[str]) -> list[dict[str, Any]]:
    grades = eval_set.qrels.get(query, {})
    return [
        {
            "title": eval_set.corpus[key].title,
            "text": textwrap.shorten(eval_set.corpus[key].text, LONGEST, placeholder=" …"),
            "grade": grades.get(key, 0),
        }
        for key in found
        if key in eval_set.corpus
    ]


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested provenance as lines of a list."""
    lines = []
    for key, value in values.items():
        name = f"{before}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            lines += _flat(value, f"{name}: ")
        elif value is not None:
            lines.append((name, " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)))
    return lines
