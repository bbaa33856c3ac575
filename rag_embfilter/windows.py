"""Texts in windows: which are good, which are equal, what came of them, and how far along they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.inputs import fault
from rag_embfilter.passes import PassStats, Tell

FloatArray = NDArray[np.float32]
# Texts that are sorted and batched together: enough to batch well, bounded in memory. The first windows
# are smaller, so that the model works while the next ones are tokenised.
WINDOW = 8192
FIRST_WINDOW = 2048
WINDOW_CHARACTERS = 64_000_000


@dataclass
class EncodeStats(PassStats):
    """What an encoder has done so far: `PassStats`, and texts seen, texts cut, and tokens of text lost to
    the cut.
    """

    texts: int = 0
    truncated: int = 0
    tokens_lost: int = 0

    def __str__(self) -> str:
        return f"{self.truncated} of {self.texts} texts truncated, {self.tokens_lost}+ tokens lost"


@dataclass
class Window:
    """Texts after their passes.

    Attributes:
        states: pooled float32 `[n, hidden]`, neither scaled nor checked.
        lost: tokens of each text that were cut, int `[n]`.
        problems: position of a text that has no states -> reason.
        stats: what the passes cost.
    """

    states: FloatArray
    lost: NDArray[np.int64]
    problems: dict[int, str] = field(default_factory=dict)
    stats: PassStats = field(default_factory=PassStats)


def windows(texts: Iterable[str], parallel: int = 1) -> Iterator[list[str]]:
    """Texts in windows, bounded in number and characters; the first ones are smaller."""
    window: list[str] = []
    size, characters = min(FIRST_WINDOW, WINDOW), 0
    for text in texts:
        window.append(text)
        characters += len(text) if isinstance(text, str) else 0
        if len(window) >= size * parallel or characters >= WINDOW_CHARACTERS:
            yield window
            window, size, characters = [], min(2 * size, WINDOW), 0
    if window:
        yield window


class Texts:
    """Texts with what is wrong with some, and those that are good and differ.

    Attributes:
        size: how many there are.
        problems: position -> why it cannot be embedded.
        good: positions of the others.
        unique: their texts, each once.
        counts: how often each of those is there, int `[unique]`.
    """

    def __init__(self, texts: Sequence[str], unknown: Sequence[str]) -> None:
        self.size = len(texts)
        self.problems = {i: why for i, text in enumerate(texts) if (why := fault(text, unknown))}
        self.good = [i for i in range(len(texts)) if i not in self.problems]
        self.unique = list(dict.fromkeys(texts[i] for i in self.good))
        place = {text: i for i, text in enumerate(self.unique)}
        self._place = np.array([place[texts[i]] for i in self.good], dtype=np.int64)
        self.counts = np.bincount(self._place, minlength=len(self.unique))

    def spread(self, states: Sequence[FloatArray], width: int) -> FloatArray:
        """States of the unique texts as rows `[size, width]`, zero where there is a problem."""
        joined = np.concatenate(states) if states else np.empty((0, width), dtype=np.float32)
        if len(joined) == self.size:
            return joined
        rows = np.zeros((self.size, width), dtype=np.float32)
        rows[self.good] = joined[self._place]
        return rows

    def everywhere(self, problems: dict[int, str]) -> dict[int, str]:
        """Problems of unique texts at every place that these texts are at."""
        return {
            self.good[i]: why for place, why in problems.items() for i in np.flatnonzero(self._place == place)
        }


class Progress:
    """Tells how many texts are done when so many groups of templates have passed the positions told."""

    def __init__(self, counts: NDArray[np.int64], groups: int, progress: Callable[[int], None]) -> None:
        self.counts, self.groups, self.progress = counts, groups, progress
        self.passed = self.told = 0

    def __call__(self, positions: Sequence[int]) -> None:
        """Positions of the unique texts that one group is done with."""
        self.passed += int(self.counts[list(positions)].sum())
        if (now := self.passed // self.groups) > self.told:
            self.progress(now - self.told)
            self.told = now


def told_from(start: int, tell: Callable[[Sequence[int]], None] | None) -> Tell | None:
    """`tell` for positions within a window that begins at `start`."""
    return None if tell is None else lambda positions: tell([start + i for i in positions])
