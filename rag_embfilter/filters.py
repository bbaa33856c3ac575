"""EmbFilter: one linear map on raw embeddings; how to make it, apply it, save and load it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.fingerprint import Fingerprint, Part, array_digest
from rag_embfilter.making import FILTER_TYPES, Embeddings, Source, make, query_mean
from rag_embfilter.recipes import DEFAULT_KEEP, DEFAULT_SHRINKAGE, RECIPES

if TYPE_CHECKING:
    from torch import Tensor

    from rag_embfilter.encoder import Encoder

__all__ = ["FILTER_TYPES", "EmbFilter", "Role", "unit_rows"]

FloatArray = NDArray[np.float32]
Role = Literal["document", "query"]
ROWS_AT_ONCE = 8192
UNIT_TOLERANCE = 0.01  # half precision and quantisation move a length by less


@dataclass(frozen=True, eq=False)
class EmbFilter:
    """One linear map on raw unit embeddings: `z = matrix (u - mean_role)`, then L2 norm.

    Source: EmbedFilter, arXiv 2606.07502, section 3. For types without means, distances between filtered
    vectors equal those between the full-size projections `projector() u`.

    Attributes:
        matrix: float32 `[dim, hidden]`; its rows are orthonormal for every type that is not fitted,
            but for `gaussian`.
        parts: what made it, for the fingerprint: type, ratio, band, seed, digests.
        document_mean, query_mean: float32 `[hidden]`, subtracted first; None for types that do not centre.
    """

    matrix: FloatArray
    parts: dict[str, Part] = field(default_factory=dict)
    document_mean: FloatArray | None = None
    query_mean: FloatArray | None = None

    @classmethod
    def from_unembedding(
        cls,
        unembedding: Tensor | FloatArray,
        filter_type: str = "edge",
        filter_ratio: int = 2,
        band_start: int | None = None,
        seed: int = 0,
        used_rows: Tensor | None = None,
        **fit: Any,
    ) -> EmbFilter:
        """Make a filter from an output matrix `[vocab_size, hidden_size]`, any float dtype.

        Args:
            filter_type: what is removed, a name out of `FILTER_TYPES`: `edge` keeps the middle of the
                spectrum, `head` the smallest singular values, `tail` the largest, `mid` both ends, `rand`
                random directions; `raw` removes nothing. `recipes.RECIPES` says a line on each.
            filter_ratio: the divisor: `dim = hidden_size // filter_ratio`. 1 is raw for the types above.
            band_start: first direction that `edge` keeps; by default the middle, `(hidden - dim) // 2`.
            seed: picks what is random.
            used_rows: bool `[vocab_size]`; rows that no token uses, to be left out, are False.
            fit: `corpus`, `queries`, `frequencies`, `keep`, `shrinkage` as in `from_encoder`.

        Raises `ConfigError` for an unknown type, a ratio that leaves no dimension, a band outside the
        spectrum, or a matrix that is not two-dimensional.
        """
        import torch

        from rag_embfilter.spectrum import Spectrum, unembedding_digest

        matrix = torch.as_tensor(unembedding)
        if matrix.ndim != 2:
            raise ConfigError(f"unembedding of shape {tuple(matrix.shape)}: expected [vocab, hidden].")
        every = torch.ones(len(matrix), dtype=torch.bool)
        rows = every if used_rows is None else torch.as_tensor(used_rows, dtype=torch.bool)
        if rows.shape != every.shape:
            raise ConfigError(
                f"used_rows of shape {tuple(rows.shape)}: expected [{len(matrix)}], one per row."
            )
        source = Source(
            matrix.shape[1],
            lambda: matrix,
            lambda: rows,
            lambda: Spectrum.of(matrix, rows),
            lambda: unembedding_digest(matrix, rows),
        )
        return cls(*make(source, filter_type, filter_ratio, band_start, seed, **fit))

    @classmethod
    def from_encoder(
        cls,
        encoder: Encoder,
        filter_type: str = "edge",
        filter_ratio: int = 2,
        band_start: int | None = None,
        seed: int = 0,
        *,
        corpus: Embeddings | None = None,
        queries: FloatArray | None = None,
        frequencies: NDArray[np.float64] | None = None,
        keep: float = DEFAULT_KEEP,
        shrinkage: float = DEFAULT_SHRINKAGE,
    ) -> EmbFilter:
        """As `from_unembedding`, for an encoder's backbone: unused vocabulary rows are left out and the
        spectrum is cached on disk.

        Args:
            encoder: its backbone gives the unembedding.
            filter_type, filter_ratio, band_start, seed: as there.
            corpus: raw unit embeddings of passages, `[n, hidden]` or an iterable of such arrays that is
                read once; for the fitted types. Never judgements.
            queries: raw unit embeddings of example questions `[n, hidden]`; for `calibrated`. Without
                them documents' mean serves both roles, which costs several points, and is warned about.
            frequencies: how often each token occurs, `[vocab]`, for `ideal` (see `token_counts`); by
                default the vocabulary's own order.
            keep: share of the spectrum that `calibrated` leaves to its PCA; 1 removes no edge.
            shrinkage: how far `calibrated` pulls variances towards their mean before it divides by them.
        """
        from rag_embfilter.spectroscopy import vocabulary_order_counts

        backbone = encoder.backbone
        source = Source(
            backbone.hidden_size,
            lambda: backbone.unembedding,
            lambda: backbone.used_rows,
            encoder.spectrum,
            encoder.unembedding_digest,
            lambda: vocabulary_order_counts(backbone.tokenizer, len(backbone.unembedding)),
            encoder.blocks,
        )
        made = make(
            source,
            filter_type,
            filter_ratio,
            band_start,
            seed,
            corpus=corpus,
            queries=queries,
            frequencies=frequencies,
            keep=keep,
            shrinkage=shrinkage,
        )
        return cls(*made)

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
        for part, letter, default in (("keep", "k", DEFAULT_KEEP), ("shrinkage", "w", DEFAULT_SHRINKAGE)):
            if (value := self.parts.get(part)) not in (None, f"{default:g}"):
                name += f"-{letter}{value}"
        return f"{name}-s{seed}" if (seed := self.parts.get("seed")) else name

    @property
    def fingerprint(self) -> Fingerprint:
        """Everything about the filter that changes a document's vector."""
        return Fingerprint(self.parts)

    @property
    def query_digest(self) -> str | None:
        """Digest of the query mean, which can be fitted anew without touching a stored vector."""
        return None if self.query_mean is None else array_digest(self.query_mean)

    def with_queries(self, queries: FloatArray) -> EmbFilter:
        """The same filter with its query mean fitted on other example questions `[n, hidden]`.

        Raises `ConfigError` for a type that does not centre queries apart, or under 5 questions.
        """
        return self.with_query_mean(query_mean(queries, self.hidden_size))

    def with_query_mean(self, mean: FloatArray | Sequence[float]) -> EmbFilter:
        """The same filter with this query mean `[hidden]`. Raises `ConfigError` as `with_queries`."""
        array = np.asarray(mean, dtype=np.float32)
        if not RECIPES[self.filter_type].centred or array.shape != (self.hidden_size,):
            raise ConfigError(
                f"{self.name} of {self.hidden_size} dimensions cannot take a query mean of shape "
                f"{array.shape}; only calibrated filters centre queries."
            )
        return replace(self, query_mean=array)

    def projector(self) -> FloatArray:
        """The filter at full size, `matrix^T matrix`, float32 `[hidden, hidden]`."""
        return self.matrix.T @ self.matrix

    def apply(self, embeddings: FloatArray, role: Role = "document", normalize: bool = True) -> FloatArray:
        """Filter raw embeddings.

        Args:
            embeddings: `[n, hidden]`, of unit length. A filter without means is one linear map, so it also
                takes what an encoder gives with `normalize=False`; one with means was fitted on unit
                embeddings, and subtracting those means from anything else would mean nothing.
            role: `document` or `query`; it matters to filters that centre the two apart. For texts of
                one kind on both sides use `document` for both.
            normalize: scale the result to unit length; `False` keeps the length that is left, as MTEB's
                classification wants it.

        Returns: float32 `[n, dim]`.

        Raises:
            ConfigError: another shape, an unknown role, or rows that are not of unit length for a filter
                with means.
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
        norms = np.linalg.norm(x, axis=1)
        if self.document_mean is not None:
            self._require_unit(norms)
        mean = self.query_mean if role == "query" else self.document_mean
        centred: FloatArray = x if mean is None else x - mean
        filtered: FloatArray = centred if self.filter_type == "raw" else centred @ self.matrix.T
        return unit_rows(filtered, norms) if normalize else filtered

    def _require_unit(self, norms: NDArray[np.floating]) -> None:
        """Raise `ConfigError` for lengths that unit embeddings, however rounded, do not have."""
        # Rows that are zero or not finite are reported with their positions later on.
        odd = np.flatnonzero(np.isfinite(norms) & (norms > 0) & (np.abs(norms - 1) > UNIT_TOLERANCE))
        if len(odd):
            raise ConfigError(
                f"{self.name} subtracts a mean of unit embeddings, and item {odd[0]} has length "
                f"{norms[odd[0]]:.3g}: encode with normalize=True, or take a filter that does not centre."
            )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file: matrix and means, and the fingerprint's parts as metadata."""
        from safetensors.numpy import save

        from rag_embfilter.files import write_bytes

        arrays = {"matrix": self.matrix, "document_mean": self.document_mean, "query_mean": self.query_mean}
        kept = {key: np.ascontiguousarray(array) for key, array in arrays.items() if array is not None}
        made = {"parts": self.parts, "digest": self.fingerprint.digest, "content": self._content()}
        metadata = {"embfilter": json.dumps(made)}
        write_bytes(Path(path), save(kept, metadata))

    def _content(self) -> str:
        return array_digest(self.matrix, self.document_mean, self.query_mean)

    def _require_sane(self) -> None:
        """Raise `ValueError` unless the arrays are finite float32 of sizes that fit together."""
        arrays = [a for a in (self.matrix, self.document_mean, self.query_mean) if a is not None]
        if self.matrix.ndim != 2 or 0 in self.matrix.shape or self.filter_type not in RECIPES:
            raise ValueError(f"a matrix of shape {self.matrix.shape} for type {self.filter_type!r}")
        for array in arrays:
            fits = array.shape[-1] == self.hidden_size and array.dtype == np.float32
            if not fits or not np.isfinite(array).all():
                raise ValueError(f"an array of {array.dtype} {array.shape}, or one that is not finite")

    @classmethod
    def load(cls, path: str | Path) -> EmbFilter:
        """Read what `save` wrote. Raises `ConfigError` when it is not such a file or is damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as stream:
                made = json.loads((stream.metadata() or {})["embfilter"])
                arrays = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118
            loaded = cls(parts=made["parts"], **arrays)
            intact = (loaded.fingerprint.digest, loaded._content()) == (made["digest"], made["content"])
            loaded._require_sane()
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{str(path)!r} is not a filter file that EmbFilter.save wrote ({error}); "
                "make the filter again from its encoder."
            ) from error
        if not intact:
            raise ConfigError(f"{str(path)!r}: its content does not match its fingerprint; it was altered.")
        return loaded


def unit_rows(vectors: FloatArray, scale: NDArray[np.floating] | None = None) -> FloatArray:
    """Rows scaled to unit length, float32 `[n, dim]`.

    A row counts as zero when its norm is below a millionth of its entry in `scale` (`[n]`, default 1).
    Raises `EncodingError` naming the rows that are not finite or are zero.
    """
    norms = np.empty(len(vectors))
    for start in range(0, len(vectors), ROWS_AT_ONCE):  # in float64, but never a whole copy in it
        norms[start : start + ROWS_AT_ONCE] = np.linalg.norm(
            vectors[start : start + ROWS_AT_ONCE].astype(np.float64), axis=1
        )
    floor = 1e-6 * (np.ones(len(norms)) if scale is None else scale)
    good = np.isfinite(norms) & (norms > floor)
    divisors = np.where(good, norms, np.inf).astype(np.float32)
    with np.errstate(invalid="ignore"):  # Inf over Inf, in rows that are reported below
        unit = np.divide(vectors, divisors[:, None], dtype=np.float32)
    if good.all():
        return unit
    unit[~good] = 0.0
    reasons = np.where(np.isfinite(norms), "nothing is left of its vector", "its vector holds NaN or Inf")
    raise EncodingError({int(row): str(reasons[row]) for row in np.flatnonzero(~good)}, unit)
