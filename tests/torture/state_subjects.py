"""Subjects whose state lies outside of what torch registers."""

import random
from collections import Counter, deque
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.torture.engine.subject import MakeSubject, Subject
from tests.torture.subjects import BATCHES, ROWS, adamw


class Everything:
    """A metric that counts in every kind of container, and draws a sample of its rows."""

    __slots__ = ("__dict__", "last")

    def __init__(self) -> None:
        self.confusion = np.zeros((3, 3), dtype=np.int64)
        self.classes: Counter[int] = Counter()
        self.window: deque[int] = deque(maxlen=5)
        self.seen: set[int] = set()
        self.per_class = [torch.zeros(()) for _ in range(3)]
        self.named: dict[str, Any] = {"sum": torch.zeros(3), "rows": [0]}
        self.sampler = np.random.default_rng(3)
        self.sample: list[tuple[float, int]] = []
        self.last: int | None = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        for predicted, target in zip(outputs.argmax(1).tolist(), targets.tolist(), strict=True):
            self.confusion[predicted, target] += 1
            self.classes[target] += 1
            self.window.append(target)
            self.seen.add(predicted)
            self.per_class[target] += 1
            self.sample.append((float(self.sampler.random()), target))
            self.last = target
        self.named["sum"] += outputs.detach().sum(0)
        self.named["rows"][0] += len(targets)


class OwnStates(torchmetrics.Metric):
    """A metric of torchmetrics with attributes beside its states."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", torch.zeros(()), dist_reduce_fx="sum")
        self.histogram = np.zeros(3)
        self.classes: Counter[int] = Counter()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.rows += len(targets)
        self.histogram += np.bincount(targets.numpy(), minlength=3)
        self.classes.update(outputs.argmax(1).tolist())

    def compute(self) -> Tensor:
        return self.rows


class Noisy(nn.Module):
    """Draws from generators of its own: one of NumPy, one of Python, one of torch in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.noise = np.random.default_rng(1)
        self.python = random.Random(2)
        self.hidden = [torch.Generator().manual_seed(3)]

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.noise.standard_normal(x.shape).astype(np.float32) * self.python.random()
        noise = torch.from_numpy(drawn) + torch.rand(x.shape, generator=self.hidden[0])
        out: Tensor = self.layer(x + 0.1 * noise)
        return out


def _classified(model: nn.Module, metrics: Any, **options: Any) -> Subject:
    return Subject(
        model=model,
        optimizer=adamw(model.parameters()),
        batches=[
            (torch.randn(ROWS, 4), torch.tensor([0, 1, 2, index % 3])) for index in range(BATCHES)
        ],
        options={"batchnorm": "ignore", **options},
        metrics=metrics,
    )


def own_metrics() -> Subject:
    return _classified(
        nn.Linear(4, 3),
        {"everything": Everything(), "own": OwnStates()},
        loss_fn=nn.CrossEntropyLoss(),
    )


def compute_groups() -> Subject:
    metrics = torchmetrics.MetricCollection(
        [MulticlassAccuracy(3, validate_args=False), MulticlassF1Score(3, validate_args=False)]
    )
    return _classified(nn.Linear(4, 3), metrics, loss_fn=nn.CrossEntropyLoss())


def own_generators() -> Subject:
    return _classified(Noisy(), Everything(), loss_fn=nn.CrossEntropyLoss(), probe=False)


def closure() -> Subject:
    """A teacher with BatchNorm, sparse buffers and a generator that only the forward knows of."""
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    teacher.register_buffer("places", torch.eye(3).to_sparse())
    drawn = np.random.default_rng(5)

    def forward(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = microbatch
        inputs = inputs + float(drawn.random())
        teacher.get_buffer("places").mul_(0.5)
        # One row has no variance.
        target = teacher(torch.cat([inputs, -inputs]))[: len(inputs)]
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss + nn.functional.mse_loss(outputs, target), outputs

    return _classified(nn.Linear(4, 3), Everything(), forward=forward, probe=False)


SUBJECTS: dict[str, MakeSubject] = {
    "own metrics": own_metrics,
    "compute groups": compute_groups,
    "own generators": own_generators,
    "state in a closure": closure,
}
