"""`lens` and `spectrum`: what an embedding speaks of, and where frequent tokens live in the spectrum."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines import options, show

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rag_embfilter.encoder import Encoder

Corpus = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Text in the model's language to count tokens in, a text a line; by default the vocabulary's "
        "own order stands for frequency.",
    ),
]


@show.guarded
def lens(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Texts to look at.")],
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    template: options.Templates = ["prompteol"],  # noqa: B006 - typer copies it
    pooling: options.Pooling = None,
    max_length: options.MaxLength = 512,
    device: options.Device = None,
    dtype: options.Dtype = None,
    filter_types: options.FilterTypes = ["edge"],  # noqa: B006 - typer copies it
    filter_ratios: options.FilterRatios = [2],  # noqa: B006
    top: Annotated[int, typer.Option(min=1, help="Tokens to show.")] = 10,
    corpus: Corpus = None,
    json_file: options.JsonFile = None,
) -> None:
    """Show the tokens an embedding is nearest to in vocabulary space, before and after a filter."""
    from rag_embfilter import lens as looking
    from rag_embfilter.files import write_json
    from rag_embfilter.spectroscopy import frequent_tokens

    encoder = options.make_encoder(backbone, revision, template, None, pooling, max_length, device, dtype)
    filters, _ = options.make_filters(encoder, filter_types, filter_ratios, raw=True)
    counts, source = _counts(encoder, corpus)
    common = frequent_tokens(counts, encoder.backbone.used_rows)
    raw = encoder.encode_documents(texts)
    readings = {f.name: looking.read(encoder, raw, f, top) for f in filters}
    shares = {name: looking.frequent_share(found, common) for name, found in readings.items()}
    for i, text in enumerate(texts):
        rows = [
            [show.escape(repr(found[i].tokens[rank])) for found in readings.values()] for rank in range(top)
        ]
        title = show.escape(text if len(text) < 90 else f"{text[:87]}...")
        show.out.print(show.table(title, list(readings), rows, left=len(readings)))
        show.out.print()
    rows = [[name, f"{100 * share:.0f}%"] for name, share in shares.items()]
    heading = f"Share of the 100 most frequent tokens ({source}) among the top {top}"
    show.out.print(show.table(heading, ["filter", "share"], rows))
    if json_file is not None:
        found = {name: [vars(reading) for reading in each] for name, each in readings.items()}
        write_json(
            json_file,
            {"texts": texts, "readings": found, "frequent_share": shares, "frequencies": source},
        )


@show.guarded
def spectrum(
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
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
    from rag_embfilter.spectroscopy import token_counts, vocabulary_order_counts

    vocabulary, tokenizer = len(encoder.backbone.unembedding), encoder.backbone.tokenizer
    if corpus is None:
        return vocabulary_order_counts(tokenizer, vocabulary), "vocabulary order"
    with corpus.open(encoding="utf-8", errors="replace") as lines:
        return token_counts(tokenizer, lines, vocabulary), corpus.name
