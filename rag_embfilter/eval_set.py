"""Evaluation sets: passages, questions and graded judgements in the BEIR layout, validated as a whole."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rag_embfilter.errors import EvalSetError
from rag_embfilter.metrics import MAX_GRADE
from rag_embfilter.nodes import passage_text

SHOWN = 5
GRADE = re.compile("[0-9]{1,9}")
SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of such bytes


@dataclass(frozen=True)
class Passage:
    """A passage of the corpus: title (may be empty) and text."""

    title: str
    text: str


@dataclass(frozen=True)
class EvalSet:
    """A domain's questions with their relevant passages.

    Attributes:
        name: the folder's name.
        corpus: passage id -> passage.
        queries: query id -> question.
        qrels: query id -> passage id -> grade (0 is judged and not relevant).
        answers: query id -> reference answers, where there are any.
    """

    name: str
    corpus: Mapping[str, Passage]
    queries: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]
    answers: Mapping[str, list[str]] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 over passages, questions and judgements."""
        passages = {key: [passage.title, passage.text] for key, passage in self.corpus.items()}
        judged = {query: dict(grades) for query, grades in self.qrels.items()}
        content = json.dumps([passages, dict(self.queries), judged], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @classmethod
    def load(cls, folder: str | Path) -> EvalSet:
        """Read `corpus.jsonl`, `queries.jsonl` and `qrels/test.tsv` from a folder.

        Raises one `EvalSetError` that names all faults: missing files, broken lines, duplicate or
        unknown ids, empty texts, grades that are not whole numbers from 0 to 20, and queries without a
        relevant passage.
        """
        root = Path(folder)
        files = [root / "corpus.jsonl", root / "queries.jsonl", root / "qrels" / "test.tsv"]
        missing = [str(file.relative_to(root)) for file in files if not file.is_file()]
        if missing:
            raise EvalSetError(
                f"{str(root)!r} is not an evaluation set: {', '.join(missing)} missing. Expected a folder "
                "in BEIR layout: corpus.jsonl, queries.jsonl, qrels/test.tsv."
            )
        faults = _Faults()
        corpus = _corpus(files[0], faults)
        queries, answers = _queries(files[1], faults)
        qrels = _qrels(files[2], corpus, queries, faults)
        for query in queries:
            if not any(grade > 0 for grade in qrels.get(query, {}).values()):
                faults.add("queries without a relevant passage", query)
        for file, records in zip(files, (corpus, queries), strict=False):
            if not records:
                faults.add("empty files", file.name)
        faults.raise_if_any(root)
        return cls(root.resolve().name, corpus, queries, qrels, answers)

    def passages(self) -> dict[str, str]:
        """Passage id -> the text that is embedded: title, one space, text, stripped."""
        return {key: passage_text(passage.title, passage.text) for key, passage in self.corpus.items()}


def load_corpus(file: Path) -> dict[str, Passage]:
    """Passages of a `corpus.jsonl` alone. Raises `EvalSetError` with all its faults."""
    faults = _Faults()
    corpus = _corpus(file, faults)
    faults.raise_if_any(file)
    return corpus


class _Faults:
    """All faults of a set, by kind."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def add(self, kind: str, what: str) -> None:
        self.found.setdefault(kind, []).append(what)

    def raise_if_any(self, root: Path) -> None:
        if not self.found:
            return
        lines = []
        for kind, cases in self.found.items():
            more = f" and {len(cases) - SHOWN} more" if len(cases) > SHOWN else ""
            lines.append(f"  {kind} ({len(cases)}): {', '.join(cases[:SHOWN])}{more}")
        raise EvalSetError(
            f"evaluation set {str(root)!r} has faults:\n"
            + "\n".join(lines)
            + "\nMend its files and try again."
        )


def _records(path: Path, faults: _Faults) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, record) of each line of a JSONL file that has an id of its own."""
    seen: set[str] = set()
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path.name} line {number}"
            if NOT_UTF8.search(line):
                faults.add("lines that are not UTF-8", where)
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                faults.add("lines that are not JSON", where)
                continue
            if SURROGATE.search(line) and not _encodable(record):
                faults.add("lines that are not valid Unicode", where)
                continue
            key = record.get("_id") if isinstance(record, dict) else None
            if not isinstance(key, str | int) or isinstance(key, bool) or not str(key):
                faults.add("records without an _id", where)
            elif str(key) in seen:
                faults.add("duplicate ids", f"{key} ({where})")
            else:
                seen.add(str(key))
                yield str(key), record


def _encodable(record: object) -> bool:
    """Whether a record's texts are whole characters, not halves of surrogate pairs."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(record: dict[str, Any], key: str, where: str, faults: _Faults) -> str:
    value = record.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    faults.add("values that are not text", f"{key} of {where}")
    return "?"


def _corpus(path: Path, faults: _Faults) -> dict[str, Passage]:
    corpus = {}
    for key, record in _records(path, faults):
        passage = Passage(_text(record, "title", key, faults), _text(record, "text", key, faults))
        if not passage_text(passage.title, passage.text):
            faults.add("empty texts", f"{key} ({path.name})")
        corpus[key] = passage
    return corpus


def _queries(path: Path, faults: _Faults) -> tuple[dict[str, str], dict[str, list[str]]]:
    queries, answers = {}, {}
    for key, record in _records(path, faults):
        queries[key] = _text(record, "text", key, faults)
        if not queries[key].strip():
            faults.add("empty texts", f"{key} ({path.name})")
        metadata = record.get("metadata")
        given = metadata.get("answers") if isinstance(metadata, dict) else None
        if given:
            answers[key] = [str(answer) for answer in (given if isinstance(given, list) else [given])]
    return queries, answers


def _qrels(
    path: Path, corpus: Mapping[str, Passage], queries: Mapping[str, str], faults: _Faults
) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path.name} line {number}"
            row = line.rstrip("\n").split("\t")
            if not line.strip() or (number == 1 and row[-1].strip() == "score"):
                continue
            if len(row) != 3 or not GRADE.fullmatch(row[2].strip()) or int(row[2]) > MAX_GRADE:
                faults.add(f"judgements that are not query, passage, grade (0 to {MAX_GRADE})", where)
                continue
            query, passage, grade = row[0], row[1], int(row[2])
            if query not in queries:
                faults.add("unknown query ids", f"{query} ({where})")
            elif passage not in corpus:
                faults.add("unknown passage ids", f"{passage} ({where})")
            elif qrels.setdefault(query, {}).setdefault(passage, grade) != grade:
                faults.add("judgements that contradict an earlier one", where)
    return qrels
