"""Does a server give the vectors that are expected? And if not, which known mistake gives those it does?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rag_embfilter.encoder import Encoder
from rag_embfilter.endpoint import PROMPTS, EndpointClient, Prompt
from rag_embfilter.errors import EndpointError
from rag_embfilter.inputs import RowBuilder
from rag_embfilter.templates import TEXT

FloatArray = NDArray[np.float32]
SAME = 0.999  # half precision stays above it
NEAR = 0.95  # weights quantised to 4 bits stay above it, the wrong pooling does not
TEXTS = (
    "Report a stolen laptop within two hours.",
    "Badges are handed out at reception, between 8 and 10 o'clock, to everyone who has an appointment.",
    "Paris",
    "비밀번호를 잊어버렸어요",
    "Lunch: 12:30 - 13:15.\nThe kitchen closes at 14:00!",
)


@dataclass(frozen=True)
class Finding:
    """What one kind of prompt gives.

    Attributes:
        prompts: `tokens` or `text`.
        verdict: `same`; `near` (right, but rounded more than half precision does: quantised weights);
            `differs` (a known mistake fits, named in `detail`); `unknown` (none does); `refused`.
        detail: a sentence on it.
        cosine: lowest cosine with the vectors expected, over the texts; None when there are none.
        normalised: whether the server scales to unit length, which is harmless.
    """

    prompts: str
    verdict: str
    detail: str
    cosine: float | None = None
    normalised: bool | None = None

    @property
    def good(self) -> bool:
        """Whether these prompts can be used."""
        return self.verdict in ("same", "near")


def verify(client: EndpointClient, encoder: Encoder, texts: Sequence[str] = TEXTS) -> list[Finding]:
    """Compare a server with the local encoder, for prompts as token ids and as text.

    Args:
        client: asks the server.
        encoder: a local one with one template, the backbone's weights included.
        texts: a few short ones.

    Raises `EndpointError` when the server cannot be reached, or refuses both kinds of prompt.
    """
    builder = encoder._builders[0]
    rows: list[list[int]] = [row.ids.tolist() for row in builder.rows(texts, "document")]
    template = encoder.templates[0].document
    joined = [template.replace(TEXT, text) for text in texts]
    retold: list[list[int]] = encoder.backbone.tokenizer(joined, return_attention_mask=False)["input_ids"]
    if encoder.templates[0].end_token:
        retold = rows
    findings, refusals = [], []
    asked: dict[str, tuple[Sequence[Prompt], list[list[int]]]] = {
        "tokens": (rows, rows),
        "text": (joined, retold),
    }
    for kind in PROMPTS:
        prompts, ids = asked[kind]
        try:
            theirs = client.embed(prompts)
        except EndpointError as error:
            findings.append(Finding(kind, "refused", str(error)))
            refusals.append(error)
            continue
        findings.append(_compared(kind, theirs, encoder, ids, list(texts)))
    if len(refusals) == len(PROMPTS):
        raise refusals[0]
    return findings


def _compared(
    kind: str, theirs: FloatArray, encoder: Encoder, ids: list[list[int]], texts: list[str]
) -> Finding:
    lengths = np.linalg.norm(theirs, axis=1)
    normalised = bool(np.abs(lengths - 1).max() < 0.01)
    if theirs.shape[1] != encoder.backbone.hidden_size:
        return Finding(
            kind,
            "unknown",
            f"its vectors have {theirs.shape[1]} dimensions, the backbone's hidden states "
            f"{encoder.backbone.hidden_size}: another model, or a layer of its own after pooling",
            normalised=normalised,
        )
    if not np.isfinite(theirs).all() or not lengths.all():
        return Finding(kind, "unknown", "some of its vectors are zero or not finite", normalised=normalised)
    scored = [(name, _cosines(theirs, ours)) for name, ours in _variants(encoder, ids, texts)]
    expected = float(scored[0][1].min())
    name, cosines = max(scored, key=lambda each: float(each[1].min()))
    if expected >= SAME:
        return Finding(kind, "same", "as the local backbone", expected, normalised)
    if name == scored[0][0] and expected >= NEAR:
        return Finding(kind, "near", "as the local backbone but for rounding", expected, normalised)
    if cosines.min() >= NEAR:
        return Finding(kind, "differs", f"its vectors are those {name}", expected, normalised)
    return Finding(
        kind,
        "unknown",
        f"no known mistake fits (nearest: {name}, cosine {cosines.min():.3f}): probably other weights",
        expected,
        normalised,
    )


def _cosines(a: FloatArray, b: FloatArray) -> NDArray[np.float64]:
    """Cosine of each pair of rows."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    cosines: NDArray[np.float64] = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return cosines


def _variants(encoder: Encoder, ids: list[list[int]], texts: list[str]) -> Iterator[tuple[str, FloatArray]]:
    """(What was done, vectors `[n, hidden]`) of what servers do; first what is expected."""
    wanted = encoder.templates[0].pooling
    states = {
        name: [_states(encoder, row) for row in rows] for name, rows in _inputs(encoder, ids, texts).items()
    }
    starts = [row.start for row in encoder._builders[0].rows(texts, "document")]
    pooled = {
        "the last token": lambda seen, start: seen[-1],
        "the mean of all tokens": lambda seen, start: seen.mean(0),
        "the first token": lambda seen, start: seen[0],
        "the mean of the text": lambda seen, start: seen[min(start, len(seen) - 1) :].mean(0),
    }
    right = "the last token" if wanted == "last" else "the mean of the text"
    for name in [right, *(name for name in pooled if name != right)]:
        pool = pooled[name]
        for what, rows in states.items():
            said = [f"of {name}"] * (name != right) + [what] * bool(what)
            made = np.stack([pool(seen, start) for seen, start in zip(rows, starts, strict=True)])
            yield " and ".join(said) or "expected", made


def _inputs(encoder: Encoder, ids: list[list[int]], texts: list[str]) -> dict[str, list[list[int]]]:
    """Rows of token ids by what was done to them; under an empty name as they should be."""
    builder: RowBuilder = encoder._builders[0]
    head, tail = builder.words["document"][0], builder.words["document"][-1]
    begins = len(builder.begin)
    tokenizer = encoder.backbone.tokenizer
    made = {"": ids}
    if tokenizer.eos_token_id is not None:
        made["with the end token after the prompt"] = [[*row, tokenizer.eos_token_id] for row in ids]
    if tokenizer.bos_token_id is not None:
        again = (
            "with a begin token more" if begins else "with a begin token, which this tokenizer does not add"
        )
        made[again] = [[tokenizer.bos_token_id, *row] for row in ids]
    if begins:
        made["without the begin token"] = [row[begins:] for row in ids]
    if head or tail:
        around = [*builder.begin, *head]
        made["with the template applied twice"] = [[*around, *row[begins:], *tail] for row in ids]
        if begins:
            twice = "with the template applied twice and the begin token too"
            made[twice] = [[*around, *row, *tail] for row in ids]
        made["of the text without the template"] = [
            [*builder.begin, *text] for text in builder.text_ids(texts)
        ]
    return made


@torch.inference_mode()
def _states(encoder: Encoder, ids: list[int]) -> FloatArray:
    """Hidden states `[seq, hidden]` after the final norm, float32."""
    row = torch.tensor([ids], device=encoder.backbone.device)
    output = encoder.backbone.model(input_ids=row)
    states: FloatArray = encoder.backbone.states(output)[0].float().cpu().numpy()
    return states
