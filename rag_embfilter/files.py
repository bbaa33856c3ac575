"""Files: the cache folder, digests of files, and writes that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder(name: str) -> Path:
    """A folder under `EMBFILTER_CACHE`, or under the user's cache; made if absent."""
    root = os.environ.get("EMBFILTER_CACHE")
    folder = (Path(root) if root else user_cache_path("rag_embfilter")) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, remembered by its path, size, times and inode."""
    stat = path.stat()
    # The change time and inode tell of a file replaced by one of the same size and modification time.
    key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\0{stat.st_ino}"
    name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    with suppress(OSError):
        known = (cache_folder("digests") / name).read_bytes()
        if re.fullmatch(rb"[0-9a-f]{64}", known):
            return known.decode()
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        write_text(cache_folder("digests") / name, digest)
    return digest


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step: readers see the old one or the new one, never a part.

    A link is followed, and what is no regular file (a pipe, a device) is written to as it is.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file in one step."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write JSON, indented, in one step; non-finite numbers are refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and is removed otherwise.

    When another process made `folder` meanwhile, theirs stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name[:40]}-"))
    try:
        yield temporary
        temporary.chmod(0o755)
        if not folder.exists():
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
