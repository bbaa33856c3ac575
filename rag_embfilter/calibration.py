"""Calibration: what is fitted on a corpus, in one streaming pass and the memory of `hidden^2`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.errors import ConfigError

FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of embeddings.

    Attributes:
        n: embeddings seen.
        mean: float64 `[hidden]`.
        covariance: float64 `[hidden, hidden]`, divided by `n`.
    """

    n: int
    mean: DoubleArray
    covariance: DoubleArray

    @classmethod
    def of(cls, embeddings: FloatArray | Iterable[FloatArray], hidden_size: int) -> Moments:
        """Moments of an array `[n, hidden]`, or of an iterable of such arrays that is read once.

        Raises `ConfigError` for another shape, values that are not finite, or no embedding at all.
        """
        n, mean = 0, np.zeros(hidden_size)
        scatter = np.zeros((hidden_size, hidden_size))
        for rows in _chunks(embeddings, hidden_size):
            # Chan et al. 1983: moments of parts merge exactly, without the cancellation of E[xx] - E[x]^2.
            part_mean = rows.mean(axis=0)
            centred = rows - part_mean
            shift = part_mean - mean
            total = n + len(rows)
            scatter += centred.T @ centred + np.outer(shift, shift) * (n * len(rows) / total)
            mean += shift * (len(rows) / total)
            n = total
        if n == 0:
            raise ConfigError("there is no embedding to fit on; give at least some passages of the corpus.")
        return cls(n, mean, scatter / n)

    def part(self, rows: slice) -> Moments:
        """Moments of some of the dimensions."""
        return Moments(self.n, self.mean[rows], self.covariance[rows, rows])


def _chunks(embeddings: FloatArray | Iterable[FloatArray], hidden_size: int) -> Iterator[DoubleArray]:
    parts = [embeddings] if isinstance(embeddings, np.ndarray) else embeddings
    for part in parts:
        array = np.asarray(part)
        if array.ndim != 2 or array.shape[1] != hidden_size:
            raise ConfigError(f"embeddings of shape {array.shape}: expected [n, {hidden_size}].")
        for start in range(0, len(array), ROWS_AT_ONCE):
            rows = array[start : start + ROWS_AT_ONCE].astype(np.float64)
            if not np.isfinite(rows).all():
                raise ConfigError("embeddings to fit on hold NaN or Inf; leave those rows out.")
            yield rows


def shrunk_whitening(covariance: DoubleArray, basis: DoubleArray, dim: int, shrinkage: float) -> DoubleArray:
    """PCA within a subspace, each component divided by the root of its shrunk variance.

    Args:
        covariance: `[hidden, hidden]`.
        basis: orthonormal rows `[k, hidden]` that span the subspace, `k >= dim`.
        dim: components to keep, largest variance first.
        shrinkage: variances `w` become `w + shrinkage * mean(w)` over the kept components; infinite
            keeps plain PCA.

    Returns: float64 `[dim, hidden]`; the component of largest magnitude in each row is positive.
    """
    variances, vectors = np.linalg.eigh(basis @ covariance @ basis.T)
    order = np.argsort(-variances, kind="stable")[:dim]
    # A corpus spans at most as many dimensions as it has passages; the rest must not be blown up.
    variances = np.clip(variances[order], 1e-9 * variances.max(), None)
    if variances[0] <= np.finfo(np.float32).tiny:
        raise ConfigError("the passages to fit on are all alike; give different ones.")
    components = vectors[:, order].T @ basis
    peaks = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    components *= np.where(peaks < 0, -1.0, 1.0)
    if np.isinf(shrinkage):
        return components
    whitened: DoubleArray = components / np.sqrt(variances + shrinkage * variances.mean())[:, None]
    return whitened
