"""Options that several commands share, and what is made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines import show
from rag_embfilter.errors import ConfigError
from rag_embfilter.filters import FILTER_TYPES, EmbFilter
from rag_embfilter.recipes import DEFAULT_KEEP, RECIPES
from rag_embfilter.templates import SETS, TEMPLATES

if TYPE_CHECKING:
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.fitting import FilterSpec
    from rag_embfilter.store import Store

MODES = ("dense", "bm25", "hybrid")
JUDGED = "context_precision context_recall faithfulness answer_relevancy factual_correctness".split()
QUANTIZATIONS = ("none", "scalar", "binary")
MODEL, FILTER, STORE = "Backbone", "Filters", "Qdrant"
DEFAULT_PATH = Path(".embfilter/qdrant")

Backbone = Annotated[
    str,
    typer.Option(
        help="[b]smollm2[/b] (packaged weights), a hub id, a model folder or a .gguf file.",
        rich_help_panel=MODEL,
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=MODEL)
]
UnembeddingFrom = Annotated[
    str | None,
    typer.Option(
        metavar="BASE",
        help="For an embedder that was saved without its unembedding: the causal language model it was "
        "trained from, whose own is used.",
        rich_help_panel=MODEL,
    ),
]
Templates = Annotated[
    list[str],
    typer.Option(
        "--template",
        help=f"{', '.join(TEMPLATES)}, or a format string with {{text}} in it; several cost a pass each and "
        "are joined. metaeol is eight, averaged.",
        rich_help_panel=MODEL,
    ),
]
QueryTemplate = Annotated[
    str | None,
    typer.Option(help="Another template for the queries.", rich_help_panel=MODEL),
]
Pooling = Annotated[
    str | None,
    typer.Option(
        help="last, mean, or last+mean (both joined, from one pass); cls or mean for masked models; by "
        "default what the template asks for.",
        rich_help_panel=MODEL,
    ),
]
MaxLength = Annotated[
    int, typer.Option(help="Longest text in tokens; the rest is cut.", rich_help_panel=MODEL)
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ..., or cuda:all; CUDA if there is one.", rich_help_panel=MODEL),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16; by default bfloat16 where the hardware has it.",
        rich_help_panel=MODEL,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        help="Who encodes: this process, or actors in the Ray cluster that RAY_ADDRESS names (without it, "
        "one on this machine).",
        rich_help_panel=MODEL,
    ),
]
NumActors = Annotated[
    int | None,
    typer.Option(
        help="Actors of --engine ray; by default one a GPU, or one a machine.", rich_help_panel=MODEL
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="An OpenAI-compatible server that encodes with this backbone (vLLM, llama.cpp, TEI, ...); "
        "filters are applied here. Its key is read from EMBFILTER_ENDPOINT_KEY.",
        rich_help_panel=MODEL,
    ),
]
EndpointModel = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The backbone's name there; by default the first that it lists.",
        rich_help_panel=MODEL,
    ),
]
EndpointPrompts = Annotated[
    str,
    typer.Option(
        metavar="tokens|text",
        help="What the server is sent: token ids, for the same vectors as here; or text, for servers that "
        "take no token ids, with a fingerprint of its own.",
        rich_help_panel=MODEL,
    ),
]
FilterTypes = Annotated[
    list[str],
    typer.Option(help=f"One or more of {', '.join(FILTER_TYPES)}: what is removed.", rich_help_panel=FILTER),
]
FilterRatios = Annotated[
    list[int],
    typer.Option(help="One or more divisors of the hidden size: 2 keeps half.", rich_help_panel=FILTER),
]
Keep = Annotated[
    float,
    typer.Option(
        help="Share of the spectrum that calibrated leaves to its PCA; 1 removes no edge.",
        rich_help_panel=FILTER,
    ),
]
ExampleQuestions = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="10 to 30 questions of the domain, one a line, for calibrated filters; without it, "
        "openings of passages stand in.",
        rich_help_panel=FILTER,
    ),
]
FilterDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of fitted filters; by default filters beside the embedded Qdrant.",
        rich_help_panel=STORE,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What `choose --config` wrote, instead of backbone, template, pooling, max-length, filter and "
        "keep; its questions serve a new collection where no --example-questions are given.",
        rich_help_panel=MODEL,
    ),
]
QdrantPath = Annotated[Path, typer.Option(help="Folder of the embedded Qdrant.", rich_help_panel=STORE)]
QdrantUrl = Annotated[
    str | None,
    typer.Option(
        envvar="QDRANT_URL",
        help="A Qdrant server instead; its key is read from QDRANT_API_KEY.",
        rich_help_panel=STORE,
    ),
]
QdrantGrpc = Annotated[
    bool,
    typer.Option(
        "--qdrant-grpc",
        envvar="QDRANT_GRPC",
        help="Talk to the server by gRPC, on port 6334.",
        rich_help_panel=STORE,
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        help="none, scalar (a byte a dimension) or binary (a bit), beside the whole vectors, which rank "
        "again; for new collections on a server or Edge, as are the next three.",
        rich_help_panel=STORE,
    ),
]
OnDisk = Annotated[bool, typer.Option("--on-disk", help="Whole vectors on disk.", rich_help_panel=STORE)]
Float16 = Annotated[
    bool,
    typer.Option(
        "--float16", help="Filtered vectors in half precision; raw ones whole.", rich_help_panel=STORE
    ),
]
Edge = Annotated[
    bool,
    typer.Option(
        "--edge",
        help="Make --qdrant-path a folder of Qdrant Edge: the server's engine in this process, with "
        "index and quantisation. Other commands open such a folder as what it is.",
        rich_help_panel=STORE,
    ),
]
Bm25 = Annotated[
    str | None,
    typer.Option(
        metavar="LANGUAGE",
        help="Give new collections BM25 vectors too, for `search --mode hybrid`: english, german, ..., or "
        "multilingual.",
        rich_help_panel=STORE,
    ),
]
HnswM = Annotated[
    int | None,
    typer.Option(help="Links of a point in the index; by default 16.", rich_help_panel=STORE),
]
Shards = Annotated[
    int | None, typer.Option(help="Parts of a collection in a cluster.", rich_help_panel=STORE)
]
Replicas = Annotated[int | None, typer.Option(help="Copies of a collection.", rich_help_panel=STORE)]
QdrantKey = Annotated[str | None, typer.Option("--qdrant-api-key", envvar="QDRANT_API_KEY", hidden=True)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON too.")
]


def lent(backbone: str, unembedding_from: str | None) -> str:
    """A backbone's name with that of the model that lends it its unembedding."""
    from rag_embfilter.checkpoints import UNEMBEDDING_FROM

    if unembedding_from is None:
        return backbone
    if UNEMBEDDING_FROM in backbone:
        raise ConfigError(f"backbone {backbone!r} names its base already; leave --unembedding-from out.")
    return backbone + UNEMBEDDING_FROM + unembedding_from


