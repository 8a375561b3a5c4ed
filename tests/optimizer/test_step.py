"""Out-of-memory errors inside ``optimizer.step()`` are named, and the step is not repeated."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from automicro import OptimizerStepError
from automicro.optimizer.step import step_optimizer
from tests.torture.engine.faults import Boom, Fault, FaultMode

CPU = torch.device("cpu")


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"foreach": False}),
    ("AdamW", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("SGD", {"momentum": 0.9}),
]


def prepared(name: str, options: dict[str, Any], steps: int) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
        [{"params": [each]} for each in parameters], lr=0.1, **options
    )
    for _ in range(steps):
        give_gradients(optimizer)
        optimizer.step()
    give_gradients(optimizer)
    return optimizer


def give_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.randn(3)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_step_oom_raises_named_error_and_is_not_retried(
    name: str, options: dict[str, Any], steps: int
) -> None:
    optimizer = prepared(name, options, steps)
    with FaultMode() as clean:
        step_optimizer(optimizer, CPU)
    for index in range(clean.num_operations):
        for after in (False, True):
            optimizer = prepared(name, options, steps)
            begun: list[int] = []
            optimizer.register_step_pre_hook(lambda *_, begun=begun: begun.append(1))
            with (
                FaultMode([Fault(index, after)]),
                pytest.raises(OptimizerStepError, match=rf"^{name}\.step\(\) .*half applied"),
            ):
                step_optimizer(optimizer, CPU)
            assert len(begun) <= 1


@pytest.mark.parametrize("kind", ["boom", "interrupt"])
def test_other_errors_are_propagated(kind: str) -> None:
    optimizer = prepared("SGD", {"momentum": 0.9}, 0)
    with FaultMode([Fault(1, kind=kind)]) as mode, pytest.raises((Boom, KeyboardInterrupt)) as it:
        step_optimizer(optimizer, CPU)
    assert it.value is mode.foreign[0]
