"""From pooled states to unit embeddings: each template's part for itself, then the whole, with a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.errors import EncodingError
from rag_embfilter.filters import unit_rows

FloatArray = NDArray[np.float32]


def unit_embeddings(states: FloatArray, templates: int = 1) -> FloatArray:
    """What an encoder with so many templates gives with `normalize=True`, from what it gives without.

    Takes and returns float32 `[n, hidden]`. Raises `EncodingError` for rows that are not finite or are zero.
    """
    if templates == 1:
        return unit_rows(states)
    parts = states.copy()
    unit_parts(parts, templates)
    return unit_rows(parts)


def unit_parts(pooled: FloatArray, parts: int) -> None:
    """Scale each template's part of each row to unit length, in place; a part without length stays."""
    blocks = pooled.reshape(len(pooled), parts, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.linalg.norm(blocks, axis=2, keepdims=True)
        # A part that is zero or not finite makes the whole row one that is reported.
        np.divide(blocks, np.where(norms > 0, norms, np.nan), out=blocks)


def checked(
    pooled: FloatArray, good: Sequence[int], problems: Mapping[int, str], normalize: bool, first: int = 0
) -> FloatArray:
    """The rows at `good` checked for NaN, Inf and zero.

    Raises `EncodingError` with all problems, old and new, counted from `first`.
    """
    try:
        unit = unit_rows(pooled if len(good) == len(pooled) else pooled[good])
    except EncodingError as error:
        assert error.embeddings is not None
        unit = error.embeddings
        problems = {good[i]: why for i, why in error.problems.items()} | dict(problems)
    if normalize and len(good) == len(pooled):
        pooled = unit
    elif normalize:
        pooled[good] = unit
    if problems:
        pooled[sorted(problems)] = 0.0
        raise EncodingError({first + i: why for i, why in sorted(problems.items())}, pooled)
    return pooled
