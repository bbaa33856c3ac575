"""Trained embedders beside the filters: ranks by numpy, what is said of them, and every refusal."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pipelines import yardsticks
from pipelines.evaluate_cmd import sentence
from pipelines.plot import quality_against_dimensions
from rag_embfilter import EmbFilter, EvalSet, evaluate, rank_metrics
from rag_embfilter.errors import ConfigError, MissingExtraError
from rag_embfilter.eval_set import Passage
from rag_embfilter.yardstick import Yardstick, measure
from tests import tiny

pytest.importorskip("sentence_transformers", reason="the extra yardstick is not installed")

# Each word a direction of its own, so that a question's nearest passage is the one it shares a word with.
WORDS = [f"w{i}" for i in range(24)]


def save(folder, prompt: str | None = None):
    """A sentence-transformers folder: the mean of one-hot vectors of the words of a text."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    vocabulary = {word: i for i, word in enumerate([*WORDS, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    static = StaticEmbedding(tokenizer, embedding_weights=np.eye(25, dtype=np.float32))
    prompts = {"query": prompt, "document": ""} if prompt else None
    SentenceTransformer(modules=[static], prompts=prompts, device="cpu").save(str(folder))
    return folder


@pytest.fixture(scope="module")
def onehot(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "onehot")


@pytest.fixture(scope="module")
def words() -> EvalSet:
    """24 passages of a word each, and as many questions that hold the word of their passage."""
    corpus = {f"p{i}": Passage("", word) for i, word in enumerate(WORDS)}
    queries = {f"q{i}": f"{word} {word} {WORDS[i - 1]}" for i, word in enumerate(WORDS)}
    return EvalSet("words", corpus, queries, {f"q{i}": {f"p{i}": 1} for i in range(24)})


@pytest.fixture
def evaluation(words, encoder, store):
    return evaluate(words, encoder, [EmbFilter.from_encoder(encoder, "edge", 2)], store)


def test_it_ranks_by_exact_cosine_and_ties_stand_in_the_corpus_order(onehot, words):
    yardstick = Yardstick(str(onehot), "cpu")
    assert (yardstick.name, yardstick.dim) == ("onehot (25)", 25)
    assert yardstick.revision.startswith("sha256:") and yardstick.source == str(onehot)
    seen = []
    worst = rank_metrics(words.qrels, {query: [] for query in words.queries})
    result = measure(yardstick, words, worst, seen.append)
    assert result.run["q5"] == ["p5", "p4", *(f"p{i}" for i in range(24) if i not in (4, 5))]
    assert result.metrics.mean() == 1 and sum(seen) == 48
    assert (result.versus_raw.verdict, result.versus_raw.wins) == ("better", 24)


def test_vectors_have_unit_length_and_questions_get_the_models_own_prompt(tmp_path):
    yardstick = Yardstick(str(save(tmp_path / "prompted", "w7 w7 ")), "cpu")
    np.testing.assert_allclose(yardstick.encode_documents(["w3"]), np.eye(25)[[3]], atol=1e-6)
    query = yardstick.encode_queries(["w3"])[0]
    np.testing.assert_allclose(query[[3, 7]], [1 / 5**0.5, 2 / 5**0.5], atol=1e-6)
    assert yardstick.encode_queries([]).shape == (0, 25)


def test_it_stands_beside_the_filters_and_is_never_recommended(onehot, evaluation, tmp_path):
    before = evaluation.best()
    yardsticks.measure(evaluation, [Yardstick(str(onehot), "cpu")])
    assert evaluation.best() is before and [r.name for r in evaluation.results] == ["raw", "edge-r2"]
    said = sentence(evaluation)
    best = max(evaluation.results, key=lambda r: r.metrics.mean())
    gap = 100 * (1 - best.metrics.mean())
    assert f"onehot (25), a trained embedder, beats the best row here, {best.name}[/], by {gap:.1f}" in said
    quality_against_dimensions([evaluation], tmp_path / "q.svg")
    drawn = (tmp_path / "q.svg").read_text()
    assert "onehot (25): 100.0" in drawn


def test_nothing_is_said_of_one_that_is_not_better(onehot, evaluation, words):
    yardstick = Yardstick(str(onehot), "cpu")
    evaluation.results[0].metrics.per_query["ndcg_at_10"].update(dict.fromkeys(words.queries, 1.0))
    yardsticks.measure(evaluation, [yardstick])
    assert "trained embedder" not in sentence(evaluation)


def test_the_command_adds_a_row_and_a_page(onehot, llama, capsys, tmp_path):
    from pipelines.app import main

    words = ["evaluate", "eval_sets/faq", "--backbone", str(llama), "--device", "cpu", "--no-ragas"]
    words += [
        "--filter-ratios",
        "2",
        "--qdrant-path",
        str(tmp_path / "q"),
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main([*words, "--yardstick", str(onehot), "--report", str(tmp_path / "report")]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("onehot (25)"))
    (page,) = json.loads((tmp_path / "r.json").read_text())["sets"]
    assert [result["filter"] for result in page["results"]] == ["raw", "edge-r2"]
    (found,) = page["yardsticks"]
    assert (found["name"], found["dim"], found["source"]) == ("onehot (25)", 25, str(onehot))
    assert row.split()[2:4] == ["25", f"{100 * found['metrics']['ndcg_at_10']:.1f}"]
    assert found["versus_raw"]["n"] == page["queries"] == len(found["run"])
    assert "onehot (25)" in (tmp_path / "report" / "report.html").read_text()


# Refusals


def test_without_the_extra_or_the_packaged_weights(monkeypatch, onehot):
    monkeypatch.setattr("rag_embfilter.yardstick.PACKAGED", {"minilm": ("no_such_package", "model", "x")})
    with pytest.raises(
        MissingExtraError, match=r"'minilm' needs the package .* 'rag-embfilter\[yardstick\]'"
    ):
        Yardstick("minilm")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r"cannot be imported .* 'rag-embfilter\[yardstick\]'"):
        Yardstick(str(onehot))


def test_folders_that_are_no_such_model_and_hub_ids_that_cannot_be_reached(llama, tmp_path):
    with pytest.raises(ConfigError, match="holds no modules.json"):
        Yardstick(str(llama))
    (tmp_path / "modules.json").write_text("no JSON")
    with pytest.raises(
        ConfigError, match="cannot be loaded .* Expected minilm, a sentence-transformers folder"
    ):
        Yardstick(str(tmp_path))
    with pytest.raises(ConfigError, match="'nobody/nothing' cannot be loaded") as caught:
        Yardstick("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_a_chat_template_that_would_wrap_texts_is_warned_about(tmp_path, caplog):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = tiny.save_model(tmp_path / "llm", pad="<pad>")
    for name, warned in (("plain", False), ("chat", True)):
        if warned:
            (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        transformer = Transformer(str(folder))
        pooling = Pooling(32, pooling_mode="mean")
        SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(tmp_path / name))
        caplog.clear()
        Yardstick(str(tmp_path / name), "cpu")
        assert ("wraps every text in a chat message" in caplog.text) is warned
