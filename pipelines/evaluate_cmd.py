"""`evaluate`: does a filter beat raw embeddings on these questions?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines import judge_options, options, show, yardsticks
from rag_embfilter.recipes import DEFAULT_KEEP

if TYPE_CHECKING:
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.eval_set import EvalSet
    from rag_embfilter.evaluation import Evaluation, FilterResult
    from rag_embfilter.filters import EmbFilter
    from rag_embfilter.judge import JudgedMetric
    from rag_embfilter.store import Store
    from rag_embfilter.yardstick import Yardstick, YardstickResult


@show.guarded
def evaluate(
    eval_sets: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVAL_SET...", help="Folders with corpus.jsonl, queries.jsonl, qrels/test.tsv."
        ),
    ],
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["prompteol"],  # noqa: B006 - typer copies it
    query_template: options.QueryTemplate = None,
    pooling: options.Pooling = None,
    max_length: options.MaxLength = 512,
    device: options.Device = None,
    dtype: options.Dtype = None,
    endpoint: options.Endpoint = None,
    endpoint_model: options.EndpointModel = None,
    endpoint_prompts: options.EndpointPrompts = "tokens",
    filter_types: options.FilterTypes = ["edge"],  # noqa: B006 - typer copies it
    filter_ratios: options.FilterRatios = [2, 4, 8],  # noqa: B006
    keep: options.Keep = DEFAULT_KEEP,
    example_questions: options.ExampleQuestions = None,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    filter_dir: options.FilterDir = None,
    modes: Annotated[
        list[str],
        typer.Option(
            "--modes", help="One or more of dense, bm25 and hybrid (dense and BM25, fused by rank)."
        ),
    ] = ["dense"],  # noqa: B006
    bm25: Annotated[
        str, typer.Option(metavar="LANGUAGE", help="Language of the passages, for --modes bm25 hybrid.")
    ] = "english",
    ragas: Annotated[
        bool, typer.Option(help="Add RAGAS's id-based context precision and recall, where it is installed.")
    ] = True,
    judge: judge_options.Judge = None,
    generator: judge_options.Generator = None,
    judged_metrics: judge_options.JudgedMetrics = None,
    judge_filters: judge_options.JudgeFilters = list(judge_options.DEFAULT_FILTERS),  # noqa: B006, B008
    judge_top_k: judge_options.JudgeTopK = 5,
    max_failed: judge_options.MaxFailed = 0.2,
    concurrency: judge_options.Concurrency = 4,
    judge_timeout: judge_options.JudgeTimeout = 60,
    judge_max_tokens: judge_options.JudgeMaxTokens = 1024,
    judge_cache: judge_options.JudgeCache = True,
    dry_run: judge_options.DryRun = False,
    yardstick: yardsticks.Yardsticks = None,
    json_file: options.JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw quality against dimensions as a PNG.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write report.html, a page for those who decide, results.json and quality.png.",
        ),
    ] = None,
) -> None:
    """Compare filters with raw embeddings on evaluation sets.

    Passages go into one Qdrant collection per filter from a single pass of the backbone; only those
    that are not there yet are encoded. Every filter is compared with raw, question by question.
    """
    from rag_embfilter.eval_set import EvalSet
    from rag_embfilter.store import Bm25

    options.check_picture(plot)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    judging = judge_options.read(
        judge, generator, judged_metrics, judge_filters, judge_top_k, max_failed,
        concurrency, judge_timeout, judge_max_tokens, judge_cache, dry_run,
    )  # fmt: skip
    sets = [EvalSet.load(folder) for folder in eval_sets]
    if judging:
        specs = options.filter_specs(["raw", *filter_types], filter_ratios, keep)
        rows = judging.check(sets, specs, modes)
        if dry_run:
            judging.dry_run(sets, rows)
            return
    backbone = options.lent(backbone, unembedding_from)
    encoder = options.make_encoder(
        backbone, revision, template, query_template, pooling, max_length, device, dtype,
        endpoint=endpoint, endpoint_model=endpoint_model, endpoint_prompts=endpoint_prompts,
    )  # fmt: skip
    filters, fitted = options.make_filters(encoder, filter_types, filter_ratios, raw=True, keep=keep)
    questions = options.read_questions(example_questions)
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, filter_dir, grpc=qdrant_grpc) as store:
        run_evaluation(
            sets, encoder, filters, store, ragas, json_file, plot, report, judging,
            trained=yardsticks.load(yardstick, encoder),
            fitted=fitted, questions=questions, modes=modes, bm25=Bm25(bm25),
        )  # fmt: skip
    if judging:
        judging.finish()


def run_evaluation(
    sets: Sequence[EvalSet],
    encoder: Encoder,
    filters: Sequence[EmbFilter],
    store: Store,
    ragas: bool,
    json_file: Path | None,
    plot: Path | None,
    report: Path | None = None,
    judging: judge_options.JudgeRun | None = None,
    trained: Sequence[Yardstick] = (),
    **how: Any,
) -> list[Evaluation]:
    """Evaluate, print a table per set, and write the files asked for; `how` is `evaluation.evaluate`'s."""
    from pipelines.results import evaluation_json, provenance
    from rag_embfilter import judge
    from rag_embfilter.evaluation import evaluate as evaluate_set
    from rag_embfilter.files import write_json

    if ragas and (why := judge.available()):
        show.err.print(f"[yellow]RAGAS metrics left out:[/] {show.escape(why)}", soft_wrap=True)
        ragas = False
    evaluations, pages = [], []
    for eval_set in sets:
        with _progress(eval_set) as progress:
            evaluation = evaluate_set(eval_set, encoder, filters, store, progress=progress, **how)
        yardsticks.measure(evaluation, trained)
        judged = {
            result.name: judge.unjudged_metrics(eval_set, result.run) if ragas else {}
            for result in evaluation.results
        }
        print_evaluation(evaluation, judged)
        evaluations.append(evaluation)
        pages.append(evaluation_json(evaluation, judged))
        if judging:
            judging.judge(evaluation, pages[-1])
    origin = provenance(encoder)
    if report is not None:
        from pipelines.report import write_report

        write_report(report / "report.html", evaluations, origin)
        show.out.print(f"Report: {show.escape(str(report / 'report.html'))}", soft_wrap=True)
    for file in (json_file, report and report / "results.json"):
        if file is not None:
            write_json(file, origin | {"sets": pages})
            show.out.print(f"JSON: {show.escape(str(file))}", soft_wrap=True)
    for picture in (plot, report and report / "quality.png"):
        if picture is not None:
            from pipelines.plot import quality_against_dimensions

            quality_against_dimensions(evaluations, picture)
            show.out.print(f"Picture: {show.escape(str(picture))}", soft_wrap=True)
    return evaluations


