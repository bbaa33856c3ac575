"""`cost`: what a ratio and a quantisation save on the real engine, and what they miss."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from pipelines import options, show
from rag_embfilter.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from rag_embfilter.store import Store
    from rag_embfilter.store.cost import Cost

FloatArray = NDArray[np.float32]
MIB = 1 << 20
FEWEST = 50
RATIOS, QUANTIZATIONS = [1, 2, 4, 8, 16], list(options.QUANTIZATIONS)  # typer copies them


@show.guarded
def cost(
    collection: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Base name: measure its own vectors, NAME-raw, NAME-edge-r2, ..."),
    ] = None,
    points: Annotated[int, typer.Option(min=100, help="Synthetic vectors, without --collection.")] = 20_000,
    hidden_size: Annotated[
        int, typer.Option(min=8, help="Dimensions of synthetic raw vectors; 576 is SmolLM2's.")
    ] = 576,
    filter_ratios: Annotated[list[int], typer.Option(help="Divisors of the hidden size; 1 is raw.")] = RATIOS,
    quantization: Annotated[
        list[str], typer.Option(help="One or more of none, scalar and binary.")
    ] = QUANTIZATIONS,
    queries: Annotated[int, typer.Option(min=10, help="Searches that are timed.")] = 200,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    json_file: options.JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw bytes, latency and recall against dimensions.")
    ] = None,
) -> None:
    """Measure what each ratio and quantisation costs on Qdrant's real engine, in a temporary folder.

    Bytes on disk, time to build, latency of a search, and the share of the true 10 nearest that it finds.
    With --collection the vectors are your own, some held out as queries; nothing of yours is written to.
    """
    from rag_embfilter.store import Layout

    options.check_picture(plot)
    layouts = [Layout(kind) for kind in dict.fromkeys(quantization)]
    if collection is None and (
        bad := [ratio for ratio in filter_ratios if not 1 <= ratio <= hidden_size // 2]
    ):
        raise ConfigError(f"filter_ratio {bad[0]}: expected 1 to {hidden_size // 2}.")
    if collection is None:
        rows = _run(_synthetic(points, hidden_size, filter_ratios, queries), layouts, queries)
        title = f"{points:,} synthetic vectors"
    else:
        with options.open_store(qdrant_path, qdrant_url, qdrant_key, grpc=qdrant_grpc) as store:
            rows = _run(_own(store, collection), layouts, queries)
        title = f"{show.escape(collection)}: {rows[0][1].points:,} vectors, the others held out as queries"
    _print(title, rows)
    if json_file is not None:
        _write(json_file, rows, synthetic=collection is None)
    if plot is not None:
        from pipelines.cost_plot import cost_against_dimensions

        cost_against_dimensions([each for _, each in rows], title, plot)
        show.out.print(f"Picture: {show.escape(str(plot))}", soft_wrap=True)


def _synthetic(
    points: int, hidden: int, ratios: Sequence[int], queries: int
) -> Iterator[tuple[str, FloatArray]]:
    """Unit vectors whose variance falls from direction to direction as that of embeddings does."""
    rng = np.random.default_rng(0)
    for ratio in sorted(dict.fromkeys(ratios)):
        dim = hidden // ratio
        vectors = rng.standard_normal((points + queries, dim), dtype=np.float32)
        vectors *= np.arange(1, dim + 1, dtype=np.float32) ** -0.5
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        yield f"ratio {ratio}", vectors


def _own(store: Store, base: str) -> Iterator[tuple[str, FloatArray]]:
    """The vectors of each collection under a base name, in an order of chance."""
    infos = []
    for name in store.names():
        with suppress(StoreError):  # somebody else's, with other vectors
            info = store.info(name)
            if name.startswith(f"{base}-") and info.made.get("base") == base:
                infos.append(info)
    if not infos:
        store.info(f"{base}-raw")  # says what there is instead
    for info in sorted(infos, key=lambda info: -info.dim):
        if info.points < FEWEST:
            raise ConfigError(
                f"collection {info.name!r} holds {info.points} points; expected {FEWEST} or more to measure."
            )
        vectors = np.concatenate([page.vectors for page in store.pages(info.name)])
        np.random.default_rng(0).shuffle(vectors)
        yield info.name.removeprefix(f"{base}-"), vectors


def _run(
    sets: Iterator[tuple[str, FloatArray]], layouts: Sequence[object], queries: int
) -> list[tuple[str, Cost]]:
    """Each set of vectors in each layout, with a bar."""
    from rag_embfilter.store import Layout
    from rag_embfilter.store.cost import measure

    rows = []
    with show.progress_bar() as progress:
        for label, vectors in sets:
            for layout in layouts:
                assert isinstance(layout, Layout)
                held_out = min(queries, len(vectors) // 5)
                kept = vectors[:-held_out]
                task = progress.add_task(f"{label}, {layout.quantization}", total=len(kept), unit="vectors")
                advance = partial(progress.advance, task)
                with tempfile.TemporaryDirectory(prefix="embfilter-cost-") as folder:
                    found = measure(kept, vectors[-held_out:], layout, Path(folder), advance)
                rows.append((label, found))
    return rows


def _print(title: str, rows: Sequence[tuple[str, Cost]]) -> None:
    columns = [
        "filter",
        "dims",
        "quantised",
        "vectors MiB",
        "quantised MiB",
        "index MiB",
        "build s",
        "p50 ms",
        "p95 ms",
        "recall@10",
        "index",
    ]
    cells = [
        [
            show.escape(label),
            str(each.dim),
            each.quantization,
            *(f"{n / MIB:.1f}" for n in (each.vectors_bytes, each.quantized_bytes, each.index_bytes)),
            f"{each.build_seconds:.1f}",
            f"{each.p50_ms:.2f}",
            f"{each.p95_ms:.2f}",
            f"{each.recall_at_10:.3f}",
            "yes" if each.indexed else "too small",
        ]
        for label, each in rows
    ]
    show.out.print(show.table(title, columns, cells))
    show.out.print(_saved(rows))


def _saved(rows: Sequence[tuple[str, Cost]]) -> str:
    """What a search keeps in memory, by filter and quantisation, as shares of the first row's."""
    first, whole = rows[0]
    shares = ", ".join(
        f"{show.escape(label)}{'' if each.quantization == 'none' else ' ' + each.quantization} "
        f"{each.searched_bytes / whole.searched_bytes:.0%}"
        for label, each in rows[1:]
        if each.quantization == "none" or (each.quantization == "scalar" and each.indexed)
    )
    if not shares:
        return "recall@10 is against the exact search of the same vectors."
    return (
        f"Of the {whole.searched_bytes / MIB:.1f} MiB that searches keep at hand for {show.escape(first)}: "
        f"{shares}. recall@10 is against the exact search of the same vectors: what index and quantisation "
        "miss, not what the filter does (`evaluate` says that)."
    )


def _write(path: Path, rows: Sequence[tuple[str, Cost]], synthetic: bool) -> None:
    from pipelines.results import environment
    from rag_embfilter.files import write_json

    found = [{"filter": label, **vars(each)} for label, each in rows]
    write_json(path, environment() | {"synthetic": synthetic, "cost": found})
