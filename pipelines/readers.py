"""Readers: files of the kinds people have as LlamaIndex documents; the unreadable listed with its reason."""

from __future__ import annotations

import codecs
import csv
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_index.core.schema import Document

from pipelines.html_text import title_and_text
from rag_embfilter.errors import ConfigError

# Metadata names with a meaning of their own here or in LlamaIndex's Qdrant store; a field of the
# user's with such a name is kept as `field_NAME`.
RESERVED = frozenset(
    "source title chunk record page line doc_id document_id ref_doc_id _node_content _node_type".split()
)
# UTF-32's little-endian mark begins with UTF-16's, so it comes first.
BOMS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
SCALARS = (str, int, float, bool)


@dataclass(frozen=True)
class ReadOptions:
    """How records and text files are read: column names, the encoding, and what sources are named after.

    `root`: sources are named by their path below it; by their absolute path when it is None.
    """

    text_column: str = "text"
    title_column: str = "title"
    id_column: str | None = None
    encoding: str = "utf-8"
    root: Path | None = None


@dataclass
class SourceReader:
    """Iterates over the documents of files and folders.

    Attributes:
        files: what will be read, in order.
        failed: (file or record, reason), filled as the iteration goes.
        skipped: files in folders whose type is not supported.
        incomplete: sources of which something could not be read.
        unlisted: whether a folder could not be listed, so that nobody can tell what is gone.
    """

    files: list[Path]
    options: ReadOptions
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)
    incomplete: set[str] = field(default_factory=set)
    unlisted: bool = False
    on_bytes: Callable[[int], None] | None = None

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files if file.is_file())

    def __iter__(self) -> Iterator[Document]:
        for file in self.files:
            source = self.name(file)
            before, empty = len(self.failed), True
            try:
                for document in READERS[file.suffix.lower()](file, source, self):
                    empty = False
                    yield document
            except _EXPECTED as error:
                self.fail(str(file), _reason(error))
            if empty and len(self.failed) == before:
                self.fail(str(file), "no records in it")
            if len(self.failed) > before:
                self.incomplete.add(source)
            if self.on_bytes is not None:
                self.on_bytes(file.stat().st_size if file.is_file() else 0)

    def fail(self, what: str, reason: str) -> None:
        """Note something that could not be read."""
        self.failed.append((printable(what), reason))

    def name(self, file: Path) -> str:
        """What a file or folder is called as a source."""
        path = file.resolve()
        root = self.options.root
        if root is None:
            return printable(path.as_posix())
        try:
            return printable(path.relative_to(root.resolve()).as_posix())
        except ValueError as error:
            raise ConfigError(f"{str(file)!r} is not below --root {str(root)!r}.") from error


def printable(name: str) -> str:
    """A file's name as valid Unicode: bytes of it that are not UTF-8 are written as escapes."""
    return name.encode(errors="backslashreplace").decode()


def open_sources(sources: Sequence[Path], options: ReadOptions) -> SourceReader:
    """Find the files to read: those named, and those of supported types below the folders named.

    Hidden files and folders are passed over. Raises `ConfigError` for a path that does not exist, a
    named file of another type, a file that is not below `root`, an unknown encoding, or when there is
    nothing to read.
    """
    try:
        "a".encode(options.encoding)  # looking it up would also find `hex` and others that make no text
    except (LookupError, UnicodeError) as error:
        raise ConfigError(f"encoding {options.encoding!r}: unknown; try utf-8, cp949 or latin-1.") from error
    reader = SourceReader([], options)
    for source in sources:
        if source.is_dir():
            for file in _files_below(source, reader):
                supported = file.suffix.lower() in READERS
                (reader.files if supported else reader.skipped).append(file)
        elif source.exists() and not source.is_file():
            raise ConfigError(f"source {str(source)!r} is neither a file nor a folder.")
        elif not source.exists():
            raise ConfigError(f"source {str(source)!r} does not exist.")
        elif source.suffix.lower() not in READERS:
            raise ConfigError(
                f"source {str(source)!r}: files of type {source.suffix or '(none)'} are not read; expected "
                f"{' '.join(READERS)} or a folder."
            )
        else:
            reader.files.append(source)
    reader.files = list({file.resolve(): file for file in reader.files}.values())
    reader.skipped = list({file.resolve(): file for file in reader.skipped}.values())
    for file in reader.files:
        reader.name(file)  # one that is not below `root` ends the run before anything is encoded
    if not reader.files:
        raise ConfigError(
            f"nothing to read in {', '.join(map(str, sources))}: expected files of type {' '.join(READERS)}."
        )
    return reader


