"""Connections: the embedded engine or a server, with errors a person can read."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import portalocker
from grpc import RpcError
from qdrant_client import QdrantClient
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from rag_embfilter.errors import ConfigError, StoreError
from rag_embfilter.store.retrying import RetryingTransport

OLDEST_SERVER = (1, 16)
EDGE_MARK = "edge.json"  # stands in every folder of Qdrant Edge
LOCKED = portalocker.LockFlags.EXCLUSIVE | portalocker.LockFlags.NON_BLOCKING


def open_folder(path: Path, edge: bool | None = None) -> tuple[QdrantClient, portalocker.Lock]:
    """Open a folder with the engine that made it, and the lock to release after it is closed.

    A new folder is Qdrant Edge's when `edge` says so, else the embedded engine's. Raises `StoreError` when
    it is in use, unreadable, or the other engine's than the one asked for; `ConfigError` without the package.
    """
    if path.exists() and not path.is_dir():
        raise StoreError(f"{str(path)!r} is a file; the embedded store needs a folder.")
    engine = _engine(path, edge)
    busy = StoreError(
        f"the embedded store {str(path)!r} is in use by another process, and it takes one at a time. "
        "Wait for that one, choose another --qdrant-path, or use a Qdrant server (--qdrant-url)."
    )
    lock = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Qdrant reads the store before it locks it; a write of another process in between would be lost.
        lock = portalocker.Lock(path / ".embfilter.lock", "a", flags=LOCKED, fail_when_locked=True)
        lock.acquire()
        return engine(path), lock
    except portalocker.exceptions.LockException as error:
        raise busy from error
    except Exception as error:  # whatever damaged files lead to
        if lock is not None:
            lock.release()
        if "already accessed" in str(error):
            raise busy from error
        raise StoreError(
            f"the embedded store {str(path)!r} cannot be opened ({type(error).__name__}: {error}). Restore "
            "its folder, or delete it and ingest again."
        ) from error


def _engine(path: Path, edge: bool | None) -> Callable[[Path], QdrantClient]:
    """What opens a folder."""
    made_by_edge = (path / EDGE_MARK).exists()
    made_embedded = (path / "meta.json").exists()
    if (edge and made_embedded) or (edge is False and made_by_edge):
        made, wanted = ("the embedded Qdrant", "Qdrant Edge") if edge else ("Qdrant Edge", "the embedded one")
        raise StoreError(
            f"{str(path)!r} is a store of {made}, and {wanted} cannot read it. Choose another --qdrant-path."
        )
    if not (edge or made_by_edge):
        # Our own lock lets one thread in at a time, so SQLite's check would only get in the way.
        return lambda path: QdrantClient(path=str(path), force_disable_check_same_thread=True)
    try:
        from rag_embfilter.store.edge import edge_client
    except ImportError as error:
        raise ConfigError(
            f"{str(path)!r} needs Qdrant Edge ({error}). Install it: pip install 'rag-embfilter[edge]'"
        ) from error
    return edge_client


def open_server(url: str, api_key: str | None, timeout: int) -> QdrantClient:
    """Connect to a server and check that it is one we can use. Raises `StoreError`.

    A wrong address fails at once; later requests wait for a server that restarts.
    """
    transport = RetryingTransport()
    with readable(url), _well_formed(url):
        client = QdrantClient(
            url=url, api_key=api_key, timeout=timeout, check_compatibility=False, transport=transport
        )
        version = client.info().version
    transport.patient = True
    numbers = re.match(r"v?(\d+)\.(\d+)", str(version))
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_SERVER:
        raise StoreError(
            f"the server at {url} is Qdrant {version}; collection metadata, where fingerprints live, "
            f"needs {'.'.join(map(str, OLDEST_SERVER))} or later. Upgrade the server."
        )
    return client


@contextmanager
def _well_formed(url: str) -> Iterator[None]:
    """Turns what an odd address or answer leads to into a `StoreError`."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{url!r} is not the address of a Qdrant server ({str(error).splitlines()[0]}); expected one "
            "such as http://localhost:6333."
        ) from error


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Turns the client's connection and server errors into `StoreError`s of one line."""
    try:
        yield
    except ResponseHandlingException as error:
        raise StoreError(
            f"cannot reach Qdrant at {where}: {error}. Is it running (`docker compose up qdrant`), and is "
            "the address right?"
        ) from error
    except UnexpectedResponse as error:
        said = error.content.decode(errors="replace")[:300] if error.content else error.reason_phrase
        raise StoreError(f"Qdrant at {where} answered {error.status_code}: {said}") from error
    except (QdrantException, RpcError) as error:
        raise StoreError(f"Qdrant at {where}: {error or type(error).__name__}. Try again later.") from error
    except ValueError as error:
        if "not found" not in str(error):  # the embedded engine's way to say what a server says with 404
            raise
        raise StoreError(f"{where}: {error}") from error
    except sqlite3.Error as error:
        raise StoreError(
            f"the embedded store {where!r} failed ({error}). Is its disk full or damaged?"
        ) from error
