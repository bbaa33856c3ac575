"""The picture of `cost`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.plot import COLOURS, figure_at, plain_look
from rag_embfilter.store.cost import Cost

MIB = 1 << 20
PANELS: tuple[tuple[str, Callable[[Cost], float]], ...] = (
    ("MiB that a search keeps at hand", lambda cost: cost.searched_bytes / MIB),
    ("ms, median to 95th percentile", lambda cost: cost.p50_ms),
    ("recall@10 against the exact search", lambda cost: cost.recall_at_10),
)


def cost_against_dimensions(rows: Sequence[Cost], title: str, path: Path) -> None:
    """Draw memory, latency and recall against dimensions, one line per quantisation."""
    kinds = list(dict.fromkeys(row.quantization for row in rows))
    sizes = sorted({row.dim for row in rows})
    with figure_at((12.6, 3.9), path) as figure:
        for axis, (label, value) in zip(figure.subplots(1, 3), PANELS, strict=True):
            for kind, colour in zip(kinds, COLOURS, strict=False):
                of_kind = sorted((row for row in rows if row.quantization == kind), key=lambda row: row.dim)
                dims = [row.dim for row in of_kind]
                axis.plot(
                    dims, [value(row) for row in of_kind], color=colour, marker="o", ms=5, lw=1.8, label=kind
                )
                if label.startswith("ms"):
                    low, high = [row.p50_ms for row in of_kind], [row.p95_ms for row in of_kind]
                    axis.fill_between(dims, low, high, color=colour, alpha=0.15, lw=0)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            axis.set_ylim(0, 1.04 if label.startswith("recall") else None)
            axis.set_xlabel("dimensions of a vector")
            axis.set_title(label, loc="left", fontsize=10)
            plain_look(axis)
        figure.axes[0].legend(frameon=False, title="quantisation", alignment="left", fontsize=9)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
