"""RAGAS: its metrics over our retrievals. The only package that imports ragas, and only when asked to."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rag_embfilter.errors import ConfigError, MissingExtraError
from rag_embfilter.judge.dry_run import Count, count_calls
from rag_embfilter.judge.endpoint import Asking, EndpointSpec
from rag_embfilter.judge.llm import JUDGED, Judged, Judging, judge_runs, question_embedder
from rag_embfilter.judge.scores import Answer, JudgedMetric, Judgement, checked, import_ragas, run_apart

if TYPE_CHECKING:
    from rag_embfilter.eval_set import EvalSet

logger = logging.getLogger(__name__)

__all__ = [
    "ID_METRICS",
    "JUDGED",
    "TEXT_METRICS",
    "Answer",
    "Asking",
    "Count",
    "EndpointSpec",
    "JudgedMetric",
    "Judged",
    "Judgement",
    "Judging",
    "available",
    "count_calls",
    "id_metrics",
    "judge_runs",
    "question_embedder",
    "text_metrics",
    "unjudged_metrics",
]

ID_METRICS = ("id_based_context_precision", "id_based_context_recall")
TEXT_METRICS = ("non_llm_context_precision_with_reference", "non_llm_context_recall")
Score = Callable[[Sequence[str], Sequence[str]], Awaitable[object]]


def available() -> str | None:
    """None when RAGAS can be used, else the reason why not."""
    try:
        import_ragas()
    except MissingExtraError as error:
        return str(error)
    return None


def id_metrics(
    qrels: Mapping[str, Mapping[str, int]], run: Mapping[str, Sequence[str]], k: int = 10
) -> dict[str, JudgedMetric]:
    """RAGAS's id-based context precision and recall of the first `k` passages; no judge, no network.

    Precision is over the passages retrieved, recall over those of grade 1 or more. Ids are compared as
    text, and a passage retrieved twice counts once, as in `rank_metrics`. A question with no passage
    retrieved counts 0 in both; one without relevant passages is a failure. Works inside a running event
    loop. Raises `MissingExtraError` when RAGAS is absent or broken.
    """
    ragas = import_ragas()
    makers = _legacy("IDBasedContextPrecision", "IDBasedContextRecall")

    def scorer(make: Any) -> Score:
        return lambda found, relevant: make().single_turn_ascore(
            ragas.SingleTurnSample(retrieved_context_ids=found, reference_context_ids=relevant)
        )

    return _over_questions(qrels, run, k, dict(zip(ID_METRICS, map(scorer, makers), strict=True)))


def text_metrics(
    passages: Mapping[str, str],
    qrels: Mapping[str, Mapping[str, int]],
    run: Mapping[str, Sequence[str]],
    k: int = 10,
) -> dict[str, JudgedMetric]:
    """RAGAS's non-LLM context precision and recall: as `id_metrics`, by the likeness of texts.

    A passage counts as right when its edit distance to a relevant one says that they are alike (0.5 or
    more), so copies of a passage are as good as itself. Needs `rapidfuzz`, which the extra `eval` brings.

    Args:
        passages: passage id -> text.
        qrels, run, k: as for `id_metrics`.

    Raises `MissingExtraError` when RAGAS or rapidfuzz is absent or broken.
    """
    ragas = import_ragas()
    precision, recall, similarity = _legacy(
        "NonLLMContextPrecisionWithReference", "NonLLMContextRecall", "NonLLMStringSimilarity"
    )
    try:
        alike = _Likeness(similarity())
    except ImportError as error:
        raise MissingExtraError(
            f"{error}; `pip install 'rag-embfilter[eval]'` brings it. Id-based metrics work without."
        ) from error

    def scorer(metric: Any) -> Score:
        return lambda found, relevant: metric.single_turn_ascore(
            ragas.SingleTurnSample(
                retrieved_contexts=[passages[key] for key in found],
                reference_contexts=[passages[key] for key in relevant],
            )
        )

    made = (precision(distance_measure=alike), recall(_distance_measure=alike))
    return _over_questions(qrels, run, k, dict(zip(TEXT_METRICS, map(scorer, made), strict=True)))


def _over_questions(
    qrels: Mapping[str, Mapping[str, int]],
    run: Mapping[str, Sequence[str]],
    k: int,
    scorers: Mapping[str, Score],
) -> dict[str, JudgedMetric]:
    """Each question's first `k` passages and relevant ones through each scorer."""
    if k < 1:
        raise ConfigError(f"k {k}: expected 1 or more.")
    judged = {str(query): grades for query, grades in qrels.items()}
    ranked = {str(query): list(dict.fromkeys(map(str, passages))) for query, passages in run.items()}

    async def score(query: str, scorer: Score) -> float | str:
        relevant = [str(passage) for passage, grade in judged[query].items() if grade > 0]
        found = ranked.get(query, [])[:k]
        if not relevant:
            return "no relevant passage"
        return checked(await scorer(found, relevant)) if found else 0.0

    async def score_all() -> dict[str, JudgedMetric]:
        return {
            name: JudgedMetric.of([(query, await score(query, scorer)) for query in judged])
            for name, scorer in scorers.items()
        }

    return run_apart(score_all())


def unjudged_metrics(
    eval_set: EvalSet, run: Mapping[str, Sequence[str]], k: int = 10
) -> dict[str, JudgedMetric]:
    """What RAGAS says of a retrieval without a judge: `id_metrics`, and `text_metrics` where they can run."""
    found = id_metrics(eval_set.qrels, run, k)
    try:
        return found | text_metrics(eval_set.passages(), eval_set.qrels, run, k)
    except MissingExtraError as error:
        logger.warning("RAGAS's non-LLM context metrics are left out: %s", error)
        return found


class _Likeness:
    """RAGAS's string similarity, asked once for each pair: filters retrieve much the same passages."""

    def __init__(self, similarity: Any) -> None:
        self.similarity = similarity
        self.known: dict[tuple[str, str], float] = {}

    async def single_turn_ascore(self, sample: Any, callbacks: Any = None) -> float:
        pair = (sample.reference, sample.response)
        if pair not in self.known:
            self.known[pair] = await self.similarity._single_turn_ascore(sample, callbacks)
        return self.known[pair]


def _legacy(*names: str) -> tuple[Any, ...]:
    """Metrics that RAGAS has under their old names only."""
    import ragas.metrics

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuple(getattr(ragas.metrics, name) for name in names)
