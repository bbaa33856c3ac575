"""What an attacker or an accident brings: damaged caches, altered files, odd names, control characters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from llama_index.core.schema import Document, TextNode
from llama_index.core.storage.kvstore import SimpleKVStore
from qdrant_client import models
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from pipelines import show
from pipelines.html_text import title_and_text
from rag_embfilter import (
    EmbFilter,
    EmbFilterEmbedding,
    Encoder,
    EvalSet,
    Store,
    compare,
    ingest,
    rank_metrics,
)
from rag_embfilter.backbone import load_backbone
from rag_embfilter.errors import (
    BackboneError,
    ConfigError,
    EncodingError,
    EvalSetError,
    FingerprintMismatch,
    StoreError,
)
from rag_embfilter.evaluation import eval_base
from rag_embfilter.files import cache_folder, file_sha256, write_json
from rag_embfilter.templates import Template
from tests import tiny


def test_a_file_replaced_under_its_old_size_and_time_is_noticed(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"one")
    before, stat = file_sha256(file), file.stat()
    (tmp_path / "g").write_bytes(b"two")
    os.utime(tmp_path / "g", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "g").rename(file)
    assert file_sha256(file) != before


def test_weights_in_a_subfolder_count(tmp_path, llama):
    digests = set()
    for seed in (0, 1):
        shutil.copytree(llama, tmp_path / f"m{seed}")
        (tmp_path / f"m{seed}" / "parts").mkdir()
        (tmp_path / f"m{seed}" / "parts" / "w.safetensors").write_bytes(bytes([seed]))
        digests.add(load_backbone(str(tmp_path / f"m{seed}"), device="cpu").revision)
    assert len(digests) == 2


def test_a_quantised_checkpoint_is_refused(tmp_path, llama, monkeypatch):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.config.quantization_config = {"quant_method": "fp8"}
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: (model, {"missing_keys": []})
    )
    monkeypatch.setattr("rag_embfilter.backbone._LOADED", {})
    with pytest.raises(BackboneError, match="is quantised"):
        load_backbone(str(llama), device="cpu")


def test_a_token_without_a_row_names_the_text_that_holds_it(tmp_path):
    folder = tiny.save_model(tmp_path / "m")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<x{i}>" for i in range(30)])
    tokenizer.save_pretrained(folder)
    encoder = Encoder(str(folder), device="cpu")
    with pytest.raises(
        EncodingError, match="item 1: the text holds '<x2[0-9]>', a token that the model has no"
    ):
        encoder.encode_documents(["fine", "here <x29>", "fine <x1>"])


@pytest.mark.parametrize("change", ["matrix", "nan", "shape", "dtype"])
def test_an_altered_filter_file_is_refused(encoder, tmp_path, change):
    EmbFilter.from_encoder(encoder, "edge", 4).save(tmp_path / "f")
    arrays = load_file(tmp_path / "f")
    with safe_open(tmp_path / "f", framework="numpy") as stream:
        metadata = stream.metadata()
    matrix = arrays["matrix"]
    arrays["matrix"] = {
        "matrix": matrix[::-1].copy(),
        "nan": np.where(matrix > 0, np.nan, matrix),
        "shape": matrix[:0],
        "dtype": matrix.astype(np.int64),
    }[change]
    save_file(arrays, tmp_path / "g", metadata)
    with pytest.raises(ConfigError, match="altered|not a filter file"):
        EmbFilter.load(tmp_path / "g")


@pytest.mark.parametrize("damage", [b"", b"x" * 50, "other"])
def test_a_damaged_spectrum_in_the_cache_is_made_again(encoder, damage):
    right = EmbFilter.from_encoder(encoder).matrix
    path = cache_folder("spectra") / f"{encoder.unembedding_digest()}.safetensors"
    if damage == "other":
        save_file(
            {"directions": np.eye(32, dtype=np.float32), "singular_values": np.ones(32, np.float32)}, path
        )
    else:
        path.write_bytes(damage)
    np.testing.assert_array_equal(EmbFilter.from_encoder(encoder).matrix, right)


def test_a_cache_that_cannot_be_written_costs_time_alone(llama, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EMBFILTER_CACHE", str(tmp_path / "file"))  # a file where a folder should be
    made = EmbFilter.from_encoder(Encoder(str(llama), device="cpu"))
    assert made.dim == 16


def test_results_are_written_through_links_and_into_devices(tmp_path):
    target = tmp_path / "real.json"
    target.write_text("old")
    (tmp_path / "link.json").symlink_to(target)
    write_json(tmp_path / "link.json", {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1} and (tmp_path / "link.json").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reading = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
    write_json(tmp_path / "pipe", {"a": 2})
    assert json.loads(reading.communicate()[0]) == {"a": 2} and (tmp_path / "pipe").is_fifo()


def test_a_store_is_locked_before_it_is_read(tmp_path):
    """Two openers that interleave would lose a collection: the second must not even load."""
    code = "import sys; from rag_embfilter import Store; Store(path=sys.argv[1])"
    with Store(path=tmp_path / "q"):
        (tmp_path / "q" / "meta.json").write_text("{ half a file")
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "q")], capture_output=True, text=True
        )
    assert "in use by another process" in done.stderr
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(path=tmp_path / "q")


def test_a_damaged_database_is_one_clear_error(tmp_path, encoder):
    with Store(path=tmp_path / "q") as store:
        ingest([Document(id_="d", text="t")], encoder, [EmbFilter.from_encoder(encoder)], store, "c")
    database = next((tmp_path / "q").rglob("storage.sqlite"))
    database.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(path=tmp_path / "q")


def test_odd_fields_and_values_in_a_condition(store):
    vectors = models.VectorParams(size=2, distance=models.Distance.COSINE)
    store.client.create_collection("c", vectors_config={"text-dense": vectors})
    metadata = {"source": "s", "price": 1.5, "my field": 1, "a.b": "x", "n": 3}
    store.upsert("c", [TextNode(text="t", id_=f"{1:032x}", metadata=metadata)], np.ones((1, 2), np.float32))

    def found(key, value):
        (hits,) = store.search("c", np.ones((1, 2), np.float32), where={key: value})
        return len(hits)

    for key, value in (("price", "1.5"), ("my field", "1"), ("a.b", "x"), ("n", "3")):
        assert found(key, value) == 1, key
    for key, value in (("n", "--5"), ("n", "9" * 5000), ("n", "nan"), ("n", "²"), ("price", "1.6")):
        assert found(key, value) == 0, value


def test_surrogates_and_nesting_in_an_eval_set_are_faults_not_a_crash(tmp_path):
    (tmp_path / "qrels").mkdir()
    deep = '{"_id": "deep", "text": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": "p\\ud800", "text": "a"}\n{"_id": "p", "text": "b"}\n' + deep
    )
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "c"}\n')
    (tmp_path / "qrels" / "test.tsv").write_text(f"q\tp\t1\nq\tp\t{'9' * 5000}\nq\t{'p' * 200_000}\t1\n")
    with pytest.raises(EvalSetError) as caught:
        EvalSet.load(tmp_path)
    for kind in ("not valid Unicode", "not JSON", "grade (0 to 20)", "unknown passage ids"):
        assert kind in str(caught.value)
    with pytest.raises(ConfigError, match="not valid Unicode"):
        rank_metrics({"q": {"p": 1}}, {"q": ["p\ud800"]})


def test_long_korean_names_make_a_base_that_qdrant_takes(encoder):
    named = EvalSet("한국어" * 40, {}, {}, {})
    assert len(f"{eval_base(named, encoder)}-calibrated-r16".encode()) < 200


@pytest.mark.parametrize("name", ["a\udcff", "a\x1b[31m"])
def test_collection_names_that_are_no_text(store, encoder, name):
    with pytest.raises(ConfigError, match="collection name"):
        store.create(name, encoder, EmbFilter.from_encoder(encoder), "b")


def test_what_is_shown_cannot_drive_a_terminal(capsys):
    show.out.print(show.escape("a\x1b[2Jb \x07 [bold]c[/] 10:100:20 한국어 😀"))
    assert capsys.readouterr().out == "a [2Jb   [bold]c[/] 10:100:20 한국어 😀\n"


def test_html_takes_time_in_proportion():
    page = "<html><head><title>T &amp; U</title><script>x()</script></head><body>"
    page += "<div>" * 20_000 + "deep<br>" * 20_000 + "</div>" * 20_000
    title, text = title_and_text(page + "<p>one <b>two</b></p><nav>menu</nav>three")
    lines = text.splitlines()
    assert title == "T & U" and len(lines) == 20_002
    assert lines[-2:] == ["one two", "three"]


def test_settings_of_an_embedder_cannot_drift_from_its_vectors(llama):
    embedding = EmbFilterEmbedding(model_name=str(llama), device="cpu", query_template="question")
    with pytest.raises(ConfigError, match="filter_ratio shapes the vectors"):
        embedding.filter_ratio = 4
    other = embedding.model_copy(update={"filter_ratio": 4})
    assert len(other.get_text_embedding("a")) == 8 and other.fingerprint != embedding.fingerprint
    embedding.embed_batch_size = 3
    embedding.embeddings_cache = SimpleKVStore()
    assert embedding.get_text_embedding("a") != embedding.get_query_embedding("a")


def test_a_template_object_keeps_both_wordings(llama):
    template = Template("doc {text} end", "ask {text} end", "last", "middle")
    encoder = Encoder(str(llama), template, device="cpu")
    settings = encoder.settings
    again = Encoder(**settings, device="cpu")
    assert again.fingerprint == encoder.fingerprint


def test_a_damaged_converted_copy_is_made_again(tmp_path, monkeypatch):
    from rag_embfilter import checkpoints

    folder = tmp_path / "copy"
    shutil.copytree(tiny.save_model(tmp_path / "m"), folder)
    (folder / checkpoints.CHECKSUM).write_text(file_sha256(folder / "model.safetensors"))
    assert checkpoints._intact(folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-100:] = bytes(100)
    (folder / "model.safetensors").write_bytes(weights)
    assert not checkpoints._intact(folder)


def test_the_size_of_vectors_is_checked_on_every_way_in(store, encoder):
    half, quarter = (EmbFilter.from_encoder(encoder, "edge", ratio) for ratio in (2, 4))
    ingest([Document(id_="d", text="t")], encoder, [half], store, "c")
    vectors = quarter.apply(encoder.encode_queries(["t"]))
    for call in (
        lambda: store.search("c-edge-r2", vectors),
        lambda: store.upsert("c-edge-r2", [TextNode(text="t", id_=f"{5:032x}")], vectors),
    ):
        with pytest.raises(FingerprintMismatch, match="holds vectors of 16 dimensions, these are"):
            call()
    tail = EmbFilter.from_encoder(encoder, "tail", 2)
    wrong = tail.apply(encoder.encode_queries(["t"]))
    with pytest.raises(FingerprintMismatch, match="filter_type"):
        store.search("c-edge-r2", wrong, fingerprint=encoder.fingerprint | tail.fingerprint)
    for call in (
        lambda: store.search("zz", vectors),
        lambda: list(store.pages("zz")),
        lambda: store.remove("zz", [f"{5:032x}"]),
        lambda: store.present("zz", [f"{5:032x}"]),
    ):
        with pytest.raises(StoreError, match="zz"):
            call()


def test_a_score_that_is_no_number_is_named():
    scores = {f"q{i}": 0.5 for i in range(30)}
    with pytest.raises(ConfigError, match="'q7'"):
        compare({**scores, "q7": float("nan")}, scores)


def test_used_rows_and_bands_of_other_kinds(encoder):
    matrix = encoder.backbone.unembedding
    used = encoder.backbone.used_rows
    expected = EmbFilter.from_unembedding(matrix, used_rows=used).matrix
    for rows in (used.numpy(), used.tolist()):
        np.testing.assert_array_equal(EmbFilter.from_unembedding(matrix, used_rows=rows).matrix, expected)
    with pytest.raises(ConfigError, match="one per row"):
        EmbFilter.from_unembedding(matrix, used_rows=used[:5])
    for band in (1.5, "1", True):
        with pytest.raises(ConfigError, match="expected a whole number"):
            EmbFilter.from_unembedding(matrix, band_start=band)


def test_settings_that_would_be_ignored_are_refused(llama, encoder, tmp_path):
    EmbFilter.from_encoder(encoder, "tail", 4).save(tmp_path / "f")
    with pytest.raises(ConfigError, match="query_mean goes with a filter_file"):
        EmbFilterEmbedding(model_name=str(llama), query_mean=[0.0] * 32)
    with pytest.raises(ConfigError, match="filter_type 'edge': filter file .* holds 'tail'"):
        EmbFilterEmbedding(model_name=str(llama), filter_file=str(tmp_path / "f"), filter_type="edge")


def test_only_the_pages_own_title_counts_and_an_endless_menu_hides_nothing():
    page = (
        "<title>Pay</title><body><svg><title>Icon</title></svg><nav>menu</nav><p>text</p><nav>open<p>more</p>"
    )
    assert title_and_text(page) == ("Pay", "text\nopen\nmore")
