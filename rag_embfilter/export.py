"""Exports: encoder and filter as a folder that plain `SentenceTransformer(folder)` loads.

No code of this package is needed to read it: template and begin token live in the tokenizer's
post-processor, the filter in a `Dense` module. The files are written in the layout that every release of
sentence-transformers reads, and servers too, rather than in that of the release installed here.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from rag_embfilter.checkpoints import quiet_transformers
from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, ExportError, MissingExtraError
from rag_embfilter.files import whole_folder, write_json
from rag_embfilter.filters import EmbFilter
from rag_embfilter.templates import Template

FloatArray = NDArray[np.float32]
TOLERANCE = 1e-5
MODULE = "sentence_transformers.models."
ROLES = ("document", "query")
# What sentence-transformers calls our poolings; the others are written down as absent.
MODES = {"last": "lasttoken", "mean": "mean_tokens"}
ALL_MODES = "cls_token mean_tokens max_tokens mean_sqrt_len_tokens weightedmean_tokens lasttoken".split()
ODD_TEXTS = (
    "a",
    " Leading space, and trailing. ",
    "Two\nlines\tand a tab",
    'She said: "in one word:" {text}',
    "Größe, naïve, Ελληνικά, 東京で会いましょう, مرحبا",
    "👩‍👩‍👧 e\u0301 \u200b zero width",
    "12345678901234567890 !!!!!!!!",
    "def f(x):\n    return x ** 2",
)
# Run in a process of its own, where this package cannot be imported even if it is installed.
CHECK = """
import sys
sys.modules["rag_embfilter"] = None
import json, numpy, torch
torch.set_num_threads(int(sys.argv[2]))
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu", local_files_only=True)
texts = json.load(sys.stdin)
made = {"document": model.encode_document(texts), "query": model.encode_query(texts)}
numpy.savez(sys.argv[3], **made)
"""


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        folder: where.
        dim: size of its vectors.
        difference: largest difference between its vectors' entries and this package's, over both roles.
        max_tokens: its length limit in tokens, template included.
        copies: how often the backbone is in it: twice when queries have a template of their own.
    """

    folder: Path
    dim: int
    difference: float
    max_tokens: int
    copies: int


def export_sentence_transformers(encoder: Encoder, embfilter: EmbFilter, folder: str | Path) -> ExportReport:
    """Write encoder and filter as a sentence-transformers model, and check that it gives the same vectors.

    `encode_query` and `encode_document` of the model are this package's roles; `encode` takes a text for a
    document. The check runs in a process of its own, on odd texts, and asks for differences of at most 1e-5.
    A text over `max_length` tokens loses its end there, where templates that are pooled on the last token
    cut the middle here; the template's own words are never cut.

    Args:
        encoder: one template, computing in float32.
        embfilter: made from this encoder.
        folder: a new folder; nothing is left in it when the check fails.

    Raises:
        ConfigError: what cannot be expressed there (several templates, `last+mean`, an echo, words or a begin
            token before a text that is averaged), another dtype, or a folder that exists.
        MissingExtraError: sentence-transformers is not installed.
        ExportError: the model cannot be loaded, or gives other vectors.
    """
    folder = Path(folder)
    _require_expressible(encoder, embfilter)
    if folder.exists():
        raise ConfigError(f"folder {str(folder)!r} exists; give a new name, or remove it first.")
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingExtraError(
            "an export is checked with sentence-transformers, which is not installed: "
            "`pip install 'rag-embfilter[export]'`."
        )
    with whole_folder(folder) as temporary:
        tokenizers = {role: _tokenizer(encoder, role) for role in ROLES}
        modules = _write_transformer(encoder, tokenizers, temporary)
        modules += _write_pooling(encoder, temporary) + _write_filter(embfilter, temporary, len(modules) + 1)
        _write_settings(modules, temporary)
        difference = _difference(encoder, embfilter, temporary)
        if difference > TOLERANCE:
            raise ExportError(
                f"the exported model's vectors differ by {difference:.2g} from this package's; expected at "
                f"most {TOLERANCE:g}. Nothing was written. Please report the backbone "
                f"({encoder.backbone.name!r}) and its tokenizer; serve it as docs/serving.md shows meanwhile."
            )
        limit = max(int(each.model_max_length) for each in tokenizers.values())
        copies = len(_kinds(encoder))
        report = ExportReport(folder, embfilter.dim, difference, limit, copies)
        _write_origin(encoder, embfilter, report, temporary)
    return report


