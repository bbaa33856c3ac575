"""The encoder: texts in, raw unit embeddings out, in one pass of the backbone and no `lm_head`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_embfilter import pooling as pool
from rag_embfilter.backbone import PACKAGED, Backbone, load_backbone
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.filters import Role, unit_rows
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.inputs import Row, RowBuilder, batches, fault, pad
from rag_embfilter.templates import Template, resolve_templates

if TYPE_CHECKING:
    from rag_embfilter.spectrum import Spectrum

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
# Texts that are tokenised, sorted and batched together: enough to batch well, bounded in memory.
WINDOW = 8192
# A processor's caches favour small batches, a GPU's width favours large ones.
BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}


@dataclass
class EncodeStats:
    """What an encoder has done so far: texts seen, texts cut, and tokens of text lost to the cut."""

    texts: int = 0
    truncated: int = 0
    tokens_lost: int = 0

    def __iadd__(self, other: EncodeStats) -> EncodeStats:
        self.texts += other.texts
        self.truncated += other.truncated
        self.tokens_lost += other.tokens_lost
        return self

    def __str__(self) -> str:
        return f"{self.truncated} of {self.texts} texts truncated, {self.tokens_lost}+ tokens lost"


class Encoder:
    """Turns texts into raw unit embeddings with a causal LM.

    Args:
        backbone: `smollm2` (packaged weights), a hub id, a model folder, a `.gguf` file, or a loaded
            `Backbone` (then `revision`, `device` and `dtype` must be left out).
        template: a name out of `TEMPLATES`, or a format string with `{text}` in it; or several of them,
            each of which costs a pass, unless they differ in pooling alone. The raw embedding is then one
            unit vector per template, joined and scaled by `1 / sqrt(templates)`.
        pooling: `last`, `mean`, or `last+mean`, which joins both (as if the template were two, for one
            pass); by default what the template asks for.
        max_length: longest text in tokens, the template's own words not counted.
        device, dtype: see `load_backbone`.
        revision: branch, tag or commit of a hub model.
        query_template: another template's name or format string for queries.
        batch_tokens: tokens in a batch, padding included; changes speed and memory, not vectors.
        padding_side: `right` or `left`; changes nothing but the inputs' layout.

    Raises:
        ConfigError: an argument that is out of range or does not fit the backbone.
        BackboneError: a backbone that cannot be loaded or used.
    """

    # How many passes run at once; callers hand over that many times more texts at a time.
    parallel = 1
    engine = "local"

    def __init__(
        self,
        backbone: str | Backbone,
        template: str | Template | Sequence[str | Template] = "prompteol",
        pooling: str | None = None,
        max_length: int = 512,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        revision: str | None = None,
        query_template: str | None = None,
        batch_tokens: int | None = None,
        padding_side: str = "right",
    ) -> None:
        several = [template] if isinstance(template, str | Template) else list(template)
        self.templates = resolve_templates(several, query_template, pooling)
        alike = len(set(self.templates)) < len(self.templates)
        if not several or alike or (len(several) > 1 and query_template):
            raise ConfigError(
                f"template {several}: expected one or more, no two alike; query_template is for one alone."
            )
        self._named = _names(several, query_template) | {
            "pooling": pooling or _common_pooling(self.templates)
        }
        for label, value in (("max_length", max_length), ("batch_tokens", batch_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{label} {value!r}: expected a whole number of 1 or more.")
        if padding_side not in ("right", "left"):
            raise ConfigError(f"padding_side {padding_side!r}: expected right or left.")
        if isinstance(backbone, Backbone):
            if (revision, device, dtype) != (None, None, None):
                raise ConfigError("revision, device and dtype belong to load_backbone; leave them out here.")
            self.backbone = backbone
        else:
            self.backbone = load_backbone(backbone, revision, device, dtype)
        self.max_length = max_length
        self.padding_side = padding_side
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(self.backbone.device.type, 8192)
        self.stats = EncodeStats()
        self._builders = [RowBuilder(self.backbone, each, max_length) for each in self.templates]
        self._passes = _passes(self.templates)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its settings; the backbone travels by name."""
        layout = {"batch_tokens": self.batch_tokens, "padding_side": self.padding_side}
        return _restore, (self.backbone, self.templates, self.max_length, self._named, layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoder:
        return self

    def close(self) -> None:
        """Give back what the encoder holds outside this process: nothing, when it is a local one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def hidden_size(self) -> int:
        """Size of a raw embedding: the backbone's, times the number of templates."""
        return self.backbone.hidden_size * len(self.templates)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Everything about the encoder that changes a vector beyond rounding."""

        def each(values: Iterable[str]) -> str:
            return " + ".join(values)

        return Fingerprint(
            {
                "backbone": self.backbone.identity,
                "template": each(t.document for t in self.templates),
                "query_template": each(t.query for t in self.templates),
                "pooling": each(t.pooling for t in self.templates),
                "special_tokens": each(f"begin {b.begin} end {b.end}" for b in self._builders),
                "truncation": each(f"{t.truncation} over {self.max_length}" for t in self.templates),
            }
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What makes this encoder again: `Encoder`'s arguments of the same names, ready for JSON.

        Raises `ConfigError` for `Template` objects that such arguments cannot express.
        """
        named = self._named["template"]
        again = [named] if isinstance(named, str) else named
        if resolve_templates(again, self._named["query_template"], self._named["pooling"]) != self.templates:
            raise ConfigError(
                "these Template objects cannot be written down as names and format strings with one pooling, "
                "as a collection's settings need; give names, format strings, or pooling='last+mean'."
            )
        name, revision = origin(self.backbone)
        return {
            "backbone": name,
            "revision": revision,
            "max_length": self.max_length,
            **self._named,
        }

    def spectrum(self) -> Spectrum:
        """Directions and singular values of the backbone's unembedding, cached on disk."""
        from rag_embfilter.spectrum import Spectrum

        backbone = self.backbone
        return Spectrum.cached(backbone.unembedding, backbone.used_rows, self.unembedding_digest())

    def unembedding_digest(self) -> str:
        """Digest of the unembedding's used rows."""
        return self._unembedding_digest

    @cached_property
    def _unembedding_digest(self) -> str:
        from rag_embfilter.spectrum import unembedding_digest

        return unembedding_digest(self.backbone.unembedding, self.backbone.used_rows)

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text alone, as `max_length` counts them."""
        return len(self._builders[0].text_ids([text])[0])

    def encode_documents(
        self,
        texts: Sequence[str],
        normalize: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> FloatArray:
        """Raw embeddings of documents.

        Args:
            texts: the documents' texts; one is refused when it is empty or only white space.
            normalize: scale to unit length, each template's part for itself; `False` gives the pooled
                states as the backbone has them, as MTEB's classification wants them.
            progress: called with the number of texts done, batch by batch.

        Returns: float32 `[n, hidden]`, in input order.

        Raises:
            ConfigError: not a sequence of texts.
            EncodingError: texts that are empty, or whose vectors are not finite or are zero; it names
                them and carries the embeddings of the others.
        """
        return self._encode(texts, "document", normalize, progress)

    def encode_queries(
        self,
        texts: Sequence[str],
        normalize: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> FloatArray:
        """Raw embeddings of queries; as `encode_documents`, with the query's template."""
        return self._encode(texts, "query", normalize, progress)

    def _encode(
        self, texts: Sequence[str], role: Role, normalize: bool, progress: Callable[[int], None] | None
    ) -> FloatArray:
        if isinstance(texts, str | bytes):
            raise ConfigError(f"texts is one {type(texts).__name__}, expected a list of texts: [text].")
        texts = list(texts)
        unknown = self.backbone.tokens_without_row
        problems = {i: why for i, text in enumerate(texts) if (why := fault(text, unknown))}
        good = [i for i in range(len(texts)) if i not in problems]
        pooled = np.zeros((len(texts), self.hidden_size), dtype=np.float32)
        done = EncodeStats()
        with self._lock:
            size = WINDOW * self.parallel
            for start in range(0, len(good), size):
                window = good[start : start + size]
                pooled[window] = self._encode_window([texts[i] for i in window], role, done, progress)
            self.stats += done
        if done.truncated:
            logger.warning("%s (limit %d tokens)", done, self.max_length)
        if normalize and len(self.templates) > 1:
            _unit_parts(pooled, len(self.templates))
        return _checked(pooled, good, problems, normalize)

    def _encode_window(
        self, texts: list[str], role: Role, done: EncodeStats, progress: Callable[[int], None] | None
    ) -> FloatArray:
        """Pooled float32 `[n, hidden]` of a window of texts; equal texts are encoded once."""
        unique = list(dict.fromkeys(texts))
        place = {text: i for i, text in enumerate(unique)}
        counts = np.bincount([place[text] for text in texts], minlength=len(unique))
        width = self.backbone.hidden_size
        pooled = np.empty((len(unique), self.hidden_size), dtype=np.float32)
        passed = told = 0
        for numbers in self._passes:
            rows = self._builders[numbers[0]].rows(unique, role)
            for chosen in batches([len(row.ids) for row in rows], self.batch_tokens):
                parts = self._forward([rows[i] for i in chosen], [self.templates[n] for n in numbers])
                for number, part in zip(numbers, parts, strict=True):
                    pooled[chosen, number * width : (number + 1) * width] = part.cpu().numpy()
                passed += int(counts[chosen].sum())
                if progress is not None and passed // len(self._passes) > told:
                    progress(passed // len(self._passes) - told)
                    told = passed // len(self._passes)
            if numbers[0] == 0:
                lost = np.array([row.lost for row in rows])
                done += EncodeStats(len(texts), int(counts[lost > 0].sum()), int(counts @ lost))
        return pooled[[place[text] for text in texts]]

    @torch.inference_mode()
    def _forward(self, rows: list[Row], templates: Sequence[Template]) -> list[Tensor]:
        """One pass of the backbone: float32 `[batch, hidden]` for each template's pooling, after the final
        norm.
        """
        batch = pad(rows, self.backbone.tokenizer.pad_token_id or 0, self.padding_side)
        ids, mask, span = (part.to(self.backbone.device) for part in (batch.ids, batch.mask, batch.span))
        # A causal model never looks right, so padding there needs no mask: a mask of ones keeps the fast
        # kernel. Padding on the left needs one, and positions counted from the first real token.
        layout = {"attention_mask": torch.ones_like(mask)}
        if self.padding_side == "left":
            layout = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        hidden = self.backbone.model(input_ids=ids, use_cache=False, **layout).last_hidden_state
        return [
            pool.mean(hidden, span) if each.pooling == "mean" else pool.last_token(hidden, mask)
            for each in templates
        ]


def origin(backbone: Backbone) -> tuple[str, str | None]:
    """Name and revision that load a backbone again, also from another working folder."""
    name, revision = backbone.name, backbone.revision
    if not revision.startswith("sha256:"):
        return name, revision
    return (name if name in PACKAGED else str(Path(name).expanduser().resolve())), None


def _passes(templates: Sequence[Template]) -> list[list[int]]:
    """Templates by number, those together that differ in pooling alone: one pass serves them."""
    groups: dict[Template, list[int]] = {}
    for number, each in enumerate(templates):
        groups.setdefault(replace(each, pooling="last"), []).append(number)
    return list(groups.values())


def _names(several: list[str | Template], query_template: str | None) -> dict[str, Any]:
    """Templates as `Encoder` takes them again, ready for JSON; a single one as itself."""
    if len(several) > 1:
        names = [each if isinstance(each, str) else each.document for each in several]
        return {"template": names, "query_template": None}
    (only,) = several
    if isinstance(only, str):
        return {"template": only, "query_template": query_template}
    query = None if only.query == only.document else only.query
    return {"template": only.document, "query_template": query}


def _common_pooling(templates: Sequence[Template]) -> str | None:
    """The pooling that all templates share, if any."""
    found = {each.pooling for each in templates}
    return found.pop() if len(found) == 1 else None


def unit_embeddings(states: FloatArray, templates: int = 1) -> FloatArray:
    """What an encoder with so many templates gives with `normalize=True`, from what it gives without.

    Takes and returns float32 `[n, hidden]`. Raises `EncodingError` for rows that are not finite or are zero.
    """
    if templates == 1:
        return unit_rows(states)
    parts = states.copy()
    _unit_parts(parts, templates)
    return unit_rows(parts)


def _unit_parts(pooled: FloatArray, parts: int) -> None:
    """Scale each template's part of each row to unit length, in place; a part without length stays."""
    blocks = pooled.reshape(len(pooled), parts, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.linalg.norm(blocks, axis=2, keepdims=True)
        # A part that is zero or not finite makes the whole row one that is reported.
        np.divide(blocks, np.where(norms > 0, norms, np.nan), out=blocks)


def _restore(
    backbone: Backbone,
    templates: list[Template],
    max_length: int,
    named: dict[str, Any],
    layout: dict[str, Any],
) -> Encoder:
    encoder = Encoder(backbone, templates, max_length=max_length, **layout)
    encoder._named = named
    return encoder


def _checked(pooled: FloatArray, good: list[int], problems: dict[int, str], normalize: bool) -> FloatArray:
    """The rows at `good` checked for NaN, Inf and zero; raises with all problems, old and new."""
    try:
        unit = unit_rows(pooled if len(good) == len(pooled) else pooled[good])
    except EncodingError as error:
        assert error.embeddings is not None
        unit = error.embeddings
        problems |= {good[i]: why for i, why in error.problems.items()}
    if normalize and len(good) == len(pooled):
        pooled = unit
    elif normalize:
        pooled[good] = unit
    if problems:
        pooled[sorted(problems)] = 0.0
        raise EncodingError(dict(sorted(problems.items())), pooled)
    return pooled
