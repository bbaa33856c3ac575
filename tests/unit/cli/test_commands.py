"""The command line, in this process: from documents to answers."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
from qdrant_client import models

from pipelines.app import main
from pipelines.lists import expand_lists
from rag_embfilter import Store, __version__
from tests import tiny
from tests.unit.cli.checks import LAPTOP, points, refused

COMMANDS = [
    [],
    ["demo"],
    ["ingest"],
    ["search"],
    ["chat"],
    ["evaluate"],
    ["choose"],
    ["mteb"],
    ["refit-queries"],
    ["refilter"],
    ["cost"],
    ["lens"],
    ["spectrum"],
    ["collections"],
    *(["collections", name] for name in ("list", "show", "delete", "adopt")),
]


# Words


@pytest.mark.parametrize(
    ("given", "ratios", "rest"),
    [
        (["--filter-ratios", "2", "4", "8"], ["2", "4", "8"], []),
        (["--filter-ratios", "2,4,8"], ["2", "4", "8"], []),
        (["--filter-ratios=2,4", "8"], ["2", "4", "8"], []),
        (["--filter-ratios", "2", "4", "docs"], ["2", "4"], ["docs"]),
        (["--filter-ratios", "2", "--filter-ratios", "4"], ["2", "4"], []),
        (["docs", "--filter-ratios", "2", "--collection", "x"], ["2"], ["docs", "--collection", "x"]),
        (["--filter-ratios", "docs"], ["docs"], []),
        (["--filter-types", "edge", "2"], [], ["--filter-types", "edge", "2"]),
    ],
)
def test_list_options_take_several_words_and_leave_paths_alone(given, ratios, rest):
    expanded = expand_lists(given)
    pairs = [word for ratio in ratios for word in ("--filter-ratios", ratio)]
    places = [i for i, word in enumerate(expanded) if word == "--filter-ratios"]
    assert [word for i in places for word in expanded[i : i + 2]] == pairs
    assert [word for i, word in enumerate(expanded) if i not in places and i - 1 not in places] == rest


def test_a_list_option_without_a_value_is_left_for_the_parser_to_refuse():
    assert expand_lists(["ingest", "--filter-types"]) == ["ingest", "--filter-types"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command(capsys, command):
    assert main([*command, "--help"]) == 0
    assert f"Usage: python -m pipelines {' '.join(command)}".rstrip() in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["search"],
        ["ingest", "docs"],
        ["search", "x", "--collection", "docs", "--limit", "0"],
        ["search", "x", "--collection", "docs", "--filter-ratios", "two"],
        ["ingest", "docs", "--collection", "x", "--no-such-option"],
    ],
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(capsys, words):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Usage: python -m pipelines" in captured.out + captured.err
    assert "Traceback" not in captured.err


# The main job


def test_from_documents_to_answers(run, stored, tmp_path):
    """Ingest, search, list, show, delete."""
    found = run(
        "search", LAPTOP, "--collection", "docs", "--limit", 2, "--json", tmp_path / "found" / "hits.json"
    )
    assert found.code == 0 and found.err == ""
    # The question is the passage itself, and both templates are one: cosine 1.
    assert found.out.splitlines()[:2] == [f"1. 1.000 {stored.as_posix()}/a.txt, chunk 0", f"   {LAPTOP}"]
    written = json.loads((tmp_path / "found" / "hits.json").read_text())
    assert (written["question"], written["collection"], len(written["hits"])) == (LAPTOP, "docs-edge-r2", 2)
    best = written["hits"][0]
    assert best["score"] == pytest.approx(1, abs=1e-5) and best["text"] == LAPTOP
    assert best["metadata"] == {"source": f"{stored.as_posix()}/a.txt", "title": "", "chunk": 0}

    listed = run("collections", "list", "--json", tmp_path / "list.json")
    assert listed.code == 0 and "docs-edge-r2" in listed.out and "docs-raw" in listed.out
    rows = json.loads((tmp_path / "list.json").read_text())
    assert [(row["name"], row["points"], row["dims"], row["filter"]) for row in rows] == [
        ("docs-edge-r2", "4", "16", "edge"),
        ("docs-raw", "4", "32", "raw"),
    ]

    shown = run("collections", "show", "docs-edge-r2", "--json", tmp_path / "show.json")
    made = json.loads((tmp_path / "show.json").read_text())
    assert (
        shown.code == 0 and made["fingerprint"] in shown.out and made["fingerprint"] == written["fingerprint"]
    )
    assert (made["points"], made["dim"], made["parts"]["band_start"]) == (4, 16, 8)

    gone = run("collections", "delete", "docs-edge-r2", "--yes")
    assert gone.code == 0 and gone.out == "Deleted docs-edge-r2 (4 points).\n"
    refused(run("search", "x", "--collection", "docs"), "Under 'docs' there are: docs-raw")


def test_what_ingest_writes_as_json(run, docs, tmp_path):
    ratios = ("--filter-ratios", "2", "4", "8", docs)  # the path after them is still an argument
    done = run("ingest", *ratios, "--collection", "docs", "--json", tmp_path / "in.json")
    assert done.code == 0
    assert "Documents: 4 added, 0 changed, 0 removed, 0 unchanged, 0 failed." in done.out
    assert "Chunks: 4 encoded, 0 filtered from raw, 0 unchanged; 0 old points removed." in done.out
    assert "Model: 178 tokens, 19.1% padding; a common prefix saved 100." in done.out
    written = json.loads((tmp_path / "in.json").read_text())
    assert written["ingest"] == {
        "collections": ["docs-raw", "docs-edge-r2", "docs-edge-r4", "docs-edge-r8"],
        "documents": 4,
        "added": 4,
        "changed": 0,
        "removed": 0,
        "unchanged": 0,
        "nodes": 4,
        "encoded": 4,
        "refiltered": 0,
        "nodes_unchanged": 0,
        "points_removed": 0,
        "failed": [],
        "not_read": [],
        "sources_gone": [],
        "skipped": [],
        "encoding": {
            "tokens": 178,
            "padding": 42,
            "saved": 100,
            "retried": 0,
            "texts": 4,
            "truncated": 0,
            "tokens_lost": 0,
        },
        "engine": "local",
    }
    assert (written["device"], written["dtype"]) == ("cpu", "float32")
    assert written["versions"]["rag-embfilter"] == __version__
    dims = re.findall(r"^docs-\S+ +(\d+) +4$", done.out, re.MULTILINE)
    assert dims == ["32", "16", "8", "4"]


def test_a_second_run_encodes_nothing_and_a_further_filter_comes_from_raw(run, stored, encoder):
    with tiny.ForwardCounter(encoder) as passes:
        again = run("ingest", stored, "--collection", "docs")
        more = run("ingest", stored, "--collection", "docs", "--filter-types", "tail", "--filter-ratios", "4")
    assert passes.texts == 0 and again.code == more.code == 0
    assert "0 encoded, 0 filtered from raw, 4 unchanged; 0 old points removed" in again.out
    assert "0 encoded, 4 filtered from raw, 0 unchanged" in more.out


def test_a_changed_file_replaces_only_its_own_chunks(run, stored, encoder, tmp_path):
    names = ("docs-raw", "docs-edge-r2")
    changed, kept = stored / "a.txt", stored / "b.md"
    before = {name: (points(tmp_path, name, changed), points(tmp_path, name, kept)) for name in names}
    changed.write_text("Lost laptops are found in the cellar.")
    with tiny.ForwardCounter(encoder) as passes:
        done = run("ingest", stored, "--collection", "docs")
    assert passes.texts == 1
    assert "1 encoded, 0 filtered from raw, 3 unchanged; 2 old points removed" in done.out
    for name in names:
        old, same = before[name]
        assert points(tmp_path, name, kept) == same
        assert len(points(tmp_path, name, changed)) == 1 and not points(tmp_path, name, changed) & old


def test_unreadable_files_are_listed_and_the_rest_is_stored(run, docs, tmp_path):
    (docs / "korean.txt").write_bytes("한국어".encode("cp949"))
    (docs / "broken.pdf").write_bytes(b"%PDF-1.4")
    (docs / "blank.txt").write_text(" \n")
    (docs / "photo.png").write_bytes(b"x")
    done = run("ingest", docs, "--collection", "docs", "--json", tmp_path / "in.json")
    assert done.code == 1 and "Traceback" not in done.err
    assert "Not read (2):" in done.err and "Not stored (1):" in done.err
    assert f"{docs}/korean.txt: not utf-8 text (byte 0xc7); name its encoding with --encoding" in done.err
    assert f"{docs}/broken.pdf: not a readable PDF" in done.err
    assert f"{docs}/blank.txt: the text is empty or only white space" in done.err
    assert "1 files of other types passed over: .png" in done.out
    report = json.loads((tmp_path / "in.json").read_text())["ingest"]
    assert "Documents: 4 added, 0 changed, 0 removed, 0 unchanged, 3 failed." in done.out
    assert (report["encoded"], report["skipped"]) == (4, [str(docs / "photo.png")])
    assert [Path(what).name for what, _ in report["not_read"]] == ["broken.pdf", "korean.txt"]


def test_a_file_read_in_part_loses_nothing_until_it_is_whole_again(run, stored, tmp_path):
    file = stored / "c.jsonl"
    whole = file.read_text()
    first, _ = whole.splitlines()
    file.write_text(f"{first}\n{{broken\n")
    assert run("ingest", stored, "--collection", "docs").code == 1
    assert len(points(tmp_path, "docs-raw", file)) == 2
    file.write_text(first)
    done = run("ingest", stored, "--collection", "docs")
    assert done.code == 0 and "2 old points removed" in done.out
    assert len(points(tmp_path, "docs-raw", file)) == 1


def test_sources_are_named_below_root_so_that_a_folder_may_move(run, docs, tmp_path):
    assert run("ingest", docs, "--collection", "docs", "--root", docs).code == 0
    moved = docs.rename(tmp_path / "moved")
    done = run("ingest", moved, "--collection", "docs", "--root", moved)
    assert "0 encoded, 0 filtered from raw, 4 unchanged" in done.out


def test_texts_over_max_length_are_chunked_and_not_cut(run, docs):
    """40 and 36 bytes, which are tokens here, in chunks of 30: two each."""
    (docs / "c.jsonl").unlink()
    words = ("--max-length", "30", "--chunk-size", "30", "--chunk-overlap", "0")
    done = run("ingest", docs, "--collection", "docs", *words)
    assert done.code == 0 and "Chunks: 4 encoded" in done.out and "truncated" not in done.out


# Search


def test_where_keeps_what_matches_all_conditions(run, stored, tmp_path):
    cases = {("team=HR",): ["1"], ("floor=4",): ["2"], ("title=Bikes",): ["1"], ("team=HR", "floor=4"): []}
    for conditions, records in cases.items():
        words = [word for condition in conditions for word in ("--where", condition)]
        found = run("search", "x", "--collection", "docs-raw", *words, "--json", tmp_path / "hits.json")
        hits = json.loads((tmp_path / "hits.json").read_text())["hits"]
        assert found.code == 0 and [hit["metadata"]["record"] for hit in hits] == records
    assert found.out == "Nothing in docs-raw matches team=HR floor=4.\n"


def test_search_in_another_dtype_says_so_and_finds_the_same(run, stored):
    found = run("search", LAPTOP, "--collection", "docs", "--dtype", "bfloat16")
    assert found.code == 0 and "a.txt" in found.out.splitlines()[0]
    assert found.err == "note: vectors were computed in float32, the question in bfloat16.\n"


def test_switching_an_alias_and_dropping_what_it_stood_for(run, stored):
    assert "live stands for docs-raw." in run("collections", "switch", "live", "docs-raw").out
    out = run("collections", "switch", "live", "docs-edge-r2").out
    assert "live stands for docs-edge-r2, was docs-raw." in out
    assert "Back: python -m pipelines collections switch live docs-raw" in out
    assert "Alias live stands for docs-edge-r2." in run("collections", "list").out
    run("collections", "switch", "live", "docs-raw")
    out = run("collections", "switch", "live", "docs-edge-r2", "--drop-old").out
    assert "was docs-raw (deleted)" in out and "docs-raw" not in run("collections", "list").out
    again = run("collections", "switch", "live", "docs-edge-r2", "--drop-old").out
    assert "deleted" not in again and "docs-edge-r2" in run("collections", "list").out


def test_search_by_base_name_full_name_and_alias(run, stored, tmp_path):
    with Store(path=tmp_path / "qdrant") as store:
        alias = models.CreateAlias(collection_name="docs-raw", alias_name="live")
        store.client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
    by_name = [run("search", LAPTOP, "--collection", name).out for name in ("docs", "docs-edge-r2")]
    assert by_name[0] == by_name[1]
    raw = ("--filter-types", "raw")
    assert (
        run("search", LAPTOP, "--collection", "live").out
        == run("search", LAPTOP, "--collection", "docs", *raw).out
    )


def test_what_looks_like_markup_is_shown_as_it_is(run, docs):
    (docs / "a.txt").rename(docs / "a [final].txt")
    assert run("ingest", docs, "--collection", "docs [old]").code == 0
    found = run("search", LAPTOP, "--collection", "docs [old]")
    assert found.out.startswith(f"1. 1.000 {docs.as_posix()}/a [final].txt, chunk 0")
    assert "docs [old]-edge-r2" in run("collections", "list").out
    assert "docs [old]-raw" in run("collections", "show", "docs [old]-raw").out


# Collections


def test_delete_asks_first(run, stored, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    kept = run("collections", "delete", "docs-raw")
    assert kept.code == 1 and "Delete docs-raw with 4 points?" in kept.out and "Nothing deleted." in kept.out
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "Deleted docs-raw (4 points)." in run("collections", "delete", "docs-raw").out


def test_an_empty_store_says_how_to_begin(run, tmp_path):
    listed = run("collections", "list", "--json", tmp_path / "list.json")
    assert listed.code == 0 and "No collections yet." in listed.out
    assert json.loads((tmp_path / "list.json").read_text()) == []


def test_a_foreign_collection_does_not_hide_the_others(run, stored, tmp_path):
    with Store(path=tmp_path / "qdrant") as store:
        vectors = {"theirs": models.VectorParams(size=4, distance=models.Distance.COSINE)}
        store.client.create_collection("theirs", vectors)
    listed = run("collections", "list")
    assert listed.code == 0 and "theirs" in listed.out and "docs-raw" in listed.out
    refused(run("collections", "show", "theirs"), "has no vector named 'text-dense'")


def test_adopted_collections_are_searched_as_our_own(run, stored, llama, tmp_path):
    with Store(path=tmp_path / "qdrant") as store:
        store.client.update_collection("docs-raw", metadata={"embfilter": {}})
        assert store.info("docs-raw").fingerprint is None
    refused(run("search", LAPTOP, "--collection", "docs-raw"), "does not say what made it. Adopt it first")
    refused(run("ingest", stored, "--collection", "docs"), "has no fingerprint")
    adopt = ("collections", "adopt", "docs-raw", "--backbone", llama)
    refused(run(*adopt, "--filter-ratios", "2", "4"), "a collection has one filter")
    refused(run(*adopt), "32 dimensions, this filter makes 16")
    assert run(*adopt, "--filter-types", "raw").code == 0
    assert "a.txt" in run("search", LAPTOP, "--collection", "docs-raw").out.splitlines()[0]


# Evaluate


def test_evaluate_gives_the_figures_worked_out_by_hand(run, eval_set, encoder, tmp_path):
    """p1 comes first for both questions, so q1 scores 1 and q2 what rank 2 is worth."""
    words = ("evaluate", "--filter-ratios", "2", "4", eval_set, "--no-ragas")
    files = ("--json", tmp_path / "out" / "result.json", "--plot", tmp_path / "out" / "result.png")
    done = run(*words, *files)
    assert done.code == 0 and "2 passages (2 encoded)" in done.out
    assert "Too few questions (2) to tell" in done.out
    assert f"JSON: {tmp_path / 'out' / 'result.json'}\n" in done.out
    (result,) = json.loads((tmp_path / "out" / "result.json").read_text())["sets"]
    assert [(r["filter"], r["dim"]) for r in result["results"]] == [
        ("raw", 32),
        ("edge-r2", 16),
        ("edge-r4", 8),
    ]
    for one in result["results"]:
        assert one["run"] == {"q1": ["p1", "p2"], "q2": ["p1", "p2"]}
        assert one["per_query"]["ndcg_at_10"] == pytest.approx({"q1": 1, "q2": 1 / math.log2(3)})
        assert one["metrics"]["mrr_at_10"] == pytest.approx(0.75)
        assert one["metrics"]["recall_at_10"] == 1
    raw, edge, _ = result["results"]
    assert raw["versus_raw"] is None and result["recommended"] == "raw"
    assert (edge["versus_raw"]["ties"], edge["versus_raw"]["verdict"]) == (2, "too few queries")
    assert (tmp_path / "out" / "result.png").read_bytes().startswith(b"\x89PNG")

    with tiny.ForwardCounter(encoder) as passes:
        again = run(*words)
    assert "2 passages (0 encoded)" in again.out and passes.texts == 1  # one question, asked twice


def test_a_set_with_faults_is_refused_with_all_of_them(run, eval_set):
    (eval_set / "corpus.jsonl").write_text('{"_id": "p1", "text": "x"}\nnot json\n')
    result = run("evaluate", eval_set)
    refused(result, "unknown passage ids")
    assert "lines that are not JSON (1): corpus.jsonl line 2" in result.err
    refused(run("evaluate", eval_set.parent), "corpus.jsonl, queries.jsonl, qrels/test.tsv missing")


def test_search_takes_the_only_filter_there_is_unless_one_is_asked_for(run, docs):
    assert run("ingest", docs, "--collection", "one", "--filter-types", "tail").code == 0
    found = run("search", LAPTOP, "--collection", "one")
    assert found.code == 0 and found.out == run("search", LAPTOP, "--collection", "one-tail-r2").out
    refused = run("search", LAPTOP, "--collection", "one", "--filter-types", "edge")
    assert refused.code == 1 and "'one-edge-r2' is not there" in refused.err


def test_search_never_takes_the_filter_of_another_base(run, docs):
    assert run("ingest", docs, "--collection", "one-more", "--filter-types", "tail").code == 0
    refused = run("search", LAPTOP, "--collection", "one")
    assert refused.code == 1 and "Under 'one' there are: one-more-raw, one-more-tail-r2" in refused.err


def test_a_filter_type_that_is_not_one_is_refused_before_a_backbone_is_loaded(run, eval_set, capsys):
    assert main(["choose", str(eval_set), "--filter-types", "bogus", "--backbone", "not/there"]) == 1
    assert "filter_type 'bogus': expected one of" in capsys.readouterr().err
    refused = run("refilter", "docs-raw")
    assert refused.code == 1 and "give the base name, 'docs'" in refused.err
