"""Train, and say the mean loss at the end."""

import torch
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    total = torch.zeros(())
    for tokens in batches(200):
        features = model(tokens)
        loss = cross_entropy(features.flatten(0, 1), tokens.flatten())
        penalty = (features**4).mean().sqrt()
        total = total + penalty  # culprit
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
    return total.item()


def main() -> None:
    model = Transformer()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
