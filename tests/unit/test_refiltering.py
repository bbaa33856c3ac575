"""`refilter`: new filters from raw embeddings that are stored, ours or somebody else's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llama_index.core.schema import Document
from qdrant_client import QdrantClient, models

from pipelines.app import main
from rag_embfilter import EmbFilter, Encoder, Store, ingest
from rag_embfilter.errors import StoreError
from rag_embfilter.refiltering import Refiltered, refilter
from tests import tiny

TEXTS = [f"Topic {i} is number {i * 7}. More on it." for i in range(60)]
DOCUMENTS = [Document(id_=f"d{i}", text=text) for i, text in enumerate(TEXTS)]


@pytest.fixture
def filled(tmp_path, llama) -> list[str]:
    """Options of a store that holds `c-raw`."""
    encoder = Encoder(str(llama), "question", device="cpu")
    with Store(path=tmp_path / "q") as store:
        ingest(DOCUMENTS, encoder, [EmbFilter.from_encoder(encoder, "raw")], store, "c")
    return ["--qdrant-path", str(tmp_path / "q")]


def _vectors(folder, name) -> dict[str, np.ndarray]:
    with Store(path=folder) as store:
        return {
            node.metadata["source"]: vector
            for page in store.pages(name)
            for node, vector in zip(page.nodes, page.vectors, strict=True)
        }


def test_new_collections_equal_those_that_ingest_makes_and_nothing_is_encoded(
    filled, tmp_path, llama, capsys, monkeypatch
):
    (tmp_path / "q.txt").write_text("\n".join(f"what is {i}?" for i in range(9)))
    arguments = [
        "refilter",
        "c",
        "--filter-types",
        "edge",
        "calibrated",
        "--filter-ratios",
        "2",
        "4",
        *filled,
    ]
    texts = []
    real = Encoder._encode
    monkeypatch.setattr(Encoder, "_encode", lambda self, t, *rest: texts.extend(t) or real(self, t, *rest))
    files = ["--example-questions", str(tmp_path / "q.txt"), "--json", str(tmp_path / "r.json")]
    assert main([*arguments, *files]) == 0
    assert set(texts) == {f"what is {i}?" for i in range(9)}
    out = capsys.readouterr().out
    assert "240 points written" in out and "From c-raw (60 points)" in out
    assert [row["points"] for row in json.loads((tmp_path / "r.json").read_text())] == [60] * 4
    encoder = Encoder(str(llama), "question", device="cpu")
    raw = encoder.encode_documents(TEXTS)
    expected = EmbFilter.from_encoder(encoder, "edge", 4).apply(raw)
    found = _vectors(tmp_path / "q", "c-edge-r4")
    np.testing.assert_allclose(np.stack([found[f"d{i}"] for i in range(60)]), expected, atol=1e-6)
    monkeypatch.undo()
    assert main(["search", "Topic 3", "--collection", "c-calibrated-r4", *filled]) == 0
    with Store(path=tmp_path / "q") as store:
        before = store.info("c-calibrated-r4").settings["query_mean"]
    (tmp_path / "q.txt").write_text("\n".join(f"who wrote {i}?" for i in range(9)))
    assert main([*arguments, *files]) == 0
    assert "0 points written" in capsys.readouterr().out
    with Store(path=tmp_path / "q") as store:  # other questions refit the mean of what is there
        assert not np.allclose(store.info("c-calibrated-r4").settings["query_mean"], before, atol=1e-4)


def test_a_run_that_stopped_goes_on(filled, tmp_path, llama):
    encoder = Encoder(str(llama), "question", device="cpu")
    embfilter = EmbFilter.from_encoder(encoder, "edge", 2)
    with Store(path=tmp_path / "q") as store:
        store.create("c-edge-r2", encoder, embfilter, "c")
        (page,) = store.pages("c-raw")
        store.write("c-edge-r2", page.at(range(25), embfilter.apply(page.vectors[:25])))
        done = refilter(store, "c-raw", {"c-edge-r2": embfilter})
        assert done == {"c-edge-r2": Refiltered(written=35, held=25)}
        assert store.count("c-edge-r2") == 60


def test_points_that_vanish_meanwhile_are_noticed(filled, tmp_path, llama, monkeypatch):
    encoder = Encoder(str(llama), "question", device="cpu")
    embfilter = EmbFilter.from_encoder(encoder, "edge", 2)
    with Store(path=tmp_path / "q") as store:
        store.create("c-edge-r2", encoder, embfilter, "c")
        real = store.write
        monkeypatch.setattr(
            store, "write", lambda name, page: real(name, page.at(range(9), page.vectors[:9]))
        )
        with pytest.raises(StoreError, match="holds 9 points, and should hold 60"):
            refilter(store, "c-raw", {"c-edge-r2": embfilter})


@pytest.mark.parametrize("vector", ["", "theirs"])
def test_raw_embeddings_that_somebody_else_stored(tmp_path, llama, capsys, vector):
    encoder = Encoder(str(llama), "plain", device="cpu")
    raw = encoder.encode_documents(TEXTS)
    client = QdrantClient(path=str(tmp_path / "q"))
    params = models.VectorParams(size=32, distance=models.Distance.DOT)
    client.create_collection("theirs", vectors_config={vector: params} if vector else params)
    points = [
        models.PointStruct(id=i, vector={vector: row} if vector else row, payload={"text": TEXTS[i], "n": i})
        for i, row in enumerate((3 * raw).tolist())
    ]
    client.upsert("theirs", points)
    client.close()
    store = ["--qdrant-path", str(tmp_path / "q")]
    wrong = ["refilter", "mine", "--source-collection", "theirs", "--backbone", str(llama), *store]
    assert main([*wrong, "--template", "plain", "echo"]) == 1
    assert "holds vectors of 32 dimensions, and this encoder makes 64" in " ".join(
        capsys.readouterr().err.split()
    )
    right = [*wrong, "--template", "plain", "--filter-types", "edge", "--filter-ratios", "4"]
    assert main(right) == 0
    with Store(path=tmp_path / "q") as opened:
        (page,) = opened.pages("mine-edge-r4")
        assert page.ids == list(range(60)) and page.payloads[7] == {"text": TEXTS[7], "n": 7}
        expected = EmbFilter.from_encoder(encoder, "edge", 4).apply(raw)
        np.testing.assert_allclose(page.vectors, expected, atol=1e-5)
    assert main(["search", "Topic 7 is number 49. More on it.", "--collection", "mine-edge-r4", *store]) == 0
    assert TEXTS[7] in capsys.readouterr().out


def test_what_cannot_be_refiltered_is_named(tmp_path, llama, capsys):
    store = ["--qdrant-path", str(tmp_path / "q")]
    assert main(["refilter", "c", *store]) == 1
    assert "collection 'c-raw' is not in" in capsys.readouterr().err
    assert main(["refilter", "c", "--source-collection", "zz", "--backbone", str(llama), *store]) == 1
    assert "collection 'zz' is not in" in capsys.readouterr().err
    with Store(path=tmp_path / "q") as opened:
        size = models.VectorParams(size=4, distance=models.Distance.COSINE)
        opened.client.create_collection("two", vectors_config={"a": size, "b": size})
    assert main(["refilter", "c", "--source-collection", "two", "--backbone", str(llama), *store]) == 1
    assert "has the vectors ['a', 'b']" in capsys.readouterr().err


def test_counting_forward_passes_of_refilter(filled, llama, tmp_path):
    encoder = Encoder(str(llama), "question", device="cpu")
    embfilter = EmbFilter.from_encoder(encoder, "tail", 2)
    with Store(path=tmp_path / "q") as store, tiny.ForwardCounter(encoder) as counter:
        store.create("c-tail-r2", encoder, embfilter, "c")
        refilter(store, "c-raw", {"c-tail-r2": embfilter})
    assert counter.texts == 0
