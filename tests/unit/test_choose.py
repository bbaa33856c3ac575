"""Choosing: the rule on scores made by hand, cross-fitting, scoring against the store, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.app import main
from rag_embfilter import EvalSet, evaluate
from rag_embfilter.choose import Candidate, Grid, Words, choose, pick, pseudo_set
from rag_embfilter.errors import ConfigError, FingerprintMismatch
from rag_embfilter.eval_set import Passage
from rag_embfilter.fitting import FilterSpec

RNG = np.random.default_rng(0)
BASE = RNG.uniform(0.2, 0.8, 80)
QUERIES = [f"q{i:02d}" for i in range(80)]


def made(kind, ratio, dim, lift, spread=0.0, templates=("plain",)):
    noise = np.random.default_rng(dim).normal(0, spread, 80) if spread else 0
    scores = np.clip(BASE + lift + noise, 0, 1)
    return Candidate(Words(templates), FilterSpec(kind, ratio), dim, dict(zip(QUERIES, scores, strict=True)))


RAW = made("raw", 1, 64, 0)


def test_the_cheapest_near_the_best_is_picked():
    grid = [RAW, made("edge", 2, 32, 0.10), made("edge", 4, 16, 0.095), made("edge", 8, 8, 0.05)]
    assert pick(grid, QUERIES).dim == 32
    assert pick(grid, QUERIES, tolerance=0.01).dim == 16
    assert pick(grid, QUERIES, tolerance=0.06).dim == 8


def test_fewer_passes_win_at_equal_size():
    two = made("edge", 4, 16, 0.102, templates=("plain", "echo"))
    assert pick([RAW, two, made("edge", 4, 16, 0.1)], QUERIES).words.templates == ("plain",)


def test_raw_is_picked_when_nothing_is_better_beyond_noise():
    noisy = made("edge", 2, 32, 0.01, spread=0.3)
    assert pick([RAW, noisy, made("tail", 2, 32, -0.1)], QUERIES) is RAW


def test_halves_that_choose_do_not_report():
    """Two candidates that each shine on the questions of one half look best there and are not."""
    rng = np.random.default_rng(0)
    halves = np.array_split(rng.permutation(80), 2)
    fooled = []
    for half in halves:
        scores = BASE.copy()
        scores[half] = np.clip(scores[half] + 0.15, 0, 1)
        fooled.append(
            Candidate(Words(("plain",)), FilterSpec("rand", 2), 32, dict(zip(QUERIES, scores, strict=True)))
        )
    choice = choose([RAW, *fooled])
    assert abs(choice.held_out.difference) < 1e-9
    assert choice.chosen is not RAW  # on all questions each of them does look better


def test_a_real_gain_survives_and_the_same_seed_gives_the_same_report():
    grid = [RAW, made("edge", 2, 32, 0.1), made("calibrated", 8, 8, 0.2)]
    choice = choose(grid)
    assert choice.chosen.dim == 8 and choice.held_out.verdict == "better"
    assert choice.held_out_mean == pytest.approx(grid[2].mean())
    assert choice.held_out_best == pytest.approx(grid[2].mean())
    assert choose(grid).held_out == choice.held_out


def test_too_few_questions():
    few = [Candidate(c.words, c.spec, c.dim, {q: c.scores[q] for q in QUERIES[:39]}) for c in (RAW,)]
    assert choose(few).too_few and not choose([RAW]).too_few
    with pytest.raises(ConfigError, match="at least two"):
        choose([Candidate(Words(("plain",)), FilterSpec("raw", 1), 64, {"q": 1.0})])


SET = EvalSet(
    "office",
    {f"p{i}": Passage(f"Title {i}", f"Passage {i} is about {i * 3}. It says more.") for i in range(45)},
    {f"q{i}": f"who knows about {i * 3}?" for i in range(12)},
    {f"q{i}": {f"p{i}": 1} for i in range(12)},
)


def test_scores_are_those_of_evaluate(encoder, store):
    specs = [FilterSpec("edge", 2), FilterSpec("calibrated", 4)]
    grid = Grid(encoder.backbone, [SET], [["prompteol"]], specs).candidates()
    done = evaluate(
        SET, encoder, [_edge(encoder)], store, fitted=specs[1:], questions=list(SET.queries.values())
    )
    assert [c.name for c in grid] == ["prompteol raw", "prompteol edge-r2", "prompteol calibrated-r4"]
    for candidate, result in zip(grid, done.results, strict=True):
        expected = {f"office/{q}": s for q, s in result.metrics.per_query["ndcg_at_10"].items()}
        assert candidate.scores == pytest.approx(expected, abs=1e-6)
        assert candidate.dim == result.embfilter.dim


def _edge(encoder):
    from rag_embfilter import EmbFilter

    return EmbFilter.from_encoder(encoder, "edge", 2)


def test_joined_templates_cost_one_pass_each(encoder):
    from tests import tiny

    with tiny.ForwardCounter(encoder) as counter:
        templates = [["plain"], ["echo"], ["plain", "echo"]]
        grid = Grid(encoder.backbone, [SET], templates, [FilterSpec("edge", 4)]).candidates()
    assert counter.texts == 2 * (45 + 12)
    assert {c.name: c.dim for c in grid} == {
        "plain raw": 32, "plain edge-r4": 8, "echo raw": 32, "echo edge-r4": 8,
        "plain+echo raw": 64, "plain+echo edge-r4": 8,
    }  # fmt: skip


def test_poolings_cost_no_pass_and_score_as_an_encoder_with_that_pooling(encoder):
    from rag_embfilter import EmbFilter, Encoder
    from tests import tiny

    with tiny.ForwardCounter(encoder) as counter:
        templates, poolings = [["prompteol"], ["prompteol", "echo"]], ["last", "mean", "last+mean"]
        made = Grid(encoder.backbone, [SET], templates, [FilterSpec("edge", 2)], poolings)
        grid = {c.name: c for c in made.candidates()}
    assert counter.texts == 2 * (45 + 12)
    words = ("prompteol", "prompteol+echo", "prompteol (mean)", "prompteol (last+mean)")
    assert list(grid) == [f"{w} {f}" for w in words for f in ("raw", "edge-r2")]  # last is prompteol's own
    alone = Encoder(encoder.backbone, "prompteol", "mean")
    embfilter = EmbFilter.from_encoder(alone, "edge", 2)
    passages = embfilter.apply(alone.encode_documents(list(SET.passages().values())))
    asked = embfilter.apply(alone.encode_queries(list(SET.queries.values())))
    for i, scores in enumerate(asked @ passages.T):
        place = 1 + int((scores > scores[i]).sum())
        expected = 1 / np.log2(place + 1) if place <= 10 else 0
        assert grid["prompteol (mean) edge-r2"].scores[f"office/q{i}"] == pytest.approx(expected, abs=1e-6)


def test_the_fit_of_a_choice_is_that_of_its_encoder_on_all_sets(encoder):
    from rag_embfilter import EmbFilter, Encoder

    other = EvalSet(
        "garden",
        {f"g{i}": Passage("", f"Bed {i} holds {i * 5} plants.") for i in range(35)},
        {f"h{i}": f"where are {i * 5} plants?" for i in range(7)},
        {f"h{i}": {f"g{i}": 1} for i in range(7)},
    )
    made = Grid(encoder.backbone, [SET, other], [["plain", "echo"]], [FilterSpec("calibrated", 4)])
    *_, candidate = made.candidates()
    joined = Encoder(encoder.backbone, ["plain", "echo"])
    corpus = joined.encode_documents([*SET.passages().values(), *other.passages().values()])
    queries = joined.encode_queries([*SET.queries.values(), *other.queries.values()])
    expected = EmbFilter.from_encoder(joined, "calibrated", 4, corpus=corpus, queries=queries)
    found = made.fit(candidate)
    np.testing.assert_allclose(found.document_mean, expected.document_mean, atol=1e-5)
    np.testing.assert_allclose(found.query_mean, expected.query_mean, atol=1e-5)
    np.testing.assert_allclose(found.projector(), expected.projector(), atol=1e-2)


def test_given_questions_centre_in_place_of_the_sets_own(encoder):
    questions = [f"is {i} a question of another kind?" for i in range(6)]
    made = Grid(encoder.backbone, [SET], [["plain"]], [FilterSpec("calibrated", 4)], questions=questions)
    *_, candidate = made.candidates()
    expected = made.encoder(candidate.words).encode_queries(questions).mean(axis=0)
    np.testing.assert_allclose(made.fit(candidate).query_mean, expected, atol=1e-6)


def test_what_cannot_be_fitted_is_said_before_anything_is_encoded(encoder):
    from tests import tiny

    small = EvalSet("s", dict(list(SET.corpus.items())[:20]), SET.queries, SET.qrels)
    few = EvalSet("f", SET.corpus, {"q0": "who?"}, {"q0": {"p0": 1}})
    with tiny.ForwardCounter(encoder) as counter:
        for eval_set, message in ((small, "'s' has 20 passages; calibrated needs"), (few, "'f': 1 example")):
            with pytest.raises(ConfigError, match=message):
                Grid(encoder.backbone, [eval_set], [["plain"]], [FilterSpec("calibrated", 4)])
    assert counter.texts == 0


def test_a_ratio_too_large_for_joined_words_is_tried_with_single_ones(encoder):
    templates = [["plain"], ["plain", "echo"]]
    grid = Grid(encoder.backbone, [SET], templates, [FilterSpec("edge", 32)]).candidates()
    assert [c.name for c in grid] == ["plain raw", "plain edge-r32", "plain+echo raw"]


def test_pseudo_questions_are_titles_or_first_sentences_and_leave_their_passage():
    found = pseudo_set("docs", {
        "a": Passage("Badges", "At reception."),
        "b": Passage("", "First sentence here. The rest follows."),
        "c": Passage("", "One sentence alone."),
    })  # fmt: skip
    assert found.queries == {"a": "Badges", "b": "First sentence here."}
    assert found.passages() == {"a": "At reception.", "b": "The rest follows.", "c": "One sentence alone."}
    assert found.qrels == {"a": {"a": 1}, "b": {"b": 1}}
    with pytest.raises(ConfigError, match="no pseudo-questions"):
        pseudo_set("docs", {"c": Passage("", "One sentence alone.")})


def _write(folder):
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": k, "title": p.title, "text": p.text} for k, p in SET.corpus.items()]
    queries = [{"_id": k, "text": text} for k, text in SET.queries.items()]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "qrels" / "test.tsv").write_text("".join(f"q{i}\tp{i}\t1\n" for i in range(12)))


def test_the_command_its_config_and_ingesting_with_it(llama, tmp_path, capsys):
    _write(tmp_path / "set")
    common = ["--backbone", str(llama), "--template", "plain", "echo", "--filter-ratios", "4"]
    files = ["--config", str(tmp_path / "c.json"), "--json", str(tmp_path / "r.json")]
    files += ["--pooling", "mean"]  # the templates' own
    assert main(["choose", str(tmp_path / "set"), *common, *files]) == 0
    out = capsys.readouterr().out
    assert "Too few questions (12)" in out and "Recommended:" in out and "of 12 configurations" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["candidates"]) == 12 and result["too_few_questions"]
    ingest = ["ingest", str(tmp_path / "set" / "corpus.jsonl"), "--collection", "c"]
    store = ["--qdrant-path", str(tmp_path / "q"), "--config", str(tmp_path / "c.json")]
    assert main([*ingest, *store]) == 0
    (tmp_path / "c.json").write_text("[]")
    assert main([*ingest, *store]) == 1
    assert "not what `choose --config` writes" in capsys.readouterr().err


def test_a_calibrated_choice_carries_its_fit_and_its_questions(llama, tmp_path, capsys, monkeypatch):
    """What to ship is forced here; the rest of the way is the real one."""
    from rag_embfilter import EmbFilterEmbedding
    from rag_embfilter import choose as choosing

    _write(tmp_path / "set")
    monkeypatch.setattr(choosing, "pick", lambda grid, queries, tolerance: grid[-1])
    monkeypatch.chdir(llama.parent)
    common = ["--backbone", llama.name, "--template", "plain", "echo", "--filter-ratios", "4", "--keep", "1"]
    common += ["--max-length", "300"]
    more = ["--filter-types", "calibrated", "--pooling", "last+mean", "--config", str(tmp_path / "c.json")]
    assert main(["choose", str(tmp_path / "set"), *common, *more]) == 0
    config = json.loads((tmp_path / "c.json").read_text())
    assert Path(config["model_name"]).is_absolute() and config["filter_file"] == "c.json.safetensors"
    assert config["pooling"] == "last+mean" and config["template"] == "echo" and config["keep"] == 1
    assert set(config["example_questions"]) == set(SET.queries.values())
    monkeypatch.chdir(tmp_path)
    embedding = EmbFilterEmbedding.from_config(tmp_path / "c.json")
    assert embedding.fingerprint == config["fingerprint"]
    config["template"] = "question"
    (tmp_path / "other.json").write_text(json.dumps(config))
    with pytest.raises(FingerprintMismatch):
        EmbFilterEmbedding.from_config(tmp_path / "other.json")
    assert embedding.filter.name == "calibrated-r4-k1" and embedding.filter.dim == 8
    assert len(embedding.get_query_embedding("who knows?")) == 8
    ingest = ["ingest", str(tmp_path / "set" / "corpus.jsonl"), "--collection", "c"]
    store = ["--qdrant-path", str(tmp_path / "q"), "--config", str(tmp_path / "c.json")]
    capsys.readouterr()
    assert main([*ingest, *store]) == 0
    shown = capsys.readouterr()
    assert "c-calibrated-r4-k1" in shown.out and "stand in" not in shown.err
    from rag_embfilter import Store

    with Store(path=tmp_path / "q") as opened:
        stored = opened.filter_of("c-calibrated-r4-k1")
        assert opened.info("c-calibrated-r4-k1").settings["pooling"] == "last+mean"
        assert opened.info("c-calibrated-r4-k1").settings["max_length"] == 300
    np.testing.assert_allclose(stored.query_mean, embedding.filter.query_mean, atol=1e-5)
    (tmp_path / "q.txt").write_text("\n".join(f"is it {i}?" for i in range(6)))
    where = ["--qdrant-path", str(tmp_path / "q")]
    assert main(["refit-queries", "c-calibrated-r4-k1", str(tmp_path / "q.txt"), *where]) == 0
    with Store(path=tmp_path / "q") as opened:
        refitted = opened.filter_of("c-calibrated-r4-k1").query_mean
    assert not np.allclose(refitted, stored.query_mean, atol=1e-4)
    assert main([*ingest, *store]) == 0  # the configuration's questions do not undo it
    with Store(path=tmp_path / "q") as opened:
        np.testing.assert_array_equal(opened.filter_of("c-calibrated-r4-k1").query_mean, refitted)


def test_choosing_without_labels_says_that_it_is_a_proxy(llama, tmp_path, capsys, monkeypatch):
    from rag_embfilter import choose as choosing

    _write(tmp_path / "set")
    arguments = ["choose", str(tmp_path / "set" / "corpus.jsonl"), "--pseudo", "--backbone", str(llama)]
    assert main([*arguments, "--template", "plain", "--filter-types", "edge", "--filter-ratios", "2"]) == 0
    out = capsys.readouterr().out
    forced = ["--filter-types", "calibrated", "--template", "plain", "--config", str(tmp_path / "c.json")]
    monkeypatch.setattr(choosing, "pick", lambda grid, queries, tolerance: grid[-1])
    assert main([*arguments, *forced]) == 0
    assert "example_questions" not in json.loads((tmp_path / "c.json").read_text())
    assert "45 questions" in out and "a proxy: real ones may choose otherwise" in out
