"""RAGAS with a judge: hand values, failures by reason, cache, limits, dry run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time

import numpy as np
import pytest

from pipelines.options import JUDGED as OPTION_WORDS
from rag_embfilter import EvalSet, judge
from rag_embfilter.errors import ConfigError
from rag_embfilter.eval_set import Passage
from rag_embfilter.judge import Asking, EndpointSpec, Judging
from rag_embfilter.judge.adapters import parse
from tests.fake_openai import FakeOpenAI, good

pytest.importorskip("ragas")
pytestmark = pytest.mark.usefixtures("no_key")

PASSAGES = {"p1": "Badges are at reception.", "p2": "Lunch is at noon.", "p3": "Bikes go below."}


def make_set(queries: dict[str, str], answers: dict[str, list[str]] | None = None) -> EvalSet:
    corpus = {key: Passage("", text) for key, text in PASSAGES.items()}
    answers = {query: [f"Reference for {query}."] for query in queries} if answers is None else answers
    return EvalSet("tiny", corpus, queries, {query: {"p1": 1} for query in queries}, answers)


ONE = make_set({"q": "Where are badges?"})
RUN = {"q": ["p2", "p1", "p3"]}


def ones(texts) -> np.ndarray:
    return np.ones((len(texts), 1), dtype=np.float32)


def judging(server: FakeOpenAI, *metrics: str, top_k: int = 5, **asking: object) -> Judging:
    spec = EndpointSpec.parse(server.spec)
    return Judging(spec, None, metrics or None, top_k, Asking(**({"timeout": 20} | asking)))


@pytest.mark.parametrize(
    ("metric", "answers", "expected"),
    [
        # Useful: no, yes, no. Precision at the only hit: 1/2.
        ("context_precision", {"Lunch": 0, "Badges are": 1, "Bikes": 0}, 0.5),
        ("context_recall", {"classifications": [1, 0, 0]}, 1 / 3),
        ("faithfulness", {"statements": [1, 1, 0, 1]}, 0.75),
        # cos of (1, 0) and (0.6, 0.8).
        ("answer_relevancy", {"question": "asked back"}, 0.6),
        # Answer: 1 of 2 claims hold. Reference: 1 of 1. F1 of 1/2 and 1, which RAGAS rounds.
        ("factual_correctness", {"statements": [1, 0], "reference": [1]}, 0.67),
    ],
)
def test_metrics_equal_hand_values(metric, answers, expected):
    def rule(prompt: str, times: int) -> str:
        asked = prompt.rpartition("Now perform the same")[2]
        if "JSON Schema" not in prompt:
            return "<think>first {think}</think>At reception."
        if metric == "context_precision":
            verdict = next(v for words, v in answers.items() if words in asked)
            return json.dumps({"reason": "", "verdict": verdict})
        if metric == "context_recall":
            found = [{"statement": "s", "reason": "", "attributed": a} for a in answers["classifications"]]
            return f"Here it is:\n```json\n{json.dumps({'classifications': found})}\n```"
        if metric == "answer_relevancy":
            return json.dumps({"question": "asked back", "noncommittal": 0})
        if "NLI" not in prompt and "verdict" not in prompt.partition("EXAMPLES")[0]:
            return good(prompt)  # statements or claims
        about_reference = metric == "factual_correctness" and "At reception." in asked
        verdicts = answers["reference" if about_reference else "statements"]
        return json.dumps({"statements": [{"statement": "s", "reason": "", "verdict": v} for v in verdicts]})

    def embed(texts) -> np.ndarray:
        return np.array([[0.6, 0.8] if text == "asked back" else [1, 0] for text in texts], dtype=np.float32)

    with FakeOpenAI(rule) as server:
        found = judge.judge_runs(ONE, {"raw": RUN}, judging(server, metric), embed).rows["raw"]
    assert found.metrics[metric].scores == {"q": pytest.approx(expected, abs=1e-6)}
    if "response" in judge.JUDGED[metric].needs:
        assert found.answers["q"] == judge.Answer("At reception.", ("p2", "p1", "p3"))
    else:
        assert found.answers == {}


BEHAVIOUR = {
    "good": lambda prompt, times: good(prompt),
    "malformed": lambda prompt, times: "The verdict is {verdict: yes",
    "other shape": lambda prompt, times: '{"answer": "yes"}',
    "verdict 7": lambda prompt, times: '{"reason": "", "verdict": 7}',
    "empty": lambda prompt, times: "  ",
    "thinks only": lambda prompt, times: "<think>so</think>",
    "late": lambda prompt, times: time.sleep(3) or good(prompt),
    "busy once": lambda prompt, times: (429, {"retry-after-ms": "1"}) if times == 1 else good(prompt),
    "always busy": lambda prompt, times: (429, {"retry-after-ms": "1"}),
    "broken": lambda prompt, times: (500, {"retry-after-ms": "1"}),
    "forbidden": lambda prompt, times: (400, {}),
    "refused": lambda prompt, times: {"content": None, "refusal": "no"},
    "filtered": lambda prompt, times: {"content": "x", "finish_reason": "content_filter"},
    "too long": lambda prompt, times: {"content": '{"reason": "an', "finish_reason": "length"},
    "no choices": lambda prompt, times: b'{"choices": []}',
    "no JSON": lambda prompt, times: b"<html>",
}
FAILURES = {
    "malformed": "unparseable answer",
    "other shape": "unparseable answer",
    "verdict 7": "unparseable answer",
    "empty": "empty answer",
    "thinks only": "empty answer",
    "late": "time-out",
    "always busy": "HTTP 429",
    "broken": "HTTP 500",
    "forbidden": "HTTP 400",
    "refused": "refused",
    "filtered": "refused",
    "too long": "cut at 1024 tokens",
    "no choices": "no chat completion",
    "no JSON": "no chat completion",
}
TRIES = {"late": 3, "busy once": 2, "always busy": 3, "broken": 3}


def test_every_failure_is_counted_by_its_reason_and_only_passing_ones_are_tried_again():
    def rule(prompt: str, times: int):
        return BEHAVIOUR[kind_of(prompt)](prompt, times)

    def kind_of(prompt: str) -> str:
        return next(kind for kind in BEHAVIOUR if f"question {kind}?" in prompt)

    tested = make_set({kind: f"question {kind}?" for kind in BEHAVIOUR})
    run = dict.fromkeys(BEHAVIOUR, ["p1"])
    with FakeOpenAI(rule) as server:
        asked = judging(server, "context_precision", timeout=1.5, concurrency=8)
        found = judge.judge_runs(tested, {"raw": run}, asked, ones)
    metric = found.rows["raw"].metrics["context_precision"]
    assert metric.failures == FAILURES
    assert metric.scores == {"good": pytest.approx(1), "busy once": pytest.approx(1)}
    assert metric.reasons["unparseable answer"] == 3 and sum(metric.reasons.values()) == 14
    assert metric.failed_share == 14 / 16
    tries = {kind: sum(kind_of(prompt) == kind for prompt in server.prompts) for kind in BEHAVIOUR}
    assert tries == {kind: TRIES.get(kind, 1) for kind in BEHAVIOUR}
    assert found.usage[server.spec]["calls"] == 16


def test_a_failed_answer_fails_what_judges_it_and_nothing_else():
    def rule(prompt: str, times: int):
        return good(prompt) if "JSON" in prompt else ""

    with FakeOpenAI(rule) as server:
        found = judge.judge_runs(ONE, {"raw": RUN}, judging(server), ones).rows["raw"]
    assert found.answers["q"] == judge.Answer("", ("p2", "p1", "p3"), "empty answer")
    failed = {name: metric.failures for name, metric in found.metrics.items() if metric.failures}
    reason = {"q": "no answer to judge: empty answer"}
    assert failed == dict.fromkeys(("faithfulness", "answer_relevancy", "factual_correctness"), reason)
    assert found.metrics["context_recall"].mean == 1


def test_nan_and_what_ragas_raises_are_failures():
    def rule(prompt: str, times: int) -> str:
        return '{"statements": [], "classifications": []}' if "JSON" in prompt else "x"

    def broken(texts):
        raise RuntimeError("no vectors")

    with FakeOpenAI(rule) as server:
        found = judge.judge_runs(ONE, {"raw": RUN}, judging(server, "faithfulness", "context_recall"), ones)
    assert [m.failures for m in found.rows["raw"].metrics.values()] == [{"q": "ragas gave nan"}] * 2
    with FakeOpenAI() as server:
        found = judge.judge_runs(ONE, {"raw": RUN}, judging(server, "answer_relevancy"), broken)
    assert found.rows["raw"].metrics["answer_relevancy"].failures == {"q": "ragas raised RuntimeError"}


def test_nothing_retrieved_counts_zero_and_a_missing_reference_is_no_failure_of_the_judge():
    tested = make_set({"a": "one?", "b": "two?", "c": "three?"}, {"a": ["Yes."], "b": ["No."], "c": [" "]})
    with FakeOpenAI() as server:
        asked = judging(server, "context_recall", "faithfulness")
        found = judge.judge_runs(tested, {"raw": {"a": ["p1"], "b": [], "c": ["p1"]}}, asked, ones).rows[
            "raw"
        ]
    recall, faithful = found.metrics.values()
    assert recall.scores == {"a": 1, "b": 0} and recall.mean == 0.5
    assert recall.failures == {"c": "no reference answer"} and recall.failed_share == 0
    assert faithful.failures == {"b": "no answer to judge: no passage retrieved"}


def test_a_second_run_asks_nothing_and_gives_the_same(tmp_path):
    def rule(prompt: str, times: int):
        return "no JSON" if "two?" in prompt else good(prompt)

    tested = make_set({"a": "one?", "b": "two?"})
    runs = {"raw": {"a": ["p1"], "b": ["p2"]}}
    with FakeOpenAI(rule) as server:
        asked = judging(server, cache=tmp_path / "cache")
        first = judge.judge_runs(tested, runs, asked, ones)
        calls = len(server.prompts)
        again = judge.judge_runs(tested, runs, asked, ones)
        assert len(server.prompts) == calls == first.usage[server.spec]["calls"]
        assert again.usage[server.spec] == dict(
            calls=0, from_cache=calls, prompt_tokens=0, completion_tokens=0
        )
        assert again.rows == first.rows
        assert first.rows["raw"].metrics["context_recall"].failures == {"b": "unparseable answer"}
        assert first.usage[server.spec]["prompt_tokens"] == 7 * calls
        # Another limit of tokens is another request, and without a cache all is asked again.
        judge.judge_runs(tested, runs, judging(server, cache=tmp_path / "cache", max_tokens=9), ones)
        assert len(server.prompts) == 2 * calls
        judge.judge_runs(tested, runs, judging(server), ones)
        assert len(server.prompts) == 3 * calls


def test_errors_and_empty_answers_are_not_cached(tmp_path):
    first_time = {"empty?": "", "broken?": (400, {})}

    def rule(prompt: str, times: int):
        return (
            next((a for words, a in first_time.items() if words in prompt), None)
            if times == 1
            else good(prompt)
        )

    tested = make_set({"e": "empty?", "b": "broken?"})
    with FakeOpenAI(rule) as server:
        asked = judging(server, "context_recall", cache=tmp_path)
        runs = {"raw": {"e": ["p1"], "b": ["p1"]}}
        first = judge.judge_runs(tested, runs, asked, ones).rows["raw"].metrics["context_recall"]
        assert first.failures == {"e": "empty answer", "b": "HTTP 400"}
        again = judge.judge_runs(tested, runs, asked, ones).rows["raw"].metrics["context_recall"]
    assert again.scores == {"e": 1, "b": 1} and len(server.prompts) == 4


def test_what_two_filters_share_is_asked_once():
    with FakeOpenAI() as server:
        asked = judging(server, "context_precision", top_k=2)
        found = judge.judge_runs(ONE, {"raw": RUN, "edge": {"q": ["p1", "p3"]}}, asked, ones)
    assert len(server.prompts) == 3  # p1, p2 and p3, and p1 once
    assert list(found.rows) == ["raw", "edge"]


def test_no_more_requests_at_a_time_than_allowed():
    def rule(prompt: str, times: int) -> str:
        time.sleep(0.05)
        return good(prompt)

    queries = {str(i): f"question {i}?" for i in range(12)}
    for bound in (1, 3):
        with FakeOpenAI(rule) as server:
            asked = judging(server, "context_recall", concurrency=bound)
            judge.judge_runs(make_set(queries), {"raw": dict.fromkeys(queries, ["p1"])}, asked, ones)
        assert server.most_at_once == bound and len(server.prompts) == 12


@pytest.mark.parametrize("metrics", [(), ("context_precision",), ("answer_relevancy", "factual_correctness")])
def test_a_dry_run_asks_nobody_and_counts_what_is_asked_later(metrics):
    queries = {str(i): f"Is it {i}?" for i in range(3)}
    tested = make_set(queries)
    with FakeOpenAI() as server:
        asked = judging(server, *metrics, top_k=2)
        counts = judge.count_calls(tested, asked, rows=1)
        assert server.prompts == []
        judge.judge_runs(tested, {"raw": dict.fromkeys(queries, ["p2", "p1", "p3"])}, asked, ones)
    assert sum(count.calls for count in counts.values()) == len(server.prompts)
    answering = sum("JSON Schema" not in prompt for prompt in server.prompts)
    assert ("generator" in counts) == (answering > 0)
    assert answering == 0 or counts["generator"].calls == answering == 3
    estimated = sum(count.prompt_tokens for count in counts.values())
    assert estimated == pytest.approx(sum(map(len, server.prompts)) / 4, rel=0.2)
    twice = judge.count_calls(tested, asked, rows=2)
    assert {n: c.calls for n, c in twice.items()} == {n: 2 * c.calls for n, c in counts.items()}


def test_works_inside_a_running_event_loop():
    async def within(server: FakeOpenAI):
        asked = judging(server)
        return judge.count_calls(ONE, asked, 1), judge.judge_runs(ONE, {"raw": RUN}, asked, ones)

    with FakeOpenAI() as server:
        counts, found = asyncio.run(within(server))
    assert counts["generator"].calls == 1
    assert all(metric.mean is not None for metric in found.rows["raw"].metrics.values())


@pytest.mark.parametrize(("status", "reason"), [(401, "HTTP 401"), (404, "HTTP 404")])
def test_an_endpoint_that_never_answers_is_not_asked_on(status, reason, caplog):
    queries = {str(i): f"Is it {i}?" for i in range(9)}
    with FakeOpenAI(lambda prompt, times: (status, {})) as server:
        asked = judging(server, "context_recall", concurrency=1)
        found = judge.judge_runs(make_set(queries), {"raw": dict.fromkeys(queries, ["p1"])}, asked, ones)
    assert len(server.prompts) == 1
    assert found.rows["raw"].metrics["context_recall"].reasons == {reason: 9}
    assert "it is not asked again" in caplog.text


def test_a_server_that_is_not_there_is_said_so():
    with FakeOpenAI() as server:
        asked = judging(server, "context_recall")
    found = judge.judge_runs(ONE, {"raw": RUN}, asked, ones)
    assert found.rows["raw"].metrics["context_recall"].failures == {"q": "no connection"}


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: a shell starts jobs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_stops_and_goes_on_from_its_cache(tmp_path, interruptible):
    def rule(prompt: str, times: int):
        if "Is it 2?" in prompt and times == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return good(prompt)

    queries = {str(i): f"Is it {i}?" for i in range(40)}
    tested, runs = make_set(queries), {"raw": dict.fromkeys(queries, ["p1"])}
    with FakeOpenAI(rule) as server:
        asked = judging(server, "context_recall", concurrency=1, cache=tmp_path)
        with pytest.raises(KeyboardInterrupt):
            judge.judge_runs(tested, runs, asked, ones)
        assert len(server.prompts) == 3
        found = judge.judge_runs(tested, runs, asked, ones)
    assert len(server.prompts) == 3 + 38  # the first two are kept, the third is asked again
    assert found.rows["raw"].metrics["context_recall"].mean == 1


def test_the_key_goes_to_the_server_and_nowhere_else(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    caplog.set_level(logging.DEBUG)
    with FakeOpenAI(lambda prompt, times: (401, {})) as server:
        found = judge.judge_runs(ONE, {"raw": RUN}, judging(server, cache=tmp_path), ones)
    assert server.keys == {"Bearer sk-very-secret"}
    assert "sk-very-secret" not in caplog.text + repr(found)
    assert all(b"sk-very-secret" not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_requests_carry_the_model_and_its_limits():
    with FakeOpenAI() as server:
        judge.judge_runs(ONE, {"raw": RUN}, judging(server, "context_recall", max_tokens=77), ones)
        spec = EndpointSpec.parse(server.spec.replace("fake", "o3-mini"))
        judge.judge_runs(ONE, {"raw": RUN}, Judging(spec, metrics=("context_recall",)), ones)
    plain, thinking = ({k: v for k, v in body.items() if k != "messages"} for body in server.bodies)
    assert plain == {"model": "fake", "temperature": 0.0, "max_tokens": 77}
    assert thinking == {"model": "o3-mini", "temperature": 1.0, "max_completion_tokens": 1024}


def test_judge_and_generator_may_be_two():
    with FakeOpenAI() as scoring, FakeOpenAI() as answering:
        asked = Judging(
            EndpointSpec.parse(scoring.spec), EndpointSpec.parse(answering.spec), ("faithfulness",)
        )
        found = judge.judge_runs(ONE, {"raw": RUN}, asked, ones)
    assert (len(scoring.prompts), len(answering.prompts)) == (2, 1)
    assert "Passage 1:\nLunch is at noon.\n\nPassage 2:\nBadges" in answering.prompts[0]
    assert found.usage[answering.spec]["calls"] == 1


@pytest.mark.parametrize(
    ("text", "model", "url"),
    [
        ("openai:gpt-4o-mini", "gpt-4o-mini", "https://api.openai.com/v1"),
        ("openai:llama3.2:3b@http://localhost:11434/v1/", "llama3.2:3b", "http://localhost:11434/v1"),
        ("openai:/models/a@b@http://h:1/v1", "/models/a@b", "http://h:1/v1"),
    ],
)
def test_specs_are_read(text, model, url):
    spec = EndpointSpec.parse(text)
    assert (spec.model, spec.url) == (model, url)
    assert EndpointSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("text", ["gpt-4o", "openai:", "anthropic:x", "openai:a b", "openai:x@http:///v1"])
def test_other_specs_are_refused(text):
    with pytest.raises(ConfigError, match="expected openai:MODEL"):
        EndpointSpec.parse(text)


@pytest.mark.parametrize("address", ["me:sk-1@host/v1", "sk-1@host/v1", "host/v1?api-key=sk-1"])
def test_a_key_in_an_address_is_refused_without_repeating_it(address):
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as raised:
        EndpointSpec.parse(f"openai:x@https://{address}")
    assert "sk-1" not in str(raised.value)


def test_a_key_that_goes_out_unencrypted_is_warned_about(monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    EndpointSpec.parse("openai:x@http://127.0.0.1:1/v1").key()
    assert caplog.text == ""
    EndpointSpec.parse("openai:x@http://example.org/v1").key()
    assert "OPENAI_API_KEY goes to http://example.org/v1 unencrypted" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": ("faith",)}, "'faith': expected some of context_precision"),
        ({"top_k": 0}, "top_k 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Judging(EndpointSpec("x"), **settings)
    with pytest.raises(ConfigError, match="timeout nan: expected more than 0"):
        Asking(timeout=float("nan"))


def test_without_references_only_what_needs_none_is_judged():
    bare = make_set({"q": "Where?"}, {})
    assert Judging(EndpointSpec("x")).names(bare) == ("faithfulness", "answer_relevancy")
    with pytest.raises(
        ConfigError, match="context_recall needs reference answers, and eval set 'tiny' has none"
    ):
        judge.count_calls(bare, Judging(EndpointSpec("x"), metrics=("faithfulness", "context_recall")), 1)


def test_the_options_know_the_same_metrics():
    assert list(judge.JUDGED) == OPTION_WORDS


def test_json_is_found_in_what_stands_around_it():
    from ragas.metrics.collections.context_precision.util import ContextPrecisionOutput as Output

    assert parse('Sure {as you wish}: {"reason": "a } in a text", "verdict": 1} bye', Output).verdict == 1
    assert parse("{" * 5000, Output) is None
    assert parse('{"a":' * 5000, Output) is None


def test_text_metrics_equal_hand_values_and_a_copy_counts():
    passages = PASSAGES | {"copy": PASSAGES["p1"] + "!", "far": "Something else entirely, at length, so."}
    found = judge.text_metrics(passages, {"q": {"p1": 1, "far": 1}}, {"q": ["p3", "copy", "p2"]})
    # The copy stands second of three: average precision 1/2; one of two relevant texts is found.
    assert [m.scores["q"] for m in found.values()] == [pytest.approx(0.5), 0.5]
    assert list(found) == list(judge.TEXT_METRICS)


def test_without_rapidfuzz_id_metrics_stay(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    found = judge.unjudged_metrics(ONE, RUN)
    assert list(found) == list(judge.ID_METRICS)
    assert "rapidfuzz" in caplog.text and "rag-embfilter[eval]" in caplog.text
