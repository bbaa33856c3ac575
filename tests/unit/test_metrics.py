"""Rank metrics and paired comparisons against values worked out by hand, by numpy and by enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rag_embfilter import compare, rank_metrics
from rag_embfilter.errors import ConfigError
from rag_embfilter.metrics import METRICS


def of(qrels: dict, ranking: list) -> dict[str, float]:
    """The metrics of one query."""
    return rank_metrics({"q": qrels}, {"q": ranking}).means()


# --- rank metrics


def test_ndcg_gain_is_two_to_the_grade_minus_one() -> None:
    # Ranking grades 0, 1, 2 (gains 0, 1, 3); ideal 2, 1, 1 with one relevant passage not retrieved.
    dcg = 1 / math.log2(3) + 3 / math.log2(4)
    ideal = 3 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4)
    scores = of({"a": 2, "b": 1, "c": 1, "d": 0}, ["d", "b", "a"])
    assert scores["ndcg_at_10"] == pytest.approx(dcg / ideal, abs=1e-9)
    assert scores["recall_at_10"] == pytest.approx(2 / 3)
    assert scores["mrr_at_10"] == pytest.approx(1 / 2)
    assert scores["map_at_100"] == pytest.approx((1 / 2 + 2 / 3) / 3)


@pytest.mark.parametrize(
    ("qrels", "ranking", "expected"),
    [
        ({"a": 1}, ["a", "a"], (1, 1, 1, 1, 1)),
        ({"a": 1, "b": 1}, ["a", "a", "b"], (1, 1, 1, 1, 1)),
        ({"a": 1}, ["b", "a", "b"], (1 / math.log2(3), 1, 1, 1 / 2, 1 / 2)),
        ({"a": 1}, ["b"], (0, 0, 0, 0, 0)),  # k far larger than the list
        ({"a": 1}, [], (0, 0, 0, 0, 0)),
        ({1: 1}, ["1"], (1, 1, 1, 1, 1)),
        ({"1": 1}, [2, 1], (1 / math.log2(3), 1, 1, 1 / 2, 1 / 2)),
    ],
)
def test_hand_values_with_duplicates_short_lists_and_id_types(
    qrels: dict, ranking: list, expected: tuple[float, ...]
) -> None:
    scores = of(qrels, ranking)
    assert tuple(scores[metric] for metric in METRICS) == pytest.approx(expected, abs=1e-9)


def test_cutoffs_count_places_after_duplicates_are_gone() -> None:
    others = [f"x{i}" for i in range(9)]
    doubled = [passage for passage in [*others, "a"] for _ in range(2)]
    assert of({"a": 1}, doubled)["mrr_at_10"] == pytest.approx(1 / 10)
    late = of({"a": 1}, [*others, "x9", "a"])
    assert (late["ndcg_at_10"], late["recall_at_10"], late["mrr_at_10"]) == (0, 0, 0)
    assert (late["recall_at_100"], late["map_at_100"]) == (1, pytest.approx(1 / 11))
    assert of({"a": 1}, [f"x{i}" for i in range(100)] + ["a"])["recall_at_100"] == 0


def test_a_chunk_ranking_mapped_to_documents_counts_each_document_at_its_best_chunk() -> None:
    chunks = ["d2#0", "d1#3", "d1#0", "d2#1", "d3#0"]
    ranking = [chunk.split("#")[0] for chunk in chunks]  # d2, d1, d1, d2, d3 -> d2, d1, d3
    scores = of({"d1": 1, "d3": 1}, ranking)
    assert scores["map_at_100"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert scores["recall_at_10"] == 1


def test_query_without_relevant_passages_is_excluded_and_counted() -> None:
    found = rank_metrics(
        {"good": {"a": 1}, "judged zero": {"a": 0}, "empty": {}}, {"good": ["a"], "extra": ["a"]}
    )
    assert found.excluded == ("empty", "extra", "judged zero")
    assert found.per_query["ndcg_at_10"] == {"good": 1.0}
    assert found.means() == dict.fromkeys(METRICS, 1.0)


def test_a_query_without_a_ranking_scores_zero_in_the_mean() -> None:
    found = rank_metrics({"hit": {"a": 1}, "none": {"a": 1}}, {"hit": ["b", "a"]})
    assert found.per_query["mrr_at_10"] == {"hit": 0.5, "none": 0.0}
    assert found.mean("mrr_at_10") == 0.25


def test_no_query_to_score_is_an_error_and_not_nan() -> None:
    with pytest.raises(ConfigError, match="nothing to average"):
        rank_metrics({"q": {}}, {"q": ["a"]}).mean()


def test_a_negative_grade_is_not_relevant() -> None:
    assert of({"a": 1, "b": -1}, ["b", "a"]) == of({"a": 1}, ["b", "a"])


def test_a_grade_whose_gain_the_evaluator_cannot_hold_is_refused() -> None:
    assert of({"a": 20}, ["b", "a"])["ndcg_at_10"] == pytest.approx(1 / math.log2(3))
    with pytest.raises(ConfigError, match="grade 100: expected 20 or less"):
        of({"a": 100}, ["b", "a"])


@pytest.mark.parametrize("ids", [["a", "b", "c", "d"], ["d", "c", "b", "a"], ["10", "9", "1", "2"]])
def test_the_order_given_is_the_order_scored_whatever_the_names(ids: list[str]) -> None:
    # An evaluator that sorts equal scores by name would lift or sink the relevant passage.
    for place in range(4):
        assert of({ids[place]: 1}, ids)["mrr_at_10"] == pytest.approx(1 / (place + 1))


def by_numpy(grades: dict[str, int], ranking: list[str]) -> tuple[float, ...]:
    """nDCG@10, R@10, R@100, RR@10, AP@100 from their definitions."""
    gains = np.array([2.0 ** grades.get(passage, 0) - 1 for passage in ranking])
    hits = gains > 0
    relevant = sum(grade > 0 for grade in grades.values())
    ideal = np.sort([2.0**grade - 1 for grade in grades.values()])[::-1][:10]
    discount = 1 / np.log2(np.arange(2, 12))
    precision = np.cumsum(hits) / np.arange(1, len(ranking) + 1)
    first = np.flatnonzero(hits[:10])
    return (
        float((gains[:10] * discount[: len(gains[:10])]).sum() / (ideal * discount[: len(ideal)]).sum()),
        float(hits[:10].sum() / relevant),
        float(hits[:100].sum() / relevant),
        float(1 / (first[0] + 1)) if len(first) else 0.0,
        float((precision * hits)[:100].sum() / relevant),
    )


def test_random_rankings_agree_with_numpy() -> None:
    rng = np.random.default_rng(5)
    passages = [f"p{i}" for i in range(150)]
    qrels, run = {}, {}
    for query in map(str, range(40)):
        judged = rng.choice(passages, rng.integers(1, 30), replace=False)
        grades = {str(passage): int(rng.integers(0, 4)) for passage in judged}
        qrels[query] = grades | {str(judged[0]): 3}
        run[query] = [str(p) for p in rng.permutation(passages)[: rng.integers(1, 150)]]
    found = rank_metrics(qrels, run)
    for query in qrels:
        ours = [found.per_query[metric][query] for metric in METRICS]
        assert ours == pytest.approx(by_numpy(qrels[query], run[query]), abs=1e-9)
        assert all(0 <= score <= 1 for score in ours)


# --- paired comparisons


def series(values: np.ndarray | list[float]) -> dict[str, float]:
    return {f"q{i:03}": float(value) for i, value in enumerate(values)}


def exact_p(difference: np.ndarray) -> float:
    """Share of all sign flips whose mean is at least as far from 0."""
    flips = np.array(list(itertools.product((1, -1), repeat=len(difference))))
    means = np.abs(flips @ difference)
    return float(np.mean(means >= abs(difference.sum()) - 1e-12))


BASE = np.random.default_rng(0).uniform(0, 0.7, 50)
RAISED = BASE + np.where(np.arange(50) < 40, 0.2, 0.0)


def test_identical_series_give_no_evidence() -> None:
    found = compare(series(BASE), series(BASE))
    assert (found.verdict, found.difference, found.low, found.high, found.p_value) == (
        "no evidence",
        0,
        0,
        0,
        1,
    )
    assert (found.n, found.wins, found.ties, found.losses) == (50, 0, 50, 0)


def test_a_gain_on_40_of_50_queries_is_evidence_either_way_round() -> None:
    found = compare(series(RAISED), series(BASE))
    assert (found.verdict, found.n, found.wins, found.ties, found.losses) == ("better", 50, 40, 10, 0)
    assert found.difference == pytest.approx(0.16)
    # The mean of 50 draws of 0 or 0.2 at odds 1:4 has standard error 0.2 * sqrt(0.16 / 50).
    error = 0.2 * math.sqrt(0.8 * 0.2 / 50)
    assert found.low == pytest.approx(0.16 - 1.96 * error, abs=0.005)
    assert found.high == pytest.approx(0.16 + 1.96 * error, abs=0.005)
    assert found.p_value < 0.001
    back = compare(series(BASE), series(RAISED))
    assert (back.verdict, back.wins, back.losses) == ("worse", 0, 40)
    assert back.difference == pytest.approx(-0.16)


def test_noise_around_zero_is_no_evidence() -> None:
    noise = np.tile([0.1, -0.1], 25)
    found = compare(series(BASE + noise), series(BASE))
    assert (found.verdict, found.wins, found.losses) == ("no evidence", 25, 25)
    assert found.low < 0 < found.high


def test_different_queries_cannot_be_paired() -> None:
    with pytest.raises(ConfigError, match=r"same queries .* 3 and 2 .*'q002'"):
        compare(series([0.1, 0.2, 0.3]), series([0.1, 0.2]))
    with pytest.raises(ConfigError, match="same queries"):
        compare({"a": 0.1}, {"b": 0.1})
    with pytest.raises(ConfigError, match="0 and 0"):
        compare({}, {})


@pytest.mark.parametrize(("n", "verdict"), [(4, "too few queries"), (19, "too few queries"), (20, "better")])
def test_a_verdict_needs_20_queries(n: int, verdict: str) -> None:
    gains = np.linspace(0.2, 0.3, n)
    assert compare(series(gains), series(np.zeros(n))).verdict == verdict


def test_same_seed_same_report() -> None:
    noisy = series(BASE + np.random.default_rng(1).normal(0, 0.1, 50))
    first = compare(noisy, series(BASE), seed=3)
    reordered = dict(sorted(noisy.items(), reverse=True))
    assert compare(reordered, series(BASE), seed=3) == first
    assert compare(noisy, series(BASE), seed=4) != first


@pytest.mark.parametrize("seed", range(4))
def test_p_value_of_few_queries_is_that_of_all_sign_flips(seed: int) -> None:
    difference = np.random.default_rng(seed).normal(0.05, 0.1, 10)
    found = compare(series(difference), series(np.zeros(10)))
    assert found.p_value == pytest.approx(exact_p(difference), abs=1e-12)


def test_p_value_of_many_queries_is_close_to_all_sign_flips() -> None:
    difference = np.random.default_rng(7).normal(0.04, 0.1, 16)
    found = compare(series(difference), series(np.zeros(16)))
    assert found.p_value == pytest.approx(exact_p(difference), abs=0.02)


def test_equal_differences_have_a_point_as_interval_and_an_exact_p_value() -> None:
    found = compare(series([0.25] * 24), series([0.0] * 24))
    assert (found.low, found.high, found.verdict) == (0.25, 0.25, "better")
    assert found.p_value == 2 / 2**24
    assert compare(series([0.25] * 3), series([0.0] * 3)).p_value == exact_p(np.full(3, 0.25)) == 0.25
    alone = compare({"q": 0.5}, {"q": 0.25})
    assert (alone.n, alone.difference, alone.p_value, alone.verdict) == (1, 0.25, 1.0, "too few queries")
