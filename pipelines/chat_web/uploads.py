"""Documents that readers add: checked, kept in one folder, ingested as `ingest` does."""

from __future__ import annotations

import re
import shutil
import threading
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from pipelines.chat_web import render
from pipelines.readers import READERS, ReadOptions, open_sources
from rag_embfilter.errors import ConfigError, EmbFilterError

if TYPE_CHECKING:
    from rag_embfilter.chat import Chat
    from rag_embfilter.ingestion import IngestReport

MOST_FILES = 20
LONGEST_NAME = 100
SWELLING = 20  # how many times its size a packed document may unpack to
BARRED = re.compile(r"[^\w.\- ()]+")


@dataclass(frozen=True)
class Added:
    """A file and what became of it: `done`, or `trouble`."""

    name: str
    done: str = ""
    trouble: str = ""


class Uploads:
    """Takes files into a folder and into every collection of the chat's base.

    Args:
        chat: whose collection grows.
        folder: where files are kept; nothing is written elsewhere.
        max_upload: largest file, in MB.
        arrived: where files that readers give arrive; no other file of this machine is taken.

    Raises `ConfigError` for a collection that was not made by `ingest`, or a folder that cannot be made.
    """

    def __init__(self, chat: Chat, folder: Path, max_upload: int, arrived: Path) -> None:
        self.arrived = arrived.resolve()
        self.chat, self.max_upload, self.types = chat, max_upload, tuple(READERS)
        base = chat.info.made.get("base")
        if not base or chat.embedding is None:
            raise ConfigError(
                f"collection {chat.info.name!r} cannot take documents: it was not made by `ingest`, or is "
                "asked by bm25 alone. Leave --upload-folder out."
            )
        self.base = str(base)
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._one = threading.Lock()

    def add(self, given: list[str] | None) -> Iterator[tuple[Any, str]]:
        """Take files one by one, showing where it stands; a bad one is named and the rest goes on."""
        done: list[Added] = []
        files = list(given or [])
        for i, path in enumerate(files[:MOST_FILES]):
            name = safe_name(Path(path).name)
            yield None, render.added(done, f"Reading {name} ({i + 1} of {len(files)})", i / len(files))
            for what in self._take(Path(path), name):
                if isinstance(what, Added):
                    done.append(what)
                else:
                    share = (i + what) / len(files)
                    yield None, render.added(done, f"Adding {name} ({i + 1} of {len(files)})", share)
        if len(files) > MOST_FILES:
            done.append(Added(f"{len(files) - MOST_FILES} more", trouble=f"{MOST_FILES} files at a time."))
        yield None, render.added(done)

    def _take(self, path: Path, name: str) -> Iterator[float | Added]:
        try:
            with self._one:
                before = self._before(name)
                kept = self._keep(path, name)
                for step in self._ingest(kept):
                    if isinstance(step, Added) and step.trouble:
                        _restore(kept, before)
                    yield step
        except (EmbFilterError, OSError) as error:
            yield Added(name, trouble=str(error))
        except Exception as error:  # a file may be anything; its name and the kind of fault are told
            yield Added(name, trouble=f"cannot be read ({type(error).__name__})")

    def _before(self, name: str) -> bytes | None:
        """What the folder holds under this name."""
        kept = self.folder / name
        return kept.read_bytes() if kept.is_file() and not kept.is_symlink() else None

    def _keep(self, path: Path, name: str) -> Path:
        """Check a file and copy it into the folder under its own name. Raises `ConfigError`."""
        if not path.resolve().is_relative_to(self.arrived):
            raise ConfigError("it was not given to this page.")
        suffix = Path(name).suffix.lower()
        if suffix not in self.types:
            raise ConfigError(
                f"files of type {suffix or '(none)'} are not read; expected {' '.join(self.types)}."
            )
        size = path.stat().st_size
        if size > self.max_upload << 20:
            raise ConfigError(f"it has {size / 2**20:.1f} MB; {self.max_upload} MB is the most.")
        if size == 0:
            raise ConfigError("the file is empty.")
        _require_no_bomb(path, suffix, size)
        kept = self.folder / name
        if kept.is_symlink() or not kept.resolve().is_relative_to(self.folder) or kept.is_dir():
            raise ConfigError("its name leads out of the folder of documents.")
        shutil.copyfile(path, kept)
        return kept

    def _ingest(self, kept: Path) -> Iterator[float | Added]:
        """Sync one file into all collections of the base, in a thread that reports its share."""
        shares: list[float] = [0.05]
        result: list[Added] = []
        change = threading.Event()

        def work() -> None:
            result.append(self._synced(kept, shares, change))
            change.set()

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        while worker.is_alive():
            change.wait(0.5)
            change.clear()
            yield shares[-1]
        worker.join()
        yield result[0]

    def _synced(self, kept: Path, shares: list[float], change: threading.Event) -> Added:
        from rag_embfilter.fitting import siblings
        from rag_embfilter.ingestion import ingest

        assert self.chat.embedding is not None
        encoder, store = self.chat.embedding.encoder, self.chat.store
        done = 0

        def count(n: int) -> None:
            nonlocal done
            done += n
            shares.append(1 - 1 / (1 + done / 10))  # how many chunks there will be is not known before
            change.set()

        try:
            reader = open_sources([kept], ReadOptions())
            filters, _ = siblings(encoder, store, self.base, ())
            report = ingest(
                reader, encoder, filters, store, self.base, incomplete=reader.incomplete, progress=count
            )
            self.chat.retriever.forget()
            return Added(kept.name, *_told(report, [*reader.failed, *report.failed]))
        except (EmbFilterError, OSError) as error:
            return Added(kept.name, trouble=str(error))
        except Exception as error:  # a file may be anything
            return Added(kept.name, trouble=f"cannot be read ({type(error).__name__})")


def _restore(kept: Path, before: bytes | None) -> None:
    """Put a file's former version back in place of one that could not be taken; its passages stay, too."""
    if before is None:
        kept.unlink(missing_ok=True)
    else:
        kept.write_bytes(before)


def _told(report: IngestReport, failed: list[tuple[str, str]]) -> tuple[str, str]:
    """What a reader is told of a run, as (done, trouble)."""
    if failed:
        return "", f"{failed[0][1]}" + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "")
    if not report.nodes:
        return "", "there is no text in it"
    new = report.nodes - report.nodes_unchanged
    return (f"{new} passage{'s' * (new != 1)} added; ask about it" if new else "nothing new in it"), ""


def safe_name(name: str) -> str:
    """A file's name without folders, control characters and anything that a file system could take amiss."""
    name = unicodedata.normalize("NFC", name.replace("\\", "/").rpartition("/")[2])
    name = BARRED.sub("_", "".join(c for c in name if c.isprintable())).strip(" .")
    stem, dot, suffix = name.rpartition(".")
    if not dot:
        stem, suffix = name, ""
    while len(f"{stem}.{suffix}".encode()) > LONGEST_NAME and stem:
        stem = stem[:-1]
    return f"{stem.strip() or 'document'}{dot}{suffix[:10]}"


def _require_no_bomb(path: Path, suffix: str, size: int) -> None:
    """Refuse a packed document that unpacks to far more than it is."""
    if suffix != ".docx":
        return
    try:
        with ZipFile(path) as packed:
            unpacked = sum(item.file_size for item in packed.infolist())
    except (BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"not a readable .docx ({error}).") from error
    if unpacked > max(SWELLING * size, 32 << 20):
        raise ConfigError(f"it unpacks to {unpacked / 2**20:.0f} MB, which is too much.")
