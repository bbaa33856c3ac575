"""Encoding on a GPU: vectors against float32, tokens a second, share of the measured peak, and rivals.

python benchmarks/encode_gpu.py [--torch-compile] [--json FILE]

Needs no network: the model has Qwen2.5-0.5B's shape and random weights, the texts are random letters. Without
a GPU the same runs on the processor with a small model, so that the script is never broken.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from machine import (
    Reference,
    SentenceTransformers,
    agreement,
    flops,
    lengths_of,
    peak_flops,
    saved_base,
    seconds,
)
from tokenizers import Tokenizer, models, pre_tokenizers

from rag_embfilter import Encoder

SHAPES = {
    "cuda": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2000,
    },
}

TEMPLATE = 'Say "{text}":'


def random_model(folder: Path, shape: dict[str, int]) -> Path:
    """A Qwen2 with random weights, and a tokenizer of one token a byte."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**shape, max_position_embeddings=4096, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # so far from the start that texts differ
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


def long_tailed(count: int) -> list[str]:
    """Texts of 4 to 1,000 tokens, most of them short."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(4.0, 1.0, count), 4, 1000).astype(int)
    return ["".join(draw.choice(list("abcdefghijklmnopqrstuvwxyz "), length)) for length in lengths]


def measured(folder: Path, device: str, texts: list[str], torch_compile: bool) -> dict[str, Any]:
    """Everything, as figures."""
    settings = {"template": TEMPLATE, "device": device, "max_length": 1024}
    full = Encoder(str(folder), dtype="float32", **settings)
    expected = full.encode_documents(texts[:256])
    del full
    encoder = Encoder(str(folder), dtype="bfloat16", torch_compile=torch_compile, **settings)
    where = encoder.backbone.device
    ours = encoder.encode_documents(texts)  # also warms up
    took = min(seconds(lambda: encoder.encode_documents(texts), where) for _ in range(3))
    lengths = lengths_of(encoder, texts)
    peak = peak_flops(torch.bfloat16, where)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "attention": encoder.backbone.model.config._attn_implementation,
        "cosine_to_float32": agreement(ours[:256], expected),
        "tokens_per_second": sum(lengths) / took,
        "padding_share": encoder.stats.padding_share,
        "peak_tflops": peak / 1e12,
        "share_of_peak": flops(encoder.backbone.model.config, lengths) / took / peak,
    }
    with tempfile.TemporaryDirectory() as base:
        saved_base(encoder, Path(base))
        rivals = {
            "sentence_transformers": SentenceTransformers(Path(base), encoder),
            "reference": Reference(Path(base), encoder),
        }
        for name, rival in rivals.items():
            rival.encode(texts[:128])
            theirs = seconds(lambda rival=rival: rival.encode(texts), where)
            found[f"times_{name}"] = theirs / took
    if where.type == "cuda":
        found["gpu_peak_mib"] = torch.cuda.max_memory_allocated(where) / 2**20
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, write what was asked for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--texts", type=int, help="how many; by default 8,192 on a GPU and 128 without")
    parser.add_argument("--torch-compile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = arguments.texts or (8192 if device == "cuda" else 128)
    with tempfile.TemporaryDirectory() as folder:
        random_model(Path(folder), SHAPES[device])
        texts = long_tailed(count)
        found = measured(Path(folder), device, texts, arguments.torch_compile)
    for name, value in found.items():
        print(f"{name:24}", f"{value:,.4g}" if isinstance(value, float) else value)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
