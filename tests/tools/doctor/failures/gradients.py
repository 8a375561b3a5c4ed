"""Training that keeps all gradients for later."""

import torch
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def main() -> None:
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for tokens in batches(100):
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        seen.append([parameter.grad for parameter in model.parameters()])  # culprit
        optimizer.step()
        optimizer.zero_grad()
