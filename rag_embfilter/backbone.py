"""Backbones: a language model and its unembedding. The one place that knows architectures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PreTrainedModel

from rag_embfilter.attention import choose_attention
from rag_embfilter.checkpoints import PACKAGED, UNEMBEDDING_FROM, locate, quiet_transformers, read
from rag_embfilter.devices import DTYPES, pick_device, pick_dtype
from rag_embfilter.errors import BackboneError, ConfigError
from rag_embfilter.precision import keep_residual_float32

# Families whose base model is known to be causal and to end in the final norm. Others are probed.
KNOWN_FAMILIES = frozenset(
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gpt2 gpt_neox phi phi3 smollm3 olmo2".split()
)
# Backbones in memory; a second encoder of the same one shares it.
_LOADED: WeakValueDictionary[tuple[Any, ...], Backbone] = WeakValueDictionary()
_UNKNOWN = (
    "backbone {!r}: the architecture {!r} does something between its base model and its unembedding that "
    "this package does not know. Please report it."
)
_LENDING = (
    ", or lend it that of the causal language model it was trained from (--unembedding-from BASE; in Python, "
    f"the backbone {{}}{UNEMBEDDING_FROM}BASE)"
)
GGUF_PADDING = re.compile(r"\[PAD\d+\]")  # how a GGUF names rows that no token uses


@dataclass(frozen=True, eq=False)
class Backbone:
    """A language model ready to encode.

    Attributes:
        name: what the user asked for: alias, hub id, folder or GGUF path.
        revision: what pins it: a hub commit, or `sha256:` of the weights of a folder or file.
        identity: name and revision where the name matters (hub), the revision alone where it is a path.
        model: the base model, whose last hidden state comes after the final norm; on `device`. Of a masked LM
            all but the output matrix, so that its `logits` are the states which that matrix reads.
        tokenizer: its tokenizer.
        unembedding: output matrix `[vocab_size, hidden_size]` in the stored dtype, on the CPU.
        used_rows: bool `[vocab_size]`, which rows belong to a token of the tokenizer.
        max_positions: the longest input the model takes, in tokens, or None when it has no bound.
        masked: a masked LM, which looks both ways; else a causal one.
        device_asked, dtype_asked: what the user asked for; None left the choice to us.
    """

    name: str
    revision: str
    identity: str
    model: PreTrainedModel
    tokenizer: Any
    unembedding: Tensor
    used_rows: Tensor
    max_positions: int | None
    masked: bool = False
    device_asked: str | None = None
    dtype_asked: str | torch.dtype | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name, never by weights; loading it again checks that the weights are the same."""
        revision = None if self.revision.startswith("sha256:") else self.revision
        return _reload, (self.name, revision, self.device_asked, self.dtype_asked, self.identity)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backbone:
        return self

    @property
    def hidden_size(self) -> int:
        """Width of a raw embedding."""
        return int(self.unembedding.shape[1])

    @cached_property
    def tokens_without_row(self) -> tuple[str, ...]:
        """Tokens that the tokenizer knows and the model does not (Gemma 3 has one), as written in a text."""
        rows = len(self.unembedding)
        return tuple(token for token, i in self.tokenizer.get_vocab().items() if i >= rows)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        return self.model.dtype

    def states(self, output: Any) -> Tensor:
        """What the unembedding reads, out of the model's output: `[batch, seq, hidden]`."""
        states: Tensor = output.logits if self.masked else output.last_hidden_state
        return states

    def wrapping_tokens(self) -> tuple[list[int], list[int]]:
        """Token ids the tokenizer itself puts before and after a text (none for SmolLM2, `<bos>` for Gemma,
        `[CLS]` and `[SEP]` for BERT).
        """
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("a")["input_ids"]
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
        return ([], []) if start is None else (list(full[:start]), list(full[start + len(bare) :]))

    def end_token(self) -> int:
        """Id of the end token. Raises `BackboneError` when the model has none."""
        end = self.tokenizer.eos_token_id
        if end is None:
            end = self.model.config.get_text_config().eos_token_id
        end = end[0] if isinstance(end, list) else end
        if end is None:
            raise BackboneError(
                f"backbone {self.name!r} has no end token, which this template needs. Use a template "
                "without one (prompteol, plain), or set eos_token in its tokenizer."
            )
        return int(end)


