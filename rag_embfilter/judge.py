"""RAGAS: its metrics over our retrievals. The only file that imports ragas, and only when asked to."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from rag_embfilter.errors import ConfigError, MissingExtraError

T = TypeVar("T")
ID_METRICS = ("id_based_context_precision", "id_based_context_recall")


@dataclass(frozen=True)
class JudgedMetric:
    """One RAGAS metric over many questions.

    Attributes:
        scores: query id -> score in 0..1.
        failures: query id -> why there is no score.
    """

    scores: Mapping[str, float]
    failures: Mapping[str, str]

    @property
    def mean(self) -> float | None:
        """Mean over the scored questions; None when none was."""
        return sum(self.scores.values()) / len(self.scores) if self.scores else None


def available() -> str | None:
    """None when RAGAS can be used, else the reason why not."""
    try:
        _ragas()
    except MissingExtraError as error:
        return str(error)
    return None


def id_metrics(
    qrels: Mapping[str, Mapping[str, int]], run: Mapping[str, Sequence[str]], k: int = 10
) -> dict[str, JudgedMetric]:
    """RAGAS's id-based context precision and recall of the first `k` passages; no judge, no network.

    Precision is over the passages retrieved, recall over those of grade 1 or more. Ids are compared as
    text, and a passage retrieved twice counts once, as in `rank_metrics`. A question with no passage
    retrieved counts 0 in both; one without relevant passages is a failure. Works inside a running event
    loop. Raises `MissingExtraError` when RAGAS is absent or broken.
    """
    if k < 1:
        raise ConfigError(f"k {k}: expected 1 or more.")
    precision, recall, sample_type = _ragas()
    scores: dict[str, dict[str, float]] = {name: {} for name in ID_METRICS}
    failures: dict[str, dict[str, str]] = {name: {} for name in ID_METRICS}
    judged = {str(query): grades for query, grades in qrels.items()}
    ranked = {str(query): list(dict.fromkeys(map(str, passages))) for query, passages in run.items()}

    async def score_all() -> None:
        for query, grades in judged.items():
            relevant = [str(passage) for passage, grade in grades.items() if grade > 0]
            found = ranked.get(query, [])[:k]
            for name, metric in zip(ID_METRICS, (precision(), recall()), strict=True):
                if not relevant:
                    failures[name][query] = "no relevant passage"
                elif not found:
                    scores[name][query] = 0.0
                else:
                    sample = sample_type(retrieved_context_ids=found, reference_context_ids=relevant)
                    value = float(await metric.single_turn_ascore(sample))
                    if math.isfinite(value):
                        scores[name][query] = value
                    else:
                        failures[name][query] = f"ragas gave {value}"

    _run_apart(score_all())
    return {name: JudgedMetric(scores[name], failures[name]) for name in ID_METRICS}


def _ragas() -> tuple[Any, Any, Any]:
    """RAGAS's two metrics and its sample class. Raises `MissingExtraError`."""
    os.environ.setdefault("RAGAS_DO_NOT_TRACK", "true")  # no network unless a judge is asked for
    try:
        from ragas import SingleTurnSample
        from ragas.metrics import IDBasedContextPrecision, IDBasedContextRecall
    except Exception as error:
        # Not ImportError alone: a broken RAGAS fails in its dependencies' own ways.
        raise MissingExtraError(
            f"RAGAS cannot be imported ({type(error).__name__}: {error}). Install it with "
            "`pip install 'rag-embfilter[eval]'`; everything else works without it."
        ) from error
    return IDBasedContextPrecision, IDBasedContextRecall, SingleTurnSample


def _run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, so that a caller's running event loop does not matter."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, work).result()
