"""Logit spectroscopy against the definition: one direction at a time, with a real pseudo-inverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rag_embfilter import EmbFilter
from rag_embfilter.errors import ConfigError
from rag_embfilter.spectroscopy import (
    average_token,
    frequent_tokens,
    response,
    token_counts,
    vocabulary_order_counts,
)
from rag_embfilter.spectrum import Spectrum
from tests import tiny

USED = torch.arange(320) < 300


@pytest.fixture(scope="module")
def unembedding() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(320, 16, generator=generator) * torch.linspace(6, 1, 16)
    matrix[300:] = 99.0
    return matrix


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    return np.r_[np.random.default_rng(5).integers(0, 1000, 300), np.zeros(20)].astype(float)


def test_the_average_token_is_log_frequency_times_the_pseudo_inverse(unembedding, counts):
    w = unembedding[USED].double().numpy()
    p = (counts[:300] + 0.5) / (counts[:300] + 0.5).sum()
    expected = np.log(p) @ np.linalg.pinv(w).T
    ours = average_token(unembedding, USED, Spectrum.of(unembedding, USED), counts)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-5)


def test_the_response_is_what_taking_a_direction_out_does(unembedding, counts):
    spectrum = Spectrum.of(unembedding, USED)
    average = average_token(unembedding, USED, spectrum, counts)
    tokens = frequent_tokens(counts, USED, 25)
    w = unembedding[torch.from_numpy(tokens)].double().numpy()
    ours = response(unembedding, spectrum, average, tokens)
    for i, v in enumerate(spectrum.directions.astype(float)):
        without = average - (average @ v) * v
        expected = np.abs(w @ without - w @ average).sum() / np.abs(w @ average).sum()
        np.testing.assert_allclose(ours[i], expected, rtol=1e-4, atol=1e-9)


def test_frequent_tokens_come_in_order_and_unused_rows_never(counts):
    many = counts.copy()
    many[310] = 1e9
    tokens = frequent_tokens(many, USED, 10)
    assert 310 not in tokens
    assert (np.diff(many[tokens]) <= 0).all() and many[tokens[0]] == many[:300].max()


def test_ideal_drops_the_directions_with_the_largest_response(unembedding, counts):
    made = EmbFilter.from_unembedding(unembedding, "ideal", 4, used_rows=USED, frequencies=counts)
    spectrum = Spectrum.of(unembedding, USED)
    average = average_token(unembedding, USED, spectrum, counts)
    dpi = response(unembedding, spectrum, average, frequent_tokens(counts, USED))
    kept = np.sort(np.argsort(dpi)[:4])
    np.testing.assert_array_equal(made.matrix, spectrum.directions[kept])
    assert made.name == "ideal-r4"


def test_ideal_needs_frequencies_or_a_vocabulary(unembedding, encoder):
    with pytest.raises(ConfigError, match="give frequencies="):
        EmbFilter.from_unembedding(unembedding, "ideal", 4)
    assert EmbFilter.from_encoder(encoder, "ideal", 4).parts["frequencies"] == "vocabulary order"
    counts = np.ones(len(encoder.backbone.unembedding))
    given = EmbFilter.from_encoder(encoder, "ideal", 4, frequencies=counts)
    assert given.parts["frequencies"] != "vocabulary order"
    with pytest.raises(ConfigError, match="token counts of shape"):
        EmbFilter.from_encoder(encoder, "ideal", 4, frequencies=counts[:5])


def test_tokens_are_counted_over_a_stream():
    tokenizer = tiny.tokenizer()
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"]
    counts = token_counts(tokenizer, (text for text in ["aab"] * 1000 + ["b"]), len(tokenizer))
    assert (counts[a], counts[b], counts.sum()) == (2000, 1001, 3001)
    with pytest.raises(ConfigError, match="no token to count"):
        token_counts(tokenizer, [""], len(tokenizer))


def test_vocabulary_order_puts_early_merges_first():
    import transformers
    from tokenizers import Tokenizer, models

    vocabulary = {"<eos>": 0, "a": 1, "b": 2, "ab": 3, "abb": 4}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "b")]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>")
    assert vocabulary_order_counts(tokenizer, 6).tolist() == [0, 0, 0, 2, 1, 0]
