"""`choose`: which templates, filter and ratio a domain should ship."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show
from rag_embfilter.config import Config
from rag_embfilter.errors import ConfigError
from rag_embfilter.recipes import DEFAULT_KEEP

if TYPE_CHECKING:
    from rag_embfilter.choose import Candidate, Choice, Grid
    from rag_embfilter.eval_set import EvalSet

EXAMPLES = 100  # questions that a configuration carries at most


@show.guarded
def choose(
    sets: Annotated[
        list[Path],
        typer.Argument(metavar="EVAL_SET...", help="Eval sets; with --pseudo also .jsonl files of passages."),
    ],
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["prompteol", "search"],  # noqa: B006 - typer copies it
    pooling: Annotated[
        list[str],
        typer.Option(help="Poolings to try for single templates besides their own; they cost no pass."),
    ] = ["last+mean"],  # noqa: B006
    max_length: options.MaxLength = 512,
    device: options.Device = None,
    dtype: options.Dtype = None,
    filter_types: options.FilterTypes = ["edge", "tail", "calibrated"],  # noqa: B006
    filter_ratios: options.FilterRatios = [2, 4, 8, 16],  # noqa: B006
    keep: options.Keep = DEFAULT_KEEP,
    example_questions: options.ExampleQuestions = None,
    pseudo: Annotated[
        bool, typer.Option(help="No labels: titles, or first sentences, ask for the rest of their passage.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the choice, for `ingest` and EmbFilterEmbedding."),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Try templates, alone and in pairs, with poolings, filters and ratios; recommend the cheapest good one.

    Costs one pass of the backbone per template. The recommendation is the smallest vector within a
    quarter of a point of the best, or raw when nothing is better beyond noise. What it gains is reported on
    questions that did not choose: each half picks, the other half reports.
    """
    from rag_embfilter import choose as choosing
    from rag_embfilter.backbone import load_backbone
    from rag_embfilter.eval_set import EvalSet
    from rag_embfilter.files import write_json
    from rag_embfilter.fitting import sample

    loaded = [_pseudo(path) if pseudo else EvalSet.load(path) for path in sets]
    specs = options.filter_specs(filter_types, filter_ratios, keep)
    questions = options.read_questions(example_questions)
    backbone = options.lent(backbone, unembedding_from)
    model = load_backbone(backbone, revision, device, dtype)
    template = list(dict.fromkeys(template))
    groups = [[each] for each in template] + [list(pair) for pair in combinations(template, 2)]
    texts = sum(len(s.corpus) + len(s.queries) for s in loaded) + len(questions or [])
    with show.progress_bar() as progress:
        task = progress.add_task("encoding", total=texts, unit="texts")
        grid = choosing.Grid(
            model, loaded, groups, specs, pooling, questions, max_length, lambda n: progress.advance(task, n)
        )
        progress.update(task, description="encoded; scoring")
        choice = choosing.choose(grid.candidates())
    _print(choice, loaded, pseudo)
    if questions is None and not pseudo:
        questions = sample([q for each in loaded for q in each.queries.values()], EXAMPLES)
    settings = _config(choice.chosen, grid, questions or [])
    if config is not None:
        settings = _write(config, settings, grid, choice.chosen)
    if json_file is not None:
        write_json(json_file, _json(choice, settings, loaded, pseudo))


def _pseudo(path: Path) -> EvalSet:
    """Pseudo-questions for the passages of an eval set's folder, or of a file in its layout."""
    from rag_embfilter.choose import pseudo_set
    from rag_embfilter.eval_set import load_corpus

    file = path / "corpus.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{str(file)!r} is not there; expected a .jsonl file with _id, title and text.")
    return pseudo_set(path.resolve().stem, load_corpus(file))


