"""The chat's page without a browser: what is escaped, what is refused, what is kept where."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from llama_index.core.schema import Document, TextNode

pytest.importorskip("gradio", reason="gradio is not installed (extra chat)")

from fastapi.testclient import TestClient  # noqa: E402
from gradio.utils import get_upload_folder  # noqa: E402

from pipelines.chat_cmd import Questions  # noqa: E402
from pipelines.chat_web import render  # noqa: E402
from pipelines.chat_web.server import BUSY, Settings, _Guard, make_app  # noqa: E402
from pipelines.chat_web.uploads import Added, Uploads, safe_name  # noqa: E402
from pipelines.options import read_questions  # noqa: E402
from rag_embfilter import EmbFilter, ingest  # noqa: E402
from rag_embfilter.chat import Answer, Chat, Claim, Passage  # noqa: E402
from rag_embfilter.errors import ConfigError  # noqa: E402
from rag_embfilter.store import Hit  # noqa: E402

HOSTILE = (
    "<script>x()</script> <img src=x onerror=x()> ![a](http://b) [c](javascript:x()) \"' & ${1} \x1b[31m"
)


@pytest.fixture
def chat(store, encoder):
    filters = [EmbFilter.from_encoder(encoder, "raw"), EmbFilter.from_encoder(encoder, "edge", 2)]
    ingest([Document(id_="a", text="Badges are at reception.")], encoder, filters, store, "docs")
    return Chat(store, "docs-edge-r2", device="cpu")


# What is shown


def tags(page: str) -> set[str]:
    return set(re.findall(r"<([a-z0-9]+)", page))


def test_nothing_from_outside_becomes_a_tag_or_an_attribute():
    node = TextNode(
        text=HOSTILE, metadata={"source": f"/secret/folder/{HOSTILE.replace('/', '')}", "line": 3}
    )
    passage = Passage(1, Hit("1", 0.5, node), 0.5, ((0, 8),))
    known = Answer(HOSTILE, f"{HOSTILE}?", (Claim(HOSTILE, (1,)), Claim(HOSTILE)), (passage,))
    unknown = Answer(HOSTILE, HOSTILE, (), (passage,), False, HOSTILE, HOSTILE)
    turns = [
        render.Turn(i, HOSTILE, answer, HOSTILE, False, HOSTILE) for i, answer in enumerate((known, unknown))
    ]
    turns.append(render.Turn(3, HOSTILE, None, HOSTILE))
    page = render.conversation(turns, "hello") + render.added([Added(HOSTILE, trouble=HOSTILE)], HOSTILE)
    assert tags(page) <= set("div article p span a details summary mark i".split())
    assert set(re.findall(r'href="([^"]*)"', page)) == {"#p0-1"}
    assert "onerror=x()&gt;" in page and "<mark>&lt;script&gt;</mark>x()" in page and "\x1b" not in page
    assert "/secret" not in page and "line 3" in page


def test_a_title_stands_apart_and_marks_keep_their_place():
    node = TextNode(text="My badge Badges are here", metadata={"source": "a", "title": "My badge"})
    passage = Passage(1, Hit("1", 0.5, node), 0.5, ((3, 8), (9, 15)))
    page = render.conversation([render.Turn(1, "?", Answer("?", "?", (Claim("x", (1,)),), (passage,)))], "")
    assert '<span class="title">My <mark>badge</mark></span>' in page
    assert re.search(r"</span>\s*<mark>Badges</mark> are here", page)


# The server


@pytest.fixture
def client(chat):
    chat.warm_up()
    with TestClient(make_app(chat, None, None, Settings())) as opened:
        yield opened


def test_every_page_keeps_to_itself(client):
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "img-src 'self' data: blob:" in policy and "*" not in policy
    assert page.headers["x-frame-options"] == "DENY" and page.headers["referrer-policy"] == "no-referrer"
    assert client.get("/alive").status_code == 200
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400


def test_nobody_reads_files_or_adds_any_when_that_is_off(client):
    assert client.get("/gradio_api/file=/etc/hostname").status_code in (403, 404)
    refused = client.post("/gradio_api/upload", files={"files": ("a.txt", b"text")})
    assert refused.status_code == 403 and "switched off" in refused.json()["detail"]
    assert client.get("/gradio_api/proxy=http://evil.example/").status_code == 403


def test_a_password_closes_the_page_and_what_lies_behind(chat):
    chat.warm_up()
    with TestClient(make_app(chat, None, None, Settings(password="open sesame"))) as client:
        config = client.get("/config")
        assert config.status_code == 401
        assert client.post("/login", data={"username": "a", "password": "wrong"}).status_code == 400
        assert client.post("/login", data={"username": "a", "password": "open sesame"}).status_code == 200
        assert client.get("/config").status_code == 200


def test_a_full_queue_is_worded_for_people():
    async def full(scope, receive, send):
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"Queue is full"})

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/gradio_api/queue/join"}
    asyncio.run(_Guard(full, uploads=False)(scope, None, send))
    assert sent[0]["status"] == 503 and len(sent) == 2 and json.loads(sent[1]["body"])["detail"] == BUSY


# Documents that readers add


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a b.md", "a b.md"),
        ("../../etc/passwd.txt", "passwd.txt"),
        ("..\\..\\boot.txt", "boot.txt"),
        ("/etc/x.md", "x.md"),
        (".hidden.md", "hidden.md"),
        ("a\x00b\n<c>.md", "ab_c_.md"),
        ("résumé 履歴.pdf", "résumé 履歴.pdf"),
        ("..", "document"),
        ("x" * 300 + ".md", "x" * 97 + ".md"),
    ],
)
def test_a_files_name_stays_in_its_folder(given, kept):
    assert safe_name(given) == kept


def results(uploads: Uploads, *files: Path) -> str:
    *_, (_, shown) = uploads.add([str(file) for file in files])
    return re.sub(r"<[^>]*>|\s+", " ", shown)


def test_files_are_taken_one_by_one_and_bad_ones_named(chat, tmp_path):
    given, folder = tmp_path / "given", tmp_path / "added"
    given.mkdir()
    uploads = Uploads(chat, folder, 1, tmp_path)
    before = chat.retriever.relevance
    (given / "good.md").write_text("Parking is in the courtyard.")
    (given / "bad.pdf").write_bytes(b"%PDF-1.4")
    (given / "empty.txt").write_text("")
    (given / "tool.exe").write_text("x")
    (given / "large.txt").write_bytes(b"x" * ((1 << 20) + 1))
    with ZipFile(given / "bomb.docx", "w", ZIP_DEFLATED) as packed:
        packed.writestr("word/document.xml", b"0" * (40 << 20))
    shown = results(uploads, *sorted(given.iterdir()))
    for said in (
        "bad.pdf not a readable PDF",
        "bomb.docx it unpacks to 40 MB",
        "empty.txt the file is empty",
        "good.md 1 passage added",
        "large.txt it has 1.0 MB; 1 MB is the most",
        "tool.exe files of type .exe are not read",
    ):
        assert said in re.sub(r" +", " ", shown), shown
    assert [file.name for file in folder.iterdir()] == ["good.md"]
    assert chat.store.count("docs-raw") == chat.store.count("docs-edge-r2") == 2
    assert chat.retriever.relevance is not before


def test_a_bad_new_version_leaves_the_old_one(chat, tmp_path):
    uploads = Uploads(chat, tmp_path / "added", 1, tmp_path)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "Parking is in the courtyard."}')
    results(uploads, file)
    file.write_text("not JSON")
    assert "not JSON" in results(uploads, file)
    assert "Parking" in (tmp_path / "added" / "a.jsonl").read_text()
    assert chat.store.count("docs-raw") == 2


def test_a_link_in_the_folder_is_not_followed(chat, tmp_path):
    uploads = Uploads(chat, tmp_path / "added", 1, tmp_path)
    target = tmp_path / "target.md"
    target.write_text("mine")
    (tmp_path / "added" / "a.md").symlink_to(target)
    (tmp_path / "a.md").write_text("theirs")
    assert "leads out of the folder" in results(uploads, tmp_path / "a.md")
    (tmp_path / "b.md").symlink_to("/etc/hostname")
    assert "it was not given to this page" in results(uploads, tmp_path / "b.md")
    assert target.read_text() == "mine"


def test_a_collection_of_somebody_else_takes_no_documents(chat, tmp_path):
    chat.embedding = None
    with pytest.raises(ConfigError, match="cannot take documents"):
        Uploads(chat, tmp_path / "added", 1, tmp_path)


# Questions


def test_questions_are_collected_as_they_are_read_again(tmp_path):
    asked = Questions(tmp_path / "new" / "asked.txt")
    for question in ("What\n is it?", "  Why? "):
        asked.add(question)
    assert read_questions(asked.path) == ["What is it?", "Why?"]


def test_a_path_that_was_not_given_to_the_page_is_not_read(chat, tmp_path):
    """A reader who speaks to the server without the page names a file of the server's."""
    secret = tmp_path / "secret.md"
    secret.write_text("The safe's number is 4711.")
    chat.warm_up()
    settings = Settings(upload_folder=tmp_path / "added")
    with TestClient(make_app(chat, None, None, settings)) as client:
        events = client.get("/config").json()["dependencies"]
        (upload,) = (event["id"] for event in events if any(t[1] == "upload" for t in event["targets"]))
        file = {"path": str(secret), "meta": {"_type": "gradio.FileData"}, "orig_name": "secret.md"}
        begin = events[0]["id"]
        for number, data in ((upload, [[file]]), (begin, [file, None])):
            session = {"session_hash": f"s{number}"}
            client.post("/gradio_api/queue/join", json={"data": data, "fn_index": number} | session)
            with client.stream("GET", "/gradio_api/queue/data", params=session) as stream:
                assert '"success":false' in "".join(stream.iter_lines())
    assert list((tmp_path / "added").iterdir()) == []
    assert not [path for path in Path(get_upload_folder()).rglob("secret.md")]
