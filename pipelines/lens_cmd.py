"""`lens` and `spectrum`: what an embedding speaks of, and where frequent tokens live in the spectrum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show
from rag_embfilter.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rag_embfilter.encoder import Encoder
    from rag_embfilter.filters import EmbFilter
    from rag_embfilter.lens import Reading

DRAWN = 12  # texts in a picture

Corpus = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Text in the model's language to count tokens in: lines, passages in .jsonl, or an eval set. By "
        "default the --passages, else the vocabulary's own order stands for frequency.",
    ),
]
Passages = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Look at a corpus too: lines, passages in .jsonl, or an eval set. Fitted filters need it.",
    ),
]


@show.guarded
def lens(
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts to look at.")] = None,
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["echo"],  # noqa: B006 - typer copies it
    pooling: options.Pooling = None,
    max_length: options.MaxLength = 512,
    device: options.Device = None,
    dtype: options.Dtype = None,
    filter_types: options.FilterTypes = ["edge"],  # noqa: B006
    filter_ratios: options.FilterRatios = [2],  # noqa: B006
    top: Annotated[int, typer.Option(min=1, help="Tokens to show.")] = 10,
    passages: Passages = None,
    sample_size: Annotated[
        int, typer.Option("--sample", min=1, help="Passages drawn from --passages at most.")
    ] = 500,
    corpus: Corpus = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Show the tokens an embedding is nearest to in vocabulary space, before and after a filter.

    Over a corpus: how many of the nearest ten are among the 100 most frequent tokens. Echo, which averages
    over the text, shows best what a filter does; PromptEOL asks for one word, and is less troubled.
    """
    from pipelines.plot import lens_panels
    from rag_embfilter import lens as looking
    from rag_embfilter.files import write_json
    from rag_embfilter.spectroscopy import frequent_tokens

    options.check_picture(plot)
    drawn = _drawn(texts, passages, sample_size)
    backbone = options.lent(backbone, unembedding_from)
    encoder = options.make_encoder(backbone, revision, template, None, pooling, max_length, device, dtype)
    looking.check(encoder, top)
    raw = encoder.encode_documents([*(texts or []), *drawn])
    shown, of_corpus = raw[: len(texts or [])], raw[len(texts or []) :]
    filters = _filters(encoder, filter_types, filter_ratios, of_corpus)
    counts, source = _counts(encoder, corpus or passages)
    common = frequent_tokens(counts, encoder.backbone.used_rows)
    common = common[counts[common] > 0]
    readings = {f.name: looking.read(encoder, shown, f, top) for f in filters}
    counted = {f.name: looking.read(encoder, of_corpus, f, top) for f in filters} if drawn else readings
    shares = {name: looking.frequent_share(found, common) for name, found in counted.items()}
    over = f"{len(drawn)} passages of {passages.name}" if drawn and passages else "these texts"
    _print(texts or [], readings, shares, f"{over}; frequencies: {source}", top)
    if plot is not None:
        title = f"{encoder.backbone.name.rsplit('/')[-1]}, {over}"
        if len(texts or []) > DRAWN:
            show.err.print(f"[yellow]note:[/] only the first {DRAWN} texts are drawn.")
        lens_panels((texts or [])[:DRAWN], readings, shares, set(common.tolist()), title, plot)
        show.out.print(f"Picture: {show.escape(str(plot))}", soft_wrap=True)
    if json_file is not None:
        found = {name: [vars(reading) for reading in each] for name, each in readings.items()}
        result = {"texts": texts or [], "readings": found, "passages": len(drawn), "frequent_share": shares}
        write_json(json_file, result | {"top": top, "frequencies": source})


def _drawn(texts: Sequence[str] | None, passages: Path | None, size: int) -> list[str]:
    """Passages to look at. Raises `ConfigError` when there is nothing to look at."""
    from pipelines.texts import texts_of
    from rag_embfilter.fitting import sample
    from rag_embfilter.inputs import fault

    drawn = sample(texts_of(passages), size) if passages else []
    if odd := [text for text in drawn if fault(text)]:
        show.err.print(f"[yellow]note:[/] {len(odd)} passages that are not valid Unicode are left out.")
        drawn = [text for text in drawn if not fault(text)]
    if not drawn and (passages or not texts):
        nothing = f"{str(passages)!r} holds no text" if passages else "there is no text"
        raise ConfigError(f"{nothing} to look at; give texts, or --passages with a file of some.")
    return drawn


