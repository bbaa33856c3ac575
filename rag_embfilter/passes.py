"""Passes of the backbone over rows: batches within a token budget, a common prefix once, faults mended."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from rag_embfilter.backbone import KNOWN_FAMILIES, Backbone
from rag_embfilter.devices import out_of_memory
from rag_embfilter.inputs import Row, batches, pad
from rag_embfilter.pooling import POOLINGS

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
Tell = Callable[[Sequence[int]], None]
# A processor's caches favour small batches (twice these tokens in a half dtype), a GPU's width favours large
# ones. Beside each, the padding in tokens that costs as much as one more batch.
BATCH_TOKENS = {"cpu": 512, "cuda": 32768}
SPARE = {"cpu": 64, "cuda": 1024}
# A common prefix is kept when it is at least this share of a batch's longest row; for less, what it saves
# is spent on joining it (docs/performance.md).
WORTHWHILE = 0.1


@dataclass
class PassStats:
    """What passes cost: real tokens, padding, tokens that a kept prefix saved, rows done again in float32."""

    tokens: int = 0
    padding: int = 0
    saved: int = 0
    retried: int = 0

    def __iadd__(self, other: PassStats) -> Self:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    @property
    def padding_share(self) -> float:
        """Share of the positions computed that held no token."""
        return self.padding / max(1, self.tokens + self.padding)


@dataclass
class Passed:
    """Rows after a pass.

    Attributes:
        states: pooled float32 `[n, poolings * hidden]`; NaN where there is a problem.
        problems: position of a row that has no vector -> reason.
        stats: what it cost.
    """

    states: FloatArray
    problems: dict[int, str] = field(default_factory=dict)
    stats: PassStats = field(default_factory=PassStats)


class Passes:
    """Runs rows through a backbone.

    Args:
        backbone: the model, on its device.
        batch_tokens: tokens in a batch, padding included; by default what suits the device. Halved, for
            good, when memory runs out.
        padding_side: `right` or `left`.
        compiled: run the model through `torch.compile`.
    """

    def __init__(
        self,
        backbone: Backbone,
        batch_tokens: int | None = None,
        padding_side: str = "right",
        compiled: bool = False,
    ) -> None:
        kind = backbone.device.type
        self.backbone = backbone
        halves = 2 if kind == "cpu" and backbone.dtype.itemsize == 2 else 1
        self.batch_tokens = batch_tokens or halves * BATCH_TOKENS.get(kind, 8192)
        self.spare = SPARE.get(kind, 256)
        self.padding_side = padding_side
        self.compiled = compiled
        self.model: Any = torch.compile(backbone.model, dynamic=True) if compiled else backbone.model
        self._prefixes: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}

    def close(self) -> None:
        """Nothing is held outside this process."""

    def run(
        self,
        rows: Sequence[Row],
        poolings: Sequence[str],
        prefix: Sequence[int] = (),
        tell: Tell | None = None,
    ) -> Passed:
        """Pooled states of rows, in their order.

        Args:
            rows: token ids; all begin with `prefix`.
            poolings: names out of `POOLINGS`; the states of each lie side by side.
            tell: called with the positions of the rows done, batch by batch.

        A row that no memory suffices for is a problem; one that is not finite in a half dtype is done
        again in float32.
        """
        run = _Run(self, rows, poolings, list(prefix))
        run.go(tell)
        passed = Passed(run.states(), run.problems, run.stats)
        if self.backbone.dtype != torch.float32:
            self._again(rows, poolings, passed)
        return passed

    def _again(self, rows: Sequence[Row], poolings: Sequence[str], passed: Passed) -> None:
        """Rows that are not finite, through a float32 copy of the model."""
        finite = np.isfinite(passed.states).all(axis=1)
        wrong = [int(i) for i in np.flatnonzero(~finite) if i not in passed.problems]
        if not wrong:
            return
        logger.warning(
            "%d of %d texts gave vectors that are not finite in %s; encoding them in float32",
            len(wrong), len(rows), str(self.backbone.dtype).removeprefix("torch."),
        )  # fmt: skip
        try:
            careful = Passes(self.backbone, self.batch_tokens, self.padding_side)
            careful.model = copy.deepcopy(self.backbone.model)
            for parameter in careful.model.parameters():
                parameter.data = parameter.data.float()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            why = f"not finite in {self.backbone.dtype}, and there is no memory for the model in float32"
            passed.problems |= dict.fromkeys(wrong, why)
            return
        run = _Run(careful, [rows[i] for i in wrong], poolings, [])
        run.go(None)
        passed.states[wrong] = run.states()
        passed.problems |= {wrong[i]: why for i, why in run.problems.items()}
        passed.stats.retried += len(wrong)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], poolings: Sequence[str], prefix: list[int]) -> Tensor:
        """One pass over a batch: float32 `[batch, poolings * hidden]` on the device, after the final norm."""
        batch = pad(rows, self.backbone.tokenizer.pad_token_id or 0, self.padding_side, len(prefix))
        batch = batch.to(self.backbone.device)
        # A causal model never looks right, so padding there needs no mask, and none keeps the fast kernels.
        # Padding on the left needs one, and positions counted from the first real token.
        layout: dict[str, Any] = {"use_cache": False}
        cache = None
        if self.backbone.masked:  # it looks right
            layout = {"attention_mask": batch.mask}
        elif self.padding_side == "left":
            layout |= {
                "attention_mask": batch.mask,
                "position_ids": (batch.mask.cumsum(1) - 1).clamp(min=0),
            }
        elif prefix:
            cache = self._after(prefix, len(rows))
            layout = {"use_cache": True, self._cache_name: cache}
        hidden = self.backbone.states(self.model(input_ids=batch.ids, **layout))
        if cache is not None:
            cache.layers.clear()  # a device's memory must not wait for Python to find it free
        masks = [batch.span if each == "mean" else batch.mask for each in poolings]
        parts = [POOLINGS[each](hidden, mask) for each, mask in zip(poolings, masks, strict=True)]
        return torch.cat(parts, dim=1)

    def can_keep(self, prefix: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether a batch of rows of these lengths gains by a prefix that is computed once."""
        config = self.backbone.model.config.get_text_config()
        if config.model_type not in KNOWN_FAMILIES:
            return False
        # A window shorter than the prefix would keep its end alone.
        room = getattr(config, "sliding_window", None) or max(lengths)
        return (
            0 < len(prefix) < min(*lengths, room)
            and len(prefix) >= WORTHWHILE * max(lengths)
            and self.padding_side == "right"
            and not self.compiled
        )

    @cached_property
    def _cache_name(self) -> str:
        known = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in known else "past_key_values"

    def _after(self, prefix: list[int], count: int) -> Any:
        """A cache that lets a batch of so many rows go on after a prefix."""
        config = self.backbone.model.config
        if tuple(prefix) not in self._prefixes:
            kept: Any = DynamicCache(config=config)
            ids = torch.tensor([prefix], device=self.backbone.device)
            self.model(input_ids=ids, use_cache=True, **{self._cache_name: kept})
            self._prefixes[tuple(prefix)] = [(layer.keys, layer.values) for layer in kept.layers]
        cache = DynamicCache(config=config)
        for number, (keys, values) in enumerate(self._prefixes[tuple(prefix)]):
            cache.update(keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1), number)
        return cache