def _files_below(folder: Path, reader: SourceReader) -> list[Path]:
    """A folder's files in order, without hidden ones; a folder that cannot be listed is noted as failed."""
    found: list[Path] = []
    # Not `rglob`: it passes over folders that it may not enter without a word, and walks hidden ones.

    def note(error: OSError) -> None:
        reader.fail(str(error.filename), str(error.strerror))
        reader.unlisted = True

    walk = os.walk(folder, onerror=note)
    for place, folders, names in walk:
        folders[:] = [name for name in folders if not name.startswith(".")]
        # A linked folder may lead anywhere, in circles too; it is passed over and counted.
        reader.skipped += [Path(place, name) for name in folders if Path(place, name).is_symlink()]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    for file in found:
        if file.is_symlink() and not file.exists():
            reader.fail(str(file), "a link that leads nowhere")
    return sorted(file for file in found if file.is_file())


class _UnreadableError(Exception):
    """A file whose content is not what its type promises."""


_EXPECTED = (OSError, ValueError, KeyError, csv.Error, _UnreadableError, RecursionError)


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]  # not its place: a stream counts that from its last block
        return f"not {error.encoding} text (byte 0x{byte:02x}); name its encoding with --encoding"
    return f"{error}".strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _text_encoding(file: Path, encoding: str) -> str:
    with file.open("rb") as stream:
        head = stream.read(4096)
    for bom, name in BOMS.items():
        if head.startswith(bom):
            return name
    if b"\0" in head and not encoding.lower().startswith(("utf-16", "utf-32")):
        raise _UnreadableError("binary data, not text")
    return encoding


def _document(source: str, text: str, title: str = "", part: str = "", /, **metadata: Any) -> Document:
    doc_id = f"{source}#{part}" if part else source
    return Document(id_=doc_id, text=text, metadata={"source": source, "title": title, **metadata})


