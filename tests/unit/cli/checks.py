"""What several tests of the command line look at."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from rag_embfilter import Store

LAPTOP, HOLIDAY = "A stolen laptop is reported to security.", "Holiday requests go to your manager."


def points(tmp_path: Path, collection: str, file: Path) -> set[str]:
    with Store(path=tmp_path / "qdrant") as store:
        return set(store.points_of(collection, [file.as_posix()]))


def refused(result: SimpleNamespace, message: str) -> None:
    """One message on stderr that says this, nothing on stdout, no traceback, exit code 1."""
    assert result.code == 1 and result.out == ""
    assert result.err.count("error:") == 1 and result.err.strip().startswith("error:")
    assert "Traceback" not in result.err
    assert re.search(message, result.err), result.err
