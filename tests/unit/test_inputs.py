"""Model inputs: joined ids, truncation (case C16), batches, padding."""

from __future__ import annotations

import numpy as np
import pytest

from rag_embfilter import Encoder
from rag_embfilter.errors import ConfigError
from rag_embfilter.inputs import Row, batches, cut, pad
from tests import tiny


@pytest.mark.parametrize(
    ("limit", "truncation", "kept"),
    [
        (10, "end", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (4, "end", [0, 1, 2, 3]),
        (4, "middle", [0, 1, 8, 9]),
        (5, "middle", [0, 1, 2, 8, 9]),
        (1, "middle", [0]),
    ],
)
def test_cut_keeps_the_start_or_both_halves(limit, truncation, kept):
    assert cut(list(range(10)), limit, truncation) == kept


def test_batches_hold_every_row_once_and_stay_within_the_bound():
    lengths = [3, 50, 7, 7, 1, 120, 20]
    made = list(batches(lengths, 60))
    assert sorted(i for batch in made for i in batch) == list(range(7))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 60 for batch in made if len(batch) > 1)
    assert made[0] == [5]  # longer than the bound: alone, and first


def test_a_batch_ends_where_its_padding_would_cost_more_than_another_batch():
    lengths = [10, 9, 9, 8, 3, 3]
    assert list(batches(lengths, 1000, spare=4)) == [[0, 1, 2, 3], [4, 5]]  # 0 + 1 + 1 + 2; 7 would follow
    assert list(batches(lengths, 1000, spare=3)) == [[0, 1, 2], [3], [4, 5]]
    assert list(batches(lengths, 1000)) == [[0, 1, 2, 3, 4, 5]]


def test_padding_on_either_side_by_hand():
    rows = [Row(np.array([5, 6, 7]), 1, 0), Row(np.array([8]), 0, 0)]
    right, left = pad(rows, 9, "right"), pad(rows, 9, "left")
    assert right.ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert left.ids.tolist() == [[5, 6, 7], [9, 9, 8]]
    assert right.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert left.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert right.span.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert left.span.tolist() == [[0, 1, 1], [0, 0, 1]]
    after = pad([Row(np.array([5, 6, 7]), 1, 0), Row(np.array([5, 8]), 1, 0)], 9, "right", skip=1)
    assert (after.ids.tolist(), after.span.tolist()) == ([[6, 7], [8, 9]], [[1, 1], [1, 0]])


def _ids(text: str) -> list[int]:
    return tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("tokens", "begin"),
    [
        ({}, []),
        ({"end": True}, []),
        ({"pad": "<eos>"}, []),
        ({"begin": True}, [1]),
        ({"begin": True, "end": True}, [1]),
    ],
)
def test_c16_last_id_is_the_templates_and_only_the_text_is_cut(tmp_path, tokens, begin):
    """Texts of 5, 16 and 40 tokens under a limit of 16, whatever the tokenizer adds by itself."""
    folder = tiny.save_model(tmp_path / "m", **tokens)
    encoder = Encoder(str(folder), template="Say {text} now", max_length=16, device="cpu")
    texts = ["a" * 5, "b" * 16, "c" * 20 + "d" * 20]
    rows = encoder._builders[0].rows(texts, "document")
    kept = ["a" * 5, "b" * 16, "c" * 8 + "d" * 8]
    assert [row.ids.tolist() for row in rows] == [
        begin + _ids("Say ") + _ids(text) + _ids(" now") for text in kept
    ]
    assert [row.lost for row in rows] == [0, 0, 24]


def test_c16_report_of_what_was_cut(llama, caplog):
    encoder = Encoder(str(llama), max_length=16, device="cpu")
    encoder.encode_documents(["a" * 5, "b" * 16, "c" * 40])
    assert str(encoder.stats) == "1 of 3 texts truncated, 24+ tokens lost"
    assert "1 of 3 texts truncated, 24+ tokens lost" in caplog.text


def test_echo_has_the_end_token_at_both_ends_and_counts_from_the_second_copy(llama):
    encoder = Encoder(str(llama), template="echo", max_length=8, device="cpu")
    (row,) = encoder._builders[0].rows(["abcdefghXYZ"], "document")
    head, mid = _ids("Rewrite the following paragraph: "), _ids(". The rewritten paragraph: ")
    text = _ids("abcdefgh")
    assert row.ids.tolist() == [2, *head, *text, *mid, *text, 2]
    assert row.start == 1 + len(head) + len(text) + len(mid)


def test_echo_begins_with_the_tokenizers_own_begin_token(tmp_path):
    encoder = Encoder(str(tiny.save_model(tmp_path / "m", begin=True)), template="echo", device="cpu")
    (row,) = encoder._builders[0].rows(["a"], "document")
    assert (row.ids[0], row.ids[-1]) == (1, 2)


def test_a_huge_text_loses_only_its_middle(llama):
    encoder = Encoder(str(llama), max_length=16, device="cpu")
    (row,) = encoder._builders[0].rows(["s" * 8 + "x" * 1_000_000 + "e" * 8], "document")
    words = encoder.templates[0].pieces("document")
    assert row.ids.tolist() == _ids(words[0]) + _ids("s" * 8 + "e" * 8) + _ids(words[1])
    assert row.lost > 0


def test_a_limit_over_the_models_positions_is_refused_with_the_largest_that_fits(tmp_path):
    folder = tiny.save_model(tmp_path / "m", "GPT2", max_position_embeddings=100)
    with pytest.raises(ConfigError, match="max_length=98 or less"):
        Encoder(str(folder), template="<{text}>", device="cpu")
    encoder = Encoder(str(folder), template="<{text}>", max_length=98, device="cpu")
    assert encoder.encode_documents(["a" * 500]).shape == (1, 32)
