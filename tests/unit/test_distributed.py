"""What spreads texts over actors, as far as it needs no cluster."""

from __future__ import annotations

import socket
import sys

import pytest

from pipelines import options
from rag_embfilter.cluster import Cluster, cpus_each
from rag_embfilter.distributed import split
from rag_embfilter.errors import ClusterError, ConfigError, MissingExtraError


def test_parts_hold_all_texts_once_equal_ones_together_and_like_lengths_side_by_side():
    texts = [f"{'w' * (13 * i % 50)}{i % 30}" for i in range(120)]
    parts = split(texts, actors=3, batch_tokens=64, max_length=512)
    assert sorted(i for part in parts for i in part) == list(range(120))
    lengths = [[len(texts[i]) for i in part] for part in parts]
    assert [n for part in lengths for n in part] == sorted(map(len, texts), reverse=True)
    homes = {}
    for number, part in enumerate(parts):
        for i in part:
            assert homes.setdefault(texts[i], number) == number


def test_parts_are_of_like_work_and_keep_every_actor_busy():
    parts = split([f"{i:0100}" for i in range(512)], actors=4, batch_tokens=2048, max_length=512)
    assert len(parts) == 16 and {len(part) for part in parts} == {32}
    # Two batches by estimate, however many texts there are.
    parts = split([f"{i:0100}" for i in range(8192)], actors=4, batch_tokens=2048, max_length=512)
    assert max(map(len, parts)) == 164  # 2 * 2048 tokens of 4 characters
    # Few texts still reach every actor, and a book costs no more than a page.
    assert len(split(["a", "b", "c"], actors=3, batch_tokens=2048, max_length=512)) == 3
    book = split(["b" * 10**6, *(f"{i:02048}" for i in range(7))], actors=2, batch_tokens=512, max_length=512)
    assert [len(part) for part in book] == [1] * 8
    assert split([], actors=2, batch_tokens=512, max_length=512) == []


@pytest.mark.parametrize(
    ("machines", "actors", "cpus"),
    [([16], 2, 8), ([16], 16, 1), ([4, 4, 4], 2, 4), ([4, 4, 4], 4, 2), ([0, 8, 3], 3, 3), ([2], 1, 2)],
)
def test_processors_of_an_actor_fit_the_machines(machines, actors, cpus):
    assert cpus_each(machines, actors) == cpus


def test_more_actors_than_processors_are_refused():
    with pytest.raises(ConfigError, match="num_actors 5: the Ray cluster has 4 processors on 2 machines"):
        cpus_each([2, 2], 5)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_num_actors_is_a_whole_number(bad):
    with pytest.raises(ConfigError, match="num_actors"):
        Cluster(bad)


def test_a_device_that_no_actor_can_have_is_refused():
    with pytest.raises(ConfigError, match="device 'mps'"):
        Cluster(1, "mps")


def test_a_cluster_that_is_not_there_is_named_at_once(monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: nobody else gets the port
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterError, match=f"no Ray cluster at '{address}': .*RAY_ADDRESS"):
            Cluster(1)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"rag-embfilter\[ray\]"):
        Cluster(1)


def test_the_command_line_refuses_other_engines_and_actors_without_one():
    def make(engine, num_actors=None):
        options.make_encoder("x", None, ["plain"], None, None, 512, engine=engine, num_actors=num_actors)

    with pytest.raises(ConfigError, match="engine 'spark': expected local or ray"):
        make("spark")
    with pytest.raises(ConfigError, match="num_actors 2: only --engine ray"):
        make("local", 2)
