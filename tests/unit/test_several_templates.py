"""Several templates: raw embeddings joined, filters block-diagonal, and the way through the command line."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from pipelines.app import main
from rag_embfilter import EmbFilter, EmbFilterEmbedding, Encoder, Store
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.normalizing import unit_embeddings
from rag_embfilter.templates import SETS, TEMPLATES, resolve_template
from tests import tiny

TEXTS = ["Paris", "two words", *(f"number {i} is here" for i in range(60))]


@pytest.fixture(scope="module")
def both(llama) -> Encoder:
    return Encoder(str(llama), ["prompteol", "echo"], device="cpu")


@pytest.fixture(scope="module")
def apart(llama) -> list[Encoder]:
    return [Encoder(str(llama), each, device="cpu") for each in ("prompteol", "echo")]


def test_the_raw_embedding_is_one_unit_vector_per_template_joined_and_scaled(both, apart):
    joined = np.hstack([each.encode_documents(TEXTS) for each in apart]) / np.sqrt(2)
    vectors = both.encode_documents(TEXTS)
    assert both.hidden_size == 64 and vectors.shape == (62, 64)
    np.testing.assert_allclose(vectors, joined, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_templates_that_differ_in_pooling_alone_share_a_pass(llama):
    last, mean = (resolve_template("prompteol", pooling=each) for each in ("last", "mean"))
    both = Encoder(str(llama), [last, "echo", mean], device="cpu")
    with tiny.ForwardCounter(both) as counter:
        vectors = both.encode_documents(TEXTS)
    assert counter.texts == 2 * len(TEXTS)
    apart = [Encoder(both.backbone, each).encode_documents(TEXTS) for each in (last, "echo", mean)]
    np.testing.assert_allclose(vectors, np.hstack(apart) / np.sqrt(3), atol=1e-6)


def test_a_pooling_for_several_templates_is_kept_in_the_settings(llama):
    made = Encoder(str(llama), ["prompteol", "echo"], "mean")
    assert Encoder(**made.settings).fingerprint == made.fingerprint
    assert Encoder(str(llama), ["prompteol", "echo"]).settings["pooling"] is None


def test_both_poolings_joined_cost_one_pass(llama):
    both = Encoder(str(llama), "prompteol", "last+mean", query_template="question", device="cpu")
    with tiny.ForwardCounter(both) as counter:
        documents, queries = both.encode_documents(TEXTS), both.encode_queries(TEXTS)
    assert counter.texts == 2 * len(TEXTS) and both.hidden_size == 64
    for vectors, verb in ((documents, "encode_documents"), (queries, "encode_queries")):
        apart = [
            getattr(Encoder(both.backbone, "prompteol", p, query_template="question"), verb)(TEXTS)
            for p in ("last", "mean")
        ]
        np.testing.assert_allclose(vectors, np.hstack(apart) / np.sqrt(2), atol=1e-6)
    assert both.settings["pooling"] == "last+mean" and both.settings["template"] == "prompteol"
    assert Encoder(**both.settings).fingerprint == both.fingerprint
    again = pickle.loads(pickle.dumps(both))
    assert again.settings == both.settings and again.fingerprint == both.fingerprint


def test_both_poolings_of_several_templates(llama):
    made = Encoder(str(llama), ["prompteol", "echo"], "last+mean", device="cpu")
    with tiny.ForwardCounter(made) as counter:
        assert made.encode_documents(["Paris"]).shape == (1, 128)
    assert counter.texts == 2
    assert made.fingerprint.parts["pooling"] == "last + mean + last + mean"
    embedding = EmbFilterEmbedding(
        **{"model_name" if key == "backbone" else key: value for key, value in made.settings.items()}
    )
    assert embedding.filter.dim == 16 and embedding.encoder.fingerprint == made.fingerprint


def test_templates_that_settings_cannot_express_are_refused_by_a_collection(llama, tmp_path):
    odd = [resolve_template("prompteol", pooling="mean"), "question"]
    encoder = Encoder(str(llama), odd, device="cpu")
    with Store(path=tmp_path / "q") as store, pytest.raises(ConfigError, match="cannot be written down"):
        store.create("c", encoder, EmbFilter.from_encoder(encoder), "c")
    with pytest.raises(ConfigError, match="no two alike"):
        Encoder(encoder.backbone, ["prompteol", TEMPLATES["prompteol"].document])


def test_progress_counts_each_text_once_over_all_passes(both):
    seen = []
    both.encode_documents(TEXTS, progress=seen.append)
    assert sum(seen) == len(TEXTS)


def test_states_become_the_unit_embeddings_of_the_same_texts(both, apart):
    for encoder, templates in ((both, 2), (apart[0], 1)):
        states = encoder.encode_documents(TEXTS, normalize=False)
        kept = states.copy()
        np.testing.assert_allclose(
            unit_embeddings(states, templates), encoder.encode_documents(TEXTS), atol=1e-6
        )
        np.testing.assert_array_equal(states, kept)


def test_a_plain_filter_is_block_diagonal_with_the_dimensions_shared(both, apart):
    made = EmbFilter.from_encoder(both, "edge", 4)
    block = EmbFilter.from_encoder(apart[0], "edge", 8).matrix
    assert made.matrix.shape == (8, 64) and made.name == "edge-r4"
    np.testing.assert_array_equal(made.matrix[:4, :32], block)
    np.testing.assert_array_equal(made.matrix[4:, 32:], block)
    assert not made.matrix[:4, 32:].any() and not made.matrix[4:, :32].any()


def test_dimensions_that_cannot_be_halved_are_shared_as_evenly_as_can_be(both):
    assert EmbFilter.from_encoder(both, "tail", 6).dim == 5  # 32 // 6, as 3 and 2
    assert EmbFilter.from_encoder(both, "raw").dim == 64
    with pytest.raises(ConfigError, match="for each template and pooling; the largest ratio is 16"):
        EmbFilter.from_encoder(both, "edge", 17)
    with pytest.raises(ConfigError, match="single template"):
        EmbFilter.from_encoder(both, "edge", 4, band_start=0)


def test_calibrated_templates_are_calibrated_apart_and_condensed_together(both, apart):
    """Each at a quarter of its size, then the principal components of both, here by numpy's SVD."""
    x = both.encode_documents(TEXTS)
    made = EmbFilter.from_encoder(both, "calibrated", 8, corpus=x, queries=x[:9])
    parts = []
    for encoder in apart:
        own_x = encoder.encode_documents(TEXTS)
        own = EmbFilter.from_encoder(encoder, "calibrated", 4, corpus=own_x, queries=own_x[:9])
        parts.append(own.apply(own_x, normalize=False))
    joined = np.hstack(parts)  # [62, 16]
    left, singular, _ = np.linalg.svd(joined - joined.mean(axis=0), full_matrices=False)
    expected = left[:, :4] * singular[:4]
    ours = made.apply(x, normalize=False)
    assert ours.shape == (62, 4)
    np.testing.assert_allclose(ours @ ours.T, expected @ expected.T, atol=2e-3)
    np.testing.assert_allclose(made.document_mean, x.mean(axis=0), atol=1e-6)


