"""`make-eval-set`: a team's own documents as an evaluation set, with a file to review."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import show
from rag_embfilter.errors import ConfigError

if TYPE_CHECKING:
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
    questions: Annotated[int, typer.Option(min=1, help="Questions to draft.")] = 60,
    chunk_size: Annotated[int, typer.Option(help="Longest passage, about so many tokens.")] = 256,
    seed: Annotated[int, typer.Option(help="Draws the passages that are asked for.")] = 0,
    text_column: Annotated[str, typer.Option(help="Field of .jsonl and .csv with the text.")] = "text",
    title_column: Annotated[str, typer.Option(help="Field with the title, if any.")] = "title",
    encoding: Annotated[str, typer.Option(help="Encoding of text files.")] = "utf-8",
) -> None:
    """Turn documents into an evaluation set: passages, drafted questions, and review.csv for a person.

    The questions are titles and first sentences, taken out of their passages: a proxy that ranks filters
    much as real questions do. Edit review.csv (drop rows, reword questions, set grades, add rows for
    further passages that answer), then give it to --review.
    """
    from rag_embfilter.drafting import apply_review

    if review is not None:
        if sources or output:
            raise ConfigError("--review takes a set as it is; leave the sources and --output out.")
        _say(apply_review(review), review.parent)
        return
    if not sources or output is None:
        raise ConfigError("give SOURCE... and --output FOLDER, or --review FILE.")
    passages = _passages(sources, chunk_size, text_column, title_column, encoding)
    _say(_draft(passages, output, questions, seed), output)
    show.out.print(
        f"Questions are titles and first sentences. Edit {show.escape(str(output / 'review.csv'))}, then: "
        f"python -m pipelines make-eval-set --review {show.escape(str(output / 'review.csv'))}",
        soft_wrap=True,
    )


def _draft(passages: dict[str, Passage], output: Path, questions: int, seed: int) -> EvalSet:
    from rag_embfilter.drafting import pseudo_drafts, write_set

    corpus, drafts = pseudo_drafts(passages, questions, seed)
    return write_set(output, corpus, drafts)


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
