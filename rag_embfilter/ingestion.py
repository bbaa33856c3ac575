"""Ingestion: documents into one collection per filter, from one pass of the backbone.

The store itself is the state: a point's id is made from its document, place and text, so what is
there already needs no work, and a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from llama_index.core.schema import Document, TextNode
from numpy.typing import NDArray

from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.filters import EmbFilter
from rag_embfilter.inputs import fault
from rag_embfilter.nodes import Splitter, passage_text, source_of
from rag_embfilter.store import Bm25, Store, collection_name

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
# Nodes that are looked up, encoded and written together, for each pass that the encoder runs at once: a run
# that is killed loses at most these.
WINDOW = 512
FIRST_WINDOW = 64
PATIENCE = 10.0  # seconds of work that a window may cost before windows stop growing


@dataclass
class IngestReport:
    """What a run did, by document and by node.

    Each document seen counts once: as added (nothing of it was stored before), changed (chunks of it are
    new or gone, others of its chunks were stored), unchanged, or failed. "Before" is what the collections
    written to, and raw, held when its turn came. A collection that only lacked what another one held
    changes no document when it gets it: its text is the same.

    Attributes:
        collections: full names written to.
        documents: documents seen.
        added, changed, unchanged: of those, how many were so.
        removed: documents that their source no longer holds; none of them is among those seen.
        failed: (document, reason) of what could not be stored, once for each cause; its former version
            is kept.
        nodes: nodes seen; `encoded` of them went through the backbone, `refiltered` came from the raw
            collection, `nodes_unchanged` were everywhere already.
        points_removed: points of former versions deleted, over all collections.
    """

    collections: list[str] = field(default_factory=list)
    documents: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    nodes: int = 0
    encoded: int = 0
    refiltered: int = 0
    nodes_unchanged: int = 0
    points_removed: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


def ingest(
    documents: Iterable[Document],
    encoder: Encoder,
    filters: Sequence[EmbFilter],
    store: Store,
    base: str,
    *,
    chunk_size: int | None = 256,
    chunk_overlap: int = 32,
    incomplete: Container[str] = (),
    progress: Callable[[int], None] | None = None,
    bm25: Bm25 | None = None,
) -> IngestReport:
    """Write documents to the collection of each filter under `base`, encoding each new node once.

    Documents are LlamaIndex's: `id_` is their identity, `metadata["source"]` the file they come from
    (by default the id; documents of one source must follow each other), `metadata["title"]` their
    title. Nodes that are stored already are not encoded; former nodes of a source seen again are
    deleted after its new ones are written, unless a document failed.

    Args:
        chunk_size, chunk_overlap: tokens; `chunk_size=None` keeps documents whole.
        incomplete: sources that `documents` does not give whole, looked at as the run goes; nothing
            of theirs is deleted.
        progress: called with the number of nodes done.
        bm25: give new collections BM25 vectors too, for hybrid search; others stay as they are.

    Raises:
        FingerprintMismatch: a collection was made another way; nothing was encoded or written.
        ConfigError: no filter, two of one name, chunk sizes that do not fit the encoder, or documents
            of one source apart from each other.
    """
    splitter = Splitter(encoder.count_tokens, chunk_size, chunk_overlap, encoder.max_length)
    targets = _targets(encoder, filters, store, base, bm25)
    run = _Run(encoder, targets, store, _raw_name(encoder, store, base), incomplete)
    run.report.collections = list(run.targets)
    # A run that is stopped loses a window at most, so the first ones are small, and slow ones stay so.
    largest = WINDOW * encoder.parallel
    size = min(FIRST_WINDOW * encoder.parallel, largest)
    start = time.monotonic()
    for node in run.follow(documents, splitter):
        run.window.append(node)
        if len(run.window) >= size:
            _advance(run, progress)
            if time.monotonic() - start < PATIENCE:
                size = min(2 * size, largest)
            start = time.monotonic()
    _advance(run, progress, last=True)
    for name in run.targets:
        store.optimize(name)
    return run.report


def _targets(
    encoder: Encoder, filters: Sequence[EmbFilter], store: Store, base: str, bm25: Bm25 | None
) -> dict[str, EmbFilter]:
    """Collections by name, each made or checked before anything is encoded."""
    targets = {collection_name(base, embfilter): embfilter for embfilter in filters}
    if not filters or len(targets) < len(filters):
        raise ConfigError(f"filters {[f.name for f in filters]}: expected at least one, and no two alike.")
    for name, embfilter in targets.items():
        if store.exists(name):
            store.require(name, encoder.fingerprint | embfilter.fingerprint, embfilter.dim, writing=True)
    for name, embfilter in targets.items():
        store.create(name, encoder, embfilter, base, bm25)
    return targets


def _raw_name(encoder: Encoder, store: Store, base: str) -> str | None:
    """The base's raw collection when it may serve as a source of vectors for other filters."""
    raw = EmbFilter.from_encoder(encoder, "raw")
    name = collection_name(base, raw)
    if not store.exists(name):
        return None
    stored = store.info(name).fingerprint
    ours = encoder.fingerprint | raw.fingerprint
    return name if stored is not None and stored.digest == ours.digest else None


