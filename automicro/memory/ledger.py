"""Live storages on a simulated device, and the dispatch mode that tracks them.

Storages are counted instead of tensors, because views share a storage, which lives as long as
anything refers to it, including autograd's saved tensors. Each is held by a weak reference, so that
counting keeps nothing alive.

Forward, backward, recomputation and the optimizer all pass through the mode, one ATen operation at
a time. It works with real and with fake tensors.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from automicro.memory.budget import rounded
from automicro.torch_private import plain_parts
from automicro.torch_private_execution import OperationMode, schema_of
from automicro.units import format_bytes

# Compared by exact type: ``isinstance`` with Tensor costs three times as much, and this runs for
# each argument of each operation.
_SCALARS = frozenset(
    (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
)
_SEQUENCES = frozenset((list, tuple))


class Entry(weakref.ref[torch.UntypedStorage]):
    """A live storage: its key, its size when last seen, and the bytes that count."""

    __slots__ = ("counted_bytes", "key", "on_host", "storage_bytes")

    key: int
    storage_bytes: int
    counted_bytes: int
    on_host: bool


class Change(NamedTuple):
    """A storage that started to count or changed its size, and the bytes it counted before."""

    entry: Entry
    before_bytes: int


class StorageLedger:
    """Counts the bytes of the live storages that it has seen.

    >>> ledger, changes = StorageLedger(), []
    >>> x = torch.ones(1024)
    >>> ledger.see([x, x[:3]], changes)
    >>> ledger.allocated_bytes
    4096
    >>> changes.clear()
    >>> del x
    >>> ledger.allocated_bytes
    0
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._new_on_host = False
        self._live: dict[int, Entry] = {}
        self._forget = self._make_forget()

    def _make_forget(self) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        # A bound method would create a cycle of ledger, entry and callback.
        weak_self = weakref.ref(self)

        def forget(entry: weakref.ref[torch.UntypedStorage]) -> None:
            ledger = weak_self()
            assert isinstance(entry, Entry)
            # A newer storage might already have the same id.
            if ledger is not None and ledger._live.get(entry.key) is entry:
                ledger._drop(entry)

        return forget

    def _drop(self, entry: Entry) -> None:
        """Remove a storage that no longer exists."""
        del self._live[entry.key]
        self.allocated_bytes -= entry.counted_bytes

    def see(self, values: Iterable[object], changes: list[Change]) -> None:
        """Count new or resized tensors, also in lists and mappings, and append the changes."""
        for value in values:
            kind = type(value)
            if kind is torch.Tensor or kind is Parameter:
                self._see_tensor(value, changes)  # type: ignore[arg-type]
            elif kind in _SCALARS:
                continue
            elif kind in _SEQUENCES:
                self.see(value, changes)  # type: ignore[arg-type]
            elif kind is dict:
                self.see(value.values(), changes)  # type: ignore[attr-defined]
            elif isinstance(value, torch.Tensor):
                for part in plain_parts(value):
                    self._see_tensor(part, changes)
            elif isinstance(value, list | tuple):
                self.see(value, changes)
            elif isinstance(value, Mapping):
                self.see(value.values(), changes)

    def _see_tensor(self, tensor: torch.Tensor, changes: list[Change]) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            # Sparse tensors and wrappers have no storage.
            for part in plain_parts(tensor):
                if part is not tensor:
                    self._see_tensor(part, changes)
            return
        storage_bytes = storage.nbytes()
        entry = self._live.get(id(storage))
        if entry is None:
            if storage_bytes:
                self._enter(storage, storage_bytes, self._lies_on_host(tensor), changes)
        elif entry.storage_bytes != storage_bytes:
            entry.storage_bytes = storage_bytes
            self._recount(entry, changes)

    def _lies_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a new tensor is on the host; the CPU stands for the device."""
        return self._new_on_host or tensor.device.type != "cpu"

    def _enter(
        self,
        storage: torch.UntypedStorage,
        storage_bytes: int,
        on_host: bool,
        changes: list[Change],
    ) -> None:
        entry = Entry(storage, self._forget)
        entry.key = id(storage)
        entry.storage_bytes = storage_bytes
        entry.on_host = on_host
        entry.counted_bytes = 0
        self._live[entry.key] = entry
        self._recount(entry, changes)

    def _recount(self, entry: Entry, changes: list[Change]) -> None:
        before = entry.counted_bytes
        counted = 0 if entry.on_host else rounded(entry.storage_bytes)
        if counted != before:
            entry.counted_bytes = counted
            self.allocated_bytes += counted - before
            changes.append(Change(entry, before))

    def undo(self, changes: list[Change]) -> None:
        """Restore the counts from before the changes, and forget storages that were new."""
        # In reverse order, because a storage might have changed several times.
        for entry, before_bytes in reversed(changes):
            self.allocated_bytes -= entry.counted_bytes - before_bytes
            entry.counted_bytes = before_bytes
            if before_bytes == 0:
                self._live.pop(entry.key, None)
            else:
                entry.storage_bytes = -1  # checked again when next seen
        changes.clear()

    def place(self, tensor: torch.Tensor, changes: list[Change], *, on_host: bool) -> None:
        """Set whether a tensor's storage is on the host, overriding earlier information."""
        with self.placing(on_host=on_host):
            self.see((tensor,), changes)
        for part in plain_parts(tensor):
            with contextlib.suppress(NotImplementedError):
                entry = self._live.get(id(part.untyped_storage()))
                if entry is not None and entry.on_host != on_host:
                    entry.on_host = on_host
                    self._recount(entry, changes)

    @contextlib.contextmanager
    def placing(self, *, on_host: bool) -> Iterator[None]:
        """Treat storages first seen inside as being on the host, or on the device."""
        before, self._new_on_host = self._new_on_host, on_host
        try:
            yield
        finally:
            self._new_on_host = before


