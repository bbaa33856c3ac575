"""What a person sees: consoles, tables, progress bars, and errors of one clear line."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console, Group
from rich.logging import RichHandler
from rich.markup import escape as escape_markup
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rag_embfilter.errors import EmbFilterError

__all__ = ["clean", "err", "escape", "guarded", "listed", "out", "progress_bar", "set_up_logging", "table"]

P = ParamSpec("P")
R = TypeVar("R")

out = Console(width=None if sys.stdout.isatty() else 120, highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


def clean(text: str) -> str:
    """Text from outside without control characters, which could drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def escape(text: str) -> str:
    """Text from outside as it may stand in markup."""
    return escape_markup(clean(text))


def set_up_logging() -> None:
    """Warnings of the library and of its dependencies, one line each, on stderr."""
    handler = RichHandler(console=err, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for noisy in ("pypdf", "httpx", "ir_measures"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose expected failures end in one clear message and a non-zero exit."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except EmbFilterError as error:
            err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error
        except OSError as error:
            err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            err.print("[yellow]stopped[/]; what was written stays, and the same command goes on from there.")
            raise typer.Exit(130) from error

    return run


class _Rate(ProgressColumn):
    """Nodes or texts done, and how many a second."""

    def render(self, task: Task) -> Text:
        done = int(task.fields.get("done", task.completed))
        elapsed = task.finished_time if task.finished_time is not None else task.elapsed
        rate = done / elapsed if elapsed else 0.0
        return Text(f"{done:,} {task.fields['unit']}, {rate:,.1f}/s", style="dim")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar with the share done, the rate and the time to the end, on stderr; gone when it is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    header: bool = True,
    wrap: bool = False,
) -> Group:
    """A title over a table whose first `left` columns are words and whose others are figures."""
    shown = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=header)
    for i, column in enumerate(columns):
        shown.add_column(column, justify="left" if i < left else "right", no_wrap=i < left and not wrap)
    for row in rows:
        shown.add_row(*row)
    return Group(f"[bold]{title}[/]", shown)


def listed(heading: str, cases: Sequence[tuple[str, str]], limit: int = 20) -> None:
    """(What, why) pairs under a heading, the first ones whole and the rest counted."""
    if not cases:
        return
    err.print(f"[yellow]{heading} ({len(cases)}):[/]")
    for what, why in cases[:limit]:
        err.print(f"  {escape(what)}: {escape(why)}", soft_wrap=True)
    if len(cases) > limit:
        err.print(f"  ... and {len(cases) - limit} more (--json lists all)")
