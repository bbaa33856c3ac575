"""Local folders as benchmark tasks: what each layout holds, read and validated. No MTEB here."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rag_embfilter.errors import ConfigError, EvalSetError
from rag_embfilter.eval_set import EvalSet

SHOWN = 5
SEED = 42  # MTEB's own
LAYOUTS = (
    "corpus.jsonl, queries.jsonl and qrels/test.tsv (with candidates.tsv: reranking), or a test.tsv whose "
    "header is sentence1, sentence2, score (STS), sentence1, sentence2, label (pairs) or text, label (with "
    "train.tsv: classification too)"
)


@dataclass(frozen=True)
class FolderTask:
    """One task that a folder holds.

    Attributes:
        name: the folder's name.
        category: MTEB's name of the task type, such as `STS`.
        digest: first 16 hex digits of the SHA-256 over what is evaluated, a limit included.
        splits: split -> column -> values, for all but retrieval and reranking.
        eval_set: passages, questions and judgements of those two.
        candidates: query id -> passage ids to be ranked, for reranking.
    """

    name: str
    category: str
    digest: str
    splits: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    eval_set: EvalSet | None = None
    candidates: Mapping[str, list[str]] | None = None


def read_folder(folder: str | Path, limit: int | None = None) -> list[FolderTask]:
    """The tasks of a folder, by its files; see docs/mteb.md for the layouts.

    Args:
        folder: BEIR files, `test.tsv` (and `train.tsv`), or BEIR files with `labels/train.tsv` and
            `labels/test.tsv` beside them.
        limit: keep so many texts of each split of classification and clustering, drawn evenly over the
            labels, the same ones every time.

    Raises `EvalSetError` for a folder of no such layout, or one with faults, which it names; `ConfigError`
    for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit {limit}: expected 1 or more.")
    root = Path(folder)
    name = root.resolve().name
    found: list[FolderTask] = []
    if (root / "corpus.jsonl").is_file():
        found.append(_beir(root))
    if (root / "test.tsv").is_file():
        found += _tables(root, name, limit)
    if (root / "labels" / "test.tsv").is_file():
        found += _tables(root / "labels", name, limit)
    if not found:
        raise EvalSetError(f"{str(root)!r} holds no task that is known here. Expected {LAYOUTS}.")
    return found


def _beir(root: Path) -> FolderTask:
    eval_set = EvalSet.load(root)
    file = root / "candidates.tsv"
    if not file.is_file():
        return FolderTask(eval_set.name, "Retrieval", eval_set.digest, eval_set=eval_set)
    candidates: dict[str, list[str]] = defaultdict(list)
    faults = _Faults(file)
    for where, (query, passage) in _rows(file, ("query-id", "corpus-id"), faults):
        if query not in eval_set.queries or passage not in eval_set.corpus:
            faults.add(where, f"unknown id, {query} or {passage}")
        elif passage not in candidates[query]:
            candidates[query].append(passage)
    for query in eval_set.queries:
        if not candidates.get(query):
            faults.add(query, "a question without candidates")
    faults.raise_if_any()
    digest = _digest([eval_set.digest, candidates])
    return FolderTask(eval_set.name, "Reranking", digest, eval_set=eval_set, candidates=dict(candidates))


def _tables(root: Path, name: str, limit: int | None) -> list[FolderTask]:
    """The tasks of a folder with `test.tsv`, by its header."""
    header = _header(root / "test.tsv")
    if header == ("sentence1", "sentence2", "score"):
        return [_task(name, "STS", {"test": _columns(root / "test.tsv", header, _number)})]
    if header == ("sentence1", "sentence2", "label"):
        pairs = _columns(root / "test.tsv", header, _zero_or_one)
        pairs["labels"] = pairs.pop("label")  # as MTEB calls it
        return [_task(name, "PairClassification", {"test": pairs})]
    if header != ("text", "label"):
        shown = ", ".join(header) or "empty"
        raise EvalSetError(f"the header of {str(root / 'test.tsv')!r} is {shown}. Expected {LAYOUTS}.")
    test = _evenly(_columns(root / "test.tsv", header, _label), limit)
    grouped = {"sentences": [test["text"]], "labels": [test["label"]]}
    tasks = [_task(name, "Clustering", {"test": grouped})]
    if (root / "train.tsv").is_file():
        train = _evenly(_columns(root / "train.tsv", ("text", "label"), _label), limit)
        # Numbers, since MTEB's average precision of two classes takes nothing else.
        numbers = {label: i for i, label in enumerate(sorted({*train["label"], *test["label"]}))}
        splits = {
            split: {"text": table["text"], "label": [numbers[label] for label in table["label"]]}
            for split, table in (("train", train), ("test", test))
        }
        tasks.insert(0, _task(name, "Classification", splits))
    return tasks


