"""MTEB: its tasks, and local folders as such tasks, for raw embeddings and filters from one encode."""

from __future__ import annotations

from rag_embfilter.benchmark.folders import FolderTask, read_folder
from rag_embfilter.benchmark.model import EmbFilterModel, RawEmbeddings
from rag_embfilter.benchmark.running import AVERAGE, TaskScores, category_means, run_tasks
from rag_embfilter.benchmark.tasks import require_mteb

__all__ = [
    "AVERAGE",
    "EmbFilterModel",
    "FolderTask",
    "RawEmbeddings",
    "TaskScores",
    "category_means",
    "read_folder",
    "require_mteb",
    "run_tasks",
]
