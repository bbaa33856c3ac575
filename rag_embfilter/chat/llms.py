"""Who writes the answers: the backbone that embeds already, a model at an address, or nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.llms import LLM

from rag_embfilter.backbone import Backbone
from rag_embfilter.errors import ConfigError, MissingExtraError
from rag_embfilter.judge.endpoint import EndpointSpec

if TYPE_CHECKING:
    pass

REMOTE_TOKENS = 512
TIMEOUT = 60.0  # seconds that a server may be silent
REMOTE_WINDOW = 8192  # tokens that any server's model takes


def make_llm(spec: str, backbone: Backbone | None) -> LLM | None:
    """The model that a specification names.

    Args:
        spec: `local` for the backbone itself, `openai:MODEL` or `openai:MODEL@URL` for an OpenAI-compatible
            server (its key is read from OPENAI_API_KEY), `none` for no model.
        backbone: the one in memory.

    Returns: None for `none`. Raises `ConfigError` for another specification, `MissingExtraError` without the
    `chat` extra, `BackboneError` for a backbone that cannot write.
    """
    if spec == "none":
        return None
    if spec == "local":
        if backbone is None:
            raise ConfigError("llm 'local' writes with the collection's backbone, which was not loaded.")
        try:
            from rag_embfilter.chat.backbone_llm import backbone_llm
        except ImportError as error:
            raise _missing(error) from error
        return backbone_llm(backbone)
    if not spec.startswith("openai:"):
        raise ConfigError(f"llm {spec!r}: expected local, none, openai:MODEL or openai:MODEL@URL.")
    where = EndpointSpec.parse(spec)
    try:
        from llama_index.llms.openai_like import OpenAILike
    except ImportError as error:
        raise _missing(error) from error
    return OpenAILike(
        model=where.model,
        api_base=where.url,
        api_key=where.key(),
        is_chat_model=True,
        temperature=0.0,
        max_tokens=REMOTE_TOKENS,
        context_window=REMOTE_WINDOW,
        timeout=TIMEOUT,
        max_retries=2,
    )


def _missing(error: ImportError) -> MissingExtraError:
    return MissingExtraError(
        f"a model that writes answers needs the chat extra ({error}): pip install 'rag-embfilter[chat]', or "
        "use --llm none."
    )