def _task(name: str, category: str, splits: dict[str, dict[str, list[Any]]]) -> FolderTask:
    return FolderTask(name, category, _digest(splits), splits)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _evenly(table: dict[str, list[Any]], limit: int | None) -> dict[str, list[Any]]:
    """At most `limit` rows, in their order: one of each label, then a second of each, and so on."""
    labels = table["label"]
    if limit is None or limit >= len(labels):
        return table
    shuffled = np.random.default_rng(SEED).permutation(len(labels))
    seen: dict[str, int] = defaultdict(int)
    turns = []
    for place, row in enumerate(shuffled):
        seen[labels[row]] += 1
        turns.append((seen[labels[row]], place, int(row)))
    kept = sorted(row for _, _, row in sorted(turns)[:limit])
    return {column: [values[row] for row in kept] for column, values in table.items()}


class _Faults:
    """What is wrong with a file, all of it in one error."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: list[str] = []

    def add(self, where: str, why: str) -> None:
        self.found.append(f"{where}: {why}")

    def raise_if_any(self) -> None:
        if self.found:
            more = f"; and {len(self.found) - SHOWN} more" if len(self.found) > SHOWN else ""
            shown = "; ".join(self.found[:SHOWN])
            raise EvalSetError(f"{str(self.file)!r} has faults: {shown}{more}. Mend the file and try again.")


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvalSetError(f"{str(file)!r} is not UTF-8 text ({error}); save it as such.") from error
    return text.split("\n")  # not splitlines, which also ends a line at characters that texts contain


def _header(file: Path) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in _lines(file)[0].split("\t"))


def _rows(file: Path, header: Sequence[str], faults: _Faults) -> list[tuple[str, list[str]]]:
    """(where, cells) of each line under the header; the last cell of a line is stripped."""
    lines = _lines(file)
    if _header(file) != tuple(header):
        raise EvalSetError(f"the header of {str(file)!r} is {lines[0]!r}, expected {', '.join(header)}.")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        cells = line.rstrip("\r").split("\t")
        if not line.strip():
            continue
        if len(cells) != len(header):
            faults.add(f"line {number}", f"{len(cells)} columns, expected {len(header)}")
            continue
        rows.append((f"line {number}", [*cells[:-1], cells[-1].strip()]))
    return rows


def _columns(file: Path, header: Sequence[str], value: Callable[[str], Any]) -> dict[str, list[Any]]:
    """Columns of a table: texts, and a last one that `value` reads."""
    faults = _Faults(file)
    table: dict[str, list[Any]] = {column: [] for column in header}
    for where, (*texts, last) in _rows(file, header, faults):
        if not all(text.strip() for text in texts):
            faults.add(where, "an empty text")
        try:
            read = value(last)
        except ValueError as error:
            faults.add(where, f"{header[-1]} {last!r}, {error}")
            continue
        for column, cell in zip(header, (*texts, read), strict=True):
            table[column].append(cell)
    # Correlations and classifiers need two rows; MTEB reads a table of one as something else.
    if not faults.found and len(table[header[-1]]) < 2:
        faults.add("under the header", f"{len(table[header[-1]])} rows, expected 2 or more")
    faults.raise_if_any()
    return table


def _number(cell: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("expected a number")
    return number


def _zero_or_one(cell: str) -> int:
    if cell not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return int(cell)


def _label(cell: str) -> str:
    if not cell:
        raise ValueError("expected a label")
    return cell
