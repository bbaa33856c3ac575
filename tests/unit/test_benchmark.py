"""Raw embeddings and filters through MTEB's own evaluators, against SciPy, scikit-learn and our metrics."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pipelines.app import main
from rag_embfilter import EmbFilter, Encoder, EvalSet, rank_metrics
from rag_embfilter.benchmark import EmbFilterModel, RawEmbeddings, run_tasks
from rag_embfilter.errors import ConfigError
from tests import tiny
from tests.unit.test_benchmark_folders import write

mteb = pytest.importorskip("mteb", reason="the extra mteb is not installed")

WORDS = "red blue green apple pear plum train plane ship".split()
TEXTS = [f"{a} {b}" for a in WORDS for b in WORDS if a < b]  # 36


@pytest.fixture(scope="module")
def filters(encoder) -> list[EmbFilter]:
    return [EmbFilter.from_encoder(encoder, *spec) for spec in (("raw",), ("edge", 2), ("tail", 4))]


@pytest.fixture
def scores(encoder, filters):
    """Runs folders and gives their scores."""
    return lambda *folders, **how: list(run_tasks(folders, encoder, filters, **how))


def metadata(category: str) -> SimpleNamespace:
    return SimpleNamespace(type=category)


def batches(texts: list[str]) -> list[dict[str, list[str]]]:
    return [{"text": texts[i : i + 4]} for i in range(0, len(texts), 4)]


def cosines(encoder: Encoder, embfilter: EmbFilter, left: list[str], right: list[str]) -> np.ndarray:
    a, b = (embfilter.apply(encoder.encode_documents(texts)) for texts in (left, right))
    return (a * b).sum(axis=1)


# The model


def test_it_is_one_of_mtebs_encoders_by_protocol(encoder, filters):
    from mteb.models import CrossEncoderProtocol, EncoderProtocol, SearchProtocol

    model = EmbFilterModel(encoder, filters[1])
    assert isinstance(model, EncoderProtocol)
    assert not isinstance(model, CrossEncoderProtocol) and not isinstance(model, SearchProtocol)
    meta = model.mteb_model_meta
    assert meta.name == f"rag-embfilter/{encoder.backbone.name.rsplit('/', 1)[-1]}-edge-r2"
    assert meta.revision == (encoder.fingerprint | filters[1].fingerprint).digest and meta.embed_dim == 16


@pytest.mark.parametrize("place", [0, 1, 2])
def test_classification_keeps_lengths_and_all_else_is_of_unit_length(encoder, filters, place):
    model, embfilter = EmbFilterModel(encoder, filters[place]), filters[place]
    states = encoder.encode_documents(TEXTS, normalize=False)
    kept = model.encode(batches(TEXTS), task_metadata=metadata("Classification"))
    np.testing.assert_allclose(kept, embfilter.apply(states, normalize=False), rtol=1e-5, atol=1e-5)
    assert np.linalg.norm(kept, axis=1).min() > 1.5
    unit = model.encode(batches(TEXTS), task_metadata=metadata("STS"))
    np.testing.assert_allclose(unit, embfilter.apply(encoder.encode_documents(TEXTS)), atol=1e-6)


def test_queries_take_the_query_template_and_each_role_is_encoded_once(llama):
    from mteb.types import PromptType

    apart = Encoder(str(llama), query_template="question", device="cpu")
    model = EmbFilterModel(apart, EmbFilter.from_encoder(apart, "edge", 2))
    with tiny.ForwardCounter(apart) as counted:
        got = {
            role: model.encode(batches(["a", "b"]), task_metadata=metadata("Retrieval"), prompt_type=role)
            for role in (PromptType.query, PromptType.document, None, PromptType.query)
        }
    assert counted.texts == 4
    np.testing.assert_array_equal(got[None], got[PromptType.document])
    for role, encode in (
        (PromptType.query, apart.encode_queries),
        (PromptType.document, apart.encode_documents),
    ):
        np.testing.assert_allclose(got[role], model.embfilter.apply(encode(["a", "b"])), atol=1e-6)


def test_one_template_for_both_roles_needs_one_encode(encoder):
    raw = RawEmbeddings(encoder)
    with tiny.ForwardCounter(encoder) as counted:
        np.testing.assert_array_equal(
            raw.unit(["a", "b", "a"], "query"), raw.unit(["a", "b", "a"], "document")
        )
    assert (counted.texts, raw.encoded) == (2, 2)


def test_blank_texts_which_public_sets_hold_are_zero(encoder, filters):
    got = EmbFilterModel(encoder, filters[1]).encode(
        batches(["", "a", " \n"]), task_metadata=metadata("Retrieval")
    )
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), [0, 1, 0], atol=1e-6)
    assert RawEmbeddings(encoder).unit([], "query").shape == (0, 32)


def test_filters_that_centre_or_fit_another_encoder_are_refused(encoder, filters):
    x = encoder.encode_documents(TEXTS)
    calibrated = EmbFilter.from_encoder(encoder, "calibrated", 4, corpus=x, queries=x[:9])
    with pytest.raises(ConfigError, match="calibrated-r4 centres on a corpus"):
        EmbFilterModel(encoder, calibrated)
    with pytest.raises(ConfigError, match="takes 48 dimensions, the encoder gives 32"):
        EmbFilterModel(encoder, EmbFilter.from_unembedding(np.random.default_rng(0).normal(size=(99, 48))))


# Each category


def test_sts_is_scipys_spearman(encoder, filters, scores, tmp_path):
    from scipy.stats import spearmanr

    left, right, gold = TEXTS[:12], TEXTS[12:24], [float(i * i % 7) for i in range(12)]
    rows = [f"{a}|{b}|{y}" for a, b, y in zip(left, right, gold, strict=True)]
    (task,) = scores(write(tmp_path / "s", test=";".join(["sentence1|sentence2|score", *rows])))
    assert (task.name, task.category, task.metric) == ("s", "STS", "cosine_spearman")
    for embfilter in filters:
        expected = spearmanr(cosines(encoder, embfilter, left, right), gold).statistic
        assert task.scores[embfilter.name] == pytest.approx(expected, abs=1e-6)


def test_pairs_are_scikit_learns_average_precision(encoder, filters, scores, tmp_path):
    from sklearn.metrics import average_precision_score

    left, right, gold = TEXTS[:12], TEXTS[12:24], [int(i % 3 == 0) for i in range(12)]
    rows = [f"{a}|{b}|{y}" for a, b, y in zip(left, right, gold, strict=True)]
    (task,) = scores(write(tmp_path / "p", test=";".join(["sentence1|sentence2|label", *rows])))
    for embfilter in filters:
        expected = average_precision_score(gold, cosines(encoder, embfilter, left, right))
        found = task.details[embfilter.name]["test"][0]
        assert found["cosine_ap"] == pytest.approx(expected, abs=1e-6)
        assert task.scores[embfilter.name] == found["max_ap"] >= found["cosine_ap"]


def test_labelled_texts_are_scikit_learns_and_each_text_is_encoded_once(encoder, filters, tmp_path):
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import v_measure_score

    label = [text.split()[0] in ("apple", "blue", "green") for text in TEXTS]
    train, test = TEXTS[::3][:14], [text for i, text in enumerate(TEXTS) if i % 3]
    y = dict(zip(TEXTS, label, strict=True))
    # Eight of a label or fewer, so that each of MTEB's ten draws takes them all.
    assert max(sum(y[text] for text in train), sum(not y[text] for text in train)) <= 8
    tables = {
        name: ";".join(["text|label", *(f"{t}|{'yes' if y[t] else 'no'}" for t in texts)])
        for name, texts in (("train", train), ("test", [*test, train[0]]))
    }
    test.append(train[0])
    with tiny.ForwardCounter(encoder) as counted:
        classification, clustering = run_tasks([write(tmp_path / "c", **tables)], encoder, filters)
    assert counted.texts == len({*train, *test}) == classification.encoded
    assert clustering.encoded == 0
    gold = [y[text] for text in test]
    for embfilter in filters:
        x, z = (
            embfilter.apply(encoder.encode_documents(texts, normalize=False), normalize=False)
            for texts in (train, test)
        )
        fitted = LogisticRegression(max_iter=100, random_state=42).fit(x, [y[text] for text in train])
        assert classification.scores[embfilter.name] == pytest.approx(fitted.score(z, gold))
        unit = embfilter.apply(encoder.encode_documents(test))
        found = MiniBatchKMeans(2, batch_size=500, n_init="auto", random_state=42).fit(unit).labels_
        assert clustering.scores[embfilter.name] == pytest.approx(v_measure_score(gold, found), abs=1e-6)


@pytest.fixture
def beir(tmp_path):
    """36 passages, some with titles, and nine questions with three relevant ones each."""
    folder = tmp_path / "nine"
    folder.mkdir()
    corpus = [{"_id": f"p{i}", "title": "T" * (i % 2), "text": text} for i, text in enumerate(TEXTS)]
    queries = [{"_id": f"q{i}", "text": f"about {word}?"} for i, word in enumerate(WORDS)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    rows = [f"q{i}|p{(i * 5 + j * 7) % 36}|1" for i in range(9) for j in range(3)]
    write(folder / "qrels", test=";".join(["query-id|corpus-id|score", *rows]))
    return folder


def expected_run(encoder, embfilter, eval_set, candidates=None):
    passages = eval_set.passages()
    documents = embfilter.apply(encoder.encode_documents(list(passages.values())))
    queries = embfilter.apply(encoder.encode_queries(list(eval_set.queries.values())), role="query")
    ranked = {}
    for query, row in zip(eval_set.queries, queries @ documents.T, strict=True):
        order = [list(passages)[i] for i in np.argsort(-row)]
        ranked[query] = [p for p in order if candidates is None or p in candidates[query]]
    return rank_metrics(eval_set.qrels, ranked)


def test_retrieval_is_our_own_rank_metrics(encoder, filters, scores, beir):
    (task,) = scores(beir)
    eval_set = EvalSet.load(beir)
    assert (task.category, task.revision, task.encoded) == ("Retrieval", eval_set.digest, 45)
    for embfilter in filters:
        ours, found = expected_run(encoder, embfilter, eval_set), task.details[embfilter.name]["test"][0]
        assert task.scores[embfilter.name] == pytest.approx(ours.mean("ndcg_at_10"), abs=1e-4)
        for metric in ("recall_at_10", "mrr_at_10", "map_at_100"):
            assert found[metric] == pytest.approx(ours.mean(metric), abs=1e-4)


def test_reranking_ranks_candidates_alone(encoder, filters, scores, beir):
    candidates = {f"q{i}": [f"p{(i * 5 + j * 7) % 36}" for j in (9, 1, 4, 0, 6)] for i in range(9)}
    rows = [f"{q}|{p}" for q, passages in candidates.items() for p in passages]
    write(beir, candidates=";".join(["query-id|corpus-id", *rows]))
    (task,) = scores(beir)
    assert (task.category, task.metric) == ("Reranking", "map_at_1000")
    for embfilter in filters:
        ours = expected_run(encoder, embfilter, EvalSet.load(beir), candidates)
        assert task.scores[embfilter.name] == pytest.approx(ours.mean("map_at_100"), abs=1e-4)


# Named tasks


def drawing_task(texts: list[str]) -> object:
    """A named task that clusters half of its texts, drawn from a generator of its own."""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks import AbsTaskClustering
    from mteb.abstasks.task_metadata import TaskMetadata

    class Drawing(AbsTaskClustering):
        metadata = TaskMetadata(
            name="Drawing", type="Clustering", main_score="v_measure", description="d", category="t2c",
            dataset={"path": "x", "revision": "r1"}, eval_splits=["test"], eval_langs=["eng-Latn"],
        )  # fmt: skip
        max_fraction_of_documents_to_embed = 0.5
        max_documents_per_cluster = 30

        def load_data(self, num_proc: int | None = None, **_: object) -> None:
            labels = [text.split()[0] for text in texts]
            self.dataset = DatasetDict({"test": Dataset.from_dict({"sentences": texts, "labels": labels})})
            self.data_loaded = True

    return Drawing()


def test_a_task_that_draws_texts_draws_the_same_for_every_filter(encoder, filters, monkeypatch):
    monkeypatch.setattr("mteb.get_task", lambda name: drawing_task(TEXTS))
    (task,) = run_tasks(["Drawing"], encoder, [filters[0], filters[1]])
    assert (task.name, task.source, task.revision, task.encoded) == ("Drawing", "hub", "r1", 18)
    assert task.failure is None and 0 <= task.scores["edge-r2"] <= 1


def test_a_named_task_without_a_hub_says_so_and_the_others_go_on(encoder, filters, scores, beir):
    named, folder = scores("STS12", beir)
    assert folder.failure is None and named.scores == {}
    assert re.search("'STS12' cannot be loaded from the hub .* name a local folder instead", named.failure)
    assert "\n" not in named.failure


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("STS1", "'STS1' is neither a folder nor a task that MTEB knows. Did you mean STS1"),
        ("no/such/folder", "'no/such/folder' is no folder; expected one, or the name of an MTEB task"),
        ("CIFAR10Clustering", "is about image; only text is"),
    ],
)
def test_unknown_sources_are_refused_before_anything_is_encoded(encoder, scores, beir, source, message):
    with tiny.ForwardCounter(encoder) as counted, pytest.raises(ConfigError, match=message):
        scores(beir, source)
    assert counted.texts == 0


# The command line


def test_the_command_prints_the_papers_table_and_writes_what_it_ran(llama, capsys, tmp_path, beir):
    rows = [f"{a}|{b}|{i % 5}" for i, (a, b) in enumerate(zip(TEXTS[:9], TEXTS[9:18], strict=True))]
    sts = write(tmp_path / "pairs", test=";".join(["sentence1|sentence2|score", *rows]))
    words = ["mteb", str(beir), str(sts), "--backbone", str(llama), "--device", "cpu"]
    words += ["--filter-types", "edge", "tail", "--filter-ratios", "2", "--json", str(tmp_path / "r.json")]
    assert main(words) == 0
    out = capsys.readouterr().out
    # 36 passages and 9 questions; of the 18 sentences, those that are passages without a title are there.
    assert (
        re.search(r"filter +dims +STS \(1\) +Retr. \(1\) +Average \(2\)", out) and "54 texts encoded" in out
    )
    page = json.loads((tmp_path / "r.json").read_text())
    assert [each["filter"] for each in page["filters"]] == ["raw", "edge-r2", "tail-r2"]
    assert page["versions"]["mteb"] == mteb.__version__ and page["encoder"]["template"] == "prompteol"
    sts_page = page["tasks"][1]
    assert (sts_page["category"], sts_page["source"]) == ("STS", "folder")
    mean = (page["tasks"][0]["scores"]["tail-r2"] + sts_page["scores"]["tail-r2"]) / 2
    assert page["categories"]["Average"]["tail-r2"] == pytest.approx(mean)
    assert re.search(rf"^tail-r2 +16 .* {100 * mean:.1f}$", out, re.MULTILINE)


def test_the_command_names_what_could_not_be_run(llama, capsys, tmp_path):
    words = ["mteb", "STS12", "--backbone", str(llama), "--device", "cpu", "--json", str(tmp_path / "r.json")]
    assert main(words) == 1
    assert "STS12: the data of MTEB task 'STS12' cannot be loaded" in capsys.readouterr().err
    assert json.loads((tmp_path / "r.json").read_text())["tasks"][0]["failure"].startswith("the data of")


def test_fitted_types_and_a_missing_extra_are_refused_in_one_line(llama, capsys, monkeypatch, tmp_path):
    words = ["mteb", str(tmp_path), "--backbone", str(llama), "--device", "cpu"]
    assert main([*words, "--filter-types", "calibrated"]) == 1
    assert "filter_type 'calibrated' is fitted on a corpus" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mteb", None)
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "MTEB cannot be imported" in error and "pip install 'rag-embfilter[mteb]'" in error
