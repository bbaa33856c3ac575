"""Searching: by vectors, by terms, or by both, in an order that is the same on every engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
from qdrant_client import models

from rag_embfilter.errors import ConfigError, FingerprintMismatch, StoreError
from rag_embfilter.fingerprint import Fingerprint
from rag_embfilter.store.bm25 import DEPTH, RRF_K, SPARSE
from rag_embfilter.store.collections import Collections
from rag_embfilter.store.described import CollectionInfo
from rag_embfilter.store.layout import search_params
from rag_embfilter.store.points import SCROLL, VECTOR, FloatArray, Hit, hit_of, node_of

BATCH = 64  # searches in one request
# Equal scores, which terms give and repeated passages, stand in no order: so many more are asked for, and
# sorted here.
TIES = 50
LARGEST = 1_000_000


class Searching(Collections):
    """A store's searches; see `Store`."""

    def search(
        self,
        name: str,
        vectors: FloatArray,
        limit: int = 10,
        where: Mapping[str, str] | None = None,
        exact: bool = False,
        fingerprint: Fingerprint | None = None,
        texts: Sequence[str] | None = None,
    ) -> list[list[Hit]]:
        """Nearest nodes of each query vector `[n, dim]`, best first.

        With `texts`, the questions themselves, it is hybrid search: what the vectors find and what BM25
        finds, fused by reciprocal ranks, which are then the scores.

        Args:
            where: payload fields that must have these values; a number or a truth value is matched
                both as such and as text.
            exact: compare with every point instead of using the engine's index.
            fingerprint: of the encoder and filter that made the vectors; checked when it is given.

        Raises `StoreError` for an absent collection or one without BM25 vectors, `FingerprintMismatch` for
        vectors of another size or fingerprint, `ConfigError` for values that cannot be searched for.
        """
        vectors = np.asarray(vectors, dtype=np.float32)
        _check_limit(limit)
        if fingerprint is not None:
            self.require(name, fingerprint, vectors.shape[-1], writing=False)
        info = self.check_size(name, vectors)
        if bad := np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist():
            raise ConfigError(f"query vectors {bad[:5]} hold NaN or Inf; expected finite numbers.")
        params = None if self.embedded else search_params(info.quantization, exact)
        wanted = conditions(where)
        requests = [
            models.QueryRequest(query=vector.tolist(), using=VECTOR, filter=wanted, params=params)
            for vector in vectors
        ]
        if texts is None:
            return self._hits(name, requests, limit)
        if isinstance(texts, str) or len(texts) != len(requests):
            raise ConfigError(
                f"{len(texts)} texts for {len(requests)} vectors; expected a list with one each."
            )
        deep = max(limit, DEPTH)
        terms = self._ranked(name, _by_terms(info, texts, wanted), deep + TIES)
        nearest = self._ranked(name, requests, deep + TIES)
        fused = [fuse([one[:deep], other[:deep]], limit) for one, other in zip(nearest, terms, strict=True)]
        return self._with_nodes(name, fused)

    def search_text(
        self, name: str, texts: Sequence[str], limit: int = 10, where: Mapping[str, str] | None = None
    ) -> list[list[Hit]]:
        """Nodes that BM25 finds for each question, best first; no backbone is needed.

        Raises `StoreError` for an absent collection or one without BM25 vectors.
        """
        _check_limit(limit)
        if isinstance(texts, str):
            raise ConfigError(f"texts {texts[:40]!r}: expected a list of questions.")
        info = self.info(name, count=False)
        found = self._ranked(name, _by_terms(info, texts, conditions(where)), limit + TIES)
        return self._with_nodes(name, [ranking[:limit] for ranking in found])

    def check_size(self, name: str, vectors: FloatArray) -> CollectionInfo:
        """The collection, when vectors are `[n, dim]` of its size. Raises `FingerprintMismatch` otherwise."""
        info = self.info(name, count=False)
        if vectors.ndim != 2 or vectors.shape[1] != info.dim:
            raise FingerprintMismatch(
                f"collection {name!r} holds vectors of {info.dim} dimensions, these are {vectors.shape}; "
                "use the filter that the collection was made with."
            )
        return info

    def _answers(
        self, name: str, requests: Sequence[models.QueryRequest], limit: int, payload: bool
    ) -> Iterator[list[models.ScoredPoint]]:
        for start in range(0, len(requests), BATCH):
            part = [
                request.model_copy(update={"limit": limit, "with_payload": payload})
                for request in requests[start : start + BATCH]
            ]
            with self._calling() as client:
                answers = client.query_batch_points(name, part)
            yield from (answer.points for answer in answers)

    def _hits(self, name: str, requests: Sequence[models.QueryRequest], limit: int) -> list[list[Hit]]:
        return [[hit_of(point) for point in points] for points in self._answers(name, requests, limit, True)]

    def _ranked(
        self, name: str, requests: Sequence[models.QueryRequest], limit: int
    ) -> list[list[tuple[str, float]]]:
        """Ids with scores, best first, equal ones by id."""
        return [
            ranked([(str(point.id), point.score) for point in points])
            for points in self._answers(name, requests, limit, False)
        ]

    def _with_nodes(self, name: str, rankings: Sequence[Sequence[tuple[str, float]]]) -> list[list[Hit]]:
        """Rankings with their nodes, each fetched once; a point deleted meanwhile is left out."""
        ids = list(dict.fromkeys(point for ranking in rankings for point, _ in ranking))
        nodes = {}
        for start in range(0, len(ids), SCROLL):
            asked = [int(i) if i.isdecimal() else i for i in ids[start : start + SCROLL]]
            with self._calling() as client:
                records = client.retrieve(name, asked, with_payload=True)
            nodes.update({str(record.id): node_of(record) for record in records})
        return [
            [Hit(point, score, nodes[point]) for point, score in ranking if point in nodes]
            for ranking in rankings
        ]