def _require_expressible(encoder: Encoder, embfilter: EmbFilter) -> None:
    """Raise `ConfigError` for what sentence-transformers' modules cannot say."""
    if len(encoder.templates) > 1:
        raise ConfigError(
            f"{len(encoder.templates)} templates or poolings are combined here, each scaled to unit length "
            "for itself; sentence-transformers joins before it scales. Export one template with one pooling."
        )
    if encoder.backbone.masked:
        raise ConfigError(
            f"backbone {encoder.backbone.name!r} is a masked language model: its filter reads the states "
            "after the transform of its head, and sentence-transformers pools those before it. Use it from "
            "here, or export a causal one."
        )
    (template,) = encoder.templates
    if len(template.pieces("document")) > 2 or len(template.pieces("query")) > 2:
        raise ConfigError(
            f"template {template.document!r} repeats the text and averages over the second copy; "
            "sentence-transformers averages over all tokens. Export prompteol, search or another template "
            "with the text in it once."
        )
    before = [encoder._builders[0].begin + encoder._builders[0].words[role][0] for role in ROLES]
    if template.pooling == "mean" and any(before):
        raise ConfigError(
            f"with this backbone {max(map(len, before))} tokens stand before the text (begin token, "
            "template), which mean pooling leaves out here and sentence-transformers would average in. "
            "Export a template that is pooled on the last token."
        )
    if encoder.backbone.dtype != torch.float32:
        raise ConfigError(
            f"this encoder computes in {encoder.backbone.dtype}; expected dtype float32, which the export is "
            "written and checked in. Load it with dtype='float32'."
        )
    if embfilter.hidden_size != encoder.hidden_size:
        raise ConfigError(
            f"the filter takes {embfilter.hidden_size} dimensions, this encoder gives {encoder.hidden_size}."
        )


def _kinds(encoder: Encoder) -> tuple[str, ...]:
    """Roles that need a transformer of their own: one serves both when their words are the same."""
    (template,) = encoder.templates
    return ROLES if template.document != template.query else ROLES[:1]


def _tokenizer(encoder: Encoder, role: str) -> PreTrainedTokenizerFast:
    """The backbone's tokenizer with the role's template in its post-processor, and no chat template."""
    builder = encoder._builders[0]
    head, tail = builder.words[role]
    before, after = builder.begin + head, tail + builder.end
    source = encoder.backbone.tokenizer
    plain = Tokenizer.from_str(source.backend_tokenizer.to_str())

    def piece(name: str, ids: list[int]) -> dict[str, Any]:
        return {"id": name, "ids": ids, "tokens": [plain.id_to_token(i) for i in ids]}

    pieces = [piece(name, ids) for name, ids in (("head", before), ("tail", after)) if ids]
    named = {each["id"] for each in pieces}
    pattern = [name for name in ("head", "$A", "tail") if name == "$A" or name in named]
    plain.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=pieces)
    plain.no_padding()
    limit = encoder.max_length + len(before) + len(after)
    plain.enable_truncation(limit)
    pad = source.pad_token or source.eos_token or plain.id_to_token(0)
    names = {key: source.special_tokens_map[key] for key in _token_names(source)}
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, **(names | {"pad_token": pad}), model_max_length=limit, padding_side="right"
    )


def _token_names(tokenizer: Any) -> list[str]:
    kinds = ("bos_token", "eos_token", "unk_token")
    return [kind for kind in kinds if isinstance(tokenizer.special_tokens_map.get(kind), str)]


def _write_transformer(
    encoder: Encoder, tokenizers: dict[str, PreTrainedTokenizerFast], folder: Path
) -> list[tuple[str, str]]:
    """Backbone and tokenizer, or a router over two of them. Returns (path, type) of the module."""
    kinds = _kinds(encoder)
    if len(kinds) == 1:
        _write_backbone(encoder, tokenizers["document"], folder)
        return [("", "Transformer")]
    first = folder / "document_0_Transformer"
    _write_backbone(encoder, tokenizers["document"], first)
    second = folder / "query_0_Transformer"
    shutil.copytree(first, second, ignore=shutil.ignore_patterns("token*"))
    _write_tokenizer(tokenizers["query"], second)
    _write_router(folder, "Transformer")
    return [("", "Router")]


