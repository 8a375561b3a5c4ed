"""The dispatch mode behind a memory budget: looks at every operation and refuses what is too much.

Forward, backward, recomputation and the optimizer all come by here, one operation of ATen at a
time. It works on real and on fake tensors.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from automicro.byte_sizes import format_bytes
from automicro.memory.ledger import Change, StorageLedger
from automicro.torch_private import OperationMode, schema_of

# Changes the running statistics (arguments 3 and 4) and does not declare it.
_UNDECLARED_WRITES = {
    torch.ops.aten.native_batch_norm.default: ((3, "running_mean"), (4, "running_var"))
}


class CountingMode(OperationMode):
    """Keeps the ledger of a simulated device while it is entered."""

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.ledger = StorageLedger()
        self.peak_bytes = 0
        self.lap_peak_bytes = 0
        self.num_ooms = 0

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, unless what it needs does not fit."""
        ledger = self.ledger
        changes: list[Change] = []
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
                # This frame stays in the traceback, and must not keep what was refused alive.
                del output
                for tensor, before in kept:
                    tensor.copy_(before)
                raise self._refusal(wanted_bytes, used_bytes)
            if ledger.allocated_bytes > self.lap_peak_bytes:
                self._note_peak()
        return output

    def admit(self, changes: list[Change]) -> None:
        """Let tensors in that exist already, or refuse them and count as if they were not seen."""
        wanted_bytes = self._missing(changes)
        if wanted_bytes:
            self.ledger.undo(changes)
            raise self._refusal(wanted_bytes, self.ledger.allocated_bytes)
        changes.clear()
        self._note_peak()

    def reset_peak(self) -> None:
        """Measure both peaks from now on."""
        self.peak_bytes = self.lap_peak_bytes = self.ledger.allocated_bytes

    def begin_lap(self) -> None:
        """Measure the peak of the lap from now on; a lap's is never above the other."""
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
        """Copy what an operation changes besides allocating: the mode sees it only afterwards."""
        if self.limit_bytes is None:
            return []
        values = (args[i] if i < len(args) else kwargs.get(name) for i, name in hidden_writes)
        return [(value, value.clone()) for value in values if isinstance(value, torch.Tensor)]

    def _missing(self, changes: list[Change]) -> int:
        """Return the bytes that changes ask for, if they do not fit; else 0."""
        if self.limit_bytes is None or self.ledger.allocated_bytes <= self.limit_bytes:
            return 0
        # Whoever only gives memory back is not refused, however full the device is.
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
    """Return whether an operation writes into arguments, and which to save should it be refused.

    An operation that both allocates and writes (BatchNorm with its statistics, an observer with
    its ranges) has written by the time its allocation is seen. A real device refuses before.
    """
    schema = schema_of(func)
    if schema is None:  # a higher-order operator
        return False, _UNDECLARED_WRITES.get(func, ())
    allocates = any(value.alias_info is None for value in schema.returns)
    declared = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if allocates and argument.alias_info is not None and argument.alias_info.is_write
    )
    return schema.is_mutable, declared + _UNDECLARED_WRITES.get(func, ())
