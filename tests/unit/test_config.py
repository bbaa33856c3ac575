"""Configurations: written, read back, refused, and turned into an embedder."""

from __future__ import annotations

import json

import pytest

from rag_embfilter import EmbFilter, EmbFilterEmbedding, Encoder
from rag_embfilter.config import Config
from rag_embfilter.errors import ConfigError


def test_reads_what_it_wrote_and_finds_the_filter_beside_it(tmp_path):
    config = Config(
        "m",
        ["plain", "echo"],
        "calibrated",
        4,
        99,
        pooling="last",
        filter_file=str(tmp_path / "f.safetensors"),
    )
    config.write(tmp_path / "c.json")
    found = Config.read(tmp_path / "c.json")
    assert found.filter_file == str(tmp_path / "f.safetensors")
    assert (found.templates, found.pooling, found.max_length) == (["plain", "echo"], "last", 99)
    assert "revision" not in json.loads((tmp_path / "c.json").read_text())
    found.write(tmp_path / "again.json")  # a path from here is a path beside the file again
    assert Config.read(tmp_path / "again.json") == found


def test_an_embedder_from_a_config_and_what_goes_before_it(llama, tmp_path):
    Config(str(llama), "echo", "tail", 4, 64, pooling="last").write(tmp_path / "c.json")
    embedding = EmbFilterEmbedding.from_config(tmp_path / "c.json", device="cpu")
    same = EmbFilterEmbedding(
        model_name=str(llama),
        template="echo",
        pooling="last",
        filter_type="tail",
        filter_ratio=4,
        max_length=64,
    )
    assert embedding.fingerprint == same.fingerprint
    assert EmbFilterEmbedding.from_config(tmp_path / "c.json", filter_ratio=2).filter.name == "tail-r2"


def test_a_fitted_type_needs_its_filter(llama, tmp_path):
    Config(str(llama), "plain", "calibrated", 4).write(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="holds no fit. Give filter_file="):
        EmbFilterEmbedding.from_config(tmp_path / "c.json")
    encoder = Encoder(str(llama), "plain")
    corpus = encoder.encode_documents([f"text {i}" for i in range(40)])
    EmbFilter.from_encoder(encoder, "calibrated", 4, corpus=corpus).save(tmp_path / "f.safetensors")
    made = EmbFilterEmbedding.from_config(tmp_path / "c.json", filter_file=tmp_path / "f.safetensors")
    assert made.filter.name == "calibrated-r4"
    Config(
        str(llama), "plain", "calibrated", 4, filter_file=str(tmp_path / "f.safetensors"), fingerprint="x"
    ).write(tmp_path / "d.json")
    other = EmbFilterEmbedding.from_config(tmp_path / "d.json", filter_type="edge", filter_ratio=2)
    moved = EmbFilterEmbedding.from_config(
        tmp_path / "d.json", filter_type="edge", filter_ratio=4, band_start=0, query_template="question"
    )
    assert moved.filter.name == "edge-r4-b0"
    assert other.filter.name == "edge-r2"  # another filter leaves file and fingerprint behind


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "null", "3", '{"template": "plain"}', '{"model_name": "m", "template": 3}',
        '{"model_name": 1, "template": "plain"}', '{"model_name": "m", "template": "plain", "colour": 1}',
        '{"model_name": "m", "template": [1]}',
        '{"model_name": "m", "template": "plain", "filter_type": "x"}',
        '{"model_name": "m", "template": "plain", "filter_type": []}',
        '{"model_name": "m", "template": "plain", "example_questions": 3}',
        '{"model_name": "m", "template": "plain", "filter_file": 3}',
        '{"model_name": "m", "template": "plain", "example_questions": "What?"}',
        '{"model_name": "m", "template": "plain", "keep": "0.8"}',
        '{"model_name": "m", "template": "plain", "keep": NaN}',
        '{"model_name": "m", "template": "plain", "keep": 5}',
        '{"model_name": "m", "template": "plain", "max_length": null}',
        '{"model_name": "m", "template": "plain", "filter_ratio": [2]}',
        '{"model_name": "m", "template": {"plain": 1}}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_another_kind_of_file_is_refused(tmp_path, content):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ConfigError, match=r"c.json' is not what `choose --config` writes"):
        Config.read(tmp_path / "c.json")
