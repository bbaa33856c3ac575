"""Collections that know what made their vectors: looked up, checked, made, adopted, switched, removed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from qdrant_client import models

from rag_embfilter.errors import ConfigError, FingerprintMismatch, StoreError
from rag_embfilter.filters import EmbFilter
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.store.bm25 import SPARSE, Bm25
from rag_embfilter.store.connected import Connected
from rag_embfilter.store.described import KEY, CollectionInfo, check_name, filter_file, made_by, mean_of
from rag_embfilter.store.layout import FEW_FOR_BINARY, quantization_of
from rag_embfilter.store.points import VECTOR

if TYPE_CHECKING:
    # Loads torch, which looking at collections does without.
    from rag_embfilter.encoder import Encoder

logger = logging.getLogger(__name__)


class Collections(Connected):
    """A store's collections; see `Store`."""

    def info(self, name: str, count: bool = True) -> CollectionInfo:
        """What a collection holds and what made it. Raises `StoreError` when there is none of this name.

        Of an alias it is the collection's own name that is given: who searches by that never meets
        another collection, also when the alias is moved meanwhile. `count=False` leaves the points
        uncounted (-1), which is quicker.
        """
        given, name = name, self.aliases().get(name, name)
        try:
            with self._calling() as client:
                found = client.get_collection(name)
                points = client.count(name, exact=True).count if count else -1
        except StoreError:
            self._require_there(given)
            raise
        vectors = found.config.params.vectors
        params = vectors.get(VECTOR) if isinstance(vectors, dict) else None
        if params is None:
            raise StoreError(
                f"collection {name!r} has no vector named {VECTOR!r}: it was not made here, and LlamaIndex "
                "opens it under another name. If it holds raw embeddings, use `refilter --source-collection`."
            )
        made = (found.config.metadata or {}).get(KEY)
        made = made if isinstance(made, dict) else {}  # whatever somebody else keeps there
        parts = made.get("parts")
        return CollectionInfo(
            name=name,
            points=points,
            dim=params.size,
            fingerprint=Fingerprint(parts) if parts else None,
            settings=self._settings(made),
            made=made,
            quantization=quantization_of(found.config.quantization_config or params.quantization_config),
            bm25=Bm25.of(made),
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

    def create(
        self, name: str, encoder: Encoder, embfilter: EmbFilter, base: str, bm25: Bm25 | None = None
    ) -> None:
        """Make an empty cosine collection with its fingerprint, unless it exists (then see `require`).

        With `bm25` it takes sparse vectors too, which are made of the nodes' texts as they are written; by
        default it does so where the base's raw collection does.
        """
        check_name(name)
        if self.exists(name):
            self.require(name, encoder.fingerprint | embfilter.fingerprint, embfilter.dim, writing=True)
            self._index_payload(name)
            return
        if "fit" in embfilter.parts:
            embfilter.save(self.filter_dir / filter_file(embfilter))
        raw_name = f"{base}-raw"
        if bm25 is None and name != raw_name and self.exists(raw_name):
            bm25 = self.info(raw_name, count=False).bm25
        metadata = {KEY: made_by(encoder, embfilter, base, bm25)}
        raw = embfilter.filter_type == "raw"
        vectors = {VECTOR: self.layout.vector(embfilter.dim, raw)}
        settings = self.layout.collection(raw)
        if self.layout.quantization == "binary" and not raw and embfilter.dim < FEW_FOR_BINARY:
            logger.warning(
                "collection %r: a bit a dimension of %d finds few of the nearest; measure it (`cost`), or "
                "take scalar",
                name,
                embfilter.dim,
            )
        if bm25 is not None:
            idf = models.SparseVectorParams(modifier=models.Modifier.IDF)
            settings["sparse_vectors_config"] = {SPARSE: idf}
        with self._calling() as client:
            client.create_collection(name, vectors_config=vectors, metadata=metadata, **settings)
        self._index_payload(name)
        if self.info(name).fingerprint is None:
            self.delete(name)
            raise StoreError(
                f"the server at {self.where} does not keep collection metadata, where fingerprints live. "
                "Use Qdrant 1.16 or later."
            )

    def require_bm25(self, name: str, bm25: Bm25 | None) -> None:
        """Raise `ConfigError` when a filtered collection lacks the BM25 vectors asked for, or has others.

        A raw one, which is there to make others from, may be without.
        """
        info = self.info(name, count=False)
        if bm25 is None or info.bm25 == bm25:
            return
        if info.settings.get("filter_type") == "raw":
            logger.warning(
                "collection %r stays without the BM25 vectors asked for; filtered ones get them", name
            )
            return
        has = "no BM25 vectors" if info.bm25 is None else f"BM25 vectors for {info.bm25.language}"
        raise ConfigError(
            f"collection {name!r} has {has}, and they are made with the collection. Delete it and run this "
            "again: where there is a raw collection, no document is encoded anew."
        )

    def optimize(self, name: str) -> None:
        """Build the index of what was written, on Edge; a server does so by itself, the embedded has none."""
        with self._calling() as client:
            if hasattr(client._client, "optimize"):
                client._client.optimize(name)

    def _index_payload(self, name: str) -> None:
        """Indexes that syncing asks by, where there are any; one that is there already is left as it is."""
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
        if "fit" in embfilter.parts:
            embfilter.save(self.filter_dir / filter_file(embfilter))
        base = info.made.get("base") or info.name.removesuffix(f"-{embfilter.name}")
        made = made_by(encoder, embfilter, str(base), info.bm25)
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

    def delete(self, name: str, force: bool = False) -> None:
        """Remove a collection and all its points.

        Raises `StoreError` for an absent name, an alias, and, unless `force`, a collection that an alias
        stands for.
        """
        if name not in self.names():
            self.info(name)
            raise StoreError(f"{name!r} is an alias; give the full name of the collection it stands for.")
        live = sorted(alias for alias, stood in self.aliases().items() if stood == name)
        if live and not force:
            raise StoreError(
                f"collection {name!r} is what readers find as {', '.join(map(repr, live))}; switch that to "
                "another collection first, or force it."
            )
        with self._calling() as client:
            client.delete_collection(name)
