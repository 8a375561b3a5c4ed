"""Memory that an optimizer will need, held back until its first real step.

Most optimizers build their state in the first ``step()``, so a size found for the first batch is
too large for the second. State is never stepped into being: that would leave AdamW at step 1 and
change training. Instead a copy of the optimizer steps on fake tensors, which have shapes but no
data, and placeholders of the sizes that its state took are held on the device.
"""

import contextlib
import copy
import logging
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from automicro.memory import active_budget
from automicro.memory.counting import CountingMode
from automicro.shards import local
from automicro.torch_private import FakeTensorMode, forget_step_hooks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMemory:
    """What an optimizer's first step allocates.

    Attributes:
        state_bytes: bytes of each state tensor that stays.
        temporary_bytes: the most that lives beside the state during the step.
    """

    state_bytes: list[int] = field(default_factory=list)
    temporary_bytes: int = 0


class OptimizerReservation:
    """Placeholders for the state that an optimizer has yet to build. A part of the transaction.

    They are held through the attempts and given back right before the optimizer's step; a step
    that a gradient scaler leaves out gives nothing back. The step's temporaries never live beside
    activations, so they are not held: `prepare` shows that there is room for them once the
    activations are gone.

    Parameters that had no gradient at the last step get no state from it. Nothing is held for them
    until an attempt has given them a gradient.

    Args:
        optimizer: None where there is nothing to reserve for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._placeholders: list[Tensor] = []
        self._held_for: set[int] = set()
        self._stateless: list[nn.Parameter] = []
        self._idle: dict[int, nn.Parameter] = {}
        self._needed = StepMemory()
        self._needed_for: list[int] = []
        if optimizer is not None:
            this = weakref.ref(self)  # the hook must not keep the placeholders' owner alive

            def give_back(*_: Any) -> None:
                if (reservation := this()) is not None:
                    reservation.roll_back()
                    reservation._find_idle()

            optimizer.register_step_pre_hook(give_back)

    @property
    def reserved_bytes(self) -> int:
        """What the placeholders hold now."""
        return sum(placeholder.nbytes for placeholder in self._placeholders)

    @property
    def upcoming_bytes(self) -> list[int]:
        """Of each tensor of state that is still to be built, as predicted by the last `begin`."""
        self._find_stateless()
        is_current = self._needed_for == [id(parameter) for parameter in self._waiting()]
        return self._needed.state_bytes if is_current else []

    def begin(self) -> None:
        self._find_stateless()
        self._hold_for(self._waiting())

    def prepare(self) -> None:
        """Show that the step's temporaries fit beside parameters, gradients and state."""
        gained = [each for each in self._idle.values() if each.grad is not None]
        for parameter in gained:
            del self._idle[id(parameter)]  # from now on it is expected to gain one
        self._hold_for(gained)
        if self._placeholders:
            _hold(self._needed.temporary_bytes, self._placeholders[0].device)

    def commit(self) -> None:
        """Hold on until the optimizer steps."""

    def roll_back(self) -> None:
        self._placeholders = []
        self._held_for.clear()

    def _hold_for(self, parameters: Sequence[nn.Parameter]) -> None:
        new = [each for each in parameters if id(each) not in self._held_for]
        if self._optimizer is None or not new:
            return
        if self._needed_for != [id(parameter) for parameter in new]:
            self._needed_for = [id(parameter) for parameter in new]
            self._needed = predict_step_memory(self._optimizer, new)
        for num_bytes in self._needed.state_bytes:
            self._placeholders.append(_hold(num_bytes, new[0].device))
        self._held_for.update(map(id, new))

    def _find_idle(self) -> None:
        assert self._optimizer is not None
        self._idle = {
            id(parameter): parameter
            for parameter in self._stateless
            if parameter.grad is None and parameter not in self._optimizer.state
        }

    def _waiting(self) -> list[nn.Parameter]:
        """The parameters whose state the next step is expected to build."""
        return [each for each in self._stateless if id(each) not in self._idle]

    def _find_stateless(self) -> None:
        if self._optimizer is None:
            return
        self._stateless = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter not in self._optimizer.state
        ]


def predict_step_memory(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> StepMemory:
    """What the first step of some parameters of an optimizer will allocate on their device.

    A dry run on fake tensors. Optimizers that read values back (Adafactor, ASGD) are run on
    zeros on the host instead, one parameter at a time.

    Example:
        >>> model = nn.Linear(256, 128, bias=False)
        >>> adam = torch.optim.Adam(model.parameters())
        >>> needed = predict_step_memory(adam, list(model.parameters()))
        >>> sorted(needed.state_bytes)[1:]
        [131072, 131072]
    """
    budget = active_budget()
    with contextlib.nullcontext() if budget is None else budget.host():  # stand-ins do not count
        return _predict(optimizer, parameters)


def _predict(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> StepMemory:
    try:
        with FakeTensorMode(), torch.random.fork_rng(devices=[]):
            return _dry_run(optimizer, parameters)
    except Exception as error:
        logger.debug("the optimizer cannot step on fake tensors (%s); using zeros", error)
    try:
        with torch.random.fork_rng(devices=[]):
            each = [_dry_run(optimizer, [parameter]) for parameter in parameters]
    except Exception as error:
        logger.warning(
            "cannot predict what %s will allocate in its first step (%s: %s), so no memory is "
            "reserved for it; the second batch may need a smaller microbatch than the first",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        return StepMemory()
    return StepMemory(
        [num_bytes for one in each for num_bytes in one.state_bytes],
        max((one.temporary_bytes for one in each), default=0),
    )


def _dry_run(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> StepMemory:
    """Let a copy of the optimizer step stand-ins of the parameters, and count."""
    wanted = {id(parameter) for parameter in parameters}
    # A copy that shares nothing it writes to. Of a subclass's attributes torch's optimizers give
    # copy.copy none. Schedulers patch `step` on the instance.
    copied = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        copies = isinstance(value, list | dict | set)
        vars(copied)[name] = copy.copy(value) if copies else value
    vars(copied).pop("step", None)
    copied.state = defaultdict(dict)
    forget_step_hooks(copied)
    copied.param_groups = [_stand_in(group, wanted) for group in optimizer.param_groups]
    counter = CountingMode(None)
    tensors = [tensor for group in copied.param_groups for tensor in group["params"]]
    tensors += [tensor.grad for tensor in tensors]
    counter.ledger.see(tensors, [])
    resident_bytes = counter.ledger.allocated_bytes
    with counter:
        copied.step()
    state = [
        value.nbytes
        for values in copied.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    kept_bytes = counter.ledger.allocated_bytes - resident_bytes
    return StepMemory(state, max(counter.peak_bytes - resident_bytes - kept_bytes, 0))


def _stand_in(group: dict[str, Any], wanted: set[int]) -> dict[str, Any]:
    stand_ins = []
    for parameter in group["params"]:
        if id(parameter) in wanted:
            value = torch.zeros(local(parameter).shape, dtype=parameter.dtype)
            stand_ins.append(nn.Parameter(value, requires_grad=parameter.requires_grad))
            stand_ins[-1].grad = torch.zeros_like(value)
    changes: dict[str, Any] = {"params": stand_ins}
    on_accelerator = any(parameter.device.type != "cpu" for parameter in group["params"])
    if on_accelerator and group.get("foreach", False) is None and not group.get("fused"):
        changes["foreach"] = True  # what torch takes by default on an accelerator
    return {**group, **changes}


def _hold(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