def _write_backbone(encoder: Encoder, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    with quiet_transformers():
        encoder.backbone.model.save_pretrained(folder)
    _write_tokenizer(tokenizer, folder)


def _write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # The generic class takes tokenizer.json as it is; a family's own would put its begin token in again.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(path, settings)
    limit = {"max_seq_length": int(tokenizer.model_max_length), "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", limit)


def _write_pooling(encoder: Encoder, folder: Path) -> list[tuple[str, str]]:
    mode = MODES[encoder.templates[0].pooling]
    modes = {f"pooling_mode_{each}": each == mode for each in ALL_MODES}
    (folder / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": encoder.hidden_size, **modes, "include_prompt": True}
    write_json(folder / "1_Pooling/config.json", settings)
    return [("1_Pooling", "Pooling")]


def _write_filter(embfilter: EmbFilter, folder: Path, place: int) -> list[tuple[str, str]]:
    """Dense and what scales before and after it; a router over two where the roles' means differ."""
    document_mean, query_mean = embfilter.document_mean, embfilter.query_mean
    scale = [("_Normalize", "Normalize")]
    if document_mean is None and embfilter.filter_type == "raw":
        modules = scale
    elif document_mean is None:
        # A linear map without an offset gives the same direction at any length, so one scaling does; servers
        # apply a Dense module right after pooling.
        _write_dense(embfilter.matrix, None, folder / f"{place}_Dense")
        modules = [("_Dense", "Dense"), *scale]
    elif query_mean is not None and np.array_equal(document_mean, query_mean):
        _write_dense(embfilter.matrix, document_mean, folder / f"{place + 1}_Dense")
        modules = [*scale, ("_Dense", "Dense"), *scale]
    else:
        router = folder / f"{place + 1}_Router"
        for role, mean in zip(ROLES, (document_mean, query_mean), strict=True):
            _write_dense(embfilter.matrix, mean, router / f"{role}_0_Dense")
        _write_router(router, "Dense")
        modules = [*scale, ("_Router", "Router"), *scale]
    for number, (name, kind) in enumerate(modules, place):
        (folder / f"{number}{name}").mkdir(exist_ok=kind != "Normalize")
    return [(f"{number}{name}", kind) for number, (name, kind) in enumerate(modules, place)]


def _write_dense(matrix: FloatArray, mean: FloatArray | None, folder: Path) -> None:
    """`matrix (u - mean)` as `matrix u + bias`."""
    folder.mkdir(parents=True)
    weights = {"linear.weight": torch.from_numpy(np.ascontiguousarray(matrix))}
    if mean is not None:
        bias = -(matrix.astype(np.float64) @ mean.astype(np.float64)).astype(np.float32)
        weights["linear.bias"] = torch.from_numpy(bias)
    save_file(weights, str(folder / "model.safetensors"))
    write_json(
        folder / "config.json",
        {
            "in_features": int(matrix.shape[1]),
            "out_features": int(matrix.shape[0]),
            "bias": mean is not None,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
    )


def _write_router(folder: Path, kind: str) -> None:
    write_json(
        folder / "router_config.json",
        {
            "types": {f"{role}_0_{kind}": f"{MODULE}{kind}" for role in ROLES},
            "structure": {role: [f"{role}_0_{kind}"] for role in ROLES},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        },
    )


def _write_settings(modules: Sequence[tuple[str, str]], folder: Path) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{MODULE}{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def _write_origin(encoder: Encoder, embfilter: EmbFilter, report: ExportReport, folder: Path) -> None:
    """What the folder was made from, for people and for `grep`."""
    from rag_embfilter import __version__

    made = encoder.fingerprint | embfilter.fingerprint
    origin = {
        "rag_embfilter": __version__,
        "fingerprint": made.digest,
        "query_mean": embfilter.query_digest,
        "parts": dict(made.parts),
        "dim": report.dim,
        "difference": report.difference,
    }
    write_json(folder / "embfilter.json", origin)


def check_texts(encoder: Encoder) -> list[str]:
    """Odd texts up to the encoder's limit; over it only where the cut is the same on both sides."""
    unknown = encoder.backbone.tokens_without_row
    specials = [token for token in encoder.backbone.tokenizer.all_special_tokens if token not in unknown]
    texts = [*ODD_TEXTS, *(f"the token {each} in a text" for each in specials[:4])]
    texts = [text for text in texts if encoder.count_tokens(text) <= encoder.max_length]
    words = 1
    while encoder.count_tokens("word " * (words + 1)) <= encoder.max_length:
        words += max(1, (encoder.max_length - encoder.count_tokens("word " * words)) // 8)
    texts.append("word " * words)
    template: Template = encoder.templates[0]
    if template.truncation == "end":
        texts.append("some more words " * encoder.max_length)
    return texts


def _difference(encoder: Encoder, embfilter: EmbFilter, folder: Path) -> float:
    """Largest difference between the exported model's vectors and ours."""
    texts = check_texts(encoder)
    ours = {
        "document": embfilter.apply(encoder.encode_documents(texts), "document"),
        "query": embfilter.apply(encoder.encode_queries(texts), "query"),
    }
    theirs = _encoded_elsewhere(texts, folder)
    for role in ROLES:
        if theirs[role].shape != ours[role].shape:
            raise ExportError(
                f"the exported model gives vectors of shape {theirs[role].shape}, expected "
                f"{ours[role].shape}. Please report the backbone {encoder.backbone.name!r}."
            )
    return float(max(np.abs(ours[role] - theirs[role]).max() for role in ROLES))


def _encoded_elsewhere(texts: Sequence[str], folder: Path) -> dict[str, FloatArray]:
    """Vectors by role from plain sentence-transformers, in a process that cannot import this package."""
    with tempfile.TemporaryDirectory() as elsewhere:
        result = Path(elsewhere) / "vectors.npz"
        command = [sys.executable, "-P", "-c", CHECK, str(folder.resolve()), str(torch.get_num_threads())]
        done = subprocess.run(
            [*command, str(result)],
            input=json.dumps(list(texts)),
            capture_output=True,
            text=True,
            cwd=elsewhere,
            check=False,
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ExportError(
                f"sentence-transformers cannot load or run the exported model ({why}). Check that "
                "sentence-transformers 5 or later works here: `pip install 'rag-embfilter[export]'`."
            )
        with np.load(result) as arrays:
            return {role: arrays[role] for role in ROLES}
