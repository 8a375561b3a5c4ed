"""Memory that an optimizer will need, held back until its first real step.

Most optimizers build their state in the first ``step()``, so a size found for the first batch is
too large for the second. State is never stepped into being: that would leave AdamW at step 1 and
change training. Instead it is predicted, and placeholders of the sizes that it will take are held
on the device.
"""

import logging
import operator
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from automicro.optimization.prediction import StepMemory, predict_step_memory
from automicro.torch_private import calls_step_hooks

logger = logging.getLogger(__name__)

_WANTS = operator.attrgetter("requires_grad")


class OptimizerReservation:
    """Placeholders for the state that an optimizer has yet to build. A part of the transaction.

    They are held through the attempts and given back right before the optimizer's step; a step
    that a gradient scaler leaves out gives nothing back. The step's temporaries never live beside
    activations, so they are not held: `prepare` shows that there is room for them once the
    activations are gone.

    Parameters that had no gradient at the last step get no state from it. Nothing is held for them
    until an attempt has given them a gradient.

    Args:
        optimizer: the one that builds the state, inside of any wrapper; None where there is
            nothing to reserve for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and not calls_step_hooks(optimizer):
            # Nobody would say when to give the memory back.
            _say_unknown(optimizer, "its step calls no hooks")
            optimizer = None
        self._optimizer = optimizer
        self._has_said = False
        self._placeholders: list[Tensor] = []
        self._held_for: set[int] = set()
        self._stateless: list[nn.Parameter] = []
        self._idle: dict[int, nn.Parameter] = {}
        self._stepped: set[int] = set()  # with a gradient
        self._needed = StepMemory()
        self._needed_for: list[int] = []
        self._settled: tuple[list[object], list[bool]] | None = None  # while nothing is needed
        if optimizer is not None:
            this = weakref.ref(self)  # the hook must not keep the placeholders' owner alive

            def give_back(*_: Any) -> None:
                if (reservation := this()) is not None:
                    reservation.roll_back()
                    if reservation._settled is None:
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
        if self._optimizer is None or self._is_settled():
            return
        self._find_stateless()
        self._hold_for(self._waiting())
        if not self._idle and not self._placeholders:
            self._settled = self._parameters_and_state()

    def _is_settled(self) -> bool:
        """Whether nothing was needed, and the optimizer has the parameters and states of then."""
        if self._settled is None:
            return False
        (known, wanting), (now, wants) = self._settled, self._parameters_and_state()
        is_same = len(known) == len(now) and all(map(operator.is_, known, now)) and wanting == wants
        if not is_same:
            self._settled = None
        return is_same

    def _parameters_and_state(self) -> tuple[list[object], list[bool]]:
        assert self._optimizer is not None
        groups = [group["params"] for group in self._optimizer.param_groups]
        parameters = list(chain.from_iterable(groups))
        return [*parameters, None, *self._optimizer.state], list(map(_WANTS, parameters))

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
            if self._needed.unknown is not None and not self._has_said:
                self._has_said = True
                _say_unknown(self._optimizer, self._needed.unknown)
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
        self._stepped.update(id(each) for each in self._stateless if each.grad is not None)

    def _waiting(self) -> list[nn.Parameter]:
        """The parameters whose state the next step is expected to build."""
        return [each for each in self._stateless if id(each) not in self._idle]

    def _find_stateless(self) -> None:
        if self._optimizer is None:
            return
        state = self._optimizer.state
        # Some keep their state by other keys, or for some parameters only.
        built = self._stepped if state else set()
        self._stateless = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter not in state and id(parameter) not in built
        ]


def _say_unknown(optimizer: torch.optim.Optimizer, why: str) -> None:
    logger.warning(
        "cannot predict what %s will allocate in its first step (%s), so no memory is reserved for "
        "it; the second batch may need a smaller microbatch than the first",
        type(optimizer).__name__,
        why,
    )


def _hold(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
