"""The attention a backbone uses: on a processor two matrix products for short texts, on CUDA the fastest.

PyTorch's fused kernel for processors is made for long sequences. For the lengths that passages and
questions have, plain products are faster, most of all in bfloat16. Models find them through
transformers' attention interface; no modeling code is touched.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_flash_attn_2_available

NAME = "embfilter_short"
# Longest sequence for which the scores are held whole; beyond, the fused kernel is as fast and needs less.
SHORT = 512


def choose_attention(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model the fastest attention present, where it would else use PyTorch's kernel.

    On CUDA flash-attention when it is installed and the dtype is a half; on a processor `short_attention`.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return
    if device.type == "cpu":
        AttentionInterface.register(NAME, short_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    elif device.type == "cuda" and dtype != torch.float32 and is_flash_attn_2_available():
        with suppress(ImportError, ValueError):  # not for this architecture, or this GPU
            model.set_attn_implementation("flash_attention_2")


def short_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it.

    Args:
        query: `[batch, heads, q, head_dim]`.
        key, value: `[batch, key_heads, kv, head_dim]`; each serves `heads / key_heads` heads.
        attention_mask: bool `[batch or 1, 1, q, kv]`, true where a query sees a key; None is causal.

    Returns: `[batch, q, heads, head_dim]`, and None for the weights.
    """
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    plain = options.get("position_bias") is None and options.get("softcap") is None
    causal = attention_mask is None and queries == keys and options.get("is_causal") in (None, True)
    masked = attention_mask is not None and attention_mask.dtype == torch.bool
    fits = 1 < queries and keys <= SHORT and heads % key_heads == 0 and not options.get("dropout")
    if not (fits and plain and (causal or masked) and query.device.type == "cpu"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    group = heads // key_heads
    bias = _bias(attention_mask, (queries, keys), query.dtype)
    scores = torch.baddbmm(
        bias.expand(batch, key_heads, group, queries, keys).reshape(batch * key_heads, group * queries, keys),
        query.reshape(batch * key_heads, group * queries, width),
        key.reshape(batch * key_heads, keys, width).transpose(1, 2),
        alpha=width**-0.5 if scaling is None else scaling,
    )
    mixed = torch.bmm(scores.softmax(dim=-1), value.reshape(batch * key_heads, keys, value.shape[-1]))
    return mixed.view(batch, heads, queries, -1).transpose(1, 2), None


def _bias(mask: Tensor | None, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`[batch or 1, 1, 1, q, kv]`: 0 where a query sees a key, else what no score can make up for."""
    seen = torch.ones(size, dtype=torch.bool).tril_()[None, None] if mask is None else mask
    # Not infinity: padding on the left sees nothing, and would become NaN that spreads.
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(2)
