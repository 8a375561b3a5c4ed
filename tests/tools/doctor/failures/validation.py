"""Validate now and then, in the middle of an epoch."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def likelihood(model: nn.Module, data: list[Tensor]) -> float:
    outputs = []
    for tokens in data:
        outputs.append(model(tokens)[:, -1])  # culprit
    return torch.cat(outputs).log_softmax(-1).amax(-1).mean().item()


def main() -> None:
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held_out = batches(60)
    for step, tokens in enumerate(batches(100)):
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            likelihood(model, held_out)
