"""EmbFilterEmbedding: the encoder and a filter as a LlamaIndex embedder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.storage.kvstore.types import BaseKVStore

from rag_embfilter.config import Config
from rag_embfilter.encoder import Encoder
from rag_embfilter.errors import ConfigError, FingerprintMismatch
from rag_embfilter.filters import FILTER_TYPES, EmbFilter, Role
from rag_embfilter.fingerprint import Fingerprint

_SHAPING = frozenset(
    "model_name revision filter_type filter_ratio band_start seed filter_file query_mean template "
    "query_template pooling max_length endpoint_prompts fingerprint".split()
)
_role: ContextVar[Role] = ContextVar("role", default="document")


class EmbFilterEmbedding(BaseEmbedding):
    """A LlamaIndex embedder: raw embeddings of a causal LM through an EmbedFilter.

    `get_query_embedding` uses the query template, `get_text_embedding` the document's; both return
    unit vectors of `filter.dim` floats. An empty text is a `ValueError`. Needs no API key.
    Raises as `Encoder` and `EmbFilter` do, and `FingerprintMismatch` when `fingerprint` was given and
    the settings lead to another one.
    """

    model_config = ConfigDict(extra="forbid")

    model_name: str = Field(
        default="smollm2",
        description="Backbone: `smollm2` (packaged weights), a hub id, a model folder or a .gguf file.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    filter_type: str = Field(
        default="edge",
        description=f"What is removed, one of {', '.join(FILTER_TYPES)}; fitted ones need `filter_file`.",
    )
    filter_ratio: int = Field(default=2, description="Divisor of the hidden size: dim = hidden // ratio.")
    band_start: int | None = Field(
        default=None, description="First direction that `edge` keeps; by default the middle band."
    )
    seed: int = Field(default=0, description="Picks the directions of `rand`.")
    filter_file: str | None = Field(
        default=None, description="A file that EmbFilter.save wrote; used instead of type and ratio."
    )
    query_mean: list[float] | None = Field(
        default=None,
        description="Example questions' mean, in place of the one in `filter_file` (fitted filters).",
    )
    template: str | list[str] = Field(
        default="prompteol",
        description="Template name, or a format string with {text} in it; or a list of several.",
    )
    query_template: str | None = Field(
        default=None, description="Another template's name or format string for queries."
    )
    pooling: str | None = Field(
        default=None, description="last, mean or last+mean; by default what the template asks for."
    )
    max_length: int = Field(default=512, description="Longest text in tokens; the rest is cut.")
    endpoint_prompts: str = Field(
        default="tokens",
        description="What a server at `endpoint` is sent: tokens (as encoded here), or text, with a "
        "fingerprint of its own.",
    )
    fingerprint: str | None = Field(
        default=None,
        description="Digest of all that changes a vector. Set by the embedder; when given, it is checked.",
    )
    # What follows changes no vector beyond rounding, so it takes no part in `to_dict`, from which
    # LlamaIndex makes its cache keys.
    endpoint: str | None = Field(
        default=None,
        exclude=True,
        description="Address of an OpenAI-compatible server that encodes with this backbone; the filter "
        "is applied here.",
    )
    endpoint_model: str | None = Field(
        default=None, exclude=True, description="Name of the backbone there; by default the first it lists."
    )
    device: str | None = Field(
        default=None,
        exclude=True,
        description="cpu, cuda, cuda:1, ..., or cuda:all; by default CUDA if there is one.",
    )
    dtype: str | None = Field(
        default=None, exclude=True, description="float32, bfloat16 or float16; by default as load_backbone."
    )
    batch_tokens: int | None = Field(
        default=None, exclude=True, description="Tokens in a batch, padding included."
    )
    embed_batch_size: int = Field(
        default=256, gt=0, le=2048, exclude=True, description="Texts handed to the encoder at once."
    )
    num_workers: int | None = Field(default=None, exclude=True, description="Workers for async calls.")
    embeddings_cache: Any | None = Field(
        default=None, exclude=True, description="A LlamaIndex key-value store for embeddings."
    )

    _ready: bool = PrivateAttr(default=False)
    _encoder: Encoder = PrivateAttr()
    _filter: EmbFilter = PrivateAttr()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Here and not in a validator, so that our errors reach the user as they are.
        self._encoder = self._make_encoder()
        self._filter = self._make_filter(settings)
        digest = self.full_fingerprint.digest
        if self.fingerprint not in (None, digest):
            raise FingerprintMismatch(
                f"these settings have fingerprint {digest}, but {self.fingerprint} was asked for: the "
                "backbone's weights, the template or the filter are not what they were. "
                "Restore them, or leave `fingerprint` out to accept the change."
            )
        self.fingerprint = digest
        self._ready = True
        self.embeddings_cache = self.embeddings_cache

    @classmethod
    def from_config(cls, path: str | Path, **settings: Any) -> EmbFilterEmbedding:
        """The embedder of a configuration that `choose --config` wrote; `settings` go before what it holds.

        For an index of your own. A collection that `ingest` filled is fitted on what it ingested: open it
        with `EmbFilterEmbedding(**info.settings, fingerprint=info.fingerprint.digest)`.

        Raises `ConfigError` for another kind of file or a fitted type without `filter_file`,
        `FingerprintMismatch` when the backbone or the filter is not what was chosen.
        """
        if "filter_file" in settings:
            settings["filter_file"] = str(settings["filter_file"])
        if settings.keys() & _SHAPING:  # another embedder than the one that was chosen
            settings.setdefault("fingerprint", None)
        return cls(**Config.read(path).changed(settings).embedder_settings() | settings)

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings that shape vectors are fixed once the filter is made; a cache is wrapped."""
        if name in _SHAPING and (self.__pydantic_private__ or {}).get("_ready"):
            raise ConfigError(
                f"{name} shapes the vectors and cannot be changed; make another {self.class_name()}."
            )
        if name == "embeddings_cache" and isinstance(value, BaseKVStore):
            key = f"{self.fingerprint}-{self._filter.query_digest}"  # the fingerprint is the documents' side
            value = _RoleCache.around(value, key)
        super().__setattr__(name, value)

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> EmbFilterEmbedding:
        """A copy that shares the model in memory; with `update`, an embedder made anew."""
        if not update:
            return super().model_copy()
        settings = {**self.__dict__, "fingerprint": None, **update}
        return type(self)(**settings)

    def _make_encoder(self) -> Encoder:
        shared: dict[str, Any] = {
            "template": self.template,
            "pooling": self.pooling,
            "max_length": self.max_length,
            "dtype": self.dtype,
            "revision": self.revision,
            "query_template": self.query_template,
            "batch_tokens": self.batch_tokens,
        }
        if self.endpoint is not None:
            from rag_embfilter.endpoint import EndpointEncoder

            return EndpointEncoder(
                self.endpoint,
                self.model_name,
                model=self.endpoint_model,
                prompts=self.endpoint_prompts,
                **shared,
            )
        if self.endpoint_prompts != "tokens":
            raise ConfigError(
                f"endpoint_prompts {self.endpoint_prompts!r}: such vectors are made by a server alone. Give "
                "endpoint= (--endpoint URL), the address of one."
            )
        return Encoder(self.model_name, device=self.device, **shared)

    def _make_filter(self, given: Mapping[str, Any]) -> EmbFilter:
        if self.filter_file is None:
            if self.query_mean is not None:
                raise ConfigError("query_mean goes with a filter_file; other filters centre no queries.")
            return EmbFilter.from_encoder(
                self._encoder, self.filter_type, self.filter_ratio, self.band_start, self.seed
            )
        loaded = EmbFilter.load(self.filter_file)
        source = loaded.parts.get("unembedding")
        if source not in (None, self._encoder.unembedding_digest()):
            raise FingerprintMismatch(
                f"filter file {self.filter_file!r} was made from another unembedding ({source}) than "
                f"{self.model_name!r} has ({self._encoder.unembedding_digest()}). Use its own backbone."
            )
        for name in ("filter_type", "filter_ratio"):
            if given.get(name) not in (None, getattr(loaded, name)):
                raise ConfigError(
                    f"{name} {given[name]!r}: filter file {self.filter_file!r} holds "
                    f"{getattr(loaded, name)!r}. Leave one of the two out."
                )
        self.filter_type, self.filter_ratio = loaded.filter_type, loaded.filter_ratio
        self.band_start = None
        return loaded if self.query_mean is None else loaded.with_query_mean(self.query_mean)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises this embedder."""
        return "EmbFilterEmbedding"

    @property
    def encoder(self) -> Encoder:
        """The encoder at work."""
        return self._encoder

    @property
    def filter(self) -> EmbFilter:
        """The filter at work."""
        return self._filter

    @property
    def full_fingerprint(self) -> Fingerprint:
        """Encoder's and filter's fingerprint together, with readable parts."""
        return self._encoder.fingerprint | self._filter.fingerprint

    def to_payload(self) -> dict[str, Any]:
        """What LlamaIndex's instrumentation shows of this embedder."""
        return super().to_payload() | {"filter": self._filter.name, "fingerprint": self.fingerprint}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> EmbFilterEmbedding:
        return self.model_copy()  # the model in memory is shared, not doubled

    def _get_query_embedding(self, query: str) -> Embedding:
        raw = self._encoder.encode_queries([query])
        vector: Embedding = self._filter.apply(raw, role="query")[0].tolist()
        return vector

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        raw = self._encoder.encode_documents(texts)
        vectors: list[Embedding] = self._filter.apply(raw, role="document").tolist()
        return vectors

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    def get_query_embedding(self, query: str) -> Embedding:
        """Unit vector of a query, through the query template."""
        with _as_query():
            return super().get_query_embedding(query)

    async def aget_query_embedding(self, query: str) -> Embedding:
        """As `get_query_embedding`, off the event loop."""
        with _as_query():
            return await super().aget_query_embedding(query)


