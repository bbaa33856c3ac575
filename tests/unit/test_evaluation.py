"""`evaluate`: its rankings, what it encodes, and collections that never meet."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from rag_embfilter import EmbFilter, Encoder, EvalSet, Store, evaluate
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.eval_set import Passage
from rag_embfilter.evaluation import Evaluation, FilterResult, eval_base
from rag_embfilter.metrics import Comparison, RankMetrics
from tests import tiny

WORDS = ("leave", "pay", "parking", "badge", "laptop", "travel", "meals", "pension", "desk", "visitor")
SMALL = EvalSet(
    name="office",
    corpus={f"p{i}": Passage(word if i % 2 else "", f"All about {word}.") for i, word in enumerate(WORDS)},
    queries={f"q{i}": f"who knows about {word}?" for i, word in enumerate(WORDS[:6])},
    qrels={f"q{i}": {f"p{i}": 2, f"p{i + 1}": 1} for i in range(6)},
)


@pytest.fixture
def edge(encoder: Encoder) -> EmbFilter:
    return EmbFilter.from_encoder(encoder, "edge", 2)


def test_rankings_are_the_exact_cosine_order_of_the_filtered_vectors(
    encoder: Encoder, store: Store, edge: EmbFilter
) -> None:
    done = evaluate(SMALL, encoder, [edge], store)
    assert [result.embfilter.name for result in done.results] == ["raw", "edge-r2"]
    texts = [f"{p.title} {p.text}".strip() for p in SMALL.corpus.values()]
    passages = encoder.encode_documents(texts).astype(np.float64)
    queries = encoder.encode_queries(list(SMALL.queries.values())).astype(np.float64)
    for result, matrix in zip(done.results, (np.eye(32), edge.matrix), strict=True):
        p, q = passages @ matrix.T, queries @ matrix.T
        cosines = (q @ p.T) / np.outer(np.linalg.norm(q, axis=1), np.linalg.norm(p, axis=1))
        order = np.argsort(-cosines, axis=1)
        names = np.array(list(SMALL.corpus))
        assert result.run == {f"q{i}": list(names[row]) for i, row in enumerate(order)}
        places = [list(row).index(i) + 1 for i, row in enumerate(order)]
        nexts = [list(row).index(i + 1) + 1 for i, row in enumerate(order)]
        ideal = 3 + 1 / math.log2(3)
        expected = [
            (3 / math.log2(a + 1) + 1 / math.log2(b + 1)) / ideal for a, b in zip(places, nexts, strict=True)
        ]
        assert list(result.metrics.per_query["ndcg_at_10"].values()) == pytest.approx(expected, abs=1e-6)


def test_raw_comes_first_once_and_others_are_compared_with_it(
    encoder: Encoder, store: Store, edge: EmbFilter
) -> None:
    raw, filtered = evaluate(SMALL, encoder, [edge, EmbFilter.from_encoder(encoder, "raw")], store).results
    assert raw.versus_raw is None
    assert filtered.versus_raw is not None
    assert filtered.versus_raw.verdict == "too few queries"
    assert filtered.versus_raw.difference == pytest.approx(filtered.metrics.mean() - raw.metrics.mean())
    assert store.info(filtered.collection).dim == 16
    assert store.info(filtered.collection).made["fingerprint"] == filtered.fingerprint


def test_a_second_call_encodes_no_passage_and_gives_the_same(
    encoder: Encoder, store: Store, edge: EmbFilter
) -> None:
    told: list[tuple[str, int]] = []
    first = evaluate(SMALL, encoder, [edge], store, progress=lambda what, n: told.append((what, n)))
    assert sum(n for what, n in told if what == "passages") == 10
    assert sum(n for what, n in told if what == "questions") == 6
    with tiny.ForwardCounter(encoder) as counter:
        again = evaluate(SMALL, encoder, [edge], store)
    assert counter.texts == 6  # the questions
    assert [r.run for r in again.results] == [r.run for r in first.results]


def test_a_new_filter_is_made_from_the_raw_collection(
    encoder: Encoder, store: Store, edge: EmbFilter
) -> None:
    evaluate(SMALL, encoder, [], store)
    with tiny.ForwardCounter(encoder) as counter:
        done = evaluate(SMALL, encoder, [edge], store)
    assert counter.texts == 6
    assert (done.ingested.encoded, done.ingested.refiltered) == (0, 10)
    assert store.info(done.results[1].collection).points == 10


def test_two_encoders_or_two_versions_of_a_set_never_share_a_collection(
    encoder: Encoder, store: Store, model_folders: dict[str, Path], llama: Path, tmp_path: Path
) -> None:
    # Another family, template or limit; and other weights in a folder of the same name.
    twin = tiny.save_model(tmp_path / llama.name, "Llama", seed=1)
    encoders = [
        encoder,
        Encoder(str(model_folders["Qwen2"]), device="cpu"),
        Encoder(str(llama), template="plain", device="cpu"),
        Encoder(str(llama), max_length=64, device="cpu"),
        Encoder(str(twin), device="cpu"),
    ]
    collections = [evaluate(SMALL, each, [], store).results[0].collection for each in encoders]
    assert len(set(collections)) == 5
    assert store.names() == sorted(collections)
    assert all(store.info(name).points == 10 for name in collections)
    newer = dataclasses.replace(SMALL, queries={**SMALL.queries, "q0": "in other words?"})
    assert eval_base(newer, encoder) != eval_base(SMALL, encoder)


def test_base_names_say_set_backbone_and_template_and_suit_qdrant(encoder: Encoder) -> None:
    odd = dataclasses.replace(SMALL, name="my: set/2")
    assert eval_base(odd, encoder).startswith("my_set_2-Llama-prompteol-")


def test_a_passage_that_cannot_be_embedded_fails_by_name_and_not_in_silence(
    encoder: Encoder, store: Store
) -> None:
    corpus = {**SMALL.corpus, "p7": Passage("", "A ~ spoils the hidden state.")}
    spoilt = dataclasses.replace(SMALL, corpus=corpus)
    with (
        tiny.Spoil(encoder, "~", math.nan),
        pytest.raises(EncodingError, match=r"office#p7: chunk 0: its vector holds NaN"),
    ):
        evaluate(spoilt, encoder, [], store)
    # Once it can be embedded, only the passage that was missing is encoded.
    assert evaluate(spoilt, encoder, [], store).ingested.encoded == 1


def test_a_question_that_cannot_be_embedded_fails(encoder: Encoder, store: Store) -> None:
    asked = dataclasses.replace(SMALL, queries={**SMALL.queries, "q3": "a ~ in a question"})
    with tiny.Spoil(encoder, "~", math.inf), pytest.raises(EncodingError, match=r"item 3: its vector holds"):
        evaluate(asked, encoder, [], store)


def test_two_filters_alike_are_refused_before_anything_is_encoded(
    encoder: Encoder, store: Store, edge: EmbFilter
) -> None:
    with tiny.ForwardCounter(encoder) as counter, pytest.raises(ConfigError, match="no two alike"):
        evaluate(SMALL, encoder, [edge, EmbFilter.from_encoder(encoder, "edge", 2)], store)
    assert (counter.texts, store.names()) == (0, [])


def test_best_is_the_highest_of_those_that_beat_raw_and_else_raw(encoder: Encoder, edge: EmbFilter) -> None:
    def result(name: str, mean: float, verdict: str | None) -> FilterResult:
        metrics = RankMetrics({"ndcg_at_10": {"q": mean}})
        versus = Comparison(30, 0.1, 0.0, 0.2, 0.01, 30, 0, 0, verdict) if verdict else None
        return FilterResult(edge, name, "", {}, metrics, versus)

    done = Evaluation(SMALL, encoder, None)
    done.results.append(result("raw", 0.5, None))
    done.results.append(result("lucky", 0.9, "no evidence"))
    assert done.best().collection == "raw"
    done.results.extend(
        [
            result("good", 0.6, "better"),
            result("best", 0.7, "better"),
            result("bad", 0.1, "worse"),
        ]
    )
    assert done.best().collection == "best"


def test_a_base_used_again_holds_only_the_passages_the_set_has_now(encoder: Encoder, store: Store) -> None:
    evaluate(SMALL, encoder, [], store, base="x")
    fewer = {key: SMALL.corpus[key] for key in list(SMALL.corpus)[:7]}
    done = evaluate(dataclasses.replace(SMALL, corpus=fewer), encoder, [], store, base="x")
    assert store.info("x-raw").points == 7
    assert set(done.results[0].run["q0"]) == set(fewer)
