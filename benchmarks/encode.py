"""Encoding against the paper's loop, sentence-transformers and the machine's own limit, in one run.

python benchmarks/encode.py [--texts N] [--dtypes float32 bfloat16] [--json FILE] [--plot FILE]

Ratios are from the same texts, threads and dtype, measured in turn. Texts: $EMBFILTER_DATASETS/xquad-en and
medquad, else the eval sets of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
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

from rag_embfilter import EmbFilter, Encoder

GRID = [(kind, ratio) for kind in ("edge", "tail") for ratio in (2, 4, 8, 16)]
ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 3


def read(path: Path) -> list[str]:
    """The texts of a BEIR file."""
    return [json.loads(line)["text"] for line in path.open(encoding="utf-8")]


QUESTIONS = 5  # for each passage, as xquad-en has them


def text_sets(count: int) -> dict[str, list[str]]:
    """So many texts of each kind, picked with a fixed seed, in no order of length; mixed, more questions."""
    data = Path(os.environ.get("EMBFILTER_DATASETS") or ROOT.parent / "shared" / "datasets")
    if (data / "xquad-en").is_dir() and (data / "medquad").is_dir():
        kinds = {
            "xquad-en passages": read(data / "xquad-en" / "corpus.jsonl"),
            "xquad-en questions": read(data / "xquad-en" / "queries.jsonl"),
            "medquad passages": read(data / "medquad" / "corpus.jsonl"),
        }
    else:
        kinds = {
            "legal passages": read(ROOT / "eval_sets" / "legal" / "corpus.jsonl"),
            "faq questions": read(ROOT / "eval_sets" / "faq" / "queries.jsonl"),
            "code passages": read(ROOT / "eval_sets" / "code" / "corpus.jsonl"),
        }
    draw = np.random.default_rng(0)
    sets = {name: [texts[i] for i in draw.permutation(len(texts))[:count]] for name, texts in kinds.items()}
    questions = next(texts for name, texts in kinds.items() if name.endswith("questions"))
    every = [text for texts in sets.values() for text in texts]
    every += [questions[i] for i in draw.permutation(len(questions))[: (QUESTIONS - 1) * count]]
    return sets | {"mixed": [every[i] for i in draw.permutation(len(every))]}


def compare(encoder: Encoder, texts: list[str], rivals: dict[str, Any], rounds: int) -> dict[str, float]:
    """Ours against the rivals and the limit on one set; ours are medians of rounds taken in turn."""
    device, dtype = encoder.backbone.device, encoder.backbone.dtype
    lengths = lengths_of(encoder, texts)
    work = flops(encoder.backbone.model.config, lengths)
    times: dict[str, list[float]] = {"ours": [], "grid": [], "peak": []} | {name: [] for name in rivals}
    raw = encoder.encode_documents(texts)
    result: dict[str, float] = {"texts": len(texts), "tokens": sum(lengths), "longest": max(lengths)}
    for turn in range(rounds):
        times["peak"].append(peak_flops(dtype, device))
        times["ours"].append(seconds(lambda: encoder.encode_documents(texts), device))
        times["grid"].append(
            seconds(lambda: [EmbFilter.from_encoder(encoder, *each).apply(raw) for each in GRID], device)
        )
        for name, rival in rivals.items() if turn == 0 else ():  # slow, so once
            times[name].append(seconds(lambda rival=rival: result.update(_agree(rival, texts, raw)), device))
    middle = {name: statistics.median(values) for name, values in times.items()}
    grid = middle["ours"] + middle["grid"]
    result |= {
        "seconds": middle["ours"],
        "tokens_per_second": sum(lengths) / middle["ours"],
        "share_of_limit": work / middle["ours"] / middle["peak"],
        "limit_gflops": middle["peak"] / 1e9,
    }
    result |= {f"times_{name}": middle[name] / middle["ours"] for name in rivals}
    if "reference" in rivals:  # it passes again for each filter
        result["times_reference_grid_of_8"] = len(GRID) * middle["reference"] / grid
    return result


def _agree(rival: Any, texts: list[str], raw: Any) -> dict[str, float]:
    return {f"cosine_{type(rival).__name__}": agreement(raw, rival.encode(texts))}


def curves(encoder: Encoder) -> dict[str, list[tuple[int, float]]]:
    """Seconds per text against its length in words, and seconds against how many texts."""
    device = encoder.backbone.device
    words = "river stone window garden market letter winter bridge".split()
    draw = np.random.default_rng(1)

    def texts(count: int, length: int) -> list[str]:
        return [" ".join(draw.choice(words, length)) for _ in range(count)]

    by_length, by_count = [], []
    for length in (8, 16, 32, 64, 128, 256, 384, 500):
        some = texts(max(2, 2000 // length), length)
        by_length.append(
            (length, seconds(lambda some=some: encoder.encode_documents(some), device) / len(some))
        )
    for count in (50, 100, 200, 400, 800):
        some = texts(count, 12)
        by_count.append((count, seconds(lambda some=some: encoder.encode_documents(some), device)))
    return {"seconds_per_text_by_words": by_length, "seconds_by_texts": by_count}


def draw(found: dict[str, Any], path: Path) -> None:
    """The two curves as a picture, with straight lines through the origin and the last point."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    names = {"seconds_per_text_by_words": "words in a text", "seconds_by_texts": "texts of 12 words"}
    for axis, (key, label) in zip(axes, names.items(), strict=True):
        for dtype, each in found["dtypes"].items():
            points = np.array(each["curves"][key])
            (line,) = axis.plot(*points.T, "o-", label=dtype)
            axis.plot([0, points[-1, 0]], [0, points[-1, 1]], ":", color=line.get_color())
        axis.set(xlabel=label, ylabel="seconds a text" if "per_text" in key else "seconds", xlim=0, ylim=0)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def table(found: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| dtype | texts | tokens/s | of the limit | x reference loop | x for 8 filters "
        "| x sentence-transformers |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype, each in found["dtypes"].items():
        for name, row in each["sets"].items():
            ratios = [
                f"{row[key]:.1f}" if key in row else ""
                for key in ("times_reference", "times_reference_grid_of_8", "times_sentence_transformers")
            ]
            lines.append(
                f"| {dtype} | {name} ({row['texts']}) | {row['tokens_per_second']:,.0f} "
                f"| {row['share_of_limit']:.2f} | {' | '.join(ratios)} |"
            )
    return "\n".join(lines)


def measured(dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One dtype on every set."""
    encoder = Encoder(arguments.backbone, device=arguments.device, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        base = saved_base(encoder, Path(folder))
        rivals: dict[str, Any] = {}
        if not arguments.alone:
            rivals = {
                "reference": Reference(base, encoder),
                "sentence_transformers": SentenceTransformers(base, encoder),
            }
        sets = {}
        for name, texts in text_sets(arguments.texts).items():
            sets[name] = compare(encoder, texts, rivals, ROUNDS)
            print(dtype, name, json.dumps(sets[name]), flush=True)
        found = {"sets": sets, "curves": curves(encoder)}
    if encoder.backbone.device.type == "cuda":
        found["gpu_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="smollm2")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--texts", type=int, default=64, help="of each of three kinds")
    parser.add_argument("--alone", action="store_true", help="leave the rivals out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(words)
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "dtypes": {dtype: measured(dtype, arguments) for dtype in arguments.dtypes},
    }
    found["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(table(found))
    print(f"peak memory, rivals included: {found['peak_memory_mib']:,.0f} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    if arguments.plot:
        draw(found, arguments.plot)


if __name__ == "__main__":
    main()
