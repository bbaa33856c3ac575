"""`ingest`: real documents into one Qdrant collection per filter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show
from rag_embfilter.recipes import DEFAULT_KEEP, RECIPES

if TYPE_CHECKING:
    from rich.progress import Progress

    from pipelines.readers import SourceReader
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.filters import EmbFilter
    from rag_embfilter.ingestion import IngestReport
    from rag_embfilter.store import Bm25, Store

READING = "Reading"
TYPES = ".txt .md .html .htm .pdf .docx .jsonl .csv"


@show.guarded
def ingest(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE...", help=f"Folders, or files of type {TYPES}.")
    ],
    collection: Annotated[
        str, typer.Option(help="Base name: NAME-raw, NAME-edge-r2, ... are written.", metavar="NAME")
    ],
    config: options.Config = None,
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["prompteol"],  # noqa: B006 - typer copies it
    query_template: options.QueryTemplate = None,
    pooling: options.Pooling = None,
    max_length: options.MaxLength = 512,
    device: options.Device = None,
    dtype: options.Dtype = None,
    engine: options.Engine = "local",
    num_actors: options.NumActors = None,
    endpoint: options.Endpoint = None,
    endpoint_model: options.EndpointModel = None,
    endpoint_prompts: options.EndpointPrompts = "tokens",
    filter_types: options.FilterTypes = ["edge"],  # noqa: B006 - typer copies it
    filter_ratios: options.FilterRatios = [2],  # noqa: B006
    raw: Annotated[
        bool,
        typer.Option(
            help="Write NAME-raw too; further filters are then made from it with no pass of the backbone.",
            rich_help_panel=options.FILTER,
        ),
    ] = True,
    chunk_size: Annotated[int, typer.Option(help="Longest chunk in tokens.", rich_help_panel=READING)] = 256,
    chunk_overlap: Annotated[
        int, typer.Option(help="Tokens that neighbouring chunks share.", rich_help_panel=READING)
    ] = 32,
    text_column: Annotated[
        str, typer.Option(help="Field of .jsonl and .csv with the text.", rich_help_panel=READING)
    ] = "text",
    title_column: Annotated[
        str, typer.Option(help="Field with the title, if any.", rich_help_panel=READING)
    ] = "title",
    id_column: Annotated[
        str | None, typer.Option(help="Field with the id; by default _id or id.", rich_help_panel=READING)
    ] = None,
    encoding: Annotated[
        str, typer.Option(help="Encoding of text files without a byte order mark.", rich_help_panel=READING)
    ] = "utf-8",
    root: Annotated[
        Path | None,
        typer.Option(
            help="Name sources by their path below this folder, not by their absolute path.",
            rich_help_panel=READING,
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            help="Remove what is stored of files that are no longer in the folders given.",
            rich_help_panel=READING,
        ),
    ] = False,
    keep: options.Keep = DEFAULT_KEEP,
    example_questions: options.ExampleQuestions = None,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    filter_dir: options.FilterDir = None,
    edge: options.Edge = False,
    bm25: options.Bm25 = None,
    quantization: options.Quantization = "none",
    on_disk: options.OnDisk = False,
    float16: options.Float16 = False,
    hnsw_m: options.HnswM = None,
    shards: options.Shards = None,
    replicas: options.Replicas = None,
    json_file: options.JsonFile = None,
) -> None:
    """Write documents into one collection per filter, from a single pass of the backbone.

    Run it again at any time: chunks that are stored already cost nothing, changed files replace only
    their own chunks, and a run that was stopped goes on. Files that cannot be read are listed at the
    end, and the rest is ingested; the exit code is then 1.
    """
    from pipelines.readers import ReadOptions, open_sources
    from rag_embfilter.config import Config
    from rag_embfilter.fitting import fit_in_use, siblings
    from rag_embfilter.store import Bm25, check_name, collection_name

    check_name(collection)
    terms = None if bm25 is None else Bm25(bm25)
    reader = open_sources(sources, ReadOptions(text_column, title_column, id_column, encoding, root))
    backbone = options.lent(backbone, unembedding_from)
    if config is not None:
        chosen = Config.read(config)
        backbone, revision, template = chosen.model_name, chosen.revision, chosen.templates
        filter_types, filter_ratios = [chosen.filter_type], [chosen.filter_ratio]
        pooling, max_length, keep = chosen.pooling, chosen.max_length, chosen.keep
    encoder = options.make_encoder(
        backbone, revision, template, query_template, pooling, max_length, device, dtype, engine, num_actors,
        endpoint, endpoint_model, endpoint_prompts,
    )  # fmt: skip
    with_raw = raw or _fits(filter_types)
    filters, fitted = options.make_filters(encoder, filter_types, filter_ratios, with_raw, keep)
    questions = options.read_questions(example_questions)
    spare = chosen.example_questions if config is not None else ()
    with (
        encoder,
        options.open_store(
            qdrant_path,
            qdrant_url,
            qdrant_key,
            filter_dir,
            edge=edge,
            grpc=qdrant_grpc,
            quantization=quantization,
            on_disk=on_disk,
            float16=float16,
            hnsw_m=hnsw_m,
            shards=shards,
            replicas=replicas,
        ) as store,
        show.progress_bar() as progress,
    ):
        names = {collection_name(collection, embfilter) for embfilter in filters}
        named = names | {f"{collection}-{spec.filter_type}-r{spec.filter_ratio}" for spec in fitted}
        for name in sorted(named):
            if store.exists(name):
                store.require_bm25(name, terms)
        others, foreign = siblings(encoder, store, collection, names)
        filters += others
        run = partial(
            _run,
            encoder=encoder,
            store=store,
            base=collection,
            chunks=(chunk_size, chunk_overlap),
            bm25=terms,
        )
        report = run(reader, filters, progress=progress)
        made = [fit_in_use(spec, encoder, store, collection, questions, spare) for spec in fitted]
        made = [embfilter for embfilter in made if not store.exists(collection_name(collection, embfilter))]
        if made:
            # Read again, not encoded again: the vectors come from the raw collection.
            again = run(open_sources(sources, reader.options), made, progress=progress)
            report.collections += again.collections
            report.points_removed += again.points_removed
            report.failed += [failure for failure in again.failed if failure not in report.failed]
        _fill(store, collection, [*filters, *made], report)
        vanished = _vanished(store, sources, reader, report.collections)
        if prune:
            _remove(store, report, vanished)
        progress.stop()
        _print(report, reader, encoder, store)
        _notes(vanished, prune, foreign)
    if json_file is not None:
        _write(json_file, report, reader, encoder, vanished)
    if reader.failed or report.failed:
        raise typer.Exit(1)


def _fits(types: Sequence[str]) -> bool:
    """Whether a type is fitted, and so needs the raw collection."""
    return any(t in RECIPES and RECIPES[t].fitted for t in types)


def _run(
    reader: SourceReader,
    filters: Sequence[EmbFilter],
    *,
    encoder: Encoder,
    store: Store,
    base: str,
    chunks: tuple[int, int],
    bm25: Bm25 | None,
    progress: Progress,
) -> IngestReport:
    """One reading of the sources into the filters' collections, with a bar."""
    from rag_embfilter.ingestion import ingest as ingest_documents

    what = ", ".join(embfilter.name for embfilter in filters)
    task = progress.add_task(f"into {what}", total=reader.total_bytes, unit="chunks", done=0)
    reader.on_bytes = lambda n: progress.advance(task, n)
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        progress.update(task, done=done)

    return ingest_documents(
        reader, encoder, filters, store, base,
        chunk_size=chunks[0], chunk_overlap=chunks[1], incomplete=reader.incomplete, progress=count,
        bm25=bm25,
    )  # fmt: skip


