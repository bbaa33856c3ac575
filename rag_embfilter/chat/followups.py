"""Follow-up questions: which lean on what was said before, and whether a rewritten one can be trusted."""

from __future__ import annotations

import re

from rag_embfilter.chat.words import terms

# English, as the models that need this are; a larger model is asked to rewrite every follow-up.
REFERS = re.compile(
    r"\b(?:it|its|that|this|those|these|they|them|their|theirs|he|him|his|she|her|hers|there|then|ones?|same|"
    r"else|instead|either|both|former|latter)\b|^\s*(?:and|but|or|so|why|also|what about|how about)\b",
    re.IGNORECASE,
)
LONGEST = 400  # characters; more is an answer, not a question
FAMILIAR = 0.6  # share of a rewritten question's words that must come from the conversation


def refers(question: str) -> bool:
    """Whether a question points back at something."""
    return bool(REFERS.search(question))


def joined(before: str, question: str) -> str:
    """A follow-up with the question before it: what can be searched for without a model."""
    return f"{before.strip()} {question.strip()}"


def trustworthy(rewritten: str, conversation: str, question: str) -> bool:
    """Whether a rewritten question is one line, of some length, of words that were said."""
    if not rewritten or "\n" in rewritten or len(rewritten) > LONGEST:
        return False
    found = {term for term, _, _ in terms(rewritten)}
    said = {term for term, _, _ in terms(f"{conversation} {question}")}
    return bool(found) and len(found & said) / len(found) >= FAMILIAR
