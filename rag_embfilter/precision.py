"""Half precision that does not round the residual stream.

Each layer adds to the hidden states, and in bfloat16 each sum keeps eight bits. Raw embeddings lie close
together, so that their ranks feel it. With the sums in float32, and every matrix product in the half dtype
as before, the distance to float32 vectors halves at no measurable cost. Hooks do it; no modeling code is
touched.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Families whose layers read the residual stream through RMS norms alone.
FAMILIES = frozenset("llama mistral qwen2 qwen3 smollm3 phi3 gemma gemma2 gemma3_text".split())


def keep_residual_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let a base model's embeddings and their sums be float32, where its weights are in a half dtype.

    A copy of the model that is turned to float32 computes in float32 throughout.
    """
    if dtype == torch.float32 or model.config.get_text_config().model_type not in FAMILIES:
        return
    base: Any = model
    base.get_input_embeddings().register_forward_hook(_float32)
    base.rotary_emb.register_forward_hook(partial(_like, base.norm))
    norms = [part for layer in base.layers for part in layer.children() if _is_norm(part)]
    for norm in [*norms, base.norm]:
        norm.register_forward_hook(partial(_like, norm))


def _is_norm(part: torch.nn.Module) -> bool:
    return type(part).__name__.endswith("RMSNorm")


def _float32(module: torch.nn.Module, given: Any, output: Tensor) -> Tensor:
    return output.float()


def _like(norm: Any, module: torch.nn.Module, given: Any, output: Any) -> Any:
    """A tensor, or several, in the dtype of a norm's weights."""
    dtype = norm.weight.dtype
    return output.to(dtype) if isinstance(output, Tensor) else tuple(each.to(dtype) for each in output)
