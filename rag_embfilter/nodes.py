"""Nodes: documents cut into the pieces that are embedded and stored, as LlamaIndex `TextNode`s."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode

from rag_embfilter.errors import ConfigError

# Longer texts reach the splitter in parts of about this many characters, so that its memory and time
# stay in proportion to the text.
PART = 200_000
NAMESPACE = uuid.UUID("6f1c1f0e-2a55-5d0b-9f0a-5d6f2f9c7a11")


def passage_text(title: str, text: str) -> str:
    """What is embedded for a document with a title: title, one space, text, stripped."""
    return f"{title.strip()} {text.strip()}".strip()


def source_of(document: Document) -> str:
    """The unit a sync replaces as a whole: the `source` in its metadata (a file), else its own id."""
    return str(document.metadata.get("source") or document.id_)


def point_id(doc_id: str, index: int, text: str) -> str:
    """UUIDv5 of document, position in it, and text digest: the same in every collection of a base."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return str(uuid.uuid5(NAMESPACE, f"{doc_id!r} {index} {digest}"))


class Splitter:
    """Cuts documents into nodes of at most `chunk_size` tokens, title included.

    Args:
        count_tokens: the encoder's own count for a text.
        chunk_size: longest chunk in tokens; None keeps every document whole.
        chunk_overlap: tokens that neighbouring chunks share.
        max_length: the encoder's limit, which `chunk_size` must not exceed.

    A title stands before every chunk of its document, unless it takes more than half a chunk: then it
    is text like the rest. Raises `ConfigError` for sizes that do not fit together.
    """

    def __init__(
        self,
        count_tokens: Callable[[str], int],
        chunk_size: int | None = 256,
        chunk_overlap: int = 32,
        max_length: int | None = None,
    ) -> None:
        if chunk_size is not None:
            if chunk_size < 8:
                raise ConfigError(f"chunk_size {chunk_size}: expected 8 tokens or more.")
            if not 0 <= chunk_overlap <= chunk_size // 2:
                raise ConfigError(
                    f"chunk_overlap {chunk_overlap}: expected 0 to {chunk_size // 2}, half of chunk_size."
                )
            if max_length is not None and chunk_size > max_length:
                raise ConfigError(
                    f"chunk_size {chunk_size} is over the encoder's max_length {max_length}, so chunks "
                    f"would be cut. Use chunk_size={max_length} or less, or raise max_length."
                )
        self.count_tokens = count_tokens
        self.chunk_size = chunk_size
        self.chunk_overlap = chunk_overlap
        self._cutters: dict[int, SentenceSplitter] = {}

    def nodes(self, document: Document) -> Iterator[TextNode]:
        """The document's nodes in order; none when it holds no text."""
        title = str(document.metadata.get("title") or "").strip()
        text = document.text
        if not text.strip():
            title, text = "", title  # a title alone is all there is to embed
        if self.chunk_size is None:
            pieces = iter([(passage_text(title, text), 0, len(text))])
        else:
            pieces = self._pieces(title, text)
        has_lines = "\n" in text and not {"page", "record"} & document.metadata.keys()
        index, line, counted = 0, 1, 0
        for piece, start, end in pieces:
            if piece:
                line += text.count("\n", counted, start)
                counted = max(counted, start)
                yield _node(document, index, piece, (start, end), line if has_lines else None)
                index += 1

    def _pieces(self, title: str, text: str) -> Iterator[tuple[str, int, int]]:
        """Passage texts with their place in `text`, as (passage, start, end)."""
        assert self.chunk_size is not None
        size = self.chunk_size
        first = len(text) - len(text.lstrip())
        before = 0  # how far a title moved the text
        if title:
            taken = self.count_tokens(title + " ")
            if taken > size // 2:
                before = len(title) + 1 - first
                title, text = "", passage_text(title, text)
            else:
                size -= taken
        cutter = self._cutter(size)
        for offset, part in _parts(text):
            begin = end = 0
            for chunk in cutter.split_text(part):
                begin = _place(part, chunk, begin, end)
                end = max(end, begin + len(chunk))
                for place, piece in self._fitting(title, chunk):
                    start = offset + begin + place - before
                    yield passage_text(title, piece), max(start, first), max(start + len(piece), first)

    def _fitting(self, title: str, chunk: str, place: int = 0) -> Iterator[tuple[int, str]]:
        """A chunk as (place, text), in halves where it takes more tokens than its sentences did apart."""
        assert self.chunk_size is not None
        if len(chunk) < 2 or self.count_tokens(passage_text(title, chunk)) <= self.chunk_size:
            yield place, chunk
            return
        middle = max(chunk.find(" ", len(chunk) // 2), 0) or len(chunk) // 2
        right = chunk[middle:].lstrip()
        yield from self._fitting(title, chunk[:middle].rstrip(), place)
        yield from self._fitting(title, right, place + len(chunk) - len(right))

    def _cutter(self, size: int) -> SentenceSplitter:
        """LlamaIndex's splitter for chunks of `size` tokens, made once."""
        if size not in self._cutters:
            self._cutters[size] = SentenceSplitter(
                chunk_size=size,
                chunk_overlap=min(self.chunk_overlap, size // 2),
                tokenizer=lambda text: range(self.count_tokens(text)),
            )
        return self._cutters[size]


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """A long text in parts of about `PART` characters, cut at the last paragraph, line or space there."""
    start = 0
    while start < len(text):
        end = min(start + PART, len(text))
        if end < len(text):
            cuts = (text.rfind(mark, start + PART // 2, end) for mark in ("\n\n", "\n", " "))
            end = next((cut + 1 for cut in cuts if cut > 0), end)
        yield start, text[start:end]
        start = end


def _place(part: str, chunk: str, begin: int, end: int) -> int:
    """Where a chunk begins, after one from `begin` to `end`.

    It reaches beyond that one and leaves out only white space; a copy of it within that one is not it.
    """
    latest = len(part) - len(part[end:].lstrip())
    found = part.find(chunk, max(begin, end + 1 - len(chunk)), latest + len(chunk))
    return found if found >= 0 else max(part.find(chunk, begin), begin)


def _node(document: Document, index: int, passage: str, span: tuple[int, int], line: int | None) -> TextNode:
    metadata: dict[str, Any] = dict(document.metadata)
    metadata["source"] = source_of(document)
    metadata["chunk"] = index
    if line is not None:
        metadata["line"] = line
    return TextNode(
        id_=point_id(document.id_, index, passage),
        text=passage,
        metadata=metadata,
        # Only the passage's text is embedded; LlamaIndex would put the metadata before it.
        excluded_embed_metadata_keys=sorted(metadata),
        excluded_llm_metadata_keys=sorted(metadata),
        start_char_idx=span[0],
        end_char_idx=span[1],
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document.id_)},
    )
