"""Runs tasks for raw embeddings and filters, and sums them up by category as the paper does."""

from __future__ import annotations

import copy
import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_embfilter.benchmark.folders import FolderTask, read_folder
from rag_embfilter.benchmark.model import EmbFilterModel, Progress, RawEmbeddings
from rag_embfilter.benchmark.tasks import folder_task, load_named, named_task, parts, require_mteb
from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, EmbFilterError
from rag_embfilter.filters import EmbFilter

AVERAGE = "Average"
# The order of the paper's table; other types follow.
CATEGORIES = (
    "STS", "Classification", "Clustering", "PairClassification", "Reranking", "Retrieval", "Summarization",
)  # fmt: skip


@dataclass(frozen=True)
class TaskScores:
    """One task for all filters.

    Attributes:
        category: MTEB's name of the task type.
        metric: its main score.
        source: `folder` or `hub`.
        revision: digest of a folder's data, or the hub's revision.
        scores: filter name -> main score, mean over splits and languages, 0 to 1.
        details: filter name -> split -> one mapping of all scores per language.
        encoded: texts that were encoded for it, each once for all filters.
        seconds: time it took.
        failure: why there are no scores.
    """

    name: str
    category: str
    metric: str
    source: str
    revision: str
    scores: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Mapping[str, list[dict[str, float | str]]]] = field(default_factory=dict)
    encoded: int = 0
    seconds: float = 0.0
    failure: str | None = None


def run_tasks(
    sources: Sequence[str | Path],
    encoder: Encoder,
    filters: Sequence[EmbFilter],
    limit: int | None = None,
    progress: Progress | None = None,
) -> Iterator[TaskScores]:
    """Evaluate filters on tasks with MTEB's own evaluators, task by task.

    Every text is encoded once for all filters and tasks of the call. Folders are all read, and names looked
    up, before the first text is encoded; the data of named tasks is loaded when their turn comes.

    Args:
        sources: folders (see `read_folder`) and names of MTEB tasks.
        filters: filters that are not fitted.
        limit: for folders, as in `read_folder`.
        progress: as in `RawEmbeddings`.

    Raises:
        MissingExtraError: mteb is not installed.
        EvalSetError: a folder with faults.
        ConfigError: an unknown name, a fitted filter. A named task that cannot be loaded or encoded raises
            nothing: its `failure` says why.
    """
    require_mteb()
    raw = RawEmbeddings(encoder, progress)
    models = {embfilter.name: EmbFilterModel(raw, embfilter) for embfilter in filters}
    found = [task for source in sources for task in _find(source, limit)]
    for task in found:
        if isinstance(task, FolderTask):
            yield _run(folder_task(task), models, raw, task.name, "folder")
        else:
            yield _run_named(task, models, raw)


def _find(source: str | Path, limit: int | None) -> list[Any]:
    """The tasks of a folder, or the one of that name."""
    if Path(source).is_dir():
        return list(read_folder(source, limit))
    if len(Path(source).parts) > 1:
        raise ConfigError(f"{str(source)!r} is no folder; expected one, or the name of an MTEB task.")
    return [named_task(str(source))]


def _run_named(task: Any, models: Mapping[str, EmbFilterModel], raw: RawEmbeddings) -> TaskScores:
    """A task of the hub; what goes wrong with it is told, and does not end the others."""
    try:
        with _quiet():
            load_named(task)
        scores = _run(task, models, raw, task.metadata.name, "hub")
    except EmbFilterError as error:
        known = task.metadata
        revision = str(known.revision)
        return TaskScores(known.name, known.type, known.main_score, "hub", revision, failure=str(error))
    for part in parts(task):
        part.unload_data()
    return scores


def _run(
    task: Any, models: Mapping[str, EmbFilterModel], raw: RawEmbeddings, name: str, source: str
) -> TaskScores:
    began, before = time.monotonic(), raw.encoded
    scores, details = {}, {}
    for filter_name, model in models.items():
        with _quiet():
            result = _evaluate(task, model)
        scores[filter_name] = float(result.get_score())
        details[filter_name] = {
            split: [_plain(each) for each in found] for split, found in result.scores.items()
        }
    known = task.metadata
    return TaskScores(
        name, known.type, known.main_score, source, str(known.revision), scores, details,
        raw.encoded - before, time.monotonic() - began,
    )  # fmt: skip


def _evaluate(task: Any, model: EmbFilterModel) -> Any:
    """MTEB's result of one task and model."""
    # Some tasks draw samples from a generator that lives as long as they do; every filter gets the same.
    again = copy.copy(task)
    again.rng_state, again.np_rng = copy.deepcopy((task.rng_state, task.np_rng))
    result = require_mteb().evaluate(
        model,
        again,
        co2_tracker=False,
        cache=None,
        show_progress_bar=False,
        encode_kwargs={"batch_size": 256, "show_progress_bar": False},
    )
    return result.task_results[0]


def _plain(scores: Mapping[str, Any]) -> dict[str, float | str]:
    """The single figures among MTEB's scores, without the many on abstention, and the language's name."""
    figures = {
        key: float(value)
        for key, value in scores.items()
        if isinstance(value, int | float) and math.isfinite(value) and not key.startswith("nauc_")
    }
    return {"hf_subset": str(scores["hf_subset"]), **figures}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars of datasets and the remarks of scikit-learn, whose fits MTEB ends early on purpose."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hidden, level = are_progress_bars_disabled(), logging.getLogger("mteb").level
    disable_progress_bars()
    logging.getLogger("mteb").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="sklearn")
            warnings.filterwarnings("ignore", module="mteb")
            yield
    finally:
        logging.getLogger("mteb").setLevel(level)
        if not hidden:
            enable_progress_bars()


def category_means(tasks: Sequence[TaskScores]) -> dict[str, dict[str, float]]:
    """Category -> filter name -> mean main score, in the paper's order; `AVERAGE` is over all tasks run."""
    ran = [task for task in tasks if task.failure is None]
    held = {task.category for task in ran}
    order = [*(c for c in CATEGORIES if c in held), *sorted(held - set(CATEGORIES))]
    groups = {category: [task for task in ran if task.category == category] for category in order}
    means = {category: _means(group) for category, group in groups.items()}
    return means | ({AVERAGE: _means(ran)} if ran else {})


def _means(tasks: Sequence[TaskScores]) -> dict[str, float]:
    return {name: sum(task.scores[name] for task in tasks) / len(tasks) for name in tasks[0].scores}
