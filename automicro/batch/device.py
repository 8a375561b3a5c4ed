"""A batch on its way to the device, and kept as it was.

A retry must see what the first attempt saw. What a forward gets is never the batch itself:

- containers are new ones, and arrays copies, for every microbatch (see `on_device`);
- tensors are other tensors on the same memory, so that only their values can be written to. Where
  microbatches are views of the batch, they are copied until one committed attempt has shown by
  content that the model leaves its input alone; after that tensor versions are watched;
- objects that nothing tells how to open are copied where a copy is as good; of others the tensors
  in them are watched by their versions.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.batch.tensors import Contents, map_tensors, tensor_leaves
from automicro.errors import RollbackError
from automicro.memory.budget import active_budget
from automicro.memory.device import copies_overlap
from automicro.torch_private import all_versions
from automicro.values import same_content


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
    """
    budget = active_budget() if device.type == "cpu" else None
    late = _LateCopies(device) if _is_pinned(microbatches, device) else None
    copies: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if budget is not None:
            return budget.transfer(tensor)
        if tensor.device == device:
            return tensor.clone()
        if late is not None and late.takes(tensor):
            return late.copy(tensor)
        return tensor.to(device, non_blocking=True)

    def moved(tensor: Tensor) -> Tensor:
        if budget is None and tensor.device == device and not isolate:
            return tensor if tensor.requires_grad else tensor.detach()  # as `alias`, quickly
        # Others may have no address, and empty tensors share one.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return copy(tensor)
        # Inputs that are their own targets are written to as one, as they are without a copy. They
        # are two tensors in any case: compiled code asks whether they are one.
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place in copies:
            return alias(copies[place])
        copies[place] = copied = copy(tensor)
        return copied

    def bring(microbatch: Any) -> Any:
        brought = map_tensors(microbatch, moved, isolate=True)
        # Per microbatch: an address of freed memory may come again with other content.
        copies.clear()
        return brought

    if late is None:
        for microbatch in microbatches:
            yield bring(microbatch)
        return
    try:
        # One microbatch ahead, never more, so that at most two lie on the device.
        upcoming = [bring(microbatches[0])]
        late.start()
        for following in [*microbatches[1:], None]:
            late.join()
            current = upcoming.pop()
            if following is not None:
                upcoming.append(bring(following))
                late.start()  # beside the work on the current one, which comes next
            yield current
            # Else this frame would hold it while the next one is computed.
            del current
    finally:
        late.join()  # the next user of this memory waits for a copy that is not wanted any more


def _is_pinned(microbatches: Sequence[Any], device: torch.device) -> bool:
    if device.type == "cpu" or not copies_overlap(device):
        return False
    first = [tensor for _, tensor in tensor_leaves(microbatches[0])]
    return bool(first) and all(tensor.is_pinned() for tensor in first)


