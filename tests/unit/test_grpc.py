"""The store by gRPC: the same as embedded, tried again where that does no harm, and errors of one line."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import ssl
import subprocess
import threading
from pathlib import Path

import certifi
import grpc
import numpy as np
import pytest
from grpc import StatusCode
from llama_index.core.schema import Document, TextNode
from qdrant_client.grpc import collections_service_pb2, points_service_pb2

from pipelines.app import main
from rag_embfilter import EmbFilter, Store, ingest
from rag_embfilter.errors import ConfigError, FingerprintMismatch, StoreError
from rag_embfilter.store import connection
from rag_embfilter.store.retrying import HARMLESS, grpc_options
from tests.fake_grpc import FakeGrpc
from tests.fake_qdrant import FakeQdrant


@pytest.fixture
def server():
    fake = FakeGrpc()
    yield fake
    fake.stop()


@pytest.fixture
def remote(server, monkeypatch):
    """A store on the server whose second tries come soon."""
    monkeypatch.setattr(connection, "grpc_options", functools.partial(grpc_options, first_wait=0.01))
    with Store(url="http://127.0.0.1:1", grpc=True, grpc_port=server.port, timeout=30) as opened:
        yield opened


def _corpus(n: int, **changed: str) -> list[Document]:
    texts = {f"d{i}": f"text number {i}" for i in range(n)} | changed
    return [
        Document(id_=name, text=text, metadata={"year": 2000 + i % 3, "share": 0.5, "final": True})
        for i, (name, text) in enumerate(texts.items())
    ]


def test_by_grpc_and_embedded_agree(remote, store, encoder):
    filters = [EmbFilter.from_encoder(encoder, t, r) for t, r in (("raw", 1), ("edge", 2), ("tail", 4))]
    queries = encoder.encode_queries(["text number 7", "another"])
    for corpus in (_corpus(30), _corpus(30, d3="other words")):
        reports = [ingest(corpus, encoder, filters, s, "c") for s in (remote, store)]
        assert vars(reports[0]) == vars(reports[1])
    assert (reports[0].changed, reports[0].unchanged) == (1, 29)
    for embfilter, name in zip(filters, reports[0].collections, strict=True):
        infos = [s.info(name) for s in (remote, store)]
        assert infos[0].points == infos[1].points == 30
        assert infos[0].fingerprint == infos[1].fingerprint and infos[0].settings == infos[1].settings
        assert remote.only_vector(name) == store.only_vector(name)
        assert remote.sources(name) == store.sources(name)
        pages = [list(s.pages(name)) for s in (remote, store)]
        assert pages[0][0].ids == pages[1][0].ids and pages[0][0].payloads == pages[1][0].payloads
        np.testing.assert_allclose(pages[0][0].vectors, pages[1][0].vectors, atol=1e-6)
        for where in (None, {"year": "2001", "final": "true"}, {"share": "0.5"}):
            ours, theirs = (s.search(name, embfilter.apply(queries), where=where) for s in (remote, store))
            for a, b in zip(ours, theirs, strict=True):
                assert [h.id for h in a] == [h.id for h in b] and a
                assert [h.node.metadata for h in a] == [h.node.metadata for h in b]
    mid = EmbFilter.from_encoder(encoder, "mid", 2)
    with pytest.raises(FingerprintMismatch):
        remote.require("c-edge-r2", encoder.fingerprint | mid.fingerprint, mid.dim, writing=True)
    remote.adopt("c-edge-r2", encoder, mid, override=True)
    assert remote.info("c-edge-r2").fingerprint == encoder.fingerprint | mid.fingerprint
    assert remote.switch("live", "c-edge-r2") is None and remote.info("live").name == "c-edge-r2"
    with pytest.raises(StoreError, match="'nope' is not in .*c-edge-r2"):
        remote.info("nope")
    remote.delete("c-tail-r4")
    assert remote.names() == ["c-edge-r2", "c-raw"]


def test_reading_and_points_are_tried_again_and_a_whole_batch_too(remote, server, encoder):
    raw = EmbFilter.from_encoder(encoder, "raw")
    remote.create("c-raw", encoder, raw, "c")
    server.calls.clear()
    server.faults["Upsert"] = [StatusCode.UNAVAILABLE] * 3
    large = [TextNode(text="x" * 2_000_000, id_="0" * 32)]  # gRPC by itself would keep 256 KiB to send again
    remote.upsert("c-raw", large, np.ones((1, 32), np.float32))
    server.faults["Count"] = [StatusCode.UNAVAILABLE]
    server.faults["List"] = [StatusCode.UNAVAILABLE] * 2
    assert remote.count("c-raw") == 1 and remote.names() == ["c-raw"]
    assert (server.calls["Upsert"], server.calls["Count"], server.calls["List"]) == (4, 2, 3)


def test_what_might_do_harm_twice_is_not_sent_twice_and_patience_ends(remote, server, encoder):
    raw = EmbFilter.from_encoder(encoder, "raw")
    server.faults["Create"] = [StatusCode.UNAVAILABLE]
    with pytest.raises(StoreError, match=r"^cannot reach Qdrant at \S+ by gRPC: told to\. Is it"):
        remote.create("c-raw", encoder, raw, "c")
    server.faults["List"] = [StatusCode.UNAVAILABLE] * 50
    with pytest.raises(StoreError, match="cannot reach Qdrant"):
        remote.names()
    server.faults["CollectionExists"] = [StatusCode.UNAUTHENTICATED]
    with pytest.raises(StoreError, match="answered UNAUTHENTICATED: told to$"):
        remote.exists("c")
    assert (server.calls["Create"], server.calls["List"], server.calls["CollectionExists"]) == (1, 5, 2)


def test_a_server_that_restarts_is_waited_for(remote, server):
    assert remote.names() == []
    server.stop()
    back = threading.Timer(0.3, server.start)
    back.start()
    assert remote.names() == []
    back.join()


def test_a_wrong_port_fails_at_once():
    with pytest.raises(StoreError, match=r"cannot reach Qdrant at http://127\S+:1 by gRPC.*port open"):
        Store(url="http://127.0.0.1:1", grpc=True, grpc_port=9)


def test_the_methods_named_as_harmless_exist():
    for module, service in ((points_service_pb2, "Points"), (collections_service_pb2, "Collections")):
        known = set(module.DESCRIPTOR.services_by_name[service].methods_by_name)
        assert set(HARMLESS[f"qdrant.{service}"]) <= known
    retried, waiting = json.loads(grpc_options()["grpc.service_config"])["methodConfig"]
    assert retried["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    named = {(each["service"], each["method"]) for each in retried["name"]}
    assert ("qdrant.Points", "Upsert") in named and ("qdrant.Collections", "Create") not in named
    assert "retryPolicy" not in waiting and {"service": "qdrant.Points"} in waiting["name"]


def _given(monkeypatch, **arguments):
    """What the client is made with."""
    given = {}

    def noting(**keywords):
        given.update(keywords)
        raise ValueError("enough")

    monkeypatch.setattr(connection, "QdrantClient", noting)
    with pytest.raises(StoreError, match="enough"):
        Store(**arguments)
    return given


def test_what_the_client_is_given(monkeypatch, tmp_path):
    authorities = Path(certifi.where())
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
    given = _given(monkeypatch, url="https://q:6333", api_key="k", grpc=True, grpc_port=7)
    assert (given["prefer_grpc"], given["grpc_port"], given["api_key"]) == (True, 7, "k")
    assert given["grpc_options"]["root_certificates"] == authorities.read_bytes()
    given = _given(monkeypatch, url="http://q:6333", api_key="", grpc=True)
    assert "root_certificates" not in given["grpc_options"]
    assert (given["grpc_port"], given["api_key"]) == (6334, None)
    given = _given(monkeypatch, url="http://q:6333")
    assert (given["prefer_grpc"], given["grpc_options"]) == (False, None)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    for url in ("https://q:6333", "http://q:6333"):
        with pytest.raises(StoreError, match=r"certificates of SSL_CERT_FILE '\S+none\.pem' cannot be read"):
            Store(url=url, grpc=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate of one's own for 127.0.0.1, and its key."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("authority")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key.pem", "-out", "ca.pem"]
    subprocess.run(["openssl", "req", "-x509", *made, *names], cwd=folder, check=True, capture_output=True)
    return folder / "ca.pem", folder / "key.pem"


@pytest.mark.parametrize("by_grpc", [False, True])
def test_https_with_an_authority_of_ones_own(authority, monkeypatch, by_grpc):
    """SSL_CERT_FILE is heeded both ways, and without it nothing is sent."""
    certificate, key = authority
    if by_grpc:
        pair = [(key.read_bytes(), certificate.read_bytes())]
        fake = FakeGrpc(grpc.ssl_server_credentials(pair))
        settings = {"url": "https://127.0.0.1:1", "grpc": True, "grpc_port": fake.port}
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        fake = FakeQdrant(context)
        settings = {"url": fake.url}
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Store(api_key="k", **settings) as opened:
        assert opened.names() == []
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(StoreError, match="cannot reach Qdrant at https"):
        Store(api_key="k", timeout=5, **settings)
    fake.stop()


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("http://qdrant.example:6333", True),
        ("http://10.0.0.7:6333", True),
        ("https://qdrant.example:6333", False),
        ("qdrant.example:6333", False),  # https to the client, with a key
        ("http://localhost:6333", False),
        ("http://127.0.0.1:6333", False),
        ("http://[::1]:6333", False),
    ],
)
def test_a_key_that_goes_unencrypted_to_another_machine_is_warned_about(monkeypatch, caplog, url, warned):
    with caplog.at_level(logging.WARNING):
        _given(monkeypatch, url=url, api_key="secret")
    said = [f"the API key goes to {url} unencrypted; use https"] if warned else []
    assert caplog.messages == said


def test_the_key_is_sent_and_the_clients_own_warning_is_not_shown(server, recwarn):
    with Store(url="http://127.0.0.1:1", api_key="k", grpc=True, grpc_port=server.port) as opened:
        assert opened.names() == []
    assert server.keys == {"k"} and not recwarn.list


def test_the_command_lines_option(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("QDRANT_URL", raising=False)
    assert main(["collections", "list", "--qdrant-path", str(tmp_path / "q"), "--qdrant-grpc"]) == 1
    assert "gRPC is a server's; give its url (--qdrant-url)" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigError, match="gRPC is a server's"):
        Store(path=tmp_path / "q", grpc=True)
    asked = {}
    monkeypatch.setattr("rag_embfilter.store.Store.__init__", lambda self, **k: asked.update(k) or _stop())
    monkeypatch.setenv("QDRANT_GRPC", "1")
    assert main(["collections", "list", "--qdrant-url", "http://q:6333"]) == 1
    assert asked["grpc"] is True


def _stop():
    raise StoreError("enough")
