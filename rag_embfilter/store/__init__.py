"""The store: Qdrant collections that know what made their vectors. Only this package talks to Qdrant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from llama_index.core.schema import TextNode
from qdrant_client import models

from rag_embfilter.errors import StoreError
from rag_embfilter.filters import unit_rows
from rag_embfilter.store.bm25 import Bm25
from rag_embfilter.store.described import CollectionInfo, check_name, collection_name
from rag_embfilter.store.layout import Layout
from rag_embfilter.store.points import SCROLL, VECTOR, FloatArray, Hit, Page
from rag_embfilter.store.searching import Searching

__all__ = [
    "VECTOR",
    "Bm25",
    "CollectionInfo",
    "Hit",
    "Layout",
    "Page",
    "Store",
    "check_name",
    "collection_name",
]


class Store(Searching):
    """Qdrant collections, embedded in this process or on a server, behind the same calls.

    Args:
        path: folder of an embedded store or of Qdrant Edge; one process at a time.
        url: a server, such as `http://localhost:6333`; exactly one of `path`, `url` and `client`.
        api_key: the server's key.
        client: an open `QdrantClient`.
        timeout: seconds a server may take for one request.
        filter_dir: folder of fitted filters, one file each; by default `filters` beside `path`, or
            `.embfilter/filters`.
        layout: quantisation, disk and shards of collections made from now on, on a server or Edge.
        edge: whether a new folder is Qdrant Edge's (`[edge]` extra): the server's engine in this process,
            with index, quantisation and BM25. A folder that is there already opens as what it is.
        grpc, grpc_port: talk to the server by gRPC, on this port of the host in `url`.

    Raises `StoreError` when the folder is in use, or the server cannot be reached.
    """

    def pages(self, name: str, vector: str = VECTOR) -> Iterator[Page]:
        """All points of a collection with their vectors, in parts; `vector=""` is the unnamed one."""
        offset = None
        while True:
            with self._calling() as client:
                records, offset = client.scroll(
                    name, limit=SCROLL, offset=offset, with_vectors=[vector] if vector else True
                )
            page = Page.of_records(records, vector)
            if page.ids:
                yield page
            if offset is None:
                return

    def sources(self, name: str) -> set[str]:
        """The sources of all points of a collection."""
        found: set[str] = set()
        offset = None
        while True:
            with self._calling() as client:
                records, offset = client.scroll(name, limit=SCROLL, offset=offset, with_payload=["source"])
            found.update(str((record.payload or {}).get("source")) for record in records)
            if offset is None:
                return found

    def upsert(self, name: str, nodes: Sequence[TextNode], vectors: FloatArray) -> None:
        """Write nodes with their vectors `[n, dim]`; a node that is there already is replaced.

        Vectors with NaN, Inf or no length are never sent: `EncodingError` names them. Raises
        `FingerprintMismatch` for another size than the collection's, `StoreError` when there is none.
        """
        self.write(name, Page.of_nodes(nodes, vectors))

    def write(self, name: str, page: Page) -> None:
        """As `upsert`, for points that have their payload already."""
        info = self.check_size(name, page.vectors)
        unit_rows(page.vectors)
        if info.bm25 is not None:
            page = replace(page, sparse=info.bm25.documents([node.text for node in page.nodes]))
        for points in page.batches():
            with self._calling() as client:
                client.upsert(name, points, wait=True)

    def present(self, name: str, ids: Sequence[int | str]) -> set[str]:
        """Which of these point ids the collection holds."""
        found: set[str] = set()
        for start in range(0, len(ids), SCROLL):
            with self._calling() as client:
                part = client.retrieve(name, ids[start : start + SCROLL], with_payload=False)
            found.update(str(record.id) for record in part)
        return found

    def vectors(self, name: str, ids: Sequence[str]) -> FloatArray:
        """Stored vectors `[n, dim]` of these points, in this order. Raises `StoreError` for an absent one."""
        found: dict[str, Any] = {}
        for start in range(0, len(ids), SCROLL):
            with self._calling() as client:
                part = client.retrieve(
                    name, ids[start : start + SCROLL], with_payload=False, with_vectors=[VECTOR]
                )
            found.update({str(r.id): r.vector[VECTOR] for r in part if isinstance(r.vector, dict)})
        if missing := [i for i in ids if i not in found]:
            raise StoreError(f"collection {name!r} lost {len(missing)} points meanwhile, {missing[0]} first.")
        return np.array([found[i] for i in ids], dtype=np.float32)

    def points_of(self, name: str, sources: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Stored points of these sources: point id -> (source, doc_id)."""
        if not sources:
            return {}
        wanted = models.Filter(
            must=[models.FieldCondition(key="source", match=models.MatchAny(any=list(sources)))]
        )
        found = {}
        offset = None
        while True:
            with self._calling() as client:
                records, offset = client.scroll(
                    name, wanted, limit=SCROLL, offset=offset, with_payload=["source", "doc_id"]
                )
            for record in records:
                payload = record.payload or {}
                found[str(record.id)] = (str(payload.get("source")), str(payload.get("doc_id")))
            if offset is None:
                return found

    def remove(self, name: str, ids: Sequence[str]) -> None:
        """Delete points by id."""
        for start in range(0, len(ids), SCROLL):
            with self._calling() as client:
                client.delete(name, models.PointIdsList(points=list(ids[start : start + SCROLL])), wait=True)