def load_backbone(
    name: str,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
) -> Backbone:
    """Load a causal or masked LM from an alias, a local folder, a `.gguf` file or a hub id.

    Args:
        name: `smollm2` (packaged weights), a path, or a hub id. Remote code is never run. `EMBEDDER::BASE`
            for a model that was trained to embed from the causal LM `BASE` and saved without its unembedding.
        revision: branch, tag or commit of a hub model.
        device: `cpu`, `cuda`, `cuda:1`, ...; by default CUDA when there is one, else the CPU.
        dtype: `float32`, `bfloat16` or `float16`; by default bfloat16 on CUDA and on processors that have
            it in hardware, else float32.

    Raises:
        BackboneError: not found, not readable, no unembedding, or an architecture that is not supported.
        ConfigError: unknown device or dtype, or a revision of something that has none.
    """
    where = pick_device(device)
    pick_dtype(dtype, where)  # a wrong one is named before anything is read
    own, lender = _names(name)
    source, pinned = locate(own)
    if pinned and revision is not None:
        raise ConfigError(f"revision {revision!r} pins a hub model, and {own!r} is a local file or folder.")
    place = (source, pinned or revision, lender and locate(lender), str(where))
    for loaded in [_LOADED.get((*place, kind)) for kind in DTYPES.values()]:
        if loaded is not None and loaded.dtype == pick_dtype(dtype, where, loaded.hidden_size):
            return loaded
    with quiet_transformers():
        whole, tokenizer = read(source, own, revision, bool(lender), _LENDING.format(own))
        masked = not lender and _is_masked(whole)
        model, unembedding, used = _lent(whole, lender, own) if lender else _parts(whole, tokenizer, name)
    if not pinned:
        pinned = getattr(whole.config, "_commit_hash", None) or revision or "unpinned"
    kind = pick_dtype(dtype, where, unembedding.shape[1])
    backbone = Backbone(
        name=name,
        revision=pinned,
        identity=pinned if pinned.startswith("sha256:") else f"{own}@{pinned}",
        model=model,
        tokenizer=tokenizer,
        unembedding=unembedding,
        used_rows=used,
        max_positions=_max_positions(whole),
        masked=masked,
        device_asked=device,
        dtype_asked=dtype,
    )
    for parameter in model.parameters():
        # Parameters only: `to(dtype)` would also round the rotary frequencies, which are buffers.
        parameter.data = parameter.data.to(kind)
    model.to(where)
    if masked:
        _require_dtype(backbone)
    else:
        choose_attention(model, where, kind)
        keep_residual_float32(model, kind)
    _LOADED[*place, kind] = backbone
    return backbone


def _names(name: str) -> tuple[str, str]:
    """A backbone's own name, and that of the model that lends its unembedding, or nothing."""
    own, lent, lender = name.partition(UNEMBEDDING_FROM)
    if not lent or Path(name).expanduser().exists():
        return name, ""
    if not own.strip() or not lender.strip():
        raise ConfigError(
            f"backbone {name!r}: expected EMBEDDER{UNEMBEDDING_FROM}BASE, the second the causal language "
            "model that the first was trained from (--unembedding-from BASE)."
        )
    return own, lender


def _reload(
    name: str,
    revision: str | None,
    device: str | None,
    dtype: str | torch.dtype | None,
    identity: str,
) -> Backbone:
    """A pickled backbone again, refused when its name leads to other weights now."""
    backbone = load_backbone(name, revision, device, dtype)
    if backbone.identity != identity:
        raise BackboneError(
            f"backbone {name!r} was {identity} when it was pickled and is {backbone.identity} here. "
            "Give both places the same weights."
        )
    return backbone


