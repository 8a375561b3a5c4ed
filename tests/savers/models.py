"""Models of repeated blocks, each with some state that recomputation must find unchanged."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 64
ROWS = 400


class Block(nn.Module):
    """A residual block of two layers, with optional layers in between."""

    def __init__(
        self, between: nn.Module | None = None, *, wrap: Callable[[Any], Any] | None = None
    ):
        super().__init__()
        self.between = nn.Identity() if between is None else between
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        if wrap is not None:
            self.up = wrap(self.up)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = rows + self.down(torch.relu(self.up(self.between(rows))))
        return found


class Noise(nn.Module):
    """Draws from Python, NumPy and its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(3)

    def forward(self, rows: Tensor) -> Tensor:
        return rows * (1 + random.random() + np.random.random() + self.own.random())


class Codebook(nn.Module):
    """Updates a table of means, a large buffer, in each forward."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(300, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        nearest = torch.cdist(rows, self.table).argmin(1)
        found = self.table[nearest]
        with torch.no_grad():
            self.table.lerp_(rows.mean(0).expand_as(self.table), 0.1)
        return rows + 0.1 * (found - rows)


class Counting(nn.Module):
    """Depends on attributes set by earlier calls, and replaces a buffer."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[float] = []
        self.state = torch.zeros(WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(rows.detach().mean()))
        shift = self.calls + len(self.seen) + self.state + self.last
        self.state = rows.detach().mean(0)
        self.last = rows.detach().std(0)
        return torch.sin(rows * shift)


class BatchNormConvolution(nn.Module):
    """A convolution with BatchNorm, as in a stage of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout2d(0.2)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = images + self.drop(self.second(torch.relu_(self.norm(self.first(images)))))
        return found


def stack(make: Callable[[], nn.Module], depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    blocks = [make() for _ in range(depth)]
    return nn.Sequential(nn.Linear(10, WIDTH), *blocks, nn.Linear(WIDTH, 1))


def images() -> nn.Module:
    torch.manual_seed(0)
    blocks = [BatchNormConvolution() for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Conv2d(8, 1, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: stack(Block),
    "dropout": lambda: stack(lambda: Block(nn.Dropout(0.3))),
    "batchnorm": lambda: stack(lambda: Block(nn.BatchNorm1d(WIDTH))),
    "transformer layers": lambda: stack(
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.1)
    ),
    "other generators": lambda: stack(lambda: Block(Noise())),
    "codebook": lambda: stack(lambda: Block(Codebook())),
    "attributes": lambda: stack(lambda: Block(Counting())),
    "spectral norm": lambda: stack(lambda: Block(wrap=parametrizations.spectral_norm)),
    "convolutions": images,
}


def batch_for(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (16, 3, 24, 24) if name == "convolutions" else (ROWS, 10)
    return torch.randn(shape, generator=generator)
