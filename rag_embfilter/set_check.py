"""Whether an evaluation set can be trusted: duplicates, wording that leaks from passages, lengths, BM25."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rag_embfilter.eval_set import EvalSet
from rag_embfilter.metrics import rank_metrics
from rag_embfilter.store.bm25 import Bm25, rank

WORD = re.compile(r"\w+")
# A question that repeats so many words of a relevant passage in a row was copied from it.
COPIED = 7
# Share of a question's terms that its best passage may hold before word overlap alone answers it.
OVERLAP = 0.8
NEAR = 0.6  # share of terms that two passages have in common, to be near-duplicates
TOO_EASY = 0.85  # nDCG@10 of BM25


@dataclass(frozen=True)
class SetReport:
    """What `check_set` found.

    Attributes:
        problems: what should be mended, kind -> ids or pairs of ids.
        grades: grade -> number of judgements.
        answered: questions with a reference answer.
        words: passages' (median, shortest, longest) length in words.
        near: pairs of passages that share most of their terms, which make a set hard.
        overlap: mean share of a question's terms that its best relevant passage holds.
        bm25: mean nDCG@10 of BM25, 0 to 1.
    """

    passages: int
    questions: int
    problems: Mapping[str, list[str]]
    grades: Mapping[int, int]
    answered: int
    words: tuple[int, int, int]
    near: int
    overlap: float
    bm25: float


@dataclass
class _Terms:
    """Sets of BM25 terms, which fold case, endings and stop words, of passages and questions."""

    passages: dict[str, frozenset[int]] = field(default_factory=dict)
    questions: dict[str, frozenset[int]] = field(default_factory=dict)


def check_set(eval_set: EvalSet, bm25: Bm25 | None = None) -> SetReport:
    """Look a loaded set over. `bm25` says how its language is read, by default as English.

    Raises `ConfigError` without the `[edge]` extra, which brings the tokeniser.
    """
    bm25 = bm25 or Bm25()
    texts = eval_set.passages()
    terms = _Terms(_terms(bm25, texts), _terms(bm25, eval_set.queries))
    overlaps = _overlaps(eval_set, terms)
    score = rank_metrics(eval_set.qrels, rank(texts, eval_set.queries, bm25)).mean()
    problems = {
        "passages with the same text": _same(texts),
        "questions with the same text": _same(eval_set.queries),
        f"questions that copy {COPIED} words or more of a relevant passage": _copied(eval_set, texts),
        f"questions whose relevant passage holds over {OVERLAP:.0%} of their terms": [
            query for query, share in overlaps.items() if share > OVERLAP
        ],
    }
    if score > TOO_EASY:
        problems[f"BM25 reaches {score:.2f} nDCG@10, over {TOO_EASY}: word overlap answers most"] = []
    lengths = [len(WORD.findall(text)) for text in texts.values()]
    return SetReport(
        passages=len(texts),
        questions=len(eval_set.queries),
        problems={kind: found for kind, found in problems.items() if found or kind.startswith("BM25")},
        grades=Counter(grade for judged in eval_set.qrels.values() for grade in judged.values()),
        answered=sum(bool(eval_set.answers.get(query)) for query in eval_set.queries),
        words=(int(np.median(lengths)), min(lengths), max(lengths)),
        near=_near(terms.passages),
        overlap=float(np.mean(list(overlaps.values()))) if overlaps else 0.0,
        bm25=score,
    )


def _terms(bm25: Bm25, texts: Mapping[str, str]) -> dict[str, frozenset[int]]:
    vectors = bm25.queries(list(texts.values()))
    return {key: frozenset(vector.indices) for key, vector in zip(texts, vectors, strict=True)}


def _relevant(eval_set: EvalSet, query: str) -> list[str]:
    return [passage for passage, grade in eval_set.qrels.get(query, {}).items() if grade > 0]


def _overlaps(eval_set: EvalSet, terms: _Terms) -> dict[str, float]:
    """Share of each question's terms that the best of its relevant passages holds; few terms tell nothing."""
    return {
        query: max(len(asked & terms.passages[p]) / len(asked) for p in _relevant(eval_set, query))
        for query, asked in terms.questions.items()
        if len(asked) >= 3 and _relevant(eval_set, query)
    }


def _same(texts: Mapping[str, str]) -> list[str]:
    """Ids whose text another one has, case and spaces aside."""
    by_text = defaultdict(list)
    for key, text in texts.items():
        by_text[" ".join(WORD.findall(text.lower()))].append(key)
    return [" = ".join(keys) for keys in by_text.values() if len(keys) > 1]


def _copied(eval_set: EvalSet, texts: Mapping[str, str]) -> list[str]:
    return [
        query
        for query, question in eval_set.queries.items()
        if any(_runs(question) & _runs(texts[passage]) for passage in _relevant(eval_set, query))
    ]


def _runs(text: str) -> set[tuple[str, ...]]:
    words: Sequence[str] = WORD.findall(text.lower())
    return {tuple(words[i : i + COPIED]) for i in range(len(words) - COPIED + 1)}


def _near(passages: Mapping[str, frozenset[int]]) -> int:
    """Pairs of passages that share most of their terms."""
    held = [terms for terms in passages.values() if terms]
    return sum(len(a & b) / min(len(a), len(b)) >= NEAR for i, a in enumerate(held) for b in held[i + 1 :])
