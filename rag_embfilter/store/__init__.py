"""The store: Qdrant collections that know what made their vectors. Only this package talks to Qdrant."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_index.core.schema import TextNode
from qdrant_client import models

from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import FingerprintMismatch, StoreError
from rag_embfilter.filters import EmbFilter, unit_rows
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.store.connected import Connected
from rag_embfilter.store.described import (
    KEY,
    CollectionInfo,
    check_name,
    collection_name,
    filter_file,
    made_by,
    mean_of,
)
from rag_embfilter.store.layout import Layout, search_params
from rag_embfilter.store.points import VECTOR, FloatArray, Hit, Page, conditions, hit_of

__all__ = ["VECTOR", "CollectionInfo", "Hit", "Layout", "Page", "Store", "check_name", "collection_name"]

logger = logging.getLogger(__name__)

SCROLL = 1024  # points asked for in one request


class Store(Connected):
    """Qdrant collections, embedded in this process or on a server, behind the same calls.

    Args:
        path: folder of an embedded store; one process at a time.
        url: a server, such as `http://localhost:6333`; exactly one of `path`, `url` and `client`.
        api_key: the server's key.
        client: an open `QdrantClient`.
        timeout: seconds a server may take for one request.
        filter_dir: folder of fitted filters, one file each; by default `filters` beside `path`, or
            `.embfilter/filters`.
        layout: quantisation, disk and shards of collections made from now on, on a server.
        grpc, grpc_port: talk to the server by gRPC, on this port of the host in `url`.

    Raises `StoreError` when the folder is in use, or the server cannot be reached.
    """

    def info(self, name: str, count: bool = True) -> CollectionInfo:
        """What a collection holds and what made it. Raises `StoreError` when there is none of this name.

        Of an alias it is the collection's own name that is given: who searches by that never meets
        another collection, also when the alias is moved meanwhile. `count=False` leaves the points
        uncounted (-1), which is quicker.
        """
        self._require_there(name)
        name = self.aliases().get(name, name)
        with self._calling() as client:
            found = client.get_collection(name)
            points = client.count(name, exact=True).count if count else -1
        vectors = found.config.params.vectors
        params = vectors.get(VECTOR) if isinstance(vectors, dict) else None
        if params is None:
            raise StoreError(
                f"collection {name!r} has no vector named {VECTOR!r}: it was not made here, and LlamaIndex "
                "opens it under another name. If it holds raw embeddings, use `refilter --source-collection`."
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
            quantized=bool(found.config.quantization_config or params.quantization_config),
        )

    def only_vector(self, name: str) -> tuple[str, int]:
        """Name (empty when it has none) and size of a collection's vector, whoever made it.

        Raises `StoreError` for one that is absent or has several.
        """
        self._require_there(name)
        with self._calling() as client:
            vectors = client.get_collection(name).config.params.vectors
        if isinstance(vectors, models.VectorParams):
            return "", vectors.size
        named = {key: params.size for key, params in (vectors or {}).items()}
        if VECTOR in named:
            return VECTOR, named[VECTOR]
        if len(named) != 1:
            raise StoreError(
                f"collection {name!r} has the vectors {sorted(named)}; expected one, or one named {VECTOR!r}."
            )
        return named.popitem()

    def count(self, name: str) -> int:
        """Points of a collection, counted."""
        with self._calling() as client:
            return int(client.count(name, exact=True).count)

    def _require_there(self, name: str) -> None:
        if not self.exists(name):
            have = self.names()
            listed = ", ".join(have) if have else "none yet"
            raise StoreError(f"collection {name!r} is not in {self.where}. Collections there: {listed}.")

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
        if "query_mean" not in settings:
            return loaded
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
        raw = embfilter.filter_type == "raw"
        vectors = {VECTOR: self.layout.vector(embfilter.dim, raw)}
        with self._calling() as client:
            client.create_collection(
                name, vectors_config=vectors, metadata=metadata, **self.layout.collection(raw)
            )
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

    def switch(self, alias: str, name: str, force: bool = False) -> str | None:
        """Let an alias stand for a collection from now on, in one step; readers see the old one or the new.

        The new collection must have a fingerprint and as many points as the one it takes the place of,
        unless `force`. Switching to the old one again is the way back.

        Returns: the collection that it stood for, if any. Raises `StoreError` when it may not be moved.
        """
        check_name(alias)
        info = self.info(name)
        if alias in self.names():
            raise StoreError(f"{alias!r} is a collection; an alias needs a name of its own.")
        old = self.aliases().get(alias)
        if info.fingerprint is None and not force:
            raise StoreError(f"collection {info.name!r} has no fingerprint; adopt it first, or force it.")
        if old is not None and not force and self.count(old) != info.points:
            raise StoreError(
                f"collection {info.name!r} holds {info.points} points, and {old!r}, which {alias!r} stands "
                f"for, {self.count(old)}. Bring them in step (ingest, refilter), or force it."
            )
        operations: list[models.AliasOperations] = []
        if old is not None:
            operations.append(models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias)))
        made = models.CreateAlias(collection_name=info.name, alias_name=alias)
        operations.append(models.CreateAliasOperation(create_alias=made))
        with self._calling() as client:
            client.update_collection_aliases(operations)
        return old

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
        self.write(name, Page.of_nodes(nodes, vectors))

    def write(self, name: str, page: Page) -> None:
        """As `upsert`, for points that have their payload already."""
        self._check_size(name, page.vectors)
        unit_rows(page.vectors)
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
        info = self._check_size(name, vectors)
        params = None if self.embedded else search_params(info.quantized, exact)
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
