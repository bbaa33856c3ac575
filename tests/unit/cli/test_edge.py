"""Qdrant Edge, BM25 and the cost of vectors from the command line."""

from __future__ import annotations

import json

import pytest

from rag_embfilter import Store, embedding
from rag_embfilter.store import Bm25
from tests.unit.cli.checks import LAPTOP, refused

pytest.importorskip("qdrant_edge", reason="the edge extra is not installed")


def test_a_folder_of_edge_serves_every_command_and_every_mode(run, docs, tmp_path, monkeypatch):
    assert run("ingest", docs, "--collection", "docs", "--edge", "--bm25", "english").code == 0
    with Store(path=tmp_path / "qdrant") as store:
        assert not store.embedded and store.info("docs-edge-r2").bm25 == Bm25()
    listed = run("collections", "list").out
    assert "docs-edge-r2" in listed and "docs-raw" in listed
    for mode in ("dense", "hybrid"):
        found = run("search", LAPTOP, "--collection", "docs", "--mode", mode, "--json", tmp_path / "r.json")
        assert found.code == 0 and json.loads((tmp_path / "r.json").read_text())["hits"][0]["text"] == LAPTOP
    assert run("refilter", "docs", "--filter-types", "tail", "--filter-ratios", "4").code == 0
    # BM25 loads no model, and a filter made later has its vectors too.
    monkeypatch.delattr(embedding, "EmbFilterEmbedding")
    for name in ("docs", "docs-tail-r4"):
        found = run("search", "where are bikes", "--collection", name, "--mode", "bm25", "--limit", "1")
        assert found.code == 0 and "They are kept below" in found.out


def test_what_bm25_needs_is_said_before_a_model_is_loaded(run, stored, monkeypatch):
    monkeypatch.delattr(embedding, "EmbFilterEmbedding")
    for mode in ("bm25", "hybrid"):
        refused(
            run("search", "bikes", "--collection", "docs", "--mode", mode),
            "has no BM25 vectors.*--bm25 english",
        )
    refused(
        run("search", "bikes", "--collection", "docs", "--mode", "both"),
        "mode 'both': expected one of dense, bm25",
    )
    again = run("ingest", stored, "--collection", "docs", "--bm25", "english")
    refused(again, "'docs-edge-r2' has no BM25 vectors.*Delete it and run this again")
    refused(run("ingest", stored, "--collection", "new", "--bm25", "klingon"), "BM25 language 'klingon'")


def test_edge_is_asked_for_where_it_can_be(run, docs, stored, tmp_path):
    refused(run("ingest", docs, "--collection", "docs", "--edge"), "is a store of the embedded Qdrant")
    url = ("--qdrant-url", "http://127.0.0.1:1")
    refused(
        run("ingest", docs, "--collection", "docs", "--edge", *url), "--edge is an engine in this process"
    )
    elsewhere = ("--qdrant-path", tmp_path / "e")
    refused(
        run("ingest", docs, "--collection", "d", "--edge", "--shards", "2", *elsewhere), "shards and replicas"
    )
    made = run("ingest", docs, "--collection", "d", "--edge", "--quantization", "scalar", *elsewhere)
    assert made.code == 0
    with Store(path=tmp_path / "e") as store:
        assert store.info("d-edge-r2").quantization == "scalar"


def test_evaluate_in_all_modes(run, eval_set, tmp_path):
    words = ["evaluate", eval_set, "--filter-types", "edge", "--filter-ratios", "2"]
    assert run(*words).code == 0
    found = run(
        *words,
        "--modes",
        "dense",
        "bm25",
        "hybrid",
        "--json",
        tmp_path / "r.json",
        "--plot",
        tmp_path / "p.png",
    )
    assert found.code == 0 and (tmp_path / "p.png").stat().st_size > 10_000
    (result,) = json.loads((tmp_path / "r.json").read_text())["sets"]
    assert [(r["filter"], r["mode"], r["dim"]) for r in result["results"]] == [
        ("raw", "dense", 32),
        ("bm25", "bm25", 0),
        ("raw+bm25", "hybrid", 32),
        ("edge-r2", "dense", 16),
        ("edge-r2+bm25", "hybrid", 16),
    ]
    assert result["passages_encoded"] == 0  # the run without BM25 did
    # Both questions are the first passage's text: right for q1, second place (or none, by BM25) for q2.
    scores = {r["filter"]: r["per_query"]["ndcg_at_10"] for r in result["results"]}
    assert scores["bm25"] == {"q1": 1.0, "q2": 0.0}
    assert all(
        s["q1"] == 1.0 and s["q2"] == pytest.approx(0.6309, abs=1e-4)
        for n, s in scores.items()
        if n != "bm25"
    )


def test_cost_of_synthetic_vectors_and_of_ones_own(run, stored, tmp_path):
    words = ["cost", "--filter-ratios", "1", "2", "--quantization", "none", "scalar", "--queries", "20"]
    files = ("--json", tmp_path / "c.json", "--plot", tmp_path / "c.png")
    found = run(*words, "--points", "400", "--hidden-size", "32", *files)
    assert found.code == 0 and "ratio 2" in found.out and "recall@10" in found.out
    rows = json.loads((tmp_path / "c.json").read_text())["cost"]
    assert [(r["filter"], r["dim"], r["quantization"], r["points"]) for r in rows] == [
        ("ratio 1", 32, "none", 400),
        ("ratio 1", 32, "scalar", 400),
        ("ratio 2", 16, "none", 400),
        ("ratio 2", 16, "scalar", 400),
    ]
    assert all(r["recall_at_10"] == 1.0 for r in rows) and (tmp_path / "c.png").exists()
    refused(run("cost", "--collection", "docs"), "collection 'docs-raw' holds 4 points; expected 50 or more")
    refused(run("cost", "--collection", "absent"), "'absent-raw' is not in")
    refused(run(*words, "--hidden-size", "16", "--filter-ratios", "9"), "filter_ratio 9: expected 1 to 8")
    refused(run("cost", "--plot", "c.gif"), "picture 'c.gif'")
