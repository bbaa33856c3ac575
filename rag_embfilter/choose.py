"""Choosing: the cheapest configuration not worse than the best; the questions that choose do not report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.backbone import Backbone
from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError
from rag_embfilter.eval_set import EvalSet, Passage
from rag_embfilter.filters import EmbFilter
from rag_embfilter.fitting import SENTENCE_END, FilterSpec
from rag_embfilter.making import MIN_QUESTIONS
from rag_embfilter.metrics import MIN_QUERIES, Comparison, compare, rank_metrics
from rag_embfilter.recipes import MIN_CORPUS, RECIPES
from rag_embfilter.templates import Template, resolve_templates

FloatArray = NDArray[np.float32]
DEPTH = 100
TOLERANCE = 0.0025  # of nDCG@10: what a cheaper configuration may lose against the best
LEAST = 2 * MIN_QUERIES  # questions: half of them choose, half report


@dataclass(frozen=True)
class Words:
    """Templates that are joined, and their pooling where it is not their own."""

    templates: tuple[str, ...]
    pooling: str | None = None

    @property
    def resolved(self) -> tuple[Template, ...]:
        """The templates themselves."""
        return tuple(resolve_templates(self.templates, pooling=self.pooling))

    def __str__(self) -> str:
        return "+".join(self.templates) + (f" ({self.pooling})" if self.pooling else "")


@dataclass(frozen=True)
class Candidate:
    """A configuration with its nDCG@10 per question, over all sets (`set/query`).

    Attributes:
        words: templates and pooling; each template costs a pass of the backbone.
        spec: the filter's type and settings.
        dim: size of a stored vector.
    """

    words: Words
    spec: FilterSpec
    dim: int
    scores: Mapping[str, float]

    @property
    def name(self) -> str:
        """Templates and filter, as in tables."""
        ratio = "" if self.spec.filter_type == "raw" else f"-r{self.spec.filter_ratio}"
        return f"{self.words} {self.spec.filter_type}{ratio}"

    @property
    def cost(self) -> tuple[int, int]:
        """What is compared: size of a vector, then passes of the backbone."""
        return self.dim, len(self.words.templates)

    def mean(self, queries: Iterable[str] | None = None) -> float:
        """Mean score over these questions, by default all."""
        return float(np.mean([self.scores[q] for q in (queries or self.scores)]))

    def on(self, queries: Iterable[str]) -> dict[str, float]:
        """Scores of these questions."""
        return {q: self.scores[q] for q in queries}


@dataclass(frozen=True)
class Choice:
    """What to ship, and how well that way of choosing does on questions it did not see.

    Attributes:
        chosen: picked on all questions.
        raw: the best raw configuration.
        held_out: paired comparison with raw of what each half picked, on the other half.
        held_out_mean, held_out_best: mean nDCG@10 there, and what the best of the grid has there.
        too_few: whether there are under 40 questions, so that nothing should be concluded.
    """

    chosen: Candidate
    raw: Candidate
    candidates: tuple[Candidate, ...]
    held_out: Comparison
    held_out_mean: float
    held_out_best: float
    too_few: bool


@dataclass(frozen=True)
class _Embedded:
    """A set's texts, a unit vector per template side by side."""

    eval_set: EvalSet
    passages: FloatArray
    asked: FloatArray
    examples: FloatArray


