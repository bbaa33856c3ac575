"""Fixtures of the command line: documents, an eval set, and a way to run commands in this process."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.app import main
from tests.unit.cli.checks import HOLIDAY, LAPTOP


@pytest.fixture(autouse=True)
def logging_as_before():
    """The command line sets up logging for its whole process, which here is that of all tests."""
    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = kept
    root.setLevel(level)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A text, a page and two records."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text(LAPTOP)
    (folder / "b.md").write_text(HOLIDAY)
    records = [
        {"_id": "1", "title": "Bikes", "text": "They are kept below.", "team": "HR", "floor": 3},
        {"_id": "2", "text": "Trains run late.", "team": "IT", "floor": 4},
    ]
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture
def run(tmp_path, llama, encoder, capsys):
    """Runs a command on a store and a backbone of this test's own; `encoder` keeps its weights loaded."""

    def run_command(*words: object) -> SimpleNamespace:
        given = [str(word) for word in words]
        if given[0] in ("ingest", "evaluate") and "--backbone" not in given:
            given += ["--backbone", str(llama)]
        if given[0] in ("ingest", "evaluate", "search") and "--device" not in given:
            given += ["--device", "cpu"]
        if "--qdrant-path" not in given and given[0] not in ("compare", "check-eval-set", "make-eval-set"):
            given += ["--qdrant-path", str(tmp_path / "qdrant")]
        capsys.readouterr()
        code = main(given)
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run_command


@pytest.fixture
def stored(run, docs):
    """The documents under the base name `docs`: raw and edge-r2."""
    assert run("ingest", docs, "--collection", "docs").code == 0
    return docs


@pytest.fixture
def eval_set(tmp_path: Path) -> Path:
    """Two passages; both questions are the first one's text, and the second question wants the other."""
    folder = tmp_path / "sets" / "tiny"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": "p1", "title": "", "text": LAPTOP}, {"_id": "p2", "title": "", "text": HOLIDAY}]
    queries = [{"_id": "q1", "text": LAPTOP}, {"_id": "q2", "text": LAPTOP}]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\tp1\t1\nq2\tp2\t1\n")
    return folder
