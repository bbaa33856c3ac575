"""A judge that is really served: `transformers serve` with the packaged SmolLM2, far too small to judge."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from pipelines.app import main
from rag_embfilter.backbone import load_backbone
from rag_embfilter.checkpoints import packaged_gguf
from rag_embfilter.errors import BackboneError
from rag_embfilter.files import cache_folder, file_sha256

PATIENCE = 180  # seconds for the server to be ready
METRIC = "answer_relevancy"  # RAGAS's shortest prompt


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2 as a folder that can be served: our converted copy does not say what class it is."""
    try:
        gguf = packaged_gguf("smollm2")
    except BackboneError as error:
        pytest.skip(str(error))
    load_backbone("smollm2", device="cpu")
    converted = cache_folder("backbones") / file_sha256(gguf)
    folder = tmp_path_factory.mktemp("smollm2")
    for file in converted.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((converted / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def served(smollm2, tmp_path_factory):
    """`transformers serve` on a free port, as a word for `--judge`."""
    for needed in ("ragas", "fastapi", "uvicorn"):
        pytest.importorskip(needed)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", smollm2, "--device", "cpu"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=stream,
            stderr=stream,
        )
    try:
        end = time.monotonic() + PATIENCE
        while not _healthy(port):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.5)
        yield f"openai:{smollm2}@http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.wait()


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def two_questions(tmp_path) -> Path:
    folder = tmp_path / "sets" / "two"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": "p1", "text": "Badges are at reception."}, {"_id": "p2", "text": "Lunch is at noon."}]
    queries = [
        {"_id": "q1", "text": "Where are badges?", "metadata": {"answers": ["At reception."]}},
        {"_id": "q2", "text": "When is lunch?", "metadata": {"answers": ["At noon."]}},
    ]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\tp1\t1\nq2\tp2\t1\n")
    return folder


@pytest.mark.slow
def test_a_run_with_a_judge_too_small_ends_with_everything_counted(
    served, two_questions, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("EMBFILTER_CACHE", str(tmp_path / "cache"))
    words = ["evaluate", two_questions, "--qdrant-path", tmp_path / "qdrant", "--device", "cpu"]
    words += ["--backbone", served.removeprefix("openai:").rpartition("@")[0], "--filter-ratios", "2"]
    words += ["--judge", served, "--judged-metrics", METRIC, "--judge-filters", "raw", "--judge-top-k", "1"]
    words += ["--judge-timeout", "30", "--judge-max-tokens", "24", "--concurrency", "1", "--max-failed", "1"]
    assert main([str(word) for word in [*words, "--json", tmp_path / "result.json"]]) == 0
    assert "RAGAS, judged by" in capsys.readouterr().out
    (page,) = json.loads((tmp_path / "result.json").read_text())["sets"]
    raw = page["results"][0]
    metric = raw["ragas"][METRIC]
    assert metric["scored"] + metric["failed"] == 2
    assert set(metric["scores"]) | set(metric["failures"]) == {"q1", "q2"}
    assert sum(metric["reasons"].values()) == metric["failed"]
    assert all(answer["text"] or answer["failure"] for answer in raw["answers"].values())
    assert 2 <= page["judge"]["usage"][served]["calls"] <= 4