def _fill(store: Store, base: str, filters: Sequence[EmbFilter], report: IngestReport) -> None:
    """Bring what earlier runs stored into collections that are new, from the raw one."""
    from rag_embfilter.refiltering import refilter
    from rag_embfilter.store import collection_name

    targets = {collection_name(base, f): f for f in filters if f.name != "raw"}
    if store.exists(f"{base}-raw") and f"{base}-raw" in report.collections:
        held = store.info(f"{base}-raw").points
        behind = {name: f for name, f in targets.items() if store.info(name).points < held}
        done = refilter(store, f"{base}-raw", behind) if behind else {}
        report.refiltered += max((each.written for each in done.values()), default=0)


def _vanished(store: Store, given: Sequence[Path], reader: SourceReader, names: Sequence[str]) -> list[str]:
    """Stored sources that lay below a folder given and are no longer there.

    Nothing counts as gone while a folder cannot be listed.
    """
    folders = [reader.name(folder) for folder in given if folder.is_dir()]
    if not folders or reader.unlisted:
        return []

    def below(source: str, folder: str) -> bool:
        # The root itself is called ".": what lies below it has a relative name.
        return not source.startswith("/") if folder == "." else source.startswith(f"{folder}/")

    stored = set().union(*(store.sources(name) for name in names))
    here = {reader.name(file) for file in reader.files}
    return sorted(s for s in stored - here if any(below(s, folder) for folder in folders))


