"""What a store stands on: a client, the embedded store's lock, and names."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from portalocker import Lock
from qdrant_client import QdrantClient
from qdrant_client.local.qdrant_local import QdrantLocal
from qdrant_client.qdrant_remote import QdrantRemote

from rag_embfilter.errors import ConfigError, StoreError
from rag_embfilter.store.connection import GRPC_PORT, open_folder, open_server, readable
from rag_embfilter.store.layout import Layout


def _close_at_exit(store: weakref.ref[Connected]) -> None:
    if (left := store()) is not None:
        left.close()


class Connected:
    """An open client, for one call at a time where it is in this process; see `Store` for the arguments."""

    def __init__(
        self,
        path: str | Path | None = None,
        url: str | None = None,
        api_key: str | None = None,
        client: QdrantClient | None = None,
        timeout: int = 60,
        filter_dir: str | Path | None = None,
        layout: Layout | None = None,
        edge: bool | None = None,
        grpc: bool = False,
        grpc_port: int = GRPC_PORT,
    ) -> None:
        if sum(given is not None for given in (path, url, client)) != 1:
            raise ConfigError("give exactly one of path (embedded), url (server) and client.")
        if grpc and url is None:
            raise ConfigError("gRPC is a server's; give its url (--qdrant-url), or leave grpc out.")
        self.where = str(path or url or "the given client")
        beside = Path(path).resolve().parent if path is not None else Path(".embfilter").resolve()
        self.filter_dir = beside / "filters" if filter_dir is None else Path(filter_dir).resolve()
        self.layout = layout or Layout()
        self._lock = threading.RLock()
        self._owned = client is None
        self._closed = False
        self._folder_lock: Lock | None = None
        if client is not None:
            self.client = client
        elif path is not None:
            self.client, self._folder_lock = open_folder(Path(path), edge)
        else:
            self.client = open_server(str(url), api_key, timeout, grpc, grpc_port)
        # An engine in this process that is left open would be torn down when half of Python is gone.
        atexit.register(_close_at_exit, weakref.ref(self))
        self.embedded = isinstance(self.client._client, QdrantLocal)
        self.in_process = not isinstance(self.client._client, QdrantRemote)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder or the connection, unless the client was given. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._owned:
                    self.client.close()
            finally:
                if self._folder_lock is not None:
                    self._folder_lock.release()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keeps other threads out of an engine in this process, for calls that go to the client directly."""
        if not self.in_process:
            self._require_open()
            yield
        else:
            with self._lock:
                self._require_open()
                yield

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.where!r} is closed; open it again.")

    @contextmanager
    def _calling(self) -> Iterator[QdrantClient]:
        """The client, for one call at a time where it is in this process, with its errors made readable."""
        with readable(self.where), self.exclusively():
            yield self.client

    def names(self) -> list[str]:
        """Names of all collections, sorted."""
        with self._calling() as client:
            return sorted(c.name for c in client.get_collections().collections)

    def aliases(self) -> dict[str, str]:
        """Aliases, and the collections they stand for."""
        with self._calling() as client:
            return {each.alias_name: each.collection_name for each in client.get_aliases().aliases}

    def exists(self, name: str) -> bool:
        """Whether there is a collection or an alias of this name."""
        with self._calling() as client:
            if client.collection_exists(name):
                return True
        return name in self.aliases()
