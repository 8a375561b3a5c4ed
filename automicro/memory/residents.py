"""Memory that a device holds at any microbatch size, and its share of the limit."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from automicro.errors import add_note
from automicro.memory.budget import MemoryBudget, active_budget, rounded, tensors_of
from automicro.memory.device import limit_bytes, limit_memory
from automicro.sharding import local
from automicro.torch_private import is_uninitialized
from automicro.units import format_bytes

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class ResidentMemory:
    """Bytes that are needed at any microbatch size.

    >>> memory = ResidentMemory(parameters=2048, gradients=2048, buffers=0, limit=4096)
    >>> str(memory), memory.leaves_nothing
    ('parameters 2.00 KiB, gradients 2.00 KiB', True)
    """

    parameters: int
    gradients: int = 0  # in training, of every parameter that requires one
    earlier_gradients: int = 0  # in training, gradients that exist in addition to these
    optimizer_state: int = 0  # existing state, plus the state that the first step will add
    buffers: int = 0
    shared_inputs: int = 0  # parts of the batch that every microbatch receives whole
    limit: int | None = None  # of the device; None if unknown

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by description."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "gradients of earlier batches": self.earlier_gradients,
            "optimizer state": self.optimizer_state,
            "buffers": self.buffers,
            "shared parts of the batch": self.shared_inputs,
        }

    @property
    def total(self) -> int:
        """The sum in bytes."""
        return sum(self.parts.values())

    @property
    def leaves_nothing(self) -> bool:
        """Whether the device is full, so that not even one row can be computed."""
        return self.limit is not None and self.total >= self.limit

    def __str__(self) -> str:
        parts = self.parts.items()
        return ", ".join(f"{name} {format_bytes(held)}" for name, held in parts if held)


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


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    # By id, because tied parameters exist once, and == would compare elements.
    return list({id(tensor): tensor for tensor in tensors}.values())


def _count(tensors: Iterable[Tensor], *, least_itemsize: int = 0) -> int:
    # Not nbytes, which sparse tensors lack.
    known = (local(each) for each in tensors if not is_uninitialized(each))
    return sum(rounded(each.numel() * max(each.itemsize, least_itemsize)) for each in known)


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
    ) -> ResidentMemory:
        """Sum the memory that is needed at any microbatch size."""
        parameters = _distinct(p for module in self._modules for p in module.parameters())
        buffers = _distinct(b for module in self._modules for b in module.buffers())
        there = gradients = _count([each.grad for each in parameters if each.grad is not None])
        if training:
            gradients = _count(
                [parameter for parameter in parameters if parameter.requires_grad],
                least_itemsize=4 if self._sums_in_float32 else 0,
            )
        state = _distinct(tensors_of([] if self._optimizer is None else [self._optimizer]))
        # Step counts and other numbers of an optimizer might be on the host.
        on_device = [each for each in state if each.device.type == self._device.type]
        limit = None
        if self._device.type == "cpu" and (budget := active_budget()) is not None:
            limit = budget.limit_bytes
        elif self._memory_limit is not None:
            limit = limit_bytes(self._memory_limit, self._device)
        return ResidentMemory(
            parameters=_count(parameters),
            gradients=gradients,
            earlier_gradients=there if training else 0,
            optimizer_state=_count(on_device) + sum(map(rounded, upcoming_bytes)),
            buffers=_count(buffers),
            shared_inputs=_count(shared_inputs),
            limit=limit,
        )
