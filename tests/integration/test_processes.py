"""One process per device, and torch.compile: the same vectors another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rag_embfilter import Encoder
from rag_embfilter.errors import ClusterError
from rag_embfilter.processes import ProcessPasses
from tests import tiny

TEXTS = ["x" * n for n in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)] + ["Paris", "안녕", "two words"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def pair(llama):
    """Two processes on the CPU, in place of two GPUs."""
    encoder = Encoder(str(llama), device="cpu")
    encoder._passes = ProcessPasses(encoder.backbone, ["cpu", "cpu"], 300)
    with encoder:
        yield encoder


def test_one_process_per_device_gives_the_same_vectors_stats_and_faults(pair, llama):
    alone = Encoder(str(llama), device="cpu")
    seen = []
    ours = pair.encode_documents(TEXTS, progress=seen.append)
    np.testing.assert_allclose(ours, alone.encode_documents(TEXTS), atol=1e-5)
    assert sum(seen) == len(TEXTS)
    both = [e.stats.tokens + e.stats.saved for e in (pair, alone)]
    assert both[0] == both[1] and pair.encode_documents([]).shape == (0, 32)
    # A process that dies is told, and the next call starts anew.
    for process in pair._passes._pool._processes.values():
        process.kill()
    with pytest.raises(ClusterError, match="a process for one of cpu, cpu died"):
        pair.encode_documents(TEXTS)
    np.testing.assert_allclose(pair.encode_documents(TEXTS), ours, atol=1e-5)


def test_torch_compile_gives_the_same_vectors(llama):
    plain = Encoder(str(llama), device="cpu")
    compiled = Encoder(str(llama), device="cpu", torch_compile=True)
    # Traced and run as it is: the compiler's own back end wants a C++ compiler.
    compiled._passes.model = torch.compile(plain.backbone.model, dynamic=True, backend="eager")
    np.testing.assert_allclose(compiled.encode_documents(TEXTS), plain.encode_documents(TEXTS), atol=1e-5)
