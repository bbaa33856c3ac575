"""Fitted filters against numpy on all data at once: moments, whitening, centring, baselines, refitting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rag_embfilter import EmbFilter
from rag_embfilter.calibration import Moments, shrunk_whitening
from rag_embfilter.errors import ConfigError
from rag_embfilter.filters import FILTER_TYPES


@pytest.fixture(scope="module")
def unembedding() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(500, 24, generator=generator) * torch.linspace(9, 1, 24)


@pytest.fixture(scope="module")
def corpus() -> np.ndarray:
    """Unit rows around a mean, with an uneven spread."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(200, 24)) * np.linspace(2, 0.1, 24) + 3
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(12, 24)) - 1
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def test_moments_of_parts_are_those_of_the_whole(corpus):
    parts = (corpus[start : start + 7] for start in range(0, 200, 7))
    moments = Moments.of(parts, 24)
    assert moments.n == 200
    np.testing.assert_allclose(moments.mean, corpus.mean(axis=0), atol=1e-7)
    np.testing.assert_allclose(moments.covariance, np.cov(corpus.T, bias=True), atol=1e-9)


def test_moments_do_not_cancel_far_from_zero():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5000, 3)) * 1e-3 + 1000).astype(np.float64)
    moments = Moments.of((x[i : i + 100] for i in range(0, 5000, 100)), 3)
    np.testing.assert_allclose(moments.covariance, np.cov(x.T, bias=True), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("bad", [np.ones((3, 23)), np.ones(24), np.full((3, 24), np.nan)])
def test_moments_refuse_what_they_cannot_use(bad):
    with pytest.raises(ConfigError, match=r"expected \[n, 24\]|NaN or Inf"):
        Moments.of(bad, 24)
    with pytest.raises(ConfigError, match="no embedding to fit on"):
        Moments.of(iter([]), 24)


def test_whitening_gives_the_variances_its_shrinkage_says(corpus):
    moments = Moments.of(corpus, 24)
    for shrinkage in (0.0, 1.0, float("inf")):
        matrix = shrunk_whitening(moments.covariance, np.eye(24), 6, shrinkage)
        z = (corpus - moments.mean) @ matrix.T
        variances = np.sort(np.linalg.eigvalsh(np.cov(corpus.T, bias=True)))[::-1][:6]
        if shrinkage == 0:
            expected = np.ones(6)
        elif np.isinf(shrinkage):
            expected = variances
        else:
            expected = variances / (variances + shrinkage * variances.mean())
        np.testing.assert_allclose(np.cov(z.T, bias=True), np.diag(expected), atol=1e-6)


def test_calibrated_by_the_formula(unembedding, corpus, queries):
    """z = A (u - mean_role): middle directions, PCA there, each component over sqrt(w + mean(w))."""
    made = EmbFilter.from_unembedding(
        unembedding, "calibrated", 4, corpus=corpus, queries=queries, keep=0.75, shrinkage=1.0
    )
    _, _, directions = np.linalg.svd(unembedding.numpy(), full_matrices=False)
    band = directions[3:21].astype(np.float64)  # the middle 18 of 24
    centred = corpus - corpus.mean(axis=0)
    values, vectors = np.linalg.eigh(band @ np.cov(corpus.T, bias=True) @ band.T)
    w, top = values[::-1][:6], vectors[:, ::-1][:, :6]
    expected = centred @ band.T @ top / np.sqrt(w + w.mean())
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    z = made.apply(corpus)
    signs = np.sign((z * expected).sum(axis=0))
    np.testing.assert_allclose(z, expected * signs, atol=1e-3)
    q = (queries - queries.mean(axis=0)) @ made.matrix.T
    np.testing.assert_allclose(
        made.apply(queries, role="query"), q / np.linalg.norm(q, axis=1, keepdims=True), atol=1e-5
    )
    assert (made.name, made.dim) == ("calibrated-r4-k0.75-w1", 6)


def test_an_iterable_corpus_gives_the_same_filter(unembedding, corpus):
    whole = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=corpus)
    parts = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=iter([corpus[:50], corpus[50:]]))
    np.testing.assert_allclose(whole.apply(corpus), parts.apply(corpus), atol=1e-5)


def test_without_questions_the_document_mean_serves_both_and_is_warned_about(unembedding, corpus, caplog):
    made = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=corpus)
    np.testing.assert_array_equal(made.apply(corpus), made.apply(corpus, role="query"))
    assert "no example questions" in caplog.text


def test_other_questions_change_the_query_side_alone(unembedding, corpus, queries, tmp_path):
    made = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=corpus, queries=queries)
    other = made.with_queries(queries[:6])
    assert other.fingerprint.digest == made.fingerprint.digest
    assert other.query_digest != made.query_digest
    np.testing.assert_array_equal(other.apply(corpus), made.apply(corpus))
    assert not np.allclose(other.apply(queries, "query"), made.apply(queries, "query"), atol=1e-3)
    other.save(tmp_path / "f")
    np.testing.assert_array_equal(EmbFilter.load(tmp_path / "f").query_mean, other.query_mean)


