"""Several GPUs on one machine: passes split by tokens over one process per GPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rag_embfilter.backbone import Backbone, load_backbone, origin
from rag_embfilter.errors import ClusterError, FingerprintMismatch
from rag_embfilter.inputs import Row
from rag_embfilter.passes import Passed, Passes, Tell

# Parts a process gets of each run: more of them end together, fewer fill batches better.
PARTS_EACH = 4


@dataclass(frozen=True)
class _Recipe:
    """What a process makes its passes of."""

    backbone: str
    revision: str | None
    identity: str
    dtype: torch.dtype
    batch_tokens: int | None
    compiled: bool
    threads: int

    def make(self, device: str) -> Passes:
        torch.set_num_threads(self.threads)
        backbone = load_backbone(self.backbone, self.revision, device, self.dtype)
        if backbone.identity != self.identity:
            raise FingerprintMismatch(
                f"backbone {self.backbone!r} was {self.identity} and is {backbone.identity} now: its files "
                "changed under the running program. Start it again."
            )
        return Passes(backbone, self.batch_tokens, compiled=self.compiled)


class ProcessPasses:
    """As `Passes`, over one process per device. The processes start with the first run.

    They are spawned, so a script that uses them needs `if __name__ == "__main__":`.

    Args:
        backbone: this process's copy, for its name and settings; it runs nothing.
        devices: names of the devices.

    Raises (when run):
        ClusterError: a process died.
    """

    def __init__(
        self, backbone: Backbone, devices: Sequence[str], batch_tokens: int | None, compiled: bool = False
    ) -> None:
        name, revision = origin(backbone)
        threads = max(1, (os.cpu_count() or 1) // len(devices))
        self.devices = list(devices)
        self.batch_tokens = batch_tokens or 32768
        self._recipe = _Recipe(
            name, revision, backbone.identity, backbone.dtype, batch_tokens, compiled, threads
        )
        self._pool: ProcessPoolExecutor | None = None

    def close(self) -> None:
        """End the processes; another run starts them again."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def run(
        self,
        rows: Sequence[Row],
        poolings: Sequence[str],
        prefix: Sequence[int] = (),
        tell: Tell | None = None,
    ) -> Passed:
        """As `Passes.run`."""
        if not rows:
            return Passed(np.empty((0, 0), dtype=np.float32))
        parts = split([len(row.ids) for row in rows], len(self.devices) * PARTS_EACH)
        pool = self._started()
        asked = {
            pool.submit(_run, [rows[i] for i in part], list(poolings), list(prefix)): part for part in parts
        }
        whole: Passed | None = None
        try:
            for future in as_completed(asked):
                done, part = future.result(), asked[future]
                if whole is None:
                    whole = Passed(np.empty((len(rows), done.states.shape[1]), dtype=np.float32))
                whole.states[part] = done.states
                whole.problems |= {part[i]: why for i, why in done.problems.items()}
                whole.stats += done.stats
                if tell is not None:
                    tell(part)
        except BrokenProcessPool as error:
            self._pool = None
            raise ClusterError(
                f"a process for one of {', '.join(self.devices)} died, perhaps for lack of memory. Nothing "
                "of this call was kept; run it again, with a smaller batch_tokens if this goes on. A script "
                'needs `if __name__ == "__main__":` around what it runs.'
            ) from error
        except BaseException:
            self.close()
            raise
        assert whole is not None
        return whole

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            devices = context.SimpleQueue()
            for device in self.devices:
                devices.put(device)
            self._pool = ProcessPoolExecutor(
                len(self.devices), context, initializer=_start, initargs=(self._recipe, devices)
            )
        return self._pool


def split(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Positions of rows in at most so many parts of about equal tokens, each of rows of like length."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    ends = np.cumsum([lengths[i] for i in order])
    size = ends[-1] / parts
    made: dict[int, list[int]] = {}
    for i, end in zip(order, ends, strict=True):
        made.setdefault(int((end - lengths[i] / 2) // size), []).append(i)
    return list(made.values())


_recipe: _Recipe
_devices: Any
_passes: Passes | None = None


def _start(recipe: _Recipe, devices: Any) -> None:
    """In a process: note what to load. An error here would be told as a death, so loading comes with work."""
    global _recipe, _devices
    _recipe, _devices = recipe, devices


def _run(rows: list[Row], poolings: list[str], prefix: list[int]) -> Passed:
    """In a process: run a part."""
    global _passes
    if _passes is None:
        _passes = _recipe.make(_devices.get())
    return _passes.run(rows, poolings, prefix)
