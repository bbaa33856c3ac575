"""Counting a judge's calls without one: RAGAS's metrics run on stand-ins that cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.judge.adapters import ragas_embeddings, ragas_llm
from rag_embfilter.judge.llm import JUDGED, Judging, answer_prompt, needs_answers, ragas_metric, reference
from rag_embfilter.judge.scores import import_ragas, run_apart

if TYPE_CHECKING:
    from rag_embfilter.eval_set import EvalSet

GENERATOR = "generator"
BYTES_PER_TOKEN = 4  # of English text; other scripts take more bytes a character, and more tokens too
STAND_IN = "What the passages say about it, put into a sentence or two of some fifteen words each. " * 2


@dataclass
class Count:
    """Calls of the generator or of one metric.

    Attributes:
        calls: prompts, at most: equal ones are asked once, cached ones not at all, and a metric stops at a
            failure.
        prompt_tokens: about as many tokens are in them.
    """

    calls: int = 0
    prompt_tokens: int = 0

    def add(self, prompt: str) -> None:
        """One more prompt."""
        self.calls += 1
        self.prompt_tokens += len(prompt.encode(errors="replace")) // BYTES_PER_TOKEN


def count_calls(eval_set: EvalSet, judging: Judging, rows: int) -> dict[str, Count]:
    """What judging `rows` configurations would ask: `generator` or metric -> calls and tokens.

    Nothing is embedded and nobody is asked. Which passages will be retrieved is not known, so one of mean
    length stands for each; an answer of thirty words stands for the generator's.

    Raises as `judge_runs`.
    """
    import_ragas()
    return run_apart(_count(eval_set, judging, judging.names(eval_set), rows))


async def _count(eval_set: EvalSet, judging: Judging, names: Sequence[str], rows: int) -> dict[str, Count]:
    counts = {name: Count() for name in ([GENERATOR] if needs_answers(names) else []) + list(names)}
    texts = list(eval_set.passages().values())
    mean = sum(map(len, texts)) / len(texts)
    shown = [min(texts, key=lambda text: abs(len(text) - mean))] * min(judging.top_k, len(texts))
    with ThreadPoolExecutor(1) as pool:
        embedder = ragas_embeddings(_no_vectors, pool)
        metrics = {name: ragas_metric(name, _counting(counts[name]), embedder) for name in names}
        for query, question in eval_set.queries.items():
            if GENERATOR in counts:
                counts[GENERATOR].add(answer_prompt(question, shown))
            sample = {
                "user_input": question,
                "retrieved_contexts": shown,
                "reference": reference(eval_set, query),
                "response": STAND_IN,
            }
            for name, metric in metrics.items():
                given = {need: sample[need] for need in JUDGED[name].needs}
                if all(given.values()):
                    await metric.ascore(**given)
    for count in counts.values():
        count.calls *= rows
        count.prompt_tokens *= rows
    return counts


def _no_vectors(texts: Sequence[str]) -> NDArray[np.float32]:
    return np.ones((len(texts), 1), dtype=np.float32)


def _counting(count: Count) -> Any:
    """An LLM that counts what it is asked and answers in the form that is wanted."""

    async def generate(prompt: str, response_model: Any) -> Any:
        count.add(prompt)
        return _filled(response_model)

    return ragas_llm(generate)


def _filled(kind: Any) -> Any:
    """A value of a pydantic class, list, text or number, with one item in each list."""
    if get_origin(kind) is list:
        return [_filled(get_args(kind)[0])]
    if kind is str:
        return STAND_IN
    if hasattr(kind, "model_fields"):
        return kind(**{name: _filled(field.annotation) for name, field in kind.model_fields.items()})
    return 1
