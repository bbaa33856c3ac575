"""The encoder against the plain transformers recipe, whatever the batch and padding side (C06, C11)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from rag_embfilter import Encoder
from rag_embfilter.errors import ConfigError, EncodingError
from tests import tiny

TEXTS = ["a", "Paris", "안녕", "two words", *("word " * n + "end" for n in (1, 2, 3, 5, 6, 8, 9, 10, 11, 12))]
TEMPLATES = ["prompteol", "echo", "plain"]


def _recipe_row(encoder: Encoder, text: str) -> tuple[list[int], int | None]:
    """Ids and first pooled position of a text, joined by hand with the tokenizer alone."""
    tokenizer = encoder.backbone.tokenizer

    def ids(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []

    if encoder.templates[0].document.count("{text}") == 2:
        head, mid = "Rewrite the following paragraph: ", ". The rewritten paragraph: "
        before = [2, *ids(head), *ids(text), *ids(mid)]
        return [*before, *ids(text), 2], len(before)
    if encoder.templates[0].document == "{text}":
        return ids(text), 0
    return [*ids('Summarize the sentence: "'), *ids(text), *ids('" in one word:"')], None


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equals_the_plain_transformers_recipe(model_folders, family, template):
    encoder = Encoder(str(model_folders[family]), template=template, device="cpu", batch_tokens=300)
    ours = encoder.encode_documents(TEXTS)
    for text, vector in zip(TEXTS, ours, strict=True):
        expected = tiny.recipe(model_folders[family], *_recipe_row(encoder, text)).numpy()
        np.testing.assert_allclose(vector, expected, atol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["GPT2", "Llama", "Qwen2", "Gemma3Text"])
def test_c06_vectors_do_not_depend_on_neighbours_order_or_padding_side(model_folders, family, pooling):
    alone = Encoder(str(model_folders[family]), pooling=pooling, device="cpu", batch_tokens=1)
    expected = alone.encode_documents(TEXTS)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    for side in ("right", "left"):
        for batch_tokens in (150, 400, 5000):
            other = Encoder(
                str(model_folders[family]),
                pooling=pooling,
                device="cpu",
                batch_tokens=batch_tokens,
                padding_side=side,
            )
            shuffled = other.encode_documents([TEXTS[i] for i in order])
            assert np.abs(shuffled - expected[order]).max() <= 1e-4
            assert (shuffled * expected[order]).sum(axis=1).min() >= 1 - 1e-5


def test_result_is_unit_float32_in_order_with_equal_texts_equal(encoder):
    vectors = encoder.encode_documents(["b", "a", "b"])
    assert (vectors.shape, vectors.dtype) == ((3, 32), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert (vectors[0] == vectors[2]).all()
    assert not np.allclose(vectors[0], vectors[1], atol=1e-2)


def test_without_normalisation_the_norm_is_the_models(llama, encoder):
    raw = encoder.encode_documents(["Paris"], normalize=False)
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    np.testing.assert_allclose(raw / np.linalg.norm(raw), encoder.encode_documents(["Paris"]), atol=1e-6)


def test_no_texts_give_no_rows(encoder):
    assert encoder.encode_documents([]).shape == (0, 32)


def test_query_and_document_templates_give_different_vectors(llama):
    encoder = Encoder(str(llama), query_template="question", device="cpu")
    query, document = encoder.encode_queries(["Paris"]), encoder.encode_documents(["Paris"])
    assert not np.allclose(query, document, atol=1e-2)
    same = Encoder(str(llama), template="question", device="cpu").encode_documents(["Paris"])
    np.testing.assert_allclose(query, same, atol=1e-6)


def test_progress_counts_every_text_once(encoder):
    seen = []
    encoder.encode_documents(["a", "b", "a", "ccc"], progress=seen.append)
    assert sum(seen) == 4


def test_equal_texts_are_encoded_once(encoder):
    with tiny.ForwardCounter(encoder) as counter:
        encoder.encode_documents(["a"] * 50 + ["b"])
    assert counter.texts == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("  \n\t", "empty"),
        (None, "expected a text, got NoneType"),
        (3, "expected a text, got int"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_c11_a_text_that_cannot_be_embedded_is_named_and_the_others_carried_along(encoder, text, why):
    texts = ["a", "b", text, "d"]
    with pytest.raises(EncodingError, match=f"item 2: .*{why}") as caught:
        encoder.encode_documents(texts)
    good = encoder.encode_documents(["a", "b", "d"])
    np.testing.assert_array_equal(np.delete(caught.value.embeddings, 2, axis=0), good)
    assert not caught.value.embeddings[2].any()
    with pytest.raises(ValueError, match="item 0"):
        encoder.encode_queries([text])


@pytest.mark.parametrize(
    ("value", "why"), [(float("nan"), "NaN or Inf"), (float("inf"), "NaN or Inf"), (0.0, "nothing")]
)
def test_c11_non_finite_and_zero_vectors_are_named(encoder, value, why):
    with tiny.Spoil(encoder, "#", value), pytest.raises(EncodingError, match=f"item 3: .*{why}") as caught:
        encoder.encode_documents(["a", "b", "c", "d#", "e"])
    assert list(caught.value.problems) == [3]
    assert np.isfinite(caught.value.embeddings).all()


def test_c11_a_text_of_special_tokens_alone_is_a_text(encoder):
    vector = encoder.encode_documents(["<eos>"])
    assert np.isfinite(vector).all()


def test_one_string_instead_of_a_list_is_refused(encoder):
    with pytest.raises(ConfigError, match=r"expected a list of texts: \[text\]"):
        encoder.encode_documents("Paris")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 0}, "max_length 0: expected a whole number"),
        ({"max_length": 2.5}, "max_length 2.5"),
        ({"batch_tokens": -1}, "batch_tokens -1"),
        ({"padding_side": "middle"}, "expected right or left"),
        ({"dtype": "int8"}, "expected one of float32, bfloat16, float16"),
        ({"device": "tpu9"}, "device 'tpu9' cannot be used here"),
        ({"revision": "main"}, "pins a hub model"),
    ],
)
def test_bad_arguments_name_value_and_expectation(llama, arguments, message):
    with pytest.raises(ConfigError, match=message):
        Encoder(str(llama), **arguments)


def test_a_dtype_rounds_the_weights_but_not_the_rotary_frequencies(llama, encoder):
    half = Encoder(str(llama), device="cpu", dtype="bfloat16")
    model = half.backbone.model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.rotary_emb.inv_freq.dtype == torch.float32
    cosine = (half.encode_documents(TEXTS) * encoder.encode_documents(TEXTS)).sum(axis=1)
    assert cosine.min() > 0.98
    assert half.fingerprint.digest == encoder.fingerprint.digest
    assert half.unembedding_digest() == encoder.unembedding_digest()


def test_the_backbone_has_no_head(encoder):
    assert not any("lm_head" in name for name, _ in encoder.backbone.model.named_modules())


@pytest.mark.parametrize(
    "arguments",
    [
        {"template": "echo"},
        {"query_template": "question"},
        {"pooling": "mean"},
        {"max_length": 100},
    ],
)
def test_what_changes_a_vector_changes_the_fingerprint(llama, encoder, arguments):
    other = Encoder(str(llama), device="cpu", **arguments)
    assert other.fingerprint.digest != encoder.fingerprint.digest


def test_what_changes_no_vector_leaves_the_fingerprint(llama, encoder):
    other = Encoder(str(llama), device="cpu", batch_tokens=17, padding_side="left")
    assert other.fingerprint.digest == encoder.fingerprint.digest


def test_pickled_by_name_and_equal_afterwards(encoder):
    data = pickle.dumps(encoder)
    again = pickle.loads(data)
    assert len(data) < 5000
    assert again.backbone is encoder.backbone  # shared within one process
    assert again.fingerprint.digest == encoder.fingerprint.digest
    np.testing.assert_array_equal(again.encode_queries(["a"]), encoder.encode_queries(["a"]))
