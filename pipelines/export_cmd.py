"""`export`: encoder and filter as a model that other software loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines import options, show
from rag_embfilter.errors import ConfigError
from rag_embfilter.recipes import RECIPES

if TYPE_CHECKING:
    from rag_embfilter.embedding import EmbFilterEmbedding

FORMATS = ("sentence-transformers",)
WHOLE = {"device": "cpu", "dtype": "float32"}  # what the export is written and checked in


@show.guarded
def export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    format: Annotated[str, typer.Option(help="Only sentence-transformers so far.")] = FORMATS[0],
    collection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Export what made this collection (full name or alias), with its fit and query mean; "
            "instead of the options below.",
        ),
    ] = None,
    config: options.Config = None,
    filter_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A filter that EmbFilter.save or ingest wrote, instead of type and ratio.",
            rich_help_panel=options.FILTER,
        ),
    ] = None,
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["prompteol"],  # noqa: B006 - typer copies it
    query_template: options.QueryTemplate = None,
    pooling: options.Pooling = None,
    max_length: options.MaxLength = 512,
    filter_types: options.FilterTypes = ["edge"],  # noqa: B006
    filter_ratios: options.FilterRatios = [2],  # noqa: B006
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    filter_dir: options.FilterDir = None,
) -> None:
    """Write a folder that SentenceTransformer(OUT) loads, and check that it gives the same vectors.

    It holds the backbone in float32, the template in its tokenizer, and the filter; this package is not
    needed to read it. Texts over --max-length lose their end there. Nothing is written when the check fails.
    """
    from rag_embfilter.export import export_sentence_transformers

    if format not in FORMATS:
        raise ConfigError(f"format {format!r}: expected {', '.join(FORMATS)}.")
    if collection is not None:
        with options.open_store(qdrant_path, qdrant_url, qdrant_key, filter_dir, grpc=qdrant_grpc) as store:
            from pipelines.search_cmd import embedder_of

            info = store.info(collection)
            if "filter_file" in info.settings:
                store.filter_of(info.name)
            embedder = embedder_of(info, **WHOLE)
    elif config is not None:
        embedder = _from_config(config, filter_file)
    else:
        settings = {
            "model_name": options.lent(backbone, unembedding_from),
            "revision": revision,
            "template": template[0] if len(template) == 1 else template,
            "query_template": query_template,
            "pooling": pooling,
            "max_length": max_length,
        }
        embedder = _embedder(settings | _filter(filter_file, filter_types, filter_ratios))
    report = export_sentence_transformers(embedder.encoder, embedder.filter, out)
    show.out.print(
        f"{show.escape(str(out))}: {embedder.filter.name}, {report.dim} dimensions, up to "
        f"{report.max_tokens} tokens with the template."
    )
    show.out.print(
        f"Its vectors differ from ours by at most {report.difference:.1e}, in a process of its own."
    )
    if report.copies > 1:
        show.out.print("The backbone is in it twice, as queries have a template of their own.")


def _from_config(config: Path, filter_file: Path | None) -> EmbFilterEmbedding:
    from rag_embfilter.embedding import EmbFilterEmbedding

    given = {} if filter_file is None else {"filter_file": filter_file}
    return EmbFilterEmbedding.from_config(config, **given, **WHOLE)


def _embedder(settings: dict[str, Any]) -> EmbFilterEmbedding:
    from rag_embfilter.embedding import EmbFilterEmbedding

    return EmbFilterEmbedding(**settings, **WHOLE)


def _filter(filter_file: Path | None, types: list[str], ratios: list[int]) -> dict[str, Any]:
    if filter_file is not None:
        return {"filter_file": str(filter_file)}
    options.one_filter(types, ratios)
    if RECIPES[types[0]].fitted:
        raise ConfigError(
            f"{types[0]} is fitted on a corpus. Give the fit: --collection NAME (what ingest made), "
            "--config FILE (what choose wrote), or --filter-file FILE."
        )
    return {"filter_type": types[0], "filter_ratio": ratios[0]}
