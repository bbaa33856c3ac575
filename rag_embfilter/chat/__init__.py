"""Chat with a collection: cited answers from its passages, or "I don't know".

with Store(path=".embfilter/qdrant") as store:
chat = Chat(store, "handbook-edge-r2", llm="none")
print(chat.engine().chat("how do I get a new badge?"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rag_embfilter.backbone import load_backbone
from rag_embfilter.chat.answers import Answer, Claim, Passage
from rag_embfilter.chat.engine import CitedChatEngine, CitedQueryEngine, ModelError
from rag_embfilter.chat.llms import make_llm
from rag_embfilter.chat.retrieval import MODES, TOP_K, ChatRetriever, Found
from rag_embfilter.errors import StoreError

if TYPE_CHECKING:
    from rag_embfilter.backbone import Backbone
    from rag_embfilter.embedding import EmbFilterEmbedding
    from rag_embfilter.store import Store

__all__ = [
    "MODES",
    "Answer",
    "Chat",
    "ChatRetriever",
    "CitedChatEngine",
    "CitedQueryEngine",
    "Claim",
    "Found",
    "ModelError",
    "Passage",
]

SMALL = 1_000_000_000  # parameters under which a model is asked in the simplest words


class Chat:
    """A collection to talk to; shared by any number of conversations, from any thread.

    All that shapes vectors comes from the collection, whose fingerprint is checked.

    Args:
        store: open for as long as this is used.
        name: full name of a collection, or an alias of it.
        llm: `none`, `local` or `openai:MODEL@URL`, see `make_llm`.
        mode: `dense`, `bm25` or `hybrid`.
        top_k: passages for a question.
        device, dtype: where and in what the backbone computes.
        embedding: the collection's embedder, if it is in memory already.

    Raises `StoreError` when there is no such collection or nobody knows what made it, `ConfigError` for an
    unknown model or mode, `FingerprintMismatch` when the backbone is not what it was.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        llm: str = "none",
        mode: str = "dense",
        top_k: int = TOP_K,
        *,
        device: str | None = None,
        dtype: str | None = None,
        embedding: EmbFilterEmbedding | None = None,
    ) -> None:
        info = store.info(name)
        if embedding is None and mode != "bm25":
            embedding = embedder_of(store, name, device, dtype)
        self.store, self.info, self.llm_name, self.embedding = store, info, llm, embedding
        self.retriever = ChatRetriever(store, info, embedding, mode, top_k)
        backbone = self._backbone(device, dtype) if llm == "local" else None
        self.llm = make_llm(llm, backbone)
        self.small = backbone is not None and backbone.model.num_parameters() < SMALL

    def _backbone(self, device: str | None, dtype: str | None) -> Backbone:
        if self.embedding is not None:
            return self.embedding.encoder.backbone
        settings = self.info.settings
        if "model_name" not in settings:
            raise StoreError(
                f"collection {self.info.name!r} does not say what made it; use llm 'none' or a server's."
            )
        return load_backbone(settings["model_name"], settings.get("revision"), device, dtype)

    def warm_up(self) -> None:
        """Learn the collection's threshold now; else the first question waits for it."""
        _ = self.retriever.relevance

    def engine(self) -> CitedChatEngine:
        """A new conversation, with a memory of its own."""
        count = None if self.embedding is None else self.embedding.encoder.backbone.tokenizer.tokenize
        rewrites = self.llm_name.startswith("openai:")
        return CitedChatEngine(self.retriever, self.llm, count, rewrites, self.small)

    def query_engine(self) -> CitedQueryEngine:
        """LlamaIndex's query engine: questions without a conversation."""
        return CitedQueryEngine(retriever=self.retriever, llm=self.llm, small=self.small)


def embedder_of(
    store: Store, name: str, device: str | None = None, dtype: str | None = None
) -> EmbFilterEmbedding:
    """The embedder that made a collection, its fingerprint checked. Raises as `Chat`."""
    from rag_embfilter.embedding import EmbFilterEmbedding

    info = store.info(name)
    if info.fingerprint is None:
        raise StoreError(
            f"collection {info.name!r} does not say what made it. Adopt it first (Store.adopt, or "
            f"python -m pipelines collections adopt {info.name})."
        )
    if "filter_file" in info.settings:
        store.filter_of(info.name)  # its file must be there before the backbone is loaded
    return EmbFilterEmbedding(
        **info.settings, device=device, dtype=dtype, fingerprint=info.fingerprint.digest
    )
