"""Trainers with callbacks, and callbacks that take notes."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from automicro import Trainer
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.policy.policy import Outcome, Policy
from automicro.step.results import StepResult
from tests.trainer.runs import make_loader, make_model, make_trainer


class Sizes(Callback):
    """Notes the microbatch size and the running out of memory of every batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ooms: list[int] = []

    def batch_end(self, run: Run, result: StepResult) -> None:
        self.sizes.append(result.microbatch_size)
        self.ooms.append(result.ooms)


class Scripted(Policy):
    """A policy that takes one given size after the other."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = deque(sizes)  # no list: a script is nothing learned, to be kept

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return min(self._sizes[0], num_rows)

    def record(self, outcome: Outcome) -> None:
        assert outcome.fits
        del self._sizes[0]


class Weights(Callback):
    """Notes the model's weights after each batch."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def batch_end(self, run: Run, result: StepResult) -> None:
        self.steps.append(copy_of(run.model))


class Logged(Callback):
    """Notes what there is to log at the start of the next batch, or at the end."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def batch_end(self, run: Run, result: StepResult) -> None:
        self.values.append(dict(run.values))


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


class Unfreezing(Callback):
    """Trains modules, by name, only from a batch on."""

    def __init__(self, since: Mapping[str, int]) -> None:
        self._since = since

    def batch_start(self, run: Run, batch: Any) -> None:
        for name, number in self._since.items():
            run.model.get_submodule(name).requires_grad_(run.state.batch >= number)


def trainer_with(*callbacks: Callback, model: nn.Module | None = None, **options: Any) -> Trainer:
    """A trainer of four batches of 16 rows per epoch."""
    loader = options.pop("train_dataloader", None) or make_loader(rows=64, batch_size=16)
    return make_trainer(model or make_model(), loader, callbacks=list(callbacks), **options)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