def ranked(scores: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Ids with scores, best first; what differs by rounding alone counts as equal, and goes by id."""
    return sorted(scores, key=lambda pair: (-round(pair[1], 5), pair[0]))


def fuse(rankings: Sequence[Sequence[tuple[str, float]]], limit: int) -> list[tuple[str, float]]:
    """Several rankings as one by the sum of 1 / (k + rank), ranks from 0 (Cormack et al. 2009).

    The first ranking, then the id, decide between equal sums.
    """
    sums: dict[str, float] = {}
    for ranking in rankings:
        for rank, (point, _) in enumerate(ranking):
            sums[point] = sums.get(point, 0.0) + 1 / (RRF_K + rank)
    place = {point: rank for rank, (point, _) in enumerate(rankings[0])}
    order = sorted(sums, key=lambda point: (-round(sums[point], 9), place.get(point, LARGEST), point))
    return [(point, sums[point]) for point in order[:limit]]


def _by_terms(
    info: CollectionInfo, texts: Sequence[str], wanted: models.Filter | None
) -> list[models.QueryRequest]:
    """A search by BM25 for each question. Raises `StoreError` when the collection has no such vectors."""
    if info.bm25 is not None:
        vectors = info.bm25.queries(texts)
        return [models.QueryRequest(query=terms, using=SPARSE, filter=wanted) for terms in vectors]
    raw = info.settings.get("filter_type") == "raw"
    way = "search a filtered one, or" if raw else "delete it and make it anew (`ingest --bm25 english`), or"
    raise StoreError(
        f"collection {info.name!r} has no BM25 vectors, which come with a collection when it is made: {way} "
        "search by vectors alone."
    )


def _check_limit(limit: int) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= LARGEST:
        raise ConfigError(f"limit {limit!r}: expected a whole number from 1 to {LARGEST:,}.")


def conditions(where: Mapping[str, str] | None) -> models.Filter | None:
    """All fields must match; each by any reading of its value."""
    if not where:
        return None
    if odd := [name for name in where if not name or '"' in name]:
        raise ConfigError(f"field {odd[0]!r}: expected a name without quotation marks.")
    return models.Filter(
        must=[
            models.Filter(
                should=list(_readings(key, value)),
            )
            for key, value in ((_text(key), _text(str(value))) for key, value in where.items())
        ]
    )


def _readings(key: str, value: str) -> Iterator[models.FieldCondition]:
    """A field's condition for each way to read a value: text, truth value, number."""
    # A name that is not a plain word would be read as a path into nested fields.
    name = key if re.fullmatch(r"[A-Za-z_][\w-]*", key, re.ASCII) else f'"{key}"'
    yield models.FieldCondition(key=name, match=models.MatchValue(value=value))
    if value.lower() in ("true", "false"):
        yield models.FieldCondition(key=name, match=models.MatchValue(value=value.lower() == "true"))
    if re.fullmatch(r"-?[0-9]{1,18}", value):
        yield models.FieldCondition(key=name, match=models.MatchValue(value=int(value)))
    with suppress(ValueError):
        number = float(value)
        if math.isfinite(number):
            yield models.FieldCondition(key=name, range=models.Range(gte=number, lte=number))


def _text(word: str) -> str:
    """A word that engines can read: what is no character matches nothing."""
    return word.encode("utf-8", "replace").decode()