@contextmanager
def _as_query() -> Iterator[None]:
    """Marks this thread or task as asking for a query's vector, for the cache."""
    token = _role.set("query")
    try:
        yield
    finally:
        _role.reset(token)


class _RoleCache(BaseKVStore):
    """A key-value store whose keys also hold the role and the fingerprint.

    LlamaIndex keys its embeddings cache by the text alone, so a query would get a document's vector,
    and one embedder another's.
    """

    def __init__(self, store: BaseKVStore, fingerprint: str) -> None:
        self.store = store
        self.fingerprint = fingerprint

    @classmethod
    def around(cls, store: BaseKVStore, fingerprint: str) -> _RoleCache:
        return cls(store.store if isinstance(store, _RoleCache) else store, fingerprint)

    def _key(self, text: str) -> str:
        return f"{self.fingerprint}:{_role.get()}:{text}"

    def put(self, key: str, val: dict[str, Any], collection: str = "data") -> None:
        self.store.put(self._key(key), val, collection)

    async def aput(self, key: str, val: dict[str, Any], collection: str = "data") -> None:
        await self.store.aput(self._key(key), val, collection)

    def get(self, key: str, collection: str = "data") -> dict[str, Any] | None:
        return self.store.get(self._key(key), collection)

    async def aget(self, key: str, collection: str = "data") -> dict[str, Any] | None:
        return await self.store.aget(self._key(key), collection)

    def get_all(self, collection: str = "data") -> dict[str, dict[str, Any]]:
        return self.store.get_all(collection)

    async def aget_all(self, collection: str = "data") -> dict[str, dict[str, Any]]:
        return await self.store.aget_all(collection)

    def delete(self, key: str, collection: str = "data") -> bool:
        return self.store.delete(self._key(key), collection)

    async def adelete(self, key: str, collection: str = "data") -> bool:
        return await self.store.adelete(self._key(key), collection)
