"""EmbFilterVectorStore: a collection as LlamaIndex's vector store, hybrid search and async included."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.vector_stores.qdrant import QdrantVectorStore

from rag_embfilter.store import Store
from rag_embfilter.store.bm25 import DEPTH, RRF_K, Bm25


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

    def __init__(self, store: Store, name: str, **others: Any) -> None:
        info = store.info(name, count=False)
        if info.bm25 is not None:
            others |= _hybrid(info.bm25)
        super().__init__(collection_name=info.name, client=store.client, **others)
        self._store = store

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Nodes for a query; a hybrid one looks deep enough for ranks to tell something."""
        if query.mode == VectorStoreQueryMode.HYBRID:
            query = replace(
                query,
                hybrid_top_k=query.hybrid_top_k or query.similarity_top_k,
                similarity_top_k=max(query.similarity_top_k, DEPTH),
                sparse_top_k=max(query.sparse_top_k or 0, DEPTH),
            )
        with self._store.exclusively():
            return super().query(query, **kwargs)

    def add(self, nodes: Sequence[BaseNode], shard_identifier: Any = None, **kwargs: Any) -> list[str]:
        """Write nodes that have their embeddings; gives their ids."""
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

    async def aclear(self) -> None:
        """As `clear`: removes the collection."""
        await asyncio.to_thread(self.clear)


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
        "hybrid_fusion_fn": _by_reciprocal_ranks,
    }


def _by_reciprocal_ranks(
    dense: VectorStoreQueryResult, sparse: VectorStoreQueryResult, alpha: float = 0.5, top_k: int = 2
) -> VectorStoreQueryResult:
    """Two rankings as one: the sum of 1 / (k + rank), ranks from 0, as Qdrant computes it."""
    nodes: dict[str, BaseNode] = {}
    scores: dict[str, float] = {}
    for found in (dense, sparse):
        for rank, node in enumerate(found.nodes or []):
            nodes.setdefault(node.node_id, node)
            scores[node.node_id] = scores.get(node.node_id, 0.0) + 1 / (RRF_K + rank)
    best = sorted(scores, key=lambda node_id: -scores[node_id])[:top_k]
    return VectorStoreQueryResult(
        nodes=[nodes[i] for i in best], similarities=[scores[i] for i in best], ids=list(best)
    )
