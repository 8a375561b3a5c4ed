"""A bias for each length, made once and remembered."""

import functools

import torch
from torch import Tensor, nn


@functools.cache  # culprit
def bias(length: int) -> Tensor:
    places = torch.arange(length, dtype=torch.float32)
    return -(places[:, None] - places[None, :]).abs()


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        return (query @ key.mT + bias(x.shape[1])).softmax(-1) @ value


def main() -> None:
    model = Attend()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(300):
        loss = model(torch.randn(1, 200 + (step * 61) % 307, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
