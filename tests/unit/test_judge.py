"""RAGAS metrics: hand values, what is counted, and life without RAGAS."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llama_index.core.schema import Document

import rag_embfilter
from rag_embfilter import EmbFilter, Encoder, Store, ingest, judge, rank_metrics
from rag_embfilter.errors import ConfigError, MissingExtraError

PRECISION, RECALL = judge.ID_METRICS
QRELS = {"half": {"a": 2, "b": 1, "c": 1, "d": 0}, "miss": {"a": 1}}
RUN = {"half": ["a", "d", "x", "b"], "miss": ["x", "y"]}


@pytest.fixture
def ragas() -> None:
    pytest.importorskip("ragas")


def drop_ragas(patch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "ragas" or name.startswith("ragas.")]:
        patch.delitem(sys.modules, name)


@pytest.fixture(params=["absent", "broken"])
def no_ragas(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """RAGAS that is not there, or that raises when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        drop_ragas(patch)
        if request.param == "absent":
            patch.setitem(sys.modules, "ragas", None)
        else:
            (tmp_path / "ragas").mkdir()
            (tmp_path / "ragas" / "__init__.py").write_text("raise ImportError('no langchain vertexai')")
            patch.syspath_prepend(tmp_path)
        yield request.param


@pytest.mark.usefixtures("ragas", "no_key")
def test_id_metrics_equal_hand_values_and_no_hit_counts_zero() -> None:
    found = judge.id_metrics(QRELS, RUN)
    assert found[PRECISION].scores == {"half": 0.5, "miss": 0.0}
    assert found[RECALL].scores == {"half": pytest.approx(2 / 3), "miss": 0.0}
    assert found[PRECISION].mean == 0.25
    assert found[RECALL].mean == pytest.approx(1 / 3)


@pytest.mark.usefixtures("ragas")
def test_nothing_retrieved_counts_zero_and_nothing_relevant_is_a_failure() -> None:
    qrels = {"hit": {"a": 1}, "silent": {"a": 1}, "void": {"a": 0}}
    for metric in judge.id_metrics(qrels, {"hit": ["a"], "silent": [], "void": ["a"]}).values():
        assert metric.scores == {"hit": 1.0, "silent": 0.0}
        assert metric.failures == {"void": "no relevant passage"}
        assert metric.mean == 0.5


@pytest.mark.usefixtures("ragas")
def test_no_scored_question_has_no_mean() -> None:
    assert judge.id_metrics({"q": {}}, {"q": ["a"]})[RECALL].mean is None


@pytest.mark.usefixtures("ragas")
def test_first_k_passages_count_each_once_and_ids_are_text() -> None:
    found = judge.id_metrics({1: {"7": 1, "8": 1}}, {"1": [7, 7, 8, 9]}, k=2)
    assert found[PRECISION].scores == {"1": 1.0}
    assert found[RECALL].scores == {"1": 1.0}
    assert judge.id_metrics({"q": {"a": 1}}, {"q": ["x", "a"]}, k=1)[RECALL].mean == 0.0


@pytest.mark.usefixtures("ragas")
def test_a_score_that_is_not_finite_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from ragas.metrics import IDBasedContextPrecision

    async def nan(self: object, sample: object, **options: object) -> float:
        return float("nan")

    monkeypatch.setattr(IDBasedContextPrecision, "single_turn_ascore", nan)
    found = judge.id_metrics(QRELS, RUN)
    assert found[PRECISION].failures == {"half": "ragas gave nan", "miss": "ragas gave nan"}
    assert len(found[RECALL].scores) == 2


@pytest.mark.usefixtures("ragas")
def test_works_inside_a_running_event_loop() -> None:
    async def within() -> float | None:
        return judge.id_metrics(QRELS, RUN)[PRECISION].mean

    assert asyncio.run(within()) == 0.25


@pytest.mark.usefixtures("ragas")
def test_available_says_none() -> None:
    assert judge.available() is None


def test_k_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="k 0: expected 1 or more"):
        judge.id_metrics(QRELS, RUN, k=0)


def test_without_ragas_the_error_says_what_to_install(no_ragas: str) -> None:
    reason = {"absent": "ModuleNotFoundError", "broken": "no langchain vertexai"}[no_ragas]
    with pytest.raises(MissingExtraError, match=reason):
        judge.id_metrics(QRELS, RUN)
    told = judge.available()
    assert told is not None
    assert "pip install 'rag-embfilter[eval]'" in told


@pytest.mark.usefixtures("no_ragas", "no_key")
def test_without_ragas_ingest_query_and_rank_metrics_work(encoder: Encoder, store: Store) -> None:
    raw = EmbFilter.from_encoder(encoder, "raw")
    texts = {"a": "leave", "b": "pay", "c": "parking"}
    report = ingest([Document(id_=i, text=t) for i, t in texts.items()], encoder, [raw], store, "docs")
    assert (report.encoded, report.failed) == (3, [])
    (hits,) = store.search("docs-raw", raw.apply(encoder.encode_documents(["pay"]), role="query"), limit=3)
    ranking = [str(hit.node.ref_doc_id) for hit in hits]
    assert hits[0].score == pytest.approx(1.0, abs=1e-5)
    assert rank_metrics({"q": {"b": 1}}, {"q": ranking}).mean("mrr_at_10") == 1.0


@pytest.mark.parametrize("raises", ["ImportError('x')", "AttributeError('x')", "RuntimeError('x')"])
def test_a_fresh_process_never_imports_a_broken_ragas_on_its_own(tmp_path: Path, raises: str) -> None:
    (tmp_path / "ragas.py").write_text(f"raise {raises}")
    script = (
        "import sys, rag_embfilter\n"
        "from rag_embfilter import judge, rank_metrics\n"
        "assert rank_metrics({'q': {'a': 1}}, {'q': ['a']}).mean() == 1.0\n"
        "assert 'ragas' not in sys.modules\n"
        "print(judge.available())\n"
    )
    root = Path(rag_embfilter.__file__).parents[1]
    kept = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=kept | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"RAGAS cannot be imported ({raises.split('(')[0]}: x)")


@pytest.mark.usefixtures("ragas")
def test_precision_and_recall_agree_with_numpy_on_random_rankings() -> None:
    rng = np.random.default_rng(2)
    passages = [str(i) for i in range(30)]
    qrels = {str(q): {p: int(rng.integers(0, 3)) for p in rng.choice(passages, 12, False)} for q in range(20)}
    run = {q: list(rng.permutation(passages)) for q in qrels}
    found = judge.id_metrics(qrels, run, k=8)
    for query, grades in qrels.items():
        relevant = [passage for passage, grade in grades.items() if grade > 0]
        hits = np.isin(run[query][:8], relevant).sum()
        assert found[PRECISION].scores[query] == pytest.approx(hits / 8)
        assert found[RECALL].scores[query] == pytest.approx(hits / len(relevant))
