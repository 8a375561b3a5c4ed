"""Running out of memory inside ``optimizer.step()``: once more, or a named error; never twice."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from automicro import OptimizerStepError
from automicro.optimizer.step import step_optimizer
from tests.torture.engine.faults import Boom, Fault, FaultMode
from tests.torture.engine.subject import freeze

CPU = torch.device("cpu")


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"foreach": False}),
    ("AdamW", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"weight_decay": 0.1, "foreach": False}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
    ("Adagrad", {}),
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


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    return freeze([list(parameters_of(optimizer)), optimizer.state_dict()["state"]])


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_a_step_is_applied_once_or_said_to_be_half_applied(
    name: str, options: dict[str, Any], steps: int
) -> None:
    clean = prepared(name, options, steps)
    with FaultMode() as mode:
        step_optimizer(clean, CPU)
    expected = state_of(clean)
    recovered = 0
    for fault in (Fault(i, after) for i in range(mode.num_operations) for after in (False, True)):
        optimizer = prepared(name, options, steps)
        with FaultMode([fault]), contextlib.suppress(OptimizerStepError):
            step_optimizer(optimizer, CPU)
            recovered += 1
            assert state_of(optimizer) == expected, fault
    has_state = steps > 0 and options != {"weight_decay": 0.1, "foreach": False}
    assert (recovered > 0) == (not has_state and name != "Adagrad")


def test_list_operations_inside_a_budget_are_not_applied_twice() -> None:
    # There they do not touch tensor versions, so versions would say that nothing happened.
    optimizer = prepared("Adam", {"foreach": True}, 0)
    with FaultMode() as mode:
        step_optimizer(prepared("Adam", {"foreach": True}, 0), CPU)
    update = next(i for i, name in enumerate(mode.names) if "_foreach_addcdiv_" in name)
    with FaultMode([Fault(update, after=True)]), pytest.raises(OptimizerStepError):
        step_optimizer(optimizer, CPU)


def test_memory_that_runs_out_twice_before_anything_is_applied_says_so() -> None:
    optimizer = prepared("AdamW", {}, 0)
    before = state_of(optimizer)
    plan = [Fault(index) for index in range(3, 60)]
    with FaultMode(plan), pytest.raises(OptimizerStepError, match="nothing was applied"):
        step_optimizer(optimizer, CPU)
    assert state_of(optimizer) == before
    step_optimizer(optimizer, CPU)  # no half-built state is in the way


class Own(torch.optim.SGD):
    """Nobody knows what a class of somebody else does before it writes."""

    def step(self, closure: Any = None) -> Any:
        for parameter in parameters_of(self):
            assert parameter.grad is not None
            parameter.detach().numpy()[:] -= parameter.grad.numpy()
            parameter.grad + 1


def test_a_class_that_is_not_of_torch_is_not_tried_again() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Own([parameter], lr=0.1)
    with FaultMode() as mode:
        step_optimizer(optimizer, CPU)
    addition = mode.names.index("aten.add.Tensor")
    with FaultMode([Fault(addition)]), pytest.raises(OptimizerStepError, match="half applied"):
        step_optimizer(optimizer, CPU)
    assert parameter.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("kind", ["boom", "interrupt"])
def test_other_errors_pass_through(kind: str) -> None:
    optimizer = prepared("SGD", {"momentum": 0.9}, 0)
    with FaultMode([Fault(1, kind=kind)]) as mode, pytest.raises((Boom, KeyboardInterrupt)) as it:
        step_optimizer(optimizer, CPU)
    assert it.value is mode.foreign[0]
