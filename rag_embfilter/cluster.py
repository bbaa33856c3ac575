"""A Ray cluster: join or start one, and find out how many actors it has room for."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from rag_embfilter.errors import ClusterError, ConfigError, MissingExtraError

# Only what is in flight lies there: a part of a window for each actor.
OBJECT_STORE_BYTES = 256 << 20


def ray_module() -> Any:
    """Ray, imported on first use. Raises `MissingExtraError` when it is absent or broken."""
    # Ray reports its use over the network unless told otherwise before it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtraError(
            f"encoding on several machines needs Ray, which cannot be imported here ({error}). Install the "
            "extra on every machine: pip install 'rag-embfilter[ray]'."
        ) from error
    return ray


class Cluster:
    """Room for actors in a Ray cluster.

    Uses the connection that this process has already, else joins the cluster that `RAY_ADDRESS` names,
    else starts one on this machine; closes only what it opened.

    Args:
        actors: how many; by default one a GPU, or without GPUs one a machine.
        device: `cpu` or `cuda`; by default `cuda` where there are GPUs.

    Attributes:
        actors: how many there will be.
        device: `cpu` or `cuda`, of all of them.
        cpus: processors of each.
        share: what Ray sets aside for each, as actor options.

    Raises:
        MissingExtraError: ray is not installed.
        ConfigError: no room for so many actors, no such device.
        ClusterError: the cluster cannot be reached.
    """

    def __init__(self, actors: int | None = None, device: str | None = None) -> None:
        if actors is not None and (isinstance(actors, bool) or not isinstance(actors, int) or actors < 1):
            raise ConfigError(f"num_actors {actors!r}: expected a whole number of 1 or more.")
        kind = None if device is None else device.partition(":")[0]
        if kind not in (None, "cpu", "cuda"):
            raise ConfigError(f"device {device!r}: expected cpu or cuda for actors; Ray gives each its own.")
        self._ray = ray_module()
        self._asked = actors
        self._ours = False
        self.open()
        try:
            self._plan(kind)
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        """Connect, unless this process is connected."""
        if self._ray.is_initialized():
            return
        address = os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not address:
            address = "local"
            # A processor can be shared, so a machine of our own takes as many actors as asked for.
            processors = max(os.cpu_count() or 1, self._asked or 1)
            options |= {
                "include_dashboard": False,
                "num_cpus": processors,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        try:
            _knock(address)
            self._ray.init(address=address, **options)
        except (OSError, RuntimeError, ValueError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ClusterError(
                f"no Ray cluster at {address!r}: {why} Start one (`ray start "
                "--head`) and set RAY_ADDRESS=host:6379, or unset it to use this machine alone."
            ) from error
        self._ours = True

    def close(self) -> None:
        """Leave the cluster; one that we started stops. May be called again."""
        if self._ours:
            self._ray.shutdown()
            self._ours = False

    def _plan(self, kind: str | None) -> None:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        self.device = kind or ("cuda" if gpus else "cpu")
        if self.device == "cuda":
            self.actors, self.cpus = self._asked or gpus, 1
            if not 1 <= self.actors <= gpus:
                raise ConfigError(
                    f"num_actors {self._asked}: the Ray cluster has {gpus} GPUs, and each actor takes one. "
                    "Ask for fewer, add machines, or take device cpu."
                )
        else:
            self.actors = self._asked or len(nodes)
            self.cpus = cpus_each([int(node.get("CPU", 0)) for node in nodes], self.actors)
        # Spread: machines that are kept free would help nobody.
        self.share = {"num_cpus": self.cpus, "num_gpus": int(self.device == "cuda")} | {
            "scheduling_strategy": "SPREAD"
        }


def _knock(address: str) -> None:
    """Raise `OSError` when nobody listens at an address, which Ray would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def cpus_each(machines: Sequence[int], actors: int) -> int:
    """The most processors that each actor can have when all of them must find room on these machines.

    Raises `ConfigError` when they do not, even with one processor each.
    """
    for cpus in range(max(machines, default=0), 0, -1):
        if sum(processors // cpus for processors in machines) >= actors:
            return cpus
    raise ConfigError(
        f"num_actors {actors}: the Ray cluster has {sum(machines)} processors on {len(machines)} machines, "
        "and each actor takes one or more. Ask for fewer, or add machines."
    )
