"""Passes: memory that runs out, halves that overflow, kept prefixes, short attention, streams, devices."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import tracemalloc

import numpy as np
import pytest
import torch
import transformers

from rag_embfilter import Encoder
from rag_embfilter.attention import NAME, blocked_attention, choose_attention
from rag_embfilter.backbone import load_backbone
from rag_embfilter.devices import all_gpus, out_of_memory, pick_dtype
from rag_embfilter.errors import ConfigError, EncodingError
from rag_embfilter.passes import Passes
from rag_embfilter.processes import ProcessPasses, split
from tests import tiny

# A long tail: most texts are short, a few are long, some are there often.
LENGTHS = [1, 1, 2, 3, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233]
TEXTS = ["x" * n for n in LENGTHS] + ["Paris", "안녕", "two words"]


class Memory:
    """Makes a batch of more than so many positions run out of memory."""

    def __init__(self, monkeypatch, positions):
        self.positions, self.sizes = positions, []
        real = Passes.forward

        def forward(passes, rows, poolings, prefix):
            size = len(rows) * max(len(row.ids) for row in rows)
            self.sizes.append(size)
            if size > self.positions:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(passes, rows, poolings, prefix)

        monkeypatch.setattr(Passes, "forward", forward)


def test_out_of_memory_halves_the_budget_for_good_and_changes_no_vector(llama, monkeypatch, caplog):
    encoder = Encoder(str(llama), device="cpu", batch_tokens=4000)
    texts = [f"{n:08d}" for n in range(100)] + TEXTS
    expected = encoder.encode_documents(texts)
    memory = Memory(monkeypatch, 600)
    np.testing.assert_allclose(encoder.encode_documents(texts), expected, atol=1e-5)
    assert encoder.batch_tokens <= 600 and "out of memory with a batch of" in caplog.text
    first = len(memory.sizes)
    encoder.encode_documents(texts)
    assert first > 2 and max(memory.sizes[first:]) <= 600


def test_a_text_that_fits_no_memory_is_named_and_the_others_are_kept(llama, monkeypatch):
    encoder = Encoder(str(llama), device="cpu", batch_tokens=4000)
    expected = encoder.encode_documents(TEXTS)
    Memory(monkeypatch, 200)
    with pytest.raises(
        EncodingError, match=r"item 13: out of memory on cpu with this text alone \(27\d"
    ) as caught:
        encoder.encode_documents([*TEXTS, TEXTS[13]])
    assert list(caught.value.problems) == [13, 17]
    kept = [i for i in range(17) if i != 13]
    np.testing.assert_allclose(caught.value.embeddings[kept], expected[kept], atol=1e-5)


def test_a_text_without_any_token_is_named(llama, monkeypatch):
    encoder = Encoder(str(llama), template="plain", device="cpu")
    real = encoder._builders[0].text_ids
    without = lambda texts: [[] if t == "?" else ids for t, ids in zip(texts, real(texts), strict=True)]  # noqa: E731
    monkeypatch.setattr(encoder._builders[0], "text_ids", without)
    with pytest.raises(EncodingError, match="item 1: the tokenizer gives no token for it") as caught:
        encoder.encode_documents(["a", "?", "b"])
    assert list(caught.value.problems) == [1] and caught.value.embeddings[2].any()


def test_other_errors_of_the_model_are_not_taken_for_memory(llama, monkeypatch):
    encoder = Encoder(str(llama), device="cpu")
    monkeypatch.setattr(Passes, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("mat1 and mat2")))
    with pytest.raises(RuntimeError, match="mat1"):
        encoder.encode_documents(["a"])
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert out_of_memory(MemoryError()) and not out_of_memory(ValueError("not enough memory"))


def test_rows_that_overflow_a_half_are_done_again_in_float32(tmp_path, caplog):
    """Weights so large that float16 overflows in the network, and float32 does not."""
    folder = tiny.save_model(tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    # Two products of some 300 each overflow in the gate for large activations alone.
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data *= 100
        layer.mlp.gate_proj.weight.data *= 100
    model.save_pretrained(folder)
    full = Encoder(str(folder), device="cpu", dtype="float32").encode_documents(TEXTS)
    half = Encoder(str(folder), device="cpu", dtype="float16")
    ours = half.encode_documents(TEXTS)
    retried = half.stats.retried
    assert 0 < retried
    assert f"{retried} of {len(set(TEXTS))} texts gave vectors that are not finite in float16" in caplog.text
    cosines = (ours * full).sum(axis=1)
    assert cosines.min() > 0.99
    assert next(half.backbone.model.parameters()).dtype == torch.float16  # the model itself stays a half


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_kept_prefix_changes_no_vector(model_folders, family, monkeypatch):
    """Short texts reuse the prefix (stats say so), long ones do not; both equal one text a batch."""
    encoder = Encoder(str(model_folders[family]), template="Say: {text} now", device="cpu", batch_tokens=200)
    ours = encoder.encode_documents(TEXTS)
    assert encoder.stats.saved > 0
    monkeypatch.setattr(Passes, "can_keep", lambda *_: False)
    plain = Encoder(str(model_folders[family]), template="Say: {text} now", device="cpu", batch_tokens=1)
    np.testing.assert_allclose(ours, plain.encode_documents(TEXTS), atol=1e-4)
    assert plain.stats.saved == 0 and plain.stats.tokens == encoder.stats.tokens + encoder.stats.saved


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", [1, 3, 7, 128])
def test_attention_in_blocks_is_pytorchs(key_heads, masked, block, monkeypatch):
    monkeypatch.setattr("rag_embfilter.attention.BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 7, 8, generator=generator)
    keys = 9 if masked else 7
    key, value = (torch.randn(3, key_heads, keys, 8, generator=generator) for _ in range(2))
    mask = torch.ones(3, 1, 7, keys, dtype=torch.bool).tril(keys - 7) if masked else None
    if mask is not None:
        mask[1, :, :, :2] = False  # a shorter row, padded on the left
    ours, _ = blocked_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(6 // key_heads, 1), value.repeat_interleave(6 // key_heads, 1),
        attn_mask=mask, is_causal=not masked, scale=0.3,
    )  # fmt: skip
    torch.testing.assert_close(ours, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_looks_both_ways_stays_so(masked):
    module = torch.nn.Module()
    module.is_causal = False
    query, key, value = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    mask = torch.tensor([True, True, True, True, False]).expand(1, 1, 5, 5) if masked else None
    ours, _ = blocked_attention(module, query, key, value, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(ours, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_the_model_attends_through_it_and_generates_as_before(llama):
    used = {
        dtype: load_backbone(str(llama), device="cpu", dtype=dtype).model.config._attn_implementation
        for dtype in ("float32", "bfloat16")
    }
    assert used == {"float32": "sdpa", "bfloat16": NAME}
    eager = transformers.AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    ours = transformers.AutoModelForCausalLM.from_pretrained(llama)
    choose_attention(ours, torch.device("cpu"), torch.bfloat16)
    ids = torch.tensor([[5, 9, 4, 7]])
    expected = eager.generate(ids, max_new_tokens=12, do_sample=False)
    assert ours.generate(ids, max_new_tokens=12, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize("family", sorted(set(tiny.FAMILIES) - {"GPT2"}))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_dtype_does_not_round_the_residual_stream(model_folders, family, dtype):
    """Every layer is given float32 states and half-precision angles; what comes out is a half, as before."""
    half = load_backbone(str(model_folders[family]), device="cpu", dtype=dtype)
    given, angles = [], []

    def look(module, args, options):
        given.append(args[0].dtype)
        angles.extend(each.dtype for each in options["position_embeddings"])

    hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in half.model.layers]
    try:
        out = half.model(input_ids=torch.tensor([[5, 9, 4, 7]])).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    assert given == [torch.float32] * 2 and set(angles) == {half.dtype} and out.dtype == half.dtype
    assert all(p.dtype == half.dtype for p in half.model.parameters())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_copy_of_a_half_model_in_float32_is_float32_throughout(model_folders, family):
    ids = torch.tensor([[5, 9, 4, 7]])
    half = load_backbone(str(model_folders[family]), device="cpu", dtype="bfloat16")
    careful = copy.deepcopy(half.model)
    for parameter in careful.parameters():
        parameter.data = parameter.data.float()
    plain = transformers.AutoModel.from_pretrained(model_folders[family], dtype=torch.float32)
    for mine, theirs in zip(careful.parameters(), plain.parameters(), strict=True):
        theirs.data = mine.data.clone()
    with torch.inference_mode():
        torch.testing.assert_close(
            careful(input_ids=ids).last_hidden_state,
            plain(input_ids=ids).last_hidden_state,
            atol=1e-4,
            rtol=1e-4,
        )


def test_equal_texts_are_encoded_once_however_far_apart(llama, monkeypatch):
    monkeypatch.setattr("rag_embfilter.windows.FIRST_WINDOW", 2)
    monkeypatch.setattr("rag_embfilter.windows.WINDOW", 2)
    encoder = Encoder(str(llama), device="cpu")
    texts = ["a", "bb", "ccc", "dddd", *["a", "ccc"] * 5000]
    with tiny.ForwardCounter(encoder) as counter:
        vectors = encoder.encode_documents(texts)
    assert counter.texts == 4 and encoder.stats.texts == len(texts)
    assert (vectors[4::2] == vectors[0]).all() and (vectors[5::2] == vectors[2]).all()


def test_a_stream_gives_the_same_rows_in_order_and_reads_only_ahead(llama, monkeypatch):
    monkeypatch.setattr("rag_embfilter.windows.FIRST_WINDOW", 4)
    monkeypatch.setattr("rag_embfilter.windows.WINDOW", 8)
    encoder = Encoder(str(llama), device="cpu")
    expected = encoder.encode_queries(TEXTS * 3)
    taken = []
    parts = encoder.encode_stream((taken.append(t) or t for t in TEXTS * 3), "query")
    assert not taken
    first = next(parts)
    assert len(first) == 4 and len(taken) <= 4 + 8
    np.testing.assert_allclose(np.vstack([first, *parts]), expected, atol=1e-5)
    assert list(encoder.encode_stream([])) == []


def test_a_stream_names_a_bad_text_by_its_place_from_the_start(llama, monkeypatch):
    monkeypatch.setattr("rag_embfilter.windows.FIRST_WINDOW", 4)
    encoder = Encoder(str(llama), device="cpu")
    parts = encoder.encode_stream(["a", "b", "c", "d", "e", " ", "g"])
    assert len(next(parts)) == 4
    with pytest.raises(EncodingError, match="item 5: the text is empty") as caught:
        next(parts)
    assert caught.value.embeddings.shape == (3, 32) and not caught.value.embeddings[1].any()
    with pytest.raises(ConfigError, match="encode_stream of a str"):
        encoder.encode_stream("a")
    with pytest.raises(ConfigError, match="'doc'"):
        encoder.encode_stream(["a"], "doc")


def test_a_stream_holds_a_few_windows_of_anything(llama, monkeypatch):
    """Eight times the texts need no eight times the memory, be they many or long."""
    monkeypatch.setattr("rag_embfilter.windows.FIRST_WINDOW", 64)
    monkeypatch.setattr("rag_embfilter.windows.WINDOW", 64)
    monkeypatch.setattr("rag_embfilter.windows.WINDOW_CHARACTERS", 200_000)
    encoder = Encoder(str(llama), device="cpu", max_length=8)

    def peak(texts):
        gc.collect()
        tracemalloc.start()
        for _ in encoder.encode_stream(texts):
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    def short(count):
        return (f"text {n % 7} {n}" for n in range(count))

    def long(count):
        return (f"{n} " + "long " * 10_000 for n in range(count))

    peak(short(64))
    assert peak(short(10_240)) < 2 * peak(short(1280))
    assert peak(long(160)) < 2 * peak(long(20)) < 20_000_000


def test_split_by_tokens_is_even_and_keeps_like_lengths_together():
    lengths = [100, 1, 1, 50, 50, 25, 25, 25, 25, 98]
    parts = split(lengths, 4)
    assert sorted(itertools.chain(*parts)) == list(range(10))
    assert [sum(lengths[i] for i in part) for part in parts] == [100, 98, 100, 102]
    assert split([7], 4) == [[0]]


def test_cuda_all_means_every_gpu_here(llama, monkeypatch):
    assert all_gpus("cpu") == all_gpus(None) == all_gpus("cuda:1") == []
    with pytest.raises(ConfigError, match="device 'cuda:all': no GPU here"):
        Encoder(str(llama), device="cuda:all") if not torch.cuda.is_available() else pytest.skip("a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert all_gpus("cuda:all") == ["cuda:0", "cuda:1", "cuda:2"]
    encoder = Encoder(str(llama), device="cuda:all")
    assert isinstance(encoder._passes, ProcessPasses) and encoder.parallel == 3
    assert (str(encoder.backbone.device), encoder.backbone.dtype) == ("cpu", torch.bfloat16)
    assert encoder.engine == "a process on each of cuda:0, cuda:1, cuda:2"


@pytest.mark.parametrize(
    ("device", "hidden", "native", "dtype"),
    [
        ("cuda", 0, False, torch.bfloat16),
        ("cpu", 576, True, torch.bfloat16),
        ("cpu", 576, False, torch.float32),
        ("cpu", 32, True, torch.float32),
    ],
)
def test_the_dtype_that_suits_a_device(monkeypatch, device, hidden, native, dtype):
    monkeypatch.setattr("rag_embfilter.devices.native_bfloat16", lambda: native)
    assert pick_dtype(None, torch.device(device), hidden) == dtype
    assert pick_dtype("float32", torch.device(device), hidden) == torch.float32


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.WARNING)
