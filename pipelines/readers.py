"""Readers: files of the kinds people have as LlamaIndex documents; the unreadable listed with its reason."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_index.core.schema import Document

from rag_embfilter.errors import ConfigError

# Metadata names with a meaning of their own here or in LlamaIndex's Qdrant store; a field of the
# user's with such a name is kept as `field_NAME`.
RESERVED = frozenset(
    "source title chunk record page line doc_id document_id ref_doc_id _node_content _node_type".split()
)
BOMS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}
BLOCKS = "address article br dd div dt h1 h2 h3 h4 h5 h6 hr li p pre section table td th tr".split()
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
    """

    files: list[Path]
    options: ReadOptions
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)
    incomplete: set[str] = field(default_factory=set)
    on_bytes: Callable[[int], None] | None = None

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files if file.is_file())

    def __iter__(self) -> Iterator[Document]:
        for file in self.files:
            source = self._name(file)
            before = len(self.failed)
            try:
                yield from READERS[file.suffix.lower()](file, source, self)
            except _EXPECTED as error:
                self.fail(str(file), _reason(error, self.options.encoding))
            if len(self.failed) > before:
                self.incomplete.add(source)
            if self.on_bytes is not None:
                self.on_bytes(file.stat().st_size if file.is_file() else 0)

    def fail(self, what: str, reason: str) -> None:
        """Note something that could not be read."""
        self.failed.append((what, reason))

    def _name(self, file: Path) -> str:
        path = file.resolve()
        root = self.options.root
        if root is None:
            return path.as_posix()
        try:
            return path.relative_to(root.resolve()).as_posix()
        except ValueError as error:
            raise ConfigError(f"{str(file)!r} is not below --root {str(root)!r}.") from error


def open_sources(sources: Sequence[Path], options: ReadOptions) -> SourceReader:
    """Find the files to read: those named, and those of supported types below the folders named.

    Hidden files and folders are passed over. Raises `ConfigError` for a path that does not exist, a
    named file of another type, an unknown encoding, or when there is nothing to read.
    """
    try:
        codecs.lookup(options.encoding)
    except LookupError as error:
        raise ConfigError(f"encoding {options.encoding!r}: unknown; try utf-8, cp949 or latin-1.") from error
    reader = SourceReader([], options)
    for source in sources:
        if source.is_dir():
            for file in sorted(source.rglob("*")):
                if file.is_file() and not any(p.startswith(".") for p in file.relative_to(source).parts):
                    supported = file.suffix.lower() in READERS
                    (reader.files if supported else reader.skipped).append(file)
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
    if not reader.files:
        raise ConfigError(
            f"nothing to read in {', '.join(map(str, sources))}: expected files of type {' '.join(READERS)}."
        )
    return reader


class _UnreadableError(Exception):
    """A file whose content is not what its type promises."""


_EXPECTED = (OSError, ValueError, KeyError, csv.Error, _UnreadableError, RecursionError)


def _reason(error: BaseException, encoding: str) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not {encoding} text (byte {error.start}); name its encoding with --encoding"
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


def _document(source: str, text: str, title: str = "", part: str = "", **metadata: Any) -> Document:
    doc_id = f"{source}#{part}" if part else source
    return Document(id_=doc_id, text=text, metadata={"source": source, "title": title, **metadata})


def _read_text(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    encoding = _text_encoding(file, reader.options.encoding)
    yield _document(source, file.read_text(encoding=encoding))


def _read_html(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    from bs4 import BeautifulSoup

    # LlamaIndex's HTMLTagReader returns the code of <script> tags as text; BeautifulSoup leaves it out.
    soup = BeautifulSoup(file.read_bytes(), "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    if soup.title:
        soup.title.decompose()
    for tag in soup.find_all(BLOCKS):
        tag.insert_after("\n")
    lines = (" ".join(line.split()) for line in soup.get_text().splitlines())
    yield _document(source, "\n".join(line for line in lines if line), title)


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
            yield _document(source, page.text, part=f"page={number}", page=page.metadata["page_label"])


def _read_docx(file: Path, source: str, reader: SourceReader) -> Iterator[Document]:
    from zipfile import BadZipFile

    from llama_index.readers.file import DocxReader

    try:
        (document,) = DocxReader().load_data(file)
    except (BadZipFile, KeyError) as error:
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
            f"field_{k}" if k in RESERVED else str(k): v
            for k, v in fields.items()
            if k not in used and isinstance(v, SCALARS)
        }
        title = record.get(options.title_column)
        yield _document(source, text, title if isinstance(title, str) else "", key, record=key, **kept)


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
