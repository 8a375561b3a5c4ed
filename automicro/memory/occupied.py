"""A device under a limit, with what occupies it at any microbatch size."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from automicro.memory.budget import MemoryBudget, active_budget
from automicro.memory.device import limit_memory
from automicro.memory.residents import ResidentMemory, measure_residents, track_residents


class OccupiedDevice:
    """A device on which modules and an optimizer's state lie.

    Args:
        device: where they lie.
        modules: everything that takes part.
        optimizer: whose state lies there; None for none.
        memory_limit: what `limit_memory` takes; None for all that there is.
        sums_in_float32: whether gradients of parameters in bf16 or fp16 add up in float32.

    Raises:
        TypeError, ValueError: what cannot be a limit.

    >>> occupied = OccupiedDevice(torch.device("cpu"), [nn.Linear(16, 16)], None, "1MiB")
    >>> with occupied.limited():
    ...     active_budget().allocated_bytes
    1536
    """

    def __init__(
        self,
        device: torch.device,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        memory_limit: str | int | float | None,
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
            self._budget = limit if isinstance(limit, MemoryBudget) else None

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """The limit, entered, with everything that lies on the device counted.

        Raises:
            torch.OutOfMemoryError: that alone exceeds the limit.
        """
        if self._memory_limit is None and active_budget() is None:
            return contextlib.nullcontext()
        return self._limited()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._budget is not None:
                stack.enter_context(self._budget)
            elif self._memory_limit is not None:
                stack.enter_context(limit_memory(self._memory_limit, self._device))
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
    ) -> ResidentMemory:
        """What lies there at any microbatch size; see `measure_residents`."""
        return measure_residents(
            self._modules,
            self._optimizer,
            self._device,
            training=training,
            upcoming_bytes=upcoming_bytes,
            shared_inputs=shared_inputs,
            memory_limit=self._memory_limit,
            sums_in_float32=self._sums_in_float32,
        )
