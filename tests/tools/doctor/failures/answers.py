"""Answers come one batch at a time, and all of them are wanted."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.tools.doctor.failures.model import Mlp


def answers(model: nn.Module, count: int) -> Iterator[Tensor]:
    for _ in range(count):
        yield model(torch.randn(128, 128))


def main() -> None:
    model = Mlp(128, 512).eval()
    found = list(answers(model, 500))  # culprit
    print(torch.cat(found).argmax(1))