def test_calibrated_templates_with_room_for_all_keep_all(both, apart):
    x = both.encode_documents(TEXTS)
    made = EmbFilter.from_encoder(both, "calibrated", 2, corpus=x, queries=x[:9])
    own_x = apart[1].encode_documents(TEXTS)
    own = EmbFilter.from_encoder(apart[1], "calibrated", 4, corpus=own_x, queries=own_x[:9])
    np.testing.assert_allclose(np.abs(made.matrix[8:, 32:] / np.sqrt(2)), np.abs(own.matrix), atol=2e-3)
    assert not made.matrix[8:, :32].any() and made.dim == 16


def test_fingerprints_settings_and_pickles(both, apart):
    assert both.fingerprint.digest not in {each.fingerprint.digest for each in apart}
    assert Encoder(**both.settings, device="cpu").fingerprint == both.fingerprint
    again = pickle.loads(pickle.dumps(both))
    assert again.fingerprint == both.fingerprint and again.settings == both.settings


def test_a_text_that_spoils_one_template_spoils_its_row(both):
    with tiny.Spoil(both, "#", float("nan")), pytest.raises(EncodingError, match="item 1: .*NaN"):
        both.encode_documents(["a", "b#", "c"])
    with tiny.Spoil(both, "#", 0.0), pytest.raises(EncodingError, match="item 1"):
        both.encode_documents(["a", "b#", "c"])


