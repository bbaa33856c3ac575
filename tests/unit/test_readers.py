"""Readers: every file type, encodings, broken files, and which files are read."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import docx
import pytest
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen import canvas

from pipelines.readers import ReadOptions, open_sources
from rag_embfilter.errors import ConfigError

KOREAN = "분실한 노트북은 어디에 신고하나요?"


def read(*sources: Path, **options):
    """All documents of some sources, and the reader with what it noted."""
    reader = open_sources(sources, ReadOptions(**options))
    return list(reader), reader


def put(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def reasons(reader) -> list[str]:
    return [reason for _, reason in reader.failed]


def pdf(file: Path, *pages: str, font: str = "Helvetica", **options) -> Path:
    page = canvas.Canvas(str(file), **options)
    for text in pages:
        page.setFont(font, 12)
        if text:
            page.drawString(72, 700, text)
        page.showPage()
    page.save()
    return file


def word(file: Path, *paragraphs: str) -> Path:
    document = docx.Document()
    for text in paragraphs:
        document.add_paragraph(text)
    document.save(str(file))
    return file


# Text


@pytest.mark.parametrize("suffix", [".txt", ".md", ".TXT"])
def test_a_text_file_is_one_document_named_by_its_absolute_path(tmp_path, suffix):
    file = put(tmp_path / f"a{suffix}", f"{KOREAN}\r\nsecond line")
    (document,), reader = read(file)
    assert document.text == f"{KOREAN}\nsecond line"
    assert document.id_ == document.metadata["source"] == file.as_posix()
    assert reader.failed == [] and reader.incomplete == set()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize("suffix", [".txt", ".html"])
def test_a_byte_order_mark_beats_the_encoding_given(tmp_path, encoding, suffix):
    file = put(tmp_path / f"a{suffix}", KOREAN.encode(encoding))
    (document,), _ = read(file, encoding="cp949")
    assert document.text == KOREAN


@pytest.mark.parametrize("suffix", [".txt", ".html"])
def test_cp949_needs_its_name_and_is_never_guessed(tmp_path, suffix):
    file = put(tmp_path / f"a{suffix}", KOREAN.encode("cp949"))
    (document,), _ = read(file, encoding="cp949")
    assert document.text == KOREAN
    documents, reader = read(file)
    assert documents == [] and reader.incomplete == {file.as_posix()}
    # 분 is 0xba 0xd0 in cp949; 0xba cannot begin a character in UTF-8.
    assert reasons(reader) == ["not utf-8 text (byte 0xba); name its encoding with --encoding"]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".html", ".csv", ".jsonl"])
def test_binary_data_under_a_text_name_is_refused(tmp_path, suffix):
    documents, reader = read(put(tmp_path / f"a{suffix}", b"\x7fELF\x00\x01text"))
    assert documents == [] and reasons(reader) == ["binary data, not text"]


@pytest.mark.parametrize("encoding", ["klingon", "hex", "", "undefined"])
def test_an_encoding_that_makes_no_text_is_refused_before_reading(tmp_path, encoding):
    with pytest.raises(ConfigError, match="encoding .*unknown; try utf-8, cp949"):
        read(put(tmp_path / "a.txt", "x"), encoding=encoding)


# HTML


def test_html_keeps_what_a_reader_sees(tmp_path):
    page = """<html><head><title> Lost &amp;
      found </title><style>p {color: red}</style><script>let hidden = 1</script></head><body>
      <header>Help</header><main>Report <b>it</b> to <i>secur</i>ity.<p>Then wait.</p>Or call.</main>
      <ul><li>one<li>two</ul><!-- note --><table><tr><td>cell</td></tr></table></body></html>"""
    (document,), _ = read(put(tmp_path / "a.html", page))
    assert document.metadata["title"] == "Lost & found"
    assert document.text.splitlines() == [
        "Help",
        "Report it to security.",
        "Then wait.",
        "Or call.",
        "one",
        "two",
        "cell",
    ]


def test_a_page_that_says_euc_kr_is_read_as_browsers_do(tmp_path):
    """똠 is in cp949 only, which browsers take for EUC-KR."""
    page = put(tmp_path / "a.htm", '<meta charset="euc-kr"><p>똠방각하</p>'.encode("cp949"))
    (document,), _ = read(page)
    assert document.text == "똠방각하"


def test_a_page_that_is_wrong_about_itself_is_read_by_the_encoding_given(tmp_path):
    for said in ("utf-16", "no-such-charset", "ascii"):
        (document,), _ = read(put(tmp_path / "a.html", f'<meta charset="{said}"><p>{KOREAN}</p>'))
        assert document.text == KOREAN


def test_html_that_no_parser_takes_is_listed(tmp_path):
    documents, reader = read(put(tmp_path / "a.html", "<![foo bar]"))
    assert documents == [] and reasons(reader)[0].startswith("not readable HTML")


# PDF and Word


def test_a_pdf_gives_a_document_for_each_page_with_text(tmp_path):
    file = pdf(tmp_path / "a.pdf", "first", "", "third")
    documents, reader = read(file)
    assert [(d.text.strip(), d.metadata["page"], d.id_) for d in documents] == [
        ("first", "1", f"{file.as_posix()}#page=1"),
        ("third", "3", f"{file.as_posix()}#page=3"),
    ]
    assert {d.metadata["source"] for d in documents} == {file.as_posix()} and not reader.failed


def test_korean_in_pdf_and_word(tmp_path):
    pdfmetrics.registerFont(UnicodeCIDFont("HYGothic-Medium"))
    first = pdf(tmp_path / "a.pdf", KOREAN, font="HYGothic-Medium")
    documents, _ = read(first, word(tmp_path / "b.docx", KOREAN, "second"))
    assert [d.text.split() for d in documents] == [KOREAN.split(), [*KOREAN.split(), "second"]]


def test_pdfs_that_give_no_text_are_listed_with_the_reason(tmp_path):
    files = [
        put(tmp_path / "broken.pdf", b"%PDF-1.4 and then nothing"),
        put(tmp_path / "empty.pdf", b""),
        pdf(tmp_path / "locked.pdf", "x", encrypt=StandardEncryption("secret")),
        pdf(tmp_path / "scan.pdf", "", ""),
    ]
    documents, reader = read(*files)
    assert documents == [] and [what for what, _ in reader.failed] == [str(file) for file in files]
    *unreadable, scan = reasons(reader)
    assert all(why.startswith("not a readable PDF (") for why in unreadable)
    assert "decrypt" in unreadable[2] and "OCR" in scan


def test_damaged_word_files_are_listed_with_the_reason(tmp_path):
    whole = word(tmp_path / "whole.docx", "text").read_bytes()
    garbled = bytearray(whole)
    start = whole.find(b"word/document.xml") + 40
    garbled[start : start + 60] = b"\xff" * 60
    with zipfile.ZipFile(tmp_path / "xml.docx", "w") as archive:
        archive.writestr("word/document.xml", "<w:document")
    with zipfile.ZipFile(tmp_path / "other.docx", "w") as archive:
        archive.writestr("content.xml", "<x/>")
    put(tmp_path / "truncated.docx", whole[: len(whole) // 2])
    put(tmp_path / "garbled.docx", bytes(garbled))
    documents, reader = read(tmp_path)
    assert [Path(d.metadata["source"]).name for d in documents] == ["whole.docx"]
    assert [Path(what).stem for what, _ in reader.failed] == ["garbled", "other", "truncated", "xml"]
    assert all(why.startswith("not a readable .docx (") for why in reasons(reader))


# Records


def test_jsonl_records_keep_plain_fields_as_metadata(tmp_path):
    record = {
        "_id": 7,
        "title": "T",
        "text": KOREAN,
        "page": 3,
        "part": "x",
        "ok": True,
        "none": None,
        "tags": ["a"],
        "metadata": {"team": "IT", "source": "wiki", "deep": {"a": 1}, "_id": "other"},
    }
    file = put(tmp_path / "a.jsonl", json.dumps(record) + "\n\n")
    (document,), reader = read(file)
    assert document.text == KOREAN and document.id_ == f"{file.as_posix()}#7"
    assert document.metadata == {
        "source": file.as_posix(),
        "title": "T",
        "record": "7",
        "field_page": 3,
        "part": "x",
        "ok": True,
        "team": "IT",
        "field_source": "wiki",
    }
    assert not reader.failed


def test_fields_can_be_named(tmp_path):
    file = put(tmp_path / "a.csv", "key,body,head,text,title\nk1,the body,the head,other,x\n")
    (document,), _ = read(file, text_column="body", title_column="head", id_column="key")
    assert document.text == "the body" and document.id_.endswith("#k1")
    shown = {k: v for k, v in document.metadata.items() if k != "source"}
    assert shown == {"title": "the head", "record": "k1", "text": "other", "field_title": "x"}


def test_jsonl_faults_are_listed_by_line_and_the_rest_is_read(tmp_path):
    lines = [
        '{"_id": "a", "text": "good"}',
        '{"_id": "b", "text": ',
        '{"_id": "c"}',
        '{"_id": "a", "text": "again"}',
        '["text"]',
        '{"_id": "d", "text": "half \\ud83d of a pair"}',
        '{"_id": "e", "text": "in a name", "k\\uDE00": 1}',
        '{"_id": "f", "text": "whole \\ud83d\\ude00"}',
        '{"_id": "g", "text": 5}',
        "[" * 100_000,
    ]
    file = put(tmp_path / "a.jsonl", "\n".join(lines))
    documents, reader = read(file)
    assert [d.text for d in documents] == ["good", "whole 😀"]
    assert [what for what, _ in reader.failed] == [f"{file} line {n}" for n in (2, 3, 4, 5, 6, 7, 9, 10)]
    expected = [
        "not JSON",
        "no text in 'text'",
        "the id 'a' is used twice",
        "expected an object, got list",
        "not valid Unicode",
        "not valid Unicode",
        "no text in 'text'",
        "not JSON",
    ]
    assert [why.startswith(start) for why, start in zip(reasons(reader), expected, strict=True)] == [True] * 8
    assert reader.incomplete == {file.as_posix()}


def test_numbers_that_json_cannot_hold_are_left_out_of_metadata(tmp_path):
    file = put(tmp_path / "a.jsonl", '{"text": "x", "a": NaN, "b": -Infinity, "c": 1e999, "d": 1.5}')
    (document,), _ = read(file)
    assert {k: v for k, v in document.metadata.items() if isinstance(v, float)} == {"d": 1.5}


def test_whole_numbers_over_64_bits_become_text(tmp_path):
    file = put(tmp_path / "a.jsonl", '{"text": "x", "a": 9223372036854775807, "b": 9223372036854775808}')
    (document,), _ = read(file)
    assert (document.metadata["a"], document.metadata["b"]) == (2**63 - 1, "9223372036854775808")


def test_csv_with_quoted_lines_a_huge_field_and_ragged_rows(tmp_path):
    huge = "x" * 200_000  # over the csv module's own limit of 131,072
    rows = f'id,text,team\n1,"two\nlines",IT\n2,{huge},HR\n3\n4,long,row,too,many\n'
    file = put(tmp_path / "a.csv", b"\xef\xbb\xbf" + rows.encode())
    documents, reader = read(file)
    assert [(d.id_.rsplit("#")[1], d.text) for d in documents] == [
        ("1", "two\nlines"),
        ("2", huge),
        ("4", "long"),
    ]
    assert [d.metadata["team"] for d in documents] == ["IT", "HR", "row"]
    assert reader.failed == [
        (f"{file} line 5", "no text in 'text'; name the field with --text-column")
    ]  # a quoted line break counts as a line


def test_a_csv_without_the_text_column_names_those_it_has(tmp_path):
    _, reader = read(put(tmp_path / "a.csv", "id,body\n1,x\n"))
    assert reasons(reader) == ["no column 'text' among id, body; name it with --text-column"]


def test_records_without_ids_are_named_by_their_line(tmp_path):
    documents, _ = read(put(tmp_path / "a.csv", "text\nfirst\nsecond\n"))
    assert [d.metadata["record"] for d in documents] == ["line 2", "line 3"]


@pytest.mark.parametrize(("name", "content"), [("a.csv", "text\n"), ("a.jsonl", ""), ("b.jsonl", "\n\n")])
def test_a_file_without_any_record_is_listed(tmp_path, name, content):
    """Else its former records would stay, and nobody would hear of it."""
    _, reader = read(put(tmp_path / name, content))
    assert reasons(reader) == ["no records in it"]


def test_records_before_a_bad_byte_are_read(tmp_path):
    good = "".join(f'{{"text": "{i:05}"}}\n' for i in range(2000))
    documents, reader = read(put(tmp_path / "a.jsonl", good.encode() + b'{"text": "\xba\xd0"}\n'))
    assert documents[0].text == "00000" and "not utf-8 text (byte 0xba)" in reasons(reader)[0]
    assert len(reader.incomplete) == 1


# Which files


def test_hidden_and_other_files_of_a_folder_are_passed_over(tmp_path):
    for name in ("b.txt", "a/c.md", ".hidden.txt", ".git/x.txt", "a/.cache/y.txt", "image.png", "Makefile"):
        put(tmp_path / name, "text")
    documents, reader = read(tmp_path, tmp_path, root=tmp_path)
    assert [d.metadata["source"] for d in documents] == ["a/c.md", "b.txt"]
    assert [file.name for file in reader.skipped] == ["Makefile", "image.png"]
    assert reader.total_bytes == 8


def test_a_hidden_file_or_folder_that_is_named_is_read(tmp_path):
    put(tmp_path / ".notes" / "a.txt", "x")
    assert len(read(tmp_path / ".notes")[0]) == 1
    assert len(read(put(tmp_path / ".b.txt", "x"))[0]) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("image.png", "files of type .png are not read; expected .txt"),
        ("Makefile", r"files of type \(none\) are not read"),
        ("gone.txt", "gone.txt' does not exist"),
        ("dangling.txt", "dangling.txt' does not exist"),
        ("empty", "nothing to read in .*empty: expected files of type .txt"),
        ("pictures", "nothing to read in"),
    ],
)
def test_sources_that_cannot_be_meant_are_refused_at_once(tmp_path, name, message):
    put(tmp_path / "image.png", "x")
    put(tmp_path / "Makefile", "x")
    put(tmp_path / "pictures" / "a.png", "x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match=message):
        open_sources([tmp_path / name], ReadOptions())


def test_a_file_given_twice_is_read_once(tmp_path, monkeypatch):
    file = put(tmp_path / "a.txt", "x")
    (tmp_path / "link.txt").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    documents, _ = read(file, Path("a.txt"), tmp_path, Path("link.txt"))
    assert [d.metadata["source"] for d in documents] == [file.as_posix()]


def test_links_are_named_by_what_they_point_to_and_linked_folders_are_not_walked(tmp_path):
    put(tmp_path / "else" / "real.txt", "real")
    folder = put(tmp_path / "docs" / "a.txt", "a").parent
    (folder / "link.txt").symlink_to(tmp_path / "else" / "real.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "dangling.txt").symlink_to(folder / "nowhere.txt")
    documents, reader = read(folder, root=tmp_path)
    assert [d.metadata["source"] for d in documents] == ["docs/a.txt", "else/real.txt"]
    assert reader.failed == [(f"{folder}/dangling.txt", "a link that leads nowhere")]
    assert reader.skipped == [folder / "loop"]


def test_a_file_outside_root_is_refused_before_anything_is_read(tmp_path):
    inside, outside = put(tmp_path / "in" / "a.txt", "x"), put(tmp_path / "b.txt", "x")
    with pytest.raises(ConfigError, match=r"b\.txt' is not below --root"):
        open_sources([inside, outside], ReadOptions(root=tmp_path / "in"))


def test_incomplete_is_known_before_the_next_source_begins(tmp_path):
    """A sync deletes old points of a source when the next one begins, unless it is incomplete."""
    first = put(tmp_path / "a.jsonl", '{"text": "x"}\nbroken\n')
    second = put(tmp_path / "b.txt", "y")
    reader = open_sources([first, second], ReadOptions())
    seen = {d.text: set(reader.incomplete) for d in reader}
    assert seen == {"x": set(), "y": {first.as_posix()}}
    assert reader.incomplete == {first.as_posix()}


def test_progress_in_bytes_adds_up_to_the_whole(tmp_path):
    for name, size in (("a.txt", 10), ("b.jsonl", 20), ("c.pdf", 30)):
        put(tmp_path / name, b"x" * size)
    reader = open_sources([tmp_path], ReadOptions())
    told: list[int] = []
    reader.on_bytes = told.append
    list(reader)
    assert told == [10, 20, 30] and reader.total_bytes == 60


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.jsonl", "a.csv"])
def test_a_file_that_is_gone_meanwhile_is_listed(tmp_path, name):
    gone, stays = put(tmp_path / name, "text"), put(tmp_path / "b.txt", "stays")
    reader = open_sources([tmp_path], ReadOptions())
    gone.unlink()
    assert [d.metadata["source"] for d in reader] == [stays.as_posix()]
    assert "No such file" in reasons(reader)[0] and reader.incomplete == {gone.as_posix()}


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.pdf", "a.docx", "a.jsonl", "a.csv"])
def test_a_file_without_permission_is_listed(tmp_path, name):
    file = put(tmp_path / name, "text")
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("this user may read everything")
    documents, reader = read(file)
    assert documents == [] and "Permission denied" in reasons(reader)[0]


def test_a_folder_that_cannot_be_listed_is_noted(tmp_path, monkeypatch):
    put(tmp_path / "a.txt", "x")
    closed = put(tmp_path / "closed" / "b.txt", "x").parent
    scandir = os.scandir

    def refuse(path):
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(closed))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    documents, reader = read(tmp_path)
    assert len(documents) == 1 and reader.failed == [(str(closed), "Permission denied")]


def test_a_file_name_that_is_not_unicode_gets_one_that_can_be_stored(tmp_path):
    name = os.fsdecode(b"\xb0\xa1.txt")  # 가 in cp949, as old archives leave it
    try:
        put(tmp_path / name, "x")
    except OSError:
        pytest.skip("this file system takes only Unicode names")
    (document,), _ = read(tmp_path)
    assert document.metadata["source"] == f"{tmp_path.as_posix()}/\\udcb0\\udca1.txt"