@dataclass
class _Source:
    """What is known of a source until it is complete.

    Attributes:
        ids: points it has now.
        documents: ids of its documents seen; in `fresh` those with text that no collection held, in
            `held` those with text that one did.
    """

    ids: set[str] = field(default_factory=set)
    documents: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)


@dataclass
class _Run:
    """State of one ingestion: the window being filled, and sources not yet cleaned of old points."""

    encoder: Encoder
    targets: dict[str, EmbFilter]
    store: Store
    raw: str | None
    incomplete: Container[str]
    report: IngestReport = field(default_factory=IngestReport)
    window: list[TextNode] = field(default_factory=list)
    current: dict[str, _Source] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    failed_docs: set[str] = field(default_factory=set)

    def follow(self, documents: Iterable[Document], splitter: Splitter) -> Iterator[TextNode]:
        """Nodes of all documents in order, with sources and faults noted on the way."""
        for document in documents:
            self.report.documents += 1
            source = source_of(document)
            if source in self.complete:
                raise ConfigError(
                    f"documents of source {source!r} do not follow each other; sort the documents by source."
                )
            state = self.current.setdefault(source, _Source())
            state.documents.add(document.id_)
            title = str(document.metadata.get("title") or "")
            if why := fault(passage_text(title, document.text)):
                self.fail(document.id_, why)
                continue
            for node in splitter.nodes(document):
                self.report.nodes += 1
                state.ids.add(node.id_)
                yield node

    def fail(self, doc_id: str, reason: str) -> None:
        """Note a document that could not be stored; its former version will be kept."""
        self.failed_docs.add(doc_id)
        self.report.failed.append((doc_id, reason))


def _advance(run: _Run, progress: Callable[[int], None] | None, last: bool = False) -> None:
    """Write the window; then delete old points of the sources that are complete, and count them."""
    nodes, run.window = run.window, []
    if nodes:
        _write(run, nodes, progress)
    open_source = None if last or not nodes else str(nodes[-1].metadata["source"])
    complete = [source for source in run.current if source != open_source]
    former, deleted = _clean(run, complete)
    for source in complete:
        _count(run, run.current.pop(source), former.get(source, set()), deleted.get(source, set()))
        run.complete.add(source)


