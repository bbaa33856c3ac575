"""Evaluation: an eval set's passages into collections, its questions through them, compared with raw."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llama_index.core.schema import Document

from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.eval_set import EvalSet
from rag_embfilter.filters import EmbFilter
from rag_embfilter.fitting import FilterSpec, fit
from rag_embfilter.ingestion import IngestReport, ingest
from rag_embfilter.metrics import Comparison, RankMetrics, Run, compare, rank_metrics
from rag_embfilter.store import Store, collection_name

DEPTH = 100  # passages retrieved per question, as recall@100 and MAP@100 need


@dataclass(frozen=True)
class FilterResult:
    """One filter on one eval set.

    Attributes:
        collection: the Qdrant collection that answered.
        run: query id -> passage ids, best first.
        metrics: scores per query.
        versus_raw: paired comparison of nDCG@10 with raw; None for raw itself.
    """

    embfilter: EmbFilter
    collection: str
    fingerprint: str
    run: Run
    metrics: RankMetrics
    versus_raw: Comparison | None = None


@dataclass(frozen=True)
class Evaluation:
    """All filters on one eval set; raw comes first."""

    eval_set: EvalSet
    encoder: Encoder
    ingested: IngestReport
    results: list[FilterResult] = field(default_factory=list)

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
) -> Evaluation:
    """Ask an eval set's questions of one collection per filter, raw among them.

    Passages are embedded whole, in one pass of the backbone, and only those not stored already;
    rankings are Qdrant's exact search.

    Args:
        base: base name of the collections; by default `eval_base`.
        progress: called with `passages` or `questions` and the number of them done.
        fitted: filters that are fitted on the set's passages, never on its judgements.
        questions: example questions for them, other than the set's own; see `fit`.

    Raises `EncodingError` when a passage or question cannot be embedded, `FingerprintMismatch` when
    the base holds collections made another way.
    """
    raw = EmbFilter.from_encoder(encoder, "raw")
    filters = [raw, *(f for f in filters if f.name != "raw")]
    base = base or eval_base(eval_set, encoder)
    report = ingest(
        _documents(eval_set),
        encoder,
        filters,
        store,
        base,
        chunk_size=None,
        progress=_named(progress, "passages"),
    )
    if report.failed:
        raise EncodingError({i: f"{doc}: {why}" for i, (doc, why) in enumerate(report.failed)})
    if fitted:
        made = [fit(spec, encoder, store, base, questions) for spec in fitted]
        ingest(_documents(eval_set), encoder, made, store, base, chunk_size=None)
        filters += made
    queries = list(eval_set.queries)
    embedded = encoder.encode_queries(
        [eval_set.queries[q] for q in queries], progress=_named(progress, "questions")
    )
    evaluation = Evaluation(eval_set, encoder, report)
    for embfilter in filters:
        name = collection_name(base, embfilter)
        hits = store.search(name, embfilter.apply(embedded, role="query"), limit=DEPTH, exact=True)
        run = {
            q: [_passage_id(h.node.metadata) for h in found] for q, found in zip(queries, hits, strict=True)
        }
        metrics = rank_metrics(eval_set.qrels, run)
        versus = None
        if evaluation.results:
            baseline = evaluation.results[0].metrics.per_query["ndcg_at_10"]
            versus = compare(metrics.per_query["ndcg_at_10"], baseline)
        fingerprint = (encoder.fingerprint | embfilter.fingerprint).digest
        evaluation.results.append(FilterResult(embfilter, name, fingerprint, run, metrics, versus))
    return evaluation


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
