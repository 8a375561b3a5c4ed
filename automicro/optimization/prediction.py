"""What an optimizer will allocate in its first step, from a step of a copy on stand-ins."""

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from automicro.errors import describe_error
from automicro.memory import active_budget
from automicro.memory.counting import CountingMode
from automicro.optimization.once import WriteWatch
from automicro.optimization.replica import Replica, UncopyableError, classes_kept
from automicro.shards import local
from automicro.torch_private import FakeTensorMode, without_global_step_hooks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMemory:
    """What an optimizer's first step allocates.

    Attributes:
        state_bytes: bytes of each state tensor that stays.
        temporary_bytes: the most that lives beside the state during the step.
        unknown: why nothing could be predicted; None where it was.
    """

    state_bytes: list[int] = field(default_factory=list)
    temporary_bytes: int = 0
    unknown: str | None = None


def predict_step_memory(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> StepMemory:
    """What the first step of some parameters of an optimizer will allocate on their device.

    A real copy of the optimizer steps, on fake tensors, which have shapes but no data. Optimizers
    that read values back (Adafactor, ASGD) are run on zeros on the host instead, one parameter at
    a time. Nothing of the original moves, and no hook or scheduler hears of it: where that cannot
    be had, nothing is run, and `StepMemory.unknown` says why.

    Example:
        >>> model = nn.Linear(256, 128, bias=False)
        >>> adam = torch.optim.Adam(model.parameters())
        >>> needed = predict_step_memory(adam, list(model.parameters()))
        >>> sorted(needed.state_bytes)[1:]
        [131072, 131072]
    """
    budget = active_budget()
    with contextlib.ExitStack() as stack:
        if budget is not None:  # stand-ins do not count
            stack.enter_context(budget.host())
        stack.enter_context(_undisturbed())
        stack.enter_context(classes_kept(optimizer))
        return _predict(optimizer, parameters)


def _predict(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> StepMemory:
    try:
        with FakeTensorMode():
            return _dry_run(optimizer, parameters, others=_zeros, keeps=_zeros)
    except UncopyableError as error:
        return StepMemory(unknown=str(error))
    except Exception as error:
        logger.debug(
            "the optimizer cannot step on fake tensors (%s); using zeros", describe_error(error)
        )
    try:
        each = [
            _dry_run(optimizer, [parameter], others=None, keeps=_only_a_number)
            for parameter in parameters
        ]
    except UncopyableError as error:
        return StepMemory(unknown=str(error))
    except Exception as error:
        return StepMemory(unknown=describe_error(error))
    return StepMemory(
        [num_bytes for one in each for num_bytes in one.state_bytes],
        max((one.temporary_bytes for one in each), default=0),
    )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave random numbers and hooks as they are."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), without_global_step_hooks():
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _dry_run(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    *,
    others: Callable[[Tensor], Tensor] | None,
    keeps: Callable[[Tensor], Tensor],
) -> StepMemory:
    """Let a copy of the optimizer step stand-ins of the parameters, and count.

    Args:
        optimizer: stays as it is.
        parameters: that have a gradient in the step.
        others: stand-ins for the other parameters; None where the copy goes without those.
        keeps: stand-ins for tensors in attributes and options of the optimizer.
    """
    wanted = {id(parameter) for parameter in parameters}
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    counter = CountingMode(None)
    with _OwnTensorsOnly():
        stand_ins: dict[int, Tensor] = {}
        for parameter in everything:
            if id(parameter) in wanted:
                value = nn.Parameter(_zeros(parameter), requires_grad=parameter.requires_grad)
                value.grad = torch.zeros_like(value)
                stand_ins[id(parameter)] = value
            elif others is not None:
                value = nn.Parameter(others(parameter), requires_grad=parameter.requires_grad)
                stand_ins[id(parameter)] = value
            else:
                stand_ins[id(parameter)] = parameter  # only to be left out
        copied = Replica(stand_ins, keeps).of(optimizer)
        left_out = {id(each) for each in everything}
        for group, given in zip(copied.param_groups, optimizer.param_groups, strict=True):
            group["params"] = [each for each in group["params"] if id(each) not in left_out]
            group.update(_options(given))
        resident = [each for each in stand_ins.values() if id(each) not in left_out]
        counter.ledger.see([*resident, *(each.grad for each in resident)], [])
        resident_bytes = counter.ledger.allocated_bytes
        with counter:
            copied.step()
    state = [tensor.nbytes for tensor in _tensors_in(list(copied.state.values()), set())]
    kept_bytes = counter.ledger.allocated_bytes - resident_bytes
    return StepMemory(state, max(counter.peak_bytes - resident_bytes - kept_bytes, 0))


class _OwnTensorsOnly(WriteWatch):
    """Lets nothing be written that was not made inside: whatever was overlooked cannot move."""

    def on_first_write(self, func: Any) -> None:
        self.has_written = False
        raise UncopyableError(f"its step writes ({func}) to a tensor that it does not hold itself")


def _zeros(tensor: Tensor) -> Tensor:
    part = local(tensor)
    return torch.zeros(part.shape, dtype=part.dtype)


def _only_a_number(tensor: Tensor) -> Tensor:
    if tensor.numel() > 1:
        raise UncopyableError("it keeps tensors in attributes, and reads values while it steps")
    return _zeros(tensor)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group's options is another one for stand-ins, which lie on the host."""
    changes: dict[str, Any] = {}
    is_capturable = bool(group.get("capturable"))
    has_tensor_rate = isinstance(group.get("lr"), Tensor)
    if is_capturable:  # refused there; the state is the same
        changes["capturable"] = False
        if has_tensor_rate:  # as well; reading it would wait for the device
            changes["lr"] = 0.0
    on_accelerator = any(parameter.device.type != "cpu" for parameter in group["params"])
    on_accelerator &= is_capturable or not has_tensor_rate  # torch takes the loop then
    if on_accelerator and group.get("foreach", False) is None and not group.get("fused"):
        changes["foreach"] = True  # what torch takes by default on an accelerator
    return changes


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each, seen)