def make_encoder(
    backbone: str,
    revision: str | None,
    template: Sequence[str],
    query_template: str | None,
    pooling: str | None,
    max_length: int,
    device: str | None = None,
    dtype: str | None = None,
    engine: str = "local",
    num_actors: int | None = None,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    endpoint_prompts: str = "tokens",
) -> Encoder:
    """The encoder that the shared options describe; to be closed when it is a cluster's or a server's."""
    words = template[0] if len(template) == 1 else template
    if isinstance(words, str) and words in SETS:
        show.err.print(
            f"[yellow]note:[/] {words} takes {len(SETS[words])} passes of the backbone for each text."
        )
    if endpoint is not None:
        from rag_embfilter.endpoint import EndpointEncoder

        if engine != "local" or num_actors is not None or device is not None:
            raise ConfigError(
                "--endpoint encodes on a server; leave --engine, --num-actors and --device out."
            )
        return EndpointEncoder(
            endpoint,
            backbone,
            words,
            pooling,
            max_length,
            dtype,
            model=endpoint_model,
            prompts=endpoint_prompts,
            revision=revision,
            query_template=query_template,
        )
    if endpoint_model is not None or endpoint_prompts != "tokens":
        raise ConfigError("endpoint-model and endpoint-prompts go with --endpoint URL.")
    if engine not in ("local", "ray"):
        raise ConfigError(f"engine {engine!r}: expected local or ray.")
    make: Callable[..., Encoder]
    if engine == "ray":
        from rag_embfilter.distributed import RayEncoder

        make = partial(RayEncoder, num_actors=num_actors)
    elif num_actors is not None:
        raise ConfigError(
            f"num_actors {num_actors}: only --engine ray has actors; name it, or leave this out."
        )
    else:
        from rag_embfilter.encoder import Encoder

        make = Encoder
    return make(
        backbone,
        words,
        pooling,
        max_length,
        device,
        dtype,
        revision=revision,
        query_template=query_template,
    )


