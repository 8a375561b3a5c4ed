"""Models of repeated blocks, a step at a level, and its results."""

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from automicro.memory.budget import MemoryBudget
from automicro.savers.levels import Level, make_levels

CPU = torch.device("cpu")
LEVELS = ("recompute", "offload", "recompute + offload")
WIDTH, ROWS = 64, 400


class Block(nn.Module):
    def __init__(self, between: Any = None, *, wrap: Any = None):
        super().__init__()
        self.between = nn.Identity() if between is None else between
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if wrap is not None:
            self.up = wrap(self.up)

    def forward(self, rows):
        return rows + self.down(torch.relu(self.up(self.between(rows))))


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = np.random.default_rng(3)

    def forward(self, rows):
        return rows * (1 + random.random() + np.random.random() + self.own.random())


class Codebook(nn.Module):
    table: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(300, WIDTH))

    def forward(self, rows):
        found = self.table[torch.cdist(rows, self.table).argmin(1)]
        with torch.no_grad():
            self.table.lerp_(rows.mean(0).expand_as(self.table), 0.1)
        return rows + 0.1 * (found - rows)


class Counting(nn.Module):
    last: Tensor

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.state = 0, list[float](), torch.zeros(WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, rows):
        self.calls += 1
        self.seen.append(float(rows.detach().mean()))
        shift = self.calls + len(self.seen) + self.state + self.last
        self.state, self.last = rows.detach().mean(0), rows.detach().std(0)
        return torch.sin(rows * shift)


def stack(make: Any, depth: int = 4) -> Any:
    torch.manual_seed(0)
    blocks = [make() for _ in range(depth)]
    return nn.Sequential(nn.Linear(10, WIDTH), *blocks, nn.Linear(WIDTH, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: stack(Block),
    "dropout": lambda: stack(lambda: Block(nn.Dropout(0.3))),
    "batchnorm": lambda: stack(lambda: Block(nn.BatchNorm1d(WIDTH))),
    "other generators": lambda: stack(lambda: Block(Noise())),
    "codebook": lambda: stack(lambda: Block(Codebook())),
    "attributes": lambda: stack(lambda: Block(Counting())),
    "spectral norm": lambda: stack(lambda: Block(wrap=parametrizations.spectral_norm)),
}


def batch() -> Tensor:
    return torch.randn(ROWS, 10, generator=torch.Generator().manual_seed(5))


def mean_square(model: Any) -> Any:
    return model(batch()).double().square().mean()


class StepResults(NamedTuple):
    losses: list[Any]
    gradients: dict[str, Any]
    buffers: dict[str, Any]
    generators: list[Any]
    peak_bytes: int

    def differences(self, other: "StepResults") -> list[str]:
        """Return the names of results that are not bit-identical."""
        found = ["losses"] * (not all(map(_is_same, self.losses, other.losses)))
        for mine, theirs in ((self.gradients, other.gradients), (self.buffers, other.buffers)):
            assert mine.keys() == theirs.keys()
            found += [name for name, each in mine.items() if not _is_same(each, theirs[name])]
        return found + ["generators"] * (self.generators != other.generators)


def _is_same(one, other):
    if one is None or other is None:
        return one is other
    return torch.equal(*(torch.as_tensor(each).to_dense() for each in (one, other)))


def seed_all():
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)


def results_of(model: nn.Module, losses: Any, peak_bytes: int) -> StepResults:
    draws = [torch.rand(3).tolist(), random.random(), np.random.random()]
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return StepResults(losses, gradients, dict(model.named_buffers()), draws, peak_bytes)


def level_of(name: str, model: nn.Module, when: Any = "auto", **options: Any) -> Level:
    levels = make_levels(when, [model], CPU, **options)
    return next(level for level in levels if level.name == name)


def take_step(
    model: nn.Module, loss_of: Any, level: Level, *, microbatches: int = 2
) -> StepResults:
    """Run forward and backward of some microbatches under a budget without a limit."""
    seed_all()
    losses, flags = [], [(each, each.requires_grad) for each in model.parameters()]
    with MemoryBudget(None).track(model) as budget, level.applied():
        for _ in range(microbatches):
            loss = loss_of(model)
            loss.backward()
            losses.append(loss.detach())
            del loss
    for (before, is_trained), now in zip(flags, model.parameters(), strict=True):
        assert before is now
        assert now.requires_grad is is_trained
    return results_of(model, losses, budget.peak_bytes)


def steps_at(name: str, model: nn.Module, loss_of: Any) -> tuple[StepResults, StepResults]:
    """Run the same step on two copies of a model: at level 0, and at the named level."""
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    return take_step(one, loss_of, Level()), take_step(other, loss_of, level_of(name, other))
