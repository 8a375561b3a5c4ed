"""A small model with the vocabulary of a large one."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Block, batches


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(Block(32, 64) for _ in range(4))
        self.head = nn.Linear(32, 32_000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # culprit


def main() -> None:
    model = Speaker()
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens in batches(10, rows=4):
        logits = model(tokens)
        loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
