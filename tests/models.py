"""Small models and batches, shared by the tests of exactness.

Eleven rows leave a remainder at every size except one and eleven.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.outside import Unreached

ROWS = 11
CLASSES = 5
VOCABULARY = 13
LENGTH = 7
IGNORED = -100
IMAGE = (3, 6, 6)
CLASS_WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0], dtype=torch.float64)


# Models


class Mlp(nn.Sequential):
    """Maps rows of six numbers to five logits."""

    def __init__(self, inputs: int = 6, outputs: int = CLASSES) -> None:
        super().__init__(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))
        self.double()


def norm_model() -> nn.Sequential:
    """A model with BatchNorm, which depends on the whole batch."""
    return nn.Sequential(nn.BatchNorm1d(6), Mlp()).double()


class Encoder(nn.Module):
    """A transformer that gives logits per token, optionally with tied weights."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layer(self.embedding(tokens)))


class Memory(nn.Module):
    """A model that runs out of memory with too many rows, or in chosen calls."""

    seen = Unreached()

    def __init__(self, net: nn.Module, *, most: int = ROWS, fails: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.net, self.most, self.fails = net, most, fails
        self.seen = []

    def forward(self, inputs: Tensor) -> Any:
        self.seen.append(len(inputs))
        outputs = self.net(inputs)
        if len(inputs) > self.most or len(self.seen) in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return outputs


class ComposerStyle(nn.Module):
    """A model with Composer's interface, without Composer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs


# Batches


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(*shape: int, high: int = CLASSES, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator)


def x() -> Tensor:
    return numbers(ROWS, 6)


def y() -> Tensor:
    return classes(ROWS)


def pair(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return x()[:rows], y()[:rows]


def with_ignored(targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return the targets with some ignored: more in later rows, and all in the last row."""
    share = torch.linspace(0, 0.9, len(targets)).reshape(-1, *[1] * (targets.dim() - 1))
    generator = torch.Generator().manual_seed(2)
    out = targets.masked_fill(torch.rand(targets.shape, generator=generator) < share, ignored)
    out[-1] = ignored
    return out


def tokens() -> Tensor:
    return classes(ROWS, LENGTH, high=VOCABULARY)


def token_targets() -> Tensor:
    return with_ignored(classes(ROWS, LENGTH, high=VOCABULARY, seed=3))
