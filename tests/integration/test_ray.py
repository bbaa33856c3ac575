"""Encoding on Ray actors: the local encoder's vectors, whatever happens to an actor on the way."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.app import main
from rag_embfilter import Encoder, Store, distributed
from rag_embfilter.distributed import RayEncoder
from rag_embfilter.errors import BackboneError, ClusterError, EncodingError, FingerprintMismatch
from tests import tiny

ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'rag-embfilter[ray]')")
SETTINGS = {"max_length": 60, "pooling": "last+mean", "device": "cpu", "batch_tokens": 128}
# Short and long ones in no order, some over the limit, some twice.
TEXTS = [f"{'word ' * (7 * i % 16)}{i % 90}" for i in range(100)]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBFILTER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("RAY_ADDRESS", raising=False)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the actors want the other processors
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny model for which `#` has no numbers."""
    folder = tiny.save_model(tmp_path_factory.mktemp("models") / "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (token,) = tiny.tokenizer()("#", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    model.save_pretrained(folder)
    return folder


def test_the_command_stores_what_the_local_engine_stores(llama, tmp_path):
    """On a cluster of its own, which ends with the command."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for i in range(6):
        (docs / f"{i}.txt").write_text(" ".join(f"Sentence {j} of text {i}." for j in range(8 * i + 1)))
    before = ray.is_initialized()
    stored = {}
    for engine, words in (("local", []), ("ray", ["--engine", "ray", "--num-actors", "2"])):
        path, result = tmp_path / engine, tmp_path / f"{engine}.json"
        common = ["--collection", "c", "--backbone", str(llama), "--device", "cpu", "--chunk-size", "64"]
        where = ["--qdrant-path", str(path), "--json", str(result)]
        assert main(["ingest", str(docs), *common, *where, *words]) == 0
        with Store(path=path) as store:
            ids = sorted(str(record.id) for record in store.client.scroll("c-edge-r2", limit=1000)[0])
            stored[engine] = ids, store.vectors("c-raw", ids), store.vectors("c-edge-r2", ids)
    assert ray.is_initialized() == before
    assert json.loads(result.read_text())["ingest"]["engine"] == "ray, 2 actors on cpu"
    assert stored["ray"][0] == stored["local"][0] and len(stored["ray"][0]) > 20
    for ours, theirs in zip(stored["ray"][1:], stored["local"][1:], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.fixture(scope="module")
def cluster():
    """A cluster that was there before, and so must outlive every encoder."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    assert ray.is_initialized()
    ray.shutdown()


@pytest.fixture(scope="module")
def local(llama):
    return Encoder(str(llama), **SETTINGS)


@pytest.fixture(scope="module")
def spread(cluster, llama):
    with RayEncoder(str(llama), **SETTINGS, num_actors=2) as encoder:
        yield encoder


def _pids(encoder) -> list[int]:
    """Processes of the actors that have said hello; one that took over a moment ago may not have."""
    greeted = [member.name for member in encoder._crew.members if "process " in member.name]
    return [int(name.split("process ")[1].rstrip(")")) for name in greeted]


def _gone(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("verb", ["encode_documents", "encode_queries"])
def test_vectors_counts_and_progress_are_the_local_ones(local, spread, verb):
    assert spread.fingerprint == local.fingerprint and spread.settings == local.settings
    before = vars(local.stats).copy(), vars(spread.stats).copy()
    done = []
    ours = getattr(spread, verb)(TEXTS, progress=done.append)
    np.testing.assert_allclose(ours, getattr(local, verb)(TEXTS), atol=1e-5)
    assert sum(done) == len(TEXTS) and len(done) >= 4
    grown = [
        {key: vars(encoder.stats)[key] - old[key] for key in ("texts", "truncated", "tokens_lost")}
        for encoder, old in zip((local, spread), before, strict=True)
    ]
    assert grown[0] == grown[1] and grown[1]["truncated"] > 10


def test_failing_rows_are_named_by_their_place_and_the_others_kept(local, spread):
    texts = [*TEXTS[:20], "not a # number", *TEXTS[20:40], " ", "# again"]
    failed = []
    for encoder in (local, spread):
        with pytest.raises(EncodingError) as caught:
            encoder.encode_documents(texts)
        failed.append(caught.value)
    assert failed[1].problems == failed[0].problems and set(failed[1].problems) == {20, 41, 42}
    np.testing.assert_allclose(failed[1].embeddings, failed[0].embeddings, atol=1e-5)


def test_actors_killed_at_work_lose_nothing(local, spread, caplog):
    spread.encode_documents(TEXTS[:4])
    killed = []

    def kill(done: int) -> None:
        if not killed:
            killed.extend(_pids(spread))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    done = []
    with caplog.at_level(logging.WARNING):
        ours = spread.encode_documents(TEXTS, progress=lambda n: (done.append(n), kill(n)))
    np.testing.assert_allclose(ours, local.encode_documents(TEXTS), atol=1e-5)
    assert sum(done) == len(TEXTS)
    assert sum("another one takes over" in line for line in caplog.messages) == 2
    assert len(killed) == 2 and not set(killed) & set(_pids(spread))


def test_a_run_that_is_stopped_ends_its_actors_and_the_next_one_works(local, spread):
    spread.encode_documents(TEXTS[:4])
    actors = _pids(spread)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spread.encode_documents(TEXTS, progress=stop)
    assert all(map(_gone, actors))
    np.testing.assert_allclose(
        spread.encode_documents(TEXTS[:9]), local.encode_documents(TEXTS[:9]), atol=1e-5
    )


class Fragile(distributed._Worker):
    """A process that some texts kill, as a driver's or a library's fault can."""

    def encode(self, texts, role):
        if any("!" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(texts, role)


def test_a_part_that_kills_every_actor_is_an_error(spread, llama, monkeypatch):
    spread.close()  # it holds the cluster's processors
    monkeypatch.setattr(distributed, "_Worker", Fragile)
    monkeypatch.setattr(distributed, "MAX_LOSSES", 2)
    with RayEncoder(str(llama), num_actors=1, device="cpu") as encoder:
        assert encoder.encode_documents(["harmless"]).shape == (1, 32)
        with pytest.raises(ClusterError, match="2 actors were lost one after the other"):
            encoder.encode_documents(["harmless", "deadly!"])
    assert ray.is_initialized()


def test_other_weights_on_an_actors_machine_are_refused(spread, llama, tmp_path):
    spread.close()
    folder = shutil.copytree(llama, tmp_path / "llama")
    with RayEncoder(str(folder), num_actors=1, device="cpu") as encoder:
        tiny.save_model(folder, seed=1)
        with pytest.raises(FingerprintMismatch, match=r"(?s)backbone: 'sha256:.*!= 'sha256:.*same weights"):
            encoder.encode_documents(["text"])
        shutil.rmtree(folder)
        with pytest.raises(BackboneError, match="on machine .* no such file or folder"):
            encoder.encode_documents(["text"])
