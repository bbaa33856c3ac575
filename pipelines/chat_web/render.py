"""What the browser shows, as HTML that escapes everything that comes from outside. No Markdown is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipelines.show import clean
from rag_embfilter.chat import Answer, Passage

if TYPE_CHECKING:
    from pipelines.chat_web.uploads import Added
    from rag_embfilter.chat.side_by_side import Comparison
    from rag_embfilter.store import CollectionInfo, Hit


@dataclass
class Turn:
    """A question and what has become of it.

    Attributes:
        number: from 1, within its conversation.
        writing: text as it comes, not yet checked.
        waiting: whether nothing has come yet.
        trouble: what went wrong, for the reader.
    """

    number: int
    question: str
    answer: Answer | None = None
    writing: str = ""
    waiting: bool = True
    trouble: str = ""
    extra: dict[str, str] = field(default_factory=dict)


def place(hit: Hit) -> str:
    """A passage's file with its page, line or record; folders are nobody's business."""
    source = str(hit.node.metadata.get("source", ""))
    name = PurePosixPath(source).name or source
    return clean(hit.place.replace(source, name, 1))


def pieces(
    text: str, marks: Sequence[tuple[int, int]], start: int = 0, end: int | None = None
) -> list[tuple[str, bool]]:
    """A text from `start` to `end`, cut at its marks, as (part, marked)."""
    parts, done = [], start
    end = len(text) if end is None else end
    for first, last in marks:
        first, last = max(first, start), min(last, end)
        if first < last:
            parts += [(text[done:first], False), (text[first:last], True)]
            done = last
    return [part for part in [*parts, (text[done:end], False)] if part[0]]


def title_end(hit: Hit) -> int:
    """Where the title that stands before a passage's text ends; 0 without one."""
    title = str(hit.node.metadata.get("title") or "").strip()
    return len(title) if title and hit.text.startswith(f"{title} ") else 0


def sources(answer: Answer) -> list[Passage]:
    """The passages an answer cites; where there is none, all that were found."""
    return [p for p in answer.passages if not answer.known or p.number in answer.cited]


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(PurePosixPath(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["printed"] = clean
    made.globals |= {"place": place, "pieces": pieces, "sources": sources, "title_end": title_end}
    return made


_TEMPLATES = _environment()


def conversation(turns: Sequence[Turn], welcome: str, examples: Sequence[str] = ()) -> str:
    """All turns of a conversation; a welcome while there is none."""
    return _TEMPLATES.get_template("talk.html.j2").render(turns=turns, welcome=welcome, examples=examples)


def heading(info: CollectionInfo, llm: str, mode: str) -> str:
    """The page's head: which collection, how many passages, who answers."""
    return _TEMPLATES.get_template("head.html.j2").render(info=info, llm=llm, mode=mode)


def comparison(found: Comparison | None, left: str, right: str, trouble: str = "") -> str:
    """Two collections' passages for a question, side by side."""
    return _TEMPLATES.get_template("compare.html.j2").render(
        found=found, left=left, right=right, trouble=trouble
    )


def added(files: Sequence[Added], doing: str = "", share: float = 0.0) -> str:
    """What became of the files that were given, and of the one at work."""
    return _TEMPLATES.get_template("added.html.j2").render(files=files, doing=doing, share=share)
