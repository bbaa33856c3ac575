"""The lens and the penalty, against the model's own head and by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from pipelines.app import main
from pipelines.texts import texts_of
from rag_embfilter import EmbFilter, Encoder
from rag_embfilter.errors import ConfigError
from rag_embfilter.fitting import sample
from rag_embfilter.lens import Reading, frequent_share, read
from rag_embfilter.penalty import frequency_penalty
from rag_embfilter.spectroscopy import token_counts
from rag_embfilter.spectrum import Spectrum
from tests import tiny


@pytest.mark.parametrize("tied", [True, False])
def test_without_a_filter_it_reads_what_the_models_head_says(tmp_path, tied):
    folder = tiny.save_model(tmp_path / "m", tied=tied)
    encoder = Encoder(str(folder), template="{text}!", device="cpu")
    (reading,) = read(encoder, encoder.encode_documents(["Paris"], normalize=False), top=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = encoder.backbone.tokenizer("Paris!", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, -1].clone()
    logits[~encoder.backbone.used_rows] = -torch.inf
    values, tokens = logits.topk(5)
    assert reading.ids == tuple(tokens.tolist())
    np.testing.assert_allclose(reading.logits, values.numpy(), atol=1e-3)


def test_with_a_filter_it_reads_the_projected_embedding(encoder):
    embfilter = EmbFilter.from_encoder(encoder, "edge", 4)
    raw = encoder.encode_documents(["Paris", "Rome"])
    used = encoder.backbone.used_rows.numpy()
    expected = raw @ embfilter.projector() @ encoder.backbone.unembedding.numpy().T
    expected[:, ~used] = -np.inf
    for reading, logits in zip(read(encoder, raw, embfilter, 3), expected, strict=True):
        assert reading.ids == tuple(np.argsort(-logits)[:3])


def test_tokens_are_shown_as_text_and_half_characters_as_the_vocabulary_writes_them(encoder):
    from rag_embfilter.lens import shown

    (letter,) = encoder.backbone.tokenizer("P", add_special_tokens=False)["input_ids"]
    first, *_ = encoder.backbone.tokenizer("한", add_special_tokens=False)["input_ids"]
    assert shown(encoder, letter) == "P"
    assert shown(encoder, first) == "í"


def test_the_share_of_frequent_tokens_by_hand():
    readings = [Reading(("a", "b"), (1, 2), (0.0, 0.0)), Reading(("c", "d"), (3, 1), (0.0, 0.0))]
    assert frequent_share(readings, np.array([1, 9])) == 0.5
    with pytest.raises(ConfigError, match="no reading"):
        frequent_share([], np.array([1]))


def test_top_out_of_range(encoder):
    with pytest.raises(ConfigError, match="top 0: expected 1 to"):
        read(encoder, encoder.encode_documents(["a"]), top=0)


def test_the_penalty_is_the_share_of_energy_by_hand():
    edge = torch.tensor([[1.0, 0.0, 0.0]])
    states = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]])
    assert frequency_penalty(states, edge).item() == pytest.approx((9 / 25 + 0) / 2)
    assert frequency_penalty(torch.zeros(1, 3), edge).item() == 0
    with pytest.raises(ConfigError, match="expected .* and"):
        frequency_penalty(states, edge[:, :2])


def test_a_gradient_step_lowers_the_penalty(encoder):
    directions = torch.from_numpy(Spectrum.of(encoder.backbone.unembedding).directions)
    edge = torch.cat([directions[:8], directions[-8:]])
    states = torch.nn.Parameter(torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(0)))
    before = frequency_penalty(states, edge)
    before.backward()
    with torch.no_grad():
        states -= 0.5 * states.grad
    assert frequency_penalty(states, edge) < before - 1e-4


def test_the_lens_command(llama, tmp_path, capsys):
    arguments = ["lens", "Paris", "로마", "--backbone", str(llama), "--filter-ratios", "2", "4", "--top", "3"]
    assert main([*arguments, "--json", str(tmp_path / "l.json")]) == 0
    out = capsys.readouterr().out
    assert "raw" in out and "edge-r4" in out and "(these texts; frequencies: vocabulary order)" in out
    result = json.loads((tmp_path / "l.json").read_text())
    assert [len(reading["tokens"]) for reading in result["readings"]["edge-r2"]] == [3, 3]


def test_the_lens_over_a_corpus(llama, tmp_path, capsys):
    lines = [json.dumps({"_id": str(i), "title": "Rome", "text": f"the cat of {i}"}) for i in range(40)]
    (tmp_path / "passages.jsonl").write_text("\n".join(lines))
    arguments = ["lens", "--backbone", str(llama), "--passages", str(tmp_path / "passages.jsonl")]
    more = ["--top", "3", "--filter-types", "edge", "calibrated", "--sample", "35", "--template", "plain"]
    files = ["--plot", str(tmp_path / "l.png"), "--json", str(tmp_path / "l.json")]
    assert main([*arguments, *more, *files]) == 0
    assert "35 passages of passages.jsonl; frequencies: passages.jsonl" in capsys.readouterr().out
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    shares = json.loads((tmp_path / "l.json").read_text())["frequent_share"]
    assert list(shares) == ["raw", "edge-r2", "calibrated-r2"]
    encoder = Encoder(str(llama), "plain")
    texts = [f"Rome the cat of {i}" for i in range(40)]
    counts = token_counts(encoder.backbone.tokenizer, texts, len(encoder.backbone.unembedding))
    common = {i for i in np.argsort(-counts, kind="stable")[:100] if counts[i]}
    raw = encoder.encode_documents(sample(texts, 35))
    logits = raw @ encoder.backbone.unembedding.float().numpy().T
    logits[:, ~encoder.backbone.used_rows.numpy()] = -np.inf
    expected = np.mean([token in common for row in np.argsort(-logits)[:, :3] for token in row])
    assert shares["raw"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("", [], "holds no text to look at"),
        ("[1]\n", [], "line 1 is not a passage"),
        ('{"_id": "a"}\n', [], "line 1 is not a passage"),
        ("{broken\n", [], "line 1 is not a passage"),
        (None, [], "is not there; expected a text file"),
        ('{"_id": "a", "text": "one"}', ["--filter-types", "calibrated"], "was given 1 passages"),
    ],
)
def test_a_corpus_that_cannot_be_looked_at(llama, tmp_path, capsys, content, arguments, message):
    file = tmp_path / "p.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["lens", "--backbone", str(llama), "--passages", str(file), *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_nothing_to_look_at(llama, capsys):
    assert main(["lens", "--backbone", str(llama)]) == 1
    assert "there is no text to look at" in capsys.readouterr().err
    assert main(["lens", "Paris", "--backbone", str(llama), "--filter-types", "pca"]) == 1
    assert "pca is fitted on a corpus; give --passages" in capsys.readouterr().err


def test_odd_requests_of_the_lens_end_before_anything_is_encoded(llama, tmp_path, capsys):
    arguments = ["lens", "Paris", "--backbone", str(llama)]
    assert main([*arguments, "--pooling", "last+mean"]) == 1
    assert "one template with one pooling" in capsys.readouterr().err
    rows = int(Encoder(str(llama)).backbone.used_rows.sum())
    assert main([*arguments, "--top", str(rows + 1)]) == 1
    assert f"expected 1 to {rows}" in capsys.readouterr().err
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    assert main([*arguments, "--passages", str(tmp_path / "deep.jsonl")]) == 1
    assert "line 1 is not a passage" in " ".join(capsys.readouterr().err.split())


def test_passages_that_cannot_be_encoded_are_left_out_and_a_corpus_counts_first(llama, tmp_path, capsys):
    lines = ['{"text": "one"}', '{"text": "\\ud800 broken"}', '{"text": "two"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    (tmp_path / "counted.txt").write_text("words to count\n")
    arguments = ["lens", "--backbone", str(llama), "--passages", str(tmp_path / "p.jsonl")]
    assert main([*arguments, "--corpus", str(tmp_path / "counted.txt")]) == 0
    shown = capsys.readouterr()
    assert "1 passages that are not valid Unicode are left out" in shown.err
    assert "2 passages of p.jsonl; frequencies: counted.txt" in shown.out


def test_negative_logits_are_drawn_in_order(tmp_path, recwarn):
    from pipelines.plot import lens_panels

    reading = Reading(("a", "b"), (1, 2), (-80.0, -90.0))
    lens_panels(["t"], {"raw": [reading]}, {"raw": 0.5}, {1}, "x", tmp_path / "n.png")
    assert (tmp_path / "n.png").read_bytes().startswith(b"\x89PNG") and not recwarn.list


def test_texts_of_lines_and_of_an_eval_sets_folder(tmp_path):
    (tmp_path / "lines.txt").write_text("\ufeffone\n\n  two \n", encoding="utf-8")
    assert list(texts_of(tmp_path / "lines.txt")) == ["one", "two"]
    (tmp_path / "corpus.jsonl").write_text('{"text": "b", "title": "a"}\n\n{"text": "c", "title": null}\n')
    assert list(texts_of(tmp_path)) == ["a b", "c"]


def test_the_spectrum_command(llama, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the cat and the hat\n" * 50)
    arguments = ["spectrum", "--backbone", str(llama), "--corpus", str(tmp_path / "text.txt")]
    files = ["--plot", str(tmp_path / "s.png"), "--json", str(tmp_path / "s.json")]
    assert main([*arguments, *files]) == 0
    assert "frequent" in capsys.readouterr().out
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "s.json").read_text())
    assert len(result["response"]["rare"]) == 32 and result["frequencies"] == "text.txt"


def test_refit_queries_from_the_command_line(llama, tmp_path, capsys):
    docs = tmp_path / "docs"
    docs.mkdir()
    for i in range(40):
        (docs / f"{i}.txt").write_text(f"text number {i}")
    (tmp_path / "few.txt").write_text("\n".join(f"what is {i}?" for i in range(4)))
    (tmp_path / "questions.txt").write_text("\n".join(f"what is {i}?" for i in range(9)))
    store = ["--qdrant-path", str(tmp_path / "q")]
    ingest = ["ingest", str(docs), "--collection", "c", "--backbone", str(llama), *store]
    assert main([*ingest, "--filter-types", "calibrated"]) == 0
    assert "stand in" in capsys.readouterr().err
    assert main(["refit-queries", "c-calibrated-r2", str(tmp_path / "questions.txt"), *store]) == 0
    assert "centred on 9 questions" in capsys.readouterr().out
    assert main(["refit-queries", "c-calibrated-r2", str(tmp_path / "few.txt"), *store]) == 1
    assert "4 example questions: 5 is the least" in capsys.readouterr().err
    assert main(["refit-queries", "c-raw", str(tmp_path / "questions.txt"), *store]) == 1
    assert "not calibrated" in capsys.readouterr().err
