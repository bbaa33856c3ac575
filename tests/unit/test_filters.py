"""EmbFilter against torch's SVD, each type by hand, and every refusal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rag_embfilter import EmbFilter
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.spectrum import Spectrum, unembedding_digest


@pytest.fixture(scope="module")
def unembedding() -> torch.Tensor:
    """A matrix with a spread spectrum and two dominant directions, as real ones have."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.linspace(5, 0.5, 48)
    scales[:2] = torch.tensor([90.0, 30.0])
    return torch.randn(1000, 48, generator=generator) @ torch.diag(scales) + 0.1


@pytest.fixture(scope="module")
def svd(unembedding) -> tuple[np.ndarray, np.ndarray]:
    _, values, directions = torch.linalg.svd(unembedding, full_matrices=False)
    return directions.numpy(), values.numpy()


def test_edge_is_the_middle_rows_of_the_svd_up_to_sign(unembedding, svd):
    matrix = EmbFilter.from_unembedding(unembedding, "edge", 2).matrix
    middle = svd[0][12:36]
    signs = np.sign((matrix * middle).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(matrix, signs * middle, atol=1e-3)


@pytest.mark.parametrize(
    ("filter_type", "ratio", "band_start", "rows"),
    [
        ("edge", 2, None, range(12, 36)),
        ("edge", 4, None, range(18, 30)),
        ("edge", 5, None, range(19, 28)),  # 48 // 5 = 9 directions
        ("edge", 4, 3, range(3, 15)),
        ("tail", 4, None, range(12)),
        ("head", 4, None, range(36, 48)),
        ("mid", 4, None, [*range(6), *range(42, 48)]),
        ("mid", 5, None, [*range(4), *range(43, 48)]),
    ],
)
def test_projector_keeps_the_subspace_of_its_type(unembedding, svd, filter_type, ratio, band_start, rows):
    made = EmbFilter.from_unembedding(unembedding, filter_type, ratio, band_start)
    kept = svd[0][list(rows)]
    assert np.linalg.norm(made.projector() - kept.T @ kept) < 1e-2
    assert (made.dim, made.hidden_size) == (len(rows), 48)


def test_singular_values_and_signs(unembedding, svd):
    spectrum = Spectrum.of(unembedding)
    np.testing.assert_allclose(spectrum.singular_values, svd[1], rtol=1e-4)
    peaks = np.abs(spectrum.directions).argmax(axis=1)
    assert (spectrum.directions[np.arange(48), peaks] > 0).all()
    np.testing.assert_allclose(spectrum.directions @ spectrum.directions.T, np.eye(48), atol=1e-5)


def test_unused_rows_play_no_part(unembedding):
    rubbish = torch.cat([unembedding, 1e3 * torch.randn(7, 48)])
    used = torch.arange(1007) < 1000
    clean = EmbFilter.from_unembedding(unembedding)
    np.testing.assert_allclose(
        EmbFilter.from_unembedding(rubbish, used_rows=used).matrix, clean.matrix, atol=1e-5
    )
    assert unembedding_digest(rubbish, used) == unembedding_digest(unembedding)
    assert unembedding_digest(rubbish) != unembedding_digest(unembedding)


@pytest.mark.parametrize("filter_type", ["edge", "head", "tail", "mid", "rand", "raw"])
def test_ratio_one_is_raw(unembedding, filter_type):
    made = EmbFilter.from_unembedding(unembedding, filter_type, 1)
    assert (made.name, made.filter_type, made.filter_ratio) == ("raw", "raw", 1)
    np.testing.assert_array_equal(made.matrix, np.eye(48))


def test_rand_depends_on_its_seed_alone(unembedding):
    first, again, other = (EmbFilter.from_unembedding(unembedding, "rand", 4, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.matrix, again.matrix)
    assert first.fingerprint.digest != other.fingerprint.digest
    assert (first.name, other.name) == ("rand-r4-s1", "rand-r4-s2")


def test_names_tell_filters_apart(unembedding):
    made = [
        EmbFilter.from_unembedding(unembedding, "edge", 4).name,
        EmbFilter.from_unembedding(unembedding, "edge", 4, band_start=18).name,  # the middle, said aloud
        EmbFilter.from_unembedding(unembedding, "edge", 4, band_start=0).name,
    ]
    assert made == ["edge-r4", "edge-r4", "edge-r4-b0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filter_type": "egde"}, "'egde': expected one of raw, edge, head, tail, mid, rand"),
        ({"filter_ratio": 49}, "leaves no dimension of 48; the largest ratio is 48"),
        ({"filter_ratio": 0}, "expected a whole number of 1 or more"),
        ({"filter_ratio": 1.5}, "expected a whole number of 1 or more"),
        ({"filter_ratio": True}, "expected a whole number of 1 or more"),
        ({"band_start": 25}, "can start at 0 to 24"),
        ({"band_start": -1}, "can start at 0 to 24"),
        ({"filter_type": "tail", "band_start": 3}, "only `edge` has a band"),
        ({"filter_type": "rand", "seed": -1}, "seed -1"),
    ],
)
def test_arguments_that_make_no_sense(unembedding, arguments, message):
    with pytest.raises(ConfigError, match=message):
        EmbFilter.from_unembedding(unembedding, **arguments)


def test_an_unembedding_that_is_no_matrix_or_not_finite(unembedding):
    with pytest.raises(ConfigError, match=r"\(48,\): expected \[vocab, hidden\]"):
        EmbFilter.from_unembedding(unembedding[0])
    damaged = unembedding.clone()
    damaged[3, 3] = float("nan")
    with pytest.raises(ConfigError, match="NaN or Inf"):
        EmbFilter.from_unembedding(damaged)


