"""Train a little, then evaluate on everything at once."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def evaluate(model: nn.Module, data: list[Tensor]) -> Tensor:
    outputs = []
    with torch.no_grad():
        for tokens in data:
            logits = model(tokens)
            outputs.append(logits)  # culprit
    return torch.cat(outputs)


def main() -> None:
    model = Transformer(vocabulary=1024)
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens in batches(3):
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluate(model, batches(200))
