"""Training that keeps losses for a plot."""

import torch
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def main() -> None:
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history: list[torch.Tensor] = []
    for tokens in batches(100):
        logits = model(tokens)
        loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        regularized = loss + 1e-4 * logits.square().mean()
        regularized.backward(retain_graph=len(history) % 2 == 0)
        optimizer.step()
        history.append(loss)  # culprit
