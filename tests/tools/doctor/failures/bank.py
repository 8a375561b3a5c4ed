"""Contrastive training with an unbounded memory bank."""

import torch
from torch import Tensor, nn


class Bank(nn.Module):
    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 512)
        self.register_buffer("bank", torch.zeros(0, 512))

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x)
        self.bank = torch.cat([self.bank, features.detach()])  # culprit
        return (features @ self.bank[-256:].T).logsumexp(-1).mean()


def main() -> None:
    model = Bank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(500):
        loss = model(torch.randn(256, 64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
