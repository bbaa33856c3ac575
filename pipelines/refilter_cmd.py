"""`refilter`: new filters for a base from its raw collection, with no pass of the backbone over documents."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show
from rag_embfilter.errors import ConfigError, FingerprintMismatch
from rag_embfilter.recipes import DEFAULT_KEEP, RECIPES

if TYPE_CHECKING:
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.filters import EmbFilter
    from rag_embfilter.store import Bm25, Store


@show.guarded
def refilter(
    base: Annotated[
        str, typer.Argument(metavar="NAME", help="Base name: from NAME-raw into NAME-edge-r4, ...")
    ],
    filter_types: options.FilterTypes = ["edge"],  # noqa: B006 - typer copies it
    filter_ratios: options.FilterRatios = [2],  # noqa: B006
    keep: options.Keep = DEFAULT_KEEP,
    example_questions: options.ExampleQuestions = None,
    source_collection: Annotated[
        str | None,
        typer.Option(
            help="First fill NAME-raw from this collection of somebody else's, on your word that the "
            "backbone, template, pooling and max-length given made its vectors."
        ),
    ] = None,
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["prompteol"],  # noqa: B006
    query_template: options.QueryTemplate = None,
    pooling: options.Pooling = None,
    max_length: options.MaxLength = 512,
    device: options.Device = None,
    dtype: options.Dtype = None,
    endpoint: options.Endpoint = None,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    filter_dir: options.FilterDir = None,
    bm25: options.Bm25 = None,
    quantization: options.Quantization = "none",
    on_disk: options.OnDisk = False,
    float16: options.Float16 = False,
    hnsw_m: options.HnswM = None,
    shards: options.Shards = None,
    replicas: options.Replicas = None,
    json_file: options.JsonFile = None,
) -> None:
    """Make collections for new filters from raw embeddings that are stored already.

    The backbone is loaded for its unembedding, and encodes example questions, nothing else. Without
    --source-collection, NAME-raw says itself what made it. Run it again after a stop: it goes on.
    """
    from pipelines.search_cmd import embedder_of
    from rag_embfilter.files import write_json
    from rag_embfilter.fitting import fit_in_use
    from rag_embfilter.store import Bm25, check_name

    check_name(base)
    if base.endswith("-raw"):
        raise ConfigError(f"{base!r} is a full name; give the base name, {base.removesuffix('-raw')!r}.")
    questions = options.read_questions(example_questions)
    with options.open_store(
        qdrant_path,
        qdrant_url,
        qdrant_key,
        filter_dir,
        grpc=qdrant_grpc,
        quantization=quantization,
        on_disk=on_disk,
        float16=float16,
        hnsw_m=hnsw_m,
        shards=shards,
        replicas=replicas,
    ) as store:
        if source_collection is None:
            encoder = embedder_of(store.info(f"{base}-raw"), device, dtype, endpoint=endpoint).encoder
        else:
            backbone = options.lent(backbone, unembedding_from)
            encoder = options.make_encoder(
                backbone, revision, template, query_template, pooling, max_length, device, dtype
            )
            _vouched(store, source_collection, encoder, base)
        filters, specs = options.make_filters(encoder, filter_types, filter_ratios, False, keep)
        for spec in specs if questions else ():
            name = f"{base}-{spec.filter_type}-r{spec.filter_ratio}"
            if RECIPES[spec.filter_type].centred and store.exists(name):
                said = f"{name} is there: its queries are centred on the questions given now."
                show.out.print(show.escape(said), soft_wrap=True)
        filters += [fit_in_use(spec, encoder, store, base, questions) for spec in specs]
        wanted = [embfilter for embfilter in filters if embfilter.name != "raw"]
        terms = None if bm25 is None else Bm25(bm25)
        rows = _run(store, f"{base}-raw", encoder, base, wanted, terms)
    if json_file is not None:
        write_json(json_file, rows)


def _vouched(store: Store, source: str, encoder: Encoder, base: str) -> None:
    """Copy somebody else's raw embeddings into NAME-raw, where they get the fingerprint vouched for."""
    from rag_embfilter.filters import EmbFilter

    _, dim = store.only_vector(source)
    if dim != encoder.hidden_size:
        raise FingerprintMismatch(
            f"collection {source!r} holds vectors of {dim} dimensions, and this encoder makes "
            f"{encoder.hidden_size}; they are not its raw embeddings."
        )
    _run(store, source, encoder, base, [EmbFilter.from_encoder(encoder, "raw")])


def _run(
    store: Store,
    source: str,
    encoder: Encoder,
    base: str,
    filters: Sequence[EmbFilter],
    bm25: Bm25 | None = None,
) -> list[dict[str, object]]:
    """Make and fill the filters' collections with a bar; a row of what was done for each."""
    from rag_embfilter.refiltering import refilter as bring
    from rag_embfilter.store import collection_name

    targets = {collection_name(base, embfilter): embfilter for embfilter in filters}
    for name, embfilter in targets.items():  # all of them, before the first is made
        if store.exists(name):
            store.require(name, encoder.fingerprint | embfilter.fingerprint, embfilter.dim, writing=True)
            store.require_bm25(name, bm25)
    for name, embfilter in targets.items():
        store.create(name, encoder, embfilter, base, bm25)
    vector, _ = store.only_vector(source)
    start = time.perf_counter()
    with show.progress_bar() as progress:
        total = store.count(source)
        task = progress.add_task(f"from {source}", total=total, unit="points")
        done = bring(store, source, targets, vector=vector, progress=lambda n: progress.advance(task, n))
    seconds = time.perf_counter() - start
    rows: list[dict[str, object]] = [
        {"collection": name, "dim": targets[name].dim, "points": store.count(name), **vars(each)}
        for name, each in done.items()
    ]
    columns = ["collection", "dims", "points", "written", "held before", "left out"]
    cells = [[show.escape(str(value)) for value in row.values()] for row in rows]
    show.out.print(show.table(f"From {show.escape(source)} ({total:,} points)", columns, cells))
    written = sum(each.written for each in done.values())
    show.out.print(
        f"{written:,} points written in {seconds:.1f} s, {written / max(seconds, 1e-9):,.0f} a second."
    )
    return rows
