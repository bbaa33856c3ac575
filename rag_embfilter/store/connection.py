"""Connections: the embedded engine or a server, with errors a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qdrant_client import QdrantClient
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from rag_embfilter.errors import StoreError

OLDEST_SERVER = (1, 16)


def open_embedded(path: Path) -> QdrantClient:
    """Open the embedded engine on a folder. Raises `StoreError` when it is in use or unreadable."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{str(path)!r} is a file; the embedded store needs a folder.")
    try:
        # Our own lock lets one thread in at a time, so SQLite's check would only get in the way.
        return QdrantClient(path=str(path), force_disable_check_same_thread=True)
    except RuntimeError as error:
        if "already accessed" not in str(error):
            raise
        raise StoreError(
            f"the embedded store {str(path)!r} is in use by another process, and it takes one at a time. "
            "Wait for that one, choose another --qdrant-path, or use a Qdrant server (--qdrant-url)."
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"the embedded store {str(path)!r} cannot be opened: {error}") from error


def open_server(url: str, api_key: str | None, timeout: int) -> QdrantClient:
    """Connect to a server and check that it is one we can use. Raises `StoreError`."""
    with readable(url):
        client = QdrantClient(url=url, api_key=api_key, timeout=timeout, check_compatibility=False)
        version = client.info().version
    if tuple(int(part) for part in version.split("-")[0].split(".")[:2]) < OLDEST_SERVER:
        raise StoreError(
            f"the server at {url} is Qdrant {version}; collection metadata, where fingerprints live, "
            f"needs {'.'.join(map(str, OLDEST_SERVER))} or later. Upgrade the server."
        )
    return client


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
