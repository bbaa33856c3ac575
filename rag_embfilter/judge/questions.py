"""Questions that a model writes for passages, as drafts of an evaluation set."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rag_embfilter.drafting import Draft
from rag_embfilter.errors import ConfigError
from rag_embfilter.eval_set import Passage
from rag_embfilter.judge.endpoint import Asking, Endpoint, EndpointSpec, NoAnswer
from rag_embfilter.judge.scores import run_apart
from rag_embfilter.nodes import passage_text

PROMPT = """You write test questions for a search engine. Below is one passage of its documents. Write one \
question that a user would type who does not know the passage, and that the passage answers. Use words \
of everyday, name the situation, do not copy phrases of the passage and do not speak of "the passage". Write \
in the passage's language. Then answer it in one sentence from the passage.

Reply with JSON only: {{"question": "...", "answer": "..."}}

Passage:
{passage}
"""
OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def written_drafts(
    passages: Mapping[str, Passage],
    asked: Sequence[str],
    spec: EndpointSpec,
    asking: Asking,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Draft], Counter[str]]:
    """One question for each passage asked for, by its id; and why there is none for others, reason -> count.

    Raises `ConfigError` when no question came at all, `MissingExtraError` without the `[eval]` extra.
    """

    async def all_of_them() -> list[Draft | str]:
        async with Endpoint(spec, asking) as endpoint:
            return await asyncio.gather(*(one(endpoint, key) for key in asked))

    async def one(endpoint: Endpoint, key: str) -> Draft | str:
        passage = passages[key]
        try:
            reply = await endpoint.ask(PROMPT.format(passage=passage_text(passage.title, passage.text)))
            return _draft(key, reply.text)
        except NoAnswer as reason:
            return str(reason)
        finally:
            if progress is not None:
                progress(1)

    found = run_apart(all_of_them())
    drafts = [each for each in found if isinstance(each, Draft)]
    failures = Counter(each for each in found if isinstance(each, str))
    if not drafts:
        reasons = ", ".join(f"{reason} ({n})" for reason, n in failures.most_common())
        raise ConfigError(f"{spec} wrote no question for {len(asked)} passages: {reasons}.")
    return drafts, failures


def _draft(key: str, reply: str) -> Draft:
    """A reply as a draft. Raises `NoAnswer` when it is not what was asked for."""
    found = OBJECT.search(reply)
    try:
        written = json.loads(found[0] if found else "")
        question, answer = (" ".join(str(written[name]).split()) for name in ("question", "answer"))
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswer("unparseable answer") from error
    if not question:
        raise NoAnswer("empty answer")
    return Draft(question, key, answer)
