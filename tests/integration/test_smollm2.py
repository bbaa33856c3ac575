"""The packaged SmolLM2 itself: known values, the plain transformers recipe, and the figures to reproduce."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pipelines.app import main
from rag_embfilter import EmbFilter, Encoder, EvalSet, Store, evaluate
from rag_embfilter.chat.backbone_llm import causal_lm
from rag_embfilter.checkpoints import PACKAGED, packaged_gguf
from rag_embfilter.errors import BackboneError
from rag_embfilter.files import file_sha256
from rag_embfilter.spectrum import Spectrum

TEXTS = [
    "Paris",
    "My laptop was stolen on the train.",
    "비밀번호를 잊어버렸어요",
    "Where can I park?\nAnd for how long? " * 9,
    'quotes " and {braces} <|im_end|>',
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """SmolLM2 with PromptEOL in float32 on the CPU."""
    try:
        packaged_gguf("smollm2")
    except BackboneError as error:
        pytest.skip(str(error))
    return Encoder("smollm2", device="cpu", dtype="float32", max_length=40)


def test_the_packaged_weights_are_the_ones_expected():
    try:
        path = packaged_gguf("smollm2")
    except BackboneError as error:
        pytest.skip(str(error))
    assert file_sha256(path) == PACKAGED["smollm2"][2]


@pytest.mark.parametrize("template", ["prompteol", "echo"])
def test_equals_plain_transformers_on_the_gguf_itself(encoder, template):
    """Loaded by transformers from the GGUF, not from our converted copy; ids joined here."""
    path = packaged_gguf("smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tested = encoder if template == "prompteol" else Encoder(encoder.backbone, template, max_length=40)
    ours = tested.encode_documents(TEXTS)

    def ids(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False)["input_ids"]

    for text, vector in zip(TEXTS, ours, strict=True):
        body = ids(text)
        if template == "prompteol":
            body = body if len(body) <= 40 else body[:20] + body[-20:]
            row, start = ids('Summarize the sentence: "') + body + ids('" in one word:"'), None
        else:
            body, end = body[:40], [tokenizer.eos_token_id]
            before = (
                end + ids("Rewrite the following paragraph: ") + body + ids(". The rewritten paragraph: ")
            )
            row, start = before + body + end, len(before)
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states[-1][0]
        expected = torch.nn.functional.normalize(
            hidden[-1] if start is None else hidden[start:].mean(0), dim=0
        )
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_edge_is_the_middle_of_torchs_svd(encoder):
    unembedding = encoder.backbone.unembedding.float()
    _, values, directions = torch.linalg.svd(unembedding, full_matrices=False)
    middle = directions[144:432].numpy()
    matrix = EmbFilter.from_encoder(encoder, "edge", 2).matrix
    signs = np.sign((matrix * middle).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(matrix, signs * middle, atol=2e-2)
    assert np.linalg.norm(matrix.T @ matrix - middle.T @ middle) < 1e-2
    np.testing.assert_allclose(Spectrum.of(unembedding).singular_values, values.numpy(), rtol=1e-3)


def test_batches_change_nothing(encoder):
    alone = Encoder(encoder.backbone, max_length=40, batch_tokens=1).encode_documents(TEXTS)
    left = Encoder(encoder.backbone, max_length=40, padding_side="left").encode_documents(TEXTS[::-1])
    np.testing.assert_allclose(encoder.encode_documents(TEXTS), alone, atol=1e-4)
    np.testing.assert_allclose(left[::-1], alone, atol=1e-4)


def test_bfloat16_stays_close(encoder):
    half = Encoder("smollm2", device="cpu", dtype="bfloat16", max_length=40)
    assert (half.encode_documents(TEXTS) * encoder.encode_documents(TEXTS)).sum(axis=1).min() > 0.99


@pytest.mark.gpu
def test_cuda_equals_the_cpu(encoder):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    exact = Encoder("smollm2", device="cuda", dtype="float32", max_length=40)
    np.testing.assert_allclose(exact.encode_documents(TEXTS), encoder.encode_documents(TEXTS), atol=1e-3)
    fast = Encoder("smollm2", device="cuda", max_length=40)
    assert fast.backbone.dtype == torch.bfloat16
    assert (fast.encode_documents(TEXTS) * encoder.encode_documents(TEXTS)).sum(axis=1).min() > 0.99


def test_the_filter_beats_raw_on_the_projects_own_domain(encoder, tmp_path):
    full = Encoder(encoder.backbone)
    filters = [EmbFilter.from_encoder(full, "edge", ratio) for ratio in (2, 4)]
    with Store(path=tmp_path / "q") as store:
        evaluation = evaluate(EvalSet.load(Path("eval_sets/faq")), full, filters, store)
    raw, edge, _ = evaluation.results
    assert edge.versus_raw.verdict == "better"
    assert edge.metrics.mean() - raw.metrics.mean() > 0.1
    assert evaluation.best() is edge


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "figures"),
    [("echo", (69.5, 81.0, 75.6, 62.3)), ("prompteol", (67.1, 71.8, 66.9, 58.6))],
)
def test_figures_measured_before_come_out_again(encoder, datasets, tmp_path, template, figures):
    """xquad-en, nDCG@10 of raw and edge at 2, 4, 8, within a point, through the command line."""
    code = main(
        ["evaluate", str(datasets / "xquad-en"), "--template", template, "--filter-types", "edge"]
        + ["--filter-ratios", "2", "4", "8", "--max-length", "256", "--no-ragas", "--dtype", "float32"]
        + ["--qdrant-path", str(tmp_path / "q"), "--json", str(tmp_path / "r.json")]
    )
    assert code == 0
    (page,) = json.loads((tmp_path / "r.json").read_text())["sets"]
    measured = [100 * result["metrics"]["ndcg_at_10"] for result in page["results"]]
    assert [result["filter"] for result in page["results"]] == ["raw", "edge-r2", "edge-r4", "edge-r8"]
    np.testing.assert_allclose(measured, figures, atol=1.0)


def test_the_penaltys_example_runs_and_its_training_lowers_it(encoder):
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "docs" / "examples" / "penalty.py")]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    energies = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(energies) == 10 and energies[-1] < energies[0] - 0.005


def test_the_chats_example_runs_and_writes_with_the_embedders_weights(encoder):
    pytest.importorskip("llama_index.llms.huggingface", reason="llama-index-llms-huggingface (extra chat)")
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "docs" / "examples" / "chat.py")]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("A hotel may cost up to 140 euros a night.")
    whole = causal_lm(encoder.backbone)
    held = {p.data_ptr() for p in encoder.backbone.model.parameters()}
    assert {p.data_ptr() for p in whole.parameters()} == held
