"""EmbFilterVectorStore: a collection as LlamaIndex's vector store, hybrid search and async included."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.vector_stores.qdrant import QdrantVectorStore

from rag_embfilter.errors import ConfigError
from rag_embfilter.filters import unit_rows
from rag_embfilter.store import Store
from rag_embfilter.store.bm25 import DEPTH, Bm25
from rag_embfilter.store.searching import TIES, fuse, ranked


class EmbFilterVectorStore(QdrantVectorStore):
    """LlamaIndex's `QdrantVectorStore` on a collection of a `Store`, wherever it lives.

    Where the collection has BM25 vectors, `vector_store_query_mode` may be `hybrid` (fused by reciprocal
    ranks, `alpha` plays no part) or `sparse`. Async methods run the others in a thread, so that they work
    on the embedded engine and Edge too.

    Args:
        store: open for as long as this is used.
        name: full name of a collection, or an alias of it.

    Raises `StoreError` when there is no such collection.
    """

    _store: Store = PrivateAttr()

    def __init__(self, store: Store, name: str, **others: Any) -> None:
        info = store.info(name, count=False)
        if info.bm25 is not None:
            others |= _hybrid(info.bm25)
        super().__init__(collection_name=info.name, client=store.client, **others)
        self._store = store

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Nodes for a query; a hybrid one looks deep enough for ranks to tell something.

        Raises `ConfigError` for a mode that this collection cannot serve.
        """
        self._check(query)
        if query.similarity_top_k < 1:
            return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
        if query.mode == VectorStoreQueryMode.HYBRID:
            deep = max(query.similarity_top_k, DEPTH)
            query = replace(
                query,
                hybrid_top_k=query.hybrid_top_k or query.similarity_top_k,
                similarity_top_k=deep + TIES,
                sparse_top_k=max(query.sparse_top_k or 0, deep + TIES),
            )
        with self._store.exclusively():
            return super().query(query, **kwargs)

    def _check(self, query: VectorStoreQuery) -> None:
        by_words = (VectorStoreQueryMode.HYBRID, VectorStoreQueryMode.SPARSE)
        if query.mode not in (VectorStoreQueryMode.DEFAULT, *by_words):
            raise ConfigError(f"query mode {query.mode.value!r}: expected default, hybrid or sparse.")
        if query.mode in by_words and not self.enable_hybrid:
            raise ConfigError(
                f"query mode {query.mode.value!r}: collection {self.collection_name!r} has no BM25 vectors; "
                "make it with `ingest --bm25 english`, or use the default mode."
            )
        if query.mode in by_words and query.query_str is None:
            raise ConfigError(f"query mode {query.mode.value!r} needs query_str, the question itself.")

    def add(self, nodes: Sequence[BaseNode], shard_identifier: Any = None, **kwargs: Any) -> list[str]:
        """Write nodes that have their embeddings; gives their ids.

        Raises `EncodingError` for vectors with NaN, Inf or no length, `FingerprintMismatch` for another size
        than the collection's, `StoreError` when it is gone.
        """
        if not nodes:
            return []
        vectors = np.array([node.get_embedding() for node in nodes], dtype=np.float32)
        self._store.check_size(self.collection_name, vectors)
        unit_rows(vectors)
        with self._store.exclusively():
            return list(super().add(list(nodes), shard_identifier, **kwargs))

    def delete(self, ref_doc_id: str, shard_identifier: Any = None, **delete_kwargs: Any) -> None:
        """Remove a document's nodes."""
        with self._store.exclusively():
            super().delete(ref_doc_id, shard_identifier, **delete_kwargs)

    def delete_nodes(self, *args: Any, **kwargs: Any) -> None:
        """Remove nodes by id or filter."""
        with self._store.exclusively():
            super().delete_nodes(*args, **kwargs)

    def get_nodes(self, *args: Any, **kwargs: Any) -> list[BaseNode]:
        """Nodes by id or filter."""
        with self._store.exclusively():
            return list(super().get_nodes(*args, **kwargs))

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """As `query`."""
        return await asyncio.to_thread(self.query, query, **kwargs)

    async def async_add(
        self, nodes: Sequence[BaseNode], shard_identifier: Any = None, **kwargs: Any
    ) -> list[str]:
        """As `add`."""
        return await asyncio.to_thread(self.add, nodes, shard_identifier, **kwargs)

    async def adelete(self, ref_doc_id: str, shard_identifier: Any = None, **delete_kwargs: Any) -> None:
        """As `delete`."""
        await asyncio.to_thread(self.delete, ref_doc_id, shard_identifier, **delete_kwargs)

    async def adelete_nodes(self, *args: Any, **kwargs: Any) -> None:
        """As `delete_nodes`."""
        await asyncio.to_thread(self.delete_nodes, *args, **kwargs)

    async def aget_nodes(self, *args: Any, **kwargs: Any) -> list[BaseNode]:
        """As `get_nodes`."""
        return await asyncio.to_thread(self.get_nodes, *args, **kwargs)

    def clear(self) -> None:
        """Remove the collection; `ingest` makes it anew, with all that it says of itself."""
        self._store.delete(self.collection_name)

    async def aclear(self) -> None:
        """As `clear`."""
        await asyncio.to_thread(self.clear)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an EmbFilterVectorStore holds an open store; pickle the collection's name and open it there."
        )


def _hybrid(bm25: Bm25) -> dict[str, Any]:
    """What LlamaIndex wants for hybrid search: BM25 in its form, and how two rankings become one."""

    def documents(texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        found = bm25.documents(texts)
        return [v.indices for v in found], [v.values for v in found]

    def queries(texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        found = bm25.queries(texts)
        return [v.indices for v in found], [v.values for v in found]

    return {
        "enable_hybrid": True,
        "sparse_doc_fn": documents,
        "sparse_query_fn": queries,
        "hybrid_fusion_fn": _fused,
    }


def _fused(
    dense: VectorStoreQueryResult, sparse: VectorStoreQueryResult, alpha: float = 0.5, top_k: int = 2
) -> VectorStoreQueryResult:
    """Two rankings as one, as `Store.search` fuses them."""
    nodes: dict[str, BaseNode] = {}
    rankings = []
    for found in (dense, sparse):
        nodes = {node.node_id: node for node in found.nodes or []} | nodes
        scores = found.similarities or []
        ranking = ranked(
            [(node.node_id, score) for node, score in zip(found.nodes or [], scores, strict=True)]
        )
        rankings.append(ranking[:DEPTH])
    best = fuse(rankings, top_k)
    return VectorStoreQueryResult(
        nodes=[nodes[i] for i, _ in best], similarities=[score for _, score in best], ids=[i for i, _ in best]
    )
