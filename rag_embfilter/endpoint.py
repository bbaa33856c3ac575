"""Encoding by a server: pooled hidden states from an OpenAI-compatible endpoint, filtered here.

The filter is linear and comes last, so whatever serves the backbone can do the encoding.
"""

from __future__ import annotations

import base64
import ipaddress
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
from transformers import PreTrainedModel

from rag_embfilter.backbone import load_backbone
from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, EndpointError
from rag_embfilter.filters import Role
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.inputs import batches
from rag_embfilter.passes import PassStats, Tell
from rag_embfilter.templates import TEXT, Template
from rag_embfilter.windows import Window, told_from

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
Prompt = str | list[int]
KEY = "EMBFILTER_ENDPOINT_KEY"
PROMPTS = ("tokens", "text")
BATCH_TOKENS = 8192  # a request's; the server makes batches of its own from all that it is sent
BATCH_SIZE = 32  # what servers take at once by default, the strictest of them
CONCURRENCY = 4
TIMEOUT = 120.0
ATTEMPTS = 6
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
BUSY = (408, 409, 425, 429, 500, 502, 503, 504)


class EndpointEncoder(Encoder):
    """An `Encoder` whose passes run on a server; tokenizer, settings and unembedding stay here.

    The server must hold the same backbone and answer `/v1/embeddings` with its pooled hidden states after
    the final norm, at any length: vLLM, llama.cpp, TEI and others do, when started as docs/serving.md says.
    Run `verify-endpoint` (`verifying.verify`) once: nothing here can tell that a server holds other weights.
    The backbone is loaded for its unembedding, on the CPU, and its other weights are given back. The server's
    key, if any, is read from `EMBFILTER_ENDPOINT_KEY`. A pickled copy is an `Encoder` of the same settings.

    With `normalize=False` states have the length that the server gives them, mostly 1.

    Args:
        endpoint: the server's address, `http://host:8000` or with `/v1`.
        backbone, template, pooling, max_length, revision, query_template: as in `Encoder`.
        dtype: what the server computes in, for the record; float32 by default.
        model: name under which the server knows the backbone; by default the first that it lists.
        prompts: `tokens` sends token ids, so that vectors are those of the local encoder; `text` sends the
            template with the text in it for the server to tokenise, and has a fingerprint of its own.
        concurrency: requests at a time.
        batch_tokens: tokens in a request; `batch_size` is the most texts in one.
        timeout: seconds that an answer may take.

    Raises:
        ConfigError: an address or argument that makes no sense, or what a server cannot be asked for: two
            poolings at once, mean pooling after words or a begin token, an end token in `text` prompts.
        EndpointError: the server is not there, refuses, or answers with something else (when encoding).
    """

    def __init__(
        self,
        endpoint: str,
        backbone: str,
        template: str | Template | Sequence[str | Template] = "prompteol",
        pooling: str | None = None,
        max_length: int = 512,
        dtype: str | torch.dtype | None = None,
        *,
        model: str | None = None,
        prompts: str = "tokens",
        concurrency: int = CONCURRENCY,
        batch_tokens: int | None = None,
        batch_size: int = BATCH_SIZE,
        timeout: float = TIMEOUT,
        revision: str | None = None,
        query_template: str | None = None,
    ) -> None:
        if prompts not in PROMPTS:
            raise ConfigError(f"endpoint prompts {prompts!r}: expected one of {', '.join(PROMPTS)}.")
        for label, value in (("concurrency", concurrency), ("batch_size", batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{label} {value!r}: expected a whole number of 1 or more.")
        self.client = EndpointClient(endpoint, model or backbone, model is None, timeout)
        whole = load_backbone(backbone, revision, "cpu", dtype or "float32")
        # Nothing of the model itself is needed but where it is and what it computes in.
        shell = SimpleNamespace(device=torch.device("cpu"), dtype=whole.dtype, config=whole.model.config)
        super().__init__(
            replace(whole, model=cast(PreTrainedModel, shell)),
            template,
            pooling,
            max_length,
            query_template=query_template,
            batch_tokens=batch_tokens or BATCH_TOKENS,
        )
        self.prompts = prompts
        self.concurrency = concurrency
        self.batch_size = batch_size
        self.parallel = concurrency
        self.engine = f"endpoint {self.client.url}"
        self._require_askable()

    def _require_askable(self) -> None:
        """Raise `ConfigError` for what a server's one pooling, or a text prompt, cannot express."""
        if self.backbone.masked:
            raise ConfigError(
                f"backbone {self.backbone.name!r} is a masked language model: its filter reads the states "
                "after the transform of its head, and a server pools those before it. Encode here."
            )
        if len({each.pooling for each in self.templates}) > 1:
            raise ConfigError(
                "a server pools in one way, and these templates in two (last+mean): take one pooling, or "
                "encode here."
            )
        for template, builder in zip(self.templates, self._builders, strict=True):
            before = [builder.begin + words[0] for words in builder.words.values()]
            copies = any(len(words) > 2 for words in builder.words.values())
            if template.pooling == "mean" and (any(before) or copies):
                raise ConfigError(
                    f"template {template.document!r}: here the mean leaves out what stands before the text, "
                    "and a server averages over all tokens. Take one that is pooled on the last token."
                )
            if self.prompts == "text" and template.end_token:
                raise ConfigError(
                    f"template {template.document!r} ends in the model's end token, which a text prompt "
                    "cannot ask for. Use prompts='tokens'."
                )

    def close(self) -> None:
        """Close connections. May be called again."""
        self.client.close()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """As a local encoder's; `text` prompts, which the server tokenises, are a part of their own."""
        local = super().fingerprint
        return local if self.prompts == "tokens" else local | Fingerprint({"prompts": "text, by a server"})

    @property
    def settings(self) -> dict[str, Any]:
        """As a local encoder's, so that vectors made of token ids can be searched without the server."""
        own = {} if self.prompts == "tokens" else {"endpoint_prompts": self.prompts}
        return super().settings | own

    def _windows(
        self, several: Iterable[list[str]], role: Role, tell: Callable[[Sequence[int]], None] | None
    ) -> Iterator[Window]:
        """Windows of texts, each encoded by the server."""
        start = 0
        for texts in several:
            with self._lock:
                window = self._asked(texts, role, told_from(start, tell))
            yield window
            start += len(texts)

    def _asked(self, texts: list[str], role: Role, tell: Tell | None) -> Window:
        width = self.backbone.hidden_size
        window = Window(
            np.empty((len(texts), self.states_size), dtype=np.float32), np.empty(len(texts), dtype=np.int64)
        )
        for number, builder in enumerate(self._builders):
            rows = builder.rows(texts, role)
            window.lost = np.array([row.lost for row in rows], dtype=np.int64)
            ids = [row.ids.tolist() for row in rows]
            prompts = self._prompts(number, texts, ids, window.lost.tolist(), role)
            for chosen, states in self._answers(prompts, self._parts([len(row.ids) for row in rows])):
                window.states[chosen, number * width : (number + 1) * width] = states
                if tell is not None:
                    tell(chosen)
            window.stats += PassStats(tokens=sum(len(row.ids) for row in rows))
        return window

    def _prompts(
        self, number: int, texts: list[str], ids: list[list[int]], lost: list[int], role: Role
    ) -> Sequence[Prompt]:
        """What is sent for each text: its token ids, or the template with the text, cut, in it."""
        if self.prompts == "tokens":
            return ids
        template, builder = self.templates[number], self._builders[number]
        words = template.query if role == "query" else template.document
        joined = []
        for text, row, cut_away in zip(texts, ids, lost, strict=True):
            if cut_away:
                before, after = len(builder.begin + builder.words[role][0]), len(builder.words[role][1])
                text = self.backbone.tokenizer.decode(row[before : len(row) - after])
            joined.append(words.replace(TEXT, text))
        return joined

    def _parts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Positions by request: at most `batch_tokens` tokens and `batch_size` texts in each."""
        size = self.batch_size
        chunks = batches(lengths, self.batch_tokens)
        return [chunk[i : i + size] for chunk in chunks for i in range(0, len(chunk), size)]

    def _answers(self, prompts: Sequence[Prompt], parts: list[list[int]]) -> Any:
        """(positions, states) of each request, as they come."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            asked = {
                pool.submit(self.client.embed, [prompts[i] for i in part], self.backbone.hidden_size): part
                for part in parts
            }
            try:
                for answer in as_completed(asked):
                    yield asked[answer], answer.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


class _BusyError(Exception):
    """An answer that says to come back later."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        super().__init__(f"status {response.status_code}")


class EndpointClient:
    """Asks `/v1/embeddings`, and again with growing pauses when the server is busy or out of reach.

    Args:
        endpoint: the server's address.
        model: name sent with each request; with `ask`, the first that the server lists stands in for it.
        timeout: seconds that an answer may take.
    """

    def __init__(self, endpoint: str, model: str, ask: bool = False, timeout: float = TIMEOUT) -> None:
        self.url = checked_url(endpoint)
        self._model = model
        self._ask = ask
        self._format = "base64"
        key = os.environ.get(KEY, "")
        if key and self.url.startswith("http:") and not _this_machine(urlsplit(self.url).hostname or ""):
            logger.warning("%s goes to %s unencrypted; use https", KEY, self.url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=timeout)

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    @cached_property
    def model(self) -> str:
        """Name of the served model: the one given, or the first of `/v1/models`."""
        if self._ask:
            with suppress(httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
                listed = self._http.get(f"{self.url}/models").raise_for_status().json()
                return str(listed["data"][0]["id"])
        return self._model

    def embed(self, prompts: Sequence[Prompt], width: int | None = None) -> FloatArray:
        """Vectors of prompts, float32 `[n, width]`, as the server scales them.

        Raises `EndpointError` when the server cannot be reached, refuses, or answers with anything but one
        vector of that width for each prompt.
        """
        response = self._post(prompts)
        refused = response.status_code in (400, 415, 422) and "encoding_format" in response.text
        if refused and self._format == "base64":
            logger.warning("%s takes no base64; vectors come as text", self.url)
            self._format = "float"
            response = self._post(prompts)
        if response.status_code != 200:
            raise EndpointError(self._refusal(response, prompts))
        return self._read(response, len(prompts), width)

    def _post(self, prompts: Sequence[Prompt]) -> httpx.Response:
        again = Retrying(
            retry=retry_if_exception_type((_BusyError, httpx.TransportError)),
            wait=_wait,
            stop=stop_after_attempt(ATTEMPTS),
            before_sleep=lambda state: _note(self.url, state),
            reraise=True,
        )
        body = {"model": self.model, "input": list(prompts), "encoding_format": self._format}
        try:
            return again(self._send, body)
        except _BusyError as error:
            return error.response
        except httpx.TransportError as error:
            raise EndpointError(
                f"no answer from {self.url} in {ATTEMPTS} tries ({type(error).__name__}: {error}). Check "
                "that the server runs and the address is right; what is stored stays, and the same command "
                "goes on."
            ) from error

    def _send(self, body: dict[str, Any]) -> httpx.Response:
        response = self._http.post(f"{self.url}/embeddings", json=body)
        if response.status_code in BUSY:
            raise _BusyError(response)
        return response

    def _refusal(self, response: httpx.Response, prompts: Sequence[Prompt]) -> str:
        said = " ".join(response.text.split())[:300]
        way_out = {
            401: f"Its key is read from {KEY}.",
            403: f"Its key is read from {KEY}.",
            404: "Give the address that /v1/embeddings is under, or the model's name (endpoint_model).",
            413: "Send less at once: a smaller batch_size or batch_tokens.",
        }.get(response.status_code, "Look into the server's log.")
        if response.status_code in (400, 422) and not isinstance(prompts[0], str):
            way_out = (
                "If it does not take token ids, use endpoint_prompts='text' (--endpoint-prompts text), which "
                "has a fingerprint of its own; if it takes fewer texts or tokens at once, send less."
            )
        return f"{self.url}/embeddings refused with status {response.status_code} ({said}). {way_out}"

    def _read(self, response: httpx.Response, n: int, width: int | None) -> FloatArray:
        try:
            data = sorted(response.json()["data"], key=lambda each: each["index"])
            if [each["index"] for each in data] != list(range(n)):
                raise ValueError(f"{len(data)} vectors for {n} prompts")
            made = np.stack([_vector(each["embedding"]) for each in data])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EndpointError(
                f"{self.url}/embeddings answered with something else than an embedding for each of {n} "
                f"prompts ({type(error).__name__}: {error}). Expected an OpenAI-compatible embeddings server."
            ) from error
        if width is not None and made.shape[1] != width:
            raise EndpointError(
                f"{self.url} gives vectors of {made.shape[1]} dimensions, the backbone's hidden states have "
                f"{width}: it serves another model, or applies a layer of its own. Serve the plain backbone."
            )
        return made


def checked_url(endpoint: str) -> str:
    """The address up to and with `/v1`. Raises `ConfigError`, also for keys in it, as results name it."""
    parts = urlsplit(endpoint.strip())
    if parts.username or parts.password or parts.query or "@" in parts.netloc:
        raise ConfigError(
            f"endpoint at {parts.hostname!r}: expected an address without user, password or query, since it "
            f"is written into results. A key goes into {KEY}."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"endpoint {endpoint!r}: expected an address such as http://localhost:8000/v1.")
    path = parts.path.rstrip("/").removesuffix("/embeddings")
    return f"{parts.scheme}://{parts.netloc}{path}" + ("" if path.endswith("/v1") else "/v1")


def _vector(embedding: Any) -> FloatArray:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4").astype(np.float32)
    made = np.array(embedding, dtype=np.float32)
    if made.ndim != 1:
        raise ValueError(f"an embedding of shape {made.shape}; the server does not pool")
    return made


def _wait(state: RetryCallState) -> float:
    """Seconds before the next try: what the server asks for, or twice as long each time."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.response.headers.get("retry-after", "") if isinstance(error, _BusyError) else ""
    wanted = float(asked) if asked.isdecimal() else FIRST_WAIT * 2 ** (state.attempt_number - 1)
    return min(wanted, LONGEST_WAIT)


def _note(url: str, state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    pause = state.next_action.sleep if state.next_action else 0.0
    logger.warning("%s: %s; trying again in %.1f s", url, error or "no answer", pause)


def _this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