def test_another_corpus_is_another_fingerprint(unembedding, corpus):
    one = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=corpus)
    two = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=corpus[:100])
    differing = one.fingerprint.differences(two.fingerprint)
    assert len(differing) == 1 and differing[0].startswith("fit: ")


def test_settings_off_the_default_show_in_the_name(unembedding, corpus):
    made = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=corpus, keep=1, shrinkage=3)
    assert made.name == "calibrated-r4-k1-w3"
    assert EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=corpus).name == "calibrated-r4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give corpus="),
        ({"corpus": np.ones((29, 24))}, "29 passages to fit on; 30 is the least"),
        ({"corpus": np.ones((0, 24))}, "no embedding to fit on"),
        ({"corpus": np.eye(40, 24), "queries": np.ones((4, 24))}, "4 example questions: 5 is the least"),
        ({"corpus": np.eye(40, 24), "queries": np.ones((0, 24))}, "0 example questions"),
        ({"corpus": np.eye(40, 24), "queries": np.ones((9, 23))}, r"expected \[n, 24\]"),
        ({"corpus": np.ones((40, 24))}, "all alike"),
        ({"corpus": np.ones((40, 24)), "keep": 0}, "expected keep over 0 to 1"),
        ({"corpus": np.ones((40, 24)), "shrinkage": -1}, "shrinkage 0 or more"),
    ],
)
def test_fits_that_make_no_sense(unembedding, arguments, message):
    with pytest.raises(ConfigError, match=message):
        EmbFilter.from_unembedding(unembedding, "calibrated", 4, **arguments)


def test_a_plain_filter_takes_no_questions(unembedding, queries):
    with pytest.raises(ConfigError, match="only calibrated filters centre queries"):
        EmbFilter.from_unembedding(unembedding).with_queries(queries)


def test_an_altered_fit_is_refused(unembedding, corpus, tmp_path):
    from safetensors.numpy import load_file, save_file

    made = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=corpus)
    made.save(tmp_path / "f")
    from safetensors import safe_open

    with safe_open(tmp_path / "f", framework="numpy") as stream:
        metadata = stream.metadata()
    arrays = load_file(tmp_path / "f")
    arrays["matrix"] = arrays["matrix"] * 2
    save_file(arrays, tmp_path / "g", metadata)
    with pytest.raises(ConfigError, match="it was altered"):
        EmbFilter.load(tmp_path / "g")


def test_baselines_are_what_they_are_called(unembedding, corpus):
    def made(kind, ratio=4, **more):
        return EmbFilter.from_unembedding(unembedding, kind, ratio, **more)

    x = corpus[:5]
    np.testing.assert_array_equal(made("leading").apply(x, normalize=False), x[:, :6])
    chosen = made("coordinates", seed=1).matrix
    assert (chosen.sum(axis=1) == 1).all() and set(np.unique(chosen)) == {0, 1}
    removed = made("mean_removed", 1, corpus=corpus).apply(x, normalize=False)
    np.testing.assert_allclose(removed, x - corpus.mean(axis=0), atol=1e-6)
    pca = made("pca", corpus=corpus).apply(corpus, normalize=False)
    spread = np.sort(np.linalg.eigvalsh(np.cov(corpus.T, bias=True)))[::-1][:6]
    np.testing.assert_allclose(pca.var(axis=0), spread, rtol=1e-3)
    white = made("whitened", corpus=corpus).apply(corpus, normalize=False)
    np.testing.assert_allclose(white.var(axis=0), 1, atol=1e-2)
    top = np.linalg.eigh(np.cov(corpus.T, bias=True))[1][:, -1]
    without = made("all_but_the_top", 1, corpus=corpus).apply(corpus, normalize=False)
    np.testing.assert_allclose(without @ top, 0, atol=1e-5)
    gaussian = made("gaussian", 1 + 1, seed=5).matrix
    assert gaussian.shape == (12, 24) and abs(gaussian.std() - 1 / np.sqrt(12)) < 0.05


@pytest.mark.parametrize("kind", FILTER_TYPES)
def test_every_type_saves_loads_and_keeps_its_fingerprint(unembedding, corpus, tmp_path, kind):
    from rag_embfilter.recipes import RECIPES

    ratio = 1 if RECIPES[kind].full_size else 3
    counts = np.arange(500, 0, -1.0) if kind == "ideal" else None
    fit = {"corpus": corpus} if RECIPES[kind].fitted else {}
    made = EmbFilter.from_unembedding(unembedding, kind, ratio, frequencies=counts, **fit)
    made.save(tmp_path / "f")
    loaded = EmbFilter.load(tmp_path / "f")
    assert (loaded.name, loaded.fingerprint.digest) == (made.name, made.fingerprint.digest)
    np.testing.assert_array_equal(loaded.apply(corpus, "query"), made.apply(corpus, "query"))


def test_full_size_types_take_no_ratio(unembedding, corpus):
    with pytest.raises(ConfigError, match="filter_ratio is 1, not 2"):
        EmbFilter.from_unembedding(unembedding, "mean_removed", 2, corpus=corpus)
