"""A base in step: siblings, new filters, files that are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pipelines.app import main
from rag_embfilter import Store


@pytest.fixture
def run(llama, tmp_path, capsys):
    """`ingest` of a folder with three files into base `c`; gives exit code and output."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("a", "b", "c"):
        (docs / f"{name}.txt").write_text(f"text of {name}")

    def call(*more: str, folder: str = "docs"):
        arguments = ["ingest", str(tmp_path / folder), "--collection", "c", "--backbone", str(llama)]
        code = main([*arguments, "--qdrant-path", str(tmp_path / "q"), *more])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    call.docs = docs
    return call


def _texts(tmp_path, name):
    with Store(path=tmp_path / "q") as store:
        return sorted(node.text for page in store.pages(name) for node in page.nodes)


def _points(tmp_path, name):
    """Text -> id."""
    with Store(path=tmp_path / "q") as store:
        return {node.text: node.id_ for page in store.pages(name) for node in page.nodes}


def test_c03_again_changed_touched_and_renamed(run, llama, tmp_path):
    """Five files; the counts of each run as they are printed and written, and the ids that stay."""
    for name in ("d", "e"):
        (run.docs / f"{name}.txt").write_text(f"text of {name}")

    def ingested(encoded, *documents, arguments=()):
        code, out, _ = run("--json", str(tmp_path / "in.json"), *arguments)
        names = ("added", "changed", "removed", "unchanged")
        line = ", ".join(f"{n} {name}" for n, name in zip(documents, names, strict=True))
        assert code == 0 and f"Documents: {line}, 0 failed." in out
        written = json.loads((tmp_path / "in.json").read_text())["ingest"]
        assert (written["encoded"], *(written[name] for name in names)) == (encoded, *documents)
        pairs = [_points(tmp_path, name) for name in ("c-raw", "c-edge-r2")]
        assert pairs[0] == pairs[1]
        return pairs[0]

    first = ingested(5, 5, 0, 0, 0)
    words = [sys.executable, "-m", "pipelines", "ingest", str(run.docs), "--collection", "c"]
    words += ["--backbone", str(llama), "--qdrant-path", str(tmp_path / "q")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    assert "Documents: 0 added, 0 changed, 0 removed, 5 unchanged, 0 failed." in done.stdout
    assert "0 encoded" in done.stdout and _points(tmp_path, "c-raw") == first

    (run.docs / "b.txt").write_text("new text of b")
    changed = ingested(1, 0, 1, 0, 4)
    assert changed.keys() == {"text of a", "new text of b", "text of c", "text of d", "text of e"}
    assert {text: first[text] for text in first if text != "text of b"}.items() <= changed.items()

    os.utime(run.docs / "c.txt", (1, 1))
    assert ingested(0, 0, 0, 0, 5) == changed

    (run.docs / "d.txt").rename(run.docs / "z.txt")
    renamed = ingested(1, 1, 0, 1, 4, arguments=["--prune"])
    assert renamed.keys() == changed.keys()
    assert {text for text in changed if renamed[text] != changed[text]} == {"text of d"}


def test_every_collection_of_the_base_follows_a_change(run, tmp_path):
    assert run("--filter-types", "edge", "tail", "--filter-ratios", "2", "4")[0] == 0
    (run.docs / "a.txt").write_text("another text")
    assert run()[0] == 0
    for name in ("c-raw", "c-edge-r2", "c-edge-r4", "c-tail-r2", "c-tail-r4"):
        assert _texts(tmp_path, name) == ["another text", "text of b", "text of c"]


def test_a_new_filter_holds_what_earlier_runs_stored(run, tmp_path):
    assert run()[0] == 0
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "d.txt").write_text("text of d")
    code, out, _ = run("--filter-types", "tail", "--filter-ratios", "4", folder="more")
    assert code == 0 and "1 encoded" in out and "3 filtered from raw" in out
    for name in ("c-raw", "c-edge-r2", "c-tail-r4"):
        assert _texts(tmp_path, name) == ["text of a", "text of b", "text of c", "text of d"]


def test_files_that_are_gone_are_named_and_removed_when_told(run, tmp_path):
    run()
    (run.docs / "a.txt").unlink()
    (run.docs / "b.txt").rename(run.docs / "z.txt")
    code, out, _ = run()
    assert code == 0 and "2 sources are no longer there and are still stored; --prune removes them" in out
    assert len(_texts(tmp_path, "c-raw")) == 4
    code, out, _ = run("--prune")
    assert code == 0 and "were removed" in out and f"{run.docs}/a.txt" in out
    for name in ("c-raw", "c-edge-r2"):
        assert _texts(tmp_path, name) == ["text of b", "text of c"]


def test_pruning_spares_other_folders_and_files_that_failed_to_read(run, tmp_path):
    run()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "d.txt").write_text("text of d")
    run(folder="more")
    (run.docs / "a.txt").write_bytes(b"\xff\xfe\x00\xd8")
    code, out, _ = run("--prune")
    assert code == 1 and "no longer there" not in out
    assert _texts(tmp_path, "c-raw") == ["text of a", "text of b", "text of c", "text of d"]


def test_a_sibling_of_other_settings_is_left_alone_and_named(run, tmp_path):
    run("--filter-types", "edge", "--filter-ratios", "4", "--template", "plain", "--no-raw")
    code, _, err = run()
    assert code == 0 and "c-edge-r4 was made with other settings" in err
    assert len(_texts(tmp_path, "c-edge-r2")) == 3


def test_pruning_below_a_root_spares_sources_named_otherwise(run, tmp_path):
    run()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "d.txt").write_text("text of d")
    (tmp_path / "more" / "e.txt").write_text("text of e")
    run("--root", str(tmp_path / "more"), folder="more")
    (tmp_path / "more" / "e.txt").unlink()
    code, out, _ = run("--root", str(tmp_path / "more"), "--prune", folder="more")
    assert code == 0 and "1 sources are no longer there" in out
    assert _texts(tmp_path, "c-raw") == ["text of a", "text of b", "text of c", "text of d"]


def test_a_sibling_of_another_backbone_does_not_stop_a_run(run, tmp_path):
    from tests import tiny

    wide = tiny.save_model(tmp_path / "wide", hidden_size=96)
    run("--filter-types", "edge", "--filter-ratios", "64", "--no-raw", "--backbone", str(wide))
    code, _, err = run("--template", "plain", "echo", "--filter-types", "tail")
    assert code == 0 and "c-edge-r64 was made with other settings" in err


def test_links_are_followed_to_files_and_named_otherwise(run, tmp_path):
    (tmp_path / "outside.txt").write_text("text of outside")
    (run.docs / "link.txt").symlink_to(tmp_path / "outside.txt")
    (run.docs / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    (run.docs / "circle").symlink_to(run.docs)
    code, out, err = run()
    assert code == 1 and "broken.txt: a link that leads nowhere" in err
    assert "1 files of other types passed over" in out
    assert len(_texts(tmp_path, "c-raw")) == 4