# It changes the running statistics (arguments 3 and 4) without declaring it.
_UNDECLARED_WRITES = {
    torch.ops.aten.native_batch_norm.default: ((3, "running_mean"), (4, "running_var"))
}


class CountingMode(OperationMode):
    """Counts the memory of a simulated device while it is entered."""

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.ledger = StorageLedger()
        self.peak_bytes = 0
        self.lap_peak_bytes = 0
        self.num_ooms = 0

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and refuse it if its memory does not fit."""
        ledger = self.ledger
        changes: list[Change] = []
        # Arguments first: existing tensors are admitted or refused before the operation has any
        # effect.
        ledger.see(args, changes)
        if kwargs:
            ledger.see(kwargs.values(), changes)
        if changes:
            self.admit(changes)
        writes, hidden_writes = _effects(func)
        kept = self._keep(hidden_writes, args, kwargs) if hidden_writes else ()
        output = func(*args, **kwargs)
        ledger.see((output,), changes)
        if writes:
            # ``out=``, ``resize_`` and ``set_`` change the size of an argument.
            ledger.see(args, changes)
            if kwargs:
                ledger.see(kwargs.values(), changes)
        if changes:
            wanted_bytes = self._missing(changes)
            if wanted_bytes:
                used_bytes = ledger.allocated_bytes - wanted_bytes
                # This frame stays in the traceback, and must not keep refused tensors alive.
                del output
                for tensor, before in kept:
                    tensor.copy_(before)
                raise self._refusal(wanted_bytes, used_bytes)
            if ledger.allocated_bytes > self.lap_peak_bytes:
                self._note_peak()
        return output

    def admit(self, changes: list[Change]) -> None:
        """Admit tensors that exist already, or refuse them and restore the counts."""
        wanted_bytes = self._missing(changes)
        if wanted_bytes:
            self.ledger.undo(changes)
            raise self._refusal(wanted_bytes, self.ledger.allocated_bytes)
        changes.clear()
        self._note_peak()

    def reset_peak(self) -> None:
        """Restart the measurement of both peaks."""
        self.peak_bytes = self.lap_peak_bytes = self.ledger.allocated_bytes

    def begin_lap(self) -> None:
        """Restart the measurement of the lap's peak, which never exceeds the other one."""
        self.lap_peak_bytes = self.ledger.allocated_bytes

    def _note_peak(self) -> None:
        self.lap_peak_bytes = max(self.lap_peak_bytes, self.ledger.allocated_bytes)
        self.peak_bytes = max(self.peak_bytes, self.lap_peak_bytes)

    def _keep(
        self,
        hidden_writes: tuple[tuple[int, str], ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy arguments that an operation overwrites, because it is refused only afterwards."""
        # Without a limit nothing is refused, so nothing has to be restored.
        if self.limit_bytes is None:
            return []
        values = (args[i] if i < len(args) else kwargs.get(name) for i, name in hidden_writes)
        return [(value, value.clone()) for value in values if isinstance(value, torch.Tensor)]

    def _missing(self, changes: list[Change]) -> int:
        """Return the bytes that changes request if they do not fit, otherwise 0."""
        if self.limit_bytes is None or self.ledger.allocated_bytes <= self.limit_bytes:
            return 0
        # Releasing memory is not refused, however full the device is.
        return max(sum(entry.counted_bytes - before for entry, before in changes), 0)

    def _refusal(self, wanted_bytes: int, used_bytes: int) -> torch.OutOfMemoryError:
        assert self.limit_bytes is not None
        self.num_ooms += 1
        return torch.OutOfMemoryError(
            f"Simulated device out of memory. Tried to allocate {format_bytes(wanted_bytes)}. The "
            f"budget has a total capacity of {format_bytes(self.limit_bytes)} of which "
            f"{format_bytes(max(self.limit_bytes - used_bytes, 0))} is free. Live tensors hold "
            f"{format_bytes(used_bytes)}, and held {format_bytes(self.peak_bytes)} at most."
        )


@functools.cache
def _effects(func: Any) -> tuple[bool, tuple[tuple[int, str], ...]]:
    """Return whether an operation writes to arguments, and which to copy in case it is refused."""
    schema = schema_of(func)
    if schema is None:  # a higher-order operator
        return False, _UNDECLARED_WRITES.get(func, ())
    # An operation that both allocates and writes (BatchNorm with statistics, an observer with
    # ranges) has already written when its allocation is seen. A real device refuses before.
    allocates = any(value.alias_info is None for value in schema.returns)
    declared = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if allocates and argument.alias_info is not None and argument.alias_info.is_write
    )
    return schema.is_mutable, declared + _UNDECLARED_WRITES.get(func, ())
