"""Fine-tune the last layer of a backbone with a contrastive loss and the frequency penalty.

python docs/examples/penalty.py
"""

import torch

from rag_embfilter import EmbFilter, Encoder
from rag_embfilter.penalty import frequency_penalty

encoder = Encoder("smollm2", device="cpu", dtype="float32")  # small steps are lost in a half
model, tokenizer = encoder.backbone.model, encoder.backbone.tokenizer
# `mid` keeps both ends of the spectrum: the directions that `edge` and `calibrated` take out.
edge = torch.from_numpy(EmbFilter.from_encoder(encoder, "mid", 4).matrix)  # [144, 576]

questions = ["How do I reset my password?", "Where is my badge?"]
answers = ["Open the sign-in page and choose Forgot password.", "Badges are at reception, second floor."]
model.requires_grad_(False)
model.layers[-1].requires_grad_(True)
optimizer = torch.optim.AdamW(model.layers[-1].parameters(), lr=1e-4)


def embed(texts: list[str]) -> torch.Tensor:
    """Last-token states, left-padded so that the last position is the last token."""
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    return model(**batch, use_cache=False).last_hidden_state[:, -1]


for step in range(10):
    asked, told = embed(questions), embed(answers)
    scores = torch.nn.functional.cosine_similarity(asked[:, None], told[None], dim=-1) / 0.05
    penalty = frequency_penalty(torch.cat([asked, told]), edge)
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(questions))) + penalty
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step}: loss {loss.item():.3f}, energy in the edge {penalty.item():.3f}")
