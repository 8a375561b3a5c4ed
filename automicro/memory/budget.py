"""Simulated device of any size on the CPU."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from automicro.errors import add_note
from automicro.memory.device import (
    NO_COUNTS,
    ability,
    entered,
    read_counts,
    share_of,
    tensors_in,
    total_bytes,
)
from automicro.torch_private_execution import is_compiled
from automicro.units import format_bytes, parse_bytes, parse_share

GRANULE = 512  # bytes; CUDA's allocator rounds to multiples of this


def rounded(num_bytes: int) -> int:
    """Return the bytes that a device allocates for a request."""
    return -(-num_bytes // GRANULE) * GRANULE


def refuse_compiled(module: nn.Module) -> None:
    """Refuse a module that is compiled or has a compiled part."""
    # A memory budget intercepts operations with a dispatch mode, and under any dispatch mode torch
    # silently runs compiled code as if it were not compiled.
    names = [name for name, part in module.named_modules() if is_compiled(part)]
    if names:
        shown = ", ".join(name or type(module).__name__ for name in names[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(
            f"a simulated memory budget silently switches torch.compile off, and these modules "
            f"are compiled: {shown}{more}. Leave out either the memory limit or torch.compile"
        )


T = TypeVar("T")


class MemoryBudget:
    """A device of limited memory, simulated on the CPU.

    While a budget is entered, it checks every operation of this thread: forward, backward and
    optimizer. It counts the bytes of live tensors on the CPU, each storage once and rounded up to
    512 bytes. An operation that would exceed the limit raises ``torch.OutOfMemoryError``, as a
    device would. With the limit ``None`` it only measures.

    Tensors that exist before are counted when an operation first uses them, or by `track`. Host and
    device are the same here, so `host`, `from_host` and `transfer` mark tensors that are on the
    host.

    Other threads are not counted, because a dispatch mode belongs to one thread and the count has
    no lock. Workspaces inside kernels are not counted either; the true peak of a convolution is
    about an eighth higher. The same applies to NumPy arrays until torch uses them, storages resized
    outside torch, and opaque tensors of oneDNN.

    An operation is checked only after it has run. If it is refused, its new tensors are dropped and
    the statistics of a BatchNorm are restored, but a tensor enlarged by ``out=`` or ``resize_``
    stays enlarged, and counted.

    Args:
        limit: a number of bytes, text such as ``"512MiB"``, or ``None`` to only measure.

    Raises:
        TypeError: ``limit`` is neither text nor a number.
        ValueError: ``limit`` cannot be parsed.

    >>> budget = MemoryBudget("1MiB")
    >>> with budget:
    ...     x = torch.zeros(1000)
    >>> budget.allocated_bytes
    4096
    >>> with budget:
    ...     torch.zeros(1000, 1000)
    Traceback (most recent call last):
    torch.OutOfMemoryError: Simulated device out of memory. Tried to allocate 3.81 MiB. The budget
    has a total capacity of 1.00 MiB of which 1020.00 KiB is free. ...
    """

    def __init__(self, limit: str | int | float | None) -> None:
        # Imported here, because only budgets need the ledger, which imports this module.
        from automicro.memory.ledger import CountingMode

        self._mode = CountingMode(None if limit is None else parse_bytes(limit))

    @property
    def limit_bytes(self) -> int | None:
        """The size of the device, or None if the budget only measures."""
        return self._mode.limit_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live tensors on the device."""
        return self._mode.ledger.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak memory of live tensors since the start or the last `reset_peak`."""
        return self._mode.peak_bytes

    @property
    def num_ooms(self) -> int:
        """Number of refused operations."""
        return self._mode.num_ooms

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""
        self._mode.reset_peak()

    @property
    def lap_peak_bytes(self) -> int:
        """Peak memory of live tensors since the last `begin_lap`."""
        return self._mode.lap_peak_bytes

    def begin_lap(self) -> None:
        """Start measuring the peak of a part of the run, without changing `peak_bytes`."""
        self._mode.begin_lap()

    def __enter__(self) -> Self:
        """Start counting on this thread. Entering the same budget again has no effect.

        Raises:
            ValueError: this thread has entered another budget.
        """
        if entered.budget is None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            entered.budget = self
        # A second mode on the same thread would count each operation twice.
        elif entered.budget is not self:
            raise ValueError(
                f"cannot enter {self!r} inside {entered.budget!r}: one thread simulates one "
                f"device, so leave the outer budget first, or enter that one in both places"
            )
        entered.depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop counting when the outermost entry ends."""
        assert entered.budget is self
        entered.depth -= 1
        if entered.depth == 0:
            entered.budget = None
            self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def track(self, *residents: object) -> Self:
        """Count objects that are on the device before any operation uses them.

        Args:
            residents: modules (parameters, gradients, buffers), optimizers (their state), tensors,
                and mappings, lists or tuples of these.

        Raises:
            TypeError: an object of another type was given.
            ValueError: a module is compiled.
            torch.OutOfMemoryError: the objects do not fit; none of them is counted then.

        >>> model = nn.Linear(16, 16)
        >>> MemoryBudget("1MiB").track(model).allocated_bytes
        1536
        """
        changes: list[Any] = []
        try:
            # All or none, because a partly counted model would be of no use.
            for tensor in tensors_of(residents):
                self._mode.ledger.place(tensor, changes, on_host=False)
        except BaseException:
            self._mode.ledger.undo(changes)
            raise
        self._mode.admit(changes)
        return self

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """Treat tensors made or first used inside as being on the host: they are not counted.

        >>> with MemoryBudget("1KiB") as budget, budget.host():
        ...     batch = torch.zeros(1000, 1000)
        >>> budget.allocated_bytes
        0
        """
        with self._mode.ledger.placing(on_host=True):
            yield

    def from_host(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, treated as being on the host: they are not counted.

        >>> with MemoryBudget("1KiB") as budget:
        ...     for batch in budget.from_host(torch.zeros(1000) for _ in range(3)):
        ...         print(budget.allocated_bytes, end=" ")
        0 0 0
        """
        with self.host():
            batches = iter(loader)
        end = object()
        while True:
            with self.host():
                # Only the loader's own work is on the host, not the code between two batches.
                batch = next(batches, end)
            if batch is end:
                return
            # Outside `host`, because tensors that the caller makes from a batch are on the device.
            yield cast(T, batch)

    def transfer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from the host to the device, as ``tensor.to(device)`` would.

        The argument, and all tensors that share its storage, are treated as being on the host from
        now on. The copy has the same strides, is on the device, and is differentiable if the
        argument is.

        Raises:
            torch.OutOfMemoryError: the copy does not fit.

        >>> batch = torch.zeros(512)
        >>> with MemoryBudget("1MiB") as budget:
        ...     moved = budget.transfer(batch)
        >>> budget.allocated_bytes, moved.data_ptr() == batch.data_ptr()
        (2048, False)
        """
        ledger = self._mode.ledger
        ledger.place(tensor, [], on_host=True)
        with self, ledger.placing(on_host=False):
            # Other layouts have no memory format.
            if tensor.layout is torch.strided and not tensor.is_nested:
                return tensor.clone(memory_format=torch.preserve_format)
            return tensor.clone()

    def __repr__(self) -> str:
        limit_bytes = self._mode.limit_bytes
        limit = None if limit_bytes is None else format_bytes(limit_bytes)
        return f"MemoryBudget({limit!r})"


def tensors_of(residents: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules, optimizers, tensors and containers of these."""
    for resident in residents:
        if isinstance(resident, torch.Tensor):
            yield resident
        elif isinstance(resident, nn.Module):
            refuse_compiled(resident)
            yield from resident.parameters()
            # Gradients of an earlier batch exist when the next one begins.
            yield from (p.grad for p in resident.parameters() if p.grad is not None)
            yield from resident.buffers()
        elif isinstance(resident, torch.optim.Optimizer):
            yield from tensors_in(resident.state)
        elif isinstance(resident, Mapping):
            yield from tensors_of(resident.values())
        elif isinstance(resident, list | tuple):
            yield from tensors_of(resident)
        else:
            raise TypeError(
                f"a budget cannot track {resident!r} of type {type(resident).__name__}: give "
                f"modules, optimizers or tensors"
            )


def limit_memory(
    limit: str | int | float, device: torch.device | str
) -> contextlib.AbstractContextManager[MemoryBudget | None]:
    """Return a context in which a device has at most a limit of memory.

    >>> with limit_memory("1MiB", "cpu") as budget:
    ...     budget.limit_bytes
    1048576
    """
    # On an accelerator, the limit is the share that torch's allocator may take, including its
    # cache. It also helps with drivers that use host memory instead of failing.
    device = torch.device(device)
    num_bytes = limit_bytes(limit, device)
    if device.type == "cpu":
        return MemoryBudget(num_bytes)
    total = total_bytes(device)
    has_limits = ability(device, "set_per_process_memory_fraction") is not None
    if total is None or not has_limits or read_counts(device) is NO_COUNTS:
        raise ValueError(
            f"cannot limit the memory of {device} to {format_bytes(num_bytes)}: only a CPU "
            "(simulated) and devices like CUDA with torch's own allocator can be limited. Leave "
            "the limit out, or use one of these"
        )
    if num_bytes > total:
        raise ValueError(
            f"the limit of {format_bytes(num_bytes)} exceeds the {format_bytes(total)} of "
            f"{device}: give at most that, or leave the limit out"
        )
    return _limited(num_bytes / total, device)


def limit_bytes(limit: str | int | float, device: torch.device | str) -> int:
    """Return a memory limit in bytes; shares refer to the total memory of the device."""
    device, share = torch.device(device), parse_share(limit)
    if share is None:
        return parse_bytes(limit)
    total = None if device.type == "cpu" else total_bytes(device)
    if total is None:
        raise ValueError(
            f"memory_limit={limit!r} is a share of a device's memory, but {device} has no "
            "memory of its own. Give bytes, such as '24MiB'"
        )
    return int(share * total)


@contextlib.contextmanager
def _limited(fraction: float, device: torch.device) -> Iterator[None]:
    module = torch.get_device_module(device)
    before = share_of(device)
    # By index, or None: torch 2.11 does not limit a device without an index.
    module.set_per_process_memory_fraction(fraction, device.index)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(before, device.index)


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
