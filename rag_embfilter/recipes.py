"""Recipes: how each filter type's matrix comes about: the paper's, its ablations, baselines, `calibrated`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.calibration import Moments, shrunk_whitening
from rag_embfilter.errors import ConfigError

if TYPE_CHECKING:
    from rag_embfilter.spectrum import Spectrum

DoubleArray = NDArray[np.float64]
# Each of several templates comes to the common PCA with this share of its dimensions, or its even share.
BLOCK_SHARE = 4
MIN_CORPUS = 30  # passages; fewer say nothing about a corpus
NEVER = float("inf")
DEFAULT_KEEP = 0.8
DEFAULT_SHRINKAGE = 4.0


@dataclass(frozen=True)
class Ingredients:
    """What a recipe may use; the costly ones are made when they are asked for.

    Attributes:
        hidden, dim: sizes before and after.
        spectrum: gives the directions of the unembedding.
        response: gives the spectroscopy response of each direction, float64 `[hidden]`.
        moments: of the corpus's raw embeddings, for types that are fitted.
        band_start, seed, keep, shrinkage: see `EmbFilter.from_encoder`.
    """

    hidden: int
    dim: int
    spectrum: Callable[[], Spectrum]
    response: Callable[[], DoubleArray]
    moments: Moments | None = None
    band_start: int = 0
    seed: int = 0
    keep: float = 1.0
    shrinkage: float = 1.0

    @cached_property
    def directions(self) -> DoubleArray:
        """Right-singular vectors as rows, `[hidden, hidden]`."""
        return self.spectrum().directions.astype(np.float64)

    @property
    def fitted(self) -> Moments:
        """The corpus's moments; asked for only by types that need them."""
        if self.moments is None:
            raise ConfigError(
                "this filter type is fitted on a corpus: give corpus=, the raw embeddings of its passages."
            )
        return self.moments

    def rng(self) -> np.random.Generator:
        """A generator for this filter's seed."""
        return np.random.default_rng(self.seed)


@dataclass(frozen=True)
class Recipe:
    """A filter type.

    Attributes:
        make: gives the matrix `[dim, hidden]`.
        about: one line on what it does.
        fitted: needs the corpus.
        centred: subtracts the mean of documents from documents and that of questions from questions.
        from_unembedding: the matrix depends on the unembedding.
        uses: which of `band_start`, `seed`, `keep`, `shrinkage`, `frequencies` shape it.
        full_size: keeps all dimensions, so that only ratio 1 makes sense.
        condensed: several templates share the dimensions by a PCA over all, not evenly.
    """

    make: Callable[[Ingredients], DoubleArray]
    about: str
    fitted: bool = False
    centred: bool = False
    from_unembedding: bool = False
    uses: tuple[str, ...] = ()
    full_size: bool = False
    condensed: bool = False


def _edge(i: Ingredients) -> DoubleArray:
    return i.directions[i.band_start : i.band_start + i.dim]


def _head(i: Ingredients) -> DoubleArray:
    return i.directions[i.hidden - i.dim :]


def _tail(i: Ingredients) -> DoubleArray:
    return i.directions[: i.dim]


def _mid(i: Ingredients) -> DoubleArray:
    low = i.dim // 2
    return np.concatenate([i.directions[:low], i.directions[i.hidden - (i.dim - low) :]])


def _rand(i: Ingredients) -> DoubleArray:
    return i.directions[np.sort(i.rng().choice(i.hidden, i.dim, replace=False))]


def _ideal(i: Ingredients) -> DoubleArray:
    return i.directions[np.sort(np.argsort(i.response(), kind="stable")[: i.dim])]


def _identity(i: Ingredients) -> DoubleArray:
    return np.eye(i.hidden)


def _leading(i: Ingredients) -> DoubleArray:
    return np.eye(i.dim, i.hidden)


def _coordinates(i: Ingredients) -> DoubleArray:
    return np.eye(i.hidden)[np.sort(i.rng().choice(i.hidden, i.dim, replace=False))]


def _gaussian(i: Ingredients) -> DoubleArray:
    projection: DoubleArray = i.rng().normal(size=(i.dim, i.hidden)) / np.sqrt(i.dim)
    return projection


def _all_but_the_top(i: Ingredients) -> DoubleArray:
    """Without the top `hidden / 100` principal components (Mu & Viswanath 2018, arXiv 1702.01417)."""
    _, vectors = np.linalg.eigh(i.fitted.covariance)
    top = vectors[:, -max(1, round(i.hidden / 100)) :]
    projector: DoubleArray = np.eye(i.hidden) - top @ top.T
    return projector


def _pca(i: Ingredients) -> DoubleArray:
    return shrunk_whitening(i.fitted.covariance, np.eye(i.hidden), i.dim, NEVER)


def _whitened(i: Ingredients) -> DoubleArray:
    return shrunk_whitening(i.fitted.covariance, np.eye(i.hidden), i.dim, 1e-6)


def _calibrated(i: Ingredients) -> DoubleArray:
    kept = max(i.dim, round(i.keep * i.hidden))
    start = (i.hidden - kept) // 2
    return shrunk_whitening(i.fitted.covariance, i.directions[start : start + kept], i.dim, i.shrinkage)


RECIPES: dict[str, Recipe] = {
    "raw": Recipe(_identity, "removes nothing", full_size=True),
    "edge": Recipe(_edge, "the paper's: keeps the middle", from_unembedding=True, uses=("band_start",)),
    "head": Recipe(_head, "keeps the smallest singular values", from_unembedding=True),
    "tail": Recipe(_tail, "keeps the largest singular values", from_unembedding=True),
    "mid": Recipe(_mid, "keeps both ends", from_unembedding=True),
    "rand": Recipe(_rand, "random directions", from_unembedding=True, uses=("seed",)),
    "ideal": Recipe(
        _ideal,
        "keeps the directions that frequent tokens respond to least",
        from_unembedding=True,
        uses=("frequencies",),
    ),
    "calibrated": Recipe(
        _calibrated,
        "a thinner edge, centring per role, PCA with shrunk whitening, fitted on the corpus",
        fitted=True,
        centred=True,
        from_unembedding=True,
        uses=("keep", "shrinkage"),
        condensed=True,
    ),
    "leading": Recipe(_leading, "baseline: the first coordinates"),
    "coordinates": Recipe(_coordinates, "baseline: random coordinates", uses=("seed",)),
    "gaussian": Recipe(_gaussian, "baseline: a Gaussian random projection", uses=("seed",)),
    "mean_removed": Recipe(_identity, "baseline: the corpus mean subtracted", fitted=True, full_size=True),
    "all_but_the_top": Recipe(
        _all_but_the_top, "baseline: mean and top components removed", fitted=True, full_size=True
    ),
    "pca": Recipe(_pca, "baseline: PCA of the corpus", fitted=True),
    "whitened": Recipe(_whitened, "baseline: PCA whitening of the corpus", fitted=True),
}
