"""A training penalty for those who fine-tune an embedder: keep it out of the frequent-token subspace."""

from __future__ import annotations

from torch import Tensor

from rag_embfilter.errors import ConfigError


def frequency_penalty(hidden_states: Tensor, edge_directions: Tensor) -> Tensor:
    """Mean share of the hidden states' energy that lies in the edge directions, 0 to 1.

    Differentiable; add it to a loss with a small weight.

    Args:
        hidden_states: `[..., hidden]`, any float dtype; pooled embeddings or all tokens.
        edge_directions: orthonormal rows `[k, hidden]`, such as the directions of the unembedding that
            an `edge` filter removes.

    Returns: a scalar in float32: `mean(|E h|^2 / |h|^2)`.

    Raises `ConfigError` when the sizes differ.
    """
    if edge_directions.ndim != 2 or hidden_states.shape[-1] != edge_directions.shape[1]:
        raise ConfigError(
            f"hidden states {tuple(hidden_states.shape)} and directions {tuple(edge_directions.shape)}: "
            "expected [..., hidden] and [k, hidden]."
        )
    states = hidden_states.float()
    edge = edge_directions.to(device=states.device, dtype=states.dtype)
    energy = (states @ edge.T).square().sum(dim=-1)
    return (energy / states.square().sum(dim=-1).clamp_min(1e-12)).mean()
