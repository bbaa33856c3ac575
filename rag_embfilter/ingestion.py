"""Ingestion: documents into one collection per filter, from one pass of the backbone.

The store itself is the state: a point's id is made from its document, place and text, so what is
there already needs no work, and a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from llama_index.core.schema import Document, TextNode
from numpy.typing import NDArray

from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.filters import EmbFilter
from rag_embfilter.inputs import fault
from rag_embfilter.nodes import Splitter, passage_text, source_of
from rag_embfilter.store import Store, collection_name

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
# Nodes that are looked up, encoded and written together, for each pass that the encoder runs at once: a run
# that is killed loses at most these.
WINDOW = 512


@dataclass
class IngestReport:
    """What a run did.

    Attributes:
        collections: full names written to.
        documents: documents seen.
        nodes: nodes seen; `encoded` of them went through the backbone, `refiltered` came from the raw
            collection, `unchanged` were everywhere already.
        removed: points of former versions deleted, over all collections.
        failed: (document, reason) of what could not be stored; its former version is kept.
    """

    collections: list[str] = field(default_factory=list)
    documents: int = 0
    nodes: int = 0
    encoded: int = 0
    refiltered: int = 0
    unchanged: int = 0
    removed: int = 0
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

    Raises:
        FingerprintMismatch: a collection was made another way; nothing was encoded or written.
        ConfigError: no filter, two of one name, chunk sizes that do not fit the encoder, or documents
            of one source apart from each other.
    """
    splitter = Splitter(encoder.count_tokens, chunk_size, chunk_overlap, encoder.max_length)
    targets = _targets(encoder, filters, store, base)
    run = _Run(encoder, targets, store, _raw_name(encoder, store, base), incomplete)
    run.report.collections = list(run.targets)
    size = WINDOW * encoder.parallel
    for node in run.follow(documents, splitter):
        run.window.append(node)
        if len(run.window) >= size:
            _advance(run, progress)
    _advance(run, progress, last=True)
    return run.report


def _targets(encoder: Encoder, filters: Sequence[EmbFilter], store: Store, base: str) -> dict[str, EmbFilter]:
    """Collections by name, each made or checked before anything is encoded."""
    targets = {collection_name(base, embfilter): embfilter for embfilter in filters}
    if not filters or len(targets) < len(filters):
        raise ConfigError(f"filters {[f.name for f in filters]}: expected at least one, and no two alike.")
    for name, embfilter in targets.items():
        if store.exists(name):
            store.require(name, encoder.fingerprint | embfilter.fingerprint, embfilter.dim, writing=True)
    for name, embfilter in targets.items():
        store.create(name, encoder, embfilter, base)
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
class _Run:
    """State of one ingestion: the window being filled, and sources not yet cleaned of old points."""

    encoder: Encoder
    targets: dict[str, EmbFilter]
    store: Store
    raw: str | None
    incomplete: Container[str]
    report: IngestReport = field(default_factory=IngestReport)
    window: list[TextNode] = field(default_factory=list)
    current: dict[str, set[str]] = field(default_factory=dict)  # source -> ids it has now
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
            ids = self.current.setdefault(source, set())
            title = str(document.metadata.get("title") or "")
            if why := fault(passage_text(title, document.text)):
                self.fail(document.id_, why)
                continue
            for node in splitter.nodes(document):
                self.report.nodes += 1
                ids.add(node.id_)
                yield node

    def fail(self, doc_id: str, reason: str) -> None:
        """Note a document that could not be stored; its former version will be kept."""
        self.failed_docs.add(doc_id)
        self.report.failed.append((doc_id, reason))


def _advance(run: _Run, progress: Callable[[int], None] | None, last: bool = False) -> None:
    """Write the window; then delete old points of the sources that are complete."""
    nodes, run.window = run.window, []
    if nodes:
        _write(run, nodes, progress)
    open_source = None if last or not nodes else str(nodes[-1].metadata["source"])
    complete = [source for source in run.current if source != open_source]
    whole = [source for source in complete if source not in run.incomplete]
    for name in run.targets:
        stored = run.store.points_of(name, whole)
        stale = [
            point
            for point, (source, doc_id) in stored.items()
            if point not in run.current[source] and doc_id not in run.failed_docs
        ]
        run.store.remove(name, stale)
        run.report.removed += len(stale)
    for source in complete:
        del run.current[source]
        run.complete.add(source)


def _write(run: _Run, nodes: list[TextNode], progress: Callable[[int], None] | None) -> None:
    """Bring the window's nodes into every collection that lacks them."""
    ids = [node.id_ for node in nodes]
    present = {name: run.store.present(name, ids) for name in run.targets}
    wanted = [node for node in nodes if any(node.id_ not in held for held in present.values())]
    run.report.unchanged += len(nodes) - len(wanted)
    if progress is not None and len(wanted) < len(nodes):
        progress(len(nodes) - len(wanted))
    if not wanted:
        return
    vectors = _raw_vectors(run, wanted, progress)
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


def _raw_vectors(
    run: _Run, nodes: list[TextNode], progress: Callable[[int], None] | None
) -> dict[str, FloatArray]:
    """Raw unit embeddings by node id: from the raw collection where it has them, else encoded."""
    known = run.store.present(run.raw, [node.id_ for node in nodes]) if run.raw else set()
    vectors: dict[str, FloatArray] = {}
    if run.raw and known:
        kept = [node.id_ for node in nodes if node.id_ in known]
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
