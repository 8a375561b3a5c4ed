"""Every storage of a step, when it came and went, and whose it is.

A `Recorder` is the counter of a simulated device that also writes down. What it wrote is a `Trace`:
played again, as it was or with some owners' storages smaller, it tells the peak and what held it.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from automicro.memory.ledger import GRANULE, Change, CountingMode, Entry, StorageLedger
from automicro.torch_private import FakeTensor, node_in_backward, num_nodes_made

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BUFFERS = "buffers"
BATCH = "batch"
ACTIVATIONS = "activations"
TAIL = "outputs and loss"
BACKWARD = "temporaries of the backward"
STEP = "temporaries of the optimizer's step"
WORKSPACE = "workspace of kernels"
GATHERED = "gathered from other ranks"
CASTS = "parameters in half precision"
KINDS = (
    PARAMETERS, CASTS, GRADIENTS, OPTIMIZER, GATHERED, BUFFERS, BATCH, ACTIVATIONS, TAIL,
    BACKWARD, STEP, WORKSPACE,
)  # fmt: skip
STAYING = frozenset((PARAMETERS, CASTS, GRADIENTS, OPTIMIZER, GATHERED, BUFFERS))
"""What is of the same size whatever the microbatch."""


T = TypeVar("T")


class Owner(NamedTuple):
    """What a storage is, and the module that made it; ``""`` is the model itself."""

    kind: str
    module: str = ""


class Mark(NamedTuple):
    """A module begins to compute or ends, before this event of the trace."""

    event: int
    label: str


@dataclass(frozen=True)
class Trace:
    """What came and went in one step.

    Attributes:
        numbers: of the storage, for each event.
        deltas: bytes that it came with, or, negative, went with; as they are asked for.
        owners: by the number of a storage.
        marks: where modules begin and end.
    """

    numbers: np.ndarray[Any, np.dtype[np.int64]]
    deltas: np.ndarray[Any, np.dtype[np.int64]]
    owners: Sequence[Owner]
    marks: Sequence[Mark]

    @classmethod
    def still(cls, held: Mapping[Owner, int]) -> "Trace":
        """One in which nothing comes or goes."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, (), ()).plus(held)

    @cached_property
    def _rounded(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The deltas as an allocator counts them."""
        sizes = -(-np.abs(self.deltas) // GRANULE) * GRANULE
        return np.asarray(np.sign(self.deltas) * sizes)

    @cached_property
    def peak_bytes(self) -> int:
        """The most that was held at once, every storage rounded up to 512 bytes."""
        return int(np.cumsum(self._rounded).max(initial=0))

    @cached_property
    def peak_event(self) -> int:
        """After which event it is held; -1 where nothing happens."""
        return int(np.cumsum(self._rounded).argmax()) if len(self.deltas) else -1

    def breakdown(self, event: int | None = None) -> dict[Owner, int]:
        """Bytes by owner at the peak, or after an event."""
        if event is None:
            event = self.peak_event
        held: dict[Owner, int] = {}
        sums = np.zeros(len(self.owners), dtype=np.int64)
        np.add.at(sums, self.numbers[: event + 1], self._rounded[: event + 1])
        for owner, num_bytes in zip(self.owners, sums, strict=True):
            if num_bytes:
                held[owner] = held.get(owner, 0) + int(num_bytes)
        return held

    def highest(self, part: Callable[[Owner], T]) -> dict[T, int]:
        """The most bytes that each part held at any moment, which need not be the peak's."""
        known = {owner: part(owner) for owner in dict.fromkeys(self.owners)}
        codes = {each: code for code, each in enumerate(dict.fromkeys(known.values()))}
        of_storage = np.array([codes[known[owner]] for owner in self.owners], dtype=np.int64)
        of_event = of_storage[self.numbers]
        return {
            each: int(np.cumsum(self._rounded[of_event == code]).max(initial=0))
            for each, code in codes.items()
        }

    def scaled(self, share: Callable[[Owner], float]) -> "Trace":
        """The same with every owner's storages at a share of their size."""
        known: dict[Owner, float] = {}
        for owner in self.owners:
            if owner not in known:
                known[owner] = share(owner)
        shares = np.array([known[owner] for owner in self.owners])[self.numbers]
        sizes = np.ceil(np.abs(self.deltas) * shares).astype(np.int64)
        return Trace(self.numbers, np.sign(self.deltas) * sizes, self.owners, self.marks)

    def on_line(self, smaller: "Trace", times: float) -> "Trace | None":
        """What changed from a smaller step to this one, so many times more; None if not alike."""
        if not np.array_equal(self.numbers, smaller.numbers):
            return None
        more = self.deltas + (self.deltas - smaller.deltas) * times
        return Trace(self.numbers, more.round().astype(np.int64), self.owners, self.marks)

    def until(self, label: str) -> "Trace":
        """Its part before a mark."""
        end = next((mark.event for mark in self.marks if mark.label == label), len(self.deltas))
        marks = [mark for mark in self.marks if mark.event <= end]
        return Trace(self.numbers[:end], self.deltas[:end], self.owners, marks)

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
            [Mark(mark.event + len(more), mark.label) for mark in self.marks],
        )


