"""Layouts: what is asked of a server for a new collection, and with each query."""

from __future__ import annotations

import pytest
from qdrant_client import models

from pipelines.app import main
from rag_embfilter import EmbFilter, Store
from rag_embfilter.errors import ConfigError
from rag_embfilter.store.layout import Layout, search_params


@pytest.fixture
def edge(encoder) -> EmbFilter:
    return EmbFilter.from_encoder(encoder, "edge", 4)


def _asked(monkeypatch, store, encoder, embfilter) -> dict:
    asked: dict = {}
    real = store.client.create_collection

    def noting(name, **settings):
        asked.update(settings)
        return real(name, **settings)

    monkeypatch.setattr(store.client, "create_collection", noting)
    store.create("c", encoder, embfilter, "c")
    return asked


def test_what_is_set_is_asked_for_and_nothing_else(store, encoder, edge, monkeypatch):
    asked = _asked(monkeypatch, store, encoder, edge)
    assert set(asked) == {"vectors_config", "metadata"}
    params = asked["vectors_config"]["text-dense"]
    assert (params.datatype, params.on_disk, params.hnsw_config) == (None, None, None)


def test_a_whole_layout(tmp_path, encoder, edge, monkeypatch):
    layout = Layout("scalar", on_disk=True, float16=True, hnsw_m=8, shards=3, replicas=2)
    with Store(path=tmp_path / "q", layout=layout) as store:
        asked = _asked(monkeypatch, store, encoder, edge)
    params = asked["vectors_config"]["text-dense"]
    assert (params.size, params.datatype, params.on_disk) == (8, models.Datatype.FLOAT16, True)
    assert (asked["shard_number"], asked["replication_factor"], asked["hnsw_config"].m) == (3, 2, 8)
    assert asked["quantization_config"].scalar.type == models.ScalarType.INT8


def test_raw_vectors_stay_whole(tmp_path, encoder, monkeypatch):
    raw = EmbFilter.from_encoder(encoder, "raw")
    with Store(path=tmp_path / "q", layout=Layout("binary", float16=True, on_disk=True)) as store:
        asked = _asked(monkeypatch, store, encoder, raw)
    params = asked["vectors_config"]["text-dense"]
    assert (params.datatype, params.on_disk) == (None, True) and "quantization_config" not in asked


def test_quantised_candidates_are_ranked_again_unless_the_search_is_exact():
    assert search_params("none", False) is None
    assert search_params("scalar", True) == models.SearchParams(exact=True)
    for kind, oversampling in (("scalar", 2.0), ("binary", 8.0)):
        again = search_params(kind, False).quantization
        assert again.rescore and again.oversampling == oversampling


@pytest.mark.parametrize(
    "settings", [{"quantization": "int4"}, {"shards": 0}, {"replicas": True}, {"hnsw_m": "8"}]
)
def test_what_no_server_would_take_is_refused(settings):
    with pytest.raises(ConfigError, match="expected"):
        Layout(**settings)


def test_the_embedded_store_says_that_it_has_no_layout(llama, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one")
    arguments = ["ingest", str(tmp_path / "a.txt"), "--collection", "c", "--backbone", str(llama)]
    assert main([*arguments, "--qdrant-path", str(tmp_path / "q"), "--quantization", "scalar"]) == 1
    assert "are a server's or Edge's; give" in " ".join(capsys.readouterr().err.split())
