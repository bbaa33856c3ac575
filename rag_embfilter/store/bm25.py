"""BM25 as sparse vectors: Qdrant's own tokens and formula, computed in this process, no model to download."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from qdrant_client import QdrantClient, models

from rag_embfilter.errors import ConfigError

if TYPE_CHECKING:
    import qdrant_edge

SPARSE = "text-sparse-new"  # LlamaIndex's own name for the sparse vector
MULTILINGUAL = "multilingual"
LANGUAGES = (
    "arabic azerbaijani basque bengali catalan chinese danish dutch english finnish french german greek "
    "hebrew hinglish hungarian indonesian italian japanese kazakh nepali norwegian portuguese romanian "
    f"russian slovene spanish swedish tajik turkish {MULTILINGUAL}"
).split()
# Stages of a fused search look this deep, or as deep as is asked for.
DEPTH = 100
RRF_K = 10  # the middle of what was tried, docs/experiments.md; Qdrant's own default is 2


@dataclass(frozen=True)
class Bm25:
    """How texts become BM25 vectors; a collection keeps it, so that questions meet passages made alike.

    Attributes:
        language: its stop words and stemmer; `multilingual` has neither, and finds words in scripts that
            put no space between them.
        average_terms: length of a usual passage in words that are no stop words, by which BM25 measures
            lengths; 100 suits chunks of 256 tokens.

    Needs the `[edge]` extra, which brings Qdrant's tokeniser. Inverse document frequencies are the
    collection's part (its IDF modifier). Raises `ConfigError` for values it does not take.
    """

    language: str = "english"
    average_terms: float = 100.0

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise ConfigError(f"BM25 language {self.language!r}: expected one of {', '.join(LANGUAGES)}.")
        length = self.average_terms
        if isinstance(length, bool) or not isinstance(length, int | float) or not 0 < length < math.inf:
            raise ConfigError(f"average_terms {length!r}: expected a positive number.")

    def documents(self, texts: Sequence[str]) -> list[models.SparseVector]:
        """Vectors of passages; one without a single term is empty."""
        model = _model(self)
        return [_vector(model.embed_document(_readable(text))) for text in texts]

    def queries(self, texts: Sequence[str]) -> list[models.SparseVector]:
        """Vectors of questions."""
        model = _model(self)
        return [_vector(model.embed_query(_readable(text))) for text in texts]

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Bm25 | None:
        """The one that a collection's metadata tells of, if any."""
        kept = made.get("bm25")
        if not kept:
            return None
        return cls(str(kept.get("language")), kept.get("average_terms", cls.average_terms))


def _readable(text: str) -> str:
    """A text with what is no character (half of a surrogate pair) marked as such."""
    return text.encode("utf-8", "replace").decode()


def _vector(given: qdrant_edge.SparseVector) -> models.SparseVector:
    return models.SparseVector(indices=given.indices, values=given.values)


@cache
def _model(settings: Bm25) -> qdrant_edge.Bm25:
    try:
        import qdrant_edge as edge
    except ImportError as error:
        raise ConfigError(
            f"BM25 needs the edge extra ({error}): pip install 'rag-embfilter[edge]'"
        ) from error
    length = settings.average_terms
    if settings.language != MULTILINGUAL:
        return edge.Bm25(edge.Bm25Config(language=settings.language, avg_len=length))
    plain = edge.Bm25Config(
        tokenizer=edge.TokenizerType.Multilingual,
        stemmer=edge.DisabledStemmer(),
        stopwords=edge.StopwordsSet(),
        avg_len=length,
    )
    return edge.Bm25(plain)


def rank(
    passages: Mapping[str, str], questions: Mapping[str, str], bm25: Bm25, limit: int = 100
) -> dict[str, list[str]]:
    """Passages that BM25 finds for each question, ids by id, best first; in memory, nothing is kept.

    Ties stand in the order of `passages`, so the same texts always give the same ranking.
    """
    client = QdrantClient(":memory:")
    idf = models.SparseVectorParams(modifier=models.Modifier.IDF)
    client.create_collection("bm25", {}, sparse_vectors_config={SPARSE: idf})
    ids = list(passages)
    terms = bm25.documents(list(passages.values()))
    points = [
        models.PointStruct(id=i, vector={SPARSE: vector}) for i, vector in enumerate(terms) if vector.indices
    ]
    if points:
        client.upsert("bm25", points)
    requests = [
        models.QueryRequest(query=asked, using=SPARSE, limit=len(ids))
        for asked in bm25.queries(list(questions.values()))
    ]
    answers = client.query_batch_points("bm25", requests)
    client.close()
    return {
        question: [ids[int(p.id)] for p in sorted(found.points, key=lambda p: (-p.score, p.id))[:limit]]
        for question, found in zip(questions, answers, strict=True)
    }