def _config(chosen: Candidate, grid: Grid, questions: list[str]) -> Config:
    """The choice as a configuration that holds anywhere; a calibrated one carries example questions."""
    spec, encoder = chosen.spec, grid.encoder(chosen.words).settings
    return Config(
        model_name=encoder["backbone"],
        template=encoder["template"],
        filter_type=spec.filter_type,
        filter_ratio=spec.filter_ratio,
        max_length=encoder["max_length"],
        revision=encoder["revision"],
        pooling=chosen.words.pooling,
        keep=spec.keep,
        example_questions=tuple(questions) if spec.filter_type == "calibrated" else (),
    )


def _write(path: Path, settings: Config, grid: Grid, chosen: Candidate) -> Config:
    """Write a configuration, and beside it the filter when it is a fitted one."""
    embfilter = grid.fit(chosen)
    made = grid.encoder(chosen.words).fingerprint | embfilter.fingerprint
    settings = replace(settings, fingerprint=made.digest)
    if chosen.spec.fitted:
        file = path.with_name(f"{path.name}.safetensors")
        embfilter.save(file)
        settings = replace(settings, filter_file=str(file))
    settings.write(path)
    beside = f", with the fit in {path.name}.safetensors" if chosen.spec.fitted else ""
    asked = f" and {len(settings.example_questions)} questions in it" if settings.example_questions else ""
    show.out.print(show.escape(f"Config: {path}{beside}{asked}."), soft_wrap=True)
    show.out.print(
        "`ingest --config` ships it (and fits on what it ingests); or EmbFilterEmbedding.from_config."
    )
    return settings


def _print(choice: Choice, sets: list[EvalSet], pseudo: bool) -> None:
    top = list(choice.candidates[:10])
    for needed in (choice.chosen, choice.raw):
        if needed not in top:
            top.append(needed)
    rows = [
        [
            f"[green]{show.escape(c.name)} *[/]" if c is choice.chosen else show.escape(c.name),
            str(c.dim),
            str(len(c.words.templates)),
            f"{100 * c.mean():.1f}",
        ]
        for c in top
    ]
    n = len(choice.chosen.scores)
    count = len(choice.candidates)
    title = (
        f"{', '.join(s.name for s in sets)}: {n} questions; the best 10 of {count} configurations, and raw"
    )
    show.out.print(show.table(show.escape(title), ["configuration", "dims", "passes", "nDCG@10"], rows))
    held = choice.held_out
    interval = show.escape(f"[{100 * held.low:+.1f}, {100 * held.high:+.1f}]")
    show.out.print(
        f"On questions that did not choose: {100 * choice.held_out_mean:.1f}, {100 * held.difference:+.1f} "
        f"{interval} against raw; the best of the grid there has {100 * choice.held_out_best:.1f}."
    )
    if choice.too_few:
        show.out.print(f"[yellow]Too few questions ({n}) to conclude anything; collect at least 40.[/]")
    if pseudo:
        show.out.print("[yellow]These are pseudo-questions, a proxy: real ones may choose otherwise.[/]")
    name = show.escape(choice.chosen.name)
    nothing = choice.chosen is choice.raw
    near = "the smallest within a quarter of a point of the best"
    better = "no filter is better beyond noise" if nothing else near
    show.out.print(f"Recommended: [green]{name}[/] ({choice.chosen.dim} dimensions): {better}.")


def _json(choice: Choice, settings: Config, sets: list[EvalSet], pseudo: bool) -> dict[str, object]:
    from pipelines.results import environment

    return environment() | {
        "sets": [{"eval_set": s.name, "digest": s.digest, "queries": len(s.queries)} for s in sets],
        "pseudo_questions": pseudo,
        "too_few_questions": choice.too_few,
        "chosen": choice.chosen.name,
        "config": vars(settings),
        "held_out": vars(choice.held_out),
        "held_out_mean": choice.held_out_mean,
        "held_out_best": choice.held_out_best,
        "candidates": [_candidate(c) for c in choice.candidates],
    }


def _candidate(candidate: Candidate) -> dict[str, object]:
    return {
        "name": candidate.name,
        "dim": candidate.dim,
        "passes": len(candidate.words.templates),
        "ndcg_at_10": candidate.mean(),
        "per_query": dict(candidate.scores),
    }
