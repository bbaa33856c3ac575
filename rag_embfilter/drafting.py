"""Drafts of an evaluation set from a team's own passages: questions, a review file for people, and back."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rag_embfilter.choose import pseudo_set
from rag_embfilter.errors import ConfigError, EvalSetError
from rag_embfilter.eval_set import EvalSet, Passage
from rag_embfilter.files import write_bytes, write_text

REVIEW = "review.csv"
COLUMNS = ("keep", "question", "answer", "grade", "passage_id", "title", "text")
DROPPED = frozenset(["", "n", "no", "0", "false", "x"])
SHORTEST = 200  # characters of a passage that is worth a question


@dataclass(frozen=True)
class Draft:
    """A question and the passage that answers it. `grade`: 2 answers, 1 helps."""

    question: str
    passage: str
    answer: str = ""
    grade: int = 2
    keep: bool = True


def pseudo_drafts(
    passages: Mapping[str, Passage], limit: int, seed: int = 0
) -> tuple[dict[str, Passage], list[Draft]]:
    """Titles and first sentences as questions, and the passages without them: a proxy for real questions.

    Raises `ConfigError` when no passage has either.
    """
    made = pseudo_set("drafts", passages, limit, seed)
    return dict(made.corpus), [Draft(text, passage) for passage, text in made.queries.items()]


def chosen_passages(passages: Mapping[str, Passage], limit: int, seed: int = 0) -> list[str]:
    """Ids of passages to ask for: long enough, drawn evenly over the corpus, which keeps sources apart.

    Raises `ConfigError` when none is long enough.
    """
    worth = [key for key, passage in passages.items() if len(passage.text) >= SHORTEST]
    if not worth:
        raise ConfigError(f"no passage has {SHORTEST} characters or more, so there is little to ask about.")
    parts = np.array_split(np.arange(len(worth)), min(limit, len(worth)))
    rng = np.random.default_rng(seed)
    return [worth[int(rng.choice(part))] for part in parts]


def write_set(folder: Path, passages: Mapping[str, Passage], drafts: Sequence[Draft]) -> EvalSet:
    """Write the set in BEIR layout with its review file, and load it back.

    Raises `EvalSetError` when the folder holds a set already, or no draft is kept.
    """
    if (folder / "corpus.jsonl").exists():
        raise EvalSetError(
            f"{str(folder)!r} holds an evaluation set. Edit its {REVIEW} and give it to --review, or choose "
            "another folder."
        )
    lines = [
        json.dumps({"_id": key, "title": passage.title, "text": passage.text}, ensure_ascii=False)
        for key, passage in passages.items()
    ]
    write_text(folder / "corpus.jsonl", "\n".join(lines) + "\n")
    rows = [
        {
            "keep": "yes" if draft.keep else "no",
            "question": draft.question,
            "answer": draft.answer,
            "grade": draft.grade,
            "passage_id": draft.passage,
            "title": passages[draft.passage].title,
            "text": passages[draft.passage].text,
        }
        for draft in drafts
    ]
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    # Spreadsheets take a file for UTF-8 only with its mark.
    write_bytes(folder / REVIEW, sheet.getvalue().encode("utf-8-sig"))
    return _write_questions(folder, drafts)


def apply_review(review: Path) -> EvalSet:
    """Questions and judgements of a set anew, from its review file as somebody edited it.

    Rows whose `keep` is empty, no or n are left out; rows of one question are one question with several
    passages. Raises `EvalSetError` that names the rows at fault.
    """
    folder = review.parent
    if not (folder / "corpus.jsonl").is_file():
        raise EvalSetError(f"no corpus.jsonl beside {str(review)!r}; it belongs in its set's folder.")
    try:
        rows = list(csv.DictReader(io.StringIO(review.read_text("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise EvalSetError(f"{str(review)!r} is not CSV in UTF-8 ({error}); save it as such.") from error
    missing = [name for name in COLUMNS[:5] if rows and name not in rows[0]]
    if missing or not rows:
        raise EvalSetError(
            f"{str(review)!r}: expected rows with the columns {', '.join(COLUMNS[:5])}; missing: "
            f"{', '.join(missing) or 'all rows'}. Semicolons for commas? Save it with commas."
        )
    drafts, faults = [], []
    for number, row in enumerate(rows, 2):
        grade = (row["grade"] or "2").strip()
        question = " ".join((row["question"] or "").split())
        if (row["keep"] or "").strip().lower() in DROPPED:
            continue
        if not question or not re.fullmatch("[0-9]{1,2}", grade):
            faults.append(f"row {number}: question {question!r}, grade {grade!r}")
            continue
        drafts.append(Draft(question, row["passage_id"].strip(), (row["answer"] or "").strip(), int(grade)))
    if faults:
        raise EvalSetError(
            f"{str(review)!r}: expected a question and a grade from 0 to 20 in {'; '.join(faults)}."
        )
    return _write_questions(folder, drafts)


def _write_questions(folder: Path, drafts: Sequence[Draft]) -> EvalSet:
    kept = [draft for draft in drafts if draft.keep]
    if not kept:
        raise EvalSetError(f"no question is kept for {str(folder)!r}, so there is no set.")
    ids = {question: f"q{i:04}" for i, question in enumerate(dict.fromkeys(d.question for d in kept), 1)}
    lines = []
    for question, key in ids.items():
        answers = list(dict.fromkeys(d.answer for d in kept if d.question == question and d.answer))
        lines.append(
            json.dumps({"_id": key, "text": question, "metadata": {"answers": answers}}, ensure_ascii=False)
        )
    write_text(folder / "queries.jsonl", "\n".join(lines) + "\n")
    judged = {(ids[draft.question], draft.passage): draft.grade for draft in kept}
    rows = [f"{query}\t{passage}\t{grade}" for (query, passage), grade in judged.items()]
    write_text(folder / "qrels" / "test.tsv", "\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
    return EvalSet.load(folder)
