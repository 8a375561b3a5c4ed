"""Backward through all steps of a sequence, one of which is very long."""

import torch
from torch import Tensor, nn


def unroll(cell: nn.Module, x: Tensor) -> Tensor:
    state, states = x.new_zeros(len(x), 256), []
    for step in range(x.shape[1]):
        state = cell(x[:, step], state)  # culprit: GRUCell
        states.append(state)
    return torch.stack(states, dim=1)


def main() -> None:
    cell = nn.GRUCell(32, 256)
    optimizer = torch.optim.Adam(cell.parameters())
    for length in (30, 40, 30, 800):
        loss = unroll(cell, torch.randn(64, length, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
