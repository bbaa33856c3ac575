"""Exports of the packaged SmolLM2, read by plain sentence-transformers in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.app import main
from rag_embfilter import EmbFilter, Encoder, Store
from rag_embfilter.checkpoints import packaged_gguf
from rag_embfilter.errors import BackboneError
from rag_embfilter.export import export_sentence_transformers
from tests import tiny

FAQ = Path(__file__).parents[2] / "eval_sets/faq"
# Nothing of this package: written as a user of sentence-transformers would write it.
READER = """
import json, sys
import numpy as np
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1])
texts = json.loads(sys.argv[2])
np.savez("made.npz", document=model.encode_document(texts), query=model.encode_query(texts))
found = any(name.split(".")[0] == "rag_embfilter" for name in sys.modules)
print(json.dumps({"dim": model.get_sentence_embedding_dimension(), "ours": found}))
"""


@pytest.fixture(scope="module", autouse=True)
def needed():
    pytest.importorskip("sentence_transformers")
    try:
        packaged_gguf("smollm2")
    except BackboneError as error:
        pytest.skip(str(error))


def read(folder, texts, place):
    """What a process elsewhere makes of texts, and what it said."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", READER, str(folder), json.dumps(texts)],
        cwd=place,
        env=kept,
        capture_output=True,
        text=True,
        check=True,
    )
    return np.load(place / "made.npz"), json.loads(done.stdout.splitlines()[-1])


def test_a_calibrated_collection_is_exported_with_its_fit_and_query_mean(tmp_path, capsys):
    lines = (FAQ / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:30]
    (tmp_path / "faq.jsonl").write_text("\n".join(lines))
    questions = "where is my badge?\nwho fixes printers?\nhow long is lunch?\nis there a gym?\nmay I park?\n"
    (tmp_path / "questions.txt").write_text(questions)
    where = ["--qdrant-path", str(tmp_path / "qdrant")]
    given = ["--collection", "faq", "--filter-types", "calibrated", "--filter-ratios", "8"]
    given += ["--dtype", "float32"]
    asked = ["--example-questions", str(tmp_path / "questions.txt")]
    assert main(["ingest", str(tmp_path / "faq.jsonl"), *given, *asked, *where]) == 0
    out = tmp_path / "out"
    assert main(["export", str(out), "--collection", "faq-calibrated-r8", *where]) == 0
    assert "72 dimensions" in capsys.readouterr().out

    with Store(path=tmp_path / "qdrant") as store:
        page = next(iter(store.pages("faq-calibrated-r8")))
        embfilter = store.filter_of("faq-calibrated-r8")
    texts = [node.text for node in page.nodes][:8]
    made, said = read(out, texts, tmp_path)
    assert said == {"dim": 72, "ours": False}
    np.testing.assert_allclose(made["document"], page.vectors[:8], atol=1e-5)
    raw = Encoder("smollm2", device="cpu", dtype="float32").encode_queries(texts)
    np.testing.assert_allclose(made["query"], embfilter.apply(raw, "query"), atol=1e-5)
    assert np.abs(made["query"] - made["document"]).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "template"),
    [
        ("Llama", "prompteol"),
        ("GPT2", "plain"),
        ("Qwen2", "search"),
        ("Gemma3Text", "search"),
        ("smollm2", "search"),
    ],
)
def test_families_and_templates_keep_their_vectors(family, template, tmp_path):
    """The export's own check passes; a query template of its own makes a router over two transformers."""
    name = family if family == "smollm2" else str(tiny.save_model(tmp_path / "model", family))
    other = "topic" if template == "search" else None
    encoder = Encoder(name, template, max_length=60, device="cpu", dtype="float32", query_template=other)
    report = export_sentence_transformers(encoder, EmbFilter.from_encoder(encoder, "edge", 4), tmp_path / "o")
    assert report.difference < 1e-5 and report.copies == (2 if other else 1)
