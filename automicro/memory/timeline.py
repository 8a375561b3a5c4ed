"""Who holds how much at each moment of a step, by module.

A `Recorder` is the counter of a simulated device that also writes down every storage: when it came
and went, and whose it is. What it wrote is a `Trace`: played again, as it was or with some owners'
storages smaller, it tells the peak and what held it.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from automicro.memory.budget import GRANULE
from automicro.memory.ledger import Change, CountingMode, Entry, StorageLedger
from automicro.torch_private import node_in_backward, num_nodes_made

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BUFFERS = "buffers"
BATCH = "batch"
ACTIVATIONS = "activations"
BACKWARD = "temporaries of the backward"

_OUTSIDE = "outside of modules"
_MOST_SAMPLES = 500


class Owner(NamedTuple):
    """The kind of a storage, and the module that made it; ``""`` is the model itself."""

    kind: str
    module: str = ""


def added_up(held: Mapping[Owner, int], name: Callable[[Owner], str]) -> dict[str, int]:
    """Bytes by a name of their owners."""
    found: dict[str, int] = {}
    for owner, num_bytes in held.items():
        found[name(owner)] = found.get(name(owner), 0) + num_bytes
    return found


@dataclass(frozen=True)
class Trace:
    """Storages that came and went in one step.

    Attributes:
        numbers: of the storage, for each event.
        deltas: bytes that it came with, or, negative, went with; as they are asked for.
        owners: by the number of a storage.
    """

    numbers: np.ndarray[Any, np.dtype[np.int64]]
    deltas: np.ndarray[Any, np.dtype[np.int64]]
    owners: Sequence[Owner]

    @cached_property
    def _rounded(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The deltas as an allocator counts them."""
        # By size and not by sum: each storage is rounded up for itself.
        sizes = -(-np.abs(self.deltas) // GRANULE) * GRANULE
        return np.asarray(np.sign(self.deltas) * sizes)

    @cached_property
    def totals(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes held after each event."""
        return np.asarray(np.cumsum(self._rounded))

    @cached_property
    def peak_bytes(self) -> int:
        """The most that was held at once, every storage rounded up to 512 bytes."""
        return int(self.totals.max(initial=0))

    def breakdown(self) -> dict[Owner, int]:
        """Bytes by owner at the peak."""
        return next(self.breakdowns([int(self.totals.argmax()) if len(self.totals) else -1]))

    def breakdowns(self, events: Iterable[int]) -> Iterator[dict[Owner, int]]:
        """Bytes by owner after each of some events, the earliest first."""
        places = {owner: place for place, owner in enumerate(dict.fromkeys(self.owners))}
        place_of = np.array([places[owner] for owner in self.owners], dtype=np.int64)
        sums = np.zeros(len(places), dtype=np.int64)
        done = 0
        for event in events:
            part = slice(done, event + 1)
            # Not `sums[…] +=`, which counts an index that comes twice once.
            np.add.at(sums, place_of[self.numbers[part]], self._rounded[part])
            done = event + 1
            held = zip(places, sums.tolist(), strict=True)
            yield {owner: num_bytes for owner, num_bytes in held if num_bytes}

    def samples(self, name: Callable[[Owner], str]) -> list[tuple[int, dict[str, int]]]:
        """Events, and bytes after each by their owners' names: of neighbours, the fullest."""
        width = max(len(self.totals) // _MOST_SAMPLES, 1)
        starts = range(0, len(self.totals), width)
        # Samples at fixed places could miss the peak.
        fullest = [start + int(self.totals[start : start + width].argmax()) for start in starts]
        helds = (added_up(held, name) for held in self.breakdowns(fullest))
        return list(zip(fullest, helds, strict=True))

    def scaled(self, share: Callable[[Owner], float]) -> "Trace":
        """The same with every owner's storages at a share of their size."""
        known: dict[Owner, float] = {}
        for owner in self.owners:
            if owner not in known:
                known[owner] = share(owner)
        shares = np.array([known[owner] for owner in self.owners])[self.numbers]
        # Up, as a plan that is too small by a byte is wrong, and one that is too large is not.
        sizes = np.ceil(np.abs(self.deltas) * shares).astype(np.int64)
        return Trace(self.numbers, np.sign(self.deltas) * sizes, self.owners)

    def plus(self, held: Mapping[Owner, int]) -> "Trace":
        """The same with something more, from beginning to end."""
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
    """Writes down when each storage comes and goes, and whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner(ACTIVATIONS)  # of what comes next
        self.owners: list[Owner] = []
        self.numbers: list[int] = []
        self.deltas: list[int] = []
        self._sizes: list[int] = []  # of each, now
        self._number_of: dict[int, int] = {}  # of a live storage, by its key

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
        # Keys are ids, which are used again by later storages.
        number = self._number_of.pop(entry.key, None)
        if number is not None and self._sizes[number]:
            self.write(number, -self._sizes[number])

    def new(self, owner: Owner) -> int:
        """The number of one more storage."""
        self.owners.append(owner)
        self._sizes.append(0)
        return len(self.owners) - 1

    def write(self, number: int, delta: int) -> None:
        """A storage grows or shrinks."""
        self._sizes[number] += delta
        self.numbers.append(number)
        self.deltas.append(delta)

    def give(self, tensor: Tensor, owner: Owner) -> None:
        """A tensor turned out to have another owner."""
        with contextlib.suppress(NotImplementedError):
            number = self._number_of.get(id(tensor.untyped_storage()))
            if number is not None:
                self.owners[number] = owner


class Recorder(CountingMode):
    """Counts like a simulated device without a limit, and writes down what it sees.

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
        # Which module made the nodes of the backward, from each of these on.
        self._first_nodes: list[int] = [0]
        self._makers: list[str] = [""]

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and write down what comes and goes with it."""
        self.ledger.owner = self._owner_of(func, args)
        return super().run(func, types, args, kwargs)

    def _owner_of(self, func: Any, args: tuple[Any, ...]) -> Owner:
        """Whose it is what an operation makes."""
        if self._kind != ACTIVATIONS:
            return Owner(self._kind)
        if self._inside:
            return Owner(ACTIVATIONS, self._inside[-1])
        # A node knows the forward operation that it undoes, by the number that autograd gave it.
        node = node_in_backward()
        if node is None:
            return Owner(ACTIVATIONS, _OUTSIDE)
        # Nodes are numbered in the order of the forward, so the module is the last that began
        # before it.
        return Owner(BACKWARD, self._makers[bisect.bisect_right(self._first_nodes, node) - 1])

    @contextlib.contextmanager
    def owning(self, kind: str) -> Iterator[None]:
        """Take what comes inside for this kind."""
        before, self._kind = self._kind, kind
        self.ledger.owner = Owner(kind)
        try:
            yield
        finally:
            self._kind = before

    @contextlib.contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Tell inside which module each storage comes, and which ones are gradients."""
        names: dict[int, str] = {}
        parameters: dict[int, nn.Parameter] = {}
        for each in modules:
            parameters |= {id(found): found for found in each.parameters() if found.requires_grad}
            for name, module in each.named_modules():
                # The first name, as a module may be reached by several.
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
            # Called after a forward that fails, too, or its module would own all that follows.
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
        """A module has computed."""

    def _turn(self) -> None:
        maker = self._inside[-1] if self._inside else ""
        self._first_nodes.append(num_nodes_made())
        self._makers.append(maker)

    def trace(self) -> Trace:
        """The trace until now."""
        ledger = self.ledger
        return Trace(
            np.array(ledger.numbers, dtype=np.int64),
            np.array(ledger.deltas, dtype=np.int64),
            list(ledger.owners),
        )
