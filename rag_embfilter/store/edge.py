"""Qdrant Edge behind `QdrantClient`: the real engine in this process, called as a server is.

A shard of Edge is one collection without name, metadata or aliases. A folder of them has all three:

    edge.json                       that this is such a folder, and its aliases
    collections/NAME/collection.json    how the collection was made, and its metadata
    collections/NAME/shard/         Edge's own files
    making/, leaving/               collections on their way in and out, removed at the next opening
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import qdrant_edge as edge
from qdrant_client import QdrantClient, models
from qdrant_client.client_base import QdrantBase
from qdrant_client.http import models as http_models

from rag_embfilter.errors import ConfigError, StoreError
from rag_embfilter.files import write_json
from rag_embfilter.store import edge_models as words
from rag_embfilter.store.connection import EDGE_MARK as MARK
from rag_embfilter.store.described import check_name

# Bytes that must be free: Edge maps whole files, some 100 MB a collection, before the first point is written.
RESERVE = 256 << 20
DONE = models.UpdateResult(operation_id=0, status=models.UpdateStatus.COMPLETED)


logger = logging.getLogger(__name__)


def edge_client(path: Path) -> QdrantClient:
    """A client whose every call goes to the Edge folder at `path`, made if it is not there."""
    client = QdrantClient(":memory:")
    client._client = EdgeEngine(path)
    return client


class EdgeEngine(QdrantBase):
    """The part of Qdrant's interface that the store and LlamaIndex use, on shards of Qdrant Edge.

    Raises `StoreError` for what goes wrong in Edge, and for what it does not take.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closed = False
        self._shards: dict[str, edge.EdgeShard] = {}
        path.mkdir(parents=True, exist_ok=True)
        if not (path / MARK).exists():
            if any(path.glob("collections/*")):
                logger.warning("%s was missing; its aliases are gone, the collections are not", path / MARK)
            write_json(path / MARK, {"format": 1, "aliases": {}})
        (path / "collections").mkdir(exist_ok=True)
        for left in ("making", "leaving"):
            shutil.rmtree(path / left, ignore_errors=True)

    def close(self, **_: Any) -> None:
        """Write everything to disk and release the shards; nothing can be asked for afterwards.

        Raises `StoreError` when a shard cannot be written, after all of them are released.
        """
        if self._closed or sys.is_finalizing():
            return
        self._closed = True
        faults = []
        for name, shard in self._shards.items():
            try:
                with _said(name):
                    try:
                        shard.flush()
                    finally:
                        shard.close()
            except StoreError as error:
                faults.append(error)
        self._shards.clear()
        if faults:
            raise faults[0]

    def info(self) -> models.VersionInfo:
        """What this is."""
        return models.VersionInfo(title="Qdrant Edge", version=getattr(edge, "__version__", ""))

    # Collections

    def _place(self, name: str) -> Path:
        """Where a collection, by its name or an alias, would live; a name is never a path."""
        own = self._aliases().get(name, name)
        with suppress(ConfigError):
            check_name(own)
            return self.path / "collections" / own
        raise StoreError(f"collection {name!r} not found: that is not a collection's name.")

    def _folder(self, name: str) -> Path:
        """Where a collection, by its name or an alias, lives."""
        folder = self._place(name)
        if not (folder / "collection.json").is_file():
            raise StoreError(f"collection {name!r} not found in {str(self.path)!r}.")
        return folder

    def _need_room(self) -> None:
        """Raise `StoreError` on a disk that is nearly full: Edge maps files, and dies on a full one."""
        free = shutil.disk_usage(self.path).free
        if free < RESERVE:
            raise StoreError(
                f"the disk of {str(self.path)!r} is full: {free >> 20} MiB are left, and Qdrant Edge needs "
                f"{RESERVE >> 20} to work in. Make room; what was written stays, and the same command goes "
                "on from there."
            )

    def _shard(self, name: str) -> edge.EdgeShard:
        folder = self._folder(name)
        if folder.name not in self._shards:
            self._need_room()
            with _said(name):
                self._shards[folder.name] = edge.EdgeShard.load(str(folder / "shard"))
        return self._shards[folder.name]

    def _made(self, name: str) -> dict[str, Any]:
        return _read(self._folder(name) / "collection.json")

    def _aliases(self) -> dict[str, str]:
        if self._closed:
            raise StoreError(f"the store {str(self.path)!r} is closed.")
        aliases: dict[str, str] = _read(self.path / MARK).get("aliases", {})
        return aliases

    def get_collections(self, **_: Any) -> models.CollectionsResponse:
        """All collections; one is there once its description is."""
        self._aliases()
        names = sorted(made.parent.name for made in self.path.glob("collections/*/collection.json"))
        return models.CollectionsResponse(collections=[models.CollectionDescription(name=n) for n in names])

    def collection_exists(self, collection_name: str, **_: Any) -> bool:
        """Whether a collection or alias has this name."""
        with suppress(StoreError):
            return (self._place(collection_name) / "collection.json").is_file()
        self._aliases()  # a store that is closed or damaged says so
        return False

    def create_collection(self, collection_name: str, vectors_config: Any = None, **settings: Any) -> bool:
        """Make a collection; it is there as a whole or not at all."""
        if self.collection_exists(collection_name):
            raise StoreError(f"collection {collection_name!r} exists already in {str(self.path)!r}.")
        check_name(collection_name)
        folder = self.path / "collections" / collection_name
        if folder.exists():
            raise StoreError(f"{str(folder)!r} holds no collection.json: restore it, or remove that folder.")
        self._need_room()
        sparse = settings.pop("sparse_vectors_config", None)
        metadata = settings.pop("metadata", None)
        settings = {key: value for key, value in settings.items() if value is not None}
        made = models.CreateCollection(vectors=vectors_config, sparse_vectors=sparse, **settings)
        making = self.path / "making" / uuid.uuid4().hex
        making.mkdir(parents=True)
        with _said(collection_name):
            edge.EdgeShard.create(str(making / "shard"), words.config_of(made)).close()
        described = {"made": made.model_dump(mode="json", exclude_none=True), "metadata": metadata or {}}
        write_json(making / "collection.json", described)
        making.rename(folder)
        return True

    def update_collection(self, collection_name: str, metadata: Any = None, **others: Any) -> bool:
        """Change metadata, key by key, and nothing else."""
        if given := [name for name, value in others.items() if value is not None]:
            raise words.unsupported(given)
        made = self._made(collection_name)
        made["metadata"] |= metadata or {}
        write_json(self._folder(collection_name) / "collection.json", made)
        return True

    def delete_collection(self, collection_name: str, **_: Any) -> bool:
        """Remove a collection, and the aliases that stood for it."""
        if not self.collection_exists(collection_name):
            return False
        folder = self._folder(collection_name)
        if shard := self._shards.pop(folder.name, None):
            shard.close()
        kept = {alias: name for alias, name in self._aliases().items() if name != folder.name}
        write_json(self.path / MARK, {"format": 1, "aliases": kept})
        leaving = self.path / "leaving" / uuid.uuid4().hex
        leaving.parent.mkdir(exist_ok=True)
        folder.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
        return True

    def get_collection(self, collection_name: str, **_: Any) -> models.CollectionInfo:
        """What a collection is made of and holds."""
        described = self._made(collection_name)
        made = models.CreateCollection.model_validate(described["made"])
        with _said(collection_name):
            info = self._shard(collection_name).info()
        params = models.CollectionParams(vectors=made.vectors, sparse_vectors=made.sparse_vectors)
        config = models.CollectionConfig(
            params=params,
            hnsw_config=models.HnswConfig(m=16, ef_construct=100, full_scan_threshold=10_000),
            optimizer_config=models.OptimizersConfig(
                deleted_threshold=0.2,
                vacuum_min_vector_number=1000,
                default_segment_number=0,
                flush_interval_sec=5,
            ),
            quantization_config=made.quantization_config,
            metadata=described["metadata"],
        )
        return models.CollectionInfo(
            status=models.CollectionStatus.GREEN,
            optimizer_status=models.OptimizersStatusOneOf.OK,
            indexed_vectors_count=info.indexed_vectors_count,
            points_count=info.points_count,
            segments_count=info.segments_count,
            config=config,
            payload_schema={},
        )

    def get_aliases(self, **_: Any) -> models.CollectionsAliasesResponse:
        """All aliases."""
        each = [
            models.AliasDescription(alias_name=alias, collection_name=name)
            for alias, name in self._aliases().items()
        ]
        return models.CollectionsAliasesResponse(aliases=each)

    def update_collection_aliases(
        self, change_aliases_operations: Sequence[models.AliasOperations], **_: Any
    ) -> bool:
        """All these changes, in one replacement of the file that holds them."""
        aliases = self._aliases()
        for operation in change_aliases_operations:
            match operation:
                case models.CreateAliasOperation(create_alias=made):
                    aliases[made.alias_name] = self._folder(made.collection_name).name
                case models.DeleteAliasOperation(delete_alias=gone):
                    aliases.pop(gone.alias_name, None)
                case _:
                    raise words.unsupported(operation)
        write_json(self.path / MARK, {"format": 1, "aliases": aliases})
        return True

    def create_payload_index(
        self,
        collection_name: str,
        field_name: str,
        field_schema: Any = None,
        field_type: Any = None,
        **_: Any,
    ) -> models.UpdateResult:
        """Index a payload field."""
        field_schema = field_schema or field_type
        schema = getattr(edge.PayloadSchemaType, models.PayloadSchemaType(field_schema).value.capitalize())
        return self._update(collection_name, edge.UpdateOperation.create_field_index(field_name, schema))

    # Points

    def _update(self, name: str, operation: edge.UpdateOperation) -> models.UpdateResult:
        shard = self._shard(name)
        with _said(name):
            shard.update(operation)
        return DONE

    def upsert(self, collection_name: str, points: Any, **_: Any) -> models.UpdateResult:
        """Write points; they are in the engine's log when this returns."""
        self._need_room()
        with _said(collection_name):
            operation = edge.UpdateOperation.upsert_points([words.point_of(point) for point in points])
        return self._update(collection_name, operation)

    def upload_points(self, collection_name: str, points: Iterable[models.PointStruct], **_: Any) -> None:
        """As `upsert`."""
        if given := list(points):
            self.upsert(collection_name, given)

    def delete(self, collection_name: str, points_selector: Any, **_: Any) -> models.UpdateResult:
        """Delete points by id or by what their payload says."""
        with _said(collection_name):
            match points_selector:
                case models.PointIdsList(points=ids):
                    operation = edge.UpdateOperation.delete_points(list(ids))
                case models.Filter() | models.FilterSelector():
                    wanted: Any = getattr(points_selector, "filter", points_selector)
                    found = words.filter_of(wanted)
                    assert found is not None
                    operation = edge.UpdateOperation.delete_points_by_filter(found)
                case _:
                    operation = edge.UpdateOperation.delete_points(list(points_selector))
        return self._update(collection_name, operation)

    def count(
        self, collection_name: str, count_filter: Any = None, exact: bool = True, **_: Any
    ) -> models.CountResult:
        """Points, counted."""
        shard = self._shard(collection_name)
        with _said(collection_name):
            request = edge.CountRequest(exact=True, filter=words.filter_of(count_filter))
            return models.CountResult(count=shard.count(request))

    def retrieve(
        self,
        collection_name: str,
        ids: Sequence[Any],
        with_payload: Any = True,
        with_vectors: Any = False,
        **_: Any,
    ) -> list[models.Record]:
        """Points by id; those that are not there are left out."""
        shard = self._shard(collection_name)
        with _said(collection_name):
            found = shard.retrieve(list(ids), words.payload_selection(with_payload), with_vectors)
        return [words.record_of(record) for record in found]

    def scroll(
        self,
        collection_name: str,
        scroll_filter: Any = None,
        limit: int = 10,
        order_by: Any = None,
        offset: Any = None,
        with_payload: Any = True,
        with_vectors: Any = False,
        **_: Any,
    ) -> tuple[list[models.Record], int | str | None]:
        """Points in order of id, a page at a time, and where the next page begins."""
        if order_by is not None:
            raise words.unsupported(order_by)
        shard = self._shard(collection_name)
        with _said(collection_name):
            request = edge.ScrollRequest(
                offset=offset,
                limit=limit,
                filter=words.filter_of(scroll_filter),
                with_payload=words.payload_selection(with_payload),
                with_vector=with_vectors,
            )
            records, following = shard.scroll(request)
        after = None if following is None else words.id_of(following)
        return [words.record_of(record) for record in records], after

    def query_batch_points(
        self, collection_name: str, requests: Sequence[models.QueryRequest], **_: Any
    ) -> list[http_models.QueryResponse]:
        """Answers to several queries, in their order."""
        shard = self._shard(collection_name)
        with _said(collection_name):
            batch = edge.QueryBatchRequest([words.request_of(request) for request in requests])
            answers = shard.query_batch(batch)
        return [
            http_models.QueryResponse(points=[words.scored_of(point) for point in each]) for each in answers
        ]

    def query_points(
        self,
        collection_name: str,
        query: Any = None,
        using: str | None = None,
        prefetch: Any = None,
        query_filter: Any = None,
        search_params: Any = None,
        limit: int = 10,
        offset: int | None = None,
        with_payload: Any = True,
        with_vectors: Any = False,
        score_threshold: float | None = None,
        lookup_from: Any = None,
        **_: Any,
    ) -> http_models.QueryResponse:
        """The answer to one query."""
        request = models.QueryRequest(
            query=query,
            using=using,
            prefetch=prefetch,
            filter=query_filter,
            params=search_params,
            limit=limit,
            offset=offset,
            with_payload=with_payload,
            with_vector=with_vectors,
            score_threshold=score_threshold,
            lookup_from=lookup_from,
        )
        return self.query_batch_points(collection_name, [request])[0]

    def optimize(self, name: str) -> None:
        """Build the index of what was written; Edge does so only when it is told to."""
        shard = self._shard(name)
        with _said(name):
            shard.optimize()
            shard.flush()


def _read(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{str(path)!r} is damaged ({error}); restore its folder.") from error
    return read


@contextmanager
def _said(name: str) -> Iterator[None]:
    """Edge's errors, which have no class of their own, as `StoreError`s."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        said = " ".join(str(error).removeprefix("Service runtime error: ").split())
        raise StoreError(f"Qdrant Edge, collection {name!r}: {said[:300]}") from error
