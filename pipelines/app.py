"""The command line: one typer app, one module per command."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from pipelines import (
    chat_cmd,
    check_cmd,
    choose_cmd,
    collections_cmd,
    compare_cmd,
    cost_cmd,
    demo_cmd,
    evaluate_cmd,
    export_cmd,
    ingest_cmd,
    lens_cmd,
    make_cmd,
    mteb_cmd,
    refilter_cmd,
    refit_cmd,
    search_cmd,
    verify_cmd,
)
from pipelines.lists import expand_lists
from pipelines.show import set_up_logging

app = typer.Typer(
    name="python -m pipelines",
    help="Use an LLM you already have as a retrieval embedder: ingest, search, chat, evaluate.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo_cmd.demo)
app.command("ingest")(ingest_cmd.ingest)
app.command("search")(search_cmd.search)
app.command("chat")(chat_cmd.chat)
app.command("evaluate")(evaluate_cmd.evaluate)
app.command("choose")(choose_cmd.choose)
app.command("make-eval-set")(make_cmd.make_eval_set)
app.command("check-eval-set")(check_cmd.check_eval_set)
app.command("compare")(compare_cmd.compare)
app.command("mteb")(mteb_cmd.mteb)
app.command("refilter")(refilter_cmd.refilter)
app.command("refit-queries")(refit_cmd.refit_queries)
app.command("verify-endpoint")(verify_cmd.verify_endpoint)
app.command("export")(export_cmd.export)
app.command("cost")(cost_cmd.cost)
app.command("lens")(lens_cmd.lens)
app.command("spectrum")(lens_cmd.spectrum)
app.add_typer(collections_cmd.app, name="collections")


def main(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code; importable, so that tests need no new process."""
    set_up_logging()
    try:
        app(args=expand_lists(argv), prog_name="python -m pipelines")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0
