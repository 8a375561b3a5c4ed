"""A metric that keeps every prediction."""

import torch
from torch import Tensor

from tests.tools.doctor.failures.model import Transformer, batches


class Predictions:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, logits: Tensor) -> None:
        self.kept.append(logits.softmax(-1))  # culprit


@torch.no_grad()
def main() -> None:
    model = Transformer(vocabulary=1024).eval()
    metric = Predictions()
    for tokens in batches(200, vocabulary=1024):
        logits = model(tokens)
        metric.update(logits)
