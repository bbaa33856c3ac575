"""Tiny random causal LMs with a tokenizer built in code, saved as model folders; and helpers around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIALS = ["<pad>", "<bos>", "<eos>"]
PADDED_ROWS = 13  # rows of the vocabulary that no token uses, as many real models have
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LAYERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16},
    "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16},
    "GPT2": {},
}
FAMILIES = tuple(_LAYERS)
_MASKED: dict[str, dict[str, Any]] = {
    "Bert": {},
    "XLMRoberta": {},
    "ModernBert": {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
    "DistilBert": {},
    "Albert": {"embedding_size": 16},  # its output matrix reads states of this size
}
MASKED_FAMILIES = tuple(_MASKED)


def tokenizer(
    begin: bool = False, end: bool = False, pad: str | None = None
) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token a byte, so that any text works and counts are plain to see."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    if begin or end:
        pattern = f"{'<bos> ' if begin else ''}$A{' <eos>' if end else ''}"
        built.post_processor = processors.TemplateProcessing(
            single=pattern, special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
    names = {"bos_token": "<bos>", "eos_token": "<eos>"} | ({"pad_token": pad} if pad else {})
    return transformers.PreTrainedTokenizerFast(tokenizer_object=built, **names)


def save_model(folder: Path, family: str = "Llama", seed: int = 0, **options: Any) -> Path:
    """A two-layer random model and its tokenizer as a folder that transformers loads.

    `family`: out of `FAMILIES` or `MASKED_FAMILIES`. `options`: `tied` for tied weights, tokenizer's `begin`,
    `end`, `pad`, and config overrides.
    """
    tokens = {key: options.pop(key) for key in ("begin", "end", "pad") if key in options}
    tied = options.pop("tied", False)
    built = tokenizer(**tokens)
    config_class = getattr(transformers, f"{family}Config")
    settings = {
        "vocab_size": len(built) + PADDED_ROWS,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": tied,
        **_SIZES,
        **(_LAYERS | _MASKED)[family],
        **options,
    }
    if family == "GPT2":
        settings |= {"n_positions": settings.pop("max_position_embeddings"), "n_inner": 48}
        del settings["intermediate_size"]
    if family == "DistilBert":
        settings |= {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    kind = transformers.AutoModelForMaskedLM if family in _MASKED else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    model = kind.from_config(config_class(**settings))
    for parameter in model.parameters():  # far from the flat initialisation, so that texts differ
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    built.save_pretrained(folder)
    return folder


def recipe(folder: Path, ids: list[int], start: int | None) -> torch.Tensor:
    """The plain transformers way to an embedding: one unpadded text, last hidden state of the whole
    causal LM, then its last token (`start` None) or the mean from `start` on, then L2 norm."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    hidden = out.hidden_states[-1][0]
    pooled = hidden[-1] if start is None else hidden[start:].mean(0)
    return torch.nn.functional.normalize(pooled, dim=0)


class ForwardCounter:
    """Counts the texts that go through an encoder's backbone."""

    def __init__(self, encoder: Any) -> None:
        self.texts = 0
        self.hook = encoder.backbone.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is None or cache.get_seq_length() > 0:  # else it is a template's prefix, no text
            self.texts += len(kwargs["input_ids"])

    def __enter__(self) -> ForwardCounter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hook.remove()


class Spoil:
    """Makes the hidden states of every text that contains `marker` take `value`."""

    def __init__(self, encoder: Any, marker: str, value: float) -> None:
        (self.token,) = encoder.backbone.tokenizer(marker, add_special_tokens=False)["input_ids"]
        self.value = value
        self.hook = encoder.backbone.model.register_forward_hook(self._spoil, with_kwargs=True)

    def _spoil(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        rows = (kwargs["input_ids"] == self.token).any(dim=1)
        output.last_hidden_state[rows] = self.value
        return output

    def __enter__(self) -> Spoil:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hook.remove()
