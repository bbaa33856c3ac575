"""`refit-queries`: another query mean for a calibrated collection, from a file of questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines import options, show
from pipelines.search_cmd import embedder_of
from rag_embfilter.errors import ConfigError


@show.guarded
def refit_queries(
    collection: Annotated[str, typer.Argument(help="Full name of a calibrated collection.")],
    questions: Annotated[Path, typer.Argument(metavar="FILE", help="Questions of the domain, one a line.")],
    device: options.Device = None,
    dtype: options.Dtype = None,
    endpoint: options.Endpoint = None,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    filter_dir: options.FilterDir = None,
) -> None:
    """Centre a calibrated collection's queries on other example questions; no stored vector is touched."""
    asked = options.read_questions(questions) or []
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, filter_dir, grpc=qdrant_grpc) as store:
        info = store.info(collection)
        if info.settings.get("query_mean") is None or info.settings.get("filter_type") != "calibrated":
            raise ConfigError(
                f"collection {collection!r} is not calibrated, so it has no query mean to refit."
            )
        embfilter = store.filter_of(collection)
        encoder = embedder_of(info, device, dtype, endpoint=endpoint).encoder
        refitted = embfilter.with_queries(encoder.encode_queries(asked))
        store.set_query_mean(collection, refitted)
    show.out.print(f"{show.escape(collection)}: queries are centred on {len(asked)} questions now.")
