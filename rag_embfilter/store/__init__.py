"""The store: Qdrant collections that know what made their vectors. Only this package talks to Qdrant."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_index.core.schema import TextNode
from portalocker import Lock
from qdrant_client import QdrantClient, models
from qdrant_client.local.qdrant_local import QdrantLocal

from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, FingerprintMismatch, StoreError
from rag_embfilter.filters import EmbFilter, unit_rows
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.store.connection import open_embedded, open_server, readable
from rag_embfilter.store.described import (
    KEY,
    CollectionInfo,
    check_name,
    collection_name,
    filter_file,
    made_by,
    mean_of,
)
from rag_embfilter.store.points import VECTOR, FloatArray, Hit, bounded_points, conditions, hit_of, node_of

__all__ = ["CollectionInfo", "Hit", "Store", "check_name", "collection_name"]

logger = logging.getLogger(__name__)

SCROLL = 1024  # points asked for in one request


class Store:
    """Qdrant collections, embedded in this process or on a server, behind the same calls.

    Args:
        path: folder of an embedded store; one process at a time.
        url: a server, such as `http://localhost:6333`; exactly one of `path`, `url` and `client`.
        api_key: the server's key.
        client: an open `QdrantClient`.
        timeout: seconds a server may take for one request.
        filter_dir: folder of fitted filters, one file each; by default `filters` beside `path`, or
            `.embfilter/filters`.

    Raises `StoreError` when the folder is in use, or the server cannot be reached.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        url: str | None = None,
        api_key: str | None = None,
        client: QdrantClient | None = None,
        timeout: int = 60,
        filter_dir: str | Path | None = None,
    ) -> None:
        if sum(given is not None for given in (path, url, client)) != 1:
            raise ConfigError("give exactly one of path (embedded), url (server) and client.")
        self.where = str(path or url or "the given client")
        beside = Path(path).resolve().parent if path is not None else Path(".embfilter").resolve()
        self.filter_dir = beside / "filters" if filter_dir is None else Path(filter_dir).resolve()
        self._lock = threading.RLock()
        self._owned = client is None
        self._folder_lock: Lock | None = None
        if client is not None:
            self.client = client
        elif path is not None:
            self.client, self._folder_lock = open_embedded(Path(path))
        else:
            self.client = open_server(str(url), api_key, timeout)
        self.embedded = isinstance(self.client._client, QdrantLocal)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder or the connection, unless the client was given."""
        if self._owned:
            self.client.close()
        if self._folder_lock is not None:
            self._folder_lock.release()

    @contextmanager
    def _calling(self) -> Iterator[QdrantClient]:
        """The client, for one call at a time where it is embedded, with its errors made readable."""
        with readable(self.where):
            if not self.embedded:
                yield self.client
            else:
                with self._lock:
                    yield self.client

    def names(self) -> list[str]:
        """Names of all collections, sorted."""
        with self._calling() as client:
            return sorted(c.name for c in client.get_collections().collections)

    def exists(self, name: str) -> bool:
        """Whether there is a collection or an alias of this name."""
        with self._calling() as client:
            if client.collection_exists(name):
                return True
            return any(alias.alias_name == name for alias in client.get_aliases().aliases)

    def info(self, name: str, count: bool = True) -> CollectionInfo:
        """What a collection holds and what made it. Raises `StoreError` when there is none of this name.

        `count=False` leaves the points uncounted (-1), which is quicker.
        """
        if not self.exists(name):
            have = self.names()
            listed = ", ".join(have) if have else "none yet"
            raise StoreError(f"collection {name!r} is not in {self.where}. Collections there: {listed}.")
        with self._calling() as client:
            found = client.get_collection(name)
            points = client.count(name, exact=True).count if count else -1
        vectors = found.config.params.vectors
        params = vectors.get(VECTOR) if isinstance(vectors, dict) else None
        if params is None:
            raise StoreError(
                f"collection {name!r} has no vector named {VECTOR!r}: it was not made here, and LlamaIndex "
                "opens it under another name. Ingest its documents into a collection of this package."
            )
        made = (found.config.metadata or {}).get(KEY) or {}
        parts = made.get("parts")
        return CollectionInfo(
            name=name,
            points=points,
            dim=params.size,
            fingerprint=Fingerprint(parts) if parts else None,
            settings=self._settings(made),
            made=made,
        )

    def _settings(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """What `EmbFilterEmbedding` takes; a fitted filter's file is looked for in our folder."""
        settings = dict(made.get("settings") or {})
        if "filter_file" in settings:
            settings["filter_file"] = str(self.filter_dir / settings["filter_file"])
        return settings

    def filter_of(self, name: str) -> EmbFilter:
        """The fitted filter that made a collection, with the query mean the collection keeps.

        Raises `StoreError` when its file is not in `filter_dir`, or the collection's filter is not fitted.
        """
        settings = self.info(name).settings
        path = Path(settings.get("filter_file", ""))
        if not path.name or not path.is_file():
            raise StoreError(
                f"collection {name!r} needs its fitted filter, {path.name or 'which it does not name'}, and "
                f"{self.filter_dir} does not hold it. Copy the file there, name its folder (--filter-dir), "
                "or delete the collection and ingest again."
            )
        loaded = EmbFilter.load(path)
        return replace(loaded, query_mean=np.array(settings["query_mean"], dtype=np.float32))

    def set_query_mean(self, name: str, embfilter: EmbFilter) -> None:
        """Keep a fitted filter's query mean with its collection; no vector is touched.

        Raises `FingerprintMismatch` when the collection was made with another filter.
        """
        info = self.info(name)
        ours = {**(info.fingerprint.parts if info.fingerprint else {}), **embfilter.parts}
        Fingerprint(ours).require(info.fingerprint or Fingerprint(), f"collection {name!r}")
        settings = {**info.made["settings"], "query_mean": mean_of(embfilter)}
        with self._calling() as client:
            client.update_collection(name, metadata={KEY: {**info.made, "settings": settings}})

    def stream(self, name: str) -> Iterator[tuple[list[TextNode], FloatArray]]:
        """All nodes of a collection with their vectors, in parts: (nodes, float32 `[n, dim]`)."""
        offset = None
        while True:
            with self._calling() as client:
                records, offset = client.scroll(name, limit=SCROLL, offset=offset, with_vectors=[VECTOR])
            whole = [(node_of(r), r.vector[VECTOR]) for r in records if isinstance(r.vector, dict)]
            if whole:
                yield [node for node, _ in whole], np.array([vector for _, vector in whole], dtype=np.float32)
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

    def require(self, name: str, fingerprint: Fingerprint, dim: int, writing: bool) -> None:
        """Check that a collection was made with this fingerprint and size.

        A collection without a fingerprint is refused for writing and warned about for reading. Raises
        `FingerprintMismatch` (also for another size) or `StoreError` (absent).
        """
        info = self.info(name)
        if info.fingerprint is not None:
            fingerprint.require(info.fingerprint, f"collection {name!r}")
        if info.dim != dim:
            raise FingerprintMismatch(
                f"collection {name!r} holds vectors of {info.dim} dimensions, these have {dim}. Use the "
                "filter it was made with, write to another collection name, or delete it and ingest again."
            )
        if info.fingerprint is None:
            if writing:
                raise FingerprintMismatch(
                    f"collection {name!r} has no fingerprint: it was not made here, so nobody can tell "
                    "whether these vectors belong in it. Adopt it (`Store.adopt`, `collections adopt`) if "
                    "you know that they do, or write to another name."
                )
            logger.warning("collection %r has no fingerprint; searching it on your word", name)

    def create(self, name: str, encoder: Encoder, embfilter: EmbFilter, base: str) -> None:
        """Make an empty cosine collection with its fingerprint, unless it exists (then see `require`)."""
        check_name(name)
        if self.exists(name):
            self.require(name, encoder.fingerprint | embfilter.fingerprint, embfilter.dim, writing=True)
            self._index_payload(name)
            return
        if "fit" in embfilter.parts:
            embfilter.save(self.filter_dir / filter_file(embfilter))
        metadata = {KEY: made_by(encoder, embfilter, base)}
        vectors = models.VectorParams(size=embfilter.dim, distance=models.Distance.COSINE)
        with self._calling() as client:
            client.create_collection(name, vectors_config={VECTOR: vectors}, metadata=metadata)
        self._index_payload(name)
        if self.info(name).fingerprint is None:
            self.delete(name)
            raise StoreError(
                f"the server at {self.where} does not keep collection metadata, where fingerprints live. "
                "Use Qdrant 1.16 or later."
            )

    def _index_payload(self, name: str) -> None:
        """Indexes that syncing asks by, on a server; one that is there already is left as it is."""
        if not self.embedded:
            with self._calling() as client:
                for key in ("source", "doc_id"):
                    client.create_payload_index(name, key, models.PayloadSchemaType.KEYWORD)

    def adopt(self, name: str, encoder: Encoder, embfilter: EmbFilter, override: bool = False) -> None:
        """Give a collection the fingerprint of this encoder and filter, on the caller's word that its
        vectors have it.

        A collection that has another one needs `override`. Both are logged.
        """
        info = self.info(name)
        fingerprint = encoder.fingerprint | embfilter.fingerprint
        if info.dim != embfilter.dim:
            raise FingerprintMismatch(
                f"collection {name!r} holds vectors of {info.dim} dimensions, this filter makes "
                f"{embfilter.dim}; it cannot be adopted."
            )
        if info.fingerprint is not None and not override:
            fingerprint.require(info.fingerprint, f"collection {name!r}")
        was = info.fingerprint.digest if info.fingerprint else "none"
        logger.warning("collection %r: fingerprint %s set in place of %s", name, fingerprint.digest, was)
        made = made_by(encoder, embfilter, str(info.made.get("base") or name))
        with self._calling() as client:
            client.update_collection(name, metadata={KEY: made})

    def delete(self, name: str) -> None:
        """Remove a collection and all its points. Raises `StoreError` for an absent name and an alias."""
        if name not in self.names():
            self.info(name)
            raise StoreError(f"{name!r} is an alias; give the full name of the collection it stands for.")
        with self._calling() as client:
            client.delete_collection(name)

    def upsert(self, name: str, nodes: Sequence[TextNode], vectors: FloatArray) -> None:
        """Write nodes with their vectors `[n, dim]`; a node that is there already is replaced.

        Vectors with NaN, Inf or no length are never sent: `EncodingError` names them. Raises
        `FingerprintMismatch` for another size than the collection's, `StoreError` when there is none.
        """
        self._check_size(name, vectors)
        unit_rows(vectors)
        for points in bounded_points(nodes, vectors):
            with self._calling() as client:
                client.upsert(name, points, wait=True)

    def _check_size(self, name: str, vectors: FloatArray) -> None:
        dim = self.info(name, count=False).dim
        if vectors.ndim != 2 or vectors.shape[1] != dim:
            raise FingerprintMismatch(
                f"collection {name!r} holds vectors of {dim} dimensions, these are {vectors.shape}; use the "
                "filter that the collection was made with."
            )

    def present(self, name: str, ids: Sequence[str]) -> set[str]:
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
    ) -> list[list[Hit]]:
        """Nearest nodes of each query vector `[n, dim]`, best first.

        Args:
            where: payload fields that must have these values; a number or a truth value is matched
                both as such and as text.
            exact: compare with every point instead of using the server's index.
            fingerprint: of the encoder and filter that made the vectors; checked when it is given.

        Raises `StoreError` for an absent collection, `FingerprintMismatch` for vectors of another size or
        fingerprint.
        """
        vectors = np.asarray(vectors, dtype=np.float32)
        if fingerprint is not None:
            self.require(name, fingerprint, vectors.shape[1], writing=False)
        self._check_size(name, vectors)
        params = None if self.embedded or not exact else models.SearchParams(exact=True)
        requests = [
            models.QueryRequest(
                query=vector.tolist(),
                using=VECTOR,
                limit=limit,
                with_payload=True,
                filter=conditions(where),
                params=params,
            )
            for vector in vectors
        ]
        hits = []
        for start in range(0, len(requests), 64):
            with self._calling() as client:
                answers = client.query_batch_points(name, requests[start : start + 64])
            hits += [[hit_of(point) for point in answer.points] for answer in answers]
        return hits
