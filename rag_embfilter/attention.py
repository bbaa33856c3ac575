"""The attention a backbone uses: PyTorch's, but for bfloat16 on a processor, and flash-attention on CUDA.

PyTorch's fused kernel for processors gains nothing by bfloat16. Two plain products, a block of queries at
a time with no key that comes after it, take half its time. Models find them through transformers'
attention interface; no modeling code is touched.
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

NAME = "embfilter_blocks"
BLOCK = 128  # queries whose scores are held at a time; 64 to 256 are as fast


def choose_attention(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model the fastest attention present, where it would else use PyTorch's kernel.

    On CUDA flash-attention when it is installed and the dtype is a half; on a processor `blocked_attention`
    in bfloat16.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return
    if device.type == "cpu" and dtype == torch.bfloat16:
        AttentionInterface.register(NAME, blocked_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    elif device.type == "cuda" and dtype != torch.float32 and is_flash_attn_2_available():
        with suppress(ImportError, ValueError):  # not for this architecture, or this GPU
            model.set_attn_implementation("flash_attention_2")


def blocked_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers asks for it; what is not causal is left to PyTorch.

    Args:
        query: `[batch, heads, q, head_dim]`.
        key, value: `[batch, key_heads, kv, head_dim]`; each serves `heads / key_heads` heads.
        attention_mask: bool `[batch or 1, 1, q, kv]`, true where a query sees a key; None is causal.

    Returns: `[batch, q, heads, head_dim]`, and None for the weights.
    """
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    plain = options.get("position_bias") is None and options.get("softcap") is None
    causal = options.get("is_causal") in (None, True) and getattr(module, "is_causal", True)
    clear = queries == keys if attention_mask is None else attention_mask.dtype == torch.bool
    fits = 1 < queries <= keys and heads % key_heads == 0 and not options.get("dropout")
    if not (plain and causal and clear and fits and query.device.type == "cpu"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    group = heads // key_heads
    query = query.reshape(batch, key_heads, group, queries, width)
    key = key.reshape(batch * key_heads, keys, width).transpose(1, 2)
    value = value.reshape(batch * key_heads, keys, -1)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    ahead = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu_(1)
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        seen = stop + keys - queries  # keys before these queries' end
        size = (batch * key_heads, group * (stop - start))
        scores = torch.baddbmm(
            query.new_zeros(1, 1, 1),  # nothing to add
            query[..., start:stop, :].reshape(*size, width),
            key[..., :seen],
            beta=0,
            alpha=width**-0.5 if scaling is None else scaling,
        )
        each = scores.view(batch, key_heads, group, stop - start, seen)
        if attention_mask is None:
            each[..., start:] += _bias(ahead[: stop - start, : stop - start], query.dtype)
        else:
            each += _bias(~attention_mask[..., start:stop, :seen], query.dtype).unsqueeze(2)
        mixed = torch.bmm(scores.softmax(dim=-1), value[:, :seen])
        out[..., start:stop, :] = mixed.view(batch, key_heads, group, stop - start, -1)
    return out.view(batch, heads, queries, -1).transpose(1, 2), None


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, and where it is hidden what no score can make up for."""
    # Not infinity: padding on the left sees nothing, and would become NaN that spreads.
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
