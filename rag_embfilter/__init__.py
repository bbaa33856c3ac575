"""Use an LLM you already have as a retrieval embedder: EmbedFilter for RAG (arXiv 2606.07502)."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rag_embfilter.embedding import EmbFilterEmbedding
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.eval_set import EvalSet
    from rag_embfilter.evaluation import evaluate
    from rag_embfilter.filters import EmbFilter
    from rag_embfilter.ingestion import ingest
    from rag_embfilter.metrics import compare, rank_metrics
    from rag_embfilter.store import Store
    from rag_embfilter.vector_store import EmbFilterVectorStore

__version__ = "0.1.0"

# Imported on first use: torch, transformers and LlamaIndex take seconds.
_HOME = {
    "EmbFilter": "filters",
    "EmbFilterEmbedding": "embedding",
    "EmbFilterVectorStore": "vector_store",
    "Encoder": "encoder",
    "EvalSet": "eval_set",
    "Store": "store",
    "compare": "metrics",
    "evaluate": "evaluation",
    "ingest": "ingestion",
    "rank_metrics": "metrics",
}
__all__ = [
    "EmbFilter",
    "EmbFilterEmbedding",
    "EmbFilterVectorStore",
    "Encoder",
    "EvalSet",
    "Store",
    "compare",
    "evaluate",
    "ingest",
    "rank_metrics",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _no_collection():
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return getattr(module, name)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Imports make half a million objects that stay; looking for garbage among them takes 0.3 s."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
