"""Texts of many lengths."""

import torch
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def main() -> None:
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = [48, 64, 40, 56, 64, 48, 1500, 64]
    for length in lengths:
        (tokens,) = batches(1, rows=4, length=length)
        logits = model(tokens)  # culprit: Attention
        loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
