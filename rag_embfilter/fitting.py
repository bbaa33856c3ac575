"""Fitting on a store: filters that learn from the passages and questions a base already has."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import StoreError
from rag_embfilter.filters import EmbFilter
from rag_embfilter.fingerprint import Part
from rag_embfilter.making import Embeddings, FloatArray
from rag_embfilter.recipes import DEFAULT_KEEP, DEFAULT_SHRINKAGE, RECIPES
from rag_embfilter.store import Store, collection_name

logger = logging.getLogger(__name__)

STAND_INS = 30
OPENING_WORDS = 6
QUESTION_ENDS = ("?", "？", "؟")
SENTENCE_END = re.compile(r"(?<=[.!?])\s|(?<=[。？！])|\n")


@dataclass(frozen=True)
class FilterSpec:
    """A filter to be made: its type and settings, as in `EmbFilter.from_encoder`."""

    filter_type: str
    filter_ratio: int = 2
    keep: float = DEFAULT_KEEP
    shrinkage: float = DEFAULT_SHRINKAGE

    @property
    def fitted(self) -> bool:
        """Whether it needs a corpus."""
        return self.filter_type in RECIPES and RECIPES[self.filter_type].fitted

    def make(
        self, encoder: Encoder, corpus: Embeddings | None = None, queries: FloatArray | None = None
    ) -> EmbFilter:
        """The filter itself; `corpus` and `queries` as `EmbFilter.from_encoder` takes them."""
        if not self.fitted:
            return EmbFilter.from_encoder(encoder, self.filter_type, self.filter_ratio)
        return EmbFilter.from_encoder(
            encoder,
            self.filter_type,
            self.filter_ratio,
            corpus=corpus,
            queries=queries,
            keep=self.keep,
            shrinkage=self.shrinkage,
        )


def fit(
    spec: FilterSpec, encoder: Encoder, store: Store, base: str, questions: Sequence[str] | None = None
) -> EmbFilter:
    """A fitted filter for a base, from its raw collection in one streaming pass.

    When the base has a collection of this filter already, its own filter is used, so that old and new
    vectors stay comparable; given questions then refit the query mean alone.

    Args:
        spec: a fitted type.
        encoder: the one that made the raw collection; it encodes the questions.
        store: holds `BASE-raw`.
        base: base name.
        questions: example questions of the domain. Without any, stand-ins are cut from passages.

    Raises `StoreError` when there is no raw collection, `FingerprintMismatch` when it was made another way.
    """
    raw = EmbFilter.from_encoder(encoder, "raw")
    source = collection_name(base, raw)
    if not store.exists(source):
        raise StoreError(
            f"{spec.filter_type} is fitted on collection {source!r}, which is not there; ingest raw."
        )
    store.require(source, encoder.fingerprint | raw.fingerprint, encoder.hidden_size, writing=False)
    centred = RECIPES[spec.filter_type].centred
    given = encoder.encode_queries(questions) if questions and centred else None
    name = f"{base}-{_name(spec)}"
    if store.exists(name):
        kept = store.filter_of(name)
        return kept if given is None else kept.with_queries(given)
    texts: list[str] = []
    if given is None and centred:
        texts = stand_in_questions(node.text for page in store.pages(source) for node in page.nodes)
        logger.warning(
            "no example questions: openings of passages stand in for them; real ones (--example-questions) "
            "are better"
        )
        given = encoder.encode_queries(texts)
    return spec.make(encoder, (page.vectors for page in store.pages(source)), given)


def fit_in_use(
    spec: FilterSpec,
    encoder: Encoder,
    store: Store,
    base: str,
    questions: Sequence[str] | None = None,
    spare: Sequence[str] | None = None,
) -> EmbFilter:
    """As `fit`, and a collection that is there keeps the mean of the questions given.

    `spare` questions serve a new collection only: they never replace a mean that was refitted since.
    """
    name = f"{base}-{_name(spec)}"
    there = store.exists(name)
    embfilter = fit(spec, encoder, store, base, questions or (None if there else spare))
    if there and questions and RECIPES[spec.filter_type].centred:
        store.set_query_mean(name, embfilter)
    return embfilter


def siblings(
    encoder: Encoder, store: Store, base: str, known: Container[str]
) -> tuple[list[EmbFilter], list[str]]:
    """Filters of a base's other collections, so that one run keeps all of them in step.

    Returns: the filters of collections not in `known` that this encoder made; and the names of those
    that it did not make, which must be left alone.
    """
    found, others = [], []
    for name in store.names():
        if name in known or not name.startswith(f"{base}-"):
            continue
        try:
            info = store.info(name)
        except StoreError:  # somebody else's, with other vectors
            continue
        if info.made.get("base") != base or info.fingerprint is None:
            continue
        stored = info.fingerprint.parts
        if any(stored.get(part) != value for part, value in encoder.fingerprint.parts.items()):
            others.append(name)
            continue
        if "filter_file" in info.settings:
            embfilter = store.filter_of(name)
        else:
            chosen = ("filter_type", "filter_ratio", "band_start", "seed")
            settings = {key: info.settings[key] for key in chosen if key in info.settings}
            embfilter = EmbFilter.from_encoder(encoder, **settings)
        same = (encoder.fingerprint | embfilter.fingerprint).digest == info.fingerprint.digest
        found.append(embfilter) if same else others.append(name)
    return found, others


def stand_in_questions(passages: Iterable[str], n: int = STAND_INS, seed: int = 0) -> list[str]:
    """Stand-ins for when nobody has questions yet, from `n` passages drawn at random from a stream.

    The first sentence of each, and, where that is no question itself, its opening words as one.
    """
    firsts = [SENTENCE_END.split(p.strip(), maxsplit=1)[0].strip() for p in sample(passages, n, seed)]
    firsts = [first for first in firsts if first]
    asked = [_asked(first) for first in firsts if not first.rstrip("!").endswith(QUESTION_ENDS)]
    return firsts + [question for question in asked if any(c.isalnum() for c in question)]


def _asked(sentence: str) -> str:
    """The opening words of a sentence as a question."""
    opening = " ".join(sentence.split()[:OPENING_WORDS]).rstrip(".,;:!。！、，")
    acronym = opening[:2].isupper() and len(opening.split()[0]) > 1 if opening else False
    return f"{opening}?" if acronym else f"{opening[:1].lower()}{opening[1:]}?"


def sample(texts: Iterable[str], n: int, seed: int = 0) -> list[str]:
    """At most `n` texts of a stream, each with equal chance, in their order, in one pass."""
    rng = np.random.default_rng(seed)
    drawn: list[tuple[int, str]] = []
    for i, text in enumerate(texts):
        if len(drawn) < n:
            drawn.append((i, text))
        elif (place := int(rng.integers(i + 1))) < n:
            drawn[place] = (i, text)
    return [text for _, text in sorted(drawn)]


def _name(spec: FilterSpec) -> str:
    """The name that the made filter will have."""
    parts: dict[str, Part] = {"filter_type": spec.filter_type, "filter_ratio": spec.filter_ratio}
    if RECIPES[spec.filter_type].uses:
        parts |= {"keep": f"{spec.keep:g}", "shrinkage": f"{spec.shrinkage:g}"}
    return EmbFilter(np.empty((0, 0), np.float32), parts).name
