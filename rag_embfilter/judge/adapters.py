"""What RAGAS's metrics ask of an LLM and of embeddings, from an endpoint and an encoder of ours."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.judge.endpoint import Endpoint, NoAnswer

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
Generate = Callable[[str, Any], Awaitable[Any]]
UNPARSEABLE = "unparseable answer"


def ragas_llm(generate: Generate) -> Any:
    """An LLM for RAGAS's metrics from one function: (prompt, pydantic class) to an instance of it.

    RAGAS's own goes through `instructor`, which asks again when an answer does not parse, and by function
    calls, which many local servers do not know. RAGAS's prompts hold the JSON schema and examples already.
    """
    from ragas.llms.base import InstructorBaseRagasLLM

    class Llm(InstructorBaseRagasLLM):
        def generate(self, prompt: str, response_model: Any) -> Any:
            raise NotImplementedError("judging is asynchronous")

        async def agenerate(self, prompt: str, response_model: Any) -> Any:
            return await generate(prompt, response_model)

    return Llm()


def ragas_embeddings(embed: Embed, pool: ThreadPoolExecutor) -> Any:
    """Embeddings for RAGAS's metrics from ours, in a pool of one thread, so that requests go on meanwhile."""
    from ragas.embeddings.base import BaseRagasEmbedding

    class Embeddings(BaseRagasEmbedding):
        def embed_text(self, text: str, **options: Any) -> list[float]:
            return self.embed_texts([text])[0]

        def embed_texts(self, texts: list[str], **options: Any) -> list[list[float]]:
            vectors: list[list[float]] = embed(texts).tolist()
            return vectors

        async def aembed_text(self, text: str, **options: Any) -> list[float]:
            return (await self.aembed_texts([text]))[0]

        async def aembed_texts(self, texts: list[str], **options: Any) -> list[list[float]]:
            return await asyncio.get_running_loop().run_in_executor(pool, self.embed_texts, texts)

    return Embeddings()


def parsing(judge: Endpoint) -> Generate:
    """Asks a judge and reads its answer."""

    async def generate(prompt: str, response_model: Any) -> Any:
        reply = await judge.ask(prompt)
        parsed = parse(reply.text, response_model)
        if parsed is None:
            raise NoAnswer(judge.cut_reason if reply.cut else UNPARSEABLE)
        return parsed

    return generate


def parse(text: str, response_model: Any) -> Any:
    """The first JSON object in a text that fits a pydantic class; None when none does.

    RAGAS's own search counts braces, also those inside strings. All whole numbers in its answers are
    verdicts, so others than 0 and 1 do not fit.
    """
    decoder = json.JSONDecoder(strict=False)
    for brace in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, brace.start())
            if _verdicts(value) <= {0, 1}:
                return response_model.model_validate(value)
        except (ValueError, RecursionError):
            continue
    return None


def _verdicts(value: Any) -> set[int]:
    """All whole numbers in a JSON value."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return set().union(*map(_verdicts, inner))
    return {value} if isinstance(value, int) else set()
