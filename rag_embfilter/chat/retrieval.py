"""The retriever: a collection's passages for a question, with whether they are relevant."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from numpy.typing import NDArray

from rag_embfilter.chat.answers import Passage
from rag_embfilter.chat.relevance import Relevance, Signals, shared_words
from rag_embfilter.chat.unrelated import QUESTIONS
from rag_embfilter.chat.words import Words
from rag_embfilter.errors import ConfigError, StoreError
from rag_embfilter.store import CollectionInfo, Hit, Store

if TYPE_CHECKING:
    from rag_embfilter.embedding import EmbFilterEmbedding

FloatArray = NDArray[np.float32]
MODES = ("dense", "bm25", "hybrid")
TOP_K = 4
SAMPLE = 2048  # passages whose words are counted


@dataclass(frozen=True)
class Found:
    """What a collection holds for a question.

    Attributes:
        passages: best first, numbered from 1.
        relevant: whether they are closer to it than passages are to unrelated questions.
        evidence: by how much, see `Relevance`; over `threshold` is relevant.
    """

    passages: tuple[Passage, ...]
    relevant: bool
    evidence: float
    threshold: float


class ChatRetriever(BaseRetriever):
    """LlamaIndex's retriever over a collection; gives nothing for a question that it has nothing on.

    Args:
        store: open for as long as this is used.
        info: the collection, from `store.info`.
        embedding: what made it, from its settings; None for mode `bm25`.
        mode: `dense`, `bm25` or `hybrid`; the last two where it has BM25 vectors.
        top_k: passages for a question.

    Raises `ConfigError` for another mode, `StoreError` for BM25 in a collection without it.
    """

    def __init__(
        self,
        store: Store,
        info: CollectionInfo,
        embedding: EmbFilterEmbedding | None,
        mode: str = "dense",
        top_k: int = TOP_K,
    ) -> None:
        super().__init__()
        if mode not in MODES or (embedding is None and mode != "bm25"):
            raise ConfigError(
                f"mode {mode!r}: expected one of {', '.join(MODES)}; only bm25 needs no embedder."
            )
        if mode != "dense" and info.bm25 is None:
            store.search_text(info.name, ["?"])  # says what is missing
        self.store, self.info, self.embedding, self.mode, self.top_k = store, info, embedding, mode, top_k
        self._unrelated: FloatArray | None = None
        self._learnt: tuple[Words, Relevance] | None = None
        self._learning = threading.Lock()

    @property
    def name(self) -> str:
        """The collection's full name."""
        return self.info.name

    @property
    def words(self) -> Words:
        """How common words are in the collection."""
        return self._known()[0]

    @property
    def relevance(self) -> Relevance:
        """The threshold learnt from the collection."""
        return self._known()[1]

    def forget(self) -> None:
        """Learn anew at the next question, as the collection has changed."""
        with self._learning:
            self._learnt = None

    def find(self, question: str) -> Found:
        """Passages for a question. Raises `ConfigError` for an empty one, and as `Store.search` does."""
        if not question.strip():
            raise ConfigError("the question is empty.")
        words, relevance = self._known()
        vectors = self.vectors([question])
        ((hits, scores, signals),) = self._look_up([question], vectors, words)
        passages = tuple(
            Passage(i, hit, score, tuple(words.marks(question, hit.text)))
            for i, (hit, score) in enumerate(zip(hits, scores, strict=True), 1)
        )
        evidence = relevance.evidence(signals) if hits else -np.inf
        return Found(passages, evidence > relevance.threshold, float(evidence), relevance.threshold)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self.find(query_bundle.query_str)
        return as_nodes(found.passages) if found.relevant else []

    def _known(self) -> tuple[Words, Relevance]:
        """Words and threshold, learnt once: a look at a sample of passages and one search by all unrelated
        questions.
        """
        with self._learning:
            if self._learnt is None:
                words = Words.of(self._sample())
                if not words.passages:
                    raise StoreError(f"collection {self.name!r} is empty; ingest documents into it first.")
                found = self._look_up(QUESTIONS, self._unrelated_vectors(), words)
                self._learnt = words, Relevance.learn([signals for _, _, signals in found])
            return self._learnt

    def _sample(self) -> list[str]:
        """Texts of the first passages by id; ids are digests, so they are drawn by chance."""
        texts: list[str] = []
        for page in self.store.pages(self.name):
            texts += [node.text for node in page.nodes]
            if len(texts) >= SAMPLE:
                break
        return texts

    def _unrelated_vectors(self) -> FloatArray | None:
        if self._unrelated is None:
            self._unrelated = self.vectors(QUESTIONS)
        return self._unrelated

    def vectors(self, questions: Sequence[str]) -> FloatArray | None:
        """Filtered vectors of questions, float32 `[n, dim]`; None in mode `bm25`."""
        if self.embedding is None:
            return None
        raw = self.embedding.encoder.encode_queries(list(questions))
        return self.embedding.filter.apply(raw, role="query")

    def search(self, questions: Sequence[str], vectors: FloatArray | None, limit: int) -> list[list[Hit]]:
        """What the mode finds for questions and their vectors, best first; relevant or not."""
        if vectors is None:
            return self.store.search_text(self.name, questions, limit)
        texts = list(questions) if self.mode == "hybrid" else None
        return self.store.search(self.name, vectors, limit, texts=texts)

    def _look_up(
        self, questions: Sequence[str], vectors: FloatArray | None, words: Words
    ) -> list[tuple[list[Hit], list[float], Signals]]:
        """Hits of each question, their scores, and what speaks for them."""
        if vectors is None:
            found = self.search(questions, None, self.top_k)
            return [
                (hits, [h.score for h in hits], Signals(None, _shared(words, question, hits)))
                for question, hits in zip(questions, found, strict=True)
            ]
        found = self.search(questions, vectors, self.top_k)
        ids = list(dict.fromkeys(hit.id for hits in found for hit in hits))
        stored = dict(zip(ids, self.store.vectors(self.name, ids), strict=True)) if ids else {}
        usual = self._unrelated_vectors()
        assert usual is not None
        centre = usual.mean(axis=0)
        result = []
        for question, vector, hits in zip(questions, vectors, found, strict=True):
            scores = [float(vector @ stored[hit.id]) for hit in hits]
            closeness = max((float((vector - centre) @ stored[hit.id]) for hit in hits), default=-1.0)
            result.append((hits, scores, Signals(closeness, _shared(words, question, hits))))
        return result


def _shared(words: Words, question: str, hits: Sequence[Hit]) -> float:
    return shared_words(words, question, [hit.text for hit in hits])


def as_nodes(passages: Sequence[Passage]) -> list[NodeWithScore]:
    """Passages as LlamaIndex gives them."""
    return [NodeWithScore(node=passage.hit.node, score=passage.score) for passage in passages]
