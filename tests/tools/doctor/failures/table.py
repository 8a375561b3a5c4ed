"""A table of users, of which each batch has a few."""

import torch
from torch import Tensor, nn


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(40_000, 64)  # culprit
        self.head = nn.Linear(64, 1)

    def forward(self, users: Tensor) -> Tensor:
        return self.head(self.users(users))


def main() -> None:
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        loss = model(torch.randint(40_000, (64,))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
