"""Fingerprints, and files that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from rag_embfilter import files
from rag_embfilter.errors import FingerprintMismatch
from rag_embfilter.fingerprint import Fingerprint

PARTS = {"backbone": "smol@1", "filter_ratio": 2, "query_template": None, "template": "“{text}”"}
OURS = Fingerprint(PARTS)


# --- fingerprints


def test_digest_is_the_sha256_of_the_parts_as_sorted_json() -> None:
    text = '{"backbone": "smol@1", "filter_ratio": 2, "query_template": null, "template": "“{text}”"}'
    assert OURS.digest == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_order_does_not_count_and_every_value_and_type_does() -> None:
    assert Fingerprint(dict(reversed(PARTS.items()))).digest == OURS.digest
    others = [
        {**PARTS, "filter_ratio": 4},
        {**PARTS, "filter_ratio": "2"},
        {**PARTS, "query_template": "None"},
        {**PARTS, "seed": 0},
        {key: value for key, value in PARTS.items() if key != "template"},
    ]
    assert len({OURS.digest, *(Fingerprint(parts).digest for parts in others)}) == 6


def test_union_joins_encoder_and_filter_and_the_right_one_wins() -> None:
    joined = Fingerprint({"a": 1, "b": 1}) | Fingerprint({"b": 2, "c": 3})
    assert joined == Fingerprint({"a": 1, "b": 2, "c": 3})


def test_differences_name_each_part_with_both_values() -> None:
    theirs = Fingerprint({**PARTS, "filter_ratio": 4, "seed": 1})
    assert OURS.differences(theirs) == ["filter_ratio: 2 != 4", "seed: None != 1"]
    assert OURS.differences(OURS) == []


def test_require_names_the_place_both_digests_and_what_differs() -> None:
    OURS.require(Fingerprint(dict(PARTS)), "collection 'docs'")
    theirs = Fingerprint({**PARTS, "filter_ratio": 4})
    with pytest.raises(FingerprintMismatch) as caught:
        OURS.require(theirs, "collection 'docs'")
    message = str(caught.value)
    for told in ("collection 'docs'", OURS.digest, theirs.digest, "filter_ratio: 2 != 4"):
        assert told in message
    assert "template" not in message


# --- writes


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.txt"
    files.write_text(target, "one")
    files.write_text(target, "zwölf\n")
    assert target.read_bytes() == "zwölf\n".encode()
    assert leftovers(target.parent) == ["file.txt"]
    assert target.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("broken", ["fdopen", "replace"])
def test_a_failing_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    target = tmp_path / "file.txt"
    files.write_text(target, "old")

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    if broken == "fdopen":
        monkeypatch.setattr(os, "fdopen", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_text(target, "new")
    assert target.read_text() == "old"
    assert leftovers(tmp_path) == ["file.txt"]


def test_json_is_readable_and_refuses_numbers_that_are_not_finite(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    files.write_json(target, {"ünit": 0.5})
    assert target.read_text(encoding="utf-8") == '{\n  "ünit": 0.5\n}\n'
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            files.write_json(target, {"mean": value})
    assert json.loads(target.read_text(encoding="utf-8")) == {"ünit": 0.5}
    assert leftovers(tmp_path) == ["report.json"]


# --- folders


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with files.whole_folder(target) as temporary:
        (temporary / "weights").write_text("w")
        assert not target.exists()
    assert leftovers(target) == ["weights"]
    assert leftovers(target.parent) == ["model"]


def test_a_failing_block_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), files.whole_folder(tmp_path / "model") as temporary:
        (temporary / "weights").write_text("half")
        raise KeyboardInterrupt
    assert leftovers(tmp_path) == []


def test_another_processs_folder_stays(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with files.whole_folder(target) as temporary:
        (temporary / "weights").write_text("ours")
        target.mkdir()
        (target / "weights").write_text("theirs")
    assert (target / "weights").read_text() == "theirs"
    assert leftovers(tmp_path) == ["model"]


def test_another_processs_folder_stays_when_it_comes_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    rename = Path.rename

    def late(self: Path, to: Path) -> Path:
        to.mkdir()
        (to / "weights").write_text("theirs")
        return rename(self, to)

    with files.whole_folder(target) as temporary:
        (temporary / "weights").write_text("ours")
        monkeypatch.setattr(Path, "rename", late)
    assert (target / "weights").read_text() == "theirs"
    assert leftovers(tmp_path) == ["model"]


def test_a_rename_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, to: Path) -> Path:
        raise OSError("no space")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no space"), files.whole_folder(tmp_path / "model"):
        pass
    assert leftovers(tmp_path) == []


# --- the cache and digests


def test_cache_folder_is_under_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBFILTER_CACHE", str(tmp_path / "cache"))
    assert files.cache_folder("digests") == tmp_path / "cache" / "digests"
    assert (tmp_path / "cache" / "digests").is_dir()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_file_sha256_notices_a_changed_size_and_a_changed_time(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    for content, seconds in ((b"one", 1), (b"longer", 1), (b"LONGER", 2)):
        target.write_bytes(content)
        os.utime(target, (seconds, seconds))
        assert files.file_sha256(target) == sha256(content)


def test_file_sha256_reads_an_unchanged_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "weights"
    target.write_bytes(b"one")
    known = files.file_sha256(target)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert files.file_sha256(target) == known == sha256(b"one")


def test_a_damaged_memory_of_a_digest_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBFILTER_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "weights"
    target.write_bytes(b"one")
    files.file_sha256(target)
    (memo,) = (tmp_path / "cache" / "digests").iterdir()
    memo.write_text("")
    assert files.file_sha256(target) == sha256(b"one")
    assert memo.read_text() == sha256(b"one")