def origin(backbone: Backbone) -> tuple[str, str | None]:
    """Name and revision that load a backbone again, also from another working folder."""
    revision = backbone.revision
    names = [_absolute(name) for name in _names(backbone.name) if name]
    return UNEMBEDDING_FROM.join(names), None if revision.startswith("sha256:") else revision


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in PACKAGED and path.exists() else name


def _parts(whole: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Tensor, Tensor]:
    """The model without its output matrix; that matrix `[vocab_size, hidden_size]`, in the stored dtype, on
    the CPU; and which of its rows are used.
    """
    _require_unquantised(whole, name)
    base: Any = whole.base_model
    weight = getattr(whole.get_output_embeddings(), "weight", None)
    if base is whole or weight is None or weight.ndim != 2:
        raise BackboneError(
            f"backbone {name!r} ({whole.config.model_type}) has no unembedding matrix, so there is "
            "nothing to make a filter from. Use a causal language model."
        )
    used = _used_rows(tokenizer, len(weight))
    if _is_masked(whole):
        _open(whole, name)
        return whole, weight.detach(), used
    hidden = whole.config.get_text_config().hidden_size
    if weight.shape[1] != hidden:
        raise BackboneError(
            f"backbone {name!r}: its unembedding reads {weight.shape[1]} dimensions, its hidden states "
            f"have {hidden}. This architecture projects in between and is not supported."
        )
    _require_causal(base, name)
    _require_direct(whole, base, name)
    return base, weight.detach(), used


def _lent(embedder: PreTrainedModel, lender: str, name: str) -> tuple[Any, Tensor, Tensor]:
    """As `_parts` for an embedder without an output matrix, with that of the causal LM it comes from."""
    _require_unquantised(embedder, name)
    _require_causal(embedder, name)
    source, _ = locate(lender)
    whole, tokenizer = read(source, lender)
    if _is_masked(whole):
        raise BackboneError(f"{lender!r} is a masked language model; expected a causal one as the base.")
    base, unembedding, used = _parts(whole, tokenizer, lender)
    both: list[Any] = [model.get_input_embeddings() for model in (embedder, base)]
    ours, theirs = (each.weight.detach() for each in both)
    rows = min(len(ours), len(theirs))
    alike = ours.shape[1] == theirs.shape[1] == unembedding.shape[1]
    if alike:  # training leaves most of the vocabulary near where it was
        cosines = torch.nn.functional.cosine_similarity(ours[:rows].float(), theirs[:rows].float())
        alike = bool(cosines.median() > 0.5)
    if not alike or embedder.config.model_type != base.config.model_type:
        raise BackboneError(
            f"backbone {name!r} was not trained from {lender!r}: architecture, hidden size or vocabulary "
            "differ, so the unembedding of the one says nothing about the other. Give the model that its "
            "card names as its base."
        )
    return embedder, unembedding, used


def _is_masked(whole: PreTrainedModel) -> bool:
    kind: Any = MODEL_FOR_MASKED_LM_MAPPING.get(type(whole.config), None)
    return kind is not None and isinstance(whole, kind)


def _max_positions(whole: PreTrainedModel) -> int | None:
    """Longest input in tokens; families after RoBERTa count positions from the padding token's id on."""
    most = getattr(whole.config.get_text_config(), "max_position_embeddings", None)
    table = getattr(getattr(whole.base_model, "embeddings", None), "position_embeddings", None)
    first = getattr(table, "padding_idx", None)
    return most if most is None or first is None else most - first - 1


