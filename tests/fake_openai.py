"""An OpenAI-compatible server in this process, which answers by rules on the prompt."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCHEMA = re.compile(r"specified in JSON Schema:\n(.*?)Do not use single quotes", re.DOTALL)


def filled(schema: dict[str, Any], root: dict[str, Any], text: str) -> Any:
    """A value that fits a JSON schema: this text, numbers 1, one item in each list."""
    if ref := schema.get("$ref"):
        schema = root["$defs"][ref.rpartition("/")[2]]
    if schema["type"] == "object":
        return {name: filled(inner, root, text) for name, inner in schema["properties"].items()}
    if schema["type"] == "array":
        return [filled(schema["items"], root, text)]
    return text if schema["type"] == "string" else 1


def good(prompt: str) -> str:
    """A well-formed answer that no other prompt gets: JSON where the prompt wants it, else a sentence."""
    text = f"Answer {hash(prompt)}."
    if found := SCHEMA.search(prompt):
        schema = json.loads(found[1])
        return json.dumps(filled(schema, schema, text))
    return text


class FakeOpenAI:
    """`with FakeOpenAI(rule) as server:`; `server.spec` names it for `--judge`.

    A rule gets the prompt and how often it came, and gives the answer's text, a message's fields, or
    (status, headers) of an error. It may sleep. Where a stream is wanted, the prompt is the last message, and
    the rule gives the pieces of the answer, or None among them for a connection that is lost.
    """

    def __init__(self, rule: Callable[[str, int], Any] = lambda prompt, times: good(prompt)) -> None:
        self.rule = rule
        self.prompts: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True

    @property
    def spec(self) -> str:
        return f"openai:fake@http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> FakeOpenAI:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, str], bytes]:
        prompt = body["messages"][0]["content"]
        with self._lock:
            self.prompts.append(prompt)
            self.bodies.append(body)
            self.keys.add(key)
            self._seen[prompt] += 1
            times = self._seen[prompt]
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = self.rule(prompt, times)
        finally:
            with self._lock:
                self.at_once -= 1
        if isinstance(answer, tuple):
            return answer[0], answer[1], b'{"error": {"message": "no"}}'
        if isinstance(answer, bytes):
            return 200, {}, answer
        message = answer if isinstance(answer, dict) else {"content": answer}
        finish = message.pop("finish_reason", "stop")
        choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant"} | message}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        whole = {"id": "1", "object": "chat.completion", "created": int(time.time()), "model": "fake"}
        return 200, {}, json.dumps(whole | {"choices": [choice], "usage": usage}).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if body.get("stream"):
                    return self._stream(body)
                status, headers, content = server._answer(body, self.headers["Authorization"])
                try:
                    self.send_response(status)
                    for name, value in {"Content-Type": "application/json", **headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass  # the client has given up, which is what a late answer is for

            def _stream(self, body: dict[str, Any]) -> None:
                prompt = body["messages"][-1]["content"]
                server.prompts.append(prompt)
                server.bodies.append(body)
                server.keys.add(self.headers["Authorization"])
                answer = server.rule(prompt, 1)
                self.close_connection = True
                if isinstance(answer, tuple):
                    return self.send_error(answer[0])
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for piece in answer:
                    if piece is None:
                        self.wfile.flush()
                        self.connection.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                        return self.connection.close()
                    choice = {"index": 0, "delta": {"role": "assistant", "content": piece}}
                    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
                    self.wfile.write(f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n".encode())
                    self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")

            def log_message(self, *words: object) -> None:
                pass

        return Handler
