"""An image model with one part at full resolution."""

import torch
from torch import Tensor, nn


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).relu()


class Refiner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.up = nn.Upsample(scale_factor=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for convolution in self.convolutions:
            x = x + convolution(x).relu()  # culprit
        return x


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


def main() -> None:
    model = nn.Sequential(Stem(), Refiner(), Tail())
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (2, 2, 2, 2, 16):
        images, classes = torch.randn(rows, 3, 48, 48), torch.randint(10, (rows,))
        loss = nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
