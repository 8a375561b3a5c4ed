"""The way of a batch to the device, and its protection from the forward.

A retry must see the same batch as the first attempt, so a forward never gets the batch itself:

- containers are rebuilt, and arrays copied, for every microbatch (see `on_device`);
- tensors are new tensors on the same memory, so that only their values can be changed. If
  microbatches are views of the batch, they are copied until one committed attempt has shown by
  content that the model does not write into its input; afterwards tensor versions are checked;
- opaque objects are copied if a copy is equivalent; of other objects, the versions of the tensors
  inside are checked.
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
from automicro.memory.device import active_budget, copies_overlap
from automicro.torch_private import all_versions
from automicro.values import same_content


def on_host() -> contextlib.AbstractContextManager[None]:
    """Exclude work on the batch before it moves from the count of a `MemoryBudget`."""
    budget = active_budget()
    return contextlib.nullcontext() if budget is None else budget.host()


def on_device(microbatches: Sequence[Any], device: torch.device, *, isolate: bool) -> Iterator[Any]:
    """Yield each microbatch on the device, no earlier than needed."""
    # Containers are rebuilt, arrays copied, and tensors replaced, possibly on the same memory, so
    # that the batch keeps all that a forward removes, replaces or marks. From pinned host memory,
    # a side stream copies the next microbatch during the work on this one. A `MemoryBudget` acts as
    # a separate device on the CPU, and models the copy to it.
    budget = active_budget() if device.type == "cpu" else None
    late = _LateCopies(device) if _is_pinned(microbatches, device) else None
    copies: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if budget is not None:
            return budget.transfer(tensor)
        if tensor.device == device:
            return _copied(tensor)
        if late is not None and late.takes(tensor):
            return late.copy(tensor)
        return tensor.to(device, non_blocking=True)

    def moved(tensor: Tensor) -> Tensor:
        if budget is None and tensor.device == device and not isolate:
            return tensor if tensor.requires_grad else tensor.detach()  # `alias` inlined for speed
        # Other tensors may have no address, and empty ones share one.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return copy(tensor)
        # Tensors that share memory in the batch, such as inputs that are their own targets, share a
        # copy. They stay two tensors, because compiled code depends on their identity.
        memory = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        # Views of one memory can still differ in the sign of their numbers, and in gradients.
        place = (*memory, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
        if place in copies:
            return alias(copies[place])
        copies[place] = copied = copy(tensor)
        return copied

    def bring(microbatch: Any) -> Any:
        brought = map_tensors(microbatch, moved, isolate=True)
        # Per microbatch, because an address of freed memory can be reused for other content.
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
                late.start()  # runs during the work on the current one, which starts next
            yield current
            # Otherwise this frame would hold it while the next one is computed.
            del current
    finally:
        late.join()  # before its memory is reused, even if the copy is no longer needed


_ALIGNMENT = 64  # bytes, of each allocation of torch


def _copied(tensor: Tensor) -> Tensor:
    """Copy a tensor, to memory that is aligned as its own."""
    # Kernels round in another order if rows begin elsewhere. Only the first batches are copied, so
    # later ones, or those of a resumed run, would have other bits.
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    is_changed = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.requires_grad
    start = 0
    if is_plain and not is_changed:
        start = tensor.data_ptr() % _ALIGNMENT // tensor.itemsize
    if start == 0:
        return tensor.clone()
    strides = torch.empty_like(tensor, device="meta").stride()
    memory = tensor.new_empty(start + tensor.numel())
    return memory.as_strided(tensor.shape, strides, start).copy_(tensor)


def _is_pinned(microbatches: Sequence[Any], device: torch.device) -> bool:
    if device.type == "cpu" or not copies_overlap(device):
        return False
    first = [tensor for _, tensor in tensor_leaves(microbatches[0])]
    return bool(first) and all(tensor.is_pinned() for tensor in first)


class _LateCopies:
    """Copies from pinned host memory on a separate stream, in parallel with computation."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._side = side_stream(device)
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can be copied late; other tensors are copied on the computing stream."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return is_plain and not tensor.requires_grad and tensor.is_pinned()

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the tensor that holds the copy after `start` and `join`."""
        # The memory belongs to the computing stream, so the use by the side stream needs no record:
        # the side stream starts after all work enqueued so far, and the computing stream waits for
        # it before it reads the memory, and before it frees it.
        target = torch.empty_like(tensor, device=self._device)
        self._waiting.append((target, tensor))
        return target

    def start(self) -> None:
        """Start all copies."""
        # Work that was enqueued earlier may still read the target memory.
        self._side.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._side):
            for target, source in self._waiting:
                target.copy_(source, non_blocking=True)
        self._waiting.clear()

    def join(self) -> None:
        """Make all work enqueued from now on wait for the copies."""
        self._module.current_stream(self._device).wait_stream(self._side)


def alias(tensor: Tensor) -> Tensor:
    """Return another tensor on the same memory, or the tensor itself if it requires a gradient.

    >>> batch = torch.zeros(2)
    >>> alias(batch).requires_grad_().requires_grad, batch.requires_grad
    (True, False)
    """
    # Writes to its values change the original and its version; `requires_grad_()` and assignments
    # to `.data` do not affect the original.
    return tensor if tensor.requires_grad else tensor.detach()


@functools.cache
def side_stream(device: torch.device) -> Any:
    """Return the one stream for copies to a device, because a device has few streams."""
    return torch.get_device_module(device).Stream(device=device)


logger = logging.getLogger(__name__)


def cost_of_row(contents: Contents, num_rows: int) -> float:
    """Return the elements of one row, on average, which its activations grow with.

    >>> cost_of_row(Contents([torch.zeros(4, 10), torch.zeros(4)]), 4)
    11.0
    >>> cost_of_row(Contents(["four", "text", "rows", ""]), 4), cost_of_row(Contents([""]), 1)
    (3.0, 1.0)
    """
    # Characters of a text count as elements. A batch without any known element costs 1 per row.
    return contents.num_elements / num_rows or 1.0


class InputGuard:
    """The knowledge whether a model writes into its input."""

    def __init__(self) -> None:
        self.writes: bool | None = None  # None: not yet known


class InputWatch:
    """The protected batches of one step. A part of the transaction.

    Attributes:
        isolate: whether microbatches must be copies of the batch.
        requiring_grad: the leaf tensors of the batch that require a gradient.
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
                if leaf.is_inference():  # inference tensors have no version
                    unwatchable = True
                else:
                    self._leaves.append(leaf)
                if leaf.requires_grad and leaf.is_leaf:
                    self.requiring_grad.append(leaf)
            for tensor in batch.inner_tensors:
                if not tensor.is_inference():
                    self._inner.append(tensor)
        # A budget models the copy to its device, so nothing on it aliases the batch.
        may_be_written = aliases and (guard.writes is not False or unwatchable)
        self.isolate = may_be_written and active_budget() is None

    @property
    def compares(self) -> bool:
        """Whether the content of copies still has to be checked."""
        return self.isolate and self._guard.writes is None

    def compare(self, given: Sequence[Tensor], used: Sequence[Tensor]) -> None:
        """Record whether the backward left a microbatch different from the slice it copied."""
        self._wrote |= not all(map(same_content, given, used))

    def begin(self) -> None:
        self._versions = self._current_versions()
        self._inner_versions = all_versions(self._inner) if self._inner else []

    def prepare(self) -> None:
        """Do nothing, because nothing can fail."""

    def commit(self) -> None:
        if self.compares:
            self._guard.writes = self._wrote
            if self._wrote:
                logger.info("the model writes into its input, so it gets copies of the batch")
        elif self._current_versions() != self._versions:
            self._guard.writes = True
            logger.warning("automicro: the model wrote into its batch; from now on it gets copies")

    def roll_back(self) -> None:
        self._wrote = False
        if self._inner_versions and all_versions(self._inner) != self._inner_versions:
            raise RollbackError(
                "the model wrote into a tensor inside an opaque object of the batch, so this batch "
                "cannot be tried again; clone the tensor in the forward before changing it, or use "
                "register_batch_type"
            )
        if self._versions and self._current_versions() != self._versions:
            self._guard.writes = True
            raise RollbackError(
                "the model wrote into its input, but not in earlier batches, so this batch cannot "
                "be tried again; clone the input in the forward before changing it"
            )

    def _current_versions(self) -> list[int]:
        # If forwards get copies, they cannot write into the batch itself.
        return [] if self.isolate else all_versions(self._leaves)
