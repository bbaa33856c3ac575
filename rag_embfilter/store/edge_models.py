"""The client's models in Qdrant Edge's words, and Edge's answers in the client's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import qdrant_edge as edge
from qdrant_client import models

from rag_embfilter.errors import StoreError


def unsupported(what: object) -> StoreError:
    """An error for what Edge, or this adapter, cannot do."""
    return StoreError(f"Qdrant Edge does not take {what!r} here. Use a Qdrant server (url=...) for it.")


def config_of(made: models.CreateCollection) -> edge.EdgeConfig:
    """A collection's configuration; shards and copies are a server's, and refused."""
    if made.shard_number not in (None, 1) or made.replication_factor not in (None, 1):
        raise unsupported("shards or replicas")
    vectors = made.vectors
    if isinstance(vectors, dict):
        dense: Any = {name: _dense(params) for name, params in vectors.items()}
    else:
        dense = _dense(vectors) if vectors is not None else None
    sparse = {
        name: edge.EdgeSparseVectorParams(modifier=edge.Modifier.Idf if params.modifier else None)
        for name, params in (made.sparse_vectors or {}).items()
    }
    given = made.hnsw_config
    hnsw = None
    if given is not None:
        hnsw = edge.HnswIndexConfig(
            16 if given.m is None else given.m, given.ef_construct or 100, given.full_scan_threshold or 10_000
        )
    return edge.EdgeConfig(
        vectors=dense,
        sparse_vectors=sparse or None,
        hnsw_config=hnsw,
        quantization_config=_quantization(made.quantization_config),
    )


def _dense(params: models.VectorParams) -> edge.EdgeVectorParams:
    types = edge.VectorStorageDatatype
    datatypes = {
        None: None,
        models.Datatype.FLOAT32: types.Float32,
        models.Datatype.FLOAT16: types.Float16,
        models.Datatype.UINT8: types.Uint8,
    }
    if params.multivector_config is not None:
        raise unsupported(params.multivector_config)
    return edge.EdgeVectorParams(
        size=params.size,
        distance=getattr(edge.Distance, params.distance.value),
        datatype=datatypes[params.datatype],
        memory=edge.Memory.Cold if params.on_disk else None,
        quantization_config=_quantization(params.quantization_config),
    )


def _quantization(given: models.QuantizationConfig | None) -> Any:
    match given:
        case None:
            return None
        case models.ScalarQuantization(scalar=scalar):
            memory = edge.Memory.Pinned if scalar.always_ram else None
            return edge.ScalarQuantizationConfig(edge.ScalarType.Int8, scalar.quantile, memory=memory)
        case models.BinaryQuantization(binary=binary):
            return edge.BinaryQuantizationConfig(memory=edge.Memory.Pinned if binary.always_ram else None)
    raise unsupported(given)


def point_of(point: models.PointStruct) -> edge.Point:
    """A point on its way in."""
    vector: Any = point.vector
    if isinstance(vector, dict):
        vector = {name: _vector(value) for name, value in vector.items()}
    return edge.Point(id=point.id, vector=vector, payload=point.payload or {})


def _vector(value: Any) -> Any:
    """A dense vector as it is, a sparse one as Edge's."""
    if isinstance(value, models.SparseVector):
        return edge.SparseVector(value.indices, value.values)
    return list(value)


def filter_of(given: models.Filter | None) -> edge.Filter | None:
    """Conditions, nested ones too."""
    if given is None:
        return None
    if given.min_should is not None:
        raise unsupported("min_should")
    must, should, must_not = (_conditions(part) for part in (given.must, given.should, given.must_not))
    return edge.Filter(must, should, must_not)


def _conditions(given: Any) -> list[Any] | None:
    if given is None:
        return None
    return [_condition(each) for each in (given if isinstance(given, list) else [given])]


def _condition(given: models.Condition) -> Any:
    match given:
        case models.Filter():
            return filter_of(given)
        case models.HasIdCondition():
            return edge.HasIdCondition(set(given.has_id))
        case models.IsEmptyCondition():
            return edge.IsEmptyCondition(given.is_empty.key)
        case models.IsNullCondition():
            return edge.IsNullCondition(given.is_null.key)
        case models.FieldCondition(key=key, match=matched) if matched is not None:
            return edge.FieldCondition(key, match=_match(matched))
        case models.FieldCondition(key=key, range=models.Range() as bounds):
            span = edge.RangeFloat(gte=bounds.gte, gt=bounds.gt, lte=bounds.lte, lt=bounds.lt)
            return edge.FieldCondition(key, range=span)
    raise unsupported(given)


