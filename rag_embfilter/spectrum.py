"""The unembedding's spectrum: right-singular vectors and singular values, from the Gram matrix.

With `W = U S V^T` (arXiv 2606.07502, section 3), `W^T W = V S^2 V^T`: the eigenvectors of a
`[hidden, hidden]` matrix are the directions, with no decomposition of the tall `W`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_embfilter.errors import ConfigError
from rag_embfilter.files import cache_folder, write_bytes
from rag_embfilter.fingerprint import array_digest

ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Spectrum:
    """Directions of an unembedding, largest singular value first.

    Attributes:
        directions: float32 `[hidden, hidden]`, one right-singular vector a row; the component of
            largest magnitude in each is positive.
        singular_values: float32 `[hidden]`.
    """

    directions: NDArray[np.float32]
    singular_values: NDArray[np.float32]

    @classmethod
    def of(cls, unembedding: Tensor, used_rows: Tensor | None = None) -> Spectrum:
        """Spectrum of `unembedding` `[vocab, hidden]`; rows outside `used_rows` (bool `[vocab]`) left out."""
        hidden = unembedding.shape[1]
        gram = torch.zeros(hidden, hidden, dtype=torch.float64)
        for rows in _used_chunks(unembedding, used_rows):
            gram += rows.T @ rows
        if not bool(torch.isfinite(gram).all()):
            raise ConfigError("the unembedding holds NaN or Inf; the model's weights are damaged.")
        eigenvalues, vectors = np.linalg.eigh(gram.numpy())
        directions = vectors.T[::-1]
        peaks = np.take_along_axis(directions, np.abs(directions).argmax(axis=1)[:, None], axis=1)
        values = np.sqrt(np.clip(eigenvalues[::-1], 0, None))
        return cls((directions * np.sign(peaks)).astype(np.float32), values.astype(np.float32))

    @classmethod
    def cached(cls, unembedding: Tensor, used_rows: Tensor | None, digest: str) -> Spectrum:
        """As `of`, read from the cache when an unembedding of this digest was decomposed before."""
        from safetensors import SafetensorError, safe_open

        path: Path | None = None
        try:
            path = cache_folder("spectra") / f"{digest}.safetensors"
            with safe_open(str(path), framework="numpy") as stream:
                found = cls(stream.get_tensor("directions"), stream.get_tensor("singular_values"))
                if (stream.metadata() or {}).get("content") == found._content():
                    return found
        except (OSError, SafetensorError):
            pass  # absent or damaged: it is made again
        spectrum = cls.of(unembedding, used_rows)
        if path is not None:
            spectrum._save(path)
        return spectrum

    def _content(self) -> str:
        return array_digest(self.directions, self.singular_values)

    def _save(self, path: Path) -> None:
        from safetensors.numpy import save

        arrays = {
            "directions": np.ascontiguousarray(self.directions),
            "singular_values": self.singular_values,
        }
        with suppress(OSError):  # a cache that cannot be written costs time, nothing else
            write_bytes(path, save(arrays, {"content": self._content()}))


def unembedding_digest(unembedding: Tensor, used_rows: Tensor | None = None) -> str:
    """First 16 hex digits of the SHA-256 over the used rows' values as float32, row by row."""
    digest = hashlib.sha256()
    for rows in _used_chunks(unembedding, used_rows):
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()[:16]


def _used_chunks(unembedding: Tensor, used_rows: Tensor | None) -> Iterator[Tensor]:
    """Float32 chunks of the used rows, on the CPU, so that a huge matrix is never copied whole."""
    for start in range(0, len(unembedding), ROWS_AT_ONCE):
        rows = unembedding[start : start + ROWS_AT_ONCE].detach()
        if used_rows is not None:
            rows = rows[used_rows[start : start + ROWS_AT_ONCE].to(rows.device)]
        yield rows.to("cpu", torch.float32).contiguous()
