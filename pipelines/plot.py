"""Pictures of results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.evaluation import Evaluation, FilterResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rag_embfilter.lens import Reading

INK, GRID, RAW = "#1f2933", "#e4e7eb", "#9aa5b1"
# For tokens and titles in other scripts, where one is installed.
WIDE_FONTS = ("Noto Sans CJK KR", "Noto Sans CJK JP", "Nanum Gothic", "WenQuanYi Zen Hei", "Arial Unicode MS")
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c")


def quality_against_dimensions(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Draw nDCG@10 against dimensions, one panel per set, with 95% intervals and raw as the reference."""
    columns = min(3, len(evaluations))
    rows = -(-len(evaluations) // 3)
    size = (5.6 * columns if len(evaluations) > 1 else 7.2, 4.2 * rows)
    with figure_at(size, path) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(evaluations) :]:
            axis.remove()
        for axis, evaluation in zip(axes.flat, evaluations, strict=False):
            quality_panel(axis, evaluation)


def as_svg(panel: Callable[..., None], *what: Any) -> str:
    """One panel as SVG for a page, whose own colours (`--ink`, `--grid`, ...) it takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "panel.svg"
        with figure_at((7.2, 4.2), path) as figure:
            panel(figure.subplots(), *what)
        drawn = path.read_text("utf-8")
    drawn = drawn[drawn.index("<svg") :]
    for colour, name in ((INK, "ink"), ("#52606d", "dim"), (GRID, "grid"), ("#ffffff", "paper")):
        drawn = drawn.replace(colour, f"var(--{name})")
    for number, colour in enumerate(COLOURS):
        drawn = drawn.replace(colour, f"var(--line{number})")
    return drawn


def pareto_panel(axis: Axes, results: Sequence[FilterResult], front: Sequence[str]) -> None:
    """Draw nDCG@10 against bytes of a vector, and the front that no smaller row beats."""
    rows = [result for result in results if result.dim]
    for result in rows:
        on_front = result.name in front
        place = (4 * result.dim, 100 * result.metrics.mean())
        axis.plot(*place, marker="D" if on_front else "o", ms=6, color=COLOURS[0] if on_front else RAW, ls="")
        if on_front:
            axis.annotate(result.name, place, xytext=(6, 5), textcoords="offset points", fontsize=9)
    best = sorted((r for r in rows if r.name in front), key=lambda r: r.dim)
    axis.step(
        [4 * r.dim for r in best],
        [100 * r.metrics.mean() for r in best],
        where="post",
        color=COLOURS[0],
        lw=1.4,
    )
    sizes = sorted({4 * result.dim for result in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.margins(x=0.12, y=0.15)
    axis.set(xlabel="bytes of a passage's vector (float32)", ylabel="nDCG@10")
    axis.set_title("What a byte buys: the front", loc="left", fontweight="bold", fontsize=11)
    plain_look(axis)


@contextmanager
def figure_at(size: tuple[float, float], path: Path) -> Iterator[Figure]:
    """A figure that is written to `path` when the block ends."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    style: dict[Any, Any] = {
        "font.family": ["DejaVu Sans", *(font for font in WIDE_FONTS if font in installed)],
        "font.size": 10,
        "axes.edgecolor": GRID,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        # Text stays text, and the same results give the same file.
        "svg.fonttype": "none",
        "svg.hashsalt": "rag-embfilter",
    }
    with mpl.rc_context(style):
        figure = plt.figure(figsize=size, layout="constrained")
        try:
            yield figure
            path.parent.mkdir(parents=True, exist_ok=True)
            svg = path.suffix == ".svg"
            metadata = {"Date": None} if svg else {"Software": None} if path.suffix == ".png" else None
            figure.savefig(path, dpi=150, metadata=metadata, transparent=svg)
        finally:
            plt.close(figure)


def plain_look(axis: Axes) -> None:
    """A light grid and no frame."""
    axis.grid(axis="y", color=GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0)


def quality_panel(axis: Axes, evaluation: Evaluation) -> None:
    """Draw one set's nDCG@10 against dimensions."""
    raw, *others = evaluation.results
    mean = 100 * raw.metrics.mean()
    axis.axhline(mean, color=RAW, ls="--", lw=1.2)
    axis.plot(raw.dim, mean, marker="D", ms=6, color=RAW, ls="")
    axis.annotate(
        f"raw, {raw.dim} dimensions: {mean:.1f}",
        (0.985, mean),
        xycoords=("axes fraction", "data"),
        va="bottom",
        ha="right",
        xytext=(0, 4),
        textcoords="offset points",
        color="#52606d",
        fontsize=9,
    )
    for level in (100 * result.metrics.mean() for result in others if result.mode == "bm25"):
        axis.axhline(level, color=RAW, ls=":", lw=1.6, label=f"BM25 alone: {level:.1f}")
    _stars(axis, evaluation)
    others = [result for result in others if result.dim]
    kinds = list(_by_type(others).items())
    for place, ((kind, results), colour) in enumerate(zip(kinds, COLOURS * 3, strict=False)):
        # Types of one size stand beside each other, not on top of each other.
        _line(axis, kind, results, colour, mean, 1 + 0.035 * (place - (len(kinds) - 1) / 2))
    sizes = sorted({r.dim for r in evaluation.rows if r.dim})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.margins(x=0.09, y=0.12)
    axis.set(xlabel="dimensions of a vector", ylabel="nDCG@10 (bars: 95% of the difference from raw)")
    axis.set_title(
        f"{evaluation.eval_set.name}: {len(evaluation.eval_set.queries)} questions, "
        f"{evaluation.encoder.backbone.name}",
        loc="left",
        fontweight="bold",
        fontsize=11,
    )
    plain_look(axis)
    if others or evaluation.yardsticks:
        axis.legend(frameon=False, loc="best", fontsize=9)


