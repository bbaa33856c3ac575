"""Points: LlamaIndex nodes on their way into Qdrant and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
from numpy.typing import NDArray
from qdrant_client import models

from rag_embfilter.store.bm25 import SPARSE

FloatArray = NDArray[np.float32]
VECTOR = "text-dense"  # LlamaIndex's own name for the dense vector
SCROLL = 1024  # points asked for in one request
BATCH_POINTS = 256
BATCH_BYTES = 8 << 20  # a server refuses requests over 32 MiB


@dataclass(frozen=True)
class Hit:
    """A search result: the node with its text and metadata, and its cosine similarity."""

    id: str
    score: float
    node: TextNode

    @property
    def text(self) -> str:
        """The passage."""
        return str(self.node.get_content(metadata_mode=MetadataMode.NONE))

    @property
    def place(self) -> str:
        """Where it comes from: file, and page, line, record or chunk."""
        metadata = self.node.metadata
        for key in ("page", "record", "line", "chunk"):
            if metadata.get(key) is not None:
                return f"{metadata['source']}, {key} {metadata[key]}"
        return str(metadata.get("source", ""))


@dataclass(frozen=True)
class Page:
    """Points as they are stored: ids, payloads, vectors as float32 `[n, dim]`, and sparse ones if any."""

    ids: list[int | str]
    payloads: list[dict[str, Any]]
    vectors: FloatArray
    sparse: Sequence[models.SparseVector] | None = None

    @classmethod
    def of_nodes(cls, nodes: Sequence[TextNode], vectors: FloatArray) -> Page:
        """Nodes as points, with payloads that LlamaIndex reads."""
        payloads = [node_to_metadata_dict(node, remove_text=False, flat_metadata=False) for node in nodes]
        return cls([node.id_ for node in nodes], payloads, vectors)

    @classmethod
    def of_records(cls, records: Sequence[models.Record], vector: str) -> Page:
        """Records with their vector of this name (empty for the unnamed one); those without are left out."""
        found = [(r, r.vector.get(vector) if isinstance(r.vector, dict) else r.vector) for r in records]
        whole = [(r, values) for r, values in found if values]
        vectors = np.array([values for _, values in whole], dtype=np.float32)
        return cls(
            [r.id if isinstance(r.id, int) else str(r.id) for r, _ in whole],
            [r.payload or {} for r, _ in whole],
            vectors,
        )

    def at(self, rows: Sequence[int], vectors: FloatArray) -> Page:
        """These points with other vectors `[len(rows), dim]`."""
        return Page([self.ids[i] for i in rows], [self.payloads[i] for i in rows], vectors)

    @property
    def nodes(self) -> list[TextNode]:
        """The points as LlamaIndex nodes."""
        return [node_of(models.Record(id=i, payload=p)) for i, p in zip(self.ids, self.payloads, strict=True)]

    def batches(self) -> Iterator[list[models.PointStruct]]:
        """Points in batches bounded in number and in bytes as JSON."""
        batch: list[models.PointStruct] = []
        size = 0
        sparse = self.sparse or [models.SparseVector(indices=[], values=[])] * len(self.ids)
        for point, payload, vector, terms in zip(
            self.ids, self.payloads, self.vectors.tolist(), sparse, strict=True
        ):
            weight = 24 * (len(vector) + 2 * len(terms.indices)) + 4 * _length(payload)
            if batch and (len(batch) == BATCH_POINTS or size + weight > BATCH_BYTES):
                yield batch
                batch, size = [], 0
            named: dict[str, Any] = {VECTOR: vector} | ({SPARSE: terms} if terms.indices else {})
            batch.append(models.PointStruct(id=point, payload=payload, vector=named))
            size += weight
        if batch:
            yield batch


def _length(payload: Mapping[str, Any]) -> int:
    """About how many characters a payload has as JSON."""
    return sum(len(key) + len(str(value)) for key, value in payload.items())


def node_of(point: models.Record | models.ScoredPoint) -> TextNode:
    """A stored point's node; of one that somebody else made, what there is."""
    payload = point.payload or {}
    try:
        node = metadata_dict_to_node(payload)
    except ValueError:
        node = TextNode(id_=str(point.id), text=str(payload.get("text", "")), metadata=payload)
    assert isinstance(node, TextNode)
    return node


def hit_of(point: models.ScoredPoint) -> Hit:
    """A found point with its node."""
    return Hit(str(point.id), float(point.score), node_of(point))