@contextmanager
def _progress(eval_set: EvalSet) -> Iterator[Callable[[str, int], None]]:
    """Bars of passages and questions, and what moves them."""
    with show.progress_bar() as progress:
        tasks = {
            what: progress.add_task(f"{eval_set.name}: {what}", total=total, unit=what)
            for what, total in (("passages", len(eval_set.corpus)), ("questions", len(eval_set.queries)))
        }
        yield lambda what, n: progress.advance(tasks[what], n)


def print_evaluation(evaluation: Evaluation, judged: Mapping[str, Mapping[str, JudgedMetric]]) -> None:
    """The table of one set, and one sentence on what it says."""
    eval_set, report = evaluation.eval_set, evaluation.ingested
    head = [
        "filter",
        "dims",
        "nDCG@10",
        "vs raw [95% interval]",
        "p",
        "W/T/L",
        "R@10",
        "R@100",
        "MRR@10",
        "MAP@100",
    ]
    ragas = any(judged.values())
    if ragas:
        head += ["RAGAS P", "RAGAS R"]
    rows = [_row(result, judged.get(result.name, {}) if ragas else {}) for result in evaluation.rows]
    title = (
        f"{eval_set.name}: {len(eval_set.queries)} questions, {len(eval_set.corpus)} passages "
        f"({report.encoded} encoded), {evaluation.encoder.backbone.name}"
    )
    show.out.print()
    show.out.print(show.table(show.escape(title), head, rows))
    show.out.print(sentence(evaluation))


