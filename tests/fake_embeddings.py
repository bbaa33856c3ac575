"""An embeddings server in this process, around a real (tiny) backbone, with a switch for each mistake."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from rag_embfilter import Encoder


class FakeEmbeddings:
    """`with FakeEmbeddings(encoder) as server:`; `server.url` is its address.

    Attributes:
        pooling: `last`, `mean` over all tokens, or `first`.
        end_token, begin_token: put after, or before, every prompt.
        around: (ids, ids) put around every prompt, as by a tokenizer with a template as its post-processor.
        normalize: scale to unit length.
        width: entries of a vector that are sent.
        refuse: kinds of prompt answered with 422: `tokens`, `text`.
        base64: whether it knows `encoding_format`; refused with 422 otherwise.
        failures: statuses (or None for a connection that ends) of the next answers.
        headers: of the failures.
        garbage: an answer sent in place of the vectors.
    """

    def __init__(self, encoder: Encoder, **switches: Any) -> None:
        self.encoder = encoder
        self.pooling = "last"
        self.end_token = self.begin_token = False
        self.around: tuple[list[int], list[int]] = ([], [])
        self.normalize = True
        self.width = encoder.backbone.hidden_size
        self.refuse: tuple[str, ...] = ()
        self.base64 = True
        self.failures: list[int | None] = []
        self.headers: dict[str, str] = {}
        self.garbage: bytes | None = None
        for name, value in switches.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> FakeEmbeddings:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, body: dict[str, Any]) -> tuple[int, bytes]:
        kind = "text" if isinstance(body["input"][0], str) else "tokens"
        if kind in self.refuse:
            return 422, json.dumps({"error": {"message": f"cannot read {kind}"}}).encode()
        if body["encoding_format"] == "base64" and not self.base64:
            return 422, b'{"error": {"message": "encoding_format: only float is known"}}'
        if self.garbage is not None:
            return 200, self.garbage
        rows = [self._vector(prompt) for prompt in body["input"]]
        coded = [
            base64.b64encode(row.astype("<f4").tobytes()).decode()
            if body["encoding_format"] == "base64"
            else row.tolist()
            for row in rows
        ]
        data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(coded)]
        return 200, json.dumps({"object": "list", "data": data[::-1], "model": body["model"]}).encode()

    def _vector(self, prompt: str | list[int]) -> np.ndarray:
        tokenizer = self.encoder.backbone.tokenizer
        special = not any(self.around)  # a post-processor adds what it says, and nothing else
        text = isinstance(prompt, str)
        ids = tokenizer(prompt, add_special_tokens=special)["input_ids"] if text else list(prompt)
        ids = [*self.around[0], *ids, *self.around[1]]
        ids = [tokenizer.bos_token_id] * self.begin_token + ids + [tokenizer.eos_token_id] * self.end_token
        with torch.inference_mode():
            states = self.encoder.backbone.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        pooled = {"last": states[-1], "mean": states.mean(0), "first": states[0]}[self.pooling].numpy()
        scaled = pooled / np.linalg.norm(pooled) if self.normalize else pooled
        return scaled[: self.width]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                self.reply(200, b'{"object": "list", "data": [{"id": "the-served-name"}]}')

            def do_POST(self) -> None:  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.bodies.append(body)
                    server.keys.add(self.headers["Authorization"])
                    failure = server.failures.pop(0) if server.failures else 200
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                try:
                    if failure is None:
                        self.close_connection = True
                        return
                    self.reply(*(server.answer(body) if failure == 200 else (failure, b"busy")))
                finally:
                    with server._lock:
                        server.at_once -= 1

            def reply(self, status: int, content: bytes) -> None:
                self.send_response(status)
                for name, value in (server.headers if status >= 400 else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: object) -> None:
                pass

        return Handler