class _WritingLedger(StorageLedger):
    """A ledger that writes down when each storage comes and goes, and whose it is."""

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
        """A tensor turned out to be somebody else's."""
        with contextlib.suppress(NotImplementedError):
            number = self._number_of.get(id(tensor.untyped_storage()))
            if number is not None:
                self.owners[number] = owner


class Recorder(CountingMode):
    """Counts like a simulated device without a limit, and writes down what it sees.

    Args:
        on_accelerator: whether kernels are to be taken for those of an accelerator.

    Attributes:
        parameters: their ids; what they are cast to is told apart.

    Example:
        >>> recorder = Recorder()
        >>> with recorder, recorder.owning("batch"):
        ...     x = torch.zeros(256)
        >>> del x
        >>> trace = recorder.trace()
        >>> trace.peak_bytes, trace.breakdown()
        (1024, {Owner(kind='batch', module=''): 1024})
    """

    ledger: _WritingLedger

    def __init__(self, *, on_accelerator: bool = False) -> None:
        super().__init__(None)
        self.ledger = _WritingLedger()
        self._on_accelerator = on_accelerator
        self.parameters: frozenset[int] = frozenset()
        self._kind = ACTIVATIONS
        self._inside: list[str] = []
        self._marks: list[Mark] = []
        # Which module made the nodes of the backward, from each of these on.
        self._first_nodes: list[int] = [0]
        self._makers: list[str] = [""]
        self._after_last_part = 0  # storages that were there when the last submodule ended

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer at once which device a stand-in lies on, which is most of what is asked."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and write down what comes and goes with it."""
        owner = self._owner()
        if func is _CAST and id(args[0]) in self.parameters:
            owner = Owner(CASTS, owner.module)
        self.ledger.owner = owner
        output = super().run(func, types, args, kwargs)
        if func in _LSTM:
            output = _with_kept(func, output)
            self.ledger.see(output, [])
        workspace_bytes = _workspace_bytes(func, args, on_accelerator=self._on_accelerator)
        if workspace_bytes:
            number = self.ledger.new(Owner(WORKSPACE, self.ledger.owner.module))
            self.ledger.write(number, workspace_bytes)
            self.ledger.write(number, -workspace_bytes)
        return output

    def _owner(self) -> Owner:
        if self._kind != ACTIVATIONS:
            return Owner(self._kind)
        if self._inside:
            return Owner(ACTIVATIONS, self._inside[-1])
        node = node_in_backward()
        if node is None:
            return Owner(ACTIVATIONS)
        return Owner(BACKWARD, self._makers[bisect.bisect_right(self._first_nodes, node) - 1])

    @contextlib.contextmanager
    def owning(self, kind: str) -> Iterator[None]:
        """Take what comes inside for this kind."""
        before, self._kind = self._kind, kind
        self.ledger.owner = self._owner()
        try:
            yield
        finally:
            self._kind = before

    @contextlib.contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Tell inside which module each storage comes; the first one's names are used."""
        names: dict[int, str] = {}
        for root in modules:
            for name, module in root.named_modules():
                names.setdefault(id(module), name)

        def enter(module: nn.Module, _: Any) -> None:
            if id(module) in names:
                self._inside.append(names[id(module)])
                self._note()

        def leave(module: nn.Module, *_: Any) -> None:
            if id(module) in names and self._inside:
                if self._inside.pop():
                    self._after_last_part = len(self.ledger.owners)
                self._note()

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._inside.clear()

    def _note(self) -> None:
        maker = self._inside[-1] if self._inside else ""
        self._marks.append(Mark(len(self.ledger.numbers), maker))
        self._first_nodes.append(num_nodes_made())
        self._makers.append(maker)

    def mark(self, label: str) -> None:
        """Another part of the step begins."""
        self._marks.append(Mark(len(self.ledger.numbers), label))

    def forward_ended(self, outputs: Sequence[Tensor]) -> None:
        """What came since the last submodule ended, and the outputs, belong to the loss."""
        for number in range(self._after_last_part, len(self.ledger.owners)):
            if self.ledger.owners[number].kind == ACTIVATIONS:
                self.ledger.owners[number] = Owner(TAIL)
        for output in outputs:
            self.ledger.give(output, Owner(TAIL))

    def hold(self, num_bytes: int, kind: str) -> Callable[[], None]:
        """Count something of which there is no tensor; returns what gives it back."""
        number = self.ledger.new(Owner(kind))
        self.ledger.write(number, num_bytes)
        return lambda: self.ledger.write(number, -num_bytes)

    def trace(self) -> Trace:
        """What was written down until now."""
        ledger = self.ledger
        return Trace(
            np.array(ledger.numbers, dtype=np.int64),
            np.array(ledger.deltas, dtype=np.int64),
            list(ledger.owners),
            list(self._marks),
        )


