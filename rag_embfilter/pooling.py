"""Pooling: one vector per text out of hidden states, in float32, whatever side the padding is on."""

from __future__ import annotations

import torch
from torch import Tensor


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Hidden state of each row's last token under the mask.

    Args:
        hidden: `[batch, seq, hidden]`, any float dtype.
        mask: `[batch, seq]`, 1 where a token counts; at least one per row.

    Returns: float32 `[batch, hidden]`.
    """
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last].float()


def mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean hidden state of each row's tokens under the mask; shapes as in `last_token`."""
    kept = mask.bool().unsqueeze(2)
    # Not a product with the mask: a padded position may hold NaN, and 0 * NaN is NaN.
    return hidden.float().masked_fill(~kept, 0.0).sum(dim=1) / kept.sum(dim=1)


def first_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Hidden state of each row's first token under the mask; shapes as in `last_token`."""
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.argmax(dim=1)].float()


POOLINGS = {"last": last_token, "mean": mean, "cls": first_token}
