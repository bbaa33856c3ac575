"""Result files: what was measured, with all that is needed to trust and repeat it."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipelines import yardsticks
from pipelines.judge_options import metrics_json
from rag_embfilter import __version__
from rag_embfilter.encoder import Encoder
from rag_embfilter.evaluation import Evaluation, FilterResult
from rag_embfilter.judge import JudgedMetric

PACKAGES = (
    "torch", "transformers", "tokenizers", "numpy", "qdrant-client", "ir-measures", "scipy", "ragas",
    "mteb", "scikit-learn", "sentence-transformers",
)  # fmt: skip


def provenance(encoder: Encoder) -> dict[str, Any]:
    """Backbone, settings, versions, device, time and command line of a result."""
    return environment() | {
        "backbone": encoder.settings["backbone"],
        "revision": encoder.backbone.revision,
        "encoder": dict(encoder.settings),
        "encoder_fingerprint": dict(encoder.fingerprint.parts),
        "device": str(encoder.backbone.device),
        "dtype": str(encoder.backbone.dtype).removeprefix("torch."),
    }


def environment() -> dict[str, Any]:
    """Machine, versions, time and command line of a result."""
    return {
        "processors": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"rag-embfilter": __version__} | {name: _version(name) for name in PACKAGES},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "pipelines", *_without_key(sys.argv[1:])],
    }


def _without_key(words: Sequence[str]) -> list[str]:
    """A command line without the server's key, since results are shown to others."""
    name = "--qdrant-api-key"
    # Names of files may hold bytes that are no text, and results are JSON.
    words = [word.encode(errors="backslashreplace").decode() for word in words]
    hidden = [f"{name}=..." if word.startswith(f"{name}=") else word for word in words]
    return ["..." if i and hidden[i - 1] == name else word for i, word in enumerate(hidden)]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def evaluation_json(
    evaluation: Evaluation, judged: Mapping[str, Mapping[str, JudgedMetric]]
) -> dict[str, Any]:
    """One eval set's results. `judged`: filter name -> RAGAS metric -> scores."""
    eval_set, report = evaluation.eval_set, evaluation.ingested
    return {
        "eval_set": eval_set.name,
        "digest": eval_set.digest,
        "passages": len(eval_set.corpus),
        "queries": len(eval_set.queries),
        "passages_encoded": report.encoded,
        "passages_unchanged": report.nodes_unchanged,
        "recommended": evaluation.best().name,
        "results": [_filter_json(result, judged.get(result.name, {})) for result in evaluation.results],
        "yardsticks": yardsticks.as_json(evaluation),
    }


def _filter_json(result: FilterResult, judged: Mapping[str, JudgedMetric]) -> dict[str, Any]:
    return {
        "filter": result.name,
        "mode": result.mode,
        "filter_parts": dict(result.embfilter.parts),
        "dim": result.dim,
        "collection": result.collection,
        "fingerprint": result.fingerprint,
        "metrics": result.metrics.means(),
        "queries_scored": len(result.metrics.per_query["ndcg_at_10"]),
        "queries_excluded": list(result.metrics.excluded),
        "versus_raw": vars(result.versus_raw) if result.versus_raw else None,
        "ragas": metrics_json(judged),
        "per_query": {name: dict(scores) for name, scores in result.metrics.per_query.items()},
        "run": {query: list(passages[:10]) for query, passages in result.run.items()},
    }