def _match(given: Any) -> Any:
    match given:
        case models.MatchValue():
            # Edge takes Python's True for the number 1, and numpy's for what it is.
            value: Any = np.bool_(given.value) if isinstance(given.value, bool) else given.value
            return edge.MatchValue(value)
        case models.MatchAny():
            return edge.MatchAny(given.any)
        case models.MatchExcept():
            return edge.MatchExcept(given.except_)
        case models.MatchText():
            return edge.MatchText(given.text)
    raise unsupported(given)


def request_of(given: models.QueryRequest) -> edge.QueryRequest:
    """A query with its stages."""
    limit = 10 if given.limit is None else given.limit
    fused = bool(given.prefetch)
    if given.lookup_from is not None:
        raise unsupported(given.lookup_from)
    return edge.QueryRequest(
        limit=limit,
        offset=given.offset,
        query=_query(given.query, given.using),
        prefetches=[_prefetch(stage, limit) for stage in _listed(given.prefetch)],
        with_vector=given.with_vector or False,
        with_payload=_selection(given.with_payload),
        filter=filter_of(given.filter),
        score_threshold=given.score_threshold,
        params=None if fused else _params(given.params),
    )


def _prefetch(given: models.Prefetch, limit: int) -> edge.Prefetch:
    return edge.Prefetch(
        limit=given.limit or limit,
        query=_query(given.query, given.using),
        prefetches=[_prefetch(stage, limit) for stage in _listed(given.prefetch)],
        params=_params(given.params),
        filter=filter_of(given.filter),
        score_threshold=given.score_threshold,
    )


def _listed(stages: Sequence[models.Prefetch] | models.Prefetch | None) -> Sequence[models.Prefetch]:
    return [] if stages is None else [stages] if isinstance(stages, models.Prefetch) else stages


def _query(given: Any, using: str | None) -> Any:
    match given:
        case None:
            return None
        case models.NearestQuery(nearest=nearest, mmr=None):
            return _query(nearest, using)
        case models.FusionQuery(fusion=models.Fusion.RRF):
            return edge.Fusion.Rrf(k=2)  # a server's default
        case models.RrfQuery(rrf=rrf):
            return edge.Fusion.Rrf(k=2 if rrf.k is None else rrf.k, weights=rrf.weights)
        case list() | models.SparseVector():
            return edge.Query.Nearest(_vector(given), using=using)
    raise unsupported(given)


def _params(given: models.SearchParams | None) -> edge.SearchParams | None:
    if given is None:
        return None
    how = given.quantization
    again = how and edge.QuantizationSearchParams(bool(how.ignore), how.rescore, how.oversampling)
    return edge.SearchParams(hnsw_ef=given.hnsw_ef, exact=bool(given.exact), quantization=again or None)


def _selection(given: Any) -> Any:
    """Which payload fields to give: all, none, or a list."""
    match given:
        case None:
            return False
        case models.PayloadSelectorInclude():
            return list(given.include)
        case models.PayloadSelectorExclude():
            return edge.PayloadSelector.Exclude(list(given.exclude))
    return given if isinstance(given, bool) else list(given)


def payload_selection(given: Any) -> Any:
    """As `_selection`, for calls that take all of a payload by default."""
    return True if given is None else _selection(given)


def id_of(given: Any) -> int | str:
    """A point id as the client gives it: a number, or a UUID as text."""
    return given if isinstance(given, int) else str(given)


def record_of(record: edge.Record) -> models.Record:
    """A stored point; what the engine gives needs no validation, which takes longer than reading it."""
    return models.Record.model_construct(
        id=id_of(record.id), payload=record.payload, vector=_stored(record.vector)
    )


def scored_of(point: edge.ScoredPoint) -> models.ScoredPoint:
    """A found point."""
    return models.ScoredPoint.model_construct(
        id=id_of(point.id),
        version=point.version,
        score=point.score,
        payload=point.payload,
        vector=_stored(point.vector),
    )


def _stored(vector: Any) -> Any:
    if isinstance(vector, dict):
        return {name: _stored(value) for name, value in vector.items()} or None
    if isinstance(vector, edge.SparseVector):
        return models.SparseVector(indices=vector.indices, values=vector.values)
    return vector