class _Run:
    """One run over rows: the batches still to do, and what came out."""

    def __init__(
        self, passes: Passes, rows: Sequence[Row], poolings: Sequence[str], prefix: list[int]
    ) -> None:
        self.passes = passes
        self.rows = rows
        self.poolings = poolings
        self.prefix = prefix
        self.stats = PassStats()
        self.problems: dict[int, str] = {}
        # On the device until the end, or until memory runs out: a copy would make it wait.
        self.out: list[tuple[list[int], Tensor]] = []

    def go(self, tell: Tell | None) -> None:
        """Do every batch."""
        empty = [i for i, row in enumerate(self.rows) if not len(row.ids)]
        self.problems |= dict.fromkeys(empty, "the tokenizer gives no token for it")
        waiting = deque(self._batches([i for i in range(len(self.rows)) if i not in self.problems]))
        while waiting:
            chosen = waiting.popleft()
            if self._done(chosen):
                if tell is not None:
                    tell(chosen)
                continue
            self._make_room()
            if len(chosen) > 1:
                self._halve(chosen)
                left = [*chosen, *(i for batch in waiting for i in batch)]
                waiting = deque(self._batches(left))
            elif not self._done(chosen):
                tokens = len(self.rows[chosen[0]].ids)
                self.problems[chosen[0]] = (
                    f"out of memory on {self.passes.backbone.device} with this text alone "
                    f"({tokens} tokens with its template); a smaller max_length cuts it"
                )

    def states(self) -> FloatArray:
        """Float32 `[n, poolings * hidden]`, in the rows' order."""
        width = self.passes.backbone.hidden_size * len(self.poolings)
        states = np.full((len(self.rows), width), np.nan, dtype=np.float32)
        if self.out:
            order = [i for chosen, _ in self.out for i in chosen]
            states[order] = torch.cat([part.cpu() for _, part in self.out]).numpy()
        return states

    def _batches(self, positions: Sequence[int]) -> list[list[int]]:
        lengths = [len(self.rows[i].ids) for i in positions]
        made = batches(lengths, self.passes.batch_tokens, self.passes.spare)
        return [[positions[i] for i in batch] for batch in made]

    def _done(self, chosen: list[int]) -> bool:
        """Whether there was memory for a batch."""
        rows = [self.rows[i] for i in chosen]
        lengths = [len(row.ids) for row in rows]
        prefix = self.prefix if self.passes.can_keep(self.prefix, lengths) else []
        try:
            self.out.append((chosen, self.passes.forward(rows, self.poolings, prefix)))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return False
        saved = len(prefix) * len(rows)
        self.stats += PassStats(sum(lengths) - saved, max(lengths) * len(rows) - sum(lengths), saved)
        return True

    def _make_room(self) -> None:
        self.out = [(chosen, part.cpu()) for chosen, part in self.out]
        if self.passes.backbone.device.type == "cuda":
            torch.cuda.empty_cache()

    def _halve(self, chosen: list[int]) -> None:
        tokens = len(chosen) * max(len(self.rows[i].ids) for i in chosen)
        self.passes.batch_tokens = max(1, min(tokens, self.passes.batch_tokens) // 2)
        logger.warning(
            "out of memory with a batch of %d tokens; going on with %d", tokens, self.passes.batch_tokens
        )
