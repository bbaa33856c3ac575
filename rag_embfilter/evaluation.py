"""Evaluation: an eval set's passages into collections, its questions through them, compared with raw."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from llama_index.core.schema import Document
from numpy.typing import NDArray

from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.eval_set import EvalSet
from rag_embfilter.filters import EmbFilter
from rag_embfilter.fitting import FilterSpec, fit
from rag_embfilter.ingestion import IngestReport, ingest
from rag_embfilter.metrics import Comparison, RankMetrics, Run, compare, rank_metrics
from rag_embfilter.refiltering import refilter
from rag_embfilter.store import Bm25, Hit, Store, collection_name
from rag_embfilter.yardstick import YardstickResult

MODES = ("dense", "bm25", "hybrid")
DEPTH = 100  # passages retrieved per question, as recall@100 and MAP@100 need


@dataclass(frozen=True)
class FilterResult:
    """One filter on one eval set, searched in one mode.

    Attributes:
        collection: the Qdrant collection that answered.
        run: query id -> passage ids, best first.
        metrics: scores per query.
        versus_raw: paired comparison of nDCG@10 with raw; None for raw itself.
        mode: `dense`, `bm25` (the filter plays no part) or `hybrid`.
    """

    embfilter: EmbFilter
    collection: str
    fingerprint: str
    run: Run
    metrics: RankMetrics
    versus_raw: Comparison | None = None
    mode: str = "dense"

    @property
    def name(self) -> str:
        """The filter's name, `bm25`, or both where they are fused."""
        return {"dense": self.embfilter.name, "bm25": "bm25"}.get(self.mode, f"{self.embfilter.name}+bm25")

    @property
    def dim(self) -> int:
        """Dimensions of the dense vectors that were compared; 0 for BM25 alone."""
        return 0 if self.mode == "bm25" else self.embfilter.dim


@dataclass(frozen=True)
class Evaluation:
    """All filters on one eval set; raw comes first. Yardsticks stand apart: they are not to be chosen."""

    eval_set: EvalSet
    encoder: Encoder
    ingested: IngestReport
    results: list[FilterResult] = field(default_factory=list)
    yardsticks: list[YardstickResult] = field(default_factory=list)

    @property
    def rows(self) -> list[FilterResult | YardstickResult]:
        """All that was measured, yardsticks last."""
        return [*self.results, *self.yardsticks]

    def best(self) -> FilterResult:
        """The highest mean nDCG@10 among filters that beat raw beyond noise; raw when none does."""
        beating = [r for r in self.results if r.versus_raw and r.versus_raw.verdict == "better"]
        return max(beating, key=lambda r: r.metrics.mean(), default=self.results[0])


def evaluate(
    eval_set: EvalSet,
    encoder: Encoder,
    filters: Sequence[EmbFilter],
    store: Store,
    base: str | None = None,
    progress: Callable[[str, int], None] | None = None,
    *,
    fitted: Sequence[FilterSpec] = (),
    questions: Sequence[str] | None = None,
    modes: Sequence[str] = ("dense",),
    bm25: Bm25 | None = None,
) -> Evaluation:
    """Ask an eval set's questions of one collection per filter, raw among them.

    Passages are embedded whole, in one pass of the backbone, and only those not stored already;
    rankings are Qdrant's exact search.

    Args:
        base: base name of the collections; by default `eval_base`.
        progress: called with `passages` or `questions` and the number of them done.
        fitted: filters that are fitted on the set's passages, never on its judgements.
        questions: example questions for them, other than the set's own; see `fit`.
        modes: any of `dense`, `bm25` and `hybrid`; raw vectors alone are always there to compare with.
        bm25: how BM25 reads the passages, by default as English.

    Raises `EncodingError` when a passage or question cannot be embedded, `FingerprintMismatch` when
    the base holds collections made another way.
    """
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ConfigError(f"mode {unknown[0]!r}: expected one of {', '.join(MODES)}.")
    terms = None if set(modes) <= {"dense"} else bm25 or Bm25()
    raw = EmbFilter.from_encoder(encoder, "raw")
    filters = [raw, *(f for f in filters if f.name != "raw")]
    plain = base or eval_base(eval_set, encoder)
    base = plain if terms is None else f"{plain}-bm25-{terms.language}"
    _take_over(store, plain, base, encoder, raw, terms)
    documents = partial(ingest, encoder=encoder, store=store, base=base, chunk_size=None, bm25=terms)
    report = documents(_documents(eval_set), filters=filters, progress=_named(progress, "passages"))
    if report.failed:
        raise EncodingError({i: f"{doc}: {why}" for i, (doc, why) in enumerate(report.failed)})
    if fitted:
        made = [fit(spec, encoder, store, base, questions) for spec in fitted]
        documents(_documents(eval_set), filters=made)
        filters += made
    texts = list(eval_set.queries.values())
    embedded = encoder.encode_queries(texts, progress=_named(progress, "questions"))
    evaluation = Evaluation(eval_set, encoder, report)
    for embfilter, mode in _searches(filters, modes):
        name = collection_name(base, embfilter)
        hits = _hits(store, name, mode, embfilter.apply(embedded, role="query"), texts)
        evaluation.results.append(_result(evaluation, embfilter, mode, name, hits))
    return evaluation


