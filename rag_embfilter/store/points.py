"""Points: LlamaIndex nodes on their way into Qdrant and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
from numpy.typing import NDArray
from qdrant_client import models

FloatArray = NDArray[np.float32]
VECTOR = "text-dense"  # LlamaIndex's own name for the dense vector
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


def bounded_points(nodes: Sequence[TextNode], vectors: FloatArray) -> Iterator[list[models.PointStruct]]:
    """Points in batches bounded in number and in bytes as JSON."""
    batch: list[models.PointStruct] = []
    size = 0
    for node, vector in zip(nodes, vectors, strict=True):
        payload = node_to_metadata_dict(node, remove_text=False, flat_metadata=False)
        weight = 16 * len(vector) + 4 * len(payload["_node_content"])
        if batch and (len(batch) == BATCH_POINTS or size + weight > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(models.PointStruct(id=node.id_, payload=payload, vector={VECTOR: vector.tolist()}))
        size += weight
    if batch:
        yield batch


def conditions(where: Mapping[str, str] | None) -> models.Filter | None:
    """All fields must match; each by any reading of its value."""
    if not where:
        return None
    return models.Filter(
        must=[
            models.Filter(
                should=list(_readings(key, value)),
            )
            for key, value in where.items()
        ]
    )


def _readings(key: str, value: str) -> Iterator[models.FieldCondition]:
    """A field's condition for each way to read a value: text, truth value, number."""
    # A name that is not a plain word would be read as a path into nested fields.
    name = key if re.fullmatch(r"[A-Za-z_][\w-]*", key, re.ASCII) else f'"{key}"'
    yield models.FieldCondition(key=name, match=models.MatchValue(value=value))
    if value.lower() in ("true", "false"):
        yield models.FieldCondition(key=name, match=models.MatchValue(value=value.lower() == "true"))
    if re.fullmatch(r"-?[0-9]{1,18}", value):
        yield models.FieldCondition(key=name, match=models.MatchValue(value=int(value)))
    with suppress(ValueError):
        number = float(value)
        if math.isfinite(number):
            yield models.FieldCondition(key=name, range=models.Range(gte=number, lte=number))


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
