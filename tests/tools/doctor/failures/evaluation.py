"""Train with few rows, evaluate with many, and forget that nobody goes back through it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def right(model: nn.Module, data: list[Tensor]) -> int:
    count = 0
    for tokens in data:
        logits = model(tokens)  # culprit
        count += int((logits.argmax(-1) == tokens).sum())
    return count


def main() -> None:
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for tokens in batches(4):
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right(model, batches(4, rows=100))
