"""A Qdrant server in this process: the REST calls that a store makes, answered by the embedded engine.

It can go away after some writes, as a server does that is killed, and come back with what it had.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import BaseModel
from qdrant_client import QdrantClient, models

Body = dict[str, Any]
Answer = Callable[[QdrantClient, str, Body], Any]


def _scroll(client: QdrantClient, name: str, body: Body) -> Any:
    asked = models.ScrollRequest(**body)
    records, following = client.scroll(
        name, asked.filter, asked.limit or 10, offset=asked.offset,
        with_payload=asked.with_payload, with_vectors=asked.with_vector or False,
    )  # fmt: skip
    return models.ScrollResult(points=records, next_page_offset=following)


def _retrieve(client: QdrantClient, name: str, body: Body) -> Any:
    asked = models.PointRequest(**body)
    return client.retrieve(name, asked.ids, asked.with_payload, asked.with_vector or False)


def _create(client: QdrantClient, name: str, body: Body) -> Any:
    asked = models.CreateCollection(**body)
    return client.create_collection(name, asked.vectors, metadata=asked.metadata)


def _query(client: QdrantClient, name: str, body: Body) -> Any:
    return client.query_batch_points(name, models.QueryRequestBatch(**body).searches)


ROUTES: list[tuple[str, str, Answer]] = [
    ("GET", "/collections", lambda c, n, b: c.get_collections()),
    ("GET", "/aliases", lambda c, n, b: c.get_aliases()),
    ("GET", "/collections/NAME", lambda c, n, b: c.get_collection(n)),
    ("GET", "/collections/NAME/exists", lambda c, n, b: {"exists": c.collection_exists(n)}),
    ("PUT", "/collections/NAME", _create),
    ("DELETE", "/collections/NAME", lambda c, n, b: c.delete_collection(n)),
    ("PUT", "/collections/NAME/index", lambda c, n, b: {"operation_id": 1, "status": "completed"}),
    ("PUT", "/collections/NAME/points", lambda c, n, b: c.upsert(n, models.PointsList(**b).points)),
    ("POST", "/collections/NAME/points", _retrieve),
    ("POST", "/collections/NAME/points/scroll", _scroll),
    ("POST", "/collections/NAME/points/count", lambda c, n, b: c.count(n, exact=True)),
    ("POST", "/collections/NAME/points/delete", lambda c, n, b: c.delete(n, b["points"])),
    ("POST", "/collections/NAME/points/query/batch", _query),
]


class FakeQdrant:
    """Serves on a port of its own until `stop`; `engine` holds what is stored."""

    def __init__(self, encryption: ssl.SSLContext | None = None) -> None:
        self.encryption = encryption
        self.engine = QdrantClient(location=":memory:")
        self.writes_left: int | None = None
        self.refused = 0
        self._lock = threading.Lock()
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        """Address to connect to."""
        return f"{'https' if self.encryption else 'http'}://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, at the same address as before."""
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._port = self._server.server_port
        if self.encryption is not None:
            self._server.socket = self.encryption.wrap_socket(self._server.socket, server_side=True)
        self.writes_left = None
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Go away."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: Body) -> tuple[int, Any]:
        """Status and content; `ConnectionError` when the server is to die instead."""
        if path == "/":
            return 200, {"title": "qdrant", "version": "1.18.0"}
        for wanted, pattern, call in ROUTES:
            found = re.fullmatch(pattern.replace("NAME", "([^/]+)"), path)
            if found and method == wanted:
                with self._lock:
                    self._count(method, path)
                    result = call(self.engine, found[1] if found.groups() else "", body)
                return 200, {"result": _plain(result), "status": "ok", "time": 0}
        return 404, {"status": {"error": f"no route for {method} {path}"}}

    def _count(self, method: str, path: str) -> None:
        """Each write of points is counted, and the server is gone once none is left."""
        if self.writes_left is not None and (method, path.rsplit("/", 1)[-1]) == ("PUT", "points"):
            if self.writes_left == 0:
                raise ConnectionError
            self.writes_left -= 1


class _Handler(BaseHTTPRequestHandler):
    fake: FakeQdrant

    def _serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, answer = self.fake.answer(
                self.command, self.path.split("?")[0], json.loads(content or b"{}")
            )
        except ConnectionError:
            self.connection.close()
            self.fake.stop()
            return
        said = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def _plain(value: Any) -> Any:
    """Models as JSON would have them."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [_plain(each) for each in value] if isinstance(value, list) else value
