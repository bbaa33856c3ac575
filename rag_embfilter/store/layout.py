"""How a server lays out a new collection: quantisation, disk, precision, index, shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qdrant_client import models

from rag_embfilter.errors import ConfigError

QUANTIZATIONS = ("none", "scalar", "binary")
# Candidates taken from quantised vectors for each one wanted, before the whole vectors rank them again.
OVERSAMPLING = {"scalar": 2.0, "binary": 8.0}
# Below it, a bit a dimension tells too little: `cost` measures how little.
FEW_FOR_BINARY = 1024


@dataclass(frozen=True)
class Layout:
    """Settings of collections that a `Store` makes; they change cost, and no fingerprint.

    The embedded store keeps whole vectors in memory and compares with all of them, whatever is set here. Edge
    takes all but shards and replicas.

    Attributes:
        quantization: `scalar` (a byte a dimension) or `binary` (a bit) beside the whole vectors, which rank
            the candidates again in every search.
        on_disk: keep whole vectors on disk; quantised ones stay in memory.
        float16: keep filtered vectors in half precision. Raw ones stay whole, as filters are made of them.
        hnsw_m: links of a point in the index; by default the server's own.
        shards, replicas: parts and copies of a collection in a cluster; by default the server's own.
    """

    quantization: str = "none"
    on_disk: bool = False
    float16: bool = False
    hnsw_m: int | None = None
    shards: int | None = None
    replicas: int | None = None

    def __post_init__(self) -> None:
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization {self.quantization!r}: expected one of {', '.join(QUANTIZATIONS)}."
            )
        for name in ("hnsw_m", "shards", "replicas"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} {value!r}: expected a whole number of 1 or more.")

    def vector(self, dim: int, raw: bool) -> models.VectorParams:
        """Parameters of the dense vector."""
        half = self.float16 and not raw
        return models.VectorParams(
            size=dim,
            distance=models.Distance.COSINE,
            on_disk=self.on_disk or None,
            datatype=models.Datatype.FLOAT16 if half else None,
        )

    def collection(self, raw: bool) -> dict[str, Any]:
        """The other arguments of `create_collection`, only those that are set."""
        settings: dict[str, Any] = {"shard_number": self.shards, "replication_factor": self.replicas}
        if self.hnsw_m is not None:
            settings["hnsw_config"] = models.HnswConfigDiff(m=self.hnsw_m)
        if self.quantization == "scalar" and not raw:
            scalar = models.ScalarQuantizationConfig(
                type=models.ScalarType.INT8, quantile=0.99, always_ram=True
            )
            settings["quantization_config"] = models.ScalarQuantization(scalar=scalar)
        if self.quantization == "binary" and not raw:
            binary = models.BinaryQuantizationConfig(always_ram=True)
            settings["quantization_config"] = models.BinaryQuantization(binary=binary)
        return {key: value for key, value in settings.items() if value is not None}


def search_params(quantization: str, exact: bool) -> models.SearchParams | None:
    """What goes with each query: whole vectors rank again what quantised ones found."""
    if exact:
        return models.SearchParams(exact=True)
    if quantization == "none":
        return None
    again = models.QuantizationSearchParams(rescore=True, oversampling=OVERSAMPLING[quantization])
    return models.SearchParams(quantization=again)


def quantization_of(given: models.QuantizationConfig | None) -> str:
    """The name of what a collection's vectors are quantised by; others than ours are searched as scalar."""
    if given is None:
        return "none"
    return "binary" if isinstance(given, models.BinaryQuantization) else "scalar"
