"""Runs that are killed, full disks, servers that go away: nothing is lost, and the next run converges."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from qdrant_client.local.persistence import CollectionPersistence
from qdrant_client.local.qdrant_local import QdrantLocal

from pipelines.app import main
from rag_embfilter import Store
from tests import tiny
from tests.fake_qdrant import FakeQdrant

NAMES = ("c-edge-r2", "c-raw")
KILLS = 6
EDGE = importlib.util.find_spec("qdrant_edge") is not None
ON_EDGE = pytest.mark.skipif(not EDGE, reason="the edge extra is not installed")
CHUNKS = ("--chunk-size", "64", "--chunk-overlap", "0")
# Children start from a process that has everything imported: loading torch takes longer than a run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.integration.test_faults"])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model's folder."""
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory) -> Iterator[None]:
    """The user's cache is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBFILTER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def docs(tmp_path) -> Path:
    """Sixty small files of two chunks or so."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for i in range(60):
        _write(folder, i, "first")
    return folder


def _write(folder: Path, i: int, version: str) -> None:
    (folder / f"{i:02}.txt").write_text(f"Text {i}, {version} version. Its second sentence is here.\n" * 2)


def _words(docs: Path, model: Path, store: Path, *more: str) -> list[str]:
    chosen = ["--collection", "c", "--backbone", str(model), "--device", "cpu", "--qdrant-path", str(store)]
    return ["ingest", str(docs), *chosen, *CHUNKS, *more]


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pipelines", *words]


def _contents(store: Path) -> dict[str, dict[str, tuple[str, np.ndarray]]]:
    """By collection: id -> (text, vector)."""
    with Store(path=store) as opened:
        assert tuple(opened.names()) == NAMES
        return {
            name: {
                str(point): (node.text, vector)
                for page in opened.pages(name)
                for point, node, vector in zip(page.ids, page.nodes, page.vectors, strict=True)
            }
            for name in NAMES
        }


def _assert_same(store: Path, clean: Path) -> None:
    """The same points in every collection, each once."""
    ours, theirs = _contents(store), _contents(clean)
    for name in NAMES:
        assert ours[name].keys() == theirs[name].keys() == ours["c-raw"].keys()
        for point, (text, vector) in theirs[name].items():
            assert ours[name][point][0] == text
            np.testing.assert_allclose(ours[name][point][1], vector, atol=1e-5)
        with Store(path=store) as opened:
            assert opened.count(name) == len(theirs[name])


# A process that is killed


def _child(words: list[str], cache: str, told: Connection, stop_after: int, file_limit: int | None) -> None:
    """`python -m pipelines` with small windows, telling of each write and of its errors in the end; it
    stands still once `stop_after` writes are done, so that whoever kills it does so then or a little before.
    """
    import torch

    from rag_embfilter import ingestion
    from rag_embfilter.store import points

    torch.set_num_threads(1)
    os.environ["EMBFILTER_CACHE"] = cache
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    ingestion.WINDOW, points.BATCH_POINTS = 16, 8
    written = 0

    def telling(real):
        def call(*args, **kwargs):
            nonlocal written
            result = real(*args, **kwargs)
            written += 1
            told.send(written)
            while written >= stop_after:
                signal.pause()
            return result

        return call

    writers = [(CollectionPersistence, "persist"), (CollectionPersistence, "delete")]
    if EDGE:
        from rag_embfilter.store.edge import EdgeEngine

        writers += [(EdgeEngine, method) for method in ("upsert", "delete", "create_collection")]
    for owner, method in writers:
        setattr(owner, method, telling(getattr(owner, method)))
    QdrantLocal._save = telling(QdrantLocal._save)
    if file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    code = main(words)
    told.send(sys.stderr.getvalue())
    sys.exit(code)


class _Child:
    """A run in a process of its own, killed at the end of the block if it is still there."""

    def __init__(self, words: list[str], stop_after: int = 10**9, file_limit: int | None = None) -> None:
        self.told, theirs = PROCESSES.Pipe(duplex=False)
        arguments = (words, os.environ["EMBFILTER_CACHE"], theirs, stop_after, file_limit)
        self.process = PROCESSES.Process(target=_child, args=arguments)
        self.process.start()
        theirs.close()
        self.writes, self.said = 0, ""

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.join()

    def wait(self, writes: int = 10**9) -> int | None:
        """Until it did so many writes or ended; its exit code if it did."""
        while self.writes < writes:
            try:
                message = self.told.recv()
            except EOFError:
                self.process.join()
                return self.process.exitcode
            if isinstance(message, int):
                self.writes = message
            else:
                self.said = message
        return None


