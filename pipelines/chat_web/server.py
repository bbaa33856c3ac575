"""The web server: Gradio's app behind a guard, on one address."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import show
from rag_embfilter.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pipelines.chat_cmd import Questions
    from rag_embfilter.chat import Chat

    Message = dict[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BUSY = "Many people are asking right now. Please wait a moment and ask again."
# Gradio's page is made of inline scripts and compiled templates, so those are allowed, from nowhere but here.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True)
class Settings:
    """Where the page is served, and what readers may do.

    Attributes:
        password: asked for when it is set.
        upload_folder: where documents that readers add are kept; None lets nobody add any.
        max_upload: largest file, in MB.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    password: str | None = None
    upload_folder: Path | None = None
    max_upload: int = 10


def serve(chat: Chat, other: Chat | None, asked: Questions | None, settings: Settings) -> None:
    """Serve the page until Ctrl-C. Raises `ConfigError` for an address that cannot be listened on."""
    import socket

    import uvicorn

    app = make_app(chat, other, asked, settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be listened on ({error.strerror}); give another --port "
            "or --host."
        ) from error
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    show.out.print(f"Open http://{shown}:{listening.getsockname()[1]} (Ctrl-C ends).", soft_wrap=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3))
    server.run(sockets=[listening])


def make_app(chat: Chat, other: Chat | None, asked: Questions | None, settings: Settings) -> FastAPI:
    """The web application."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import gradio
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from pipelines.chat_web.page import PAGE, make_page

    page = make_page(chat, other, asked, settings)
    secret = settings.password
    app: FastAPI = gradio.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        page,
        path="/",
        server_name=settings.host,
        auth=None if secret is None else lambda user, given: _same(given, secret),
        auth_message="Any name, and the password you were given.",
        max_file_size=settings.max_upload << 20,
        show_error=False,
        ssr_mode=False,
        pwa=False,
        footer_links=[],
        enable_monitoring=False,
        **PAGE,
    )
    # Gradio looks at which files a reader may name only in a page that it launched itself; in a mounted one a
    # made-up path would be copied to where readers can fetch it.
    page.has_launched = True
    app.add_middleware(_Guard, uploads=settings.upload_folder is not None)
    if settings.host in LOOPBACK:  # a page elsewhere cannot reach it by another name
        app.add_middleware(
            TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]", "testserver"]
        )
    return app


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


class _Guard:
    """Adds the headers that keep the page to itself, closes what it does not use, and words a full queue."""

    def __init__(self, app: Any, uploads: bool) -> None:
        self.app, self.uploads = app, uploads

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = str(scope["path"])
        if "/upload" in path and not self.uploads or "/proxy=" in path:
            await _reply(send, 403, "Adding documents is switched off here.")
            return
        if path == "/alive":
            await _reply(send, 200, "yes")
            return
        joins = path.endswith("/queue/join")
        full = False

        async def answer(message: Message) -> None:
            nonlocal full
            if message["type"] == "http.response.start":
                if joins and message["status"] == 503:
                    full = True
                    await _reply(send, 503, BUSY)
                    return
                kept = [(k, v) for k, v in message["headers"] if k.decode().lower() not in HEADERS]
                message["headers"] = kept + [(k.encode(), v.encode()) for k, v in HEADERS.items()]
            if not full:
                await send(message)

        await self.app(scope, receive, answer)


async def _reply(send: Send, status: int, text: str) -> None:
    body = json.dumps({"detail": text, "error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(k.encode(), v.encode()) for k, v in HEADERS.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
