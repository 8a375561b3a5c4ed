"""Memory that a device holds at any microbatch size, to explain why no size fits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from automicro.memory.budget import limit_bytes, rounded, tensors_of
from automicro.memory.device import OccupiedDevice, active_budget
from automicro.sharding import local
from automicro.torch_private import is_uninitialized
from automicro.units import format_bytes


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


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    # By id, because tied parameters exist once, and == would compare elements.
    return list({id(tensor): tensor for tensor in tensors}.values())


def _count(tensors: Iterable[Tensor], *, least_itemsize: int = 0) -> int:
    # Not nbytes, which sparse tensors lack.
    known = (local(each) for each in tensors if not is_uninitialized(each))
    return sum(rounded(each.numel() * max(each.itemsize, least_itemsize)) for each in known)


def measure(
    occupied: OccupiedDevice,
    *,
    training: bool,
    upcoming_bytes: Sequence[int] = (),
    shared_inputs: Sequence[Tensor] = (),
) -> ResidentMemory:
    """Sum the memory that is needed at any microbatch size.

    >>> import torch
    >>> occupied = OccupiedDevice(torch.device("cpu"), [torch.nn.Linear(16, 16)], None)
    >>> measure(occupied, training=True).gradients
    1536
    """
    device = occupied.device
    parameters = _distinct(p for module in occupied.modules for p in module.parameters())
    buffers = _distinct(b for module in occupied.modules for b in module.buffers())
    there = gradients = _count([each.grad for each in parameters if each.grad is not None])
    if training:
        gradients = _count(
            [parameter for parameter in parameters if parameter.requires_grad],
            least_itemsize=4 if occupied.sums_in_float32 else 0,
        )
    state = _distinct(tensors_of([] if occupied.optimizer is None else [occupied.optimizer]))
    # Step counts and other numbers of an optimizer might be on the host.
    on_device = [each for each in state if each.device.type == device.type]
    limit = None
    if device.type == "cpu" and (budget := active_budget()) is not None:
        limit = budget.limit_bytes
    elif occupied.memory_limit is not None:
        limit = limit_bytes(occupied.memory_limit, device)
    return ResidentMemory(
        parameters=_count(parameters),
        gradients=gradients,
        earlier_gradients=there if training else 0,
        optimizer_state=_count(on_device) + sum(map(rounded, upcoming_bytes)),
        buffers=_count(buffers),
        shared_inputs=_count(shared_inputs),
        limit=limit,
    )
