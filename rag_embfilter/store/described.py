"""Collections as they describe themselves: their names, and the metadata that says what made them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rag_embfilter.errors import ConfigError
from rag_embfilter.filters import EmbFilter
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.recipes import RECIPES
from rag_embfilter.store.bm25 import Bm25

if TYPE_CHECKING:
    # Loads torch, which looking at collections does without.
    from rag_embfilter.encoder import Encoder

KEY = "embfilter"  # our part of a collection's metadata
INVALID_NAME_CHARS = '<>:"/\\|?*'  # what a server refuses, or a file system


@dataclass(frozen=True)
class CollectionInfo:
    """A collection and what made it; `fingerprint` is None for one that this package did not make.

    `settings` are the encoder's arguments and the filter's, ready for `EmbFilterEmbedding`; `quantization` is
    `none`, `scalar` or `binary`, `bm25` how texts become its BM25 vectors, if any.
    """

    name: str
    points: int
    dim: int
    fingerprint: Fingerprint | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)
    quantization: str = "none"
    bm25: Bm25 | None = None


def check_name(name: str) -> None:
    """Raise `ConfigError` for a collection name that Qdrant or a file system would refuse."""
    bad = [c for c in name if c in INVALID_NAME_CHARS or ord(c) < 32 or "\ud800" <= c <= "\udfff"]
    if not name.strip() or name in (".", "..") or bad or len(name.encode()) > 200:
        raise ConfigError(
            f"collection name {name!r}: expected 1 to 200 bytes without "
            '< > : " / \\ | ? * and control characters.'
        )


def collection_name(base: str, embfilter: EmbFilter) -> str:
    """Full name of a base's collection for a filter: `docs-raw`, `docs-edge-r2`."""
    return f"{base}-{embfilter.name}"


def filter_file(embfilter: EmbFilter) -> str:
    """File name of a fitted filter: its fingerprint."""
    return f"{embfilter.fingerprint.digest}.safetensors"


def mean_of(embfilter: EmbFilter) -> list[float] | None:
    """A filter's query mean, ready for JSON."""
    return None if embfilter.query_mean is None else [float(x) for x in embfilter.query_mean]


def made_by(encoder: Encoder, embfilter: EmbFilter, base: str, bm25: Bm25 | None = None) -> dict[str, Any]:
    """Our part of a collection's metadata."""
    from rag_embfilter import __version__

    fingerprint = encoder.fingerprint | embfilter.fingerprint
    settings: dict[str, Any] = {key: value for key, value in encoder.settings.items() if value is not None}
    settings["model_name"] = settings.pop("backbone")
    chosen = ("filter_type", "filter_ratio", "band_start", "seed")
    settings |= {key: embfilter.parts[key] for key in chosen if key in embfilter.parts}
    if "fit" in embfilter.parts:
        settings["filter_file"] = filter_file(embfilter)
        if RECIPES[embfilter.filter_type].centred:
            settings["query_mean"] = mean_of(embfilter)
    sparse = {"bm25": vars(bm25)} if bm25 else {}
    return sparse | {
        "fingerprint": fingerprint.digest,
        "parts": dict(fingerprint.parts),
        "settings": settings,
        "base": base,
        "compute_dtype": str(encoder.backbone.dtype).removeprefix("torch."),
        "version": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
