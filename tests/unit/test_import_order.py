"""The import graph is one-way, and each third party has its one door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each may import only from those before it.
ORDER = (
    "errors fingerprint files devices templates pooling attention precision checkpoints backbone inputs "
    "passes processes windows spectrum spectroscopy calibration recipes making filters normalizing "
    "penalty encoder cluster distributed endpoint verifying lens config embedding export nodes store "
    "vector_store langchain fitting ingestion refiltering metrics eval_set yardstick set_check evaluation "
    "choose drafting judge benchmark chat"
).split()
DOORS = {
    "qdrant_client": {"store"},
    "ragas": {"judge"},
    "openai": {"judge"},
    "ir_measures": {"metrics"},
    "ray": {"cluster"},
    "langchain_core": {"langchain"},
    "langchain_qdrant": {"langchain"},
    "mteb": {"benchmark"},
    "sentence_transformers": {"yardstick"},  # and the process that checks an export
    "qdrant_edge": {"store"},
}


def _module(path: Path) -> str:
    part = path.relative_to(ROOT / "rag_embfilter").parts[0]
    return part.removesuffix(".py")


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(imported module, only for types) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "rag_embfilter":
                names = [f"rag_embfilter.{alias.name}" for alias in node.names]
            found += [(name, id(node) in typing_only) for name in names]
    return found


FILES = [p for p in (ROOT / "rag_embfilter").rglob("*.py") if _module(p) != "__init__"]


def test_every_module_has_its_place():
    assert {_module(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path):
    place = ORDER.index(_module(path))
    for name, typing_only in _imports(path):
        if name.startswith("rag_embfilter.") and not typing_only:
            target = name.split(".")[1]
            if target in ORDER:
                assert ORDER.index(target) <= place, f"{_module(path)} imports {target}"
        assert not name.startswith("pipelines"), "the library knows nothing of the command line"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_each_third_party_has_one_door(path):
    for name, _ in _imports(path):
        allowed = DOORS.get(name.split(".")[0])
        assert allowed is None or _module(path) in allowed, f"{_module(path)} imports {name}"
        if name.startswith("llama_index.core.base.embeddings"):
            assert _module(path) == "embedding"
