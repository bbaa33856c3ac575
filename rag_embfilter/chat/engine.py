"""The chat engine: LlamaIndex's, with answers that cite, and with "I don't know"."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.response.schema import Response
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.llms import LLM, ChatMessage, ChatResponse, MessageRole
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import NodeWithScore

from rag_embfilter.chat.answers import Answer, Passage, checked, extracted, refuses
from rag_embfilter.chat.followups import joined, refers, trustworthy
from rag_embfilter.chat.prompts import CONDENSE, DONT_KNOW, SMALL_SYSTEM, SYSTEM, harmless, question_with
from rag_embfilter.chat.retrieval import ChatRetriever, Found, as_nodes
from rag_embfilter.errors import EmbFilterError

MEMORY_TOKENS = 1024


class ModelError(EmbFilterError):
    """The model that writes answers cannot be asked, or stopped in the middle of one."""


class CitedChatEngine(CondensePlusContextChatEngine):
    """LlamaIndex's condense-plus-context chat engine over a collection, one for each conversation.

    Args:
        retriever: shared by all conversations.
        llm: who writes; None answers with the passages' best sentences.
        count_tokens: the memory's measure, text to tokens.
        small: whether the model is too small for rules, several passages and the conversation.
        rewrites: whether the model is asked to rewrite every follow-up; else those that point back.

    `ask` streams; LlamaIndex's `chat` and `stream_chat` stand on it and give its passages as source nodes.
    """

    def __init__(
        self,
        retriever: ChatRetriever,
        llm: LLM | None,
        count_tokens: Callable[[str], Any] | None = None,
        rewrites: bool = False,
        small: bool = False,
    ) -> None:
        memory = ChatMemoryBuffer.from_defaults(
            token_limit=MEMORY_TOKENS, tokenizer_fn=count_tokens or str.split
        )
        no_model: Any = None
        super().__init__(retriever, llm or no_model, memory, system_prompt=SYSTEM, condense_prompt=CONDENSE)
        self.finder, self.writer = retriever, llm
        self._rewrites, self._small = rewrites, small
        self.last: Answer | None = None

    def ask(self, question: str, stop: threading.Event | None = None) -> Iterator[str | Answer]:
        """Answer a question: text as it is written, then, last, the `Answer` that was checked.

        Setting `stop`, or closing the iterator, stops the model; the question and what was written so far
        stay in memory.
        Raises `ModelError` when the model fails, and what retrieving raises; neither changes the memory.
        """
        history = self._memory.get()
        standalone = self._condense_question(history, question)
        found = self.finder.find(standalone)
        if not found.relevant:
            reason = f"Nothing in {self.finder.name} comes close enough to this question."
            answer = Answer(question, standalone, (), found.passages, False, reason)
        elif self.writer is None:
            claims = extracted(standalone, found.passages, self.finder.words)
            for claim in claims:
                yield f"{claim.text} "
            answer = Answer(question, standalone, claims, found.passages)
        else:
            answer = yield from self._written(question, standalone, history, found, stop)
        self._remember(question, answer)
        yield answer

    def _written(
        self,
        question: str,
        standalone: str,
        history: Sequence[ChatMessage],
        found: Found,
        stop: threading.Event | None,
    ) -> Generator[str, None, Answer]:
        """The model's answer as it comes; gives it checked against the passages."""
        texts = [passage.hit.text for passage in found.passages]
        messages = [
            ChatMessage(role=MessageRole.SYSTEM, content=SMALL_SYSTEM if self._small else SYSTEM),
            *([] if self._small else history),
            ChatMessage(role=MessageRole.USER, content=question_with(texts, standalone, self._small)),
        ]
        text = ""
        try:
            for piece in self._streamed(messages):
                text += piece
                yield piece
                if stop is not None and stop.is_set():
                    return replace(self._judged(question, standalone, text, found.passages), stopped=True)
        except (GeneratorExit, KeyboardInterrupt):
            self._remember(question, self._judged(question, standalone, text, found.passages))
            raise
        return self._judged(question, standalone, text, found.passages)

    def _streamed(self, messages: list[ChatMessage]) -> Iterator[str]:
        assert self.writer is not None
        stream = None
        try:
            stream = self.writer.stream_chat(messages)
            for part in stream:
                if part.delta:
                    yield part.delta
        except EmbFilterError:
            raise
        except Exception as error:  # whatever a foreign model or its client meets
            raise ModelError(_why(self.writer, error)) from error
        finally:
            if stream is not None:
                stream.close()

    def _judged(self, question: str, standalone: str, text: str, passages: tuple[Passage, ...]) -> Answer:
        claims = () if refuses(text) else checked(text, passages, self.finder.words)
        if any(claim.cites for claim in claims):
            return Answer(question, standalone, claims, passages)
        if claims:
            reason = "The model's answer is not supported by the passages found."
            return Answer(question, standalone, (), passages, False, reason, rejected=text.strip())
        return Answer(question, standalone, (), passages, False, "The passages found do not say it.")

    def _remember(self, question: str, answer: Answer) -> None:
        self.last = answer
        self._memory.put(ChatMessage(role=MessageRole.USER, content=question))
        told = " ".join(claim.text for claim in answer.claims) if answer.known else DONT_KNOW
        self._memory.put(ChatMessage(role=MessageRole.ASSISTANT, content=told))

    def _condense_question(self, chat_history: list[ChatMessage], latest_message: str) -> str:
        """A follow-up as a question that stands by itself; a first question, or one that does, as it is.

        What a model makes of it is taken when it is made of words that were said, else, and without a
        model, it is searched for together with the question before it.
        """
        asked = [m.content or "" for m in chat_history if m.role == MessageRole.USER]
        leans = refers(latest_message)
        if not asked or not (leans or (self.writer is not None and self._rewrites)):
            return latest_message
        together = joined(asked[-1], latest_message) if leans else latest_message
        if self.writer is None or self._small:
            return together
        history = "\n".join(f"{m.role.value}: {harmless(m.content or '')}" for m in chat_history[-6:])
        prompt = CONDENSE.format(history=history, question=harmless(latest_message))
        try:
            rewritten = str(self.writer.complete(prompt)).strip().strip('"')
        except Exception as error:  # whatever a foreign model or its client meets
            raise ModelError(_why(self.writer, error)) from error
        return rewritten if trustworthy(rewritten, history, latest_message) else together

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """LlamaIndex's call: the whole answer, its numbers in the text, its passages as `source_nodes`."""
        if chat_history is not None:
            self._memory.set(chat_history)
        *_, answer = self.ask(message)
        assert isinstance(answer, Answer)
        return AgentChatResponse(response=answer.text, source_nodes=_nodes(answer))

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """As `chat`, off the event loop."""
        import asyncio

        return await asyncio.to_thread(self.chat, message, chat_history)

    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """LlamaIndex's call: the text as it is written, unchecked; `source_nodes` once it is read."""
        if chat_history is not None:
            self._memory.set(chat_history)
        response = StreamingAgentChatResponse()

        def stream() -> Generator[ChatResponse, None, None]:
            text = ""
            for part in self.ask(message):
                if isinstance(part, Answer):
                    response.source_nodes += _nodes(part)
                    part = "" if text else part.text
                text += part
                yield ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=part)

        response.chat_stream = stream()
        thread = threading.Thread(
            target=response.write_response_to_history, args=(ChatMemoryBuffer.from_defaults(),), daemon=True
        )
        response.write_response_to_history_thread = thread
        thread.start()
        return response


class CitedQueryEngine(CustomQueryEngine):
    """LlamaIndex's query engine over a collection: each question by itself, answered with numbers.

    `source_nodes` of a response are the passages; none when nothing relevant was found.
    """

    retriever: Any
    llm: Any = None
    small: bool = False

    def custom_query(self, query_str: str) -> Response:
        """Answer a question."""
        answered = CitedChatEngine(self.retriever, self.llm, small=self.small).chat(query_str)
        return Response(answered.response, source_nodes=answered.source_nodes)


def _nodes(answer: Answer) -> list[NodeWithScore]:
    return as_nodes(answer.passages) if answer.known else []


def _why(llm: LLM, error: Exception) -> str:
    """What happened to a model, without anything that it or its client says, which may hold a key."""
    status = getattr(error, "status_code", None)
    what = f"HTTP {status}" if isinstance(status, int) else type(error).__name__
    return (
        f"the model {llm.metadata.model_name!r} gave no whole answer ({what}). Ask again; if it stays so, "
        "look at its server, or use --llm none."
    )
