"""What filters cost, as ratios within this run: directions against an SVD, a grid against one encode.

python benchmarks/filters.py [--json FILE | --large]
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rag_embfilter import EmbFilter, Encoder, EvalSet, spectroscopy
from rag_embfilter.spectrum import Spectrum

SHAPES = {"SmolLM2-135M": (49152, 576), "Qwen2.5-0.5B": (151936, 896), "Gemma-3-270M": (262144, 640)}
GRID = [(kind, ratio) for kind in ("edge", "head", "tail", "mid", "rand", "ideal") for ratio in (2, 4, 8, 16)]


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def directions(vocab: int, hidden: int) -> dict[str, float]:
    """Directions from the Gram matrix against `torch.linalg.svd`, on a matrix of a real one's shape."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(vocab, hidden, generator=generator) @ torch.diag(torch.linspace(3, 1, hidden))
    matrix += torch.randn(hidden, generator=generator)  # one dominant direction, as real ones have
    ours, theirs = [], []
    for _ in range(3):  # in turn, so that a machine that slows down slows both
        ours.append(seconds(lambda: Spectrum.of(matrix)))
        theirs.append(seconds(lambda: torch.linalg.svd(matrix, full_matrices=False)))
    kept = slice(hidden // 4, hidden // 4 + hidden // 2)
    a = torch.from_numpy(Spectrum.of(matrix).directions[kept])
    b = torch.linalg.svd(matrix, full_matrices=False)[2][kept]
    return {
        "seconds": float(np.median(ours)),
        "svd_seconds": float(np.median(theirs)),
        "times_faster": float(np.median(theirs) / np.median(ours)),
        "projector_distance": float(torch.linalg.norm(a.T @ a - b.T @ b)),
    }


def grid(texts: list[str]) -> dict[str, float]:
    """24 filters made and applied, against the encode they share."""
    encoder = Encoder("smollm2", max_length=256)
    encoder.encode_documents(texts[:4])
    start = time.perf_counter()
    raw = encoder.encode_documents(texts)
    encode = time.perf_counter() - start
    filters = seconds(lambda: [EmbFilter.from_encoder(encoder, *each).apply(raw) for each in GRID])
    one = seconds(lambda: EmbFilter.from_encoder(encoder).apply(raw))
    return {
        "texts": len(texts),
        "encode_seconds": encode,
        "grid_seconds": filters,
        "grid_over_one": (encode + filters) / (encode + one),
        "encode_over_apply_per_vector": encode / seconds(lambda: EmbFilter.from_encoder(encoder).apply(raw)),
    }


def spectroscopy_of_a_large_model(vocab: int = 128_256, hidden: int = 4096) -> dict[str, float]:
    """Directions and the response of all of them for an unembedding of Llama 3 8B's shape, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(4096, hidden, generator=generator).bfloat16() for _ in range(vocab // 4096)]
    matrix = torch.cat(parts)
    del parts
    rows = torch.ones(len(matrix), dtype=torch.bool)
    counts = 1 / np.arange(1, len(matrix) + 1)
    start = time.perf_counter()
    spectrum = Spectrum.of(matrix, rows)
    made = time.perf_counter()
    average = spectroscopy.average_token(matrix, rows, spectrum, counts)
    spectroscopy.response(matrix, spectrum, average, spectroscopy.frequent_tokens(counts, rows))
    return {
        "directions_seconds": made - start,
        "response_seconds": time.perf_counter() - made,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    """Run, print the ratios, and write them as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--large", action="store_true", help="spectroscopy of a 128k x 4096 matrix alone")
    arguments = parser.parse_args()
    if arguments.large:
        found = spectroscopy_of_a_large_model()
        print(", ".join(f"{key} {value:.1f}" for key, value in found.items()))
        return
    results: dict[str, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        results[name] = found = directions(*shape)
        print(
            f"{name:14} {shape[0]:>7} x {shape[1]}: {found['times_faster']:.1f} times faster than an SVD "
            f"({found['seconds']:.2f} s), projectors {found['projector_distance']:.4f} apart"
        )
    texts = list(EvalSet.load(Path(__file__).parent.parent / "eval_sets" / "faq").passages().values())
    results["grid"] = found = grid(texts)
    print(f"a grid of {len(GRID)} filters costs {found['grid_over_one']:.3f} times the encode of one")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
