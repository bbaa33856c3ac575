"""`--yardstick`: trained embedders beside the filters of an evaluation, and what to say of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines import show

if TYPE_CHECKING:
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.evaluation import Evaluation
    from rag_embfilter.yardstick import Yardstick

Yardsticks = Annotated[
    list[str] | None,
    typer.Option(
        "--yardstick",
        metavar="NAME",
        help="A trained embedder to measure beside the filters: minilm (all-MiniLM-L6-v2), a "
        "sentence-transformers folder or a hub id; may be given again.",
    ),
]


def load(names: Sequence[str] | None, encoder: Encoder) -> list[Yardstick]:
    """The yardsticks named, on the encoder's device."""
    if not names:
        return []
    from rag_embfilter.yardstick import Yardstick

    return [Yardstick(name, str(encoder.backbone.device)) for name in dict.fromkeys(names)]


def measure(evaluation: Evaluation, yardsticks: Sequence[Yardstick]) -> None:
    """Add each yardstick's result to an evaluation."""
    if not yardsticks:
        return
    from rag_embfilter.yardstick import measure as measured

    eval_set, raw = evaluation.eval_set, evaluation.results[0].metrics
    texts = len(eval_set.corpus) + len(eval_set.queries)
    with show.progress_bar() as progress:
        for yardstick in yardsticks:
            label = show.escape(f"{eval_set.name}: {yardstick.name}")
            bar = progress.add_task(label, total=texts, unit="texts")
            result = measured(yardstick, eval_set, raw, partial(progress.advance, bar))
            evaluation.yardsticks.append(result)


def sentences(evaluation: Evaluation) -> list[str]:
    """A sentence for each yardstick that beats the best row beyond noise."""
    from rag_embfilter.metrics import compare

    best = max(evaluation.results, key=lambda result: result.metrics.mean())
    said = []
    for each in evaluation.yardsticks:
        versus = compare(each.metrics.per_query["ndcg_at_10"], best.metrics.per_query["ndcg_at_10"])
        if versus.verdict == "better":
            interval = f"95% interval {100 * versus.low:.1f} to {100 * versus.high:.1f}"
            said.append(
                f"[yellow]{show.escape(each.name)}, a trained embedder, beats the best row here, "
                f"{best.name}[/], by {100 * versus.difference:.1f} points ({interval})."
            )
    return said


def as_json(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The yardsticks' results, in the form of the filters'."""
    return [
        {
            "name": each.name,
            "dim": each.dim,
            "source": each.source,
            "revision": each.revision,
            "metrics": each.metrics.means(),
            "versus_raw": vars(each.versus_raw),
            "per_query": {name: dict(scores) for name, scores in each.metrics.per_query.items()},
            "run": {query: list(passages[:10]) for query, passages in each.run.items()},
        }
        for each in evaluation.yardsticks
    ]
