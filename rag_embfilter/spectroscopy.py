"""Logit spectroscopy: how strongly frequent tokens respond to each direction of the unembedding.

Source: EmbedFilter, arXiv 2606.07502, section 3. With token frequencies `p`, the average token is
`h = log(p) W^+`. Taking direction `v_i` out of `h` changes the logit of token `j` by
`-(h . v_i)(W v_i)_j`, so the responses of all directions come from one product.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_embfilter.errors import ConfigError
from rag_embfilter.spectrum import Spectrum

DoubleArray = NDArray[np.float64]
FREQUENT = 100
TEXTS_AT_ONCE = 512
ROWS_AT_ONCE = 4096


def token_counts(tokenizer: Any, texts: Iterable[str], vocab_size: int) -> DoubleArray:
    """How often each token occurs in texts, float64 `[vocab_size]`; the texts are read once, in parts."""
    counts = np.zeros(vocab_size)
    part: list[str] = []

    def count() -> None:
        ids = tokenizer(part, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for row in ids["input_ids"]:
            np.add.at(counts, row, 1)

    for text in texts:
        part.append(text)
        if len(part) == TEXTS_AT_ONCE:
            count()
            part.clear()
    if part:
        count()
    if not counts.any():
        raise ConfigError("there is no token to count; give texts of the corpus.")
    return counts


def vocabulary_order_counts(tokenizer: Any, vocab_size: int) -> DoubleArray:
    """Counts by Zipf's law over the vocabulary's order, when no text is given.

    A byte-pair vocabulary is built most frequent merges first, so its order is roughly one of
    frequency. Single bytes and special tokens, which come before the merges, count least.
    """
    special = set(tokenizer.all_special_ids)
    vocabulary = tokenizer.get_vocab()
    merged = sorted(i for token, i in vocabulary.items() if len(token) > 1 and i not in special)
    counts = np.zeros(vocab_size)
    counts[merged] = len(merged) / np.arange(1, len(merged) + 1)
    return counts


def frequent_tokens(counts: DoubleArray, used_rows: Tensor, n: int = FREQUENT) -> NDArray[np.int64]:
    """Ids of the `n` most frequent tokens, most frequent first."""
    usable = np.where(used_rows.numpy(), counts, -1.0)
    return np.argsort(-usable, kind="stable")[:n]


def average_token(
    unembedding: Tensor, used_rows: Tensor, spectrum: Spectrum, counts: DoubleArray
) -> DoubleArray:
    """The hidden state whose logits are the tokens' log-frequencies, in the least-squares sense.

    Args:
        unembedding: `[vocab, hidden]`; rows outside `used_rows` are left out.
        counts: `[vocab]`; half a count is added to each, so that unseen tokens have a logarithm.

    Returns: float64 `[hidden]`: `log(p) W^+`, by the spectrum: `W^+ = V S^-2 V^T W^T`.
    """
    if counts.shape != (len(unembedding),) or (counts < 0).any():
        raise ConfigError(f"token counts of shape {counts.shape}: expected {len(unembedding)} of 0 or more.")
    log_p = np.log((counts + 0.5) / (counts[used_rows.numpy()] + 0.5).sum())
    projected = np.zeros(unembedding.shape[1])
    for start in range(0, len(unembedding), ROWS_AT_ONCE):
        used = used_rows[start : start + ROWS_AT_ONCE]
        rows = unembedding[start : start + ROWS_AT_ONCE][used].to(torch.float32).double().numpy()
        projected += rows.T @ log_p[start : start + ROWS_AT_ONCE][used.numpy()]
    directions = spectrum.directions.astype(np.float64)
    variances = spectrum.singular_values.astype(np.float64) ** 2
    usable = variances > variances.max() * 1e-12  # a direction no token uses has no inverse
    inverse = np.divide(1.0, variances, out=np.zeros_like(variances), where=usable)
    average: DoubleArray = (directions @ projected * inverse) @ directions
    return average


def response(
    unembedding: Tensor, spectrum: Spectrum, average: DoubleArray, tokens: NDArray[np.int64]
) -> DoubleArray:
    """Relative change of the tokens' logits when a direction is taken out of the average token.

    Returns: float64 `[hidden]`: `dpi_i = sum_j |w'_j - w_j| / sum_j |w_j|` over the given tokens.
    """
    rows = unembedding[torch.from_numpy(tokens)].to(torch.float32).double().numpy()
    directions = spectrum.directions.astype(np.float64)
    change = np.abs(directions @ average) * np.abs(rows @ directions.T).sum(axis=0)
    total = np.abs(rows @ average).sum()
    return np.asarray(change / total)
