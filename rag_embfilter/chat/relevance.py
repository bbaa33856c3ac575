"""Relevance: whether passages are closer to a question than they are to questions about other things.

Scores of an embedder made of a language model say little by themselves: any question lies close to something.
So each collection is asked questions that have nothing to do with it, and what they reach is the yardstick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.chat.words import Words, terms

FloatArray = NDArray[np.float32]
RISK = 0.05  # share of unrelated questions that may pass for related ones
SMALLEST_SPREAD = 1e-6


@dataclass(frozen=True)
class Signals:
    """What speaks for a question's passages.

    Attributes:
        closeness: how much closer the nearest is to the question than to unrelated questions on average, in
            cosine; None where no vectors are compared.
        shared: weight of the words that the question shares with the passage that has most of them, over the
            square root of how many it has, so that long questions are not favoured.
    """

    closeness: float | None
    shared: float

    def row(self) -> list[float]:
        """As numbers."""
        return [self.shared] if self.closeness is None else [self.closeness, self.shared]


@dataclass(frozen=True)
class Relevance:
    """A threshold learnt from what unrelated questions reach in a collection.

    Attributes:
        means, spreads: of each signal over the unrelated questions.
        threshold: the evidence that all but `RISK` of them stay below.
    """

    means: tuple[float, ...]
    spreads: tuple[float, ...]
    threshold: float

    @classmethod
    def learn(cls, unrelated: Sequence[Signals], risk: float = RISK) -> Relevance:
        """From the signals of unrelated questions, of one kind all."""
        rows = np.array([signals.row() for signals in unrelated], dtype=np.float64)
        means, spreads = rows.mean(axis=0), np.maximum(rows.std(axis=0), SMALLEST_SPREAD)
        evidence = ((rows - means) / spreads).sum(axis=1)
        return cls(tuple(means), tuple(spreads), float(np.quantile(evidence, 1 - risk, method="higher")))

    def evidence(self, signals: Signals) -> float:
        """How far above unrelated questions a question stands, in their standard deviations, summed."""
        return sum(
            (x - mean) / spread
            for x, mean, spread in zip(signals.row(), self.means, self.spreads, strict=True)
        )

    def relevant(self, signals: Signals) -> bool:
        """Whether the evidence is over the threshold."""
        return self.evidence(signals) > self.threshold


def shared_words(words: Words, question: str, texts: Sequence[str]) -> float:
    """`Signals.shared` of a question and passages; 0 where one of them has no word."""
    asked = {term for term, _, _ in terms(question)}
    held = [{term for term, _, _ in terms(text)} for text in texts]
    best = max((sum(words.weight(term) for term in sorted(asked & have)) for have in held), default=0.0)
    return best / math.sqrt(len(asked)) if asked else 0.0
