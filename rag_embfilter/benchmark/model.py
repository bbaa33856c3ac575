"""An encoder and a filter as a model of MTEB; raw embeddings are made once and shared by all filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError
from rag_embfilter.filters import EmbFilter, Role
from rag_embfilter.normalizing import unit_embeddings

FloatArray = NDArray[np.float32]
# Task types whose classifiers take the pooled states as they are: the paper normalises everywhere else.
UNSCALED = ("Classification", "MultilabelClassification")
Progress = Callable[[str, int], None]


class RawEmbeddings:
    """Pooled states of texts, each encoded once per role and kept in memory.

    A text takes `4 * hidden` bytes. Where queries and documents have one template, a text has one state for
    both roles.

    Args:
        encoder: what encodes.
        progress: called with `found` and a number of texts before they are encoded, then with `encoded`.
    """

    def __init__(self, encoder: Encoder, progress: Progress | None = None) -> None:
        self.encoder = encoder
        self.encoded = 0
        self._progress = progress or (lambda what, n: None)
        one_space = all(template.query == template.document for template in encoder.templates)
        documents: dict[str, FloatArray] = {}
        self._held: dict[Role, dict[str, FloatArray]] = {
            "document": documents,
            "query": documents if one_space else {},
        }

    def states(self, texts: Sequence[str], role: Role) -> FloatArray:
        """Pooled states, not scaled, float32 `[n, hidden]`; rows of blank texts are zero.

        Public sets hold blank texts, which an encoder refuses. Raises `EncodingError` for others that cannot
        be embedded.
        """
        held = self._held[role]
        missing = [text for text in dict.fromkeys(texts) if text.strip() and text not in held]
        if missing:
            self._progress("found", len(missing))
            encode = self.encoder.encode_queries if role == "query" else self.encoder.encode_documents
            made = encode(missing, normalize=False, progress=lambda n: self._progress("encoded", n))
            held.update(zip(missing, made, strict=True))
            self.encoded += len(missing)
        blank = np.zeros(self.encoder.hidden_size, dtype=np.float32)
        rows = [held.get(text, blank) for text in texts]
        return np.stack(rows) if rows else np.empty((0, len(blank)), dtype=np.float32)

    def unit(self, texts: Sequence[str], role: Role) -> FloatArray:
        """As `Encoder.encode_documents` and `encode_queries` give them; rows of blank texts are zero."""
        states = self.states(texts, role)
        there = states.any(axis=1)
        states[there] = unit_embeddings(states[there], self.encoder.blocks)
        return states


class EmbFilterModel:
    """Speaks MTEB's `EncoderProtocol`: `mteb.evaluate(EmbFilterModel(encoder, embfilter), tasks)` works.

    Inputs of prompt type `query` are encoded as queries, all others as documents; MTEB's instructions are
    left out, since the template is the prompt. Vectors have unit length, but for classification, as in the
    paper.

    Args:
        encoder: the encoder, or the `RawEmbeddings` of one that several models share.
        embfilter: a filter without means; those of a fitted one would have to come from the task's corpus.

    Raises `ConfigError` for a filter that centres, or one that does not fit the encoder.
    """

    def __init__(self, encoder: Encoder | RawEmbeddings, embfilter: EmbFilter, **_: Any) -> None:
        self.raw = encoder if isinstance(encoder, RawEmbeddings) else RawEmbeddings(encoder)
        self.embfilter = embfilter
        hidden = self.raw.encoder.hidden_size
        if embfilter.document_mean is not None:
            raise ConfigError(
                f"{embfilter.name} centres on a corpus, and MTEB's tasks come without one: take types that "
                "are not fitted, or `evaluate` for retrieval."
            )
        if embfilter.hidden_size != hidden:
            raise ConfigError(
                f"{embfilter.name} takes {embfilter.hidden_size} dimensions, the encoder gives {hidden}."
            )

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, task_metadata: Any, prompt_type: Any = None, **_: Any
    ) -> FloatArray:
        """Filtered embeddings of MTEB's batches, float32 `[n, dim]`, in their order."""
        texts = [text for batch in inputs for text in batch["text"]]
        role: Role = "query" if getattr(prompt_type, "value", prompt_type) == "query" else "document"
        if task_metadata.type in UNSCALED:
            return self.embfilter.apply(self.raw.states(texts, role), role, normalize=False)
        unit = self.raw.unit(texts, role)
        there = unit.any(axis=1)
        filtered = np.zeros((len(unit), self.embfilter.dim), dtype=np.float32)
        filtered[there] = self.embfilter.apply(unit[there], role)
        return filtered

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosine of each with each, `[n1, n2]`."""
        from mteb.similarity_functions import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosine of each with its counterpart, `[n]`."""
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> Any:
        """What MTEB writes down about a model: backbone and filter by name, the fingerprint as revision."""
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        encoder, embfilter = self.raw.encoder, self.embfilter
        backbone = encoder.backbone.name.rstrip("/").rsplit("/", 1)[-1]
        return ModelMeta.create_empty(
            overwrites={
                "name": f"rag-embfilter/{backbone}-{embfilter.name}",
                "revision": (encoder.fingerprint | embfilter.fingerprint).digest,
                "embed_dim": embfilter.dim,
                "max_tokens": encoder.max_length,
                "similarity_fn_name": ScoringFunction.COSINE,
                "framework": ["PyTorch"],
                "modalities": ["text"],
            }
        )
