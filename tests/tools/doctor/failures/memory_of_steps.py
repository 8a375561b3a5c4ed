"""A recurrent model that carries its state from one piece of a text to the next."""

import torch
from torch import nn


def main() -> None:
    cell = nn.GRUCell(128, 256)
    head = nn.Linear(256, 128)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.0)
    state = torch.zeros(64, 256)
    for _ in range(300):
        piece = torch.randn(4, 64, 128)
        loss = torch.zeros(())
        for x in piece:
            state = cell(x, state)
            loss = loss + (head(state) - x).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)  # culprit
