"""`demo`: the main job from start to end on a domain of this repository."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show
from pipelines.evaluate_cmd import run_evaluation

if TYPE_CHECKING:
    from rag_embfilter.evaluation import Evaluation

EVAL_SETS = Path(__file__).resolve().parent.parent / "eval_sets"


@show.guarded
def demo(
    eval_set: Annotated[Path, typer.Argument(help="An evaluation set.")] = EVAL_SETS / "faq",
    out: Annotated[Path, typer.Option(help="Folder of the JSON result and the picture.")] = Path("results"),
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
) -> None:
    """Ingest a domain with SmolLM2, write raw and edge at 2, 4 and 8, evaluate, and show an example.

    A second run is quick: weights and filter are cached, and unchanged passages are not encoded again.
    """
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.eval_set import EvalSet
    from rag_embfilter.store import Store

    start = time.perf_counter()
    loaded = EvalSet.load(eval_set)
    show.err.print("Loading SmolLM2-135M ...")
    encoder = Encoder("smollm2", dtype="float32")  # the same figures on every machine
    filters, _ = options.make_filters(encoder, ["edge"], [2, 4, 8], raw=True)
    with Store(path=qdrant_path) as store:
        (evaluation,) = run_evaluation(
            [loaded], encoder, filters, store, ragas=True, json_file=out / "demo.json", plot=out / "demo.png"
        )
        _example(evaluation)
    show.out.print(f"\nDone in {time.perf_counter() - start:.0f} s. Search these passages yourself:")
    base = evaluation.results[0].collection.removesuffix("-raw")
    elsewhere = "" if qdrant_path == options.DEFAULT_PATH else f" --qdrant-path {qdrant_path}"
    show.out.print(
        f'  {_python()} -m pipelines search "my laptop was stolen" --collection {base}{elsewhere}',
        soft_wrap=True,
    )


def _example(evaluation: Evaluation) -> None:
    """The question that gained most, with the first passage of raw and of the best filter."""
    raw, best = evaluation.results[0], evaluation.best()
    if best is raw:
        return
    before, after = (r.metrics.per_query["ndcg_at_10"] for r in (raw, best))
    query = max(sorted(after), key=lambda q: after[q] - before[q])
    question = evaluation.eval_set.queries[query]
    show.out.print(f"\nWhere it helps most: [italic]{show.escape(question)}[/]", soft_wrap=True)
    for result in (raw, best):
        passage = evaluation.eval_set.corpus[result.run[query][0]]
        good = evaluation.eval_set.qrels[query].get(result.run[query][0], 0) > 0
        mark = "[green]right[/]" if good else "[red]wrong[/]"
        show.out.print(f"  {result.embfilter.name:8} finds first ({mark}): {show.escape(passage.title)}")


def _python() -> str:
    """This interpreter as a person here would type it."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else "python"
