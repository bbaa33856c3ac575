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
from rag_embfilter.fitting import SENTENCE_END, FilterSpec
from rag_embfilter.metrics import MIN_QUERIES, Comparison, compare, rank_metrics

FloatArray = NDArray[np.float32]
DEPTH = 100
TOLERANCE = 0.0025  # of nDCG@10: what a cheaper configuration may lose against the best
LEAST = 2 * MIN_QUERIES  # questions: half of them choose, half report


@dataclass(frozen=True)
class Candidate:
    """A configuration with its nDCG@10 per question, over all sets (`set/query`).

    Attributes:
        templates: template names; each costs a pass of the backbone.
        spec: the filter's type and settings.
        dim: size of a stored vector.
    """

    templates: tuple[str, ...]
    spec: FilterSpec
    dim: int
    scores: Mapping[str, float]

    @property
    def name(self) -> str:
        """Templates and filter, as in tables."""
        ratio = "" if self.spec.filter_type == "raw" else f"-r{self.spec.filter_ratio}"
        return f"{'+'.join(self.templates)} {self.spec.filter_type}{ratio}"

    @property
    def cost(self) -> tuple[int, int]:
        """What is compared: size of a vector, then passes of the backbone."""
        return self.dim, len(self.templates)

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


def candidates(
    backbone: Backbone,
    eval_sets: Sequence[EvalSet],
    templates: Sequence[Sequence[str]],
    specs: Sequence[FilterSpec],
    questions: Sequence[str] | None = None,
    max_length: int = 512,
    progress: Callable[[int], None] | None = None,
) -> list[Candidate]:
    """Score every combination of templates and filters on sets, from one pass per single template.

    Args:
        backbone: a loaded one.
        eval_sets: scored apart, and their questions put together.
        templates: groups that are joined, such as `[["prompteol"], ["prompteol", "echo"]]`.
        specs: filters; `raw` is always among them. Fitted ones are fitted on each set's passages.
        questions: example questions for calibrated filters; by default each set's own questions, without
            their judgements.
        max_length: longest text in tokens.
        progress: called with the number of texts encoded.
    """
    wanted = list(dict.fromkeys([FilterSpec("raw", 1), *specs]))
    scores: dict[tuple[tuple[str, ...], FilterSpec], dict[str, float]] = {}
    dims: dict[tuple[tuple[str, ...], FilterSpec], int] = {}
    for eval_set in eval_sets:
        embedded = _encode(backbone, eval_set, templates, questions, max_length, progress)
        for group in map(tuple, templates):
            encoder = Encoder(backbone, list(group), max_length=max_length)
            passages, asked, examples = (_joined([embedded[t][i] for t in group]) for i in range(3))
            for spec in wanted:
                embfilter = spec.make(encoder, passages, examples)
                run = _run(eval_set, embfilter.apply(passages), embfilter.apply(asked, role="query"))
                found = rank_metrics(eval_set.qrels, run).per_query["ndcg_at_10"]
                own = scores.setdefault((group, spec), {})
                own |= {f"{eval_set.name}/{query}": score for query, score in found.items()}
                dims[group, spec] = embfilter.dim
    return [Candidate(*key, dims[key], found) for key, found in scores.items()]


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


def _encode(
    backbone: Backbone,
    eval_set: EvalSet,
    templates: Sequence[Sequence[str]],
    questions: Sequence[str] | None,
    max_length: int,
    progress: Callable[[int], None] | None,
) -> dict[str, tuple[FloatArray, FloatArray, FloatArray]]:
    """Raw embeddings of passages, questions and example questions by single template."""
    embedded = {}
    for template in dict.fromkeys(each for group in templates for each in group):
        encoder = Encoder(backbone, template, max_length=max_length)
        passages = encoder.encode_documents(list(eval_set.passages().values()), progress=progress)
        asked = encoder.encode_queries(list(eval_set.queries.values()), progress=progress)
        examples = encoder.encode_queries(questions) if questions else asked
        embedded[template] = (passages, asked, examples)
    return embedded


def _joined(parts: Sequence[FloatArray]) -> FloatArray:
    """Unit vectors per template as one encoder of all of them makes them."""
    return np.hstack(parts) / np.float32(np.sqrt(len(parts)))


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