def make_filters(
    encoder: Encoder, types: Sequence[str], ratios: Sequence[int], raw: bool, keep: float = DEFAULT_KEEP
) -> tuple[list[EmbFilter], list[FilterSpec]]:
    """The grid of types x ratios, each filter once, raw first when wanted; apart, those to be fitted."""
    specs = filter_specs(["raw", *types] if raw else types, ratios, keep)
    plain = [EmbFilter.from_encoder(encoder, s.filter_type, s.filter_ratio) for s in specs if not s.fitted]
    unique = {embfilter.name: embfilter for embfilter in plain}
    return list(unique.values()), [s for s in specs if s.fitted]


def filter_specs(types: Sequence[str], ratios: Sequence[int], keep: float) -> list[FilterSpec]:
    """The grid of types x ratios, each once; types that keep all dimensions stand in it at ratio 1."""
    from rag_embfilter.fitting import FilterSpec

    for name in types:
        if name not in FILTER_TYPES:
            raise ConfigError(f"filter_type {name!r}: expected one of {', '.join(FILTER_TYPES)}.")
    full = {name for name, recipe in RECIPES.items() if recipe.full_size}
    grid = [FilterSpec(t, r, keep) for t in types for r in ([1] if t in full else ratios)]
    return list(dict.fromkeys(grid))


def check_picture(path: Path | None) -> None:
    """Refuse a picture's name before any work is done for it."""
    if path is not None and path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"picture {str(path)!r}: expected a name that ends in .png, .pdf or .svg.")


def read_questions(path: Path | None) -> list[str] | None:
    """Questions of a file, one a line; empty lines are passed over."""
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text; expected one question a line.") from error
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise ConfigError(f"{str(path)!r} holds no question; expected one a line.")
    return questions


def open_store(
    path: Path,
    url: str | None,
    key: str | None,
    filter_dir: Path | None = None,
    edge: bool = False,
    grpc: bool = False,
    **layout: Any,
) -> Store:
    """The server when one is named, else the folder with the engine that made it."""
    from rag_embfilter.store import Layout, Store

    settings = Layout(**layout)
    if url and edge:
        raise ConfigError("--edge is an engine in this process, --qdrant-url a server; give one of them.")
    if url:
        return Store(url=url, api_key=key, filter_dir=filter_dir, layout=settings, grpc=grpc)
    if settings.shards or settings.replicas:
        raise ConfigError("shards and replicas are a server's; give --qdrant-url, or leave them out.")
    store = Store(path=path, filter_dir=filter_dir, layout=settings, edge=edge or None, grpc=grpc)
    if store.embedded and settings != Layout():
        store.close()
        raise ConfigError(
            "quantization, on-disk, float16 and hnsw-m are a server's or Edge's; give --qdrant-url or "
            "--edge, or leave them out: the embedded store keeps whole vectors in memory."
        )
    return store


def one_filter(types: Sequence[str], ratios: Sequence[int]) -> str:
    """Name of the single filter that a search asks for."""
    if len(types) != 1 or len(ratios) != 1:
        raise ConfigError("a search or an export takes one filter type and one ratio.")
    if types[0] not in FILTER_TYPES:
        raise ConfigError(f"filter_type {types[0]!r}: expected one of {', '.join(FILTER_TYPES)}.")
    return "raw" if types[0] == "raw" or ratios[0] == 1 else f"{types[0]}-r{ratios[0]}"
