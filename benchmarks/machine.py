"""What a benchmark of encoding needs: the machine's limit, the work that a text is, rivals."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rag_embfilter import Encoder

FloatArray = NDArray[np.float32]
REFERENCE_BATCH = 128


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, the device's work included."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def peak_flops(dtype: torch.dtype, device: torch.device, times: int = 5) -> float:
    """FLOP/s of a large matrix product, the median of some."""
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    a @ b
    return 2 * size**3 / statistics.median(seconds(lambda: a @ b, device) for _ in range(times))


def flops(config: Any, lengths: Sequence[int]) -> float:
    """Floating-point operations of a Llama-shaped base model on texts of so many tokens.

    Products with weights, and the half of attention's two products that a causal model needs.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = width * config.num_attention_heads, width * config.num_key_value_heads
    weights = 2 * (2 * hidden * query + 2 * hidden * key + 3 * hidden * config.intermediate_size)
    attention = sum(2 * n * n * query for n in lengths)
    return float(layers * (weights * sum(lengths) + attention))


def lengths_of(encoder: Encoder, texts: Sequence[str]) -> list[int]:
    """Tokens of each text with its template."""
    return [len(row.ids) for row in encoder._rows(list(texts), "document")[0]]


class Reference:
    """The paper's loop: batches of 128 in the given order, left-padded to the longest, last token, L2 norm.

    It runs the base model alone, as ours does, so it leaves out what its `lm_head` would cost.
    """

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(folder, dtype=encoder.backbone.dtype)
        self.model.to(encoder.backbone.device).eval()
        self.encoder = encoder

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Float32 `[n, hidden]`."""
        device = self.encoder.backbone.device
        out = []
        for start in range(0, len(texts), REFERENCE_BATCH):
            rows = self.encoder._rows(list(texts[start : start + REFERENCE_BATCH]), "document")[0]
            width = max(len(row.ids) for row in rows)
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for i, row in enumerate(rows):
                ids[i, width - len(row.ids) :] = torch.from_numpy(row.ids)
                mask[i, width - len(row.ids) :] = 1
            layout = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
            layout = {name: part.to(device) for name, part in layout.items()}
            hidden = self.model(input_ids=ids.to(device), use_cache=False, **layout).last_hidden_state
            out.append(torch.nn.functional.normalize(hidden[:, -1].float(), dim=1).cpu())
        return torch.cat(out).numpy()


class SentenceTransformers:
    """sentence-transformers with the same weights and template, last-token pooling, its own defaults."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Normalize, Pooling, Transformer

        options = {"dtype": encoder.backbone.dtype}
        transformer = Transformer(str(folder), max_seq_length=4096, model_kwargs=options)
        pooling = Pooling(encoder.backbone.hidden_size, pooling_mode="lasttoken")
        device = str(encoder.backbone.device)
        self.model = SentenceTransformer(modules=[transformer, pooling, Normalize()], device=device)
        self.template = encoder.templates[0].document

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Float32 `[n, hidden]`."""
        whole = [self.template.replace("{text}", text) for text in texts]
        vectors: FloatArray = self.model.encode(whole, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)


def saved_base(encoder: Encoder, folder: Path) -> Path:
    """A folder with the base model and its tokenizer, for the rivals."""
    encoder.backbone.model.save_pretrained(folder)
    tokenizer = encoder.backbone.tokenizer
    kept, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = kept
    return folder


def agreement(ours: FloatArray, theirs: FloatArray) -> float:
    """The lowest cosine between two encoders' vectors of the same texts."""
    return float((ours * theirs).sum(axis=1).min())
