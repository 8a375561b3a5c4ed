"""Models to train with too little memory, most of which is activations."""

import concurrent.futures
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

from automicro import Microbatcher
from tests.outside import Unreached
from tests.torture.engine.subject import TortureRun

ROWS = 8
CLASSES = 4
AdamW = functools.partial(torch.optim.AdamW, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": AdamW,
    "AdamW, foreach": functools.partial(AdamW, foreach=True),
    "AdamW, fused": functools.partial(AdamW, fused=True),
    "SGD, momentum": SGD,
    "SGD, foreach": functools.partial(SGD, foreach=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
}


class Checkpointed(nn.Module):
    """A model whose recomputation draws dropout again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64))
            for _ in range(3)
        )
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x.mean(1))
        return out


class InThreads(nn.Module):
    """Two branches, each computed by its own thread."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, CLASSES)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            left, right = pool.map(lambda branch: branch(x), self.branches)
        out: Tensor = (left + right).mean(1)
        return out


class Leaky(nn.Module):
    """A model with state that cannot be rolled back: tensors stored where capture cannot reach."""

    kept = Unreached()

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()
        self.kept = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x * 1.0)
        out: Tensor = self.net(x) * (1.0 + 0.1 * len(self.kept))
        return out


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 16), nn.Tanh(), nn.Flatten(),
        nn.Linear(32 * 16, CLASSES),
    )  # fmt: skip


def _cnn(*norm_and_more: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *norm_and_more, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(),
        nn.Linear(8 * 12 * 12, CLASSES),
    )  # fmt: skip


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (_mlp, (32, 16)),
    "CNN, GroupNorm": (lambda: _cnn(nn.GroupNorm(2, 8)), (3, 16, 16)),
    "CNN, BatchNorm, dropout": (lambda: _cnn(nn.BatchNorm2d(8), nn.Dropout(0.2)), (3, 16, 16)),
    "activation checkpointing": (Checkpointed, (16, 64)),
    "forward in threads": (InThreads, (16, 64)),
}
SUBJECTS = tuple(_MODELS)
PLANTED = "planted leak"
_MODELS[PLANTED] = (Leaky, (32, 16))


def build(subject: str, optimizer: str, rows: int, *, probe: bool) -> TortureRun:
    """Make a reproducible run from a fixed seed."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    make, shape = _MODELS[subject]
    model = make()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    pairs = [
        (torch.randn(rows, *shape), torch.arange(rows).add(index) % CLASSES) for index in range(4)
    ]
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=chosen,
        batchnorm="ignore",
        probe=probe,
    )
    metrics = MulticlassAccuracy(num_classes=CLASSES, validate_args=False)
    return TortureRun(
        model=model, optimizer=chosen, microbatcher=microbatcher, metrics=metrics, batches=pairs
    )