@torch.inference_mode()
def _open(masked_lm: PreTrainedModel, name: str) -> None:
    """Take the output matrix out of a masked LM, so that its logits are the states which the matrix reads:
    after the transform (dense layer, activation, norm) that such models have in between.
    """
    ids = torch.tensor([[1, 2, 3, 4, 5]]) % masked_lm.config.vocab_size
    padded = {
        "input_ids": torch.nn.functional.pad(ids, (0, 3)),
        "attention_mask": torch.tensor([[1] * 5 + [0] * 3]),
    }
    head: Any = masked_lm.get_output_embeddings()
    through: Any = torch.nn.Identity()
    through.bias = None  # some models hold a second name for it
    try:
        logits = masked_lm(input_ids=ids).logits.float()
        masked_lm.set_output_embeddings(through)
        states = masked_lm(input_ids=ids).logits
        ours = head(states.to(head.weight.dtype)).float()
        same = bool(torch.nn.functional.cosine_similarity(logits, ours, dim=-1).min() > 0.98)
        beside = masked_lm(**padded).logits[:, :5]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        same = False
    if not same:
        raise BackboneError(_UNKNOWN.format(name, masked_lm.config.model_type))
    if (states - beside).abs().max() > torch.finfo(states.dtype).eps ** 0.5 * states.abs().max():
        raise BackboneError(
            f"backbone {name!r}: in the architecture {masked_lm.config.model_type!r} padding reaches a text, "
            "so that vectors would depend on what they are encoded beside. Use another, such as BERT."
        )


@torch.inference_mode()
def _require_dtype(backbone: Backbone) -> None:
    """Check that a masked LM computes in its dtype: some have parts that do not."""
    try:
        backbone.model(
            input_ids=torch.tensor([[1, 2, 3, 4, 5]], device=backbone.device) % len(backbone.unembedding)
        )
    except RuntimeError as error:
        raise BackboneError(
            f"backbone {backbone.name!r} ({backbone.model.config.model_type}) does not compute in "
            f"{backbone.dtype} ({error}). Use dtype float32."
        ) from error


def _require_unquantised(model: PreTrainedModel, name: str) -> None:
    if getattr(model.config, "quantization_config", None):
        raise BackboneError(
            f"backbone {name!r} is quantised; a change of dtype would corrupt its weights without a word. "
            "Use the unquantised model, or a .gguf file, which is dequantised."
        )


def _known(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return config.model_type in KNOWN_FAMILIES and not getattr(config, "use_bidirectional_attention", False)


@torch.inference_mode()
def _require_causal(base: PreTrainedModel, name: str) -> None:
    """Check that a base model of a family that is not known looks left alone."""
    if _known(base):
        return
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]) % base.config.get_text_config().vocab_size
    hidden = base(input_ids=ids, use_cache=False).last_hidden_state.float()
    if (hidden[0, :3] - hidden[1, :3]).abs().max() > 1e-3 * hidden.abs().max():
        raise BackboneError(
            f"backbone {name!r} ({base.config.model_type}) is not causal: a token's hidden state depends on "
            "the tokens after it. Use a causal language model, or a masked one."
        )


@torch.inference_mode()
def _require_direct(causal_lm: PreTrainedModel, base: PreTrainedModel, name: str) -> None:
    """Check that logits of a family that is not known read the last hidden state.

    They may be scaled or capped (Gemma, Cohere), so they are compared by direction.
    """
    if _known(base):
        return
    ids = torch.tensor([[1, 2, 3, 4, 5]]) % base.config.get_text_config().vocab_size
    hidden = base(input_ids=ids, use_cache=False).last_hidden_state
    logits = causal_lm(input_ids=ids, use_cache=False).logits.float()
    head: Any = causal_lm.get_output_embeddings()
    ours = head(hidden.to(head.weight.dtype)).float()
    if torch.nn.functional.cosine_similarity(logits, ours, dim=-1).min() < 0.98:
        raise BackboneError(_UNKNOWN.format(name, base.config.model_type))


def _used_rows(tokenizer: Any, rows: int) -> Tensor:
    """Which rows of the unembedding a token can stand for: many models pad their vocabulary."""
    used = torch.zeros(rows, dtype=torch.bool)
    tokens = tokenizer.get_vocab().items()
    ids = torch.tensor(sorted(i for token, i in tokens if not GGUF_PADDING.fullmatch(token)))
    used[ids[ids < rows]] = True
    return used