def _read_text(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    encoding = _text_encoding(file, reader.options.encoding)
    yield _document(source, file.read_text(encoding=encoding))


def _read_html(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    try:
        title, text = title_and_text(_html_text(file, reader.options.encoding))
    except AssertionError as error:  # the standard library's way to say that it gives up
        raise _UnreadableError(f"not readable HTML ({error})") from error
    yield _document(source, text, title)


def _html_text(file: Path, encoding: str) -> str:
    """A page's text by its byte order mark, else by what it says itself, else by the encoding given.

    BeautifulSoup would guess where the page says nothing, and guesses Korean as Chinese.
    """
    from bs4.dammit import EncodingDetector

    encoding = _text_encoding(file, encoding)
    content = file.read_bytes()
    said = EncodingDetector.find_declared_encoding(content, is_html=True)
    # A page without NUL bytes that says UTF-16 is wrong about itself.
    if said and not content.startswith(tuple(BOMS)) and not said.startswith("utf-16"):
        with suppress(LookupError, ValueError):
            # Browsers take EUC-KR for its superset, and pages rely on that.
            return content.decode("cp949" if codecs.lookup(said).name == "euc_kr" else said)
    return content.decode(encoding)


def _read_pdf(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    from llama_index.readers.file import PDFReader
    from tenacity import RetryError

    try:
        pages = PDFReader().load_data(file)
    except RetryError as error:
        raise _UnreadableError(f"not a readable PDF ({error.last_attempt.exception()})") from error
    if not any(page.text.strip() for page in pages):
        raise _UnreadableError("no text in this PDF (scanned pages need OCR first)")
    for number, page in enumerate(pages, 1):
        if page.text.strip():
            label = page.metadata["page_label"]
            yield _document(source, page.text, "", f"page={number}", page=label)


def _read_docx(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    from xml.etree.ElementTree import ParseError
    from zipfile import BadZipFile

    from llama_index.readers.file import DocxReader

    try:
        (document,) = DocxReader().load_data(file)
    except (BadZipFile, KeyError, ParseError, EOFError, RuntimeError, zlib.error) as error:
        raise _UnreadableError(f"not a readable .docx ({error})") from error
    yield _document(source, document.text)


def _read_jsonl(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    encoding = _text_encoding(file, reader.options.encoding)
    with file.open(encoding=encoding) as lines:
        records = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        yield from _records(_parsed(records, file, reader), file, source, reader)


def _parsed(
    lines: Iterator[tuple[int, str]], file: Path, reader: SourceReader
) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in lines:
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            # Half a pair in an escape is JSON, but no tokenizer and no store takes it.
            reader.fail(f"{file} line {number}", "not valid Unicode (a lone surrogate in an escape)")
            continue
        except (ValueError, RecursionError) as error:
            reader.fail(f"{file} line {number}", f"not JSON ({error})")
            continue
        if isinstance(record, dict):
            yield number, record
        else:
            reader.fail(f"{file} line {number}", f"expected an object, got {type(record).__name__}")


def _read_csv(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    encoding = _text_encoding(file, reader.options.encoding)
    with file.open(encoding="utf-8-sig" if encoding == "utf-8" else encoding, newline="") as lines:
        rows = csv.DictReader(lines)
        names = list(rows.fieldnames or [])
        if reader.options.text_column not in names:
            raise _UnreadableError(
                f"no column {reader.options.text_column!r} among {', '.join(names) or 'none'}; "
                "name it with --text-column"
            )
        numbered = ((rows.line_num, {k: v for k, v in row.items() if k is not None}) for row in rows)
        yield from _records(numbered, file, source, reader)


def _records(
    records: Iterator[tuple[int, dict[str, Any]]], file: Path, source: str, reader: SourceReader
) -> Iterator[Document]:
    """Documents of records with a text field; other plain fields become metadata."""
    options = reader.options
    seen: set[str] = set()
    for number, record in records:
        where = f"{file} line {number}"
        text = record.get(options.text_column)
        if not isinstance(text, str):
            reader.fail(where, f"no text in {options.text_column!r}; name the field with --text-column")
            continue
        names = [options.id_column] if options.id_column else ["_id", "id"]
        key = next((str(record[n]) for n in names if record.get(n) not in (None, "")), f"line {number}")
        if key in seen:
            reader.fail(where, f"the id {key!r} is used twice in this file")
            continue
        seen.add(key)
        used = {options.text_column, options.title_column, *names}
        extra = record.get("metadata")
        fields = {**record, **(extra if isinstance(extra, dict) else {})}
        kept = {
            f"field_{k}" if k in RESERVED else str(k): _bounded(v)
            for k, v in fields.items()
            if k not in used and _plain(v)
        }
        title = record.get(options.title_column)
        yield _document(source, text, title if isinstance(title, str) else "", key, record=key, **kept)


def _plain(value: object) -> bool:
    """Whether metadata can hold a value; JSON, in which it is stored and shown, has no NaN and no Inf."""
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, SCALARS)


def _bounded(value: Any) -> Any:
    """A whole number that 64 bits do not hold as text; not every way into a store takes it."""
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


READERS: dict[str, Callable[[Path, str, SourceReader], Iterator[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".html": _read_html,
    ".htm": _read_html,
    ".pdf": _read_pdf,
    ".docx": _read_docx,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
}
