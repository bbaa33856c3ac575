"""A configuration that `choose` recommends, as a small file that everything else accepts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rag_embfilter.errors import ConfigError
from rag_embfilter.files import write_json
from rag_embfilter.making import FILTER_TYPES
from rag_embfilter.recipes import DEFAULT_KEEP, RECIPES


@dataclass(frozen=True)
class Config:
    """Backbone, template and filter that belong together.

    Attributes:
        model_name, revision, template, pooling, max_length: as in `Encoder`.
        filter_type, filter_ratio, keep: as in `EmbFilter.from_encoder`.
        filter_file: what `EmbFilter.save` wrote, for fitted types; in the file a path beside it.
        fingerprint: digest of encoder and filter as chosen; `EmbFilterEmbedding` checks it.
        example_questions: for calibrated filters, to centre queries on when the filter is fitted anew.
    """

    model_name: str
    template: str | list[str]
    filter_type: str = "edge"
    filter_ratio: int = 2
    max_length: int = 512
    revision: str | None = None
    pooling: str | None = None
    keep: float = DEFAULT_KEEP
    filter_file: str | None = None
    fingerprint: str | None = None
    example_questions: tuple[str, ...] = ()

    @property
    def templates(self) -> list[str]:
        """The templates as a list, also when there is one."""
        return [self.template] if isinstance(self.template, str) else list(self.template)

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """Read what `write` wrote; `filter_file` becomes a path from here. Raises `ConfigError` for anything
        else, `OSError` for a file that cannot be read.
        """
        path = Path(path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(asked := found.get("example_questions", []), list):
                found["example_questions"] = tuple(asked)
            if unknown := found.keys() - {each.name for each in fields(cls)}:
                raise ValueError(f"it holds {', '.join(sorted(unknown)[:5])}")
            config = cls(**found)
            config._require_sane()
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{str(path)!r} is not what `choose --config` writes ({error}).") from error
        if config.filter_file is None:
            return config
        return replace(config, filter_file=str(path.parent / config.filter_file))

    def write(self, path: str | Path) -> None:
        """Write it as JSON, leaving out what is as by default; `filter_file` relative to the file."""
        path = Path(path)
        values = asdict(self)
        if self.filter_file is not None:
            values["filter_file"] = os.path.relpath(self.filter_file, path.parent)
        defaults = asdict(Config(self.model_name, self.template))
        needed = ("model_name", "template", "max_length", "filter_type", "filter_ratio")
        kept = {key: value for key, value in values.items() if key in needed or value != defaults[key]}
        write_json(path, kept)

    def changed(self, settings: dict[str, Any]) -> Config:
        """With other settings in place of its own; another filter leaves its file behind."""
        other = {key: value for key, value in settings.items() if key in asdict(self)}
        if other.keys() & {"filter_type", "filter_ratio"}:
            other.setdefault("filter_file", None)
        return replace(self, **other)

    def embedder_settings(self) -> dict[str, Any]:
        """Arguments of `EmbFilterEmbedding`. Raises `ConfigError` for a fitted type without its file."""
        if RECIPES[self.filter_type].fitted and self.filter_file is None:
            raise ConfigError(
                f"{self.filter_type} is fitted on a corpus, and this configuration holds no fit. Give "
                "filter_file=, from `ingest` (the `filters` folder) or EmbFilter.save."
            )
        shared = ("model_name", "revision", "template", "pooling", "max_length", "fingerprint")
        settings: dict[str, Any] = {key: getattr(self, key) for key in shared}
        if self.filter_file is not None:
            return settings | {"filter_file": self.filter_file}
        return settings | {"filter_type": self.filter_type, "filter_ratio": self.filter_ratio}

    def _require_sane(self) -> None:
        if not isinstance(self.template, str | list) or not isinstance(self.example_questions, tuple):
            raise ValueError("template: expected a text or a list of them; example_questions: a list")
        texts = [self.model_name, *self.templates, *self.example_questions]
        optional = [self.revision, self.pooling, self.filter_file, self.fingerprint]
        if not all(isinstance(t, str) for t in texts) or not all(isinstance(t, str | None) for t in optional):
            raise ValueError("a name, a template or a question that is no text")
        if self.filter_type not in FILTER_TYPES:
            raise ValueError(f"filter_type {self.filter_type!r}: expected one of {', '.join(FILTER_TYPES)}")
        for key in ("filter_ratio", "max_length"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{key} {value!r}: expected a whole number of 1 or more")
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise ValueError(f"keep {self.keep!r}: expected a number over 0 to 1")