def _take_over(
    store: Store, plain: str, base: str, encoder: Encoder, raw: EmbFilter, bm25: Bm25 | None
) -> None:
    """Raw vectors that an evaluation in other modes stored, so that no passage is encoded again."""
    wanted = collection_name(base, raw)
    others = [
        name
        for name in store.names()
        if name != wanted and re.fullmatch(rf"{re.escape(plain)}(-bm25-\w+)?-raw", name)
    ]
    held = max(others, key=store.count, default=None)
    if held is None or (store.exists(wanted) and store.count(wanted) >= store.count(held)):
        return
    store.require(held, encoder.fingerprint | raw.fingerprint, raw.dim, writing=False)
    store.create(wanted, encoder, raw, base, bm25)
    refilter(store, held, {wanted: raw})


def _searches(filters: Sequence[EmbFilter], modes: Sequence[str]) -> Iterator[tuple[EmbFilter, str]]:
    """What is asked of which filter's collection, raw vectors alone first: all is compared with them."""
    raw = filters[0]
    yield raw, "dense"
    if "bm25" in modes:
        yield raw, "bm25"
    for embfilter in filters:
        for mode in ("dense", "hybrid"):
            if mode in modes and (embfilter, mode) != (raw, "dense"):
                yield embfilter, mode


def _hits(
    store: Store, name: str, mode: str, vectors: NDArray[np.float32], texts: Sequence[str]
) -> list[list[Hit]]:
    if mode == "bm25":
        return store.search_text(name, texts, limit=DEPTH)
    asked = texts if mode == "hybrid" else None
    return store.search(name, vectors, limit=DEPTH, exact=True, texts=asked)


def _result(
    evaluation: Evaluation, embfilter: EmbFilter, mode: str, name: str, hits: Sequence[Sequence[Hit]]
) -> FilterResult:
    """Scores of what was found, and how they compare with raw's."""
    eval_set, encoder = evaluation.eval_set, evaluation.encoder
    found = zip(eval_set.queries, hits, strict=True)
    run = {q: [_passage_id(hit.node.metadata) for hit in each] for q, each in found}
    metrics = rank_metrics(eval_set.qrels, run)
    versus = None
    if evaluation.results:
        baseline = evaluation.results[0].metrics.per_query["ndcg_at_10"]
        versus = compare(metrics.per_query["ndcg_at_10"], baseline)
    fingerprint = (encoder.fingerprint | embfilter.fingerprint).digest
    return FilterResult(embfilter, name, fingerprint, run, metrics, versus, mode)


def eval_base(eval_set: EvalSet, encoder: Encoder) -> str:
    """Base name of an eval set's collections: set, backbone and template, so that no two meet.

    A digest of the set and of the encoder's fingerprint ends it: another version of the set, another
    length limit or other weights under one name get collections of their own.
    """
    tag = hashlib.sha256(f"{eval_set.digest} {encoder.fingerprint.digest}".encode()).hexdigest()[:6]
    backbone = encoder.backbone.name.rstrip("/").rsplit("/", 1)[-1]
    named = encoder.settings["template"]
    words = (eval_set.name, backbone, named if isinstance(named, str) else "+".join(named))
    short = (re.sub(r"[^\w.+]+", "_", word).encode()[:40].decode(errors="ignore") for word in words)
    return "-".join(short) + f"-{tag}"


def _documents(eval_set: EvalSet) -> list[Document]:
    """The passages as documents of one source, so that passages the set no longer has are removed."""
    return [
        Document(
            id_=f"{eval_set.name}#{key}",
            text=passage.text,
            metadata={"source": eval_set.name, "title": passage.title, "record": key},
        )
        for key, passage in eval_set.corpus.items()
    ]


def _passage_id(metadata: Mapping[str, object]) -> str:
    if "record" not in metadata:
        raise ConfigError("a point without a record id is in the eval set's collection; delete it and rerun.")
    return str(metadata["record"])


def _named(progress: Callable[[str, int], None] | None, what: str) -> Callable[[int], None] | None:
    return None if progress is None else lambda done: progress(what, done)
