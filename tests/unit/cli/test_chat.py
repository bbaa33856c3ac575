"""`chat` in the terminal, and what it refuses."""

from __future__ import annotations

import pytest

from pipelines import chat_cmd, show
from tests.unit.cli.checks import HOLIDAY, LAPTOP, refused


@pytest.fixture
def say(monkeypatch):
    """What is typed, line by line, then the end of the input."""

    def typed(*lines: str) -> None:
        left = iter(lines)

        def read(prompt: str) -> str:
            line = next(left, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr(show.out, "input", read)

    return typed


def test_questions_answers_passages_and_commands(run, stored, say, tmp_path):
    say(LAPTOP, "/open 1", "/open 9", "^C", f"/compare {HOLIDAY}", "/help", "/new", "/quit", "never read")
    asked = tmp_path / "asked.txt"
    done = run(
        "chat", "--collection", "docs", "--llm", "none", "--device", "cpu", "--compare", "docs-raw",
        "--collect", asked,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert f"{LAPTOP} [1]" in done.out and f"[1] 1.000 {stored.as_posix()}/a.txt, chunk 0" in done.out
    assert "no passage 9; the last answer has 4." in done.out and "/quit ends" in done.out
    assert "docs-raw: 128 bytes a vector" in done.out and "docs-edge-r2: 64 bytes a vector" in done.out
    assert f"1. 1.000   = {HOLIDAY}" in done.out and "Forgotten." in done.out
    assert asked.read_text() == f"{LAPTOP}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--llm", "gpt"], "llm 'gpt': expected local, none, openai:MODEL"),
        (["--mode", "magic"], "mode 'magic': expected one of dense, bm25, hybrid"),
        (["--mode", "hybrid"], "has no BM25 vectors"),
        (["--password"], "are for the browser; give --web"),
        (["--compare", "nowhere"], "collection 'nowhere' is not in"),
        (["--llm", "openai:m@http://user:word@host/v1"], "without user, password"),
    ],
)
def test_what_cannot_be_is_refused(run, stored, words, message):
    refused(run("chat", "--collection", "docs", "--llm", "none", "--device", "cpu", *words), message)


def test_a_short_password_is_refused_and_never_shown(run, stored, monkeypatch):
    monkeypatch.setenv(chat_cmd.PASSWORD, "hunter2")
    done = run("chat", "--collection", "docs", "--llm", "none", "--web", "--password")
    refused(done, "the password has 7 characters; expected 8 or more")
    assert "hunter2" not in done.err
