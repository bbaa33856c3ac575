"""Requests that are tried again, against a small server that breaks connections as told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from rag_embfilter import Store
from rag_embfilter.errors import StoreError
from rag_embfilter.store.retrying import ATTEMPTS, RetryingTransport


class _Server(BaseHTTPRequestHandler):
    """Plays the faults of its list, one a request: `drop`, a status, or None for a good answer."""

    faults: list[str | int | None]
    seen: list[tuple[str, str, bytes]]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        type(self).seen.append((self.command, self.path.split("?")[0], body))
        fault = type(self).faults.pop(0) if type(self).faults else None
        if fault == "drop":
            self.connection.close()
            return
        version = {"title": "qdrant", "version": "1.18.0"}
        result = (
            {"collections": []} if self.path == "/collections" else {"operation_id": 1, "status": "completed"}
        )
        answer = version if self.path == "/" else {"result": result, "status": "ok", "time": 0}
        content = json.dumps(answer).encode()
        self.send_response(fault if isinstance(fault, int) else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server():
    handler = type("Handler", (_Server,), {"faults": [], "seen": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", handler
    running.shutdown()
    running.server_close()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)


def test_reading_and_points_are_tried_again_with_the_same_body(server, caplog):
    url, handler = server
    with Store(url=url) as store:
        handler.seen.clear()
        handler.faults[:] = ["drop", 503, "drop"]
        assert store.names() == []
        assert [path for _, path, _ in handler.seen] == ["/collections"] * 4
        handler.seen.clear()
        handler.faults[:] = ["drop", 502]
        store.remove("c", ["0" * 32])
        assert len({body for *_, body in handler.seen}) == 1 and len(handler.seen) == 3
    assert "Qdrant does not answer (status 503); trying again in" in caplog.text


def test_what_might_do_harm_twice_is_not_sent_twice(server):
    url, handler = server
    with Store(url=url) as store:
        handler.seen.clear()
        handler.faults[:] = ["drop"]
        with pytest.raises(StoreError, match="cannot reach Qdrant"):
            with store._calling() as client:
                client.update_collection_aliases([])
        assert len(handler.seen) == 1


def test_patience_ends(server):
    url, handler = server
    with Store(url=url) as store:
        handler.seen.clear()
        handler.faults[:] = [503] * 50
        with pytest.raises(StoreError, match="answered 503"):
            store.names()
        assert len(handler.seen) == ATTEMPTS


def test_a_wrong_address_fails_at_once(monkeypatch):
    tried = []
    monkeypatch.setattr(
        httpx.HTTPTransport, "handle_request", lambda self, request: tried.append(1) or _refuse(request)
    )
    with pytest.raises(StoreError, match="cannot reach Qdrant at http://127.0.0.1:9"):
        Store(url="http://127.0.0.1:9")
    assert len(tried) == 1


def _refuse(request):
    raise httpx.ConnectError("refused", request=request)


def test_a_connection_that_cannot_be_opened_is_tried_again_for_anything():
    calls = []

    def answer(request):
        calls.append(request.method)
        return _refuse(request) if len(calls) < 3 else httpx.Response(200)

    transport = RetryingTransport(httpx.MockTransport(answer))
    transport.patient = True
    response = transport.handle_request(httpx.Request("POST", "http://q/collections/aliases"))
    assert response.status_code == 200 and calls == ["POST"] * 3
