"""Train, then sum the losses of a held-out set, in one function."""

import torch
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def main() -> None:
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for tokens in batches(5):
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = torch.zeros(())
        for tokens in batches(50):
            total += cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())  # culprit
        print(epoch, total.item())
