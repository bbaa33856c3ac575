"""EmbFilter: which directions of the unembedding to keep, and how to apply, save and load that choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.fingerprint import Fingerprint, Part

if TYPE_CHECKING:
    from torch import Tensor

    from rag_embfilter.encoder import Encoder
    from rag_embfilter.spectrum import Spectrum

FloatArray = NDArray[np.float32]
Role = Literal["document", "query"]
IntArray = NDArray[np.int64]


def _edge(hidden: int, dim: int, start: int, seed: int) -> IntArray:
    return np.arange(start, start + dim)


def _head(hidden: int, dim: int, start: int, seed: int) -> IntArray:
    return np.arange(hidden - dim, hidden)


def _tail(hidden: int, dim: int, start: int, seed: int) -> IntArray:
    return np.arange(dim)


def _mid(hidden: int, dim: int, start: int, seed: int) -> IntArray:
    return np.concatenate([np.arange(dim // 2), np.arange(hidden - (dim - dim // 2), hidden)])


def _rand(hidden: int, dim: int, start: int, seed: int) -> IntArray:
    return np.sort(np.random.default_rng(seed).choice(hidden, dim, replace=False))


# What each type keeps, as rows of the directions; the name says what it removes.
KEPT: dict[str, Callable[[int, int, int, int], IntArray]] = {
    "edge": _edge,
    "head": _head,
    "tail": _tail,
    "mid": _mid,
    "rand": _rand,
}
FILTER_TYPES = ("raw", *KEPT)


@dataclass(frozen=True, eq=False)
class EmbFilter:
    """One linear map on raw unit embeddings: `z = matrix u`, then L2 norm.

    Source: EmbedFilter, arXiv 2606.07502, section 3. Distances between filtered vectors equal those
    between the full-size projections `projector() u`.

    Attributes:
        matrix: float32 `[dim, hidden]`; its rows are orthonormal.
        parts: what made it, for the fingerprint: type, ratio, band, seed, digest of the unembedding.
    """

    matrix: FloatArray
    parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def from_unembedding(
        cls,
        unembedding: Tensor | FloatArray,
        filter_type: str = "edge",
        filter_ratio: int = 2,
        band_start: int | None = None,
        seed: int = 0,
        used_rows: Tensor | None = None,
    ) -> EmbFilter:
        """Make a filter from an output matrix `[vocab_size, hidden_size]`, any float dtype.

        Args:
            filter_type: what is removed: `edge` keeps the middle of the spectrum, `head` the smallest
                singular values, `tail` the largest, `mid` both ends, `rand` random directions; `raw`
                removes nothing.
            filter_ratio: the divisor: `dim = hidden_size // filter_ratio`. 1 is raw for every type.
            band_start: first direction that `edge` keeps; by default the middle, `(hidden - dim) // 2`.
            seed: picks the directions of `rand`.
            used_rows: bool `[vocab_size]`; rows that no token uses, to be left out, are False.

        Raises `ConfigError` for an unknown type, a ratio that leaves no dimension, a band outside the
        spectrum, or a matrix that is not two-dimensional.
        """
        import torch

        from rag_embfilter.spectrum import Spectrum, unembedding_digest

        matrix = torch.as_tensor(unembedding)
        if matrix.ndim != 2:
            raise ConfigError(f"unembedding of shape {tuple(matrix.shape)}: expected [vocab, hidden].")
        return cls.from_spectrum(
            lambda: Spectrum.of(matrix, used_rows),
            lambda: unembedding_digest(matrix, used_rows),
            matrix.shape[1],
            filter_type,
            filter_ratio,
            band_start,
            seed,
        )

    @classmethod
    def from_encoder(
        cls,
        encoder: Encoder,
        filter_type: str = "edge",
        filter_ratio: int = 2,
        band_start: int | None = None,
        seed: int = 0,
    ) -> EmbFilter:
        """As `from_unembedding`, for an encoder's backbone: unused vocabulary rows are left out and the
        spectrum is cached on disk.
        """
        return cls.from_spectrum(
            encoder.spectrum,
            encoder.unembedding_digest,
            encoder.hidden_size,
            filter_type,
            filter_ratio,
            band_start,
            seed,
        )

    @classmethod
    def from_spectrum(
        cls,
        spectrum: Callable[[], Spectrum],
        digest: Callable[[], str],
        hidden_size: int,
        filter_type: str,
        filter_ratio: int,
        band_start: int | None = None,
        seed: int = 0,
    ) -> EmbFilter:
        """The shared part of the two constructors above; spectrum and digest are asked for only when
        the type needs them. Arguments and errors as there.
        """
        dim = _checked_dim(hidden_size, filter_type, filter_ratio, band_start, seed)
        if filter_type == "raw" or filter_ratio == 1:
            return cls(np.eye(hidden_size, dtype=np.float32), {"filter_type": "raw", "filter_ratio": 1})
        start = (hidden_size - dim) // 2 if band_start is None else band_start
        kept = KEPT[filter_type](hidden_size, dim, start, seed)
        parts: dict[str, Part] = {
            "filter_type": filter_type,
            "filter_ratio": int(filter_ratio),
            "unembedding": digest(),
        }
        if filter_type == "edge":
            parts["band_start"] = int(start)
        if filter_type == "rand":
            parts["seed"] = int(seed)
        return cls(np.ascontiguousarray(spectrum().directions[kept]), parts)

    @property
    def filter_type(self) -> str:
        """What is removed; `raw` when nothing is."""
        return str(self.parts["filter_type"])

    @property
    def filter_ratio(self) -> int:
        """The divisor of the hidden size."""
        return int(self.parts["filter_ratio"] or 1)

    @property
    def dim(self) -> int:
        """Size of a filtered vector."""
        return int(self.matrix.shape[0])

    @property
    def hidden_size(self) -> int:
        """Size of the raw embedding it takes."""
        return int(self.matrix.shape[1])

    @property
    def name(self) -> str:
        """Short name that tells two filters of one backbone apart, as in collection names: `edge-r2`."""
        if self.filter_type == "raw":
            return "raw"
        name = f"{self.filter_type}-r{self.filter_ratio}"
        if (start := self.parts.get("band_start")) not in (None, (self.hidden_size - self.dim) // 2):
            name += f"-b{start}"
        return f"{name}-s{seed}" if (seed := self.parts.get("seed")) else name

    @property
    def fingerprint(self) -> Fingerprint:
        """Everything about the filter that changes a vector."""
        return Fingerprint(self.parts)

    def projector(self) -> FloatArray:
        """The filter at full size, `matrix^T matrix`, float32 `[hidden, hidden]`."""
        return self.matrix.T @ self.matrix

    def apply(self, embeddings: FloatArray, role: Role = "document", normalize: bool = True) -> FloatArray:
        """Filter raw unit embeddings.

        Args:
            embeddings: `[n, hidden]`.
            role: `document` or `query`; these filters treat both alike.
            normalize: scale the result to unit length.

        Returns: float32 `[n, dim]`.

        Raises:
            ConfigError: another shape, or an unknown role.
            EncodingError: rows that are not finite, or that the filter removes entirely.
        """
        if role not in ("document", "query"):
            raise ConfigError(f"role {role!r}: expected document or query.")
        x = np.asarray(embeddings, dtype=np.float32)
        if x.ndim != 2 or x.shape[1] != self.hidden_size:
            raise ConfigError(
                f"embeddings of shape {x.shape}: this filter takes [n, {self.hidden_size}], the raw "
                "embeddings of the backbone it was made from."
            )
        filtered = x if self.filter_type == "raw" else x @ self.matrix.T
        return unit_rows(filtered, np.linalg.norm(x, axis=1)) if normalize else filtered

    def save(self, path: str | Path) -> None:
        """Write one safetensors file: the matrix, and the fingerprint's parts as metadata."""
        from safetensors.numpy import save

        from rag_embfilter.files import write_bytes

        metadata = {"embfilter": json.dumps({"parts": self.parts, "digest": self.fingerprint.digest})}
        write_bytes(Path(path), save({"matrix": np.ascontiguousarray(self.matrix)}, metadata))

    @classmethod
    def load(cls, path: str | Path) -> EmbFilter:
        """Read what `save` wrote. Raises `ConfigError` when it is not such a file or is damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as stream:
                made = json.loads((stream.metadata() or {})["embfilter"])
                loaded = cls(stream.get_tensor("matrix"), made["parts"])
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{str(path)!r} is not a filter file that EmbFilter.save wrote ({error}); "
                "make the filter again from its encoder."
            ) from error
        if loaded.fingerprint.digest != made.get("digest"):
            raise ConfigError(f"{str(path)!r}: its parts do not match its fingerprint; the file was altered.")
        return loaded


def unit_rows(vectors: FloatArray, scale: NDArray[np.floating] | None = None) -> FloatArray:
    """Rows scaled to unit length, float32 `[n, dim]`.

    A row counts as zero when its norm is below a millionth of its entry in `scale` (`[n]`, default 1).
    Raises `EncodingError` naming the rows that are not finite or are zero.
    """
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1)
    floor = 1e-6 * (np.ones(len(norms)) if scale is None else scale)
    good = np.isfinite(norms) & (norms > floor)
    unit = np.zeros(vectors.shape, dtype=np.float32)
    unit[good] = vectors[good] / norms[good, None]
    if good.all():
        return unit
    reasons = np.where(np.isfinite(norms), "nothing is left of its vector", "its vector holds NaN or Inf")
    problems = {int(row): str(reasons[row]) for row in np.flatnonzero(~good)}
    raise EncodingError(problems, unit)


def _checked_dim(hidden: int, filter_type: str, ratio: int, band_start: int | None, seed: int) -> int:
    """The filter's size, once its arguments have been found to make sense together."""
    if filter_type not in FILTER_TYPES:
        raise ConfigError(f"filter_type {filter_type!r}: expected one of {', '.join(FILTER_TYPES)}.")
    if isinstance(ratio, bool) or not isinstance(ratio, int | np.integer) or ratio < 1:
        raise ConfigError(f"filter_ratio {ratio!r}: expected a whole number of 1 or more.")
    if hidden // ratio < 1:
        raise ConfigError(
            f"filter_ratio {ratio} leaves no dimension of {hidden}; the largest ratio is {hidden}."
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ConfigError(f"seed {seed!r}: expected a whole number of 0 or more.")
    dim = hidden // ratio
    if band_start is not None:
        if filter_type != "edge":
            raise ConfigError(f"band_start {band_start}: only `edge` has a band, not {filter_type!r}.")
        if not 0 <= band_start <= hidden - dim:
            raise ConfigError(
                f"band_start {band_start}: a band of {dim} directions out of {hidden} can start at 0 to "
                f"{hidden - dim}."
            )
    return dim
