"""`chat`: questions and cited answers, in the terminal or in the browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show
from pipelines.search_cmd import find_collection
from rag_embfilter.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from rag_embfilter.chat import Chat
    from rag_embfilter.store import Store

WEB = "Browser"
PASSWORD = "EMBFILTER_CHAT_PASSWORD"
ASK = "-"


@show.guarded
def chat(
    collection: Annotated[
        str, typer.Option(metavar="NAME", help="A base name, a full collection name, or an alias.")
    ],
    filter_types: options.FilterTypes = [],  # noqa: B006 - typer copies it
    filter_ratios: options.FilterRatios = [],  # noqa: B006
    llm: Annotated[
        str,
        typer.Option(
            help="Who writes: [b]local[/b] (the backbone that embeds, one set of weights), "
            "[b]openai:MODEL[/b] or [b]openai:MODEL@URL[/b] (its key from OPENAI_API_KEY), or [b]none[/b]: "
            "the passages' best sentences."
        ),
    ] = "local",
    mode: Annotated[
        str | None,
        typer.Option(
            help="dense, bm25 or hybrid; by default hybrid where the collection was made with --bm25."
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, max=20, help="Passages for an answer.")] = 4,
    compare: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="Another collection, to put beside this one: /compare, or a tab."),
    ] = None,
    collect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append the questions asked, one a line, for `refit-queries`."),
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="In the browser.", rich_help_panel=WEB)] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.", rich_help_panel=WEB)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=WEB)
    ] = 7860,
    password: Annotated[
        bool,
        typer.Option(
            "--password",
            help=f"Ask readers for a password: what {PASSWORD} holds, or what is typed now.",
            rich_help_panel=WEB,
        ),
    ] = False,
    upload_folder: Annotated[
        Path | None,
        typer.Option(help="Let readers add documents; they are kept here and ingested.", rich_help_panel=WEB),
    ] = None,
    max_upload: Annotated[
        int, typer.Option(min=1, max=1000, help="Largest file to add, in MB.", rich_help_panel=WEB)
    ] = 10,
    device: options.Device = None,
    dtype: options.Dtype = None,
    qdrant_path: options.QdrantPath = options.DEFAULT_PATH,
    qdrant_url: options.QdrantUrl = None,
    qdrant_key: options.QdrantKey = None,
    qdrant_grpc: options.QdrantGrpc = False,
    filter_dir: options.FilterDir = None,
) -> None:
    """Talk to a collection: answers cite its passages, or say "I don't know".

    Backbone, template and filter are taken from what the collection says about itself. In the terminal,
    Ctrl-C stops an answer and /quit ends.
    """
    if not web and (upload_folder or password):
        raise ConfigError(
            "--upload-folder and --password are for the browser; give --web, or leave them out."
        )
    secret = _password() if password else None
    if web:
        _require_web(host, secret)
    wanted = options.one_filter(filter_types or ["edge"], filter_ratios or [2])
    with options.open_store(qdrant_path, qdrant_url, qdrant_key, filter_dir, grpc=qdrant_grpc) as store:
        info = find_collection(store, collection, wanted, chosen=bool(filter_types or filter_ratios))
        how = mode or ("hybrid" if info.bm25 else "dense")
        opened = _open(store, info.name, llm, how, top_k, device, dtype)
        other = None if compare is None else _beside(store, compare, opened, device, dtype)
        asked = None if collect is None else Questions(collect)
        if web:
            from pipelines.chat_web.server import Settings, serve

            serve(opened, other, asked, Settings(host, port, secret, upload_folder, max_upload))
        else:
            from pipelines.chat_terminal import talk

            talk(opened, other, asked)


def _open(
    store: Store, name: str, llm: str, mode: str, top_k: int, device: str | None, dtype: str | None
) -> Chat:
    """The collection with all that it needs to answer, learnt now and not at the first question."""
    from rag_embfilter.chat import Chat

    with show.err.status(f"Opening {show.escape(name)} ..."):
        opened = Chat(store, name, llm, mode, top_k, device=device, dtype=dtype)
        opened.warm_up()
    return opened


def _beside(store: Store, name: str, opened: Chat, device: str | None, dtype: str | None) -> Chat:
    from rag_embfilter.chat import Chat

    info = find_collection(store, name, "raw", chosen=False)
    return Chat(store, info.name, "none", "dense", opened.retriever.top_k, device=device, dtype=dtype)


def _password() -> str:
    """From the environment, or typed without being shown."""
    secret = os.environ.get(PASSWORD) or typer.prompt("Password for readers", hide_input=True, err=True)
    if len(secret) < 8:
        raise ConfigError(f"the password has {len(secret)} characters; expected 8 or more.")
    return str(secret)


def _require_web(host: str, secret: str | None) -> None:
    """Refuse what cannot work before a model is loaded; warn when anybody may ask."""
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"--web needs the chat extra ({error}): pip install 'rag-embfilter[chat]', or leave --web out."
        ) from error
    if host not in ("127.0.0.1", "localhost", "::1") and secret is None:
        show.err.print(
            f"[yellow]note:[/] {show.escape(host)} is reached from other machines, and no --password is set."
        )


class Questions:
    """The questions asked, one a line, in the form that `refit-queries` takes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()  # a file that cannot be written is told now

    def add(self, question: str) -> None:
        """Append a question; line breaks in it become spaces."""
        line = " ".join(question.split())
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
