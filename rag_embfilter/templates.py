"""Prompt templates: the words around a text that make a causal LM's hidden state say what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from rag_embfilter.errors import ConfigError

Pooling = Literal["last", "mean", "cls"]
POOLINGS = ("last", "mean", "cls", "last+mean")  # the last joins two, from one pass
Truncation = Literal["middle", "end"]
TEXT = "{text}"


@dataclass(frozen=True)
class Template:
    """A format string per role, and how the result is pooled and a long text is cut.

    Attributes:
        document, query: format strings; `{text}` once, or twice for an echo. Nothing else is replaced.
        pooling: `last` takes the last token; `mean` averages from the last copy of the text to the end; `cls`
            takes the first token, which says something in masked LMs alone.
        truncation: what a text over the limit loses: its `middle` (both ends stay) or its `end`.
        end_token: whether the model's end token closes the input (and, without a begin token of the
            tokenizer's own, opens it), as the Echo prompt has it.
        averaged: name of the set it belongs to, whose unit vectors are averaged; None for one by itself.
    """

    document: str
    query: str
    pooling: Pooling
    truncation: Truncation
    end_token: bool = False
    averaged: str | None = None

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


def _set(name: str, *texts: str) -> tuple[Template, ...]:
    return tuple(replace(_same(text, "last", "middle"), averaged=name) for text in texts)


_CLASSES = "'Education', 'Technology', 'Health', 'Business', 'Environment', 'Politics', or 'Culture'"
# Several templates, a pass each, whose unit vectors are averaged. MetaEOL: arXiv 2402.18458, wordings of its
# code, two for each of four tasks.
SETS: dict[str, tuple[Template, ...]] = {
    "metaeol": _set(
        "metaeol",
        "In this task, you're presented with a text excerpt. Your task is to categorize the excerpt into a broad "
        f"category such as {_CLASSES}. These categories help in organizing content for better accessibility and "
        'targeting. For this task, this sentence : "{text}" should be classified under one general category in '
        'one word:"',
        "In this task, you're given a statement and you need to determine whether it's presenting an 'Opinion' "
        "or a 'Fact'. This distinction is vital for information verification, educational purposes, and content "
        'analysis. For this task, this sentence : "{text}" discriminates between opinion and fact in one word:"',
        "In this task, you're given a review from an online platform. Your task is to generate a rating for the "
        "product based on the review on a scale of 1-5, where 1 means 'extremely negative' and 5 means "
        '\'extremely positive\'. For this task, this sentence : "{text}" reflects the sentiment in one word:"',
        "In this task, you're reading a personal diary entry. Your task is to identify the predominant emotion "
        "expressed, such as joy, sadness, anger, fear, or love. For this task, this sentence : "
        '"{text}" conveys the emotion in one word:"',
        "In this task, you're presented with two sentences. Your task is to assess whether the sentences convey "
        "the same meaning. Use 'identical', 'similar', 'different', or 'unrelated' to describe the relationship. "
        'To enhance the performance of this task, this sentence : "{text}" means in one word:"',
        "In this task, you're given a sentence and a phrase. Your task is to determine if the phrase can be a "
        "contextual synonym within the given sentence. Options include 'yes', 'no', or 'partially'. "
        'To enhance the performance of this task, this sentence : "{text}" means in one word:"',
        "In this task, you're examining a news article. Your task is to extract the most critical fact from the "
        'article. For this task, this sentence : "{text}" encapsulates the key fact in one word:"',
        "In this task, you're reviewing a scientific abstract. Your task is to identify the main entities (e.g., "
        "proteins, diseases) and their relations (e.g., causes, treats). For this task, this sentence : "
        '"{text}" highlights the primary entity or relation in one word:"',
    ),
}


def _custom(text: str) -> Template:
    """A template for a user's own format string: two copies are an echo, words after the text ask
    for the last token, and a bare text is averaged.
    """
    copies = text.count(TEXT)
    if copies not in (1, 2):
        raise ConfigError(
            f"template {text!r}: expected a name out of {', '.join([*TEMPLATES, *SETS])}, or a format string "
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
    """As `resolve_template` for each of several; `last+mean` makes two of each, one per pooling.

    The name of a set stands for its templates. Raises `ConfigError` also for a set beside other templates,
    with a query template of its own, or with two poolings: it is averaged, not joined.
    """
    poolings = [pooling] if pooling != "last+mean" else ["last", "mean"]
    each = [
        one for name in templates for one in (SETS.get(name, (name,)) if isinstance(name, str) else (name,))
    ]
    made = [resolve_template(one, query_template, kind) for one in each for kind in poolings]
    sets = {one.averaged for one in made}
    if sets != {None} and (len(sets) > 1 or query_template is not None or len(poolings) > 1):
        name = next(one for one in sets if one is not None)
        raise ConfigError(
            f"template {name!r} is a set that is averaged: give it alone, without query_template, with pooling "
            "last or mean."
        )
    return made


def check_pooling(templates: Sequence[Template], masked: bool, name: str) -> None:
    """Refuse a pooling that says nothing with a kind of backbone: causal LMs look left, masked ones both ways."""
    poolings = {each.pooling for each in templates}
    if masked and "last" in poolings:
        raise ConfigError(
            f"backbone {name!r} is a masked language model, whose last token says nothing of its own. Use the "
            "template plain, or another that ends in the text, with pooling mean or cls."
        )
    if not masked and "cls" in poolings:
        raise ConfigError(
            f"pooling 'cls' with {name!r}: the first token of a causal language model sees nothing but itself. "
            "Use last or mean; cls is for masked language models (BERT and its kin)."
        )
