"""Words: what a question and a passage share, each word weighted by how rare it is in the collection."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Scripts without spaces (kana, CJK, Thai) give pairs of characters; all others whole words.
UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"[{UNSPACED}]+|[^\W{UNSPACED}]+")
UNSPACED_WORD = re.compile(rf"[{UNSPACED}]+")
STEM = 6  # letters of a word that count: endings are cut off in any language, crudely
# After a full stop and white space, after one of the scripts without spaces, or at the end of a line.
# A heading or a list's item: what stands before its words.
LEAD = re.compile(r"^(?:#{1,6}|[-*•>]|\d+[.)])\s+")
LIST_NUMBER = re.compile(r"\(?\d{1,3}[.)]?")
ENDS = re.compile(r"[.!?…。！？:;][\"'”’)\]]*$")
SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|\n+")


def stem(word: str) -> str:
    """What two forms of a word have in common: lower case, no plural `s`, its first letters."""
    word = word.casefold()
    return (word[:-1] if len(word) > 3 and word.endswith("s") else word)[:STEM]


def terms(text: str) -> list[tuple[str, int, int]]:
    """A text's terms in order, as (term, start, end)."""
    found = []
    for match in WORD.finditer(text):
        word, start = match[0], match.start()
        if UNSPACED_WORD.match(word) and len(word) > 1:
            found += [(word[i : i + 2], start + i, start + i + 2) for i in range(len(word) - 1)]
        else:
            found.append((stem(word), start, match.end()))
    return found


def sentences(text: str) -> list[str]:
    """A text's sentences, stripped, without the marks of headings and lists; none empty."""
    parts = [LEAD.sub("", part.strip()).strip() for part in SENTENCE_END.split(text) if part]
    return [part for part in parts if part and not LIST_NUMBER.fullmatch(part)]


@dataclass(frozen=True)
class Words:
    """How common terms are in a collection.

    Attributes:
        counts: term -> passages that hold it, of those looked at.
        passages: how many were looked at.
    """

    counts: Mapping[str, int]
    passages: int

    @classmethod
    def of(cls, texts: Iterable[str]) -> Words:
        """Counted over these passages."""
        counts: Counter[str] = Counter()
        passages = 0
        for text in texts:
            counts.update({term for term, _, _ in terms(text)})
            passages += 1
        return cls(counts, passages)

    def weight(self, term: str) -> float:
        """Inverse document frequency, as in BM25; more than 0, most for a term never seen."""
        held = self.counts.get(term, 0)
        return math.log(1 + (self.passages - held + 0.5) / (held + 0.5))

    def coverage(self, wanted: str, text: str) -> float:
        """Share of the weight of `wanted`'s terms that `text` holds, 0 to 1; 0 when it has no terms."""
        asked = {term for term, _, _ in terms(wanted)}
        held = {term for term, _, _ in terms(text)}
        whole = sum(map(self.weight, sorted(asked)))
        return sum(map(self.weight, sorted(asked & held))) / whole if whole else 0.0

    def best_sentences(self, question: str, text: str, limit: int = 2) -> list[str]:
        """The sentences of a text that share most with a question, in the text's order; the first of equals.

        Headings and other pieces without an end give way to whole sentences. Never none for a text that has
        one.
        """
        every = sentences(text)
        parts = [part for part in every if ENDS.search(part)] or every
        order = sorted(range(len(parts)), key=lambda i: (-self.coverage(question, parts[i]), i))
        best = [i for i in order[:limit] if self.coverage(question, parts[i]) > 0] or order[:1]
        return [parts[i] for i in sorted(best)]

    def marks(self, question: str, text: str) -> list[tuple[int, int]]:
        """Where a text holds the question's words, as (start, end) that do not overlap, in order.

        Words of one or two Latin letters, and those that half of the passages hold, are left out.
        """
        asked = {t for t, _, _ in terms(question) if self.counts.get(t, 0) <= self.passages / 2}
        merged: list[tuple[int, int]] = []
        for term, start, end in terms(text):
            short = end - start < 3 and term.isascii() and not term.isdecimal()
            if short or term not in asked:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        return merged
