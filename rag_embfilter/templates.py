"""Prompt templates: the words around a text that make a causal LM's hidden state say what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from rag_embfilter.errors import ConfigError

Pooling = Literal["last", "mean"]
POOLINGS = ("last", "mean", "last+mean")  # the third joins both, from one pass
Truncation = Literal["middle", "end"]
TEXT = "{text}"


@dataclass(frozen=True)
class Template:
    """A format string per role, and how the result is pooled and a long text is cut.

    Attributes:
        document, query: format strings; `{text}` once, or twice for an echo. Nothing else is replaced.
        pooling: `last` takes the last token; `mean` averages from the last copy of the text to the end.
        truncation: what a text over the limit loses: its `middle` (both ends stay) or its `end`.
        end_token: whether the model's end token closes the input (and, without a begin token of the
            tokenizer's own, opens it), as the Echo prompt has it.
    """

    document: str
    query: str
    pooling: Pooling
    truncation: Truncation
    end_token: bool = False

    def pieces(self, role: str) -> list[str]:
        """The template's own words around each copy of the text, in order."""
        return (self.query if role == "query" else self.document).split(TEXT)


def _same(text: str, pooling: Pooling, truncation: Truncation, end_token: bool = False) -> Template:
    return Template(text, text, pooling, truncation, end_token)


# Sources: PromptEOL arXiv 2307.16645, Echo arXiv 2402.15449; wordings as in EmbedFilter's code. `search`,
# `topic` and `question` are made for retrieval (docs/experiments.md).
TEMPLATES: dict[str, Template] = {
    "prompteol": _same('Summarize the sentence: "{text}" in one word:"', "last", "middle"),
    "prompteol_mistral": _same('This sentence: "{text}" means [MASK]', "last", "middle"),
    "echo": _same(
        "Rewrite the following paragraph: {text}. The rewritten paragraph: {text}", "mean", "end", True
    ),
    "search": _same('The text: "{text}" is found by searching for the keyword "', "last", "middle"),
    "topic": _same('The topic of the text: "{text}" is:', "last", "middle"),
    "question": _same('Text: "{text}"\nA question that this text answers is about:', "last", "middle"),
    "plain": _same(TEXT, "mean", "end"),
}


def _custom(text: str) -> Template:
    """A template for a user's own format string: two copies are an echo, words after the text ask
    for the last token, and a bare text is averaged.
    """
    copies = text.count(TEXT)
    if copies not in (1, 2):
        raise ConfigError(
            f"template {text!r}: expected a name out of {', '.join(TEMPLATES)}, or a format string "
            f"with {TEXT} in it once (or twice, for an echo); it is there {copies} times."
        )
    if copies == 2:
        return _same(text, "mean", "end", end_token=True)
    return _same(text, "mean", "end") if text.endswith(TEXT) else _same(text, "last", "middle")


def resolve_template(
    template: str | Template, query_template: str | None = None, pooling: str | None = None
) -> Template:
    """The template of a name or a format string, with the query's own wording where one is given.

    Pooling, truncation and end token are the document template's for both roles, so that the two
    kinds of vector stay comparable.

    Raises `ConfigError` for an unknown name, a format string without `{text}`, or an unknown pooling.
    """
    if isinstance(template, Template):
        chosen = template
    else:
        chosen = TEMPLATES.get(template) or _custom(template)
    if query_template is not None:
        query = TEMPLATES.get(query_template) or _custom(query_template)
        chosen = replace(chosen, query=query.query)
    if pooling is not None:
        if pooling not in get_args(Pooling):
            raise ConfigError(f"pooling {pooling!r}: expected one of {', '.join(POOLINGS)}.")
        chosen = replace(chosen, pooling=cast(Pooling, pooling))
    return chosen


def resolve_templates(
    templates: Sequence[str | Template], query_template: str | None = None, pooling: str | None = None
) -> list[Template]:
    """As `resolve_template` for each of several; `last+mean` makes two of each, one per pooling."""
    poolings = [pooling] if pooling != "last+mean" else list(get_args(Pooling))
    return [resolve_template(each, query_template, one) for each in templates for one in poolings]
