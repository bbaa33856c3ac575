"""Templates: names, custom format strings, roles."""

from __future__ import annotations

import pytest

from rag_embfilter.errors import ConfigError
from rag_embfilter.templates import TEMPLATES, resolve_template


def test_paper_templates_word_for_word():
    assert TEMPLATES["prompteol"].document == 'Summarize the sentence: "{text}" in one word:"'
    assert TEMPLATES["prompteol_mistral"].document == 'This sentence: "{text}" means [MASK]'
    echo = "Rewrite the following paragraph: {text}. The rewritten paragraph: {text}"
    assert TEMPLATES["echo"].document == echo


@pytest.mark.parametrize(
    ("template", "pooling", "truncation", "end_token"),
    [
        ("prompteol", "last", "middle", False),
        ("echo", "mean", "end", True),
        ("plain", "mean", "end", False),
        ("About {text}: ", "last", "middle", False),
        ("Passage: {text}", "mean", "end", False),
        ("{text} again: {text}", "mean", "end", True),
    ],
)
def test_defaults_follow_the_template(template, pooling, truncation, end_token):
    found = resolve_template(template)
    assert (found.pooling, found.truncation, found.end_token) == (pooling, truncation, end_token)


def test_only_the_placeholder_is_replaced():
    assert resolve_template('{"a": 1} {text} {other}').pieces("document") == ['{"a": 1} ', " {other}"]


def test_query_may_be_worded_apart_and_pooling_overridden():
    found = resolve_template("prompteol", query_template="question", pooling="mean")
    assert found.pieces("document")[0] == 'Summarize the sentence: "'
    assert found.pieces("query")[0] == 'Text: "'
    assert found.pooling == "mean"


@pytest.mark.parametrize("template", ["promteol", "", "{text}{text}{text}", "{Text}"])
def test_unknown_template_lists_the_known_ones(template):
    with pytest.raises(ConfigError, match="prompteol, prompteol_mistral, echo"):
        resolve_template(template)


def test_unknown_pooling():
    with pytest.raises(ConfigError, match=r"'max'.*last, mean"):
        resolve_template("plain", pooling="max")
