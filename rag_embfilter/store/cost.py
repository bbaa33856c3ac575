"""What vectors cost on the real engine: bytes on disk, time to build, latency, and what the index misses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from qdrant_client import QdrantClient, models

from rag_embfilter.errors import ConfigError
from rag_embfilter.store.layout import Layout, search_params
from rag_embfilter.store.points import VECTOR, FloatArray

BATCH = 512


@dataclass(frozen=True)
class Cost:
    """Cost of one set of vectors in one layout.

    Attributes:
        vectors_bytes, quantized_bytes, index_bytes: on disk; quantised vectors are what searches keep in
            memory, beside the index.
        build_seconds: writing the vectors, building the index and quantising.
        p50_ms, p95_ms: latency of one query for 10 points, on this machine.
        recall_at_10: share of the exact search's 10 nearest points that the index's search finds.
        indexed: whether there are enough vectors for an index; without it, searches look at all of them.
    """

    points: int
    dim: int
    quantization: str
    vectors_bytes: int
    quantized_bytes: int
    index_bytes: int
    build_seconds: float
    p50_ms: float
    p95_ms: float
    recall_at_10: float
    indexed: bool

    @property
    def searched_bytes(self) -> int:
        """Bytes that a search keeps at hand: quantised vectors, or whole ones, and the index."""
        quantised = self.quantized_bytes if self.indexed else 0  # they are made with the index
        return (quantised or self.vectors_bytes) + self.index_bytes


def measure(
    vectors: FloatArray,
    queries: FloatArray,
    layout: Layout,
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> Cost:
    """Build one collection of these vectors on Qdrant Edge and search it.

    Args:
        vectors: float32 `[n, dim]`, of unit length.
        queries: float32 `[queries, dim]`.
        folder: empty, for the collection's files; the caller removes it.
        progress: called with the number of vectors written.

    Raises `ConfigError` without the `[edge]` extra.
    """
    try:
        from rag_embfilter.store.edge import edge_client
    except ImportError as error:
        raise ConfigError(
            f"cost needs Qdrant Edge ({error}). Install it: pip install 'rag-embfilter[edge]'"
        ) from error
    client = edge_client(folder)
    engine: Any = client._client
    name, dim = "cost", vectors.shape[1]
    client.create_collection(name, {VECTOR: layout.vector(dim, raw=False)}, **layout.collection(raw=False))
    start = time.perf_counter()
    for first in range(0, len(vectors), BATCH):
        part = vectors[first : first + BATCH].tolist()
        points = [models.PointStruct(id=first + i, vector={VECTOR: v}) for i, v in enumerate(part)]
        client.upsert(name, points)
        if progress is not None:
            progress(len(part))
    engine.optimize(name)
    seconds = time.perf_counter() - start
    indexed = bool(list(folder.rglob(f"vector_index-{VECTOR}/links*")))
    exact = [_ids(client, name, query, search_params("none", exact=True)) for query in queries]
    plain = search_params(layout.quantization, exact=False)
    found, times = [], []
    for query in queries:
        before = time.perf_counter()
        found.append(_ids(client, name, query, plain))
        times.append(1000 * (time.perf_counter() - before))
    client.close()
    recall = np.mean([len(set(a) & set(b)) / max(1, len(b)) for a, b in zip(found, exact, strict=True)])
    return Cost(
        points=len(vectors),
        dim=dim,
        quantization=layout.quantization,
        **_bytes(folder),
        build_seconds=seconds,
        p50_ms=float(np.percentile(times, 50)),
        p95_ms=float(np.percentile(times, 95)),
        recall_at_10=float(recall),
        indexed=indexed,
    )


def _ids(client: QdrantClient, name: str, query: FloatArray, params: models.SearchParams | None) -> list[Any]:
    answer = client.query_points(
        name, query.tolist(), using=VECTOR, limit=10, search_params=params, with_payload=False
    )
    return [point.id for point in answer.points]


def _bytes(folder: Path) -> dict[str, int]:
    """Bytes that the collection's files take on disk, by what they hold."""
    sizes = {"vectors_bytes": 0, "quantized_bytes": 0, "index_bytes": 0}
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        taken = file.stat().st_blocks * 512
        if file.parent.name == f"vector_index-{VECTOR}":
            sizes["index_bytes"] += taken
        elif file.name.startswith("quantized"):
            sizes["quantized_bytes"] += taken
        elif f"vector_storage-{VECTOR}" in file.parts:
            sizes["vectors_bytes"] += taken
    return sizes