_DEVICE = torch.ops.prim.device.default
_CAST = torch.ops.aten._to_copy.default
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_LSTM = frozenset((torch.ops.aten.mkldnn_rnn_layer.default,))
_LSTM_BACKWARD = frozenset((torch.ops.aten.mkldnn_rnn_layer_backward.default,))
_PRODUCTS = {  # and which arguments are multiplied
    torch.ops.aten.mm.default: slice(0, 2),
    torch.ops.aten.addmm.default: slice(1, 3),
}
# Of an LSTM's states over all times: what oneDNN keeps for the backward, and takes meanwhile.
_KEPT_STATES, _KEPT_STATES_OF_HALF, _SCRATCH_STATES = 16, 22, 5


def _with_kept(func: Any, output: Any) -> Any:
    """The output, with what a kernel keeps for its backward, where fake tensors do not tell."""
    if func not in _LSTM or output[3].numel():
        return output
    states = output[0]
    times = _KEPT_STATES_OF_HALF if states.itemsize == 2 else _KEPT_STATES
    num_bytes = times * states.nbytes
    kept = output[3].new_empty(num_bytes // output[3].itemsize)
    return (*output[:3], kept)


def _workspace_bytes(func: Any, args: tuple[Any, ...], *, on_accelerator: bool) -> int:
    """What a kernel takes for itself while it runs, beside its arguments and results.

    Matrix products and attention take next to nothing, but for factors in half precision on a
    CPU, which are copied in another order. A convolution copies its weight in another
    order, and may do so with its inputs on an accelerator. What oneDNN takes was measured.
    """
    if func is _CONVOLUTION or func is _CONVOLUTION_BACKWARD:
        *inputs, weight = args[:2] if func is _CONVOLUTION else args[:3]
        moved = sum(each.nbytes for each in inputs) if on_accelerator else 0
        # The gradient of a weight in half precision is summed up in another one.
        copies = 2 if weight.itemsize == 2 and func is _CONVOLUTION_BACKWARD else 1
        return int(copies * weight.nbytes + moved)
    if func in _PRODUCTS and not on_accelerator:
        factors = args[_PRODUCTS[func]]
        return sum(each.nbytes for each in factors if each.itemsize == 2)
    if func in _LSTM or func in _LSTM_BACKWARD:
        sequence, *weights = args[:3]
        states = sequence.nbytes // sequence.shape[-1] * weights[1].shape[-1]
        copies = 3 if sequence.itemsize == 2 else 2
        return int(_SCRATCH_STATES * states + copies * sum(each.nbytes for each in weights))
    return 0
