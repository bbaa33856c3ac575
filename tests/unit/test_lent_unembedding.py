"""Embedders that lost their unembedding, and the causal LM that lends it."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
import transformers

from pipelines.app import main
from pipelines.options import lent
from rag_embfilter import EmbFilter, EmbFilterEmbedding, Encoder
from rag_embfilter.backbone import load_backbone, origin
from rag_embfilter.errors import BackboneError, ConfigError
from tests import tiny

TEXTS = ["Rain fell on the old bridge.", "The market opens at nine."]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("lender") / "base", "Qwen3")


@pytest.fixture(scope="module")
def embedder(base, tmp_path_factory):
    """The base model after some training, without an output matrix."""
    folder = tmp_path_factory.mktemp("embedder") / "embedder"
    model = transformers.AutoModel.from_pretrained(base)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def test_alone_it_is_refused_with_the_way_out(embedder):
    with pytest.raises(BackboneError, match=r"lacks weights .*--unembedding-from"):
        load_backbone(str(embedder), device="cpu")


def test_vectors_are_the_embedders_and_the_filter_the_bases(embedder, base):
    encoder = Encoder(f"{embedder}::{base}", device="cpu", dtype="float32")
    head = transformers.AutoModelForCausalLM.from_pretrained(base).get_output_embeddings().weight
    assert torch.equal(encoder.backbone.unembedding, head)
    states = transformers.AutoModel.from_pretrained(embedder, dtype=torch.float32).eval()
    ids = encoder._rows(TEXTS, "document")[0][0].ids
    with torch.inference_mode():
        last = states(input_ids=torch.tensor(ids[None].astype(np.int64))).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(last, dim=0).numpy()
    np.testing.assert_allclose(encoder.encode_documents(TEXTS)[0], expected, atol=1e-5)
    ours = EmbFilter.from_encoder(encoder, "edge", 2).fingerprint
    assert (
        ours.digest == EmbFilter.from_encoder(Encoder(str(base), device="cpu"), "edge", 2).fingerprint.digest
    )


def test_an_embedder_that_kept_its_unembedding_needs_no_lender(base):
    assert Encoder(str(base), device="cpu").backbone.unembedding.shape[1] == 32


def test_another_model_is_no_lender(embedder, base, llama, tmp_path):
    other = tiny.save_model(tmp_path / "other", "Qwen3", seed=9)
    wide = tiny.save_model(tmp_path / "wide", "Qwen3", hidden_size=64)
    for lender in (other, wide, llama):
        with pytest.raises(BackboneError, match="was not trained from"):
            load_backbone(f"{embedder}::{lender}", device="cpu")
    bert = tiny.save_model(tmp_path / "bert", "Bert", tied=True)
    with pytest.raises(BackboneError, match="expected a causal one"):
        load_backbone(f"{embedder}::{bert}", device="cpu")
    with pytest.raises(BackboneError, match="no such file"):
        load_backbone(f"{embedder}::./nowhere", device="cpu")
    for half in (f"{embedder}::", "::x"):
        with pytest.raises(ConfigError, match="expected EMBEDDER::BASE"):
            load_backbone(half, device="cpu")
    with pytest.raises(BackboneError, match=r"the output matrix too\.$"):  # no advice to lend it one
        load_backbone(f"{embedder}::{embedder}", device="cpu")
    bare = tmp_path / "bare"
    transformers.AutoModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(bare)
    tiny.tokenizer().save_pretrained(bare)
    with pytest.raises(BackboneError, match="is not causal"):
        load_backbone(f"{bare}::{base}", device="cpu")
    with pytest.raises(ConfigError, match="names its base already"):
        lent(f"{embedder}::{base}", str(base))


def test_a_path_may_hold_the_sign(tmp_path):
    odd = tiny.save_model(tmp_path / "a::b")
    backbone = load_backbone(str(odd), device="cpu")
    assert origin(backbone) == (str(odd), None)


def test_an_embedder_that_looks_both_ways_is_refused(tmp_path):
    base = tiny.save_model(tmp_path / "base", "Gemma3Text")
    config = transformers.AutoConfig.from_pretrained(base)
    config.use_bidirectional_attention = True
    transformers.AutoModel.from_pretrained(base, config=config).save_pretrained(tmp_path / "embedder")
    tiny.tokenizer().save_pretrained(tmp_path / "embedder")
    with pytest.raises(BackboneError, match="is not causal"):
        load_backbone(f"{tmp_path / 'embedder'}::{base}", device="cpu")


def test_it_travels_by_both_names(embedder, base, tmp_path, monkeypatch):
    shutil.copytree(embedder, tmp_path / "e")
    shutil.copytree(base, tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    backbone = load_backbone("./e::./b", device="cpu")
    assert origin(backbone) == (f"{tmp_path / 'e'}::{tmp_path / 'b'}", None)
    assert pickle.loads(pickle.dumps(backbone)) is backbone
    assert backbone.identity.startswith("sha256:")


def test_the_command_line_and_llama_index(embedder, base, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    for name, text in zip("ab", TEXTS, strict=True):
        (tmp_path / "docs" / f"{name}.txt").write_text(text)
    store = ["--qdrant-path", str(tmp_path / "qdrant")]
    made = ["--backbone", str(embedder), "--unembedding-from", str(base), "--device", "cpu"]
    assert main(["ingest", str(tmp_path / "docs"), "--collection", "c", *made, *store]) == 0
    assert main(["search", TEXTS[1], "--collection", "c-edge-r2", *store, "--json", str(tmp_path / "o")]) == 0
    assert "b.txt" in json.dumps(json.loads((tmp_path / "o").read_text()))
    capsys.readouterr()
    embedding = EmbFilterEmbedding(model_name=f"{embedder}::{base}", device="cpu")
    assert len(embedding.get_text_embedding(TEXTS[0])) == 16