class Grid:
    """Sets embedded once per template, from which every configuration is scored.

    Args:
        backbone: a loaded one.
        eval_sets: scored apart, and their questions put together.
        templates: groups that are joined, such as `[["prompteol"], ["prompteol", "echo"]]`.
        specs: filters; `raw` is always among them. Fitted ones are fitted on each set's passages.
        poolings: tried for single templates besides their own; they cost no pass.
        questions: example questions for calibrated filters; by default each set's own questions, without
            their judgements.
        max_length: longest text in tokens.
        progress: called with the number of texts encoded.

    Raises `ConfigError` for what no filter could be made of, before anything is encoded.
    """

    def __init__(
        self,
        backbone: Backbone,
        eval_sets: Sequence[EvalSet],
        templates: Sequence[Sequence[str]],
        specs: Sequence[FilterSpec],
        poolings: Sequence[str] = (),
        questions: Sequence[str] | None = None,
        max_length: int = 512,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.backbone, self.max_length = backbone, max_length
        self.specs = list(dict.fromkeys([FilterSpec("raw", 1), *specs]))
        _require_possible(eval_sets, self.specs, questions)
        found = [Words(tuple(group)) for group in templates]
        found += [Words(tuple(group), each) for group in templates for each in poolings if len(group) == 1]
        unique: dict[tuple[Template, ...], Words] = {}
        for words in found:
            unique.setdefault(words.resolved, words)
        self.words = list(unique.values())
        every = list(dict.fromkeys(each for words in self.words for each in words.resolved))
        encoder = Encoder(backbone, every, max_length=max_length)
        # A unit vector per template again: joined ones are scaled by how many they are.
        scale = np.float32(np.sqrt(len(every)))
        self._place = {each: i * backbone.hidden_size for i, each in enumerate(every)}
        given = encoder.encode_queries(questions, progress=progress) * scale if questions else None
        self._sets: list[_Embedded] = []
        for eval_set in eval_sets:
            passages = encoder.encode_documents(list(eval_set.passages().values()), progress=progress)
            asked = encoder.encode_queries(list(eval_set.queries.values()), progress=progress)
            passages *= scale
            asked *= scale
            self._sets.append(_Embedded(eval_set, passages, asked, asked if given is None else given))

    def candidates(self) -> list[Candidate]:
        """The scores of all filters with all words, but for ratios too large for words that are joined."""
        grid = []
        for words in self.words:
            encoder = self.encoder(words)
            parts = [self._parts(each, words) for each in self._sets]
            for spec in self.specs:
                if spec.filter_ratio * len(words.resolved) > self.backbone.hidden_size:
                    continue
                scores: dict[str, float] = {}
                for each in parts:
                    embfilter = spec.make(encoder, each.passages, each.examples)
                    asked = embfilter.apply(each.asked, role="query")
                    run = _run(each.eval_set, embfilter.apply(each.passages), asked)
                    found = rank_metrics(each.eval_set.qrels, run).per_query["ndcg_at_10"]
                    scores |= {f"{each.eval_set.name}/{query}": score for query, score in found.items()}
                grid.append(Candidate(words, spec, embfilter.dim, scores))
        return grid

    def fit(self, candidate: Candidate) -> EmbFilter:
        """A candidate's filter, for use: a fitted one is fitted on the passages of all sets together."""
        parts = [self._parts(each, candidate.words) for each in self._sets]
        passages = np.concatenate([each.passages for each in parts])
        examples = np.concatenate([each.examples for each in parts])
        return candidate.spec.make(self.encoder(candidate.words), passages, examples)

    def encoder(self, words: Words) -> Encoder:
        """The encoder of these words alone."""
        names = words.templates[0] if len(words.templates) == 1 else words.templates
        return Encoder(self.backbone, names, words.pooling, self.max_length)

    def _parts(self, each: _Embedded, words: Words) -> _Embedded:
        """A set's embeddings as an encoder of these words makes them."""
        width = self.backbone.hidden_size
        starts = [self._place[template] for template in words.resolved]

        def part(embeddings: FloatArray) -> FloatArray:
            found = [embeddings[:, start : start + width] for start in starts]
            return np.hstack(found) / np.float32(np.sqrt(len(found)))

        return _Embedded(each.eval_set, part(each.passages), part(each.asked), part(each.examples))


def _require_possible(
    eval_sets: Sequence[EvalSet], specs: Sequence[FilterSpec], questions: Sequence[str] | None
) -> None:
    """Raise `ConfigError` for sets that fitted filters could not be fitted on."""
    fitted = [spec for spec in specs if spec.fitted]
    for each in eval_sets if fitted else ():
        if len(each.corpus) < MIN_CORPUS:
            raise ConfigError(
                f"set {each.name!r} has {len(each.corpus)} passages; {fitted[0].filter_type} needs at least "
                f"{MIN_CORPUS}. Give a larger set, or leave out filters that are fitted."
            )
        asked = len(each.queries if questions is None else questions)
        if asked < MIN_QUESTIONS and any(RECIPES[spec.filter_type].centred for spec in fitted):
            raise ConfigError(
                f"set {each.name!r}: {asked} example questions; calibrated needs at least {MIN_QUESTIONS}."
            )


def pick(grid: Sequence[Candidate], queries: Sequence[str], tolerance: float = TOLERANCE) -> Candidate:
    """The cheapest candidate within `tolerance` of the best mean; the best raw one if the best does not beat
    it beyond noise.
    """
    raw = _best_raw(grid, queries)
    best = max(grid, key=lambda c: (c.mean(queries), -c.dim))
    if best is raw or compare(best.on(queries), raw.on(queries)).verdict in ("no evidence", "worse"):
        return raw
    floor = best.mean(queries) - tolerance - 1e-12
    near = [c for c in grid if c.mean(queries) >= floor]
    return min(near, key=lambda c: (c.cost, -c.mean(queries)))


def choose(grid: Sequence[Candidate], seed: int = 0, tolerance: float = TOLERANCE) -> Choice:
    """Pick on all questions, and report by cross-fitting: each half picks, the other half reports.

    The same seed gives the same halves. Raises `ConfigError` for under two questions.
    """
    queries = sorted(grid[0].scores)
    if len(queries) < 2:
        raise ConfigError(f"{len(queries)} questions: at least two are needed to choose and to report.")
    order = np.random.default_rng(seed).permutation(len(queries))
    halves = [[queries[i] for i in part] for part in np.array_split(order, 2)]
    ours: dict[str, float] = {}
    baseline: dict[str, float] = {}
    best = 0.0
    for choosing, reporting in (halves, halves[::-1]):
        ours |= pick(grid, choosing, tolerance).on(reporting)
        baseline |= _best_raw(grid, choosing).on(reporting)
        best += max(c.mean(reporting) for c in grid) * len(reporting) / len(queries)
    return Choice(
        chosen=pick(grid, queries, tolerance),
        raw=_best_raw(grid, queries),
        candidates=tuple(sorted(grid, key=lambda c: -c.mean())),
        held_out=compare(ours, baseline),
        held_out_mean=float(np.mean(list(ours.values()))),
        held_out_best=best,
        too_few=len(queries) < LEAST,
    )


def pseudo_set(name: str, passages: Mapping[str, Passage], limit: int = 500, seed: int = 0) -> EvalSet:
    """A proxy for a set without questions: a passage's title asks for its text, or its first sentence for
    the rest.

    At most `limit` passages are asked for; those too short to be parted only stand in the corpus. Raises
    `ConfigError` when none can be.
    """
    corpus, asked = {}, {}
    for key, passage in passages.items():
        question, rest = passage.title.strip(), passage.text.strip()
        if not question and rest:
            question, *others = SENTENCE_END.split(rest, maxsplit=1)
            rest = others[0].strip() if others else ""
        if question and rest:
            asked[key] = question
        corpus[key] = Passage("", rest or question)
    if not asked:
        raise ConfigError("no passage has a title or a second sentence, so there are no pseudo-questions.")
    drawn = np.random.default_rng(seed).permutation(sorted(asked))[:limit]
    queries = {str(key): asked[str(key)] for key in sorted(drawn)}
    return EvalSet(f"{name} (pseudo)", corpus, queries, {key: {key: 1} for key in queries})


def _best_raw(grid: Sequence[Candidate], queries: Sequence[str]) -> Candidate:
    return max((c for c in grid if c.spec.filter_type == "raw"), key=lambda c: (c.mean(queries), -c.dim))


def _run(eval_set: EvalSet, passages: FloatArray, asked: FloatArray) -> dict[str, list[str]]:
    """Exact rankings by cosine, in parts of the questions."""
    ids = list(eval_set.corpus)
    queries = list(eval_set.queries)
    depth = min(DEPTH, len(ids))
    run: dict[str, list[str]] = {}
    for start, scores in _scores(passages, asked):
        nearest = np.argpartition(-scores, depth - 1, axis=1)[:, :depth]
        order = np.take_along_axis(nearest, np.argsort(-np.take_along_axis(scores, nearest, 1), axis=1), 1)
        run |= {queries[start + i]: [ids[j] for j in row] for i, row in enumerate(order)}
    return run


def _scores(passages: FloatArray, asked: FloatArray, rows: int = 256) -> Iterator[tuple[int, FloatArray]]:
    for start in range(0, len(asked), rows):
        yield start, asked[start : start + rows] @ passages.T
