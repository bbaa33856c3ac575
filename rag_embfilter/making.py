"""Making filters: arguments checked, ingredients gathered, the recipe followed, the fit fingerprinted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag

from rag_embfilter.calibration import Moments, shrunk_whitening
from rag_embfilter.errors import ConfigError
from rag_embfilter.fingerprint import Part, array_digest
from rag_embfilter.recipes import (
    BLOCK_SHARE,
    DEFAULT_KEEP,
    DEFAULT_SHRINKAGE,
    MIN_CORPUS,
    RECIPES,
    Ingredients,
    Recipe,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rag_embfilter.spectrum import Spectrum

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
Embeddings = FloatArray | Iterable[FloatArray]
Made = tuple[FloatArray, dict[str, Part], FloatArray | None, FloatArray | None]
FILTER_TYPES = tuple(RECIPES)
MIN_QUESTIONS = 5


@dataclass(frozen=True)
class Source:
    """Where a filter's directions come from; each is asked for only when the type needs it."""

    hidden: int  # of the backbone
    unembedding: Callable[[], Tensor]
    used_rows: Callable[[], Tensor]
    spectrum: Callable[[], Spectrum]
    digest: Callable[[], str]
    default_counts: Callable[[], NDArray[np.float64]] | None = None
    blocks: int = 1  # templates, each with a block of the matrix

    @property
    def width(self) -> int:
        """Size of a raw embedding."""
        return self.hidden * self.blocks

    def response(self, frequencies: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Spectroscopy response of each direction on the 100 most frequent tokens."""
        from rag_embfilter import spectroscopy

        if frequencies is None and self.default_counts is None:
            raise ConfigError("`ideal` needs token frequencies: give frequencies=, one count per token.")
        counts = self.default_counts() if frequencies is None and self.default_counts else frequencies
        assert counts is not None
        unembedding, rows, spectrum = self.unembedding(), self.used_rows(), self.spectrum()
        average = spectroscopy.average_token(unembedding, rows, spectrum, counts)
        frequent = spectroscopy.frequent_tokens(counts, rows)
        return spectroscopy.response(unembedding, spectrum, average, frequent)


def make(
    source: Source,
    filter_type: str,
    ratio: int,
    band_start: int | None,
    seed: int,
    corpus: Embeddings | None = None,
    queries: FloatArray | None = None,
    frequencies: NDArray[np.float64] | None = None,
    keep: float = DEFAULT_KEEP,
    shrinkage: float = DEFAULT_SHRINKAGE,
) -> Made:
    """Matrix, parts and means of a filter of any type; see `EmbFilter.from_encoder` for the arguments."""
    dim = _checked_dim(source, filter_type, ratio, band_start, seed)
    recipe = RECIPES[filter_type]
    if filter_type == "raw" or (ratio == 1 and not recipe.fitted):
        identity = np.eye(source.width, dtype=np.float32)
        return identity, {"filter_type": "raw", "filter_ratio": 1}, None, None
    if not 0 < keep <= 1 or not shrinkage >= 0:
        raise ConfigError(
            f"keep {keep}, shrinkage {shrinkage}: expected keep over 0 to 1, shrinkage 0 or more."
        )
    moments = _moments(corpus, source.width, filter_type) if recipe.fitted else None
    blocks = [
        recipe.make(
            Ingredients(
                hidden=source.hidden,
                dim=size,
                spectrum=source.spectrum,
                response=lambda: source.response(frequencies),
                moments=moments and moments.part(slice(i * source.hidden, (i + 1) * source.hidden)),
                band_start=(source.hidden - size) // 2 if band_start is None else int(band_start),
                seed=int(seed),
                keep=keep,
                shrinkage=shrinkage,
            )
        )
        for i, size in enumerate(_shares(dim, source, recipe))
    ]
    joined = block_diag(*blocks)
    if moments is not None and len(joined) > dim:
        joined = _condensed(joined, moments, dim)
    matrix = np.ascontiguousarray(joined, dtype=np.float32)
    parts: dict[str, Part] = {"filter_type": filter_type, "filter_ratio": int(ratio)}
    if recipe.from_unembedding:
        parts["unembedding"] = source.digest()
    values: dict[str, Part] = {
        "band_start": (source.hidden - dim) // 2 if band_start is None else int(band_start),
        "seed": int(seed),
        "keep": f"{keep:g}",
        "shrinkage": f"{shrinkage:g}",
        "frequencies": "vocabulary order" if frequencies is None else array_digest(frequencies),
    }
    parts |= {use: values[use] for use in recipe.uses}
    if source.blocks > 1:
        parts["templates"] = source.blocks
        parts.pop("band_start", None)
    return _with_means(matrix, parts, moments, queries if recipe.centred else None, recipe.centred)


def _with_means(
    matrix: FloatArray,
    parts: dict[str, Part],
    moments: Moments | None,
    queries: FloatArray | None,
    centred: bool,
) -> Made:
    """The means of a fitted filter, and its fit in the parts."""
    if moments is None:
        return matrix, parts, None, None
    document_mean = moments.mean.astype(np.float32)
    parts["fit"] = array_digest(matrix, document_mean)
    if queries is not None:
        return matrix, parts, document_mean, query_mean(queries, matrix.shape[1])
    if centred:
        logger.warning("no example questions: queries are centred on the documents' mean; 10 to 30 help")
    return matrix, parts, document_mean, document_mean


def _shares(dim: int, source: Source, recipe: Recipe) -> list[int]:
    """Size of each template's block: an even share; before they are condensed, at least a quarter."""
    even = [dim // source.blocks + (number < dim % source.blocks) for number in range(source.blocks)]
    if source.blocks == 1 or not recipe.condensed:
        return even
    return [max(size, source.hidden // BLOCK_SHARE) for size in even]


def _condensed(joined: NDArray[np.float64], moments: Moments, dim: int) -> NDArray[np.float64]:
    """The `dim` principal components of all blocks together; what two of them say alike is kept once."""
    covariance = joined @ moments.covariance @ joined.T
    return shrunk_whitening(covariance, np.eye(len(joined)), dim, np.inf) @ joined


def _moments(corpus: Embeddings | None, hidden: int, filter_type: str) -> Moments:
    if corpus is None:
        raise ConfigError(
            f"{filter_type} is fitted on a corpus: give corpus=, raw embeddings of its passages."
        )
    moments = Moments.of(corpus, hidden)
    if moments.n < MIN_CORPUS:
        raise ConfigError(
            f"{filter_type} was given {moments.n} passages to fit on; {MIN_CORPUS} is the least, some "
            "hundreds are good. With fewer, use edge, which needs none."
        )
    if moments.n < hidden:
        logger.info("%s is fitted on %d passages for %d dimensions", filter_type, moments.n, hidden)
    return moments


def query_mean(queries: FloatArray, hidden: int) -> FloatArray:
    """Mean of example questions' raw embeddings `[n, hidden]`. Raises `ConfigError` under 5."""
    array = np.asarray(queries)
    if array.ndim == 2 and array.shape[1] == hidden and len(array) < MIN_QUESTIONS:
        raise ConfigError(
            f"{len(array)} example questions: {MIN_QUESTIONS} is the least, 10 to 30 are good. Collect "
            "more, or leave them out."
        )
    return Moments.of(array, hidden).mean.astype(np.float32)


def _checked_dim(source: Source, filter_type: str, ratio: int, band_start: int | None, seed: int) -> int:
    """The filter's size, once its arguments have been found to make sense together.

    Several templates share `hidden // ratio` dimensions; full-size types keep all of each.
    """
    hidden = source.hidden
    if filter_type not in FILTER_TYPES:
        raise ConfigError(f"filter_type {filter_type!r}: expected one of {', '.join(FILTER_TYPES)}.")
    if isinstance(ratio, bool) or not isinstance(ratio, int | np.integer) or ratio < 1:
        raise ConfigError(f"filter_ratio {ratio!r}: expected a whole number of 1 or more.")
    if hidden // ratio < source.blocks:
        each = " for each template and pooling" if source.blocks > 1 else ""
        raise ConfigError(
            f"filter_ratio {ratio} leaves no dimension of {hidden}{each}; the largest ratio is "
            f"{hidden // source.blocks}."
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ConfigError(f"seed {seed!r}: expected a whole number of 0 or more.")
    if RECIPES[filter_type].full_size and filter_type != "raw" and ratio != 1:
        raise ConfigError(f"{filter_type} keeps all dimensions, so its filter_ratio is 1, not {ratio}.")
    if RECIPES[filter_type].full_size:
        return source.width
    dim = hidden // ratio
    if band_start is not None:
        _check_band(source, filter_type, dim, band_start)
    return dim


def _check_band(source: Source, filter_type: str, dim: int, band_start: int) -> None:
    if isinstance(band_start, bool) or not isinstance(band_start, int | np.integer):
        raise ConfigError(f"band_start {band_start!r}: expected a whole number.")
    if filter_type != "edge":
        raise ConfigError(f"band_start {band_start}: only `edge` has a band, not {filter_type!r}.")
    if source.blocks > 1:
        raise ConfigError("band_start is for a single template; several have a middle band each.")
    if not 0 <= band_start <= source.hidden - dim:
        raise ConfigError(
            f"band_start {band_start}: a band of {dim} directions out of {source.hidden} can start at 0 to "
            f"{source.hidden - dim}."
        )
