"""The chat in a terminal: streaming answers, numbered sources."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from pipelines import show
from pipelines.search_cmd import shown_place
from rag_embfilter.chat import Answer, Chat, Passage
from rag_embfilter.chat.prompts import DONT_KNOW
from rag_embfilter.chat.side_by_side import Comparison, Side, side_by_side
from rag_embfilter.errors import EmbFilterError

if TYPE_CHECKING:
    from pipelines.chat_cmd import Questions

HELP = (
    "/open N shows a passage, /compare QUESTION both collections, /new forgets the conversation, /quit ends."
)


class _Talk:
    """A conversation and the commands within it."""

    def __init__(self, chat: Chat, other: Chat | None, asked: Questions | None) -> None:
        self.chat, self.other, self.asked = chat, other, asked
        self.engine = chat.engine()

    def do(self, line: str) -> None:
        """Answer a question or obey a command."""
        command, _, rest = line.partition(" ")
        if command == "/new":
            self.engine = self.chat.engine()
            show.out.print("Forgotten.")
        elif command == "/open":
            _open(self.engine.last, rest)
        elif command == "/compare":
            _compare(rest, self.chat, self.other)
        elif command.startswith("/"):
            show.out.print(HELP)
        else:
            if self.asked is not None:
                self.asked.add(line)
            _answer(self.engine.ask(line), drafts=self.chat.llm is not None)


def talk(chat: Chat, other: Chat | None, asked: Questions | None) -> None:
    """Read questions until /quit or the end of the input."""
    show.out.print(f"[bold]{show.escape(chat.info.name)}[/], {chat.info.points:,} passages. {HELP}")
    conversation = _Talk(chat, other, asked)
    while True:
        try:
            line = show.out.input("\n[bold cyan]>[/] ").strip()
            if line in ("/quit", "/exit"):
                return
            if line:
                conversation.do(line)
        except EOFError:
            return
        except KeyboardInterrupt:
            show.out.print("\n[yellow]stopped[/]; /quit ends.")
        except EmbFilterError as error:
            show.out.print(f"[bold red]error:[/] {show.escape(str(error))}", soft_wrap=True)


def _answer(parts: Iterator[str | Answer], drafts: bool) -> None:
    """Print what a model writes as it comes, and the answer with what it stands on when it was checked."""
    written = False
    for part in parts:
        if isinstance(part, Answer):
            _whole(part, written)
        elif drafts:
            written = True
            show.out.print(show.clean(part), end="", markup=False, soft_wrap=True, style="dim")


def _whole(answer: Answer, written: bool) -> None:
    if written:
        show.out.print("\n")
    if answer.known:
        text = Text()
        for claim in answer.claims:
            text.append(show.clean(claim.text))
            for number in claim.cites:
                text.append(f" [{number}]", style="cyan")
            if not claim.cites:
                text.append(" (not in the passages)", style="yellow")
            text.append(" ")
        show.out.print(text)
    else:
        show.out.print(f"[bold]{DONT_KNOW}[/] {show.escape(answer.reason)}", soft_wrap=True)
    shown = [p for p in answer.passages if p.number in answer.cited] if answer.known else answer.passages[:2]
    if not answer.known and shown:
        show.out.print("[dim]Nearest:[/]")
    for passage in shown:
        where = show.escape(shown_place(passage.hit))
        show.out.print(f"[cyan]\\[{passage.number}][/] {passage.score:.3f} [bold]{where}[/]", soft_wrap=True)


def _open(answer: Answer | None, number: str) -> None:
    """A passage of the last answer with the question's words marked."""
    found: Passage | None = None
    if answer is not None and number.strip().isdecimal():
        found = next((p for p in answer.passages if p.number == int(number)), None)
    if found is None:
        count = 0 if answer is None else len(answer.passages)
        show.out.print(f"no passage {show.escape(number) or '(no number)'}; the last answer has {count}.")
        return
    text = Text(show.clean(found.hit.text))
    for start, end in found.marks:
        text.stylize("bold yellow", start, end)
    show.out.print(f"[bold]{show.escape(shown_place(found.hit))}[/]", soft_wrap=True)
    show.out.print(text)


def _compare(question: str, chat: Chat, other: Chat | None) -> None:
    if other is None or not question.strip():
        show.out.print("/compare needs a question, and another collection (--compare OTHER).")
        return
    comparison = side_by_side(question, other.retriever, chat.retriever)
    for side in (comparison.left, comparison.right):
        _side(side, comparison)


def _side(side: Side, comparison: Comparison) -> None:
    show.out.print(
        f"\n[bold]{show.escape(side.info.name)}[/]: {side.bytes_per_vector:,} bytes a vector, "
        f"{side.encode_ms:.0f} ms to encode, {side.search_ms:.1f} ms to search"
    )
    for rank, hit in enumerate(side.hits, 1):
        moved = comparison.moved(hit.id)
        mark = "" if side is comparison.left else "new" if moved is None else f"{moved:+d}" if moved else "="
        passage = textwrap.shorten(show.clean(hit.text), 80, placeholder=" ...")
        show.out.print(f"{rank}. {hit.score:.3f} [green]{mark:>3}[/] {show.escape(passage)}", soft_wrap=True)
