"""The models under fault injection, small enough to run thousands of times."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.torture.engine.subject import Subject

__all__ = ["ROWS", "RowCounter"]

ROWS = 4  # slices of 2, so that one failure leads to size 1, and two failures to an error
BATCHES = 5


class ConvNet(nn.Module):
    """BatchNorm, which writes its statistics without a new version, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
        )
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(images))
        return out


class StateOfEveryKind(nn.Module):
    """Buffers that are replaced, changed in place, or changed without a new version; a tensor, a
    list, a nested dict and a number that are no buffers; all generators, and an edited input.
    """

    mean: Tensor
    seen: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("calls", torch.zeros(()))
        self.own = torch.Generator().manual_seed(7)
        self.scale, self.count = torch.ones(5), 0
        self.sizes: list[int] = []
        self.deep: dict[str, dict[str, Any]] = {"last": {}}

    def forward(self, x: Tensor) -> Tensor:
        x.add_(0.25)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.seen += 1
            self.calls.data.add_(1)
            self.scale.mul_(0.9)
            self.count += 1
            self.sizes.append(len(x))
            self.deep["last"]["sum"] = x.detach().sum(0)
            noise = random.random() + float(np.random.rand())
            x = x + noise * 0.01 * torch.rand(x.shape, generator=self.own)
            x = x * self.scale + 0.1 * self.deep["last"]["sum"] / (self.calls + self.count)
        out: Tensor = self.head(torch.tanh(self.layer(x)) - self.mean).squeeze(1)
        return out + 0.01 * sum(self.sizes)


class TiedWeights(nn.Module):
    """A model whose embedding is also its output head, so that the graph branches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.left(x)) * torch.sigmoid(self.right(x))
        out: Tensor = self.head(nn.functional.dropout(x, 0.2, self.training)).transpose(1, 2)
        return out


class RowCounter:
    """A metric in plain Python."""

    def __init__(self) -> None:
        self.rows = 0
        self.sums: list[float] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.rows += len(targets)
        self.sums.append(float(outputs.sum()))


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def accuracy(num_classes: int = 3) -> MulticlassAccuracy:
    return MulticlassAccuracy(num_classes=num_classes, validate_args=False)


def classify(model: nn.Module, *shape: int, **more: Any) -> Subject:
    """Return a subject that classifies inputs of a shape into three classes."""
    batches = [(torch.randn(ROWS, *shape), torch.tensor([0, 1, 2, i % 3])) for i in range(BATCHES)]
    return Subject(
        model=model,
        optimizer=adamw(p for p in model.parameters() if p.requires_grad),
        batches=batches,
        options={"loss_fn": nn.CrossEntropyLoss(), "batchnorm": "ignore"},
        metrics=accuracy(),
        **more,
    )


def batchnorm_and_dropout() -> Subject:
    return classify(ConvNet(), 1, 4, 4)


def state_of_every_kind() -> Subject:
    model = StateOfEveryKind()
    return Subject(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        batches=[(torch.randn(ROWS, 5), torch.randn(ROWS)) for _ in range(BATCHES)],
        options={
            "loss_fn": nn.MSELoss(),
            "batchnorm": "ignore",
            "update_metric": lambda metric, outputs, microbatch: metric.update(outputs),
        },
        metrics=CatMetric(),
        set_to_none=False,
        keeps_gradient=True,
    )


def tied_weights() -> Subject:
    model = TiedWeights()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
    # Gradients are views of one storage, like DDP's buckets.
    parameters = list(model.parameters())
    bucket = torch.randn(sum(each.numel() for each in parameters))
    pieces = bucket.split([each.numel() for each in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    batches = []
    for _ in range(BATCHES):
        tokens = torch.randint(6, (ROWS, 3))
        targets = tokens.roll(-1, 1)
        targets[0, 1:] = -100
        targets[3, 2] = -100
        batches.append((tokens, targets))
    return Subject(
        model=model,
        optimizer=optimizer,
        batches=batches,
        options={"loss_fn": nn.CrossEntropyLoss(ignore_index=-100)},
        metrics=RowCounter(),
        set_to_none=False,
    )
