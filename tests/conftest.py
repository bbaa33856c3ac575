"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# No test reaches for a hub: what is not local must fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def datasets() -> Path:
    """The folder of public sets that `EMBFILTER_DATASETS` names."""
    folder = os.environ.get("EMBFILTER_DATASETS")
    if not folder or not Path(folder).is_dir():
        pytest.skip("EMBFILTER_DATASETS does not name a folder of public data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def no_key() -> Iterator[None]:
    """No API key in the environment."""
    kept = os.environ.pop("OPENAI_API_KEY", None)
    yield
    if kept is not None:
        os.environ["OPENAI_API_KEY"] = kept
