"""Judged metrics: a generator's answers, RAGAS's metrics on them, and a reason for every missing score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rag_embfilter.errors import ConfigError
from rag_embfilter.judge.adapters import Embed, parsing, ragas_embeddings, ragas_llm
from rag_embfilter.judge.endpoint import Asking, Endpoint, EndpointSpec, NoAnswer
from rag_embfilter.judge.scores import (
    NO_REFERENCE,
    Answer,
    JudgedMetric,
    Judgement,
    checked,
    import_ragas,
    run_apart,
)

if TYPE_CHECKING:
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.eval_set import EvalSet

Rankings = Mapping[str, Sequence[str]]
PROMPT = """\
Answer the question from the passages below, in a few sentences and in the question's language. \
Say only what the passages say; if they do not answer the question, say that you do not know.

{passages}

Question: {question}
Answer:"""


@dataclass(frozen=True)
class Kind:
    """A judged metric: its class in `ragas.metrics.collections`, what it is given, and its lowest score."""

    ragas: str
    needs: tuple[str, ...]
    low: float = 0.0


JUDGED = {
    "context_precision": Kind("ContextPrecision", ("user_input", "reference", "retrieved_contexts")),
    "context_recall": Kind("ContextRecall", ("user_input", "reference", "retrieved_contexts")),
    "faithfulness": Kind("Faithfulness", ("user_input", "response", "retrieved_contexts")),
    # A mean cosine, which may be negative.
    "answer_relevancy": Kind("AnswerRelevancy", ("user_input", "response"), low=-1.0),
    "factual_correctness": Kind("FactualCorrectness", ("response", "reference")),
}


@dataclass(frozen=True)
class Judging:
    """What is judged, and by whom.

    Attributes:
        judge: who scores.
        generator: who answers; the judge itself when None.
        metrics: names from `JUDGED`; None takes all that an eval set allows.
        top_k: passages that are judged, and that the generator sees.
        asking: how both are asked.
    """

    judge: EndpointSpec
    generator: EndpointSpec | None = None
    metrics: tuple[str, ...] | None = None
    top_k: int = 5
    asking: Asking = field(default_factory=Asking)

    def __post_init__(self) -> None:
        for name in self.metrics or ():
            if name not in JUDGED:
                raise ConfigError(f"judged metric {name!r}: expected some of {', '.join(JUDGED)}.")
        if self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k}: expected 1 or more.")

    @property
    def answering(self) -> EndpointSpec:
        """Who answers."""
        return self.generator or self.judge

    def names(self, eval_set: EvalSet) -> tuple[str, ...]:
        """The metrics for an eval set. Raises `ConfigError` when a metric asked for needs what it lacks."""
        if any(eval_set.answers.values()):
            return self.metrics or tuple(JUDGED)
        for name in self.metrics or ():
            if "reference" in JUDGED[name].needs:
                raise ConfigError(
                    f"{name} needs reference answers, and eval set {eval_set.name!r} has none. Add "
                    'them ("metadata": {"answers": [...]} in queries.jsonl), or leave the metric out.'
                )
        return self.metrics or tuple(name for name in JUDGED if "reference" not in JUDGED[name].needs)


@dataclass(frozen=True)
class Judged:
    """Judgements of several configurations, and what they cost: endpoint -> calls and tokens."""

    rows: Mapping[str, Judgement]
    usage: Mapping[str, Mapping[str, int]]


def judge_runs(
    eval_set: EvalSet,
    runs: Mapping[str, Rankings],
    judging: Judging,
    embed: Embed,
    progress: Callable[[int], None] | None = None,
) -> Judged:
    """Answer and judge the questions of an eval set, once per configuration.

    For each question the generator sees the first `top_k` passages, and RAGAS's metrics score what it was
    shown and what it said. Equal prompts are asked once, whichever configuration they come from. Every
    score that cannot be had is a failure with its reason. Works inside a running event loop.

    Args:
        eval_set: passages, questions and reference answers.
        runs: configuration -> query id -> passage ids, best first.
        judging: what is judged, and by whom.
        embed: questions to unit vectors `[n, dim]`; one for all configurations, so that they compare.
        progress: called with the number of questions judged since the last call.

    Raises `MissingExtraError` without RAGAS, `ConfigError` for settings that do not fit the set.
    """
    import_ragas()
    names = judging.names(eval_set)
    return run_apart(_judge_runs(eval_set, runs, judging, names, embed, progress))


def question_embedder(encoder: Encoder) -> Embed:
    """Questions through an encoder and its `edge` filter at 2, for `answer_relevancy`."""
    from rag_embfilter.filters import EmbFilter

    embfilter = EmbFilter.from_encoder(encoder, "edge", 2)
    return lambda texts: embfilter.apply(encoder.encode_queries(list(texts)), role="query")


async def _judge_runs(
    eval_set: EvalSet,
    runs: Mapping[str, Rankings],
    judging: Judging,
    names: Sequence[str],
    embed: Embed,
    progress: Callable[[int], None] | None,
) -> Judged:
    async with AsyncExitStack() as stack:
        specs = dict.fromkeys([judging.judge, judging.answering])
        endpoints = {s: await stack.enter_async_context(Endpoint(s, judging.asking)) for s in specs}
        embedder = ragas_embeddings(embed, stack.enter_context(ThreadPoolExecutor(1)))
        llm = ragas_llm(parsing(endpoints[judging.judge]))
        metrics = {name: ragas_metric(name, llm, embedder) for name in names}
        bench = _Bench(eval_set, judging.top_k, metrics, endpoints[judging.answering])

        async def one(row: str, query: str) -> tuple[Answer, dict[str, float | str]]:
            found = await bench.question(query, runs[row].get(query, []))
            if progress:
                progress(1)
            return found

        asked = [(row, query) for row in runs for query in eval_set.queries]
        found = dict(zip(asked, await asyncio.gather(*(one(*each) for each in asked)), strict=True))
        rows = {}
        for row in runs:
            of_row = {query: found[row, query] for query in eval_set.queries}
            scores = {n: JudgedMetric.of((q, values[n]) for q, (_, values) in of_row.items()) for n in names}
            answers = {q: answer for q, (answer, _) in of_row.items()} if needs_answers(names) else {}
            rows[row] = Judgement(scores, answers)
        return Judged(rows, {str(s): asdict(endpoint.usage) for s, endpoint in endpoints.items()})


class _Bench:
    """One question at a time: its answer, then its scores."""

    def __init__(
        self, eval_set: EvalSet, top_k: int, metrics: Mapping[str, Any], generator: Endpoint
    ) -> None:
        self.eval_set, self.top_k, self.metrics, self.generator = eval_set, top_k, metrics, generator
        self.passages = eval_set.passages()

    async def question(self, query: str, ranking: Sequence[str]) -> tuple[Answer, dict[str, float | str]]:
        """The answer, and metric -> score or reason."""
        shown = tuple(dict.fromkeys(ranking))[: self.top_k]
        contexts = [self.passages[key] for key in shown]
        asked = self.eval_set.queries[query]
        answer = Answer("", shown)
        if needs_answers(self.metrics):
            answer = await self._answer(asked, shown, contexts)
        sample = {
            "user_input": asked,
            "retrieved_contexts": contexts,
            "reference": reference(self.eval_set, query),
            "response": answer.text,
        }
        values = await asyncio.gather(*(self._score(name, sample, answer) for name in self.metrics))
        return answer, dict(zip(self.metrics, values, strict=True))

    async def _answer(self, asked: str, shown: tuple[str, ...], contexts: Sequence[str]) -> Answer:
        if not shown:
            return Answer("", shown, "no passage retrieved")
        try:
            return Answer((await self.generator.ask(answer_prompt(asked, contexts))).text, shown)
        except NoAnswer as error:
            return Answer("", shown, str(error))

    async def _score(self, name: str, sample: Mapping[str, Any], answer: Answer) -> float | str:
        kind = JUDGED[name]
        if "reference" in kind.needs and not sample["reference"]:
            return NO_REFERENCE
        if "response" in kind.needs and answer.failure:
            return f"no answer to judge: {answer.failure}"
        if "retrieved_contexts" in kind.needs and not sample["retrieved_contexts"]:
            return 0.0  # as in `id_metrics`
        try:
            result = await self.metrics[name].ascore(**{need: sample[need] for need in kind.needs})
        except NoAnswer as error:
            return str(error)
        except Exception as error:
            # RAGAS's metrics meet whatever a judge says; what they do not expect is one question's failure.
            return f"ragas raised {type(error).__name__}"
        return checked(result.value, kind.low)


def needs_answers(names: Mapping[str, Any] | Sequence[str]) -> bool:
    """Whether any of these metrics judges answers."""
    return any("response" in JUDGED[name].needs for name in names)


def reference(eval_set: EvalSet, query: str) -> str:
    """The first reference answer; empty when there is none."""
    return next((answer for answer in eval_set.answers.get(query, []) if answer.strip()), "")


def answer_prompt(question: str, passages: Sequence[str]) -> str:
    """What the generator is asked."""
    numbered = "\n\n".join(f"Passage {i}:\n{text}" for i, text in enumerate(passages, 1))
    return PROMPT.format(passages=numbered, question=question)


def ragas_metric(name: str, llm: Any, embeddings: Any) -> Any:
    """RAGAS's metric of this name.

    Answer relevancy asks for one question, not three: at temperature 0 all three would be the same.
    """
    import ragas.metrics.collections as collections

    if name == "answer_relevancy":
        return collections.AnswerRelevancy(llm=llm, embeddings=embeddings, strictness=1)
    return getattr(collections, JUDGED[name].ragas)(llm=llm)