def _clean(run: _Run, sources: Sequence[str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Delete old points of complete sources.

    Returns: by source, the documents that had old points, and those of which some were deleted.
    """
    former: dict[str, set[str]] = defaultdict(set)
    deleted: dict[str, set[str]] = defaultdict(set)
    whole = {source for source in sources if source not in run.incomplete}
    looked_at = dict.fromkeys([*run.targets, *([run.raw] if run.raw else [])])
    for name in looked_at:
        stale = []
        for point, (source, doc_id) in run.store.points_of(name, sources).items():
            if point in run.current[source].ids:
                continue
            former[source].add(doc_id)
            if name in run.targets and source in whole and doc_id not in run.failed_docs:
                deleted[source].add(doc_id)
                stale.append(point)
        run.store.remove(name, stale)
        run.report.points_removed += len(stale)
    return former, deleted


def _count(run: _Run, source: _Source, former: set[str], deleted: set[str]) -> None:
    """Each document of a complete source once; see `IngestReport`."""
    report = run.report
    for doc_id in source.documents - run.failed_docs:
        if doc_id in source.fresh and doc_id not in source.held | former:
            report.added += 1
        elif doc_id in source.fresh | deleted:
            report.changed += 1
        else:
            report.unchanged += 1
    report.removed += len(deleted - source.documents)


def _write(run: _Run, nodes: list[TextNode], progress: Callable[[int], None] | None) -> None:
    """Bring the window's nodes into every collection that lacks them."""
    ids = [node.id_ for node in nodes]
    present = {name: run.store.present(name, ids) for name in run.targets}
    wanted = [node for node in nodes if any(node.id_ not in held for held in present.values())]
    run.report.nodes_unchanged += len(nodes) - len(wanted)
    if progress is not None and len(wanted) < len(nodes):
        progress(len(nodes) - len(wanted))
    in_raw = _in_raw(run, present, wanted)
    _note_held(run, nodes, in_raw.union(*present.values()))
    if not wanted:
        return
    vectors = _raw_vectors(run, wanted, in_raw, progress)
    for name, embfilter in run.targets.items():
        missing = [node for node in wanted if node.id_ not in present[name] and node.id_ in vectors]
        if not missing:
            continue
        raw = np.stack([vectors[node.id_] for node in missing])
        try:
            filtered = embfilter.apply(raw)
        except EncodingError as error:
            filtered = _without_failed(run, missing, error)
            missing = [node for i, node in enumerate(missing) if i not in error.problems]
        if missing:
            run.store.upsert(name, missing, filtered)


def _in_raw(run: _Run, present: Mapping[str, set[str]], nodes: Sequence[TextNode]) -> set[str]:
    """Which of these nodes the raw collection holds, asked for only where that is not known yet."""
    if run.raw is None or not nodes:
        return set()
    return present[run.raw] if run.raw in present else run.store.present(run.raw, [n.id_ for n in nodes])


def _note_held(run: _Run, nodes: Sequence[TextNode], held: Container[str]) -> None:
    """Note which documents bring text that is new, and which text that some collection holds."""
    for node in nodes:
        state = run.current[str(node.metadata["source"])]
        (state.held if node.id_ in held else state.fresh).add(str(node.ref_doc_id))


def _raw_vectors(
    run: _Run, nodes: list[TextNode], known: Container[str], progress: Callable[[int], None] | None
) -> dict[str, FloatArray]:
    """Raw unit embeddings by node id: from the raw collection for those `known` there, else encoded."""
    vectors: dict[str, FloatArray] = {}
    kept = [node.id_ for node in nodes if node.id_ in known]
    if run.raw and kept:
        vectors.update(zip(kept, run.store.vectors(run.raw, kept), strict=True))
        run.report.refiltered += len(kept)
        if progress is not None:
            progress(len(kept))
    new = [node for node in nodes if node.id_ not in known]
    if not new:
        return vectors
    try:
        encoded = run.encoder.encode_documents([node.text for node in new], progress=progress)
    except EncodingError as error:
        encoded = _without_failed(run, new, error)
        new = [node for i, node in enumerate(new) if i not in error.problems]
    run.report.encoded += len(new)
    vectors.update(zip([node.id_ for node in new], encoded, strict=True))
    return vectors


def _without_failed(run: _Run, nodes: list[TextNode], error: EncodingError) -> FloatArray:
    """The rows that did work; the others' documents are noted as failed."""
    assert error.embeddings is not None
    for i, why in error.problems.items():
        run.fail(str(nodes[i].ref_doc_id), f"chunk {nodes[i].metadata['chunk']}: {why}")
    return np.delete(error.embeddings, list(error.problems), axis=0)
