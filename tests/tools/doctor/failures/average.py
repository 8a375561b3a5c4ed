"""Training with an average of the weights."""

import copy

import torch
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def main() -> None:
    model = Transformer(width=256, layers=4, hidden=1024)
    average = copy.deepcopy(model)  # culprit
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens in batches(20, rows=4):
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)
