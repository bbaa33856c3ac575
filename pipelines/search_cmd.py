"""`search`: a question to one collection."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show
from rag_embfilter.errors import ConfigError, StoreError
from rag_embfilter.files import write_json

if TYPE_CHECKING:
    from rag_embfilter.embedding import EmbFilterEmbedding
    from rag_embfilter.store import CollectionInfo, Hit, Store


@show.guarded
def search(
    question: Annotated[str, typer.Argument(help="What to look for.")],
    collection: Annotated[
        str, typer.Option(metavar="NAME", help="A base name, a full collection name, or an alias.")
    ],
    filter_types: options.FilterTypes = [],  # noqa: B006 - typer copies it
    filter_ratios: options.FilterRatios = [],  # noqa: B006
    limit: Annotated[int, typer.Option(min=1, help="Results to show.")] = 5,
    where: Annotated[
        list[str],
        typer.Option(metavar="FIELD=VALUE", help="Only passages whose metadata has this value; repeatable."),
    ] = [],  # noqa: B006
    mode: Annotated[
        str,
        typer.Option(
            help="dense (the filtered vectors), bm25, or hybrid (both, fused by rank); the last two "
            "where the collection was made with --bm25."
        ),
    ] = "dense",
    device: options.Device = None,
    dtype: options.Dtype = None,
    endpoint: options.Endpoint = None,
    endpoint_model: options.EndpointModel = None,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    filter_dir: options.FilterDir = None,
    json_file: options.JsonFile = None,
) -> None:
    """Find the passages nearest to a question.

    Backbone, template and filter are taken from what the collection says about itself. For a base
    name, --filter-types and --filter-ratios pick the collection under it: edge at 2 by default, or the only
    one there is beside raw.
    """
    if not question.strip():
        raise ConfigError("the question is empty.")
    if mode not in options.MODES:
        raise ConfigError(f"mode {mode!r}: expected one of {', '.join(options.MODES)}.")
    conditions = dict(_condition(word) for word in where)
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, filter_dir, grpc=qdrant_grpc) as store:
        wanted = options.one_filter(filter_types or ["edge"], filter_ratios or [2])
        info = find_collection(store, collection, wanted, chosen=bool(filter_types or filter_ratios))
        where_at = {"device": device, "dtype": dtype, "endpoint": endpoint, "endpoint_model": endpoint_model}
        hits = find(store, info, question, mode, limit, conditions, where_at)
    for rank, hit in enumerate(hits, 1):
        _print_hit(rank, hit)
    if not hits:
        nothing = f"Nothing in {info.name} matches" + (f" {' '.join(where)}." if where else ".")
        show.out.print(show.escape(nothing), soft_wrap=True)
    if json_file is not None:
        write_json(json_file, _json(question, info, hits))


def find(
    store: Store,
    info: CollectionInfo,
    question: str,
    mode: str,
    limit: int,
    conditions: Mapping[str, str],
    how: Mapping[str, str | None],
) -> list[Hit]:
    """The passages of a collection for a question, encoded as `embedder_of` takes `how`; BM25 alone needs no
    backbone.
    """
    if mode != "dense" and info.bm25 is None:
        store.search_text(info.name, [question])  # says what is missing, before the backbone is loaded
    if mode == "bm25":
        return store.search_text(info.name, [question], limit, conditions)[0]
    if "filter_file" in info.settings:
        store.filter_of(info.name)  # its file must be there before the backbone is loaded
    embedding = embedder_of(info, **how)
    raw = embedding.encoder.encode_queries([question])
    vectors = embedding.filter.apply(raw, role="query")
    texts = [question] if mode == "hybrid" else None
    return store.search(info.name, vectors, limit, conditions, texts=texts)[0]


def find_collection(store: Store, name: str, filter_name: str, chosen: bool = True) -> CollectionInfo:
    """The collection of a full name or alias, or the one under a base name for a filter.

    A filter that nobody chose gives way to the only one there is.
    """
    if store.exists(name):
        return store.info(name)
    full = f"{name}-{filter_name}"
    if store.exists(full):
        return store.info(full)
    under = [have for have in store.names() if have.startswith(f"{name}-")]
    if not chosen and (only := _only_filtered(store, name, under)):
        return only
    if under:
        raise StoreError(
            f"collection {full!r} is not there. Under {name!r} there are: {', '.join(under)}. Give one of "
            "these names, or its --filter-types and --filter-ratios."
        )
    return store.info(name)


def _only_filtered(store: Store, base: str, names: Sequence[str]) -> CollectionInfo | None:
    """The only filtered collection of a base, if there is just one; `a-b` is no filter of base `a`."""
    found = []
    for name in names:
        with suppress(StoreError):  # somebody else's, with other vectors
            info = store.info(name)
            if info.made.get("base") == base and info.settings.get("filter_type") != "raw":
                found.append(info)
    return found[0] if len(found) == 1 else None


def embedder_of(
    info: CollectionInfo, device: str | None, dtype: str | None, **endpoint: str | None
) -> EmbFilterEmbedding:
    """The embedder that made a collection, from its own metadata; its fingerprint is checked.

    `endpoint` and `endpoint_model` as in `EmbFilterEmbedding`: a server encodes.
    """
    from rag_embfilter.embedding import EmbFilterEmbedding

    if info.fingerprint is None:
        raise StoreError(
            f"collection {info.name!r} does not say what made it. Adopt it first: "
            f"python -m pipelines collections adopt {info.name}"
        )
    made_with = info.made.get("compute_dtype")
    embedding = EmbFilterEmbedding(
        **info.settings, device=device, dtype=dtype, fingerprint=info.fingerprint.digest, **endpoint
    )
    if (now := str(embedding.encoder.backbone.dtype).removeprefix("torch.")) != made_with:
        show.err.print(f"[yellow]note:[/] vectors were computed in {made_with}, the question in {now}.")
    return embedding


def _condition(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not name or not equals:
        raise ConfigError(f"--where {word!r}: expected FIELD=VALUE.")
    return name, value


def shown_place(hit: Hit) -> str:
    """The source by its path from here where it lies below this folder."""
    source = str(hit.node.metadata.get("source", ""))
    here = f"{Path.cwd().as_posix()}/"
    return hit.place.removeprefix(here) if source.startswith(here) else hit.place


def _print_hit(rank: int, hit: Hit) -> None:
    show.out.print(
        f"[bold]{rank}.[/] [cyan]{hit.score:.3f}[/] [bold]{show.escape(shown_place(hit))}[/]", soft_wrap=True
    )
    passage = textwrap.shorten(show.clean(hit.text), 400, placeholder=" ...")
    width = min(96, show.out.width - 4)
    show.out.print(textwrap.indent(textwrap.fill(passage, width), "   "), markup=False)


def _json(question: str, info: CollectionInfo, hits: list[Hit]) -> dict[str, object]:
    return {
        "question": question,
        "collection": info.name,
        "fingerprint": info.fingerprint.digest if info.fingerprint else None,
        "hits": [
            {"id": h.id, "score": h.score, "place": h.place, "text": h.text, "metadata": h.node.metadata}
            for h in hits
        ],
    }