def _filters(
    encoder: Encoder, types: Sequence[str], ratios: Sequence[int], corpus: NDArray[np.float32]
) -> list[EmbFilter]:
    """Raw and the filters asked for; fitted ones on the corpus, with one mean for all its texts."""
    filters, specs = options.make_filters(encoder, types, ratios, raw=True)
    if specs and not len(corpus):
        raise ConfigError(f"{specs[0].filter_type} is fitted on a corpus; give --passages.")
    return filters + [spec.make(encoder, corpus, corpus) for spec in specs]


def _print(
    texts: Sequence[str],
    readings: Mapping[str, Sequence[Reading]],
    shares: Mapping[str, float],
    over: str,
    top: int,
) -> None:
    for i, text in enumerate(texts):
        rows = [
            [show.escape(repr(found[i].tokens[rank])) for found in readings.values()] for rank in range(top)
        ]
        title = show.escape(text if len(text) < 90 else f"{text[:87]}...")
        show.out.print(show.table(title, list(readings), rows, left=len(readings)))
        show.out.print()
    rows = [[name, f"{100 * share:.0f}%"] for name, share in shares.items()]
    heading = f"Share of the 100 most frequent tokens among the top {top} ({show.escape(over)})"
    show.out.print(show.table(heading, ["filter", "share"], rows))


@show.guarded
def spectrum(
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    corpus: Corpus = None,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="The picture.")] = Path("spectrum.png"),
    json_file: options.JsonFile = None,
) -> None:
    """Draw how strongly frequent, rare and random tokens respond to each direction of the unembedding."""
    import numpy as np

    from pipelines.plot import spectrum_curves
    from rag_embfilter import spectroscopy
    from rag_embfilter.encoder import Encoder
    from rag_embfilter.files import write_json

    options.check_picture(plot)
    backbone = options.lent(backbone, unembedding_from)
    encoder = Encoder(backbone, "plain", max_length=64, revision=revision)
    counts, source = _counts(encoder, corpus)
    model, found = encoder.backbone, encoder.spectrum()
    average = spectroscopy.average_token(model.unembedding, model.used_rows, found, counts)
    used = np.flatnonzero(model.used_rows.numpy())
    tokens = {
        "frequent": spectroscopy.frequent_tokens(counts, model.used_rows),
        "rare": spectroscopy.frequent_tokens(-counts, model.used_rows),
        "random": np.random.default_rng(0).choice(used, min(100, len(used)), replace=False),
    }
    curves = {
        name: spectroscopy.response(model.unembedding, found, average, ids) for name, ids in tokens.items()
    }
    rows = [
        [name, *(f"{100 * _edges(curve, share):.0f}%" for share in (0.1, 0.25, 0.5))]
        for name, curve in curves.items()
    ]
    heading = f"{backbone}: share of the response that lies in the outer part of the spectrum ({source})"
    show.out.print(show.table(heading, ["tokens", "outer 10%", "outer 25%", "outer 50%"], rows))
    spectrum_curves(curves, f"{backbone}, frequencies from {source}", plot)
    show.out.print(f"Picture: {show.escape(str(plot))}", soft_wrap=True)
    if json_file is not None:
        response = {name: curve.tolist() for name, curve in curves.items()}
        values = found.singular_values.tolist()
        write_json(json_file, {"response": response, "singular_values": values, "frequencies": source})


def _edges(curve: NDArray[np.float64], share: float) -> float:
    """Share of a curve's sum that lies in the outermost directions, half of them at each end."""
    outer = round(share * len(curve) / 2)
    return float((curve[:outer].sum() + curve[len(curve) - outer :].sum()) / curve.sum())


def _counts(encoder: Encoder, corpus: Path | None) -> tuple[NDArray[np.float64], str]:
    """Token counts, and where they come from."""
    from pipelines.texts import texts_of
    from rag_embfilter.spectroscopy import token_counts, vocabulary_order_counts

    vocabulary, tokenizer = len(encoder.backbone.unembedding), encoder.backbone.tokenizer
    if corpus is None:
        return vocabulary_order_counts(tokenizer, vocabulary), "vocabulary order"
    return token_counts(tokenizer, texts_of(corpus), vocabulary), corpus.name
