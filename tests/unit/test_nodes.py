"""The splitter: sizes in tokens, places in the text, ids, titles, and what is embedded."""

from __future__ import annotations

import hashlib
import itertools
import string
import uuid

import pytest
from llama_index.core.schema import Document, MetadataMode, TextNode

from rag_embfilter.errors import ConfigError
from rag_embfilter.nodes import NAMESPACE, PART, Splitter, passage_text, source_of
from tests import tiny

TOKENIZER = tiny.tokenizer()
KOREAN = "연차 휴가는 {} 날입니다. 급여 부서에 문의하세요.\n"
CHINESE = "年假为{}天。如有疑问，请联系工资部门。"
EMOJI = "👩‍👩‍👧 🎉{}🥳 flag 🇰🇷"
ENGLISH = "Annual leave is {} days. Ask payroll, or your manager, if in doubt!\nPart-timers get less.\n\n"
LONG_TITLE = "How annual leave is counted"


def count(text: str) -> int:
    """Tokens of the tiny tokenizer: one a UTF-8 byte."""
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def cut(
    text: str,
    chunk_size: int | None = 40,
    chunk_overlap: int = 0,
    doc_id: str = "doc",
    **metadata: object,
) -> list[TextNode]:
    splitter = Splitter(count, chunk_size, chunk_overlap)
    return list(splitter.nodes(Document(id_=doc_id, text=text, metadata=metadata)))


def span(text: str, node: TextNode) -> str:
    return text[node.start_char_idx : node.end_char_idx]


def numbered(text: str, times: int = 3) -> str:
    """The text several times, each with a number of its own."""
    return "".join(text.format(i) for i in range(times))


# --- sizes