def _run(words: list[str]) -> int:
    """A whole run; how many writes it took."""
    with _Child(words) as child:
        assert child.wait() == 0, child.said
    return child.writes


def _killed_on_the_way(words: list[str], writes: int) -> None:
    """Kill run after run, each a bit further on, so that they die all over the work there is."""
    step = max(writes // (KILLS + 2), 1)
    for i in range(KILLS):
        # Let it do `step` writes, and then up to two while the signal is on its way.
        with _Child(words, stop_after=step + i % 3) as child:
            assert child.wait(step) is None
            child.process.kill()
            assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("engine", ["embedded", pytest.param("edge", marks=ON_EDGE)])
def test_killed_again_and_again_a_folder_is_stored_as_if_nothing_had_happened(
    docs, model, tmp_path, monkeypatch, engine
):
    if engine == "edge":
        monkeypatch.setitem(globals(), "CHUNKS", (*CHUNKS, "--edge"))
    store, clean, copy = (tmp_path / name for name in ("store", "clean", "copy"))
    made = store / ("collections" if engine == "edge" else "collection") / "c-edge-r2"
    writes = _run(_words(docs, model, clean))
    with subprocess.Popen(
        _command(*_words(docs, model, store)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as first:
        while not made.exists() and first.poll() is None:
            time.sleep(0.005)
        first.kill()
    assert first.returncode == -signal.SIGKILL
    _killed_on_the_way(_words(docs, model, store), writes)
    _run(_words(docs, model, store))
    _assert_same(store, clean)

    for i in range(0, 60, 2):
        _write(docs, i, "second")
    for i in range(50, 56):
        (docs / f"{i}.txt").unlink()
    for i in range(60, 66):
        _write(docs, i, "first")
    shutil.copytree(store, copy)
    writes = _run(_words(docs, model, copy, "--prune"))
    _killed_on_the_way(_words(docs, model, store, "--prune"), writes)
    assert _run(_words(docs, model, store, "--prune")) > 0
    assert _run(_words(docs, model, store, "--prune")) == 0  # nothing left to do
    shutil.rmtree(clean)
    _run(_words(docs, model, clean))
    _assert_same(store, clean)
    _assert_same(copy, clean)


# A disk that is full


def _refused(said: str) -> None:
    """One line of error, which says what to do; no traceback."""
    flat = " ".join(said.split())
    # SQLite knows a full disk from a file that may not grow, and calls the latter an I/O error.
    assert re.search(r"error: .*(the disk of .* is full .*Make room|Is its disk full)", flat), said
    assert "Traceback" not in said and len(said.strip().splitlines()) == 1, said


@pytest.mark.parametrize("limit", [0, 4096, 50_000])
def test_files_that_may_not_grow_end_in_one_line_and_the_next_run_converges(docs, model, tmp_path, limit):
    """From a limit that stops the first file of the store to one in the midst of the points."""
    store, clean = tmp_path / "store", tmp_path / "clean"
    _run(_words(docs, model, clean))
    with _Child(_words(docs, model, store), file_limit=limit) as child:
        assert child.wait() == 1 and (child.writes > 2) == (limit > 10_000)
    _refused(child.said)
    _run(_words(docs, model, store))
    _assert_same(store, clean)


def test_a_full_disk_ends_in_one_line_and_the_next_run_converges(docs, model, tmp_path):
    """On a disk of its own, full at 160 KiB, then larger."""
    disk, clean, end = tmp_path / "disk", tmp_path / "clean", tmp_path / "end"
    disk.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=160k none '{disk}'"
    if not shutil.which("unshare") or subprocess.run([*alone, mount], capture_output=True).returncode:
        pytest.skip("a disk of one's own needs leave to mount one")
    script = f"""{mount} || exit 9; "$@"; code=$?
        echo END >&2; mount -o remount,size=64m '{disk}' && "$@" || exit 8
        cp -r '{disk}/store' '{end}' && exit $code"""
    command = _command(*_words(docs, model, disk / "store"))
    done = subprocess.run([*alone, script, "sh", *command], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    _refused(done.stderr.split("END")[0])
    _run(_words(docs, model, clean))
    _assert_same(end, clean)


# Two at once


def test_of_two_writers_the_second_is_told_and_the_first_goes_on(docs, model, tmp_path, capsys):
    store, clean = tmp_path / "store", tmp_path / "clean"
    _run(_words(docs, model, clean))
    with _Child(_words(docs, model, store)) as first:
        assert first.wait(20) is None
        os.kill(first.process.pid, signal.SIGSTOP)  # in the midst of its work
        capsys.readouterr()
        assert main(_words(docs, model, store)) == 1
        said = capsys.readouterr().err
        os.kill(first.process.pid, signal.SIGCONT)
        assert first.wait() == 0
    assert "is in use by another process, and it takes one at a time" in said and "Traceback" not in said
    _assert_same(store, clean)


# A file that is damaged


def test_damaged_files_are_named_keep_their_former_version_and_cost_the_others_nothing(
    docs, model, tmp_path, capsys
):
    records = ['{"_id": "1", "text": "Record one."}', '{"_id": "2", "text": "Record two."}']
    (docs / "r.jsonl").write_text("\n".join(records))
    store, words = tmp_path / "store", _words(docs, model, tmp_path / "store")
    assert main(words) == 0
    before = _contents(store)
    damaged = {
        "00.txt": b"\x00\x01\x02",
        "01.txt": b"caf\xe9",
        "r.jsonl": records[0].encode() + b"\n{",
        "new.pdf": b"%PDF-1.7 and no more",
        "new.docx": b"PK\x03\x04",
        "new.csv": b"a,b\n1,2\n",
    }
    for name, content in damaged.items():
        (docs / name).write_bytes(content)
    _write(docs, 2, "second")
    capsys.readouterr()
    assert main([*words, "--prune"]) == 1
    captured = capsys.readouterr()
    assert f"Documents: 0 added, 1 changed, 0 removed, 58 unchanged, {len(damaged)} failed." in captured.out
    assert all(f"{docs}/{name}" in captured.err for name in damaged) and "Traceback" not in captured.err
    after = _contents(store)
    for name in NAMES:
        lost = {text for text, _ in before[name].values()} - {text for text, _ in after[name].values()}
        assert lost and all("Text 2, first" in text or "Its second" in text for text in lost)
        assert len(after[name]) == len(before[name])


# A server that goes away


@pytest.fixture
def server() -> Iterator[FakeQdrant]:
    """A server that can be told to die."""
    fake = FakeQdrant()
    yield fake
    fake.stop()


def _held(server: FakeQdrant) -> dict[str, dict[str, set[str]]]:
    """By collection: source -> texts."""
    held: dict[str, dict[str, set[str]]] = {name: {} for name in NAMES}
    for name in NAMES:
        for record in server.engine.scroll(name, limit=10_000)[0]:
            held[name].setdefault(record.payload["source"], set()).add(record.id)
    return held


@pytest.mark.parametrize("writes", [0, 3, 10])
def test_a_server_that_goes_away_leaves_every_document_whole(
    server, docs, model, monkeypatch, capsys, writes
):
    """Each source has all of its old points or all of its new ones in every collection."""
    monkeypatch.setattr("rag_embfilter.ingestion.WINDOW", 16)
    monkeypatch.setattr("rag_embfilter.store.points.BATCH_POINTS", 8)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    chosen = ["--collection", "c", "--backbone", str(model), "--qdrant-url", server.url, *CHUNKS]
    words = ["ingest", str(docs), *chosen]
    assert main(words) == 0
    old = _held(server)
    for i in range(60):
        _write(docs, i, "second")
    capsys.readouterr()
    server.writes_left = writes
    assert main(words) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "trying again in" in said and "Traceback" not in said
    assert said.count("error:") == 1 and f"error: cannot reach Qdrant at {server.url}" in said
    partly = _held(server)
    server.start()
    assert main(words) == 0
    new = _held(server)
    for name in NAMES:
        for source in old[name]:
            assert not old[name][source] & new[name][source]
            assert partly[name][source] >= old[name][source] or partly[name][source] == new[name][source]
    assert any(partly[name] != old[name] for name in NAMES) == (writes > 0)
    assert main(words) == 0 and "Chunks: 0 encoded" in capsys.readouterr().out.split("Documents")[-1]