class _LateCopies:
    """Copies from pinned host memory that run on a stream of their own, side by side with work."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._side = side_stream(device)
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor's copy can be late; others are copied where the work is."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return is_plain and not tensor.requires_grad and tensor.is_pinned()

    def copy(self, tensor: Tensor) -> Tensor:
        """Where a tensor will be, after `start` and `join`."""
        # Memory of the stream that computes, so no record of the side stream's use is needed. The
        # side stream begins after all that was enqueued until now. The computing stream waits for
        # it before it reads, and before it forgets.
        target = torch.empty_like(tensor, device=self._device)
        self._waiting.append((target, tensor))
        return target

    def start(self) -> None:
        """Begin all copies."""
        # The memory that is copied to may still be read by work enqueued before.
        self._side.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._side):
            for target, source in self._waiting:
                target.copy_(source, non_blocking=True)
        self._waiting.clear()

    def join(self) -> None:
        """Let what is enqueued from now on wait for the copies."""
        self._module.current_stream(self._device).wait_stream(self._side)


def alias(tensor: Tensor) -> Tensor:
    """Another tensor on the same memory; one that gathers a gradient is handed on as it is.

    What is written to it is seen, also by the version of the first; what is asked of it
    (``requires_grad_()``) or swapped (``.data``) is not.

    >>> batch = torch.zeros(2)
    >>> alias(batch).requires_grad_().requires_grad, batch.requires_grad
    (True, False)
    """
    return tensor if tensor.requires_grad else tensor.detach()


@functools.cache
def side_stream(device: torch.device) -> Any:
    """The stream for copies to a device: always one, because a device has only so many."""
    return torch.get_device_module(device).Stream(device=device)


logger = logging.getLogger(__name__)


def cost_of_row(contents: Contents, num_rows: int) -> float:
    """Elements of one row of a batch, on average; what its activations grow with.

    Characters of a text are elements, too. A batch of which nothing is known costs 1 a row.

    >>> cost_of_row(Contents([torch.zeros(4, 10), torch.zeros(4)]), 4)
    11.0
    >>> cost_of_row(Contents(["four", "text", "rows", ""]), 4), cost_of_row(Contents([""]), 1)
    (3.0, 1.0)
    """
    return contents.num_elements / num_rows or 1.0


class InputGuard:
    """Knowledge about a model: whether it writes into its input."""

    def __init__(self) -> None:
        self.writes: bool | None = None  # None: not known yet


class InputWatch:
    """The batches of one step, guarded. A part of the transaction.

    Attributes:
        isolate: whether microbatches must be copies of the batch.
        requiring_grad: the tensors of the batch that gather a gradient of their own.
    """

    def __init__(
        self, guard: InputGuard, batches: Sequence[Contents], device: torch.device
    ) -> None:
        self._guard = guard
        self._leaves: list[Tensor] = []
        self._versions: list[int] = []
        self._inner_versions: list[int] = []
        self._wrote = False
        self.requiring_grad: list[Tensor] = []
        aliases = unwatchable = False
        self._inner: list[Tensor] = []
        for batch in batches:
            for leaf in batch.tensors:
                aliases |= leaf.device == device
                if leaf.is_inference():  # it has no version
                    unwatchable = True
                else:
                    self._leaves.append(leaf)
                if leaf.requires_grad and leaf.is_leaf:
                    self.requiring_grad.append(leaf)
            for tensor in batch.inner_tensors:
                if not tensor.is_inference():
                    self._inner.append(tensor)
        # A budget models the copy to its device, so there nothing aliases the batch.
        may_be_written = aliases and (guard.writes is not False or unwatchable)
        self.isolate = may_be_written and active_budget() is None

    @property
    def compares(self) -> bool:
        """Whether the copies' contents are still of interest."""
        return self.isolate and self._guard.writes is None

    def compare(self, given: Sequence[Tensor], used: Sequence[Tensor]) -> None:
        """Note whether a microbatch differs, after its backward, from the slice it copied."""
        self._wrote |= not all(map(same_content, given, used))

    def begin(self) -> None:
        self._versions = self._current_versions()
        self._inner_versions = all_versions(self._inner) if self._inner else []

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        if self.compares:
            self._guard.writes = self._wrote
            if self._wrote:
                logger.info("the model writes into its input: it gets copies, the batch is kept")
        elif self._current_versions() != self._versions:
            self._guard.writes = True
            logger.warning("automicro: the model wrote into its batch; from now on it gets copies")

    def roll_back(self) -> None:
        self._wrote = False
        if self._inner_versions and all_versions(self._inner) != self._inner_versions:
            raise RollbackError(
                "the model wrote into a tensor that lies in an object of the batch "
                "that cannot be opened, so this batch cannot be tried again; clone the tensor in "
                "the forward before changing it, or use register_batch_type"
            )
        if self._versions and self._current_versions() != self._versions:
            self._guard.writes = True
            raise RollbackError(
                "the model wrote into its input, which earlier batches had not shown, so this "
                "batch cannot be tried again; clone the input in the forward before changing it"
            )

    def _current_versions(self) -> list[int]:
        # Where forwards get copies, nothing is written to the batch itself.
        return [] if self.isolate else all_versions(self._leaves)
