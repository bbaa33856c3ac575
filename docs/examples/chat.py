"""A collection as LlamaIndex's retriever, query engine and chat engine; the embedder's backbone writes.

python docs/examples/chat.py
"""

from tempfile import TemporaryDirectory

from llama_index.core.schema import Document

from rag_embfilter import EmbFilter, Encoder, Store, ingest
from rag_embfilter.chat import Chat

texts = [
    "A lost badge is reported to reception. Reception hands out a new badge on the same day.",
    "Report a stolen laptop to the Service Desk within two hours, day or night.",
    "A hotel may cost up to 140 euros a night. Receipts are handed in within thirty days.",
]
documents = [Document(id_=f"handbook-{i}", text=text) for i, text in enumerate(texts)]

with TemporaryDirectory() as folder, Store(path=f"{folder}/qdrant") as store:
    encoder = Encoder("smollm2", "search", pooling="last+mean")
    ingest(documents, encoder, [EmbFilter.from_encoder(encoder, "edge", 4)], store, "handbook")

    chat = Chat(store, "handbook-edge-r4", llm="local")  # or "none", or "openai:MODEL@URL"
    print(chat.retriever.retrieve("How much may a hotel cost?")[0].node.text)
    print(chat.query_engine().query("Where do I report a stolen laptop?"))
    engine = chat.engine()  # one for each conversation
    print(engine.chat("How much may a hotel cost?"))
    print(engine.chat("And when are receipts for it handed in?"))
    for part in engine.ask("Who reports a lost badge?"):
        print(part if isinstance(part, str) else f"\n{part.text} {sorted(part.cited)}", end="")
