"""The models that are put under fault injection, small enough to run thousands of times."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

from automicro import Microbatcher

ROWS = 4
FIRST_SIZE = 2  # so that one failure leads to size 1, and two to none


@dataclass
class Run:
    """A model in training, and all that a step may change."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    microbatcher: Microbatcher
    metrics: Any
    batches: list[Any]
    set_to_none: bool = True

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)


class ConvNet(nn.Module):
    """BatchNorm writes its statistics behind the version counter; dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
        )
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(images))
        return out


class ReplacedBuffer(nn.Module):
    """A buffer replaced, one counted in place, every kind of generator, and an edited input."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.own = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(0.25)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.seen += 1
            noise = random.random() + float(np.random.rand())
            x = x + noise * 0.01 * torch.rand(x.shape, generator=self.own)
        out: Tensor = self.head(torch.tanh(self.layer(x)) - self.mean).squeeze(1)
        return out


class TiedWeights(nn.Module):
    """The embedding is the output head too, and the graph branches."""

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
    """A metric of plain Python."""

    def __init__(self) -> None:
        self.rows = 0
        self.sums: list[float] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.rows += len(targets)
        self.sums.append(float(outputs.sum()))


def _conv_net(policy: Any) -> Run:
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        microbatch_size=policy,
        eval_microbatch_size=policy,
        batchnorm="ignore",
    )
    batches = [(torch.randn(ROWS, 1, 4, 4), torch.tensor([0, 1, 2, i % 3])) for i in range(5)]
    metrics = MulticlassAccuracy(num_classes=3, validate_args=False)
    return Run(model, optimizer, microbatcher, metrics, batches)


def _replaced_buffer(policy: Any) -> Run:
    model = ReplacedBuffer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.MSELoss(),
        optimizer=optimizer,
        microbatch_size=policy,
        eval_microbatch_size=policy,
        batchnorm="ignore",
        update_metric=lambda metric, outputs, microbatch: metric.update(outputs),
    )
    batches = [(torch.randn(ROWS, 5), torch.randn(ROWS)) for _ in range(5)]
    return Run(model, optimizer, microbatcher, CatMetric(), batches, set_to_none=False)


def _tied_weights(policy: Any) -> Run:
    model = TiedWeights()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
    # Gradients that are views of one storage, as buckets of DDP are.
    parameters = list(model.parameters())
    bucket = torch.randn(sum(each.numel() for each in parameters))
    pieces = bucket.split([each.numel() for each in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(ignore_index=-100),
        optimizer=optimizer,
        microbatch_size=policy,
        eval_microbatch_size=policy,
    )
    batches = []
    for _ in range(5):
        tokens = torch.randint(6, (ROWS, 3))
        targets = tokens.roll(-1, 1)
        targets[0, 1:] = -100
        targets[3, 2] = -100
        batches.append((tokens, targets))
    return Run(model, optimizer, microbatcher, RowCounter(), batches, set_to_none=False)


SUBJECTS: dict[str, Callable[[Any], Run]] = {
    "BatchNorm and dropout": _conv_net,
    "replaced buffer": _replaced_buffer,
    "tied weights": _tied_weights,
}


def build(subject: str, policy: Any) -> Run:
    """A run from its seed, always the same."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return SUBJECTS[subject](policy)
