"""`collections`: what is in the store, what made it, and its removal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show
from rag_embfilter.errors import ConfigError, StoreError
from rag_embfilter.files import write_json

if TYPE_CHECKING:
    from rag_embfilter.store import Store

app = typer.Typer(
    help="List collections, show what made them, switch aliases, adopt or delete.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(help="Full name of a collection.")]


@app.command("list")
@show.guarded
def list_all(
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    json_file: options.JsonFile = None,
) -> None:
    """List all collections with their size, filter and backbone."""
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, grpc=qdrant_grpc) as store:
        rows = [_row(store, name) for name in store.names()]
        aliases = store.aliases()
    columns = ["name", "points", "dims", "filter", "backbone", "template", "bm25", "created"]
    if rows:
        show.out.print(show.table("Collections", columns, [[show.escape(c) for c in row] for row in rows]))
    else:
        show.out.print("No collections yet. Make some: python -m pipelines ingest FOLDER --collection NAME")
    for alias, collection in sorted(aliases.items()):
        show.out.print(show.escape(f"Alias {alias} stands for {collection}."), soft_wrap=True)
    if json_file is not None:
        write_json(json_file, [dict(zip(columns, row, strict=True)) for row in rows])


def _row(store: Store, name: str) -> list[str]:
    try:
        info = store.info(name)
    except StoreError:  # somebody else's, with other vectors: no reason to hide the rest
        return [name, "", "", "unknown", "unknown", "", "", ""]
    return [
        name,
        f"{info.points:,}",
        str(info.dim),
        str(info.settings.get("filter_type", "unknown")),
        str(info.settings.get("model_name", "unknown")),
        str(info.settings.get("template", "")),
        info.bm25.language if info.bm25 else "",
        str(info.made.get("created", ""))[:10],
    ]


@app.command("show")
@show.guarded
def show_one(
    name: Name,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    json_file: options.JsonFile = None,
) -> None:
    """Show what made a collection: its fingerprint, part by part."""
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, grpc=qdrant_grpc) as store:
        info = store.info(name)
        aliases = [alias for alias, stood in store.aliases().items() if stood == info.name]
    rows = [["points", f"{info.points:,}"], ["dimensions", str(info.dim)]]
    rows += [["quantisation", info.quantization], ["bm25", info.bm25.language if info.bm25 else "none"]]
    rows += [["aliases", ", ".join(aliases)]] if aliases else []
    if info.fingerprint is None:
        rows.append(["fingerprint", "none: this collection was not made here"])
    else:
        rows.append(["fingerprint", info.fingerprint.digest])
        rows += [[f"  {part}", str(value)] for part, value in info.fingerprint.parts.items()]
        rows += [[part, str(info.made.get(part))] for part in ("compute_dtype", "version", "created")]
    cells = [[show.escape(cell) for cell in row] for row in rows]
    show.out.print(show.table(show.escape(info.name), ["", ""], cells, left=2, header=False, wrap=True))
    if json_file is not None:
        write_json(json_file, {"name": info.name, "points": info.points, "dim": info.dim, **info.made})


@app.command("delete")
@show.guarded
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also when an alias stands for it.")] = False,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
) -> None:
    """Delete a collection and all its points."""
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, grpc=qdrant_grpc) as store:
        points = _points(store, name)
        if not yes and not typer.confirm(f"Delete {name} with {points} points?"):
            show.out.print("Nothing deleted.")
            raise typer.Exit(1)
        store.delete(name, force)
    show.out.print(f"Deleted {show.escape(name)} ({points} points).", soft_wrap=True)


def _points(store: Store, name: str) -> str:
    """Points of a collection that is to go, which may be somebody else's, or one that cannot be read."""
    if name in store.names():
        try:
            return f"{store.count(name):,}"
        except StoreError:
            return "unknown"
    return f"{store.info(name).points:,}"


@app.command("switch")
@show.guarded
def switch(
    alias: Annotated[str, typer.Argument(help="The name that readers use.")],
    name: Annotated[str, typer.Argument(help="Full name of the collection that it shall stand for.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also with other counts, or no fingerprint.")
    ] = False,
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="Then delete the collection it stood for.")
    ] = False,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
) -> None:
    """Move an alias to another collection in one step, so that readers never wait.

    The new collection must hold as many points as the old one, and know what made it. The same command
    with the old name goes back.
    """
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, grpc=qdrant_grpc) as store:
        old = store.switch(alias, name, force)
        now = store.aliases()[alias]
        if drop_old and old not in (None, now):
            store.delete(str(old))
    was = f", was {old}" + (" (deleted)" if drop_old and old != now else "") if old else ""
    show.out.print(show.escape(f"{alias} stands for {now}{was}."), soft_wrap=True)
    if old not in (None, now) and not drop_old:
        where = f" --qdrant-url {qdrant_url}" if qdrant_url else ""
        if not qdrant_url and qdrant_path != options.DEFAULT_PATH:
            where = f" --qdrant-path {qdrant_path}"
        back = f"Back: python -m pipelines collections switch {alias} {old}{where}"
        show.out.print(show.escape(back), soft_wrap=True)


@app.command("adopt")
@show.guarded
def adopt(
    name: Name,
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["prompteol"],  # noqa: B006 - typer copies it
    query_template: options.QueryTemplate = None,
    pooling: options.Pooling = None,
    max_length: options.MaxLength = 512,
    filter_types: options.FilterTypes = ["edge"],  # noqa: B006 - typer copies it
    filter_ratios: options.FilterRatios = [2],  # noqa: B006
    override: Annotated[bool, typer.Option(help="Replace a fingerprint that it has.")] = False,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
) -> None:
    """Say, on your word, what made a collection that does not know it itself."""
    backbone = options.lent(backbone, unembedding_from)
    encoder = options.make_encoder(backbone, revision, template, query_template, pooling, max_length)
    filters, fitted = options.make_filters(encoder, filter_types, filter_ratios, raw=False)
    if len(filters) != 1 or fitted:
        raise ConfigError("a collection has one filter, not a fitted one; give one type and one ratio.")
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, grpc=qdrant_grpc) as store:
        store.adopt(name, encoder, filters[0], override)
        made = f"{name} is now {filters[0].name} of {backbone}."
        show.out.print(show.escape(made), soft_wrap=True)
