"""`mteb`: raw embeddings and filters on MTEB's tasks, or on local folders by MTEB's evaluators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines import options, show
from rag_embfilter.errors import ConfigError

if TYPE_CHECKING:
    from rag_embfilter.benchmark import TaskScores
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.filters import EmbFilter

# Narrow enough for the paper's table on one screen.
SHORT = {
    "Classification": "Class.",
    "Clustering": "Clust.",
    "PairClassification": "Pair",
    "Reranking": "Rerank",
    "Retrieval": "Retr.",
    "Summarization": "Summ.",
}


@show.guarded
def mteb(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK_OR_FOLDER...",
            help="Names of MTEB tasks (their data comes from the hub), or folders: BEIR files, STS, pairs, "
            "classification and clustering tables.",
        ),
    ],
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["prompteol"],  # noqa: B006 - typer copies it
    query_template: options.QueryTemplate = None,
    pooling: options.Pooling = None,
    max_length: options.MaxLength = 512,
    device: options.Device = None,
    dtype: options.Dtype = None,
    filter_types: options.FilterTypes = ["edge"],  # noqa: B006
    filter_ratios: options.FilterRatios = [2, 4, 8],  # noqa: B006
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Texts of each split of a folder's classification and clustering, drawn evenly over the "
            "labels.",
        ),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Compare filters with raw embeddings on MTEB tasks, by the paper's categories.

    Every text is encoded once for all filters. The exit code is 1 when a task could not be run; the result
    file is written after every task.
    """
    from pipelines import results  # noqa: F401 - what could fail at import fails now, not after hours
    from rag_embfilter.benchmark import require_mteb, run_tasks

    require_mteb()
    backbone = options.lent(backbone, unembedding_from)
    encoder = options.make_encoder(
        backbone, revision, template, query_template, pooling, max_length, device, dtype
    )
    filters, fitted = options.make_filters(encoder, filter_types, filter_ratios, raw=True)
    if fitted:
        raise ConfigError(
            f"filter_type {fitted[0].filter_type!r} is fitted on a corpus, and MTEB's tasks come without "
            "one: take types that are not fitted, or `evaluate` for retrieval."
        )
    done: list[TaskScores] = []
    with _progress() as progress:
        for scores in run_tasks(tasks, encoder, filters, limit, progress):
            done.append(scores)
            if json_file is not None:
                _write(json_file, encoder, filters, limit, done)
    _print(done, filters, encoder)
    if json_file is not None:
        show.out.print(f"JSON: {show.escape(str(json_file))}", soft_wrap=True)
    failed = [(task.name, task.failure) for task in done if task.failure]
    show.listed("Tasks without scores", failed)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A bar of texts, whose total grows with each batch of them that a task brings."""
    with show.progress_bar() as progress:
        bar = progress.add_task("encoding", total=0, unit="texts")
        found = 0

        def tell(what: str, n: int) -> None:
            nonlocal found
            if what == "found":
                found += n
                progress.update(bar, total=found)
            else:
                progress.advance(bar, n)

        yield tell


def _print(done: Sequence[TaskScores], filters: Sequence[EmbFilter], encoder: Encoder) -> None:
    """The paper's table, and one of the tasks."""
    from rag_embfilter.benchmark import category_means

    ran = [task for task in done if task.failure is None]
    if not ran:
        return
    means = category_means(done)
    count = {name: sum(task.category == name for task in ran) for name in means}
    head = [f"{SHORT.get(name, name)} ({count[name] or len(ran)})" for name in means]
    rows = [
        [each.name, str(each.dim), *(_points(found[each.name]) for found in means.values())]
        for each in filters
    ]
    encoded, name = sum(task.encoded for task in ran), encoder.backbone.name
    title = show.escape(f"MTEB's main scores by category (tasks), {name}, {encoded} texts encoded")
    show.out.print()
    show.out.print(show.table(title, ["filter", "dims", *head], rows))
    rows = [
        [show.escape(task.name), task.category, task.metric, *(_points(x) for x in task.scores.values())]
        for task in ran
    ]
    show.out.print()
    show.out.print(show.table("Tasks", ["task", "category", "metric", *ran[0].scores], rows, left=3))


def _points(score: float) -> str:
    return "-" if math.isnan(score) else f"{100 * score:.1f}"


def _write(
    path: Path,
    encoder: Encoder,
    filters: Sequence[EmbFilter],
    limit: int | None,
    done: Sequence[TaskScores],
) -> None:
    from pipelines.results import provenance
    from rag_embfilter.benchmark import category_means
    from rag_embfilter.files import write_json

    page: dict[str, Any] = {
        "limit": limit,
        "filters": [
            {"filter": f.name, "dim": f.dim, "filter_parts": dict(f.parts),
             "fingerprint": (encoder.fingerprint | f.fingerprint).digest}
            for f in filters
        ],
        "categories": {name: _finite(means) for name, means in category_means(done).items()},
        "tasks": [vars(task) | {"scores": _finite(task.scores)} for task in done],
    }  # fmt: skip
    write_json(path, provenance(encoder) | page)


def _finite(scores: Any) -> dict[str, float | None]:
    """Scores as JSON has them: a correlation with something constant is no number."""
    return {name: None if math.isnan(score) else score for name, score in scores.items()}
