"""A step at a level, and its results: loss, gradients, buffers, generators."""

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from automicro.memory.budget import MemoryBudget
from automicro.savers.levels import Level, make_levels

CPU = torch.device("cpu")
LEVELS = ("recompute", "offload", "recompute + offload")


class StepResults(NamedTuple):
    """The results of a step."""

    loss: Tensor
    gradients: list[Tensor | None]
    buffers: list[Tensor]
    generators: list[Any]
    peak_bytes: int


def level_of(name: str, model: nn.Module, **options: Any) -> Level:
    given = options.pop("when_too_large", "auto")
    levels = make_levels(given, [model], CPU, **options)
    return next(level for level in levels if level.name == name)


def take_step(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], level: Level, *, microbatches: int = 2
) -> StepResults:
    """Run forward and backward of some microbatches under a budget without a limit."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    total = torch.zeros((), dtype=torch.float64)
    with MemoryBudget(None).track(model) as budget, level.applied():
        for _ in range(microbatches):
            loss = loss_of(model)
            loss.backward()
            total += loss.detach()
            del loss
    generators = [torch.get_rng_state(), random.getstate(), np.random.random()]
    gradients = [parameter.grad for parameter in model.parameters()]
    return StepResults(total, gradients, list(model.buffers()), generators, budget.peak_bytes)


def steps_at(
    name: str, model: nn.Module, loss_of: Callable[[nn.Module], Tensor], **options: Any
) -> tuple[StepResults, StepResults]:
    """Run the same step on two copies of a model: at level 0, and at the named level."""
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    plain = take_step(one, loss_of, Level())
    return plain, take_step(other, loss_of, level_of(name, other, **options))


def differences(one: StepResults, other: StepResults) -> list[str]:
    """Return the names of results that are not bit-identical."""
    pairs: dict[str, list[tuple[Any, Any]]] = {
        "loss": [(one.loss, other.loss)],
        "gradients": list(zip(one.gradients, other.gradients, strict=True)),
        "buffers": list(zip(one.buffers, other.buffers, strict=True)),
        "torch's generator": [(one.generators[0], other.generators[0])],
    }
    found = [name for name, each in pairs.items() if not all(_is_same(*pair) for pair in each)]
    return found + ["others"] * (one.generators[1:] != other.generators[1:])


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