def _stars(axis: Axes, evaluation: Evaluation) -> None:
    """Yardsticks, each a star at its size."""
    for each in evaluation.yardsticks:
        level = 100 * each.metrics.mean()
        axis.plot(each.dim, level, marker="*", ms=11, color=INK, ls="", label=f"{each.name}: {level:.1f}")


def _line(
    axis: Axes, kind: str, results: Sequence[FilterResult], colour: str, raw: float, shift: float
) -> None:
    """One type's means with the paired interval of their difference from raw, set on raw's mean."""
    sizes = [result.dim * shift for result in results]
    means = [100 * result.metrics.mean() for result in results]
    paired = [result.versus_raw for result in results]
    low = [max(0.0, m - raw - 100 * p.low) if p else 0.0 for m, p in zip(means, paired, strict=True)]
    high = [max(0.0, raw + 100 * p.high - m) if p else 0.0 for m, p in zip(means, paired, strict=True)]
    axis.errorbar(
        sizes, means, yerr=[low, high], color=colour, marker="o", ms=6, lw=1.8, capsize=3, label=kind
    )
    for size, mean in zip(sizes, means, strict=True):
        axis.annotate(
            f"{mean:.1f}",
            (size, mean),
            xytext=(8, -12),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
        )


def _by_type(results: Sequence[FilterResult]) -> Mapping[str, list[FilterResult]]:
    grouped: dict[str, list[FilterResult]] = {}
    for result in sorted(results, key=lambda r: r.dim):
        fused = "+bm25" if result.mode == "hybrid" else ""
        grouped.setdefault(result.embfilter.filter_type + fused, []).append(result)
    return grouped


def spectrum_curves(curves: Mapping[str, NDArray[np.float64]], title: str, path: Path) -> None:
    """Draw the spectroscopy response of each direction, one smoothed curve per group of tokens."""
    with figure_at((7.6, 4.2), path) as figure:
        axis = figure.subplots()
        for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
            width = max(1, len(curve) // 96)
            smooth = np.convolve(
                np.pad(curve, width, mode="edge"), np.ones(2 * width + 1) / (2 * width + 1), "valid"
            )
            axis.plot(curve, color=colour, alpha=0.18, lw=0.8)
            axis.plot(smooth, color=colour, lw=1.8, label=f"{name} tokens")
        axis.set(xlabel="direction, largest singular value first", ylabel="response of the logits")
        axis.set_yscale("log")
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.legend(frameon=False, fontsize=9)
        plain_look(axis)


def lens_panels(
    texts: Sequence[str],
    readings: Mapping[str, Sequence[Reading]],
    shares: Mapping[str, float],
    frequent: set[int],
    title: str,
    path: Path,
) -> None:
    """Draw each text's strongest tokens, a panel per filter, and the share of frequent tokens over all."""
    top = max((len(each.tokens) for found in readings.values() for each in found), default=0)
    heights = [0.24 * top + 1.0] * len(texts) + [0.3 * len(shares) + 0.7]
    with figure_at((max(7.6, 2.6 * len(readings)), sum(heights)), path) as figure:
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        heading: dict[str, Any] = {"x": 0.01, "ha": "left", "fontweight": "bold", "fontsize": 11}
        for row, text in enumerate(texts):
            parts[row].suptitle(_plain(text if len(text) < 90 else f"{text[:87]}..."), **heading)
            axes = parts[row].subplots(1, len(readings), squeeze=False)[0]
            for axis, (name, found) in zip(axes, readings.items(), strict=True):
                _tokens(axis, found[row], frequent, name)
        parts[-1].suptitle(_plain(f"Share of frequent tokens (orange): {title}"), **heading)
        _shares(parts[-1].subplots(), shares)


def _tokens(axis: Axes, reading: Reading, frequent: set[int], name: str) -> None:
    """Bars of an embedding's strongest tokens; frequent ones in another colour."""
    colours = [COLOURS[1] if token in frequent else COLOURS[0] for token in reading.ids]
    places = range(len(reading.tokens), 0, -1)
    # Logits may be negative, and all alike: bars start a little below the weakest of them.
    start = min(0.0, min(reading.logits) - 0.2 * (max(reading.logits) - min(reading.logits)) - 1e-6)
    axis.barh(places, [logit - start for logit in reading.logits], color=colours, height=0.72)
    axis.set_yticks(places, [_plain(repr(token)) for token in reading.tokens], fontsize=9)
    axis.set_xticks([])
    axis.set_title(_plain(name), loc="left", fontsize=10, color="#52606d")
    axis.set_xlim(left=0)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def _shares(axis: Axes, shares: Mapping[str, float]) -> None:
    places = range(len(shares), 0, -1)
    percent = [100 * share for share in shares.values()]
    bars = axis.barh(places, percent, color=COLOURS[1], height=0.6)
    axis.bar_label(bars, [f"{value:.0f}%" for value in percent], padding=4, color=INK, fontsize=9)
    axis.set_yticks(places, list(shares))
    axis.set_xlim(0, max(*percent, 10) * 1.15)
    axis.set_xticks([])
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def _plain(text: str) -> str:
    """Text as it is: a dollar sign starts no formula."""
    return text.replace("$", r"\$")
