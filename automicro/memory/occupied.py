"""The memory limit of a step, within which everything on the device counts."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automicro.errors import add_note
from automicro.memory.budget import MemoryBudget, active_budget
from automicro.memory.device import limit_bytes, limit_memory

if TYPE_CHECKING:
    from automicro.memory.residents import ResidentMemory

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def track_residents(budget: MemoryBudget, residents: Iterable[object]) -> None:
    """Count residents in a budget, with a note to the error if they alone exceed it."""
    try:
        budget.track(*(each for each in residents if each is not None))
    except torch.OutOfMemoryError as error:
        add_note(
            error,
            "automicro: the model and the optimizer's state alone exceed the limit; raise "
            "memory_limit (or that of the MemoryBudget), or train a smaller model",
        )
        raise


class OccupiedDevice:
    """A device with modules and an optimizer's state.

    >>> occupied = OccupiedDevice(torch.device("cpu"), [nn.Linear(16, 16)], None, "1MiB")
    >>> with occupied.limited():
    ...     active_budget().allocated_bytes
    1536
    >>> occupied.measure(training=True).gradients
    1536
    """

    def __init__(
        self,
        device: torch.device,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        memory_limit: str | int | float | None = None,
        *,
        sums_in_float32: bool = False,
    ) -> None:
        self._device = device
        self._modules = modules
        self._optimizer = optimizer
        self._memory_limit = memory_limit
        self._sums_in_float32 = sums_in_float32
        self._budget: MemoryBudget | None = None
        if memory_limit is not None:
            limit = limit_memory(memory_limit, device)
            # A simulated device and its counts persist from step to step.
            self._budget = limit if isinstance(limit, MemoryBudget) else None

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with the limit, in which everything on the device is counted."""
        # A settled step without a limit enters no context.
        if self._memory_limit is None and active_budget() is None:
            return _NOTHING
        return self._limited()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._memory_limit is not None:
                # An accelerator is limited only during a step, because other code uses it in
                # between.
                stack.enter_context(self._budget or limit_memory(self._memory_limit, self._device))
            budget = active_budget()
            if budget is not None:
                track_residents(budget, [*self._modules, self._optimizer])
            yield

    def measure(
        self,
        *,
        training: bool,
        upcoming_bytes: Sequence[int] = (),
        shared_inputs: Sequence[Tensor] = (),
    ) -> "ResidentMemory":
        """Sum the memory that is needed at any microbatch size."""
        from automicro.memory.residents import ResidentMemory

        limit = None
        if self._device.type == "cpu" and (budget := active_budget()) is not None:
            limit = budget.limit_bytes
        elif self._memory_limit is not None:
            limit = limit_bytes(self._memory_limit, self._device)
        return ResidentMemory.of(
            self._modules,
            self._optimizer,
            self._device,
            least_itemsize=4 if self._sums_in_float32 else 0,
            training=training,
            upcoming_bytes=upcoming_bytes,
            shared_inputs=shared_inputs,
            limit=limit,
        )
