"""What a new filter costs: `refilter` against the engine's own upload, and against encoding.

python benchmarks/refilter.py [--points N] [--edge | --url http://localhost:6333] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llama_index.core.schema import TextNode
from qdrant_client import models

from rag_embfilter import EmbFilter, Encoder, EvalSet, Store
from rag_embfilter.refiltering import refilter
from rag_embfilter.store.points import BATCH_POINTS, VECTOR

RATIOS = (2, 8)


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def upload(store: Store, name: str, vectors: np.ndarray, payloads: list[dict[str, object]]) -> None:
    """The engine alone: points that are ready, in batches as large as ours."""
    params = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
    store.client.create_collection(name, vectors_config={VECTOR: params})
    if not store.embedded:
        for key in ("source", "doc_id"):
            store.client.create_payload_index(name, key, models.PayloadSchemaType.KEYWORD)
    for start in range(0, len(vectors), BATCH_POINTS):
        points = [
            models.PointStruct(id=start + i, vector={VECTOR: row}, payload=payload)
            for i, (row, payload) in enumerate(
                zip(
                    vectors[start : start + BATCH_POINTS].tolist(),
                    payloads[start : start + BATCH_POINTS],
                    strict=True,
                )
            )
        ]
        store.client.upsert(name, points, wait=True)
    store.optimize(name)


def run(store: Store, encoder: Encoder, points: int) -> dict[str, dict[str, float]]:
    """Both ways for each ratio, in turn, the median of three."""
    texts = list(EvalSet.load(Path(__file__).parent.parent / "eval_sets" / "faq").passages().values())
    encode = seconds(lambda: encoder.encode_documents(texts[:32])) / 32
    raw = np.random.default_rng(0).normal(size=(points, encoder.hidden_size)).astype(np.float32)
    raw /= np.linalg.norm(raw, axis=1, keepdims=True)
    nodes = [
        TextNode(text=texts[i % len(texts)], id_=f"{i + 1:032x}", metadata={"source": f"s{i}", "chunk": 0})
        for i in range(points)
    ]
    store.create("bench-raw", encoder, EmbFilter.from_encoder(encoder, "raw"), "bench")
    store.upsert("bench-raw", nodes, raw)
    payloads = [payload for page in store.pages("bench-raw") for payload in page.payloads]
    found = {}
    for ratio in RATIOS:
        embfilter = EmbFilter.from_encoder(encoder, "edge", ratio)
        name = f"bench-{embfilter.name}"
        ours, theirs = [], []
        for _ in range(3):
            vectors = embfilter.apply(raw)
            theirs.append(seconds(lambda: upload(store, "engine", vectors, payloads)))  # noqa: B023
            store.delete("engine")
            store.create(name, encoder, embfilter, "bench")
            ours.append(seconds(lambda: refilter(store, "bench-raw", {name: embfilter})))  # noqa: B023
            store.delete(name)
        apply = seconds(lambda: embfilter.apply(raw)) / points  # noqa: B023
        found[embfilter.name] = {
            "refilter_per_second": points / float(np.median(ours)),
            "engine_per_second": points / float(np.median(theirs)),
            "share_of_engine": float(np.median(theirs) / np.median(ours)),
            "encode_over_filter_per_vector": encode / apply,
        }
    return found


def main() -> None:
    """Run, print the ratios, and write them as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=5000)
    parser.add_argument("--url")
    parser.add_argument("--edge", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    encoder = Encoder("smollm2", max_length=256)
    with tempfile.TemporaryDirectory() as folder:
        here = {"path": Path(folder) / "qdrant", "edge": arguments.edge}
        where = {"url": arguments.url} if arguments.url else here
        with Store(**where) as store:
            results = run(store, encoder, arguments.points)
    for name, each in results.items():
        rate, share = each["refilter_per_second"], each["share_of_engine"]
        print(f"{name}: {rate:,.0f} vectors a second, {share:.2f} of the engine's own upload")
        print(f"  encoding a vector costs {each['encode_over_filter_per_vector']:,.0f} filterings")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
