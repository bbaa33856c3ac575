"""Connections: the embedded engine or a server, with errors a person can read."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import portalocker
from grpc import RpcError, StatusCode
from qdrant_client import QdrantClient
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from rag_embfilter.errors import ConfigError, EmbFilterError, StoreError
from rag_embfilter.store.retrying import RetryingTransport, grpc_options

logger = logging.getLogger(__name__)

OLDEST_SERVER = (1, 16)
EDGE_MARK = "edge.json"  # stands in every folder of Qdrant Edge
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GRPC_PORT = 6334
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
        _drop_unwritten(path)
        return engine(path), lock
    except portalocker.exceptions.LockException as error:
        raise busy from error
    except Exception as error:  # whatever damaged files lead to
        if lock is not None:
            lock.release()
        if "already accessed" in str(error):
            raise busy from error
        if _no_room(error):
            raise _full(str(path), error) from error
        if isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS:
            raise StoreError(f"the store {str(path)!r} cannot be written to ({error}).") from error
        if isinstance(error, EmbFilterError):
            raise
        raise StoreError(
            f"the embedded store {str(path)!r} cannot be opened ({type(error).__name__}: {error}). Restore "
            "its folder, or delete it and ingest again."
        ) from error


def _engine(path: Path, edge: bool | None) -> Callable[[Path], QdrantClient]:
    """What opens a folder."""
    made_embedded = (path / "meta.json").exists() and any(path.glob("collection/*"))
    made_by_edge = (path / EDGE_MARK).exists() or (not made_embedded and (path / "collections").is_dir())
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


def _drop_unwritten(path: Path) -> None:
    """Forget an empty list of collections: Qdrant was stopped in the midst of making the folder."""
    listed = path / "meta.json"
    if listed.is_file() and not listed.stat().st_size and not (path / "collection").exists():
        listed.unlink()


def _no_room(error: BaseException) -> bool:
    """Whether a write failed for want of room."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in NO_ROOM


def _full(where: str, error: BaseException) -> StoreError:
    return StoreError(
        f"the disk of the embedded store {where!r} is full ({error}). Make room; what was written stays, "
        "and the same command goes on from there."
    )


def open_server(
    url: str, api_key: str | None, timeout: int, grpc: bool = False, grpc_port: int = GRPC_PORT
) -> QdrantClient:
    """Connect to a server, by REST or gRPC, and check that it is one we can use. Raises `StoreError`.

    A wrong address fails at once; later requests wait for a server that restarts.
    """
    transport = _transport()
    with readable(url), _well_formed(url), warnings.catch_warnings():
        # Ours says which address, and is silent about this machine.
        warnings.filterwarnings("ignore", "Api key is used with an insecure connection")
        if api_key and not _private(url):
            logger.warning("the API key goes to %s unencrypted; use https", url)
        client = QdrantClient(
            url=url,
            api_key=api_key or None,
            timeout=timeout,
            check_compatibility=False,
            transport=transport,
            prefer_grpc=grpc,
            grpc_port=grpc_port,
            grpc_options=(grpc_options() | _roots(url)) if grpc else None,
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


def _private(url: str) -> bool:
    """Whether what is sent to this address is encrypted or stays on this machine.

    An address without a scheme is https to the client once there is a key.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "http" or host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _roots(url: str) -> dict[str, bytes]:
    """The authorities that SSL_CERT_FILE names, which REST heeds by itself and gRPC does not."""
    file = os.environ.get("SSL_CERT_FILE")
    return {"root_certificates": Path(file).read_bytes()} if file and not url.startswith("http:") else {}


def _transport() -> RetryingTransport:
    """What REST goes through; making it reads the authorities for https."""
    try:
        return RetryingTransport()
    except OSError as error:
        file = os.environ.get("SSL_CERT_FILE")
        raise StoreError(f"the certificates of SSL_CERT_FILE {file!r} cannot be read ({error}).") from error


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
            f"cannot reach Qdrant at {where}: {_line(error)}. Is it running (`docker compose up qdrant`), "
            "and is the address right?"
        ) from error
    except UnexpectedResponse as error:
        said = _line(error.content.decode(errors="replace") if error.content else error.reason_phrase)
        raise StoreError(f"Qdrant at {where} answered {error.status_code}: {said}") from error
    except RpcError as error:
        raise _by_grpc(where, error) from error
    except QdrantException as error:
        raise StoreError(f"Qdrant at {where}: {error or type(error).__name__}. Try again later.") from error
    except ValueError as error:
        if "not found" not in str(error):  # the embedded engine's way to say what a server says with 404
            raise
        raise StoreError(f"{where}: {error}") from error
    except (OSError, sqlite3.Error) as error:
        if _no_room(error):
            raise _full(where, error) from error
        if isinstance(error, OSError):
            raise
        raise StoreError(
            f"the embedded store {where!r} failed ({error}). Is its disk full or damaged?"
        ) from error


def _line(said: object) -> str:
    """What somebody else's error says, in one line without a full stop."""
    return " ".join(str(said).split())[:300].rstrip(".")


def _by_grpc(where: str, error: RpcError) -> StoreError:
    """What a failed gRPC call says, without the call's own report of many lines."""
    code = error.code() if hasattr(error, "code") else None
    said = _line(error.details() if hasattr(error, "details") else error)
    if code in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
        return StoreError(
            f"cannot reach Qdrant at {where} by gRPC: {said}. Is it running (`docker compose up qdrant`), is "
            "its gRPC port open, and is the address right?"
        )
    return StoreError(f"Qdrant at {where} answered {getattr(code, 'name', 'with an error')}: {said}")
