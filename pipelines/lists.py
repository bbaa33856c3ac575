"""Options that take several words: which words are still theirs."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.options import JUDGED, MODES, QUANTIZATIONS
from rag_embfilter.filters import FILTER_TYPES
from rag_embfilter.templates import POOLINGS, SETS, TEMPLATES


def _row_name(word: str) -> bool:
    """Whether a word is a row of `evaluate`'s table: `raw`, `edge-r2`, `edge-r2+bm25`."""
    return word.removesuffix("+bm25").split("-")[0] in FILTER_TYPES


LISTS = {
    "--filter-types": lambda word: word in FILTER_TYPES,
    "--filter-ratios": str.isdecimal,
    "--template": lambda word: word in TEMPLATES or word in SETS,
    "--modes": lambda word: word in MODES,
    "--judged-metrics": lambda word: word in JUDGED,
    "--judge-filters": lambda word: word in ("all", "recommended", "bm25") or _row_name(word),
}
# Lists of one command, one value for every other.
OWN_LISTS = {
    "choose": {"--pooling": lambda word: word in POOLINGS},
    "cost": {"--quantization": lambda word: word in QUANTIZATIONS},
}


def expand_lists(argv: Sequence[str]) -> list[str]:
    """Lets a list option take several words: `--filter-ratios 2 4 8`, also `2,4,8`.

    Its first word is always its own; further ones while they are of its kind, so that a path after
    them is still an argument.
    """
    expanded: list[str] = []
    words = list(argv)
    lists = LISTS | OWN_LISTS.get(words[0] if words else "", {})
    while words:
        word = words.pop(0)
        option, _, value = word.partition("=")
        if option not in lists:
            expanded.append(word)
            continue
        values = [value] if value else words[:1]
        if not value:
            words = words[1:]
        while words and lists[option](words[0].split(",")[0]):
            values.append(words.pop(0))
        if not values:
            expanded.append(option)
            continue
        if option != "--template":  # in which a comma is a comma
            values = ",".join(values).split(",")
        for given in values:
            expanded += [option, given]
    return expanded
