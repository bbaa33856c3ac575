"""The store: Qdrant collections that know what made their vectors. Only this package talks to Qdrant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from llama_index.core.schema import TextNode
from qdrant_client import models

from rag_embfilter.errors import ConfigError, FingerprintMismatch, StoreError
from rag_embfilter.filters import unit_rows
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.store.bm25 import Bm25
from rag_embfilter.store.collections import Collections
from rag_embfilter.store.described import CollectionInfo, check_name, collection_name
from rag_embfilter.store.layout import Layout, search_params
from rag_embfilter.store.points import VECTOR, FloatArray, Hit, Page, hit_of
from rag_embfilter.store.searching import alone, conditions, fused, terms_stages

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

SCROLL = 1024  # points asked for in one request


class Store(Collections):
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
        info = self._check_size(name, page.vectors)
        unit_rows(page.vectors)
        if info.bm25 is not None:
            page = replace(page, sparse=info.bm25.documents([node.text for node in page.nodes]))
        for points in page.batches():
            with self._calling() as client:
                client.upsert(name, points, wait=True)

    def _check_size(self, name: str, vectors: FloatArray) -> CollectionInfo:
        info = self.info(name, count=False)
        if vectors.ndim != 2 or vectors.shape[1] != info.dim:
            raise FingerprintMismatch(
                f"collection {name!r} holds vectors of {info.dim} dimensions, these are {vectors.shape}; "
                "use the filter that the collection was made with."
            )
        return info

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

    def search(
        self,
        name: str,
        vectors: FloatArray,
        limit: int = 10,
        where: Mapping[str, str] | None = None,
        exact: bool = False,
        fingerprint: Fingerprint | None = None,
        texts: Sequence[str] | None = None,
    ) -> list[list[Hit]]:
        """Nearest nodes of each query vector `[n, dim]`, best first.

        With `texts`, the questions themselves, it is hybrid search: what the vectors find and what BM25
        finds, fused by reciprocal ranks, which are then the scores.

        Args:
            where: payload fields that must have these values; a number or a truth value is matched
                both as such and as text.
            exact: compare with every point instead of using the server's index.
            fingerprint: of the encoder and filter that made the vectors; checked when it is given.

        Raises `StoreError` for an absent collection or one without BM25 vectors, `FingerprintMismatch` for
        vectors of another size or fingerprint.
        """
        vectors = np.asarray(vectors, dtype=np.float32)
        if fingerprint is not None:
            self.require(name, fingerprint, vectors.shape[1], writing=False)
        info = self._check_size(name, vectors)
        params = None if self.embedded else search_params(info.quantization, exact)
        stages = [
            models.Prefetch(query=vector.tolist(), using=VECTOR, filter=conditions(where), params=params)
            for vector in vectors
        ]
        if texts is None:
            return self._answers(name, [alone(stage, limit) for stage in stages])
        if len(texts) != len(stages):
            raise ConfigError(f"{len(texts)} texts for {len(stages)} vectors; expected one each.")
        terms = terms_stages(info, texts, where)
        return self._answers(name, [fused(both, limit) for both in zip(stages, terms, strict=True)])

    def search_text(
        self, name: str, texts: Sequence[str], limit: int = 10, where: Mapping[str, str] | None = None
    ) -> list[list[Hit]]:
        """Nodes that BM25 finds for each question, best first; no backbone is needed.

        Raises `StoreError` for an absent collection or one without BM25 vectors.
        """
        info = self.info(name, count=False)
        found = self._answers(name, [alone(stage, limit) for stage in terms_stages(info, texts, where)])
        return found

    def _answers(self, name: str, requests: Sequence[models.QueryRequest]) -> list[list[Hit]]:
        hits = []
        for start in range(0, len(requests), 64):
            with self._calling() as client:
                answers = client.query_batch_points(name, requests[start : start + 64])
            hits += [[hit_of(point) for point in answer.points] for answer in answers]
        return hits
