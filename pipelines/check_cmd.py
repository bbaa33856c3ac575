"""`check-eval-set`: can an evaluation set be trusted?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines import options, show

SHOWN = 8


@show.guarded
def check_eval_set(
    eval_sets: Annotated[list[Path], typer.Argument(metavar="EVAL_SET...", help="Folders in BEIR layout.")],
    bm25: Annotated[
        str, typer.Option(metavar="LANGUAGE", help="The sets' language: english, ..., or multilingual.")
    ] = "english",
    json_file: options.JsonFile = None,
) -> None:
    """Look evaluation sets over: duplicates, questions that copy, lengths, what BM25 reaches.

    The exit code is 1 when a set has something to mend.
    """
    from rag_embfilter.eval_set import EvalSet
    from rag_embfilter.files import write_json
    from rag_embfilter.set_check import check_set
    from rag_embfilter.store import Bm25

    sets = [EvalSet.load(folder) for folder in eval_sets]
    reports = {eval_set.name: check_set(eval_set, Bm25(bm25)) for eval_set in sets}
    rows = [
        [
            show.escape(name),
            str(report.passages),
            str(report.questions),
            " ".join(f"{grade}:{n}" for grade, n in sorted(report.grades.items(), reverse=True)),
            str(report.answered),
            "{} ({} to {})".format(*report.words),
            str(report.near),
            f"{report.overlap:.0%}",
            f"{100 * report.bm25:.1f}",
        ]
        for name, report in reports.items()
    ]
    columns = ["set", "passages", "questions", "grades", "answers", "words", "near pairs", "overlap", "BM25"]
    show.out.print(show.table("Evaluation sets", columns, rows))
    for name, report in reports.items():
        for kind, found in report.problems.items():
            listed = ", ".join(found[:SHOWN]) + (
                f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            )
            said = f"{name}: {kind}" + (f": {listed}" if found else "")
            show.out.print(f"[yellow]{show.escape(said)}[/]", soft_wrap=True)
    if json_file is not None:
        write_json(json_file, {name: vars(report) for name, report in reports.items()})
    if any(report.problems for report in reports.values()):
        raise typer.Exit(1)
