"""Encoding on several machines: an encoder whose passes of the backbone run on Ray actors.

The driver reads, splits, looks up and writes; actors turn texts into vectors and know nothing else,
so any store will do.
"""

from __future__ import annotations

import logging
import os
import platform
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rag_embfilter.backbone import load_backbone, origin
from rag_embfilter.cluster import Cluster, ray_module
from rag_embfilter.devices import pick_dtype
from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ClusterError, EmbFilterError, FingerprintMismatch
from rag_embfilter.filters import Role
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.passes import BATCH_TOKENS, Tell
from rag_embfilter.templates import Template
from rag_embfilter.windows import Window, told_from

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
# An actor that is lost may have been bad luck; a part whose actors are lost again and again is the cause.
MAX_LOSSES = 3
# Parts an actor gets of each window: more balance the load better, fewer fill batches better.
PARTS_EACH = 4
# How many characters make a token, by and large; it sizes parts and changes no vector.
CHARACTERS = 4
PATIENCE = 30.0  # seconds without any news before a person is told what is waited for


class RayEncoder(Encoder):
    """An `Encoder` whose passes run on Ray actors; the driver keeps tokenizer, settings and unembedding.

    Joins the cluster that `RAY_ADDRESS` names, else starts one on this machine. Actors start with the
    first text and are checked then: each must have the driver's fingerprint. An actor that dies is
    replaced, and its part encoded again. Use it in a `with` block, or `close` it, so that actors and a
    cluster of its own end. A pickled copy is an `Encoder` of the same settings.

    Args:
        backbone, template, pooling, max_length, revision, query_template, batch_tokens: as in `Encoder`;
            every machine must find the backbone under the same name.
        device: the actors': by default `cuda` where the cluster has GPUs, one each, else `cpu`.
        dtype: the actors': by default bfloat16 on `cuda`, float32 on `cpu`.
        num_actors: by default one a GPU, or one a machine.

    Raises:
        MissingExtraError: ray is not installed.
        ConfigError: more actors than the cluster has room for; or as `Encoder`.
        BackboneError: as `Encoder`, here or on an actor's machine.
        ClusterError: the cluster cannot be reached, or actors are lost again and again (when encoding).
        FingerprintMismatch: an actor found other weights (when encoding; nothing is encoded then).
    """

    def __init__(
        self,
        backbone: str,
        template: str | Template | Sequence[str | Template] = "prompteol",
        pooling: str | None = None,
        max_length: int = 512,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        num_actors: int | None = None,
        revision: str | None = None,
        query_template: str | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        self._cluster = Cluster(num_actors, device)
        kind = self._cluster.device
        if dtype is None and kind == "cuda":
            dtype = pick_dtype(None, torch.device(kind))
        try:
            super().__init__(
                # The driver encodes nothing: its copy need not take a GPU's memory. The dtype is the actors',
                # as collections record it.
                load_backbone(backbone, revision, "cpu", dtype),
                template,
                pooling,
                max_length,
                query_template=query_template,
                batch_tokens=batch_tokens or BATCH_TOKENS[kind],
            )
        except BaseException:
            self._cluster.close()
            raise
        self.parallel = self._cluster.actors
        self.engine = f"ray, {self.parallel} actors on {kind}"
        self._crew: _Crew | None = None

    def close(self) -> None:
        """End the actors, leave the cluster, and stop it when it is our own. May be called again."""
        self._release()
        self._cluster.close()

    def _release(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def _windows(
        self, several: Iterable[list[str]], role: Role, tell: Callable[[Sequence[int]], None] | None
    ) -> Iterator[Window]:
        """Windows of texts, each encoded part by part on the actors."""
        start = 0
        for texts in several:
            with self._lock:
                window = self._spread(texts, role, told_from(start, tell))
            yield window
            start += len(texts)

    def _spread(self, texts: list[str], role: Role, tell: Tell | None) -> Window:
        if self._crew is None:
            self._cluster.open()
            self._crew = _Crew(self._cluster, _Recipe.of(self, self._cluster.device), self.fingerprint)
        parts = split(texts, self.parallel, self.batch_tokens, self.max_length)
        whole = Window(
            np.empty((len(texts), self.states_size), dtype=np.float32), np.empty(len(texts), dtype=np.int64)
        )
        try:
            for number, window in self._crew.run([[texts[i] for i in part] for part in parts], role):
                part = parts[number]
                whole.states[part], whole.lost[part] = window.states, window.lost
                whole.problems |= {part[i]: why for i, why in window.problems.items()}
                whole.stats += window.stats
                if tell is not None:
                    tell(part * len(self._groups))  # as if group by group
        except BaseException:
            # Actors may still be at work on what nobody waits for: the next call gets fresh ones.
            self._release()
            raise
        return whole


def split(texts: Sequence[str], actors: int, batch_tokens: int, max_length: int) -> list[list[int]]:
    """Positions of texts in parts of about equal work, each of texts of like length; longest first.

    Like lengths waste little padding, and short parts at the end let all actors finish together.
    """
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    # A text over the limit is cut, and costs no more than the limit.
    costs = [min(len(texts[i]), CHARACTERS * max_length) for i in order]
    batch = CHARACTERS * batch_tokens
    total = sum(costs)
    size = min(max(total / (PARTS_EACH * actors), min(batch / 4, total / actors)), 2 * batch)
    parts: list[list[int]] = []
    filled = size
    for i, cost in zip(order, costs, strict=True):
        if filled >= size:
            parts.append([])
            filled = 0
        parts[-1].append(i)
        filled += cost
    return parts


@dataclass(frozen=True)
class _Recipe:
    """What an actor makes its encoder of."""

    backbone: str
    revision: str | None
    device: str
    dtype: torch.dtype
    templates: tuple[Template, ...]
    max_length: int
    batch_tokens: int

    @classmethod
    def of(cls, encoder: Encoder, device: str) -> _Recipe:
        name, revision = origin(encoder.backbone)
        templates = tuple(encoder.templates)
        dtype = encoder.backbone.dtype
        return cls(name, revision, device, dtype, templates, encoder.max_length, encoder.batch_tokens)

    def make(self) -> Encoder:
        backbone = load_backbone(self.backbone, self.revision, self.device, self.dtype)
        return Encoder(backbone, self.templates, max_length=self.max_length, batch_tokens=self.batch_tokens)


@dataclass(frozen=True)
class _Hello:
    """An actor's first words: where it is, and the parts of its encoder's fingerprint."""

    machine: str
    pid: int
    parts: Mapping[str, Any]


class _Worker:
    """What runs in an actor's process."""

    def __init__(self, recipe: _Recipe, threads: int) -> None:
        # Nothing that can fail: an error in an actor's constructor reaches the driver as a death.
        self.recipe = recipe
        self.threads = threads
        self.encoder: Encoder | None = None

    def hello(self) -> _Hello:
        """Load the encoder. Errors name the machine."""
        torch.set_num_threads(self.threads)
        try:
            self.encoder = self.recipe.make()
        except EmbFilterError as error:
            raise type(error)(f"on machine {platform.node()}: {error}") from None
        return _Hello(platform.node(), os.getpid(), dict(self.encoder.fingerprint.parts))

    def encode(self, texts: list[str], role: Role) -> Window:
        """Texts after their passes, neither scaled nor checked: the driver does that."""
        assert self.encoder is not None
        return self.encoder._pass(self.encoder._rows(texts, role), role, None)


@dataclass(eq=False)
class _Member:
    """An actor as the driver sees it."""

    handle: Any
    name: str = "a new actor"


class _Crew:
    """The actors, each with one part at a time, so that a death costs little and none waits in a queue."""

    def __init__(self, cluster: Cluster, recipe: _Recipe, fingerprint: Fingerprint) -> None:
        self.ray = ray_module()
        self.cluster = cluster
        self.recipe = recipe
        self.fingerprint = fingerprint
        self.members: set[_Member] = set()
        self.idle: list[_Member] = []
        self.running: dict[Any, tuple[_Member, int | None]] = {}  # None: it says hello
        self.losses: Counter[int | None] = Counter()
        try:
            for _ in range(cluster.actors):
                self._hire()
            while self.running:  # all of them, before the first text is encoded
                self._step()
        except BaseException:
            self.close()
            raise

    def run(self, parts: Sequence[list[str]], role: Role) -> Iterator[tuple[int, Window]]:
        """Results by number of part, as they come."""
        waiting = deque(range(len(parts)))
        self.losses.clear()
        left = len(parts)
        while left:
            while waiting and self.idle:
                number, member = waiting.popleft(), self.idle.pop()
                self.running[member.handle.encode.remote(parts[number], role)] = (member, number)
            number_done, result = self._step()
            if result is not None and number_done is not None:
                left -= 1
                yield number_done, result
            elif number_done is not None:
                waiting.appendleft(number_done)

    def close(self) -> None:
        """End all actors."""
        if self.ray.is_initialized():
            for member in self.members:
                self.ray.kill(member.handle)
        self.members.clear()
        self.idle.clear()
        self.running.clear()

    def _step(self) -> tuple[int | None, Any]:
        """Wait for one piece of news: (part, result), (part, None) when its actor died, or (None, None)."""
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=PATIENCE)
        if not ready:
            self._tell()
            return None, None
        member, number = self.running.pop(ready[0])
        try:
            result = self.ray.get(ready[0])
        except self.ray.exceptions.RayTaskError as error:
            if error.cause is None:
                raise
            # What the actor raised itself, as the local encoder would have raised it.
            raise error.cause from error
        except self.ray.exceptions.RayError as error:
            self._replace(member, number, error)
            return number, None
        if number is None:
            self._check(member, result)
            result = None
        self.idle.append(member)
        return number, result

    def _hire(self) -> None:
        worker = self.ray.remote(_Worker).options(**self.cluster.share)
        member = _Member(worker.remote(self.recipe, self.cluster.cpus))
        self.members.add(member)
        self.running[member.handle.hello.remote()] = (member, None)

    def _check(self, member: _Member, hello: _Hello) -> None:
        member.name = f"the actor on machine {hello.machine} (process {hello.pid})"
        self.losses[None] = 0
        differences = self.fingerprint.differences(Fingerprint(hello.parts))
        if differences:
            lines = "\n  ".join(differences)
            raise FingerprintMismatch(
                f"{member.name} would make other vectors than the driver. What differs (driver's != actor's):"
                f"\n  {lines}\nGive all machines the same weights under {self.recipe.backbone!r}."
            )

    def _replace(self, member: _Member, number: int | None, error: Exception) -> None:
        """A new actor for one that was lost, unless this happens again and again."""
        self.ray.kill(member.handle)  # it may only be out of reach
        self.members.discard(member)
        self.losses[number] += 1
        why = _summary(error)
        if self.losses[number] >= MAX_LOSSES:
            what = "to start" if number is None else "to encode one part of the texts"
            raise ClusterError(
                f"{self.losses[number]} actors were lost one after the other when they were {what}; the last "
                f"one: {why} Check that their machines have memory for the backbone and this package "
                "installed; a smaller batch_tokens or max_length needs less."
            )
        logger.warning("%s was lost (%s); another one takes over", member.name, why)
        self._hire()

    def _tell(self) -> None:
        starting = sum(number is None for _, number in self.running.values())
        if starting:
            logger.warning(
                "waiting for %d of %d actors to start; each needs %s, and the cluster has free: %s",
                starting, self.cluster.actors, self.cluster.share, self.ray.available_resources(),
            )  # fmt: skip


def _summary(error: Exception) -> str:
    """The line of Ray's long messages that tells the cause: the last one that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
