"""Exports: what the folder's tokenizer and modules say, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModel, AutoTokenizer

from pipelines.app import main
from rag_embfilter import EmbFilter, Encoder, export
from rag_embfilter.errors import ConfigError, ExportError
from rag_embfilter.export import export_sentence_transformers
from tests import tiny

pytest.importorskip("sentence_transformers", reason="the export extra is not installed")


@pytest.fixture
def unchecked(monkeypatch):
    """The check takes seconds to import sentence-transformers; integration tests run it."""
    monkeypatch.setattr(export, "_difference", lambda *given: 0.0)


def fitted(encoder, ratio=4):
    corpus = encoder.encode_documents([f"passage {i} of {i * i}" for i in range(40)])
    queries = encoder.encode_queries([f"where is {i}?" for i in range(6)])
    return EmbFilter.from_encoder(encoder, "calibrated", ratio, corpus=corpus, queries=queries)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2"])
@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.usefixtures("unchecked")
def test_the_saved_tokenizer_puts_the_template_around_every_text(family, begin, tmp_path):
    folder = tiny.save_model(tmp_path / "model", family, begin=begin, end=True)
    encoder = Encoder(str(folder), "search", max_length=24, device="cpu")
    report = export_sentence_transformers(
        encoder, EmbFilter.from_encoder(encoder, "edge", 2), tmp_path / "out"
    )
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    builder = encoder._builders[0]
    texts = ["abc", " x\ny", "<eos> and <bos>", "é" * 12, ""]
    expected = [row.ids.tolist() for row in builder.rows(texts, "document")]
    assert saved(texts)["input_ids"] == expected
    head, tail = [builder.begin + builder.words["document"][0], builder.words["document"][1]]
    long = saved("0123456789" * 4, truncation=True)["input_ids"]
    assert long == head + builder.text_ids(["0123456789" * 4])[0][:24] + tail
    assert report.max_tokens == len(long) == saved.model_max_length
    assert saved.chat_template is None


@pytest.mark.usefixtures("unchecked")
def test_a_plain_filter_is_one_dense_module_that_servers_apply(encoder, tmp_path):
    edge = EmbFilter.from_encoder(encoder, "edge", 4)
    out = tmp_path / "out"
    export_sentence_transformers(encoder, edge, out)
    modules = [(m["path"], m["type"].split(".")[-1]) for m in json.loads((out / "modules.json").read_text())]
    assert modules == [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        ("2_Dense", "Dense"),
        ("3_Normalize", "Normalize"),
    ]
    assert load_file(out / "2_Dense/model.safetensors").keys() == {"linear.weight"}
    pooling = json.loads((out / "1_Pooling/config.json").read_text())
    assert [key for key in pooling if pooling[key] is True] == ["pooling_mode_lasttoken", "include_prompt"]


@pytest.mark.usefixtures("unchecked")
def test_offsets_become_biases_by_role(encoder, tmp_path):
    calibrated = fitted(encoder)
    out = tmp_path / "out"
    export_sentence_transformers(encoder, calibrated, out)
    texts = ["hello there", "good day"]
    saved = AutoTokenizer.from_pretrained(out)
    model = AutoModel.from_pretrained(out).eval()
    for role, raw in (
        ("document", encoder.encode_documents(texts)),
        ("query", encoder.encode_queries(texts)),
    ):
        dense = load_file(out / f"3_Router/{role}_0_Dense/model.safetensors")
        with torch.inference_mode():
            states = [model(**saved(t, return_tensors="pt")).last_hidden_state[0, -1] for t in texts]
        units = torch.nn.functional.normalize(torch.stack(states)).numpy()
        made = units @ dense["linear.weight"].T + dense["linear.bias"]
        made /= np.linalg.norm(made, axis=1, keepdims=True)
        np.testing.assert_allclose(made, calibrated.apply(raw, role), atol=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_queries_with_words_of_their_own_have_a_transformer_of_their_own(llama, tmp_path):
    encoder = Encoder(str(llama), device="cpu", query_template="search")
    out = tmp_path / "out"
    report = export_sentence_transformers(encoder, EmbFilter.from_encoder(encoder, "edge", 2), out)
    assert report.copies == 2
    for role in ("document", "query"):
        saved = AutoTokenizer.from_pretrained(out / f"{role}_0_Transformer")
        assert saved("abc")["input_ids"] == encoder._builders[0].rows(["abc"], role)[0].ids.tolist()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"template": "echo"}, "second copy"),
        ({"pooling": "last+mean"}, "joins before it scales"),
        ({"template": ["prompteol", "topic"]}, "joins before it scales"),
        ({"pooling": "mean"}, "before the text"),
        ({"dtype": "bfloat16"}, "float32"),
    ],
)
def test_what_cannot_be_expressed_is_refused(llama, tmp_path, settings, why):
    encoder = Encoder(str(llama), **({"device": "cpu"} | settings))
    with pytest.raises(ConfigError, match=why):
        export_sentence_transformers(encoder, EmbFilter.from_encoder(encoder, "raw"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_gives_other_vectors_is_not_written(encoder, tmp_path, monkeypatch):
    edge = EmbFilter.from_encoder(encoder, "edge", 2)

    def slightly_off(texts, folder):
        made = edge.apply(encoder.encode_documents(list(texts)))
        return {"document": made, "query": made + np.float32(2e-5)}

    monkeypatch.setattr(export, "_encoded_elsewhere", slightly_off)
    with pytest.raises(ExportError, match="2e-05"):
        export_sentence_transformers(encoder, edge, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_check_says_why(encoder, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nOSError: no such model")
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: failed)
    with pytest.raises(ExportError, match="no such model"):
        export_sentence_transformers(encoder, EmbFilter.from_encoder(encoder, "edge", 2), tmp_path / "out")


def test_check_texts_reach_the_limit(llama):
    encoder = Encoder(str(llama), device="cpu", max_length=40)
    lengths = [encoder.count_tokens(text) for text in export.check_texts(encoder)]
    assert 36 <= max(lengths) <= 40


def test_the_command_names_what_is_wrong(llama, tmp_path, capsys):
    out = str(tmp_path / "out")
    given = ["export", out, "--backbone", str(llama)]
    assert main([*given, "--filter-types", "calibrated"]) == 1
    assert "--collection NAME" in capsys.readouterr().err
    assert main([*given, "--format", "onnx"]) == 1
    assert "sentence-transformers" in capsys.readouterr().err
    assert main(["export", str(llama), "--backbone", str(llama)]) == 1
    assert "exists" in capsys.readouterr().err
    assert Path(llama, "config.json").is_file()
