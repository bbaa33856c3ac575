"""Fixtures for unit tests: tiny models, a cache of their own, no network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rag_embfilter import Encoder, Store
from tests import tiny


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Unit tests leave the user's cache alone."""
    kept = os.environ.get("EMBFILTER_CACHE")
    os.environ["EMBFILTER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("EMBFILTER_CACHE")
    if kept is not None:
        os.environ["EMBFILTER_CACHE"] = kept


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices spend more time on threads waiting for each other than on arithmetic."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a tiny model of each family."""
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.save_model(root / family, family) for family in tiny.FAMILIES}


@pytest.fixture(scope="session")
def llama(model_folders: dict[str, Path]) -> Path:
    """Folder of a tiny Llama."""
    return model_folders["Llama"]


@pytest.fixture(scope="session")
def encoder(llama: Path) -> Encoder:
    """A tiny Llama with PromptEOL, hidden size 32."""
    return Encoder(str(llama), device="cpu")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty embedded store."""
    with Store(path=tmp_path / "qdrant") as opened:
        yield opened
