"""Model inputs: a template's words and a text joined as token ids, cut, and padded into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_embfilter.backbone import Backbone
from rag_embfilter.errors import ConfigError
from rag_embfilter.templates import Template, Truncation

# No tokenizer in use makes a token of more characters; texts far over the limit are cut to this many
# characters per token before they are tokenised, so that a book costs no more than a page.
CHARACTERS_PER_TOKEN = 128
# Characters tokenised at once: their ids are held before they are cut, some 40 bytes each.
SLICE = 1_000_000


@dataclass(frozen=True)
class Row:
    """One text as the model sees it.

    Attributes:
        ids: token ids, int32 `[tokens]`.
        start: first position that `mean` pooling counts; it counts all from there on. (0 for a masked LM: as
            is usual there, it counts all that the model sees.)
        lost: text tokens cut away; a lower bound for texts far over the limit.
    """

    ids: NDArray[np.int32]
    start: int
    lost: int


class RowBuilder:
    """Joins begin token, template words and text ids into rows.

    Template and text are tokenised apart, so that the template never merges with the text and is
    never cut, and only the text is.
    """

    def __init__(self, backbone: Backbone, template: Template, max_length: int) -> None:
        self.tokenizer = backbone.tokenizer
        self.template = template
        self.max_length = max_length
        self.begin, self.end = backbone.wrapping_tokens()
        self.masked = backbone.masked
        if not backbone.masked:
            self.end = [backbone.end_token()] if template.end_token else []
            self.begin = self.begin or self.end
        self.words = {role: self.text_ids(template.pieces(role)) for role in ("document", "query")}
        self._check_positions(backbone)

    def _check_positions(self, backbone: Backbone) -> None:
        if backbone.max_positions is None:
            return
        for words in self.words.values():
            fixed = len(self.begin) + len(self.end) + sum(map(len, words))
            room = (backbone.max_positions - fixed) // (len(words) - 1)
            if self.max_length > room:
                raise ConfigError(
                    f"max_length {self.max_length}: {backbone.name!r} takes {backbone.max_positions} "
                    f"positions, and this template leaves room for texts of {max(room, 0)} tokens. "
                    f"Set max_length={max(room, 0)} or less (--max-length)."
                )

    def text_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text alone, with nothing added."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids

    def prefix(self, role: str) -> list[int]:
        """The token ids that every row of a role begins with."""
        return self.begin + self.words[role][0]

    def rows(self, texts: Sequence[str], role: str) -> list[Row]:
        """One row per text; a row of a text without any token has no text ids between its words."""
        words = self.words[role]
        rows: list[Row] = []
        waiting: list[str] = []
        size = 0
        for text in texts:
            waiting.append(self._shorten(text))
            size += len(waiting[-1])
            if size >= SLICE:
                rows += [self._row(ids, words) for ids in self.text_ids(waiting)]
                waiting, size = [], 0
        return rows + [self._row(ids, words) for ids in self.text_ids(waiting)]

    def _shorten(self, text: str) -> str:
        keep = self.max_length * CHARACTERS_PER_TOKEN
        if len(text) <= 2 * keep:
            return text
        return text[:keep] + text[-keep:] if self.template.truncation == "middle" else text[:keep]

    def _row(self, text: list[int], words: list[list[int]]) -> Row:
        kept = cut(text, self.max_length, self.template.truncation)
        ids = list(self.begin)
        start = 0
        for piece in words[:-1]:
            ids += piece
            start = len(ids)
            ids += kept
        ids += words[-1] + self.end
        return Row(np.array(ids, dtype=np.int32), 0 if self.masked else start, len(text) - len(kept))


def fault(text: object, unknown: Sequence[str] = ()) -> str | None:
    """Why a text cannot be embedded, or None. `unknown`: tokens the model has no row for."""
    if not isinstance(text, str):
        return f"expected a text, got {type(text).__name__}"
    if not text.strip():
        return "the text is empty or only white space"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the text is not valid Unicode ({error.reason} at {error.start})"
    if found := next((token for token in unknown if token in text), None):
        return f"the text holds {found!r}, a token that the model has no weights for"
    return None


def cut(ids: list[int], limit: int, truncation: Truncation) -> list[int]:
    """At most `limit` ids: the first ones, or (`middle`) the first and the last half."""
    if len(ids) <= limit:
        return ids
    if truncation == "end":
        return ids[:limit]
    tail = limit // 2
    return ids[: limit - tail] + ids[len(ids) - tail :]


def batches(lengths: Sequence[int], batch_tokens: int, spare: int = 0) -> Iterator[list[int]]:
    """Positions of rows in batches of at most `batch_tokens` tokens, padding included; longest first.

    A row longer than that is a batch of its own. A batch also ends when its padding would pass `spare`
    tokens, what one more batch costs (0: only when it is full).
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batch: list[int] = []
    padding = 0
    for i in order:
        width = lengths[batch[0]] if batch else lengths[i]
        padding += width - lengths[i]
        if batch and ((len(batch) + 1) * width > batch_tokens or 0 < spare < padding):
            yield batch
            batch, padding = [], 0
        batch.append(i)
    if batch:
        yield batch


@dataclass(frozen=True)
class Batch:
    """Padded rows `[batch, seq]`: `ids`, `mask` (1 for a real token), `span` (1 where `mean` counts)."""

    ids: Tensor
    mask: Tensor
    span: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device, copied beside its work."""
        if device.type != "cuda":
            return self
        return Batch(*(part.pin_memory().to(device, non_blocking=True) for part in vars(self).values()))


def pad(rows: Sequence[Row], pad_id: int, side: str, skip: int = 0) -> Batch:
    """Pad rows to the longest, on the `right` or the `left`, without the first `skip` ids of each."""
    lengths = np.array([len(row.ids) - skip for row in rows])[:, None]
    starts = np.array([row.start - skip for row in rows])[:, None]
    place = np.arange(lengths.max())[None]
    if side == "left":
        place = place - (lengths.max() - lengths)
    real = (0 <= place) & (place < lengths)
    ids = np.full(real.shape, pad_id, dtype=np.int64)
    ids[real] = np.concatenate([row.ids[skip:] for row in rows])
    span = real & (place >= starts)
    return Batch(*(torch.from_numpy(part.astype(np.int64)) for part in (ids, real, span)))