def _remove(store: Store, report: IngestReport, sources: Sequence[str]) -> None:
    """Delete all points of these sources, and count their documents as removed."""
    for start in range(0, len(sources), 256):
        documents: set[str] = set()
        for name in report.collections:
            points = store.points_of(name, sources[start : start + 256])
            store.remove(name, list(points))
            report.points_removed += len(points)
            documents.update(doc_id for _, doc_id in points.values())
        report.removed += len(documents)


def _notes(vanished: Sequence[str], prune: bool, foreign: Sequence[str]) -> None:
    """What a person should know beside the counts."""
    if vanished:
        done = "were removed" if prune else "are still stored; --prune removes them"
        show.out.print(f"{len(vanished)} sources are no longer there and {done}:")
        for source in vanished[:10]:
            show.out.print(f"  {show.escape(source)}", soft_wrap=True)
    for name in foreign:
        show.err.print(
            f"[yellow]note:[/] {show.escape(name)} was made with other settings and is left as it is.",
            soft_wrap=True,
        )


def _print(report: IngestReport, reader: SourceReader, encoder: Encoder, store: Store) -> None:
    from pipelines.readers import printable

    rows = [
        [show.escape(name), str(info.dim), f"{info.points:,}"]
        for name in report.collections
        for info in [store.info(name)]
    ]
    show.out.print(show.table("Collections", ["name", "dims", "points"], rows))
    failed = len({document for document, _ in report.failed}) + len(reader.failed)
    show.out.print(
        f"Documents: {report.added:,} added, {report.changed:,} changed, {report.removed:,} removed, "
        f"{report.unchanged:,} unchanged, {failed:,} failed."
    )
    show.out.print(
        f"Chunks: {report.encoded:,} encoded, {report.refiltered:,} filtered from raw, "
        f"{report.nodes_unchanged:,} unchanged; {report.points_removed:,} old points removed."
    )
    if (stats := encoder.stats).tokens:
        show.out.print(
            f"Model: {stats.tokens:,} tokens, {stats.padding_share:.1%} padding; "
            f"a common prefix saved {stats.saved:,}."
        )
    if stats.truncated:
        show.out.print(f"{stats} (longer than --max-length).")
    if reader.skipped:
        kinds = " ".join(sorted({printable(file.suffix) or "(none)" for file in reader.skipped}))
        show.out.print(f"{len(reader.skipped)} files of other types passed over: {show.escape(kinds)}")
    show.listed("Not read", reader.failed)
    show.listed("Not stored", report.failed)


def _write(
    path: Path, report: IngestReport, reader: SourceReader, encoder: Encoder, vanished: Sequence[str]
) -> None:
    from pipelines.readers import printable
    from pipelines.results import provenance
    from rag_embfilter.files import write_json

    result = vars(report) | {
        "not_read": reader.failed,
        "sources_gone": [printable(source) for source in vanished],
        "skipped": [printable(str(file)) for file in reader.skipped],
        "encoding": vars(encoder.stats),
        "engine": encoder.engine,
    }
    write_json(path, provenance(encoder) | {"ingest": result})
