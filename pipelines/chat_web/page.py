"""The page: a conversation, a comparison of two collections, and documents to add."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.utils import get_upload_folder

from pipelines.chat_web import render
from pipelines.chat_web.render import Turn
from pipelines.chat_web.uploads import Uploads
from rag_embfilter.chat import Answer, Chat, CitedChatEngine
from rag_embfilter.chat.side_by_side import side_by_side
from rag_embfilter.errors import EmbFilterError

if TYPE_CHECKING:
    from pipelines.chat_cmd import Questions
    from pipelines.chat_web.server import Settings

HERE = Path(__file__).parent
WAITING = 40  # questions that may wait; more are told to come back
AT_ONCE = {"local": 1, "none": 4}
AT_ONCE_REMOTE = 8
LONGEST_QUESTION = 2000  # characters
TURNS_SHOWN = 50
PAINT = 0.08  # seconds between two looks at an answer that grows
WELCOME = "Answers come from the documents, sentence by sentence, with the passage that each stands on."
FONTS = ["ui-sans-serif", "system-ui", "sans-serif"]
PAGE: dict[str, Any] = {
    "theme": gr.themes.Base(
        primary_hue="teal", neutral_hue="stone", font=FONTS, font_mono=["ui-monospace", "monospace"]
    ),
    "css": (HERE / "style.css").read_text(encoding="utf-8"),
    "head": f"<script>{(HERE / 'script.js').read_text(encoding='utf-8')}</script>",
}


@dataclass
class Session:
    """One reader's conversation; nobody else's."""

    engine: CitedChatEngine
    turns: list[Turn] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)


def make_page(chat: Chat, other: Chat | None, asked: Questions | None, settings: Settings) -> gr.Blocks:
    """The page of a collection, with a tab for each thing that readers may do."""
    uploads = None
    if settings.upload_folder is not None:
        arrived = Path(get_upload_folder())
        uploads = Uploads(chat, settings.upload_folder, settings.max_upload, arrived)
    with gr.Blocks(
        title=f"Chat: {chat.info.name}", analytics_enabled=False, delete_cache=(3600, 3600)
    ) as blocks:
        gr.HTML(render.heading(chat.info, chat.llm_name, chat.retriever.mode))
        if other is None and uploads is None:
            _talk(chat, asked)
        else:
            with gr.Tabs():
                with gr.Tab("Chat"):
                    _talk(chat, asked)
                if other is not None:
                    with gr.Tab("Compare"):
                        _compare(chat, other)
                if uploads is not None:
                    with gr.Tab("Documents"):
                        _documents(uploads)
    page: gr.Blocks = blocks
    limit = AT_ONCE.get(chat.llm_name, AT_ONCE_REMOTE)
    page.queue(max_size=WAITING, default_concurrency_limit=limit, api_open=False)
    return page


def _talk(chat: Chat, asked: Questions | None) -> None:
    talks = _Talks(chat, asked)
    session = gr.State(None)
    shown = gr.HTML(render.conversation([], WELCOME), elem_id="talk", padding=False)
    with gr.Row(elem_id="ask"):
        box = gr.Textbox(
            placeholder="Ask a question",
            show_label=False,
            lines=1,
            max_lines=6,
            max_length=LONGEST_QUESTION,
            autofocus=True,
            submit_btn="Ask",
            stop_btn="Stop",
            container=False,
            elem_id="question",
            scale=8,
        )
        new = gr.Button("New", elem_id="new", scale=0, min_width=60)
    hidden: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    begun = box.submit(talks.begin, [box, session], [box, session, shown], queue=False, **hidden)
    begun.then(talks.answer, [session], [shown], concurrency_id="answers", **hidden)
    box.stop(talks.stop, [session], None, queue=False, **hidden)
    new.click(talks.new, [session], [session, shown], queue=False, **hidden)


class _Talks:
    """What the conversation's buttons do, for any reader."""

    def __init__(self, chat: Chat, asked: Questions | None) -> None:
        self.chat, self.asked = chat, asked

    def begin(self, question: str, session: Session | None) -> tuple[str, Session, str]:
        """The question at once, and its place in the conversation."""
        if session is None:
            session = Session(self.chat.engine())
        question = (question or "").strip()[:LONGEST_QUESTION]
        if question:
            session.turns = session.turns[-TURNS_SHOWN:]
            number = session.turns[-1].number + 1 if session.turns else 1
            session.turns.append(Turn(number, question))
            session.stop = threading.Event()
        return "", session, render.conversation(session.turns, WELCOME)

    def answer(self, session: Session) -> Iterator[str]:
        """The answer as it grows; whatever fails is told in its place, and the page goes on."""
        turn = session.turns[-1] if session.turns else None
        if turn is None or not turn.waiting:
            return
        try:
            if self.asked is not None:
                self.asked.add(turn.question)
            painted = 0.0
            for part in session.engine.ask(turn.question, session.stop):
                if isinstance(part, Answer):
                    turn.answer = part
                else:
                    turn.writing += part
                    if time.monotonic() - painted < PAINT:
                        continue
                painted = time.monotonic()
                yield render.conversation(session.turns, WELCOME)
        except (EmbFilterError, OSError) as error:
            turn.trouble = str(error)
        except Exception as error:  # a page that stops answering helps nobody; the name is enough to find it
            turn.trouble = (
                f"Something went wrong here ({type(error).__name__}). Ask again, or tell the owner."
            )
        turn.waiting = False
        yield render.conversation(session.turns, WELCOME)

    def stop(self, session: Session | None) -> None:
        """End the answer that is being written."""
        if session is not None:
            session.stop.set()

    def new(self, session: Session | None) -> tuple[None, str]:
        """Forget the conversation."""
        self.stop(session)
        return None, render.conversation([], WELCOME)


def _compare(chat: Chat, other: Chat) -> None:
    left, right = other.info.name, chat.info.name

    def ask(question: str) -> str:
        if not question.strip():
            return render.comparison(None, left, right)
        try:
            found = side_by_side(question[:LONGEST_QUESTION], other.retriever, chat.retriever)
        except (EmbFilterError, OSError) as error:
            return render.comparison(None, left, right, str(error))
        return render.comparison(found, left, right)

    box = gr.Textbox(
        placeholder="The same question to both collections",
        show_label=False,
        max_length=LONGEST_QUESTION,
        submit_btn="Compare",
        container=False,
        elem_id="compare-question",
    )
    shown = gr.HTML(render.comparison(None, left, right), elem_id="comparison", padding=False)
    box.submit(
        ask, [box], [shown], concurrency_id="answers", show_progress="minimal", api_visibility="private"
    )


def _documents(uploads: Uploads) -> None:
    given = gr.File(
        label=f"Drop files here: {' '.join(uploads.types)}, up to {uploads.max_upload} MB each",
        file_count="multiple",
        file_types=list(uploads.types),
        elem_id="files",
        height=170,
    )
    shown = gr.HTML(render.added([]), elem_id="added", padding=False)
    given.upload(
        uploads.add,
        [given],
        [given, shown],
        concurrency_limit=1,
        concurrency_id="uploads",
        show_progress="hidden",
        api_visibility="private",
    )
