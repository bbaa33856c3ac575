"""Every expected failure of a command: one message, a non-zero exit, nothing lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipelines import show
from rag_embfilter import Store
from tests import tiny
from tests.unit.cli.checks import LAPTOP, refused

# Failures


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--collection", "a/b"], "collection name 'a/b': expected 1 to 200 bytes"),
        (["--collection", " "], "collection name ' ': expected"),
        (["--collection", "x", "--filter-types", "middle"], "'middle': expected one of raw, edge, head"),
        (
            ["--collection", "x", "--filter-ratios", "64"],
            "64 leaves no dimension of 32; the largest ratio is 32",
        ),
        (
            ["--collection", "x", "--filter-ratios", "0"],
            "filter_ratio 0: expected a whole number of 1 or more",
        ),
        (["--collection", "x", "--max-length", "5000"], "takes 2048 positions.*Set max_length=2008 or less"),
        (["--collection", "x", "--chunk-size", "600"], "chunk_size 600 is over the encoder's max_length 512"),
        (["--collection", "x", "--chunk-overlap", "200"], "chunk_overlap 200: expected 0 to 128"),
        (["--collection", "x", "--template", "no text"], "template 'no text': expected a name out of"),
        (["--collection", "x", "--pooling", "max"], "pooling 'max': expected one of last, mean"),
        (["--collection", "x", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (["--collection", "x", "--dtype", "int8"], "dtype 'int8': expected one of float32"),
        (["--collection", "x", "--backbone", "./nowhere"], "backbone './nowhere': no such file or folder"),
        (["--collection", "x", "--encoding", "klingon"], "encoding 'klingon': unknown"),
        (["--collection", "x", "--root", "elsewhere"], "is not below --root 'elsewhere'"),
        (["--collection", "x", "gone.txt"], "source 'gone.txt' does not exist"),
    ],
)
def test_ingest_refuses_before_it_writes(run, docs, tmp_path, words, message):
    refused(run("ingest", docs, *words), message)
    with Store(path=tmp_path / "qdrant") as store:
        assert store.names() == []


def test_search_and_collections_refuse_in_one_message(run, stored):
    in_docs = ["search", "x", "--collection", "docs"]
    cases = {
        "'nope' is not in .*: docs-edge-r2, docs-raw": ["search", "x", "--collection", "nope"],
        "'docs-edge-r8' is not there": [*in_docs, "--filter-ratios", "8"],
        "'docs-mid-r2' is not there": [*in_docs, "--filter-types", "mid"],
        "'best': expected one of raw": [*in_docs, "--filter-types", "best"],
        "one filter type and one ratio": [*in_docs, "--filter-ratios", "2", "4"],
        "--where 'team': expected FIELD=VALUE": [*in_docs, "--where", "team"],
        "--where '=IT': expected FIELD=VALUE": [*in_docs, "--where", "=IT"],
        "device 'abacus' cannot be used": [*in_docs, "--device", "abacus"],
        "the question is empty": ["search", " ", "--collection", "docs"],
        "'nope' is not in .*: docs-edge-r2": ["collections", "show", "nope"],
        "'nope' is not in .*: docs": ["collections", "delete", "nope", "--yes"],
        "'./nowhere': no such file": ["collections", "adopt", "docs-raw", "--backbone", "./nowhere"],
    }
    for message, words in cases.items():
        refused(run(*words), message)


def test_another_template_is_refused_with_what_differs(run, stored, tmp_path):
    result = run("ingest", stored, "--collection", "docs", "--template", "plain")
    refused(result, "collection 'docs-raw' was made with fingerprint")
    assert "template: '{text}' != " in result.err and "pooling: 'mean' != 'last'" in result.err


def test_changed_weights_are_refused_at_search(run, docs, tmp_path):
    folder = tiny.save_model(tmp_path / "model", seed=1)
    assert run("ingest", docs, "--collection", "docs", "--backbone", folder).code == 0
    tiny.save_model(folder, seed=2)
    refused(run("search", "x", "--collection", "docs"), "these settings have fingerprint .* was asked for")


def test_a_store_in_use_by_another_process_is_one_clear_message(run, tmp_path, docs):
    path = tmp_path / "qdrant"
    hold = "import sys, qdrant_client\nopened = qdrant_client.QdrantClient(path=sys.argv[1])\n"
    wait = "print('open', flush=True)\nsys.stdin.read()"
    words = [sys.executable, "-c", hold + wait, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        listing = run("collections", "list")
        ingesting = run("ingest", docs, "--collection", "docs")
        other.stdin.close()
    refused(listing, "is in use by another process, and it takes one at a time")
    refused(ingesting, "is in use by another process")
    assert run("collections", "list").code == 0


def test_a_store_that_is_a_file_or_a_server_that_is_not_there(run, docs):
    refused(
        run("collections", "list", "--qdrant-path", docs / "a.txt"), "is a file; the embedded store needs"
    )
    # Port 9 is the discard service's, which nothing here answers on.
    refused(run("collections", "list", "--qdrant-url", "http://127.0.0.1:9"), "cannot reach Qdrant at http")


def test_a_result_that_cannot_be_written_is_one_message(run, stored):
    result = run("search", LAPTOP, "--collection", "docs", "--json", stored / "a.txt" / "hits.json")
    assert result.code == 1 and result.err.count("error:") == 1 and "Traceback" not in result.err


def test_a_stop_by_the_user_is_exit_code_130(run, monkeypatch):
    def stop(*words, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.options.open_store", stop)
    result = run("collections", "list")
    assert result.code == 130 and "stopped" in result.err


def test_results_do_not_hold_the_servers_key(run, docs, tmp_path, monkeypatch):
    for key in (["--qdrant-api-key", "secret"], ["--qdrant-api-key=secret"]):
        monkeypatch.setattr(sys, "argv", ["pipelines", "ingest", *key, "docs"])
        run("ingest", docs, "--collection", "docs", "--json", tmp_path / "in.json")
        written = (tmp_path / "in.json").read_text()
        assert "secret" not in written and json.loads(written)["command"][-1] == "docs"


def test_long_lists_of_faults_are_cut_and_counted(capsys):
    show.listed("Not read", [(f"file{i}", "why") for i in range(23)])
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "Not read (23):" and len(shown) == 22 and "3 more" in shown[-1]
