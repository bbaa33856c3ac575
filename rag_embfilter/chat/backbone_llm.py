"""The backbone as a writer: LlamaIndex's `HuggingFaceLLM` on the weights that embed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.llms.huggingface import HuggingFaceLLM
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteriaList, TextIteratorStreamer

from rag_embfilter.backbone import Backbone
from rag_embfilter.checkpoints import quiet_transformers
from rag_embfilter.errors import BackboneError

MAX_NEW_TOKENS = 160  # of an answer; a small model that has more to say repeats itself
LONGEST_WINDOW = 8192  # tokens of prompt and answer


class BackboneLLM(HuggingFaceLLM):
    """Writes one answer at a time, which can be stopped.

    LlamaIndex's streaming cannot be stopped, waits for ever when generation fails, and puts a second begin
    token before a chat template's text.
    """

    _one: Any = PrivateAttr(default_factory=threading.Lock)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The whole answer to a prompt."""
        text = "".join(piece.delta or "" for piece in self.stream_complete(prompt, formatted, **kwargs))
        return CompletionResponse(text=text)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """The answer to a prompt as it is written; ends when the generator is closed."""
        if not formatted:
            prompt = as_prompt(self._tokenizer, [ChatMessage(role="user", content=prompt)])
        return self._written(prompt)

    def _written(self, prompt: str) -> CompletionResponseGen:
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop = threading.Event()
        failure: list[Exception] = []
        thread = threading.Thread(target=self._write, args=(prompt, streamer, stop, failure), daemon=True)
        with self._one:
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

    def _write(self, prompt: str, streamer: Any, stop: threading.Event, failure: list[Exception]) -> None:
        """Generate into the streamer, which ends whatever happens."""
        try:
            special = not self._tokenizer.chat_template  # a template has written them already
            inputs = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=special)
            self._model.generate(
                input_ids=inputs["input_ids"].to(self._model.device),
                attention_mask=inputs["attention_mask"].to(self._model.device),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([lambda ids, scores, **_: stop.is_set()]),
                max_new_tokens=self.max_new_tokens,
                **self.generate_kwargs,
            )
        except Exception as error:  # handed to whoever reads the stream
            failure.append(error)
        finally:
            streamer.end()


def backbone_llm(backbone: Backbone) -> LLM:
    """The backbone as a LlamaIndex model. Raises `BackboneError` as `causal_lm`."""
    tokenizer, whole = backbone.tokenizer, causal_lm(backbone)
    whole.name_or_path = tokenizer.name_or_path
    make: Any = BackboneLLM
    made: LLM = make(
        model=whole,
        tokenizer=tokenizer,
        model_name=backbone.name,
        tokenizer_name=backbone.name,
        context_window=min(backbone.max_positions or LONGEST_WINDOW, LONGEST_WINDOW),
        max_new_tokens=MAX_NEW_TOKENS,
        is_chat_model=bool(tokenizer.chat_template),
        messages_to_prompt=lambda messages: as_prompt(tokenizer, messages),
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


def causal_lm(backbone: Backbone) -> PreTrainedModel:
    """The backbone with its head again, on the weights that are in memory: nothing is loaded or copied.

    Where the unembedding is kept in another dtype or place than the model computes in, and is not tied to
    its input embedding, that one matrix is copied. Raises `BackboneError` for a head with more parts than
    a matrix.
    """
    if backbone.masked:
        raise BackboneError(
            f"backbone {backbone.name!r} is a masked language model, which cannot write answers. Use "
            "--llm openai:MODEL@URL or --llm none."
        )
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


def as_prompt(tokenizer: Any, messages: Sequence[ChatMessage]) -> str:
    """Messages as the model was trained on them; a template without a system gets it with the question."""
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
