"""The wheel: built, installed into an environment of its own, and used from another folder."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from rag_embfilter import __version__
from tests import tiny

ROOT = Path(__file__).parents[2]
USE = """
import importlib.util, json, sys
from importlib.metadata import version
from pathlib import Path
import rag_embfilter
from llama_index.core import Document, VectorStoreIndex
from rag_embfilter import EmbFilterEmbedding, Encoder, Store, ingest
embedding = EmbFilterEmbedding(model_name=sys.argv[1], filter_ratio=4, device="cpu")
texts = ["A stolen laptop is reported to security.", "Bikes are kept in the cellar."]
with Store(path="qdrant") as store:
    documents = [Document(id_=str(i), text=text) for i, text in enumerate(texts)]
    report = ingest(documents, embedding.encoder, [embedding.filter], store, "docs")
    index = VectorStoreIndex.from_documents(documents, embed_model=embedding)
    found = index.as_retriever(similarity_top_k=1).retrieve(texts[1])
print(json.dumps({
    "file": rag_embfilter.__file__,
    "typed": (Path(rag_embfilter.__file__).parent / "py.typed").is_file(),
    "version": version("rag-embfilter"),
    "pipelines": importlib.util.find_spec("pipelines") is not None,
    "added": report.added,
    "found": found[0].node.text,
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built without a network, by what is installed."""
    for needed in ("build", "hatchling"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(ROOT))
    (built,) = out.glob("*.whl")
    return built


def run(*command: str, **where: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **where)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_wheel_holds_the_library_and_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = [opened.read(n).decode() for n in names if n.endswith(".dist-info/METADATA")]
    assert "rag_embfilter/py.typed" in names
    assert not [
        n for n in names if n.split("/")[0] not in ("rag_embfilter", f"rag_embfilter-{__version__}.dist-info")
    ]
    assert any(n.endswith("licenses/LICENSE") for n in names)
    lines = metadata.splitlines()
    assert f"Version: {__version__}" in lines and "License-Expression: Apache-2.0" in lines
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra")}
    assert {"all", "edge", "eval", "export", "langchain", "mteb", "ray", "yardstick"} <= extras


def test_installed_elsewhere_it_works_from_another_folder(wheel, tmp_path):
    """Its dependencies are those of this environment; the package itself is the wheel's."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv/bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A path that a .pth names is searched last, and the .pth files in it (the checkout's) are not read.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    model = tiny.save_model(tmp_path / "model", "Llama")
    (tmp_path / "elsewhere").mkdir()
    said = json.loads(run(python, "-I", "-c", USE, str(model), cwd=tmp_path / "elsewhere").splitlines()[-1])
    assert Path(said.pop("file")).is_relative_to(own)
    assert said == {
        "typed": True,
        "version": __version__,
        "pipelines": False,
        "added": 2,
        "found": "Bikes are kept in the cellar.",
    }