def test_the_embedder_takes_a_list(llama, both):
    embedding = EmbFilterEmbedding(model_name=str(llama), template=["prompteol", "echo"], device="cpu")
    expected = EmbFilter.from_encoder(both).apply(both.encode_queries(["a"]), "query")[0]
    np.testing.assert_allclose(embedding.get_query_embedding("a"), expected, atol=1e-6)
    again = EmbFilterEmbedding.from_dict(embedding.to_dict())
    assert again.fingerprint == embedding.fingerprint


@pytest.mark.parametrize("templates", [[], ["echo", "echo"]])
def test_none_or_two_alike_are_refused(llama, templates):
    with pytest.raises(ConfigError, match="one or more, no two alike"):
        Encoder(str(llama), templates, device="cpu")
    with pytest.raises(ConfigError, match="for one alone"):
        Encoder(str(llama), ["echo", "plain"], query_template="question", device="cpu")


def test_the_command_line_from_ingest_to_search(llama, tmp_path, capsys):
    docs = tmp_path / "docs"
    docs.mkdir()
    for i, text in enumerate(TEXTS):
        (docs / f"{i}.txt").write_text(text)
    common = ["--collection", "c", "--qdrant-path", str(tmp_path / "q")]
    ingest = ["ingest", "--template", "prompteol", "echo", str(docs), "--backbone", str(llama), *common]
    assert main([*ingest, "--filter-types", "edge", "calibrated", "--filter-ratios", "4"]) == 0
    with Store(path=tmp_path / "q") as store:
        assert {name: store.info(name).dim for name in store.names()} == {
            "c-raw": 64, "c-edge-r4": 8, "c-calibrated-r4": 8,
        }  # fmt: skip
    for kind in ("edge", "calibrated"):
        capsys.readouterr()
        search = ["search", "Paris", "--filter-types", kind, "--filter-ratios", "4", "--limit", "3", *common]
        assert main(search) == 0
        assert capsys.readouterr().out.count(".txt, chunk 0") == 3


def test_a_set_is_averaged_and_then_scaled(llama):
    """MetaEOL: the mean of its templates' unit vectors, the width of one."""
    encoder = Encoder(str(llama), "metaeol", device="cpu", max_length=40)
    texts = ["hello there", "x" * 60]
    one = [
        Encoder(str(llama), t, max_length=40, device="cpu").encode_documents(texts) for t in SETS["metaeol"]
    ]
    mean = np.mean(one, axis=0)
    expected = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.encode_documents(texts), expected, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_queries(texts, normalize=False), mean, atol=1e-5)
    assert len(encoder.templates) == 8 and encoder.hidden_size == 32
    edge = EmbFilter.from_encoder(encoder, "edge", 2)
    single = EmbFilter.from_encoder(Encoder(encoder.backbone, max_length=40), "edge", 2)
    assert edge.fingerprint == single.fingerprint  # the filter is the backbone's, as for one template
    assert encoder.fingerprint.parts["averaged"] == "8 templates"


def test_a_set_survives_pickling_and_settings(llama):
    encoder = Encoder(str(llama), "metaeol", device="cpu", max_length=40)
    assert encoder.settings["template"] == "metaeol"
    again = pickle.loads(pickle.dumps(encoder))
    assert (again.fingerprint, again.hidden_size) == (encoder.fingerprint, 32)
    joined = Encoder(encoder.backbone, ["prompteol", "topic"], max_length=40)
    assert "averaged" not in joined.fingerprint.parts


@pytest.mark.parametrize(
    "settings",
    [
        {"template": ["metaeol", "search"]},
        {"template": "metaeol", "pooling": "last+mean"},
        {"template": "metaeol", "query_template": "search"},
    ],
)
def test_a_set_is_taken_alone(llama, settings):
    with pytest.raises(ConfigError, match="averaged"):
        Encoder(str(llama), device="cpu", **settings)
