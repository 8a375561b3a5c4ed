"""Memory by module at each moment of a step.

A `Recorder` is the counter of a simulated device that also records when each storage is created and
released, and its owner. The result is a `Trace`, which gives the peak and its owners, as recorded
or with the storages of some owners scaled down.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from automicro.memory.budget import GRANULE
from automicro.memory.ledger import Change, CountingMode, Entry, StorageLedger
from automicro.torch_private_execution import node_in_backward, num_nodes_made

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BUFFERS = "buffers"
BATCH = "batch"
ACTIVATIONS = "activations"
BACKWARD = "temporaries of the backward"

_OUTSIDE = "outside of modules"


class Owner(NamedTuple):
    """The kind of a storage, and the module that created it; ``""`` is the model itself."""

    kind: str
    module: str = ""


def added_up(held: Mapping[Owner, int], name: Callable[[Owner], str]) -> dict[str, int]:
    """Return the bytes by a name of their owners."""
    found: dict[str, int] = {}
    for owner, num_bytes in held.items():
        found[name(owner)] = found.get(name(owner), 0) + num_bytes
    return found


@dataclass(frozen=True)
class Trace:
    """Storages that were created and released in one step."""

    numbers: np.ndarray[Any, np.dtype[np.int64]]  # number of the storage of each event
    # Bytes of creation (positive) or release (negative) of each event, before rounding.
    deltas: np.ndarray[Any, np.dtype[np.int64]]
    owners: Sequence[Owner]  # by number of the storage

    @cached_property
    def _rounded(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The deltas as an allocator counts them."""
        # By size instead of by sum, because each storage is rounded up separately.
        sizes = -(-np.abs(self.deltas) // GRANULE) * GRANULE
        return np.asarray(np.sign(self.deltas) * sizes)

    @cached_property
    def totals(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes held after each event."""
        return np.asarray(np.cumsum(self._rounded))

    @cached_property
    def peak_bytes(self) -> int:
        """Peak memory, with every storage rounded up to 512 bytes."""
        return int(self.totals.max(initial=0))

    def breakdown(self) -> dict[Owner, int]:
        """Return the bytes by owner at the peak."""
        places = {owner: place for place, owner in enumerate(dict.fromkeys(self.owners))}
        place_of = np.array([places[owner] for owner in self.owners], dtype=np.int64)
        sums = np.zeros(len(places), dtype=np.int64)
        before = slice(int(self.totals.argmax()) + 1 if len(self.totals) else 0)
        # Not `sums[…] +=`, which applies a repeated index only once.
        np.add.at(sums, place_of[self.numbers[before]], self._rounded[before])
        held = zip(places, sums.tolist(), strict=True)
        return {owner: num_bytes for owner, num_bytes in held if num_bytes}

    def scaled(self, share: Callable[[Owner], float]) -> "Trace":
        """Return a trace in which each owner's storages have a share of their size."""
        known: dict[Owner, float] = {}
        for owner in self.owners:
            if owner not in known:
                known[owner] = share(owner)
        shares = np.array([known[owner] for owner in self.owners])[self.numbers]
        # Rounded up, because a plan must not be too small, even by a byte.
        sizes = np.ceil(np.abs(self.deltas) * shares).astype(np.int64)
        return Trace(self.numbers, np.sign(self.deltas) * sizes, self.owners)

    def plus(self, held: Mapping[Owner, int]) -> "Trace":
        """Return a trace with additional storages that exist from beginning to end."""
        more = [(owner, num_bytes) for owner, num_bytes in held.items() if num_bytes]
        first = len(self.owners)
        numbers = np.arange(first, first + len(more), dtype=np.int64)
        sizes = np.array([num_bytes for _, num_bytes in more], dtype=np.int64)
        return Trace(
            np.concatenate([numbers, self.numbers]),
            np.concatenate([sizes, self.deltas]),
            [*self.owners, *(owner for owner, _ in more)],
        )


class _WritingLedger(StorageLedger):
    """Records when each storage is created and released, and its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner(ACTIVATIONS)  # of storages created next
        self.owners: list[Owner] = []
        self.numbers: list[int] = []
        self.deltas: list[int] = []
        self._sizes: list[int] = []  # current size of each storage
        self._number_of: dict[int, int] = {}  # numbers of live storages, by key

    def _recount(self, entry: Entry, changes: list[Change]) -> None:
        before = entry.counted_bytes
        super()._recount(entry, changes)
        if entry.counted_bytes == before:
            return
        if entry.key not in self._number_of:
            self._number_of[entry.key] = self.new(self.owner)
        number = self._number_of[entry.key]
        num_bytes = entry.storage_bytes if entry.counted_bytes else 0
        self.write(number, num_bytes - self._sizes[number])

    def _drop(self, entry: Entry) -> None:
        super()._drop(entry)
        # Keys are ids, which later storages reuse.
        number = self._number_of.pop(entry.key, None)
        if number is not None and self._sizes[number]:
            self.write(number, -self._sizes[number])

    def new(self, owner: Owner) -> int:
        """Add a storage, and return its number."""
        self.owners.append(owner)
        self._sizes.append(0)
        return len(self.owners) - 1

    def write(self, number: int, delta: int) -> None:
        """Record that a storage grows or shrinks."""
        self._sizes[number] += delta
        self.numbers.append(number)
        self.deltas.append(delta)

    def give(self, tensor: Tensor, owner: Owner) -> None:
        """Change the owner of a tensor's storage."""
        with contextlib.suppress(NotImplementedError):
            number = self._number_of.get(id(tensor.untyped_storage()))
            if number is not None:
                self.owners[number] = owner


class Recorder(CountingMode):
    """Counts memory like a simulated device without a limit, and records all storages.

    Example:
        >>> import torch
        >>> recorder = Recorder()
        >>> with recorder, recorder.owning("batch"):
        ...     x = torch.zeros(256)
        >>> del x
        >>> trace = recorder.trace()
        >>> trace.peak_bytes, trace.breakdown()
        (1024, {Owner(kind='batch', module=''): 1024})
    """

    ledger: _WritingLedger

    def __init__(self) -> None:
        super().__init__(None)
        self.ledger = _WritingLedger()
        self._kind = ACTIVATIONS
        self._inside: list[str] = []
        # Modules that created the nodes of the backward, starting at each of these numbers.
        self._first_nodes: list[int] = [0]
        self._makers: list[str] = [""]

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and record the storages that it creates and releases."""
        self.ledger.owner = self._owner_of(func, args)
        return super().run(func, types, args, kwargs)

    def _owner_of(self, func: Any, args: tuple[Any, ...]) -> Owner:
        """Return the owner of storages that an operation creates."""
        if self._kind != ACTIVATIONS:
            return Owner(self._kind)
        if self._inside:
            return Owner(ACTIVATIONS, self._inside[-1])
        # A node is identified with its forward operation by the number that autograd assigned.
        node = node_in_backward()
        if node is None:
            return Owner(ACTIVATIONS, _OUTSIDE)
        # Nodes are numbered in the order of the forward, so the module is the last one that
        # started before the node.
        return Owner(BACKWARD, self._makers[bisect.bisect_right(self._first_nodes, node) - 1])

    @contextlib.contextmanager
    def owning(self, kind: str) -> Iterator[None]:
        """Attribute storages created inside to a kind."""
        before, self._kind = self._kind, kind
        self.ledger.owner = Owner(kind)
        try:
            yield
        finally:
            self._kind = before

    @contextlib.contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Record the module in which each storage is created, and which storages are gradients."""
        names: dict[int, str] = {}
        parameters: dict[int, nn.Parameter] = {}
        for each in modules:
            parameters |= {id(found): found for found in each.parameters() if found.requires_grad}
            for name, module in each.named_modules():
                # The first name, because several names can refer to one module.
                names.setdefault(id(module), name)

        def enter(module: nn.Module, _: Any) -> None:
            if id(module) in names:
                self._inside.append(names[id(module)])
                self._turn()

        def leave(module: nn.Module, *_: Any) -> None:
            if id(module) in names and self._inside:
                self._left(self._inside.pop())
                self._turn()

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.ledger.give(parameter.grad, Owner(GRADIENTS))

        handles = [
            register_module_forward_pre_hook(enter),
            # Also called after a failed forward, whose module would otherwise own all that follows.
            register_module_forward_hook(leave, always_call=True),
            *(
                each.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
                for each in parameters.values()
            ),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._inside.clear()

    def _left(self, name: str) -> None:
        """Handle the end of a module's forward."""

    def _turn(self) -> None:
        maker = self._inside[-1] if self._inside else ""
        self._first_nodes.append(num_nodes_made())
        self._makers.append(maker)

    def trace(self) -> Trace:
        """Return the trace up to now."""
        ledger = self.ledger
        return Trace(
            np.array(ledger.numbers, dtype=np.int64),
            np.array(ledger.deltas, dtype=np.int64),
            list(ledger.owners),
        )
