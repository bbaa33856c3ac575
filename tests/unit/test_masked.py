"""Masked language models: the states their output matrix reads, padding, pooling, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from pipelines.app import main
from rag_embfilter import EmbFilter, Encoder
from rag_embfilter.backbone import load_backbone
from rag_embfilter.endpoint import EndpointEncoder
from rag_embfilter.errors import BackboneError, ConfigError
from rag_embfilter.export import export_sentence_transformers
from tests import tiny

TEXTS = ["a", "Rain fell on the old bridge.", "비가 내렸다", "x" * 90, "Rain fell on the old bridge."]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("masked")
    return {
        family: tiny.save_model(root / family, family, begin=True, end=True, pad="<pad>", tied=True)
        for family in tiny.MASKED_FAMILIES
    }


@pytest.fixture(scope="module")
def bert(folders):
    return str(folders["Bert"])


def plain_states(folder, ids):
    """What the output matrix is given for one unpadded row, seen by a hook on it."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]))
    return seen[0].reshape(len(ids), -1)


@pytest.mark.parametrize("family", tiny.MASKED_FAMILIES)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_plain_transformers(folders, family, pooling):
    encoder = Encoder(str(folders[family]), "plain", pooling, device="cpu")
    ours = encoder.encode_documents(TEXTS)
    assert encoder.stats.padding > 0  # so that a mask that does not reach the model is seen
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[family])
    for text, vector in zip(TEXTS, ours, strict=True):
        states = plain_states(folders[family], tokenizer(text)["input_ids"])
        pooled = states[0] if pooling == "cls" else states.mean(0)
        expected = torch.nn.functional.normalize(pooled, dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("family", tiny.MASKED_FAMILIES)
def test_the_filter_is_made_of_the_decoder_matrix(folders, family):
    model = transformers.AutoModelForMaskedLM.from_pretrained(folders[family])
    matrix = model.get_output_embeddings().weight.detach()
    encoder = Encoder(str(folders[family]), "plain", device="cpu")
    assert torch.equal(encoder.backbone.unembedding, matrix)
    used = matrix[encoder.backbone.used_rows].double().numpy()
    rows = np.linalg.svd(used, full_matrices=False)[2]  # from the largest singular value down
    hidden = rows.shape[1]
    middle = rows[hidden // 4 : hidden // 4 + hidden // 2]
    ours = EmbFilter.from_encoder(encoder, "edge", 2).matrix.astype(np.float64)
    np.testing.assert_allclose(ours.T @ ours, middle.T @ middle, atol=1e-4)


def test_a_template_counts_with_mean_pooling(bert):
    """As usual with masked models: everything they see is averaged."""
    encoder = Encoder(bert, "passage: {text}", "mean", device="cpu")
    ids = transformers.AutoTokenizer.from_pretrained(bert)("passage: Rain")["input_ids"]
    expected = torch.nn.functional.normalize(plain_states(bert, ids).mean(0), dim=0)
    np.testing.assert_allclose(encoder.encode_documents(["Rain"])[0], expected.numpy(), atol=1e-4)


def test_positions_of_xlm_roberta_begin_after_its_padding_token(folders):
    assert load_backbone(str(folders["XLMRoberta"]), device="cpu").max_positions == 2047
    assert load_backbone(str(folders["Bert"]), device="cpu").max_positions == 2048
    longest = Encoder(str(folders["XLMRoberta"]), "plain", device="cpu", max_length=2045)
    assert np.isfinite(longest.encode_documents(["x" * 5000])).all()
    with pytest.raises(ConfigError, match="max_length=2045 or less"):
        Encoder(str(folders["XLMRoberta"]), "plain", device="cpu", max_length=2046)


def test_poolings_that_say_nothing_are_refused(bert, llama):
    for template, pooling in (("prompteol", None), ("plain", "last"), ("plain", "last+mean")):
        with pytest.raises(ConfigError, match="pooling mean or cls"):
            Encoder(bert, template, pooling, device="cpu")
    with pytest.raises(ConfigError, match="Use last or mean"):
        Encoder(str(llama), "plain", "cls", device="cpu")


def test_padding_on_the_left_is_refused(bert):
    with pytest.raises(ConfigError, match="expected right"):
        Encoder(bert, "plain", device="cpu", padding_side="left")


def test_what_needs_a_causal_model_says_so(bert, tmp_path):
    encoder = Encoder(bert, "plain", device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="masked language model"):
        export_sentence_transformers(encoder, EmbFilter.from_encoder(encoder), tmp_path / "out")
    with pytest.raises(ConfigError, match="Encode here"):
        EndpointEncoder("http://localhost:1/v1", bert, "plain")


@pytest.mark.parametrize("family", ["FNet", "ConvBert", "Nystromformer", "Yoso"])
def test_a_family_in_which_padding_reaches_the_text_is_refused(family, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = getattr(transformers, f"{family}Config")(vocab_size=300, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(tmp_path / "m")
    tiny.tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(BackboneError, match="padding reaches"):
        load_backbone(str(tmp_path / "m"), device="cpu", dtype="float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_a_deep_model_in_a_half_is_not_taken_for_padding(dtype, tmp_path):
    folder = tiny.save_model(tmp_path / "m", "Bert", num_hidden_layers=24, tied=True)
    transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    assert load_backbone(str(folder), device="cpu", dtype="float32").unembedding.dtype == dtype


def test_a_dtype_that_a_family_does_not_compute_in_is_named(bert, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("Unsupported dtype BFloat16")

    from rag_embfilter import backbone

    monkeypatch.setattr(backbone, "_LOADED", {})
    monkeypatch.setattr(backbone, "_open", lambda model, name: setattr(model, "forward", refuse))
    with pytest.raises(BackboneError, match="Use dtype float32"):
        load_backbone(bert, device="cpu", dtype="bfloat16")


def test_an_encoder_decoder_is_refused(tmp_path):
    config = transformers.BartConfig(
        vocab_size=300, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path / "bart")
    tiny.tokenizer().save_pretrained(tmp_path / "bart")
    with pytest.raises(BackboneError, match="encoder-decoder"):
        load_backbone(str(tmp_path / "bart"), device="cpu")


def test_a_bare_encoder_is_refused(folders, tmp_path):
    for family in ("Bert", "DistilBert"):
        bare = transformers.AutoModel.from_pretrained(folders[family])
        bare.save_pretrained(tmp_path / family)
        tiny.tokenizer().save_pretrained(tmp_path / family)
        with pytest.raises(BackboneError, match="it is a bare encoder"):
            load_backbone(str(tmp_path / family), device="cpu")


def test_ingest_and_search(bert, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Rain fell on the old bridge.")
    (tmp_path / "docs" / "b.txt").write_text("The market opens at nine.")
    store = ["--qdrant-path", str(tmp_path / "qdrant")]
    made = ["--backbone", bert, "--template", "plain", "--device", "cpu", "--filter-ratios", "2"]
    assert main(["ingest", str(tmp_path / "docs"), "--collection", "c", *made, *store]) == 0
    assert main(["search", "The market opens at nine.", "--collection", "c", *store]) == 0
    assert "b.txt" in capsys.readouterr().out
