"""The package's errors: one root; every message gives the value, what was expected, and a way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class EmbFilterError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(EmbFilterError, ValueError):
    """An argument is out of range, unknown, or does not fit the others."""


class BackboneError(EmbFilterError, ValueError):
    """A backbone cannot be found, read, or used as an embedder."""


class EncodingError(EmbFilterError, ValueError):
    """Some texts or vectors could not be embedded; the others could.

    Attributes:
        problems: position in the input -> reason.
        embeddings: float32 `[n, dim]`, rows of the failed positions are zero; None when nothing ran.
    """

    def __init__(self, problems: Mapping[int, str], embeddings: NDArray[np.float32] | None = None) -> None:
        self.problems = dict(problems)
        self.embeddings = embeddings
        shown = "; ".join(f"item {i}: {why}" for i, why in list(self.problems.items())[:5])
        more = len(self.problems) - 5
        tail = f"; and {more} more" if more > 0 else ""
        super().__init__(
            f"{len(self.problems)} of the inputs cannot be embedded: {shown}{tail}. "
            "Remove or repair them (the exception's `problems` lists all of them)."
        )


class StoreError(EmbFilterError):
    """A collection is missing, damaged, unreachable, or does not fit what is written to it."""


class FingerprintMismatch(StoreError):  # noqa: N818 - the name says what happened
    """Vectors made one way would meet a collection made another way."""


class EvalSetError(EmbFilterError, ValueError):
    """An evaluation set has faults; the message names all of them."""


class ClusterError(EmbFilterError):
    """The machines that encode cannot be reached, or are lost again and again."""


class EndpointError(EmbFilterError):
    """A server that encodes cannot be reached, refuses, or answers with something else."""


class ExportError(EmbFilterError):
    """An exported model does not give the vectors it was made to give."""


class MissingExtraError(EmbFilterError, ImportError):
    """An optional dependency is absent or broken; the message says what to install."""
