"""Refiltering: a raw collection through new filters, with no pass of the backbone over its documents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rag_embfilter.errors import EncodingError, StoreError
from rag_embfilter.filters import EmbFilter
from rag_embfilter.store import VECTOR, Page, Store

logger = logging.getLogger(__name__)


@dataclass
class Refiltered:
    """What one target got: points written now, held before, and left out because nothing was left of them."""

    written: int = 0
    held: int = 0
    left_out: int = 0


def refilter(
    store: Store,
    source: str,
    targets: Mapping[str, EmbFilter],
    *,
    vector: str = VECTOR,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Refiltered]:
    """Bring every point of a raw collection that a target lacks into it, with id and payload as they are.

    Streams, and goes on where a run was stopped: what a target holds is not written again.

    Args:
        store: holds them all.
        source: full name of the collection with raw embeddings.
        targets: full name -> filter; the collections exist (`Store.create`).
        vector: name of the source's vector; empty for the unnamed one.
        progress: called with the number of points read.

    Raises `StoreError` when a target holds fewer points in the end than it should.
    """
    found = {name: Refiltered() for name in targets}
    empty = {name for name in targets if not store.info(name).points}
    read = 0
    for page in store.pages(source, vector):
        for name, embfilter in targets.items():
            _bring(store, name, embfilter, page, found[name], fresh=name in empty)
        read += len(page.ids)
        if progress is not None:
            progress(len(page.ids))
    for name, done in found.items():
        store.optimize(name)
        points = store.info(name).points
        if points < done.written + done.held:
            raise StoreError(
                f"collection {name!r} holds {points} points, and should hold {done.written + done.held} of "
                f"{source!r}'s {read}. Something else deletes from it; stop that and run this again."
            )
    return found


def _bring(store: Store, name: str, embfilter: EmbFilter, page: Page, done: Refiltered, fresh: bool) -> None:
    """Write the page's points that a target lacks."""
    present = set() if fresh else store.present(name, page.ids)
    missing = [i for i, point in enumerate(page.ids) if str(point) not in present]
    done.held += len(page.ids) - len(missing)
    if not missing:
        return
    try:
        filtered = embfilter.apply(page.vectors[missing])
    except EncodingError as error:
        assert error.embeddings is not None
        logger.warning("%s: %s", name, error)
        filtered = np.delete(error.embeddings, list(error.problems), axis=0)
        missing = [i for row, i in enumerate(missing) if row not in error.problems]
        done.left_out += len(error.problems)
    if missing:
        store.write(name, page.at(missing, filtered))
        done.written += len(missing)
