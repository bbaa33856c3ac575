"""What docker-compose.yml has bash do in Qdrant's container, done here."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import yaml

from pipelines.app import app

FILE = Path(__file__).parents[2] / "docker-compose.yml"
SERVICE = yaml.safe_load(FILE.read_text())["services"]["qdrant"]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def _bash(words: list[str], **options) -> subprocess.CompletedProcess[str]:
    """Runs it as compose does, which makes one dollar of two."""
    given = [word.replace("$$", "$") for word in words]
    return subprocess.run(given, capture_output=True, text=True, timeout=20, **options)


def _answering(answer: bytes) -> tuple[int, list[bytes], threading.Event]:
    """A server that answers once and keeps the connection open until told: its port, and what it got."""
    listening = socket.create_server(("127.0.0.1", 0))
    got: list[bytes] = []
    end = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with listening, connection:
            while not got or not got[0].endswith(b"\r\n\r\n"):
                got[:] = [b"".join(got) + connection.recv(1000)]
            connection.sendall(answer)
            end.wait(30)

    threading.Thread(target=serve, daemon=True).start()
    return listening.getsockname()[1], got, end


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nall shards are ready", True),
        (b"HTTP/1.0 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nsome shards are not ready: 200 of 201", False),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", False),
    ],
)
def test_the_health_check_reads_the_status_and_waits_for_nothing_more(answer, healthy):
    port, got, end = _answering(answer)
    words = [word.replace("6333", str(port)) for word in SERVICE["healthcheck"]["test"][1:]]
    assert (_bash(words).returncode == 0) == healthy
    end.set()
    assert got == [b"GET /readyz HTTP/1.0\r\n\r\n"]


def test_the_health_check_fails_where_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = [word.replace("6333", str(port)) for word in SERVICE["healthcheck"]["test"][1:]]
    assert _bash(words).returncode != 0


@pytest.mark.parametrize(("key", "seen"), [("", "unset"), ("secret word", "secret word")])
def test_an_empty_key_is_no_key(tmp_path, key, seen):
    """Qdrant 1.18 would ask everybody for an empty one."""
    entry = tmp_path / "entrypoint.sh"
    entry.write_text('#!/usr/bin/env bash\necho "${QDRANT__SERVICE__API_KEY-unset}"\n')
    entry.chmod(0o755)
    assert SERVICE["environment"]["QDRANT__SERVICE__API_KEY"] == "${QDRANT_API_KEY:-}"
    done = _bash(SERVICE["command"], cwd=tmp_path, env=os.environ | {"QDRANT__SERVICE__API_KEY": key})
    assert done.stdout == f"{seen}\n"


def test_the_chat_is_asked_for_options_that_there_are(tmp_path):
    """Its two commands are run here with a stand-in that shows its arguments, then parsed by the real one."""
    chat = yaml.safe_load(FILE.read_text())["services"]["chat"]
    (tmp_path / "python").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$*"\n')
    (tmp_path / "python").chmod(0o755)
    values = {name: value.partition(":-")[2].rstrip("}") for name, value in chat["environment"].items()}
    given = os.environ | values | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [*chat["entrypoint"], *chat["command"]]
    ingest, talk = _bash(words, env=given).stdout.splitlines()
    assert talk.endswith("--web --host 0.0.0.0") and "--collection documents-calibrated-r4" in talk
    assert _bash(words, env=given | {"EMBFILTER_CHAT_PASSWORD": "s"}).stdout.endswith("0.0.0.0 --password\n")
    for line in (ingest, talk):
        with pytest.raises(SystemExit) as end:
            app(args=[*line.split()[2:], "--help"], prog_name="x")
        assert end.value.code == 0
