"""RAGAS with a judge, as `evaluate` offers it: options, dry run, table, result file, exit code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines import show
from rag_embfilter.errors import ConfigError

if TYPE_CHECKING:
    from rag_embfilter.eval_set import EvalSet
    from rag_embfilter.evaluation import Evaluation
    from rag_embfilter.fitting import FilterSpec
    from rag_embfilter.judge import Judged, JudgedMetric, Judgement, Judging

PANEL = "Judge (RAGAS)"
RECOMMENDED = "recommended"
DEFAULT_FILTERS = ("raw", RECOMMENDED)
# Settings that a name carries only when they are not the default ones.
SETTINGS = re.compile(r"-[bkws][\d.]+")

Judge = Annotated[
    str | None,
    typer.Option(
        metavar="openai:MODEL@URL",
        help="Who judges: a model at an OpenAI-compatible address; without @URL OpenAI's own. The key is "
        "read from OPENAI_API_KEY; local servers need none.",
        rich_help_panel=PANEL,
    ),
]
Generator = Annotated[
    str | None,
    typer.Option(
        metavar="openai:MODEL@URL",
        help="Who answers from the passages; by default the judge.",
        rich_help_panel=PANEL,
    ),
]
JudgedMetrics = Annotated[
    list[str] | None,
    typer.Option(
        help="Some of context_precision, context_recall, faithfulness, answer_relevancy and "
        "factual_correctness; by default all that the eval set's reference answers allow.",
        rich_help_panel=PANEL,
    ),
]
JudgeFilters = Annotated[
    list[str],
    typer.Option(
        help="Rows of the table that are judged: names as they stand there, recommended (the best that "
        "beats raw), or all.",
        rich_help_panel=PANEL,
    ),
]
JudgeTopK = Annotated[
    int,
    typer.Option(help="Passages that the generator sees and the judge judges.", rich_help_panel=PANEL),
]
MaxFailed = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Share of a metric's scores that may fail; over it the run ends with exit code 1, all written.",
        rich_help_panel=PANEL,
    ),
]
Concurrency = Annotated[int, typer.Option(help="Requests at a time.", rich_help_panel=PANEL)]
JudgeTimeout = Annotated[float, typer.Option(help="Seconds for one request.", rich_help_panel=PANEL)]
JudgeMaxTokens = Annotated[
    int, typer.Option(help="Longest answer; models that think need more.", rich_help_panel=PANEL)
]
JudgeCache = Annotated[
    bool,
    typer.Option(
        help="Keep answers in the user's cache, so that the same prompt is not paid for twice.",
        rich_help_panel=PANEL,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print calls and tokens, and make none.", rich_help_panel=PANEL),
]


@dataclass
class JudgeRun:
    """What the options ask for, and which metrics failed too often."""

    judging: Judging
    filters: Sequence[str]
    max_failed: float
    over: list[str] = field(default_factory=list)

    def check(self, sets: Sequence[EvalSet], specs: Sequence[FilterSpec], modes: Sequence[str]) -> list[str]:
        """Refuse what cannot be judged before anything is encoded; the table's rows, settings left out."""
        from rag_embfilter import judge

        if why := judge.available():
            raise ConfigError(f"--judge: {why}")
        for spec in dict.fromkeys([self.judging.judge, self.judging.answering]):
            spec.key()
        for eval_set in sets:
            self.judging.names(eval_set)
        rows = table_rows(specs, modes)
        for name in self.filters:
            if name not in ("all", RECOMMENDED) and SETTINGS.sub("", name) not in rows:
                raise ConfigError(
                    f"--judge-filters {name!r}: expected all, {RECOMMENDED}, or one of {', '.join(rows)}."
                )
        return rows

    def dry_run(self, sets: Sequence[EvalSet], rows: Sequence[str]) -> None:
        """Print what judging would ask, set by set."""
        from rag_embfilter.judge import count_calls

        judged = len(rows) if "all" in self.filters else min(len(rows), len(set(self.filters)))
        for eval_set in sets:
            counts = count_calls(eval_set, self.judging, judged)
            lines = [[name, f"{c.calls:,}", f"{c.prompt_tokens:,}"] for name, c in counts.items()]
            calls = sum(count.calls for count in counts.values())
            tokens = sum(count.prompt_tokens for count in counts.values())
            title = f"{eval_set.name}: {len(eval_set.queries)} questions, {judged} of {len(rows)} rows judged"
            total = ["total", f"{calls:,}", f"{tokens:,}"]
            columns = ["", "calls at most", "prompt tokens, about"]
            show.out.print(show.table(show.escape(title), columns, [*lines, total]))
        show.out.print(
            f"Answers come on top, at most {self.judging.asking.max_tokens:,} tokens each. Equal prompts are "
            "asked once, cached ones not at all. Nobody was asked.",
            soft_wrap=True,
        )

    def judge(self, evaluation: Evaluation, page: dict[str, Any]) -> None:
        """Judge the rows asked for, print the table, and add all of it to the set's page of the result."""
        from rag_embfilter.judge import judge_runs, question_embedder

        eval_set = evaluation.eval_set
        runs = {r.name: r.run for r in evaluation.results if r.name in self._names(evaluation)}
        total = len(runs) * len(eval_set.queries)
        with show.progress_bar() as bar:
            task = bar.add_task(f"{eval_set.name}: judging", total=total, unit="questions")
            embed = question_embedder(evaluation.encoder)
            judged = judge_runs(eval_set, runs, self.judging, embed, lambda n: bar.advance(task, n))
        self._print(eval_set, judged)
        self._note_failures(eval_set, judged)
        page["judge"] = self._settings() | {"usage": {who: dict(u) for who, u in judged.usage.items()}}
        for row in page["results"]:
            if row["filter"] in judged.rows:
                _add(row, judged.rows[row["filter"]])

    def finish(self) -> None:
        """Exit code 1 when a metric failed too often; to be called when all is written."""
        if self.over:
            show.err.print(f"[bold red]too many scores failed[/] (over --max-failed {self.max_failed:g}):")
            for line in self.over:
                show.err.print(f"  {show.escape(line)}", soft_wrap=True)
            raise typer.Exit(1)

    def _names(self, evaluation: Evaluation) -> set[str]:
        """Names of the rows to judge."""
        names = [result.name for result in evaluation.results]
        if "all" in self.filters:
            return set(names)
        wanted = {evaluation.best().name if name == RECOMMENDED else name for name in self.filters}
        # A name without settings stands for the row that has some: one run gives all its filters the same.
        return {name for name in names if name in wanted or SETTINGS.sub("", name) in wanted}

    def _print(self, eval_set: EvalSet, judged: Judged) -> None:
        names = self.judging.names(eval_set)
        rows = [[row, *(_cell(j.metrics[name]) for name in names)] for row, j in judged.rows.items()]
        by = str(self.judging.judge)
        if self.judging.answering != self.judging.judge:
            by += f", answers by {self.judging.answering}"
        title = f"RAGAS, judged by {by}, {eval_set.name}, first {self.judging.top_k} passages"
        columns = ["filter", *(name.replace("_", " ") for name in names)]
        show.out.print()
        show.out.print(show.table(show.escape(title), columns, rows))
        for row, judgement in judged.rows.items():
            for name, metric in judgement.metrics.items():
                if metric.failures:
                    show.out.print(f"  [yellow]not scored[/], {show.escape(_why(row, name, metric))}")

    def _note_failures(self, eval_set: EvalSet, judged: Judged) -> None:
        self.over += [
            f"{eval_set.name}, {_why(row, name, metric)}"
            for row, judgement in judged.rows.items()
            for name, metric in judgement.metrics.items()
            if metric.failed_share > self.max_failed
        ]

    def _settings(self) -> dict[str, Any]:
        asking = self.judging.asking
        return {
            "judge": str(self.judging.judge),
            "generator": str(self.judging.answering),
            "top_k": self.judging.top_k,
            "max_failed": self.max_failed,
            "timeout": asking.timeout,
            "max_tokens": asking.max_tokens,
        }


