"""Encoding by a server: the vectors are the local ones, its faults are met, its mistakes are named."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from pipelines.app import main
from rag_embfilter import EmbFilter, EmbFilterEmbedding, Encoder, Store, endpoint
from rag_embfilter.endpoint import EndpointClient, EndpointEncoder, checked_url
from rag_embfilter.errors import ConfigError, EncodingError, EndpointError, FingerprintMismatch
from rag_embfilter.verifying import verify
from tests import tiny
from tests.fake_embeddings import FakeEmbeddings

TEXTS = ["hello", "a longer text, with more to say", "hello", " spaces ", "é" * 30, "x" * 700]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama whose tokenizer adds a begin token."""
    return str(tiny.save_model(tmp_path_factory.mktemp("model") / "begin", "Llama", begin=True))


@pytest.fixture(scope="module")
def local(folder):
    return Encoder(folder, device="cpu")


@pytest.fixture
def served(local, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    with FakeEmbeddings(local) as server:
        yield server


def test_token_prompts_give_the_local_vectors_and_fingerprint(served, local, folder):
    seen = []
    with EndpointEncoder(served.url, folder, batch_tokens=400, batch_size=3) as remote:
        made = remote.encode_documents(TEXTS, progress=seen.append)
        np.testing.assert_allclose(made, local.encode_documents(TEXTS), atol=1e-6)
        assert remote.fingerprint == local.fingerprint and remote.settings == local.settings
        assert str(remote.stats) == "1 of 6 texts truncated, 188+ tokens lost"
    assert sum(seen) == 6
    sent = [prompt for body in served.bodies for prompt in body["input"]]
    assert len(sent) == 5  # equal texts are sent once
    assert all(len(b["input"]) <= 3 and (len(b["input"]) == 1 or sum(map(len, b["input"])) <= 400)
               for b in served.bodies)  # fmt: skip
    assert {body["model"] for body in served.bodies} == {"the-served-name"}
    assert {body["encoding_format"] for body in served.bodies} == {"base64"}


def test_text_prompts_are_joined_and_cut_and_have_a_fingerprint_of_their_own(served, local, folder):
    remote = EndpointEncoder(served.url, folder, prompts="text", max_length=20, query_template="search")
    remote.encode_documents(["hello", "0123456789" * 3])
    remote.encode_queries(["where?"])
    sent = sorted(prompt for body in served.bodies for prompt in body["input"])
    assert sent == [
        'Summarize the sentence: "01234567890123456789" in one word:"',
        'Summarize the sentence: "hello" in one word:"',
        'The text: "where?" is found by searching for the keyword "',
    ]
    same = Encoder(folder, device="cpu", max_length=20, query_template="search")
    assert remote.fingerprint.differences(same.fingerprint) == ["prompts: 'text, by a server' != None"]
    assert remote.settings["endpoint_prompts"] == "text"


def test_several_templates_of_one_pooling_are_joined(served, folder):
    both = ["prompteol", "topic"]
    remote = EndpointEncoder(served.url, folder, both)
    np.testing.assert_allclose(
        remote.encode_queries(TEXTS[:2]),
        Encoder(folder, both, device="cpu").encode_queries(TEXTS[:2]),
        atol=1e-6,
    )


def test_a_server_without_base64_answers_in_floats(served, local, folder, caplog):
    served.base64 = False
    remote = EndpointEncoder(served.url, folder, concurrency=1)
    np.testing.assert_allclose(remote.encode_documents(["a"]), local.encode_documents(["a"]), atol=1e-6)
    assert "no base64" in caplog.text
    assert [body["encoding_format"] for body in served.bodies] == ["base64", "float"]


def test_requests_run_at_once_but_bounded(served, folder):
    remote = EndpointEncoder(served.url, folder, batch_size=1, concurrency=3)
    remote.encode_documents([f"text {i}" for i in range(24)])
    assert 1 < served.most_at_once <= 3


@pytest.mark.parametrize("failures", [[503, 429, None], [500, 502]])
def test_a_busy_server_is_asked_again(served, local, folder, failures, caplog):
    served.failures = list(failures)
    remote = EndpointEncoder(served.url, folder, model="mine")
    np.testing.assert_allclose(remote.encode_documents(["a"]), local.encode_documents(["a"]), atol=1e-6)
    assert len(served.bodies) == len(failures) + 1 and "trying again" in caplog.text


def test_a_server_says_when_to_come_back(served, folder, caplog):
    served.failures, served.headers = [429], {"Retry-After": "0"}
    EndpointEncoder(served.url, folder, model="mine").encode_documents(["a"])
    assert "again in 0.0 s" in caplog.text


def test_a_server_that_stays_away_is_named(folder, local, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.0)
    with FakeEmbeddings(local) as gone:
        url = gone.url
    with pytest.raises(EndpointError, match=f"no answer from {url}/v1 in 6 tries"):
        EndpointEncoder(url, folder, model="mine").encode_documents(["a"])


@pytest.mark.parametrize(
    ("switches", "why"),
    [
        ({"refuse": ("tokens",)}, "endpoint-prompts text"),
        ({"width": 20}, "vectors of 20 dimensions.*have 32"),
        ({"garbage": b"<html>"}, "something else"),
        ({"garbage": b'{"data": []}'}, "0 vectors for 1 prompts"),
        ({"garbage": b'{"data": [{"index": 0, "embedding": "?"}]}'}, "something else"),
        ({"garbage": b'{"data": [{"index": 0, "embedding": [[1.0]]}]}'}, "does not pool"),
        ({"failures": [401]}, "EMBFILTER_ENDPOINT_KEY"),
    ],
)
def test_what_a_server_answers_instead_is_told(local, folder, switches, why):
    with FakeEmbeddings(local, **switches) as server, pytest.raises(EndpointError, match=why):
        EndpointEncoder(server.url, folder, model="mine").encode_documents(["a"])


def test_values_that_are_not_finite_name_the_text(local, folder):
    numbers = json.dumps({"data": [{"index": i, "embedding": [v] * 32} for i, v in enumerate([1.0, 0.0])]})
    with FakeEmbeddings(local, garbage=numbers.encode()) as server, pytest.raises(EncodingError) as caught:
        EndpointEncoder(server.url, folder, model="mine").encode_documents(["abcdef", "b"])
    assert list(caught.value.problems) == [1]


def test_the_key_is_sent_and_never_shown(served, folder, monkeypatch, caplog):
    monkeypatch.setenv("EMBFILTER_ENDPOINT_KEY", "secret-word")
    caplog.set_level(logging.DEBUG)
    served.failures = [503, 404]
    with pytest.raises(EndpointError) as caught:
        EndpointEncoder(served.url, folder, model="mine").encode_documents(["a"])
    assert served.keys == {"Bearer secret-word"}
    assert "secret-word" not in caplog.text + str(caught.value)
    EndpointClient("http://elsewhere.example:1/v1", "m").close()
    assert "unencrypted" in caplog.text


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("https://h/api/v1/", "https://h/api/v1"),
        (" http://h/v1/embeddings ", "http://h/v1"),
    ],
)
def test_addresses(given, url):
    assert checked_url(given) == url


