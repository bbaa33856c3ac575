"""Texts of a file, one after the other: for counting tokens and for samples, at any size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rag_embfilter.errors import ConfigError


def texts_of(path: Path) -> Iterator[str]:
    """Texts of an eval set's folder or `.jsonl` file (title, space, text), or of a plain file's lines.

    Read once and never held whole. Raises `ConfigError` for a path that is not there, or a line of a
    `.jsonl` file that is not a passage.
    """
    file = path / "corpus.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{str(file)!r} is not there; expected a text file, a .jsonl or an eval set's folder."
        )
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if text := (_passage(line, file, number) if file.suffix.lower() == ".jsonl" else line).strip():
                yield text


def _passage(line: str, file: Path, number: int) -> str:
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
        title, text = record.get("title") or "", record["text"]
        if not isinstance(title, str) or not isinstance(text, str):
            raise TypeError("title and text must be texts")
        return f"{title} {text}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{str(file)!r} line {number} is not a passage: expected an object with a text ({error})."
        ) from error
