"""From the optimization batch on the host to microbatches on the device."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.memory import active_budget
from automicro.slicing import map_tensors, tensor_leaves


def on_host() -> contextlib.AbstractContextManager[None]:
    """Work on the batch before it moves: a `MemoryBudget` does not count it."""
    budget = active_budget()
    return contextlib.nullcontext() if budget is None else budget.host()


def on_device(microbatches: Sequence[Any], device: torch.device, *, isolate: bool) -> Iterator[Any]:
    """Yield each microbatch on the device, no earlier than needed.

    Containers are new ones, arrays copies, and tensors others than those of the batch, be it on
    the same memory: what a forward takes out, replaces or marks stays in the batch as it was.

    From pinned host memory, the next microbatch's copy overlaps with the work on this one, on a
    side stream. A `MemoryBudget` on the CPU is a device of its own: there the copy is modelled.

    Args:
        microbatches: views of one batch, wherever it lies.
        device: where the model computes.
        isolate: copy also what is on the device already, so that a model that writes into its
            input does not write into the batch.
    """
    budget = active_budget() if device.type == "cpu" else None
    if device.type == "cuda":
        first = [tensor for _, tensor in tensor_leaves(microbatches[0])]
        if first and all(tensor.is_pinned() for tensor in first):
            yield from _prefetched(microbatches, device)
            return

    copies: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if budget is not None:
            return budget.transfer(tensor)
        if tensor.device != device:
            return tensor.to(device, non_blocking=True)
        return tensor.clone()

    def moved(tensor: Tensor) -> Tensor:
        if budget is None and tensor.device == device and not isolate:
            return alias(tensor)
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return copy(tensor)
        # Inputs that are their own targets are written to as one, as they are without a copy. They
        # are two tensors in any case: compiled code asks whether they are one.
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place in copies:
            return alias(copies[place])
        copies[place] = copied = copy(tensor)
        return copied

    for microbatch in microbatches:
        yield map_tensors(microbatch, moved, isolate=True)
        copies.clear()


def alias(tensor: Tensor) -> Tensor:
    """Another tensor on the same memory; one that gathers a gradient is handed on as it is.

    What is written to it is seen, also by the version of the first; what is asked of it
    (``requires_grad_()``) or swapped (``.data``) is not.

    >>> batch = torch.zeros(2)
    >>> alias(batch).requires_grad_().requires_grad, batch.requires_grad
    (True, False)
    """
    return tensor if tensor.requires_grad else tensor.detach()


def _prefetched(microbatches: Sequence[Any], device: torch.device) -> Iterator[Any]:
    side = _side_stream(device)

    def copy(microbatch: Any) -> Any:
        with torch.cuda.stream(side):
            return map_tensors(
                microbatch, lambda tensor: tensor.to(device, non_blocking=True), isolate=True
            )

    def hand_over(tensor: Tensor) -> Tensor:
        # The allocator must not reuse this memory for the side stream while it is being read.
        tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    upcoming = copy(microbatches[0])
    for following in [*microbatches[1:], None]:
        torch.cuda.current_stream(device).wait_stream(side)
        current = map_tensors(upcoming, hand_over)
        upcoming = None if following is None else copy(following)
        yield current


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies to a device: always one, because each keeps a memory pool of its own.

    A stream per batch would leave the memory of its inputs cached in up to 32 pools.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
