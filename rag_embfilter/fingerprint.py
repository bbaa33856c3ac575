"""Fingerprints: everything that changes a vector, as readable parts with one digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rag_embfilter.errors import FingerprintMismatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Part = str | int | None


def array_digest(*arrays: NDArray[np.floating] | None) -> str:
    """First 16 hex digits of the SHA-256 over all values, never over a printed form, which elides some."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(b"-" if array is None else array.tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Fingerprint:
    """What made a vector. Two vectors may be compared if and only if their fingerprints are equal.

    Batch size, device and compute dtype are left out on purpose: they change a vector by rounding only.
    """

    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the parts as canonical JSON."""
        text = json.dumps(dict(self.parts), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __or__(self, other: Fingerprint) -> Fingerprint:
        """Both sets of parts, as for an encoder followed by a filter."""
        return Fingerprint({**self.parts, **other.parts})

    def differences(self, other: Fingerprint) -> list[str]:
        """One line per part that differs, as `part: mine != theirs`."""
        names = sorted({*self.parts, *other.parts})
        pairs = [(name, self.parts.get(name), other.parts.get(name)) for name in names]
        return [f"{name}: {mine!r} != {theirs!r}" for name, mine, theirs in pairs if mine != theirs]

    def require(self, stored: Fingerprint, where: str) -> None:
        """Raise `FingerprintMismatch` unless `stored`, found at `where`, equals this one."""
        if self.digest == stored.digest:
            return
        lines = "\n  ".join(self.differences(stored))
        raise FingerprintMismatch(
            f"{where} was made with fingerprint {stored.digest}, this encoder and filter have "
            f"{self.digest}. What differs (ours != stored):\n  {lines}\n"
            "Use the settings it was made with, write to another collection name, or delete it and "
            "ingest again."
        )
