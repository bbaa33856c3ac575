"""Requests for a search: by vectors, by terms, or by both."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from qdrant_client import models

from rag_embfilter.errors import StoreError
from rag_embfilter.store.bm25 import DEPTH, RRF_K, SPARSE
from rag_embfilter.store.described import CollectionInfo


def terms_stages(
    info: CollectionInfo, texts: Sequence[str], where: Mapping[str, str] | None
) -> list[models.Prefetch]:
    """A search by BM25 for each question. Raises `StoreError` when the collection has no such vectors."""
    if info.bm25 is None:
        raise StoreError(
            f"collection {info.name!r} has no BM25 vectors, which are made with it. Search by vectors, or "
            "delete it and `ingest --bm25 english` again; from a raw collection that takes no encoding."
        )
    return [
        models.Prefetch(query=terms, using=SPARSE, filter=conditions(where))
        for terms in info.bm25.queries(texts)
    ]


def alone(stage: models.Prefetch, limit: int) -> models.QueryRequest:
    """One stage as the whole search."""
    return models.QueryRequest(
        query=stage.query,
        using=stage.using,
        limit=limit,
        with_payload=True,
        filter=stage.filter,
        params=stage.params,
    )


def fused(stages: Sequence[models.Prefetch], limit: int) -> models.QueryRequest:
    """Stages fused by the ranks they give: the sum of 1 / (k + rank), ranks from 0."""
    deep = max(limit, DEPTH)
    return models.QueryRequest(
        prefetch=[stage.model_copy(update={"limit": deep}) for stage in stages],
        query=models.RrfQuery(rrf=models.Rrf(k=RRF_K)),
        limit=limit,
        with_payload=True,
    )


def conditions(where: Mapping[str, str] | None) -> models.Filter | None:
    """All fields must match; each by any reading of its value."""
    if not where:
        return None
    return models.Filter(
        must=[
            models.Filter(
                should=list(_readings(key, value)),
            )
            for key, value in where.items()
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
