"""LangChain: the embedder, and a vector store over a collection. Needs the extra `langchain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rag_embfilter.embedding import EmbFilterEmbedding
from rag_embfilter.errors import ConfigError, MissingExtraError, StoreError
from rag_embfilter.store import VECTOR, Store
from rag_embfilter.store.points import node_of

try:
    from langchain_core.embeddings import Embeddings
except Exception as error:
    # Not ImportError alone: a half-installed dependency fails in its own way.
    raise MissingExtraError(
        f"langchain-core cannot be imported ({type(error).__name__}: {error}). Install it with "
        "`pip install 'rag-embfilter[langchain]'`."
    ) from error

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_qdrant import QdrantVectorStore


class EmbFilterEmbeddings(Embeddings):
    """An `EmbFilterEmbedding` as LangChain wants it; async calls run in a thread, off the event loop.

    Args:
        embedding: one that is there already.
        settings: otherwise, those of `EmbFilterEmbedding`.

    Raises `ConfigError` for both, or as `EmbFilterEmbedding` does.
    """

    def __init__(self, embedding: EmbFilterEmbedding | None = None, **settings: Any) -> None:
        if embedding is not None and settings:
            raise ConfigError(
                f"an embedding and settings ({', '.join(settings)}): give one of them; to change an "
                "embedding, embedding.model_copy(update=...)."
            )
        self.embedding = EmbFilterEmbedding(**settings) if embedding is None else embedding

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Unit vectors of documents, `filter.dim` floats each."""
        vectors: list[list[float]] = self.embedding.get_text_embedding_batch(list(texts))
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Unit vector of a query, through the query template and mean."""
        vector: list[float] = self.embedding.get_query_embedding(text)
        return vector


def vector_store(
    store: Store, name: str, embeddings: EmbFilterEmbeddings | None = None, **others: Any
) -> QdrantVectorStore:
    """LangChain's `QdrantVectorStore` over a collection that `ingest` filled, for dense searches.

    A document's `page_content` is the passage, its metadata the node's. It reads only: `ingest` fills and
    updates collections, so that what is embedded stays what is stored.

    Args:
        store: open for as long as this is used.
        name: full name of a collection, or an alias.
        embeddings: by default those that the collection's own metadata describe.
        others: handed to `QdrantVectorStore`.

    Raises:
        MissingExtraError: langchain-qdrant is not installed.
        StoreError: no such collection; `FingerprintMismatch` when the embeddings did not make it.
    """
    info = store.info(name, count=False)
    if embeddings is None:
        if info.fingerprint is None:
            raise StoreError(f"collection {info.name!r} does not say what made it; give embeddings=.")
        embeddings = EmbFilterEmbeddings(**info.settings, fingerprint=info.fingerprint.digest)
    made = embeddings.embedding
    store.require(info.name, made.full_fingerprint, made.filter.dim, writing=False)
    return _collection_class()(
        store,
        client=store.client,
        collection_name=info.name,
        embedding=embeddings,
        vector_name=VECTOR,
        # Checked above by fingerprint, without a pass of the backbone.
        validate_embeddings=False,
        validate_collection_config=False,
        **others,
    )


def _collection_class() -> Any:
    try:
        from langchain_qdrant import QdrantVectorStore
    except Exception as error:
        raise MissingExtraError(
            f"langchain-qdrant cannot be imported ({type(error).__name__}: {error}). Install it with "
            "`pip install 'rag-embfilter[langchain]'`."
        ) from error

    class EmbFilterCollection(QdrantVectorStore):
        """`QdrantVectorStore` that reads our payloads, one thread at a time where the engine wants that."""

        def __init__(self, store: Store, **settings: Any) -> None:
            super().__init__(**settings)
            self._store = store

        @classmethod
        def _document_from_point(cls, point: Any, collection: str, *keys: str) -> Document:
            from langchain_core.documents import Document

            node = node_of(point)
            known = {"_id": point.id, "_collection_name": collection}
            return Document(page_content=node.text, metadata=node.metadata | known, id=str(point.id))

        def similarity_search_with_score(self, query: str, *given: Any, **named: Any) -> Any:
            with self._store.exclusively():
                return super().similarity_search_with_score(query, *given, **named)

        def similarity_search_with_score_by_vector(self, *given: Any, **named: Any) -> Any:
            with self._store.exclusively():
                return super().similarity_search_with_score_by_vector(*given, **named)

        def max_marginal_relevance_search_with_score_by_vector(self, *given: Any, **named: Any) -> Any:
            with self._store.exclusively():
                return super().max_marginal_relevance_search_with_score_by_vector(*given, **named)

        def get_by_ids(self, ids: Any, /) -> Any:
            with self._store.exclusively():
                return super().get_by_ids(ids)

        def add_texts(self, *given: Any, **named: Any) -> Any:
            raise StoreError(
                f"collection {self.collection_name!r} is filled by `ingest`, which checks and updates it; "
                "LangChain only reads it. Use `python -m pipelines ingest`, or rag_embfilter.ingest."
            )

        def delete(self, *given: Any, **named: Any) -> Any:
            self.add_texts()

    return EmbFilterCollection