def read(
    judge: str | None,
    generator: str | None,
    metrics: Sequence[str] | None,
    filters: Sequence[str],
    top_k: int,
    max_failed: float,
    concurrency: int,
    timeout: float,
    max_tokens: int,
    cache: bool,
    dry_run: bool,
) -> JudgeRun | None:
    """What the options ask for; None when nothing is to be judged. Raises `ConfigError` without a judge."""
    if judge is None:
        if metrics:
            raise ConfigError(
                f"{metrics[0]} is scored by a judge, and none is configured: name one with --judge "
                "openai:MODEL@URL, or leave --judged-metrics out."
            )
        for name, given in (("--generator", generator is not None), ("--dry-run", dry_run)):
            if given:
                raise ConfigError(f"{name} goes with a judge: name one with --judge openai:MODEL@URL.")
        return None
    from rag_embfilter.files import cache_folder
    from rag_embfilter.judge import Asking, EndpointSpec, Judging

    folder: Path | None = cache_folder("judge") if cache and not dry_run else None
    judging = Judging(
        EndpointSpec.parse(judge),
        None if generator is None else EndpointSpec.parse(generator),
        tuple(dict.fromkeys(metrics)) if metrics else None,
        top_k,
        Asking(concurrency, timeout, max_tokens, folder),
    )
    return JudgeRun(judging, filters, max_failed)


def table_rows(specs: Sequence[FilterSpec], modes: Sequence[str]) -> list[str]:
    """Names of the rows that an evaluation will have, without the settings that a name may carry."""
    names = [s.filter_type if s.filter_type == "raw" else f"{s.filter_type}-r{s.filter_ratio}" for s in specs]
    rows = ["raw"] + (["bm25"] if "bm25" in modes else [])
    for name in names:
        rows += [name] if "dense" in modes else []
        rows += [f"{name}+bm25"] if "hybrid" in modes else []
    return list(dict.fromkeys(rows))


def metric_json(metric: JudgedMetric) -> dict[str, Any]:
    """One metric as a result file holds it."""
    return {
        "mean": metric.mean,
        "scored": len(metric.scores),
        "failed": len(metric.failures),
        "reasons": metric.reasons,
        "scores": dict(metric.scores),
        "failures": dict(metric.failures),
    }


def metrics_json(metrics: Mapping[str, JudgedMetric]) -> dict[str, Any]:
    """Metrics of one row as a result file holds them."""
    return {name: metric_json(metric) for name, metric in metrics.items()}


def _add(row: dict[str, Any], judgement: Judgement) -> None:
    """A row's judged metrics and answers, beside what is there."""
    row["ragas"] |= metrics_json(judgement.metrics)
    row["answers"] = {
        query: {"text": answer.text, "passages": list(answer.passages), "failure": answer.failure}
        for query, answer in judgement.answers.items()
    }


def _cell(metric: JudgedMetric) -> str:
    mean = "-" if metric.mean is None else f"{metric.mean:.2f}"
    return f"{mean} ({len(metric.scores)} of {len(metric.scores) + len(metric.failures)})"


def _why(row: str, name: str, metric: JudgedMetric) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in metric.reasons.items())
    return f"{row}, {name}: {reasons}"
