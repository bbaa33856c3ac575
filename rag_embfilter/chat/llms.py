"""Who writes the answers: the backbone that embeds already, a model at an address, or nobody."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from llama_index.core.llms import LLM, ChatMessage
from transformers import AutoModelForCausalLM, PreTrainedModel

from rag_embfilter.backbone import Backbone, quiet_transformers
from rag_embfilter.errors import BackboneError, ConfigError, MissingExtraError
from rag_embfilter.judge.endpoint import EndpointSpec

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen

MAX_NEW_TOKENS = 160  # of an answer by the backbone; a small model that has more to say repeats itself
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
        return local_llm(backbone)
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


def causal_lm(backbone: Backbone) -> PreTrainedModel:
    """The backbone with its head again, on the weights that are in memory: nothing is loaded or copied.

    Where the unembedding is kept in another dtype or place than the model computes in, and is not tied to
    its input embedding, that one matrix is copied. Raises `BackboneError` for a head with more parts than
    a matrix.
    """
    base = backbone.model
    with torch.device("meta"), quiet_transformers():
        whole: PreTrainedModel = AutoModelForCausalLM.from_config(base.config)
    setattr(whole, whole.base_model_prefix, base)
    head: Any = whole.get_output_embeddings()
    embedding: Any = base.get_input_embeddings()
    tied = base.config.get_text_config().tie_word_embeddings
    weight = embedding.weight if tied else backbone.unembedding.to(backbone.device, backbone.dtype)
    head.weight = weight if tied else torch.nn.Parameter(weight, requires_grad=False)
    if lost := [name for name, parameter in whole.named_parameters() if parameter.is_meta]:
        raise BackboneError(
            f"backbone {backbone.name!r} ({base.config.model_type}) cannot write answers: its head also has "
            f"{', '.join(lost)}, which an embedder does not keep. Use --llm openai:MODEL@URL or --llm none."
        )
    whole.eval()
    return whole


def local_llm(backbone: Backbone) -> LLM:
    """LlamaIndex's `HuggingFaceLLM` on the backbone in memory; one answer at a time, which can be stopped."""
    try:
        from llama_index.llms.huggingface import HuggingFaceLLM
    except ImportError as error:
        raise _missing(error) from error
    from llama_index.core.base.llms.types import CompletionResponse
    from llama_index.core.llms.callbacks import llm_completion_callback
    from transformers import StoppingCriteriaList, TextIteratorStreamer

    tokenizer, has_template = backbone.tokenizer, bool(backbone.tokenizer.chat_template)
    whole = causal_lm(backbone)
    whole.name_or_path = tokenizer.name_or_path
    busy = threading.Lock()

    class BackboneLLM(HuggingFaceLLM):
        """Writes with the embedder's own weights.

        LlamaIndex's streaming cannot be stopped, waits for ever when generation fails, and begins a chat
        template's text with a second begin token.
        """

        @llm_completion_callback()
        def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
            """The whole answer to a prompt."""
            text = "".join(piece.delta or "" for piece in self.stream_complete(prompt, formatted, **kwargs))
            return CompletionResponse(text=text)

        @llm_completion_callback()
        def stream_complete(
            self, prompt: str, formatted: bool = False, **kwargs: Any
        ) -> CompletionResponseGen:
            """The answer to a prompt as it is written; ends when the generator is closed."""
            if not formatted:
                prompt = _as_prompt(tokenizer, [ChatMessage(role="user", content=prompt)])
            return self._stream(prompt)

        def _stream(self, prompt: str) -> CompletionResponseGen:
            inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not has_template)
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            stop, failure = threading.Event(), []

            def write() -> None:
                try:
                    self._model.generate(
                        input_ids=inputs["input_ids"].to(backbone.device),
                        attention_mask=inputs["attention_mask"].to(backbone.device),
                        streamer=streamer,
                        stopping_criteria=StoppingCriteriaList([lambda ids, scores, **_: stop.is_set()]),
                        max_new_tokens=self.max_new_tokens,
                        **self.generate_kwargs,
                    )
                except Exception as error:  # handed to the reader of the stream, below
                    failure.append(error)
                finally:
                    streamer.end()

            with busy:
                thread = threading.Thread(target=write, daemon=True)
                thread.start()
                text = ""
                try:
                    for piece in streamer:
                        text += piece
                        yield CompletionResponse(text=text, delta=piece)
                finally:
                    stop.set()
                    thread.join()
            if failure:
                raise failure[0]

    make: Any = BackboneLLM
    made: LLM = make(
        model=whole,
        tokenizer=tokenizer,
        model_name=backbone.name,
        tokenizer_name=backbone.name,
        context_window=min(backbone.max_positions or REMOTE_WINDOW, REMOTE_WINDOW),
        max_new_tokens=MAX_NEW_TOKENS,
        is_chat_model=has_template,
        messages_to_prompt=lambda messages: _as_prompt(tokenizer, messages),
        # Greedy, so that a question has one answer. No penalty on repetition: it counts the prompt, and
        # answering from passages is repeating them.
        generate_kwargs={
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
            "pad_token_id": backbone.end_token(),
            "eos_token_id": backbone.end_token(),
        },
    )
    return made


def _as_prompt(tokenizer: Any, messages: Sequence[ChatMessage]) -> str:
    """Messages as the model was trained on them; a template without a system gets it with the question."""
    from jinja2 import TemplateError
    from llama_index.core.base.llms.generic_utils import messages_to_prompt

    if not tokenizer.chat_template:
        return messages_to_prompt(messages)
    plain = [{"role": m.role.value, "content": m.content or ""} for m in messages]
    try:
        return _templated(tokenizer, plain)
    except TemplateError:
        system = "\n\n".join(m["content"] for m in plain if m["role"] == "system")
        rest = [m for m in plain if m["role"] != "system"]
        rest[0] = rest[0] | {"content": f"{system}\n\n{rest[0]['content']}"}
        return _templated(tokenizer, rest)


def _templated(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
