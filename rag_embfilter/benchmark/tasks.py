"""MTEB's task classes: those it knows by name, and local folders as tasks of the same classes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rag_embfilter.benchmark.folders import FolderTask
from rag_embfilter.errors import ConfigError, EvalSetError, MissingExtraError
from rag_embfilter.eval_set import EvalSet

# Task class and main score of each category, as in MTEB English v1, which the paper reports.
CLASSES = {
    "STS": ("AbsTaskSTS", "cosine_spearman"),
    "Classification": ("AbsTaskClassification", "accuracy"),
    "Clustering": ("AbsTaskClusteringLegacy", "v_measure"),
    "PairClassification": ("AbsTaskPairClassification", "max_ap"),
    "Reranking": ("AbsTaskRetrieval", "map_at_1000"),
    "Retrieval": ("AbsTaskRetrieval", "ndcg_at_10"),
}


def require_mteb() -> ModuleType:
    """The mteb package. Raises `MissingExtraError` when it is absent or broken."""
    try:
        import mteb
    except Exception as error:
        # Not ImportError alone: it imports much, each part of which may fail in its own way.
        raise MissingExtraError(
            f"MTEB cannot be imported ({type(error).__name__}: {error}). Install it with "
            "`pip install 'rag-embfilter[mteb]'`; `evaluate` works without it."
        ) from error
    module: ModuleType = mteb
    return module


def named_task(name: str) -> Any:
    """A task that MTEB knows, its data not loaded. Raises `ConfigError` for an unknown name, or no text."""
    try:
        task = require_mteb().get_task(name)
    except KeyError as error:
        hint = str(error).partition("Did you mean: ")[2].strip("\"'?")
        near = f" Did you mean {hint}?" if hint else ""
        raise ConfigError(f"{name!r} is neither a folder nor a task that MTEB knows.{near}") from error
    if list(task.metadata.modalities) != ["text"]:
        raise ConfigError(f"MTEB task {name!r} is about {', '.join(task.metadata.modalities)}; only text is.")
    return task


def load_named(task: Any) -> None:
    """Load a named task's data from the hub. Raises `EvalSetError` when that does not work."""
    for part in parts(task):
        try:
            part.load_data()
        except Exception as error:
            # The hub's client, datasets and MTEB's own loaders each fail in their own ways.
            why = next(iter(str(error).splitlines()), "").strip()
            raise EvalSetError(
                f"the data of MTEB task {part.metadata.name!r} cannot be loaded from the hub "
                f"({type(error).__name__}: {why}). Where no hub can be reached, name a local folder instead "
                "(layouts: docs/mteb.md)."
            ) from error


def parts(task: Any) -> list[Any]:
    """The task itself, or those that an aggregate is made of."""
    return list(task.metadata.tasks) if task.is_aggregate else [task]


def folder_task(task: FolderTask) -> Any:
    """A folder's task as an instance of MTEB's own class, its data loaded."""
    from mteb.abstasks.task_metadata import TaskMetadata

    class_name, main_score = CLASSES[task.category]
    metadata = TaskMetadata(
        name=f"{task.name}-{task.category}",
        type=task.category,
        main_score=main_score,
        description="A local folder.",
        dataset={"path": task.name, "revision": task.digest},
        category="t2c" if task.category == "Classification" else "t2t",
        eval_splits=["test"],
        eval_langs=["und-Zyyy"],  # a folder does not say
    )
    return _local(class_name)(metadata, _dataset(task))


@functools.cache
def _local(class_name: str) -> type:
    """MTEB's task class of that name, with data in memory in place of the hub's."""
    from mteb import abstasks

    base: Any = getattr(abstasks, class_name)

    def start(self: Any, metadata: Any, dataset: Any) -> None:
        self.metadata = metadata  # before MTEB's constructor, which reads it
        base.__init__(self)
        self.dataset = dataset
        self.data_loaded = True

    # Its data is there; nothing is to be loaded or transformed.
    members = {"__init__": start, "load_data": lambda self, *_, **__: None}
    return type(f"Local{class_name}", (base,), members)


def _dataset(task: FolderTask) -> Any:
    from datasets import Dataset, DatasetDict

    if task.eval_set is not None:
        return {"default": {"test": _retrieval_split(task.eval_set, task.candidates)}}
    return DatasetDict({name: Dataset.from_dict(dict(split)) for name, split in task.splits.items()})


def _retrieval_split(eval_set: EvalSet, candidates: Mapping[str, list[str]] | None) -> dict[str, Any]:
    """MTEB's form of a retrieval split; it joins title and text as we do."""
    from datasets import Dataset

    passages = eval_set.corpus
    corpus = {
        "id": list(passages),
        "title": [passage.title for passage in passages.values()],
        "text": [passage.text for passage in passages.values()],
    }
    queries = {"id": list(eval_set.queries), "text": list(eval_set.queries.values())}
    return {
        "corpus": Dataset.from_dict(corpus),
        "queries": Dataset.from_dict(queries),
        "relevant_docs": {query: dict(grades) for query, grades in eval_set.qrels.items()},
        "top_ranked": None if candidates is None else {q: list(ids) for q, ids in candidates.items()},
    }
