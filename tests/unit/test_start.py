"""What the first import does and leaves behind."""

from __future__ import annotations

import gc
import importlib

import pytest

import rag_embfilter


@pytest.mark.parametrize("on", [True, False])
def test_garbage_collection_rests_while_the_package_imports_and_is_as_before_then(on, monkeypatch):
    seen = []
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: (seen.append(gc.isenabled()), real(name))[1])
    was = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        assert rag_embfilter.EmbFilter is not None
        assert seen == [False] and gc.isenabled() is on
    finally:
        (gc.enable if was else gc.disable)()


def test_it_comes_on_again_when_an_import_fails(monkeypatch):
    def fail(name):
        raise ImportError("no such wheel")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ImportError, match="no such wheel"):
        rag_embfilter.Store  # noqa: B018
    assert gc.isenabled()