@pytest.mark.parametrize("title", ["", "Leave", "휴가 🎉", LONG_TITLE])
@pytest.mark.parametrize("size", [8, 9, 24, 64])
@pytest.mark.parametrize(
    "text", [KOREAN, CHINESE, EMOJI, ENGLISH], ids=["korean", "chinese", "emoji", "english"]
)
def test_no_chunk_is_over_the_limit_and_no_character_is_lost(text: str, size: int, title: str) -> None:
    text = numbered(text)
    nodes = cut(text, size, size // 4, title=title)
    assert max(len(node.text.encode()) for node in nodes) <= size
    covered = {i for node in nodes for i in range(node.start_char_idx or 0, node.end_char_idx or 0)}
    assert not "".join(c for i, c in enumerate(text) if i not in covered).strip()


def test_limit_holds_where_a_joined_text_takes_more_tokens_than_its_parts() -> None:
    def fussy(text: str) -> int:  # as a merging tokenizer may: joined sentences cost an extra token
        return len(text) + text.count(". ")

    text = "".join(f"Some {i}. Short. Words. Here. " for i in range(8))
    nodes = list(Splitter(fussy, 20, 0).nodes(Document(text=text, metadata={"title": "Tea"})))
    assert max(fussy(node.text) for node in nodes) <= 20
    assert "".join(span(text, node) for node in nodes).replace(" ", "") == text.replace(" ", "")
    assert all(node.text == f"Tea {span(text, node)}" for node in nodes)


@pytest.mark.parametrize(
    "text", ["".join(map(chr, range(33, 127))) * 5, "汉字" * 300], ids=["ascii", "chinese"]
)
def test_text_without_a_space_is_cut_and_stays_whole(text: str) -> None:
    nodes = cut(text, 32)
    assert "".join(node.text for node in nodes) == text
    assert max(count(node.text) for node in nodes) <= 32
    assert len(nodes) <= len(text.encode()) / 29  # full chunks, up to one character of three bytes


@pytest.mark.parametrize("mark", ["", "\n"], ids=["none", "line"])
def test_text_of_several_hundred_thousand_characters_takes_work_in_proportion(mark: str) -> None:
    seen = 0

    def counting(text: str) -> int:
        nonlocal seen
        seen += len(text)
        return len(text.encode())

    text = mark.join(f"{i:06}" for i in range(40_000))
    assert len(text) > PART
    nodes = list(Splitter(counting, 256, 0).nodes(Document(text=text)))
    assert seen < 8 * len(text)  # characters shown to the tokenizer
    assert max(len(node.text) for node in nodes) <= 256
    assert all(span(text, node) == node.text for node in nodes)
    assert (nodes[-1].end_char_idx, nodes[-1].text[-6:]) == (len(text), "039999")
    if mark:
        assert nodes[-1].metadata["line"] == text.count("\n", 0, nodes[-1].start_char_idx) + 1


def test_overlap_repeats_the_end_of_the_chunk_before_within_its_limit() -> None:
    text = " ".join(f"w{i:03}" for i in range(60))
    nodes = cut(text, 32, 12)
    for before, after in itertools.pairwise(nodes):
        assert before.end_char_idx is not None
        shared = text[after.start_char_idx : before.end_char_idx]
        assert shared
        assert count(shared) <= 12
        assert before.text.endswith(shared)
        assert after.text.startswith(shared)
    assert not any(a.end_char_idx > b.start_char_idx for a, b in itertools.pairwise(cut(text, 32, 0)))


@pytest.mark.parametrize(
    ("chunk_size", "chunk_overlap", "max_length", "told"),
    [
        (7, 0, None, "chunk_size 7: expected 8"),
        (0, 0, None, "chunk_size 0: expected 8"),
        (32, 17, None, "chunk_overlap 17: expected 0 to 16"),
        (32, -1, None, "chunk_overlap -1: expected 0 to 16"),
        (32, 0, 31, "Use chunk_size=31 or less"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    chunk_size: int, chunk_overlap: int, max_length: int | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Splitter(count, chunk_size, chunk_overlap, max_length)


def test_sizes_at_their_bounds_are_taken() -> None:
    Splitter(count, 8, 4, 8)
    Splitter(count, None, 32, 8)


# --- places


@pytest.mark.parametrize("text", [ENGLISH, "\n \n" + ENGLISH, CHINESE], ids=["plain", "led", "zh"])
@pytest.mark.parametrize("title", ["", "Leave"])
def test_offsets_name_the_chunk_in_the_document(text: str, title: str) -> None:
    text = numbered(text, 6)
    nodes = cut(text, 48, 12, title=title)
    assert len(nodes) > 5
    for node in nodes:
        assert node.text == passage_text(title, span(text, node))
    starts = [node.start_char_idx for node in nodes]
    assert starts == sorted(set(starts))


@pytest.mark.parametrize("lead", ["", "\n\n  "])
def test_offsets_and_lines_are_the_documents_own_under_a_title_that_is_cut_up(lead: str) -> None:
    text = lead + "".join(f"line {i:02} of the text\n" for i in range(20))
    nodes = cut(text, 24, title=LONG_TITLE)
    body = [node for node in nodes if span(text, node)]
    assert [node.text for node in body[1:]] == [span(text, node) for node in body[1:]]
    assert body[0].text.endswith(span(text, body[0]))
    assert body[0].start_char_idx == len(lead)
    for node in body:
        assert node.metadata["line"] == text.count("\n", 0, node.start_char_idx) + 1
    assert body[-1].end_char_idx == len(text.rstrip())


@pytest.mark.parametrize("text", ["na " * 100, "z" * 300, "👩‍👩‍👧 " * 30], ids=["word", "letter", "emoji"])
def test_text_that_repeats_itself_is_placed_ever_further_on(text: str) -> None:
    nodes = cut(text, 32, 8)
    starts = [node.start_char_idx for node in nodes]
    assert starts == sorted(set(starts))
    assert all(node.text == span(text, node) for node in nodes)


def test_line_is_where_the_chunk_begins() -> None:
    text = "\n".join(f"Entry {i:03} is here." for i in range(1, 41))
    nodes = cut(text, 60, 20)
    assert len(nodes) > 15
    for node in nodes:
        assert int(node.text[6:9]) == node.metadata["line"]


@pytest.mark.parametrize(
    ("text", "metadata"), [("one line", {}), ("a\nb", {"page": 3}), ("a\nb", {"record": "r1"})]
)
def test_one_line_pages_and_records_have_no_line(text: str, metadata: dict[str, object]) -> None:
    (node,) = cut(text, **metadata)
    assert "line" not in node.metadata


def test_chunks_are_numbered_within_their_document() -> None:
    assert [node.metadata["chunk"] for node in cut(numbered(ENGLISH), 40)] == list(
        range(len(cut(numbered(ENGLISH), 40)))
    )


# --- ids


def test_an_id_is_the_uuid5_of_document_place_and_text() -> None:
    nodes = cut("one. two. three.", 8)
    second = nodes[1]
    digest = hashlib.sha256(second.text.encode()).hexdigest()
    assert second.id_ == str(uuid.uuid5(NAMESPACE, f"'doc' 1 {digest}"))
    assert second.ref_doc_id == "doc"


def test_ids_are_stable_and_belong_to_one_document() -> None:
    ids = [node.id_ for node in cut(numbered(ENGLISH))]
    assert [node.id_ for node in cut(numbered(ENGLISH))] == ids
    assert [node.id_ for node in cut(numbered(ENGLISH), author="somebody")] == ids
    assert not set(ids) & {node.id_ for node in cut(numbered(ENGLISH), doc_id="other")}


def test_equal_chunks_of_one_document_have_ids_of_their_own() -> None:
    nodes = cut("same text here\n\n\n" * 6, 20)
    assert len({node.text for node in nodes}) == 1
    assert len({node.id_ for node in nodes}) == 6


def test_a_change_in_one_chunk_leaves_the_other_ids() -> None:
    paragraphs = [f"Paragraph {i} is here." for i in range(5)]
    before = cut("\n\n\n".join(paragraphs), 24)
    paragraphs[2] = "Paragraph X is here."
    after = cut("\n\n\n".join(paragraphs), 24)
    assert [a.id_ == b.id_ for a, b in zip(before, after, strict=True)] == [True, True, False, True, True]


# --- titles and what is embedded


def test_a_title_stands_before_every_chunk() -> None:
    nodes = cut(numbered(ENGLISH), 40, title="  Leave ")
    assert len(nodes) > 3
    assert all(node.text.startswith("Leave ") and not node.text.startswith("Leave  ") for node in nodes)


def test_a_title_takes_its_tokens_from_every_chunk_and_no_more() -> None:
    text = string.ascii_letters + string.digits + string.ascii_letters  # 114 tokens, in chunks of 32 - 6
    assert [len(span(text, node)) for node in cut(text, 32, title="Leave")] == [26, 26, 26, 26, 10]


def test_a_title_over_half_a_chunk_is_text_like_the_rest() -> None:
    half = "t" * 19  # 20 tokens with its space: exactly half of 40
    assert all(node.text.startswith(half + " ") for node in cut(numbered(ENGLISH), 40, title=half))
    over = cut(numbered(ENGLISH), 40, title=half + "t")
    assert [half in node.text for node in over] == [True] + [False] * (len(over) - 1)


def test_chunk_size_none_keeps_a_document_whole() -> None:
    text = f"  {numbered(ENGLISH, 50)}"
    (node,) = cut(text, None, title="Leave")
    assert node.text == f"Leave {text.strip()}"
    (alone,) = cut("", None, title="Opening hours")
    assert alone.text == "Opening hours"


@pytest.mark.parametrize("size", [None, 40])
@pytest.mark.parametrize("text", ["", " \n\t"])
def test_a_document_without_text_has_no_nodes(text: str, size: int | None) -> None:
    assert cut(text, size) == []


@pytest.mark.parametrize("size", [None, 40])
def test_only_the_passage_is_embedded(size: int | None) -> None:
    nodes = cut(numbered(ENGLISH), size, title="Leave", source="hr/leave.md", author="somebody", page=2)
    for node in nodes:
        assert node.get_content(metadata_mode=MetadataMode.EMBED) == node.text
        assert node.metadata["source"] == "hr/leave.md"
        assert node.metadata["author"] == "somebody"
        assert "somebody" not in node.get_content(metadata_mode=MetadataMode.LLM)


def test_source_is_the_file_or_else_the_documents_id() -> None:
    assert source_of(Document(id_="d1", text="a", metadata={"source": "f.md"})) == "f.md"
    assert source_of(Document(id_="d1", text="a")) == "d1"
    assert cut("a")[0].metadata["source"] == "doc"


@pytest.mark.parametrize(
    ("title", "text", "expected"),
    [(" A ", " b\n", "A b"), ("", " b", "b"), ("A", " ", "A"), ("", "", ""), ("A", "b  c", "A b  c")],
)
def test_passage_text_is_title_space_text_stripped(title: str, text: str, expected: str) -> None:
    assert passage_text(title, text) == expected


def test_a_title_without_text_is_what_is_embedded() -> None:
    for size in (None, 40):
        assert [node.text for node in cut(" \n", size, title="Leave")] == ["Leave"]
    assert all(len(node.text) <= 40 for node in cut("", 40, title="Leave and pay. " * 9))
