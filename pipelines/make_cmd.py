"""`make-eval-set`: a team's own documents as an evaluation set, with a file to review."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import show
from rag_embfilter.errors import ConfigError

if TYPE_CHECKING:
    from rag_embfilter.drafting import Draft
    from rag_embfilter.eval_set import EvalSet, Passage

WORDS = re.compile(r"\w+")


@show.guarded
def make_eval_set(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SOURCE...", help="Folders and files, as `ingest` reads them."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The new set's folder.")] = None,
    review: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A set's review.csv as you edited it: its questions anew from that."
        ),
    ] = None,
    generator: Annotated[
        str | None,
        typer.Option(
            metavar="openai:MODEL[@URL]",
            help="Let a model write the questions and reference answers; key from OPENAI_API_KEY.",
        ),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions to draft.")] = 60,
    chunk_size: Annotated[int, typer.Option(help="Longest passage, about so many tokens.")] = 256,
    seed: Annotated[int, typer.Option(help="Draws the passages that are asked for.")] = 0,
    text_column: Annotated[str, typer.Option(help="Field of .jsonl and .csv with the text.")] = "text",
    title_column: Annotated[str, typer.Option(help="Field with the title, if any.")] = "title",
    encoding: Annotated[str, typer.Option(help="Encoding of text files.")] = "utf-8",
) -> None:
    """Turn documents into an evaluation set: passages, drafted questions, and review.csv for a person.

    With --generator a model writes the questions; without, they are titles and first sentences, taken out
    of their passages: a proxy that ranks filters much as real questions do. Edit review.csv (drop rows,
    reword questions, set grades, add rows for further passages that answer), then give it to --review.
    """
    from rag_embfilter.drafting import apply_review, pseudo_drafts, write_set

    if review is not None:
        if sources or output:
            raise ConfigError("--review takes a set as it is; leave the sources and --output out.")
        _say(apply_review(review), review.parent)
        return
    if not sources or output is None:
        raise ConfigError("give SOURCE... and --output FOLDER, or --review FILE.")
    if (output / "corpus.jsonl").exists():
        raise ConfigError(
            f"{str(output)!r} holds an evaluation set; choose another folder, or --review its file."
        )
    passages = _passages(sources, chunk_size, text_column, title_column, encoding)
    if generator is None:
        corpus, drafts = pseudo_drafts(passages, questions, seed)
    else:
        corpus, drafts = passages, _written(passages, generator, questions, seed)
    _say(write_set(output, corpus, drafts), output)
    review = output / "review.csv"
    show.out.print(
        f"Edit {show.escape(str(review))}, then: python -m pipelines make-eval-set --review "
        f"{show.escape(str(review))}. Then look it over: python -m pipelines check-eval-set "
        f"{show.escape(str(output))}",
        soft_wrap=True,
    )


def _written(passages: dict[str, Passage], generator: str, questions: int, seed: int) -> list[Draft]:
    """Questions that a model writes for passages drawn over the whole corpus, with a bar."""
    from rag_embfilter.drafting import chosen_passages
    from rag_embfilter.files import cache_folder
    from rag_embfilter.judge.endpoint import Asking, EndpointSpec
    from rag_embfilter.judge.questions import written_drafts

    spec = EndpointSpec.parse(generator)
    asked = chosen_passages(passages, questions, seed)
    with show.progress_bar() as progress:
        task = progress.add_task(f"{spec.model} writes", total=len(asked), unit="questions")
        drafts, failures = written_drafts(
            passages, asked, spec, Asking(cache=cache_folder("judge")), lambda n: progress.advance(task, n)
        )
    show.listed("No question", [(reason, f"{n} passages") for reason, n in failures.items()])
    return drafts


def _passages(
    sources: list[Path], chunk_size: int, text_column: str, title_column: str, encoding: str
) -> dict[str, Passage]:
    """The sources' chunks by file and place, cut much as `ingest` would; no tokenizer is loaded."""
    from pipelines.readers import ReadOptions, open_sources
    from rag_embfilter.eval_set import Passage
    from rag_embfilter.nodes import Splitter

    reader = open_sources(sources, ReadOptions(text_column, title_column, None, encoding))
    splitter = Splitter(about_tokens, chunk_size, 0)
    passages: dict[str, Passage] = {}
    for document in reader:
        title = str(document.metadata.get("title") or "").strip()
        for node in splitter.nodes(document):
            key = re.sub(r"\s+", "_", f"{Path(document.id_).name}#{node.metadata['chunk']}")
            while key in passages:  # files of one name in two folders
                key += "'"
            passages[key] = Passage(title, node.text.removeprefix(title).strip() or title)
    show.listed("Not read", reader.failed)
    if not passages:
        raise ConfigError("the sources hold no text.")
    return passages


def about_tokens(text: str) -> int:
    """Tokens of a text by rule of thumb: four for three words, or one for two characters of other scripts."""
    wide = sum(ord(char) > 0x2E7F for char in text)
    return (4 * len(WORDS.findall(text)) + 2) // 3 + wide // 2


def _say(eval_set: EvalSet, folder: Path) -> None:
    show.out.print(
        f"{show.escape(str(folder))}: {len(eval_set.corpus)} passages, {len(eval_set.queries)} questions, "
        f"{sum(map(len, eval_set.qrels.values()))} judgements.",
        soft_wrap=True,
    )
