"""An OpenAI-compatible endpoint: each prompt asked once, few at a time, answers kept on disk."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import os
import re
import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rag_embfilter.errors import ConfigError

logger = logging.getLogger(__name__)

OPENAI = "https://api.openai.com/v1"
SPEC = re.compile(r"openai:(?P<model>\S+?)(?:@(?P<url>https?://\S+))?")
KEY = "OPENAI_API_KEY"
# By the openai client, on 408, 409, 429, 5xx, time-outs and lost connections; it honours Retry-After.
RETRIES = 2
LONGEST_PAUSE = 60  # seconds that it waits at most between two tries
THINKING_ENDS = "</think>"


class NoAnswer(Exception):  # noqa: N818 - it never leaves the judge; its text is the reason that is counted
    """A prompt has no answer that can be used."""


@dataclass(frozen=True)
class EndpointSpec:
    """Who is asked: a model at an OpenAI-compatible address."""

    model: str
    url: str = OPENAI

    @classmethod
    def parse(cls, text: str) -> EndpointSpec:
        """Read `openai:MODEL` or `openai:MODEL@URL`. Raises `ConfigError`, also for keys in the address."""
        found = SPEC.fullmatch(text)
        parts = urlsplit((found and found["url"]) or OPENAI)
        if parts.username or parts.password or parts.query or "@" in parts.netloc:
            raise ConfigError(
                f"judge or generator at {parts.hostname!r}: expected an address without user, password or "
                f"query, since it is written into results. A key goes into {KEY}."
            )
        if found is None or not parts.hostname:
            raise ConfigError(
                f"judge or generator {text!r}: expected openai:MODEL, or openai:MODEL@URL for another "
                "server, as in openai:llama3.2@http://localhost:11434/v1."
            )
        return cls(found["model"], (found["url"] or OPENAI).rstrip("/"))

    def __str__(self) -> str:
        return f"openai:{self.model}" + ("" if self.url == OPENAI else f"@{self.url}")

    def key(self) -> str:
        """The key from `OPENAI_API_KEY`; servers at other addresses may need none.

        Raises `ConfigError` when api.openai.com is to be asked without one.
        """
        key = os.environ.get(KEY, "")
        if not key and self.url == OPENAI:
            raise ConfigError(f"{self} needs a key: set {KEY}, or name a server of yours (openai:MODEL@URL).")
        if key and self.url.startswith("http:") and not _this_machine(urlsplit(self.url).hostname or ""):
            logger.warning("%s goes to %s unencrypted; use https", KEY, self.url)
        return key or "none"


@dataclass(frozen=True)
class Asking:
    """How an endpoint is asked.

    Attributes:
        concurrency: requests at a time.
        timeout: seconds for one request.
        max_tokens: longest answer.
        cache: folder of answers; None keeps none.
    """

    concurrency: int = 4
    timeout: float = 60.0
    max_tokens: int = 1024
    cache: Path | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "timeout", "max_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name)}: expected more than 0.")


@dataclass(frozen=True)
class Reply:
    """An answer, and whether it ended because it was too long."""

    text: str
    cut: bool = False


@dataclass
class Usage:
    """What was asked so far; tokens as the server counts them, 0 where it does not."""

    calls: int = 0
    from_cache: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Endpoint:
    """Asks prompts, each once in its life and once per cache; `async with` closes it.

    Refusals, empty answers and errors are not cached. An endpoint that has never answered and says that
    the key or the model is wrong (401, 404), or nothing at all, is not asked again: what is left fails for
    the same reason.
    """

    def __init__(self, spec: EndpointSpec, asking: Asking) -> None:
        import openai

        self.spec, self.asking, self.usage = spec, asking, Usage()
        self._client = openai.AsyncOpenAI(
            api_key=spec.key(), base_url=spec.url, timeout=asking.timeout, max_retries=RETRIES
        )
        self._parameters = _parameters(spec.model, asking.max_tokens)
        self._slots = asyncio.Semaphore(asking.concurrency)
        self._asked: dict[str, asyncio.Task[Reply]] = {}
        self._given_up: str | None = None
        self._answered = False
        self._cache = None if asking.cache is None else _open_cache(asking.cache)

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()
        if self._cache is not None:
            self._cache.cache.close()

    async def ask(self, prompt: str) -> Reply:
        """The answer to a prompt. Raises `NoAnswer` with the reason there is none."""
        if prompt not in self._asked:
            self._asked[prompt] = asyncio.ensure_future(self._ask(prompt))
        return await self._asked[prompt]

    async def _ask(self, prompt: str) -> Reply:
        key = self._cache_key(prompt)
        if (kept := self._kept(key)) is not None:
            self.usage.from_cache += 1
            return kept
        async with self._slots:
            if self._given_up:
                raise NoAnswer(self._given_up)
            self.usage.calls += 1
            reply = await self._request(prompt)
        self._keep(key, reply)
        return reply

    async def _request(self, prompt: str) -> Reply:
        import openai

        patience = (RETRIES + 1) * self.asking.timeout + RETRIES * LONGEST_PAUSE
        try:
            # The client's own limit starts anew with every byte, which a server can stretch for ever.
            async with asyncio.timeout(patience):
                completion = await self._client.chat.completions.create(
                    model=self.spec.model, messages=[{"role": "user", "content": prompt}], **self._parameters
                )
        except (openai.APITimeoutError, TimeoutError) as error:
            raise NoAnswer("time-out") from error
        except openai.APIConnectionError as error:
            raise self._failed("no connection", final=True) from error
        except openai.APIStatusError as error:
            raise self._failed(f"HTTP {error.status_code}", final=error.status_code in (401, 404)) from error
        except (openai.OpenAIError, ValueError) as error:
            raise NoAnswer("no chat completion") from error
        self._answered = True
        return self._read(completion)

    def _failed(self, reason: str, final: bool) -> NoAnswer:
        if final and not self._answered and self._given_up is None:
            self._given_up = reason
            logger.warning("%s: %s; it is not asked again", self.spec, reason)
        return NoAnswer(reason)

    def _read(self, completion: Any) -> Reply:
        """What a completion says. Servers differ in what they leave out."""
        try:
            choice = completion.choices[0]
            content, refusal = choice.message.content, choice.message.refusal
        except (AttributeError, IndexError, TypeError) as error:
            raise NoAnswer("no chat completion") from error
        for name in ("prompt_tokens", "completion_tokens"):
            count = getattr(completion.usage, name, None)
            setattr(self.usage, name, getattr(self.usage, name) + (count if isinstance(count, int) else 0))
        if refusal or choice.finish_reason == "content_filter":
            raise NoAnswer("refused")
        cut = choice.finish_reason == "length"
        text = content if isinstance(content, str) else ""
        text = text.rpartition(THINKING_ENDS)[2].strip()
        if not text:
            raise NoAnswer(self.cut_reason if cut else "empty answer")
        return Reply(text, cut)

    @property
    def cut_reason(self) -> str:
        """Why an answer that was too long cannot be used."""
        return f"cut at {self.asking.max_tokens} tokens"

    def _cache_key(self, prompt: str) -> str:
        asked = [self.spec.url, self.spec.model, self._parameters, prompt]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def _kept(self, key: str) -> Reply | None:
        found = None if self._cache is None else self._cache.get(key)
        return None if found is None else Reply(**json.loads(found))

    def _keep(self, key: str, reply: Reply) -> None:
        if self._cache is None:
            return
        try:
            self._cache.set(key, json.dumps(asdict(reply)))
        except (OSError, sqlite3.Error) as error:  # a cache that cannot be written costs calls, nothing else
            logger.warning("answers are no longer cached: %s", error)
            self._cache = None


def _open_cache(folder: Path) -> Any:
    from ragas.cache import DiskCacheBackend

    try:
        return DiskCacheBackend(str(folder))
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"cache of answers {str(folder)!r}: {error}. Repair or delete it, or use --no-judge-cache."
        ) from error


def _parameters(model: str, max_tokens: int) -> dict[str, Any]:
    """Temperature 0 and the limit of tokens; RAGAS knows which models want them in another way."""
    from ragas.llms.base import InstructorLLM, InstructorModelArgs

    settings = InstructorModelArgs(temperature=0.0, max_tokens=max_tokens)
    mapped = InstructorLLM(None, model, "openai", settings)._map_provider_params()
    return {name: value for name, value in mapped.items() if name != "top_p"}


def _this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
