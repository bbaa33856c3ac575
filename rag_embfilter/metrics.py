"""Rank metrics per query, and paired comparisons of two configurations on the same queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.errors import ConfigError

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Sequence[str]]
Verdict = Literal["better", "worse", "no evidence", "too few queries"]

METRICS = ("ndcg_at_10", "recall_at_10", "recall_at_100", "mrr_at_10", "map_at_100")
MIN_QUERIES = 20
MAX_GRADE = 20  # the evaluator takes memory in proportion to the gain, 2^grade, and ends in a crash
RESAMPLES = 9999


@dataclass(frozen=True)
class RankMetrics:
    """Scores in 0..1 per metric and query.

    Attributes:
        per_query: metric -> query id -> score.
        excluded: queries of the run or qrels that have no relevant passage, and so no score.
    """

    per_query: Mapping[str, Mapping[str, float]]
    excluded: tuple[str, ...] = ()

    def mean(self, metric: str = "ndcg_at_10") -> float:
        """Mean over the scored queries. Raises `ConfigError` when there is none."""
        scores = self.per_query[metric]
        if not scores:
            raise ConfigError("no query has a relevant passage, so there is nothing to average.")
        return float(np.mean(list(scores.values())))

    def means(self) -> dict[str, float]:
        """Mean of every metric."""
        return {metric: self.mean(metric) for metric in self.per_query}


def rank_metrics(qrels: Qrels, run: Run) -> RankMetrics:
    """Score rankings against judgements with `ir-measures`.

    nDCG's gain is `2^grade - 1`; the other metrics count a grade of 1 or more as relevant. Ids are
    compared as text. A passage that a ranking names twice counts once, at its better place. A query
    with relevant passages and no ranking scores 0; one without relevant passages is excluded. Raises
    `ConfigError` for a grade over 20.
    """
    import ir_measures
    from ir_measures import AP, RR, R, nDCG

    judged = {_id(q): {_id(p): int(g) for p, g in grades.items()} for q, grades in qrels.items()}
    relevant = {q: grades for q, grades in judged.items() if any(g > 0 for g in grades.values())}
    ranked = {_id(q): _as_scores(passages) for q, passages in run.items()}
    top = max((g for grades in relevant.values() for g in grades.values()), default=1)
    if top > MAX_GRADE:
        raise ConfigError(f"grade {top}: expected {MAX_GRADE} or less, as its gain is 2^grade - 1.")
    measures = {
        nDCG(gains={grade: 2**grade - 1 for grade in range(top + 1)}) @ 10: "ndcg_at_10",
        R @ 10: "recall_at_10",
        R @ 100: "recall_at_100",
        RR @ 10: "mrr_at_10",
        AP @ 100: "map_at_100",
    }
    per_query: dict[str, dict[str, float]] = {name: dict.fromkeys(relevant, 0.0) for name in METRICS}
    answered = {q: ranked[q] for q in relevant if ranked.get(q)}
    if answered:
        for score in ir_measures.iter_calc(list(measures), {q: relevant[q] for q in answered}, answered):
            per_query[measures[score.measure]][score.query_id] = float(score.value)
    excluded = tuple(sorted((judged.keys() | ranked.keys()) - relevant.keys()))
    return RankMetrics(per_query, excluded)


def _id(value: object) -> str:
    """An id as text; one that is not valid Unicode would crash the evaluator."""
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"id {text!r} is not valid Unicode.") from error
    return text


def _as_scores(passages: Sequence[str]) -> dict[str, float]:
    """Descending scores for a ranking, so that the evaluator keeps its order, ties included."""
    unique = list(dict.fromkeys(_id(passage) for passage in passages))
    return {passage: float(len(unique) - place) for place, passage in enumerate(unique)}


@dataclass(frozen=True)
class Comparison:
    """Paired difference of two configurations, `ours - baseline`, over `n` queries.

    Attributes:
        low, high: 95% bootstrap interval of the mean difference.
        p_value: two-sided permutation test (random sign flips of the pairs).
        wins, ties, losses: queries on which ours is higher, equal, lower.
        verdict: `better` or `worse` when the interval leaves out 0 and p < 0.05.
    """

    n: int
    difference: float
    low: float
    high: float
    p_value: float
    wins: int
    ties: int
    losses: int
    verdict: Verdict


def compare(ours: Mapping[str, float], baseline: Mapping[str, float], seed: int = 0) -> Comparison:
    """Compare two configurations' scores per query.

    The same seed gives the same figures. Under 20 queries the verdict is `too few queries`. Raises
    `ConfigError` for different queries, or none.
    """
    if ours.keys() != baseline.keys() or not ours:
        odd = sorted(ours.keys() ^ baseline.keys())[:5]
        raise ConfigError(
            f"a paired comparison needs the same queries on both sides; {len(ours)} and {len(baseline)} "
            f"are given{f', and only one side has {odd}' if odd else ''}."
        )
    queries = sorted(ours)
    if odd := [q for q in queries if not np.isfinite([ours[q], baseline[q]]).all()]:
        raise ConfigError(f"the scores of {odd[:5]} are not finite, so nothing can be compared.")
    difference = np.array([ours[q] - baseline[q] for q in queries])
    low, high, p_value = _interval_and_p(difference, seed)
    verdict: Verdict = "no evidence"
    if len(difference) < MIN_QUERIES:
        verdict = "too few queries"
    elif p_value < 0.05 and not low <= 0 <= high:
        verdict = "better" if difference.mean() > 0 else "worse"
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return Comparison(
        n=len(difference),
        difference=float(difference.mean()),
        low=low,
        high=high,
        p_value=p_value,
        wins=wins,
        ties=len(difference) - wins - losses,
        losses=losses,
        verdict=verdict,
    )


def _interval_and_p(difference: NDArray[np.float64], seed: int) -> tuple[float, float, float]:
    """Percentile bootstrap interval and permutation p-value of a mean difference."""
    from scipy import stats

    if len(difference) < 2 or np.ptp(difference) == 0:
        # No spread: the interval is a point, and only sign flips of a non-zero mean are possible.
        value = float(difference.mean())
        return value, value, 1.0 if value == 0 else min(1.0, 2.0 ** (1 - len(difference)))
    interval = stats.bootstrap(
        (difference,),
        np.mean,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
        batch=256,
    ).confidence_interval
    test = stats.permutation_test(
        (difference,),
        np.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(seed),
        batch=256,
        vectorized=True,
    )
    return float(interval.low), float(interval.high), float(test.pvalue)
