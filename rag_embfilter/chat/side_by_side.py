"""The same question against two collections: what each finds, what moved, and what each costs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rag_embfilter.chat.retrieval import ChatRetriever
from rag_embfilter.store import CollectionInfo, Hit

BITS = {"none": 0, "scalar": 8, "binary": 1}  # a dimension, kept beside the whole vectors


@dataclass(frozen=True)
class Side:
    """One collection's answer.

    Attributes:
        hits: best first.
        encode_ms, search_ms: time for the question's vector and for the search, in milliseconds.
        bytes_per_vector: float32 vectors, and what quantisation keeps beside them.
    """

    info: CollectionInfo
    hits: tuple[Hit, ...]
    encode_ms: float
    search_ms: float

    @property
    def bytes_per_vector(self) -> int:
        """Bytes of a stored dense vector."""
        return 4 * self.info.dim + self.info.dim * BITS.get(self.info.quantization, 0) // 8

    def rank(self, point: str) -> int | None:
        """A point's rank from 1, or None."""
        return next((i for i, hit in enumerate(self.hits, 1) if hit.id == point), None)


@dataclass(frozen=True)
class Comparison:
    """Two sides for a question."""

    question: str
    left: Side
    right: Side

    def moved(self, point: str) -> int | None:
        """By how many ranks a point stands higher on the right; None where only one side has it."""
        before, after = self.left.rank(point), self.right.rank(point)
        return None if before is None or after is None else before - after


def side_by_side(question: str, left: ChatRetriever, right: ChatRetriever, limit: int = 5) -> Comparison:
    """Ask two collections by their vectors alone, as fusing ranks would hide what a filter changes.

    Raises as `Store.search` does.
    """
    return Comparison(question, _side(question, left, limit), _side(question, right, limit))


def _side(question: str, retriever: ChatRetriever, limit: int) -> Side:
    start = time.perf_counter()
    vectors = retriever.vectors([question])
    encoded = time.perf_counter()
    if vectors is None:
        (hits,) = retriever.search([question], None, limit)
    else:
        (hits,) = retriever.store.search(retriever.name, vectors, limit)
    end = time.perf_counter()
    return Side(retriever.info, tuple(hits), 1000 * (encoded - start), 1000 * (end - encoded))
