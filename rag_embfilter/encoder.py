"""The encoder: texts in, raw unit embeddings out, in one pass of the backbone and no `lm_head`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from rag_embfilter.backbone import Backbone, load_backbone, origin
from rag_embfilter.devices import all_gpus, pick_dtype
from rag_embfilter.errors import ConfigError
from rag_embfilter.filters import Role
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.inputs import Row, RowBuilder
from rag_embfilter.normalizing import checked, unit_parts
from rag_embfilter.passes import Passes, Tell
from rag_embfilter.processes import ProcessPasses
from rag_embfilter.templates import Template, check_pooling, resolve_templates
from rag_embfilter.windows import EncodeStats, Progress, Texts, Window, told_from, windows

if TYPE_CHECKING:
    from rag_embfilter.spectrum import Spectrum

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]


class Encoder:
    """Turns texts into raw unit embeddings with a causal LM, or (experimental) a masked one.

    Args:
        backbone: `smollm2` (packaged weights), a hub id, a model folder, a `.gguf` file, `EMBEDDER::BASE`
            (see `load_backbone`), or a loaded `Backbone` (then `revision`, `device` and `dtype` must be left
            out).
        template: a name out of `TEMPLATES`, or a format string with `{text}` in it; or several of them,
            each of which costs a pass, unless they differ in pooling alone. (A name out of `SETS` stands for
            several, which are averaged.) The raw embedding is then one
            unit vector per template, joined and scaled by `1 / sqrt(templates)`.
        pooling: `last`, `mean`, or `last+mean`, which joins both (as if the template were two, for one
            pass); `mean` or `cls` for a masked LM; by default what the template asks for.
        max_length: longest text in tokens, the template's own words not counted.
        device, dtype: see `load_backbone`; `cuda:all` is one process per GPU (then a script needs
            `if __name__ == "__main__":` around what it runs).
        revision: branch, tag or commit of a hub model.
        query_template: another template's name or format string for queries.
        batch_tokens: tokens in a batch, padding included; changes speed and memory, not vectors. Halved when
            memory runs out.
        padding_side: `right` or `left`; changes nothing but the inputs' layout.
        torch_compile: run the backbone through `torch.compile`: slow to start, faster on a GPU.

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
        torch_compile: bool = False,
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
        gpus = all_gpus(device)
        if isinstance(backbone, Backbone):
            if (revision, device, dtype) != (None, None, None):
                raise ConfigError("revision, device and dtype belong to load_backbone; leave them out here.")
            self.backbone = backbone
        elif len(gpus) > 1:  # this process only tokenises
            dtype = dtype or pick_dtype(None, torch.device("cuda"))
            self.backbone = load_backbone(backbone, revision, "cpu", dtype)
        else:
            self.backbone = load_backbone(backbone, revision, gpus[0] if gpus else device, dtype)
        check_pooling(self.templates, self.backbone.masked, self.backbone.name)
        if self.backbone.masked and padding_side == "left":
            raise ConfigError("padding_side 'left' with a masked language model: expected right.")
        self.max_length = max_length
        self.stats = EncodeStats()
        self._builders = [RowBuilder(self.backbone, each, max_length) for each in self.templates]
        self._groups = _groups(self.templates)
        self._passes: Passes | ProcessPasses
        if len(gpus) > 1:
            self._passes = ProcessPasses(self.backbone, gpus, batch_tokens, torch_compile)
            self.parallel, self.engine = len(gpus), f"a process on each of {', '.join(gpus)}"
        else:
            self._passes = Passes(self.backbone, batch_tokens, padding_side, torch_compile)
        self._layout = {"padding_side": padding_side, "torch_compile": torch_compile}
        # Again from the same thread: a stream that is left counts itself whenever Python lets go of it.
        self._lock = threading.RLock()

    @property
    def batch_tokens(self) -> int:
        """Tokens in a batch, padding included, as they are by now."""
        return self._passes.batch_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its settings; the backbone travels by name."""
        layout = self._layout | {"batch_tokens": self.batch_tokens}
        return _restore, (self.backbone, self.templates, self.max_length, self._named, layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoder:
        return self

    def close(self) -> None:
        """Give back what the encoder holds outside this process: nothing, when it is a local one."""
        self._passes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def hidden_size(self) -> int:
        """Size of a raw embedding: the backbone's, times the number of templates that are joined."""
        return self.backbone.hidden_size * self.blocks

    @property
    def blocks(self) -> int:
        """Number of templates that are joined: one when they are averaged."""
        return 1 if self.templates[0].averaged else len(self.templates)

    @property
    def states_size(self) -> int:
        """Size of what the passes give for a text, before templates are averaged."""
        return self.backbone.hidden_size * len(self.templates)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Everything about the encoder that changes a vector beyond rounding."""

        def each(values: Iterable[str]) -> str:
            return " + ".join(values)

        averaged = {"averaged": f"{len(self.templates)} templates"} if self.templates[0].averaged else {}
        return Fingerprint(
            averaged
            | {
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

    def encode_stream(
        self, texts: Iterable[str], role: Role = "document", normalize: bool = True
    ) -> Iterator[FloatArray]:
        """Raw embeddings of any number of texts, in bounded memory.

        Args:
            texts: read as they are needed, some thousands ahead; equal ones among those are encoded once.
            role: `document` or `query`.
            normalize: as in `encode_documents`.

        Yields: float32 `[some, hidden]`, together one row per text, in input order.

        Raises:
            ConfigError: not texts but one text, or an unknown role.
            EncodingError: as `encode_documents`; positions are counted from the first text, and the
                embeddings carried are those of the rows that would have come next.
        """
        if isinstance(texts, str | bytes) or role not in ("document", "query"):
            raise ConfigError(
                f"encode_stream of a {type(texts).__name__} as {role!r}: expected an iterable of texts, as "
                "'document' or 'query'."
            )
        return self._streamed(texts, role, normalize)

    def _streamed(self, texts: Iterable[str], role: Role, normalize: bool) -> Iterator[FloatArray]:
        sorted_ahead: deque[Texts] = deque()

        def unique() -> Iterator[list[str]]:
            for window in windows(texts, self.parallel):
                sorted_ahead.append(Texts(window, self.backbone.tokens_without_row))
                yield sorted_ahead[-1].unique

        stats, first = EncodeStats(), 0
        try:
            for done in self._windows(unique(), role, None):
                several = sorted_ahead.popleft()
                yield self._finished(several, [done], normalize, stats, first)
                first += several.size
        finally:
            self._count(stats)

    def _encode(
        self, texts: Sequence[str], role: Role, normalize: bool, progress: Callable[[int], None] | None
    ) -> FloatArray:
        if isinstance(texts, str | bytes):
            raise ConfigError(f"texts is one {type(texts).__name__}, expected a list of texts: [text].")
        several = Texts(list(texts), self.backbone.tokens_without_row)
        tell = None if progress is None else Progress(several.counts, len(self._groups), progress)
        stats = EncodeStats()
        try:
            done = list(self._windows(windows(several.unique, self.parallel), role, tell))
            return self._finished(several, done, normalize, stats)
        finally:
            self._count(stats)

    def _count(self, stats: EncodeStats) -> None:
        with self._lock:
            self.stats += stats
        if stats.truncated:
            logger.warning("%s (limit %d tokens)", stats, self.max_length)

    def _finished(
        self, several: Texts, done: Sequence[Window], normalize: bool, stats: EncodeStats, first: int = 0
    ) -> FloatArray:
        """Windows of the texts that differ as embeddings of all texts, counted in `stats` and checked."""
        problems = dict(several.problems)
        start = 0
        for window in done:
            end = start + len(window.states)
            counts = several.counts[start:end]
            stats += window.stats
            stats.texts += int(counts.sum())
            stats.truncated += int(counts[window.lost > 0].sum())
            stats.tokens_lost += int(counts @ window.lost)
            problems |= several.everywhere({start + i: why for i, why in window.problems.items()})
            start = end
        pooled = several.spread([window.states for window in done], self.states_size)
        averaged = self.blocks < len(self.templates)  # of unit vectors, whatever becomes of the mean
        if (normalize or averaged) and len(self.templates) > 1:
            unit_parts(pooled, len(self.templates))
        if averaged:
            pooled = pooled.reshape(len(pooled), len(self.templates), -1).mean(axis=1)
        return checked(pooled, several.good, problems, normalize, first)

    def _windows(
        self, several: Iterable[list[str]], role: Role, tell: Callable[[Sequence[int]], None] | None
    ) -> Iterator[Window]:
        """Windows of texts through the passes, the next one tokenised meanwhile."""
        with ThreadPoolExecutor(1) as ahead:
            waiting: deque[Future[list[list[Row]]]] = deque()
            start = 0
            for texts in several:
                waiting.append(ahead.submit(self._rows, texts, role))
                if len(waiting) > 1:
                    yield (window := self._pass(waiting.popleft().result(), role, told_from(start, tell)))
                    start += len(window.states)
            for rows in waiting:
                yield self._pass(rows.result(), role, told_from(start, tell))

    def _rows(self, texts: list[str], role: Role) -> list[list[Row]]:
        """Model inputs of texts, for each group of templates that shares a pass."""
        return [self._builders[numbers[0]].rows(texts, role) for numbers in self._groups]

    def _pass(self, rows: list[list[Row]], role: Role, tell: Tell | None) -> Window:
        """A window's rows through the backbone, group by group."""
        size, width = len(rows[0]), self.backbone.hidden_size
        window = Window(
            np.empty((size, self.states_size), dtype=np.float32),
            np.array([row.lost for row in rows[0]], dtype=np.int64),
        )
        with self._lock:
            for numbers, some in zip(self._groups, rows, strict=True):
                poolings = [self.templates[number].pooling for number in numbers]
                passed = self._passes.run(some, poolings, self._builders[numbers[0]].prefix(role), tell)
                for place, number in enumerate(numbers):
                    part = passed.states[:, place * width : (place + 1) * width]
                    window.states[:, number * width : (number + 1) * width] = part
                window.problems |= passed.problems
                window.stats += passed.stats
        return window


def _groups(templates: Sequence[Template]) -> list[list[int]]:
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
