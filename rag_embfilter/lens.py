"""The vocabulary lens: which tokens an embedding speaks of, before and after a filter.

An embedding read through the unembedding gives a logit per token (arXiv 2606.07502, section 2). Raw
embeddings of causal LMs lean on frequent, meaningless tokens; the lens shows how far a filter ends that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_embfilter.backbone import Backbone
from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError
from rag_embfilter.filters import EmbFilter

FloatArray = NDArray[np.float32]
TOP = 10
VECTORS_AT_ONCE = 64


@dataclass(frozen=True)
class Reading:
    """An embedding's strongest tokens: their text and their logits, strongest first."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    logits: tuple[float, ...]


def read(
    encoder: Encoder, embeddings: FloatArray, embfilter: EmbFilter | None = None, top: int = TOP
) -> list[Reading]:
    """The strongest tokens of raw embeddings `[n, hidden]`, seen through a filter when one is given.

    A filtered vector is carried back to full size by the matrix's pseudo-inverse; for rows that are
    orthonormal that is the projection `projector() u`. Tokens of rows that nothing uses never appear.

    Raises `ConfigError` for several templates or a `top` that is not between 1 and the vocabulary's size.
    """
    backbone = encoder.backbone
    check(encoder, top)
    vectors = np.asarray(embeddings, dtype=np.float32)
    if embfilter is not None:
        back = np.linalg.pinv(embfilter.matrix.astype(np.float64)).T
        vectors = (embfilter.apply(vectors, normalize=False) @ back).astype(np.float32)
    return [
        Reading(tuple(shown(encoder, i) for i in row), tuple(row), tuple(strengths))
        for row, strengths in _strongest(backbone, torch.from_numpy(vectors), top)
    ]


def check(encoder: Encoder, top: int) -> None:
    """Raise `ConfigError` for what `read` cannot do, before anything is encoded."""
    if encoder.hidden_size != encoder.backbone.hidden_size:
        raise ConfigError("the lens reads one template with one pooling; make an encoder with a single one.")
    tokens = int(encoder.backbone.used_rows.sum())
    if not 1 <= top <= tokens:
        raise ConfigError(f"top {top}: expected 1 to {tokens}, the vocabulary's size.")


def _strongest(backbone: Backbone, vectors: Tensor, top: int) -> Iterator[tuple[list[int], list[float]]]:
    """Ids and logits of each vector's strongest tokens; a corpus's logits are never all held."""
    unembedding = backbone.unembedding.to(torch.float32).T
    for part in vectors.split(VECTORS_AT_ONCE):
        logits = part @ unembedding
        logits[:, ~backbone.used_rows] = -torch.inf
        values, ids = logits.topk(top, dim=1)
        yield from zip(ids.tolist(), values.tolist(), strict=True)


def frequent_share(readings: Sequence[Reading], frequent: NDArray[np.int64]) -> float:
    """Share of the readings' tokens that are among the frequent ones, 0 to 1."""
    if not readings:
        raise ConfigError("there is no reading to take a share of.")
    common = set(frequent.tolist())
    hits = [token in common for reading in readings for token in reading.ids]
    return sum(hits) / len(hits)


def shown(encoder: Encoder, token: int) -> str:
    """A token as text; one that is a part of a character is shown as the vocabulary writes it."""
    tokenizer = encoder.backbone.tokenizer
    text = str(tokenizer.decode([token]))
    return str(tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text or not text else text
