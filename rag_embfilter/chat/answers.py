"""Answers and their citations: which passage a sentence stands on, and whether it stands on one at all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rag_embfilter.chat.prompts import DONT_KNOW
from rag_embfilter.chat.words import Words, sentences, stem
from rag_embfilter.store import Hit

CITATION = re.compile(r"\s*[\[【(](?:passages?\s*)?(\d{1,3}(?:\s*[,;]\s*\d{1,3})*)[\]】)]", re.IGNORECASE)
# "(2024)" is no citation: in round brackets only the numbers of passages count, see `_numbers`.
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
COUNTED = re.compile(r"(\d+(?:[.,:]\d+)*)[\s-]+([^\W\d_]+)")
REFUSAL = re.compile(
    r"\b(?:i (?:don.?t|do not) know|(?:passages?|context|text)s? (?:does|do|did)(?: not|n.t) "
    r"(?:say|answer|mention|provide|contain|specify))",
    re.IGNORECASE,
)
# Half of what a sentence says, by weight of its words, must be in the passage that it cites.
SUPPORT = 0.5
# Without a model: sentences of an answer, and how much of the best one's share another must have.
MOST_SENTENCES = 4
NEAR_BEST = 0.6


@dataclass(frozen=True)
class Passage:
    """A retrieved passage as an answer cites it.

    Attributes:
        number: what `[1]` in an answer means.
        hit: the node with its text and place.
        score: cosine similarity to the question, or BM25's score where no vectors were compared.
        marks: where the text holds the question's words, as (start, end).
    """

    number: int
    hit: Hit
    score: float
    marks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Claim:
    """A sentence of an answer, and the numbers of the passages that support it; none if none does."""

    text: str
    cites: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What was answered.

    Attributes:
        question: as it was asked; `standalone` as it was searched for.
        claims: the answer's sentences; empty for "I don't know".
        passages: what was retrieved, also when it was too far from the question.
        known: whether there is an answer.
        reason: why there is none, in a sentence.
        rejected: what the model said where no passage supports it.
        stopped: whether the reader stopped it.
    """

    question: str
    standalone: str
    claims: tuple[Claim, ...] = ()
    passages: tuple[Passage, ...] = ()
    known: bool = True
    reason: str = ""
    rejected: str = ""
    stopped: bool = False
    cited: frozenset[int] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        cited = frozenset(number for claim in self.claims for number in claim.cites)
        object.__setattr__(self, "cited", cited)

    @property
    def text(self) -> str:
        """The answer as plain text with its numbers."""
        if not self.known:
            return f"{DONT_KNOW} {self.reason}".strip()
        return " ".join(claim.text + "".join(f" [{n}]" for n in claim.cites) for claim in self.claims)


def checked(text: str, passages: Sequence[Passage], words: Words) -> tuple[Claim, ...]:
    """A model's answer sentence by sentence, each with the passages that support it.

    A number that a sentence gives counts when that passage exists and supports it; a sentence without one
    gets the passage that supports it best. Others are kept without any.
    """
    claims: list[Claim] = []
    for sentence, numbers in _cited_sentences(text, len(passages)):
        if any(claim.text == sentence for claim in claims):
            continue  # small models go in circles
        scores = {p.number: support(sentence, p.hit.text, words) for p in passages}
        good = tuple(n for n in numbers if scores.get(n, 0) >= SUPPORT)
        if not good and scores:
            best = max(scores, key=lambda n: (scores[n], -n))
            good = (best,) if scores[best] >= SUPPORT else ()
        claims.append(Claim(sentence, good))
    return tuple(claims)


def support(sentence: str, passage: str, words: Words) -> float:
    """Share of a sentence's words, by weight, that a passage holds; 0 when it gives a number that is not
    there, or not of the same things: `12 hours` is not `12 months`.
    """
    if _numbers(sentence) - _numbers(passage) or set(NUMBER.findall(sentence)) - set(NUMBER.findall(passage)):
        return 0.0
    return words.coverage(sentence, passage)


def _numbers(text: str) -> set[tuple[str, str]]:
    """Numbers with the word that follows them."""
    return {(number, stem(word)) for number, word in COUNTED.findall(text)}


def refuses(text: str) -> bool:
    """Whether a model says that it does not know."""
    return bool(REFUSAL.search(text)) or not re.search(r"\w", CITATION.sub("", text))


def _cited_sentences(text: str, passages: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Sentences without their citations, with the numbers they gave, also those that stand after the stop."""
    pieces = re.sub(r"([.!?。！？])((?:\s*[\[【]\s*\d[^\]】]*[\]】])+)", r"\2\1", text)
    for sentence in sentences(pieces):
        numbers: list[int] = []

        def take(match: re.Match[str], numbers: list[int] = numbers) -> str:
            found = [int(n) for n in re.findall(r"\d+", match[1])]
            if "(" in match[0] and any(not 1 <= n <= passages for n in found):
                return match[0]
            numbers += found
            return ""

        bare = CITATION.sub(take, sentence).strip()
        bare = re.sub(r"^(?:[-*•]|#+)\s+", "", bare)
        if re.search(r"\w", bare):
            yield bare, tuple(dict.fromkeys(numbers))


def extracted(question: str, passages: Sequence[Passage], words: Words) -> tuple[Claim, ...]:
    """Sentences that share most with a question, best first, each with its number: an answer nobody wrote.

    Those that share little beside the best one are left out; of the first passage there is always one.
    """
    found: list[tuple[float, Claim]] = []
    for passage in passages:
        title = str(passage.hit.node.metadata.get("title") or "").strip()
        text = passage.hit.text.removeprefix(title).strip() or passage.hit.text
        for sentence in words.best_sentences(question, text):
            found.append((words.coverage(question, sentence), Claim(sentence, (passage.number,))))
    best = max((share for share, _ in found), default=0.0)
    if not best:
        return tuple(claim for _, claim in found[:1])
    first = max((pair for pair in found if pair[1].cites == (1,)), key=lambda pair: pair[0])
    near = [pair for pair in found if pair[0] >= NEAR_BEST * best and pair is not first]
    kept = [first, *sorted(near, key=lambda pair: -pair[0])[: MOST_SENTENCES - 1]]
    return tuple(claim for _, claim in sorted(kept, key=lambda pair: -pair[0]))