def test_apply_by_numpy_and_the_distances_of_the_projection(unembedding):
    made = EmbFilter.from_unembedding(unembedding, "edge", 4)
    x = np.random.default_rng(0).normal(size=(6, 48)).astype(np.float32)
    z = made.apply(x, normalize=False)
    np.testing.assert_allclose(z, x @ made.matrix.T, atol=1e-5)
    projected = x @ made.projector()
    np.testing.assert_allclose(
        np.linalg.norm(z[0] - z[1]), np.linalg.norm(projected[0] - projected[1]), rtol=1e-4
    )
    unit = made.apply(x)
    np.testing.assert_allclose(unit, z / np.linalg.norm(z, axis=1, keepdims=True), atol=1e-6)
    assert unit.dtype == np.float32
    np.testing.assert_array_equal(unit, made.apply(x, role="query"))


def test_states_of_any_length_go_through_the_same_linear_map(unembedding):
    made = EmbFilter.from_unembedding(unembedding, "edge", 4)
    unit = np.eye(48, dtype=np.float32)[:3]
    states = unit * np.array([[200.0], [3.0], [0.5]], np.float32)
    np.testing.assert_allclose(
        made.apply(states, normalize=False), [[200], [3], [0.5]] * made.matrix.T[:3], rtol=1e-5
    )
    np.testing.assert_allclose(made.apply(states), made.apply(unit), atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_filter_with_means_takes_unit_embeddings_alone(unembedding, normalize):
    x = np.random.default_rng(0).normal(size=(60, 48)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    made = EmbFilter.from_unembedding(unembedding, "calibrated", 4, corpus=x, queries=x[:9])
    rounded = x.astype(np.float16).astype(np.float32)
    assert made.apply(rounded, normalize=normalize).shape == (60, 12)
    x[7] *= 31
    with pytest.raises(ConfigError, match="calibrated-r4 subtracts a mean .* item 7 has length 31: encode"):
        made.apply(x, normalize=normalize)


@pytest.mark.parametrize("shape", [(48,), (2, 47), (2, 3, 48)])
def test_apply_refuses_another_shape(unembedding, shape):
    with pytest.raises(ConfigError, match=r"takes \[n, 48\]"):
        EmbFilter.from_unembedding(unembedding).apply(np.ones(shape, np.float32))


def test_apply_refuses_an_unknown_role(unembedding):
    with pytest.raises(ConfigError, match="expected document or query"):
        EmbFilter.from_unembedding(unembedding).apply(np.ones((1, 48)), role="passage")


def test_c11_a_vector_in_the_null_space_is_named(unembedding):
    made = EmbFilter.from_unembedding(unembedding, "edge", 2)
    x = np.random.default_rng(1).normal(size=(5, 48)).astype(np.float32)
    x[3] = Spectrum.of(unembedding).directions[0]  # the largest direction, which edge removes
    x[4, 0] = np.nan
    with pytest.raises(EncodingError, match="item 3: nothing is left.*item 4: .*NaN") as caught:
        made.apply(x)
    np.testing.assert_allclose(np.linalg.norm(caught.value.embeddings, axis=1), [1, 1, 1, 0, 0], atol=1e-6)


def test_no_rows_in_no_rows_out(unembedding):
    assert EmbFilter.from_unembedding(unembedding).apply(np.empty((0, 48))).shape == (0, 24)


def test_save_and_load_keep_everything(unembedding, tmp_path):
    made = EmbFilter.from_unembedding(unembedding, "edge", 4, band_start=3)
    made.save(tmp_path / "sub" / "f.safetensors")
    loaded = EmbFilter.load(tmp_path / "sub" / "f.safetensors")
    np.testing.assert_array_equal(loaded.matrix, made.matrix)
    assert (loaded.parts, loaded.name) == (made.parts, "edge-r4-b3")
    assert loaded.fingerprint.digest == made.fingerprint.digest


def test_load_refuses_what_save_did_not_write(unembedding, tmp_path):
    from safetensors.numpy import save_file

    (tmp_path / "text").write_text("hello")
    save_file({"matrix": np.eye(3, dtype=np.float32)}, tmp_path / "bare")
    meta = {"embfilter": '{"parts": {"filter_type": "edge", "filter_ratio": 2}, "digest": "0"}'}
    save_file({"matrix": np.eye(3, dtype=np.float32)}, tmp_path / "altered", meta)
    for name in ("absent", "text", "bare", "altered"):
        with pytest.raises(ConfigError, match=name):
            EmbFilter.load(tmp_path / name)


def test_from_encoder_equals_from_unembedding_and_is_cached(encoder):
    made = EmbFilter.from_encoder(encoder, "edge", 2)
    backbone = encoder.backbone
    direct = EmbFilter.from_unembedding(backbone.unembedding, used_rows=backbone.used_rows)
    np.testing.assert_array_equal(made.matrix, direct.matrix)
    assert made.fingerprint.digest == direct.fingerprint.digest
    np.testing.assert_array_equal(EmbFilter.from_encoder(encoder, "edge", 2).matrix, made.matrix)


def test_a_damaged_cache_entry_is_made_again(encoder):
    from rag_embfilter.files import cache_folder

    made = EmbFilter.from_encoder(encoder)
    path = cache_folder("spectra") / f"{encoder.unembedding_digest()}.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    np.testing.assert_array_equal(EmbFilter.from_encoder(encoder).matrix, made.matrix)


def test_the_digest_does_not_depend_on_the_dtype_it_is_computed_in(unembedding):
    stored = unembedding.to(torch.bfloat16)
    assert unembedding_digest(stored) == unembedding_digest(stored.float())