@pytest.mark.parametrize("bad", ["h:8000", "", "ftp://h", "http://me:pw@h", "http://h?key=1"])
def test_bad_addresses_are_refused(bad):
    with pytest.raises(ConfigError):
        checked_url(bad)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pooling": "last+mean"}, "one way"),
        ({"template": "echo"}, "averages over all tokens"),
        ({"template": "plain"}, "averages over all tokens"),  # the begin token
        ({"prompts": "ids"}, "tokens, text"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_what_cannot_be_asked_is_refused_at_once(folder, settings, why):
    with pytest.raises(ConfigError, match=why):
        EndpointEncoder("http://127.0.0.1:9", folder, **settings)


def test_an_embedder_and_a_collection_by_a_server(served, local, folder, tmp_path, capsys):
    remote = EmbFilterEmbedding(model_name=folder, filter_ratio=4, endpoint=served.url)
    here = EmbFilterEmbedding(model_name=folder, filter_ratio=4, device="cpu")
    np.testing.assert_allclose(remote.get_query_embedding("q"), here.get_query_embedding("q"), atol=1e-6)
    assert remote.to_dict() == here.to_dict() and "endpoint" not in remote.to_dict()

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text("Badges are handed out at reception.")
    where = ["--qdrant-path", str(tmp_path / "qdrant")]
    by = ["--endpoint", served.url]
    given = ["ingest", str(tmp_path / "docs"), "--backbone", folder, *where]
    assert main([*given, "--collection", "ids", *by]) == 0
    assert (
        main(["search", "badge", "--collection", "ids", *where, "--device", "cpu"]) == 0
    )  # without the server
    assert main([*given, "--collection", "words", *by, "--endpoint-prompts", "text"]) == 0
    capsys.readouterr()
    assert main(["search", "badge", "--collection", "words", *where]) == 1
    assert "--endpoint URL" in capsys.readouterr().err
    assert main(["search", "badge", "--collection", "words", *where, *by]) == 0
    with Store(path=tmp_path / "qdrant") as store, pytest.raises(FingerprintMismatch, match="prompts"):
        edge = EmbFilter.from_encoder(local, "edge", 2)
        store.require("words-edge-r2", local.fingerprint | edge.fingerprint, 16, writing=False)


MISTAKES = {
    "pooling": ({"pooling": "mean"}, "of the mean of all tokens"),
    "first": ({"pooling": "first"}, "of the first token"),
    "end token": ({"end_token": True}, "with the end token after the prompt"),
    "begin token": ({"begin_token": True}, "with a begin token more"),
    "two at once": (
        {"pooling": "mean", "end_token": True},
        "of the mean of all tokens and with the end token",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_verify_names_the_mistake(local, mistake):
    switches, said = MISTAKES[mistake]
    with FakeEmbeddings(local, **switches) as server:
        tokens, text = verify(EndpointClient(server.url, "m"), local)
    for found in (tokens, text):
        assert (found.verdict, found.good) == ("differs", False)
        assert said in found.detail


def test_verify_sees_a_template_that_the_server_applies_too(local):
    """As of a folder that `export` wrote, whose tokenizer holds the template."""
    builder = local._builders[0]
    head, tail = builder.words["document"]
    with FakeEmbeddings(local, around=(builder.begin + head, tail)) as server:
        tokens, text = verify(EndpointClient(server.url, "m"), local)
    assert tokens.verdict == text.verdict == "differs"
    assert tokens.detail.endswith("with the template applied twice and the begin token too")
    assert text.detail.endswith("with the template applied twice")


@pytest.mark.parametrize("normalize", [True, False])
def test_verify_accepts_a_good_server_at_any_length(local, normalize):
    with FakeEmbeddings(local, normalize=normalize) as server:
        tokens, text = verify(EndpointClient(server.url, "m"), local)
    assert (tokens.verdict, text.verdict) == ("same", "same")
    assert tokens.normalised is normalize and tokens.cosine > 0.99999


def test_verify_tells_other_weights_from_other_use(local, tmp_path):
    other = Encoder(str(tiny.save_model(tmp_path / "other", "Llama", seed=7, begin=True)), device="cpu")
    with FakeEmbeddings(other) as server:
        tokens, _ = verify(EndpointClient(server.url, "m"), local)
    assert tokens.verdict == "unknown" and "other weights" in tokens.detail
    with FakeEmbeddings(local, width=8) as server:
        tokens, _ = verify(EndpointClient(server.url, "m"), local)
    assert "8 dimensions" in tokens.detail


def test_the_command_tells_good_from_bad(local, folder, capsys):
    given = ["--backbone", folder, "--device", "cpu"]
    with FakeEmbeddings(local, refuse=("tokens",)) as server:
        assert main(["verify-endpoint", server.url, *given]) == 0
        assert "--endpoint-prompts text" in capsys.readouterr().out
    with FakeEmbeddings(local, pooling="mean") as server:
        assert main(["verify-endpoint", server.url, *given]) == 1
        assert "mean of all tokens" in capsys.readouterr().out
    with FakeEmbeddings(local, refuse=("tokens", "text")) as server:
        assert main(["verify-endpoint", server.url, *given]) == 1
        assert "status 422" in capsys.readouterr().err
