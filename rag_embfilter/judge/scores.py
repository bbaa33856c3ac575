"""What judging gives, and two things all of it needs: RAGAS itself, and a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from rag_embfilter.errors import MissingExtraError

T = TypeVar("T")
NO_REFERENCE = "no reference answer"
ROUNDING = 1e-6


@dataclass(frozen=True)
class JudgedMetric:
    """One RAGAS metric over many questions.

    Attributes:
        scores: query id -> score in 0..1.
        failures: query id -> why there is no score.
    """

    scores: Mapping[str, float]
    failures: Mapping[str, str]

    @classmethod
    def of(cls, found: Iterable[tuple[str, float | str]]) -> JudgedMetric:
        """Sorts (query id, score or reason) pairs into scores and failures."""
        scores: dict[str, float] = {}
        failures: dict[str, str] = {}
        for query, value in found:
            if isinstance(value, str):
                failures[query] = value
            else:
                scores[query] = value
        return cls(scores, failures)

    @property
    def mean(self) -> float | None:
        """Mean over the scored questions; None when none was."""
        return sum(self.scores.values()) / len(self.scores) if self.scores else None

    @property
    def reasons(self) -> dict[str, int]:
        """Why there are failures, with how many of each, most first."""
        return dict(Counter(self.failures.values()).most_common())

    @property
    def failed_share(self) -> float:
        """Share of failures among the questions that could be asked: a missing reference is no failure."""
        failed = sum(why != NO_REFERENCE for why in self.failures.values())
        return failed / max(1, failed + len(self.scores))


@dataclass(frozen=True)
class Answer:
    """What the generator answered to one question.

    Attributes:
        text: the answer; empty when there is none.
        passages: ids of the passages it saw, best first.
        failure: why there is no answer.
    """

    text: str
    passages: tuple[str, ...]
    failure: str | None = None


@dataclass(frozen=True)
class Judgement:
    """One configuration's answers and what the judge says of them.

    Attributes:
        metrics: metric -> scores.
        answers: query id -> answer; empty when no metric asks for answers.
    """

    metrics: Mapping[str, JudgedMetric]
    answers: Mapping[str, Answer]


def checked(value: object, low: float = 0.0) -> float | str:
    """A score in `low`..1, or why it is none: RAGAS gives NaN for answers that make no sense."""
    score = float(value)  # type: ignore[arg-type]
    if math.isfinite(score) and low - ROUNDING <= score <= 1 + ROUNDING:
        return min(1.0, max(low, score))
    return f"ragas gave {score:g}"


def import_ragas() -> Any:
    """The ragas module. Raises `MissingExtraError` when it is absent or broken."""
    os.environ.setdefault("RAGAS_DO_NOT_TRACK", "true")  # no network but the judge's
    try:
        import ragas
        import ragas.metrics
    except Exception as error:
        # Not ImportError alone: a broken RAGAS fails in its dependencies' own ways.
        raise MissingExtraError(
            f"RAGAS cannot be imported ({type(error).__name__}: {error}). Install it with "
            "`pip install 'rag-embfilter[eval]'`; everything else works without it."
        ) from error
    return ragas


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, so that a caller's running event loop does not matter.

    What interrupts the wait (Ctrl-C) cancels the work.
    """
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def main() -> T:
        task = asyncio.ensure_future(work)
        begun.set_result((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(max_workers=1) as pool:
        done = pool.submit(asyncio.run, main())
        try:
            return done.result()
        except BaseException:
            if not done.done():
                loop, task = begun.result()
                loop.call_soon_threadsafe(task.cancel)
            raise