def _row(result: FilterResult | YardstickResult, judged: Mapping[str, JudgedMetric]) -> list[str]:
    from rag_embfilter.judge import ID_METRICS

    means = result.metrics.means()
    versus = result.versus_raw
    cells = [show.escape(result.name), str(result.dim or "-"), f"{100 * means['ndcg_at_10']:.1f}"]
    if versus is None:
        cells += ["", "", ""]
    else:
        colour = {"better": "green", "worse": "red"}.get(versus.verdict, "dim")
        interval = f"{100 * versus.difference:+.1f} [{100 * versus.low:+.1f}, {100 * versus.high:+.1f}]"
        cells += [
            f"[{colour}]{show.escape(interval)}[/]",
            f"{versus.p_value:.4f}",
            f"{versus.wins}/{versus.ties}/{versus.losses}",
        ]
    cells += [f"{100 * means[m]:.1f}" for m in ("recall_at_10", "recall_at_100", "mrr_at_10", "map_at_100")]
    for metric in (judged[name] for name in ID_METRICS if name in judged):
        failed = f" ({len(metric.failures)} failed)" if metric.failures else ""
        cells.append("-" if metric.mean is None else f"{100 * metric.mean:.1f}{failed}")
    return cells


def sentence(evaluation: Evaluation) -> str:
    """What an evaluation says, in one sentence of rich markup, and one for each yardstick that is better."""
    return " ".join([_verdict(evaluation), *yardsticks.sentences(evaluation)])


def _verdict(evaluation: Evaluation) -> str:
    best, raw = evaluation.best(), evaluation.results[0]
    verdicts = [r.versus_raw.verdict for r in evaluation.results if r.versus_raw]
    if "too few queries" in verdicts:
        return (
            f"[yellow]Too few questions ({len(evaluation.eval_set.queries)}) to tell; collect at least 20.[/]"
        )
    if best is raw or best.versus_raw is None:
        return _nothing_better(evaluation)
    versus = best.versus_raw
    return (
        f"[green]{best.name}[/]{_size(best)} beats raw "
        f"({raw.dim}) by {100 * versus.difference:.1f} points of nDCG@10 on {versus.n} questions "
        f"(95% interval {100 * versus.low:.1f} to {100 * versus.high:.1f}).{_against_words(evaluation)}"
    )


def _size(result: FilterResult) -> str:
    return f" ({result.dim} dimensions)" if result.dim else ", words alone,"


def _against_words(evaluation: Evaluation) -> str:
    """Whether vectors add to BM25, where both were tried: the best row that has them against BM25 alone."""
    from rag_embfilter.metrics import compare

    words = next((r for r in evaluation.results if r.mode == "bm25"), None)
    others = [r for r in evaluation.results if r.mode in ("dense", "hybrid")]
    if words is None:
        return ""
    best = max(others, key=lambda r: r.metrics.mean())
    versus = compare(best.metrics.per_query["ndcg_at_10"], words.metrics.per_query["ndcg_at_10"])
    said = {"better": "beats", "worse": "loses to"}.get(versus.verdict, "is not shown to differ from")
    interval = show.escape(f"[{100 * versus.low:+.1f}, {100 * versus.high:+.1f}]")
    return f" {best.name} {said} BM25 alone: {100 * versus.difference:+.1f} {interval}."


def _nothing_better(evaluation: Evaluation) -> str:
    """What to say when no filter beats raw: the smallest that is not shown to lose is worth a thought."""
    said = "[yellow]No filter is shown to beat raw here: keep raw"
    even = [r for r in evaluation.results if r.versus_raw and r.versus_raw.verdict == "no evidence"]
    if not even:
        return f"{said}.[/]"
    smallest = min(even, key=lambda r: r.dim)
    versus = smallest.versus_raw
    assert versus is not None
    interval = show.escape(f"[{100 * versus.low:+.1f}, {100 * versus.high:+.1f}]")
    return (
        f"{said}[/]. If size matters: {smallest.name} ({smallest.dim} dimensions) is not "
        f"shown to lose either, {100 * versus.difference:+.1f} {interval}; more questions would tell."
    )
