"""Reading a memory snapshot of torch, which may come from anybody.

The file is a pickle. A pickle can name functions to be called while it is read, so nothing is
looked up: plain values (numbers, text, lists, tuples, mappings) are all that a snapshot holds, and
whatever else a file names is refused by that name.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple


class UnreadableFailureError(ValueError):
    """A file that says nothing of a failure: damaged, of another kind, or not to be trusted."""


class Frame(NamedTuple):
    """Where code stood.

    Attributes:
        file: as the process had it.
        line: from 1; 0 where it is not known.
        name: of the function.
    """

    file: str
    line: int
    name: str


Stack = tuple[Frame, ...]
"""From the innermost to the outermost."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of memory that something holds.

    Attributes:
        address: on the device.
        size: what it takes, rounded up.
        requested: what was asked for.
        stack: of whoever asked; empty where it was not written down.
    """

    address: int
    size: int
    requested: int
    stack: Stack


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the allocator did.

    Attributes:
        action: ``"alloc"``, ``"free"`` or ``"oom"``.
        address: of the block; of "oom" what the device had free.
        size: bytes.
        stack: of whoever asked.
    """

    action: str
    address: int
    size: int
    stack: Stack


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the allocator of one device held, and what it had done before.

    Attributes:
        device: its number.
        blocks: that are held.
        events: in order; empty where no history was recorded.
        reserved: bytes that the allocator has of the device.
        largest_free: the largest piece of those that nobody holds.
        expandable: whether segments grow, so that pieces need not fit into one.
        origins: what was found out about each stack, by its identity; for whoever reads.
    """

    device: int
    blocks: Sequence[Block]
    events: Sequence[Event] = ()
    reserved: int
    largest_free: int
    expandable: bool = False
    origins: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def records_stacks(self) -> bool:
        """Whether the first events have stacks, so that one without is of another thread."""
        return any(event.stack for event in self.events[:64])

    @property
    def allocated(self) -> int:
        """Bytes of all blocks that are held."""
        return sum(block.size for block in self.blocks)

    @property
    def has_stacks(self) -> bool:
        """Whether anything says where it comes from."""
        return any(block.stack for block in self.blocks)


class _PlainUnpickler(pickle.Unpickler):
    """Reads values that have no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise UnreadableFailureError(
            f"it names {module}.{name}, and a memory snapshot names nothing: do not load it with "
            "pickle, which would run what it says"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UnreadableFailureError(
            f"it refers to {str(pid)[:60]!r} outside of itself, as files of torch.save do: give "
            "the file of torch.cuda.memory._dump_snapshot"
        )


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot, of the device that ran out of memory, or else of the one that holds most.

    Args:
        path: written by ``torch.cuda.memory._dump_snapshot``.

    Raises:
        OSError: it cannot be read.
        UnreadableFailureError: it is none.
    """
    with path.open("rb") as file:
        return snapshot_of(_unpickle(file))


def snapshot_of(content: Any) -> Snapshot:
    """Take a snapshot apart; see `read_snapshot`.

    >>> blocks = [{"size": 1024, "state": "active_allocated"}, {"size": 3072, "state": "inactive"}]
    >>> snapshot = snapshot_of({"segments": [{"device": 0, "total_size": 4096, "blocks": blocks}]})
    >>> snapshot.allocated, snapshot.reserved, snapshot.largest_free
    (1024, 4096, 3072)
    """
    if isinstance(content, list):  # of torch.cuda.memory_snapshot()
        content = {"segments": content}
    if not isinstance(content, Mapping) or not isinstance(content.get("segments"), list):
        raise UnreadableFailureError(
            "it is no memory snapshot, which has 'segments' and 'device_traces': write one with "
            "torch.cuda.memory._dump_snapshot(path)"
        )
    try:
        return _take_apart(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableFailureError(
            f"it looks like a memory snapshot, and a part of it is missing or odd "
            f"({type(error).__name__}: {str(error)[:80]}): write it anew"
        ) from error


def _unpickle(file: IO[bytes]) -> Any:
    try:
        return _PlainUnpickler(file).load()
    except (UnreadableFailureError, OSError):
        raise
    except Exception as error:  # whatever bytes can lead to: of lengths, of encodings, of stacks
        raise UnreadableFailureError(
            f"it is damaged, or no pickle ({type(error).__name__}: {str(error)[:80]}): write or "
            "copy it anew"
        ) from error


@dataclass
class _Stacks:
    """Each stack once. Frames are shared in a file, so they are told apart by identity."""

    _frames: dict[int, Frame] = field(default_factory=dict)
    _stacks: dict[tuple[int, ...], Stack] = field(default_factory=dict)

    def of(self, frames: Any) -> Stack:
        if not frames:
            return ()
        key = tuple(map(id, frames))
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = tuple(self._frame(each) for each in frames)
        return stack

    def _frame(self, content: Mapping[str, Any]) -> Frame:
        frame = self._frames.get(id(content))
        if frame is None:
            frame = Frame(str(content["filename"]), int(content["line"]), str(content["name"]))
            self._frames[id(content)] = frame
        return frame


def _take_apart(content: Mapping[str, Any]) -> Snapshot:
    stacks = _Stacks()
    traces = content.get("device_traces") or []
    device = _device(content["segments"], traces)
    segments = [each for each in content["segments"] if each.get("device", 0) == device]
    largest_free, reserved, blocks = 0, 0, []
    for segment in segments:
        reserved += int(segment["total_size"])
        address = int(segment.get("address") or 0)
        for block in segment["blocks"]:
            size = int(block["size"])
            if size < 0:
                raise ValueError(f"a block of {size} bytes")
            if block["state"] == "inactive":
                largest_free = max(largest_free, size)
            else:
                blocks.append(_block(block, int(block.get("address", address)), size, stacks))
            address += size
    return Snapshot(
        device=device,
        blocks=blocks,
        events=list(_events(traces[device], stacks)) if device < len(traces) else (),
        reserved=reserved,
        largest_free=largest_free,
        expandable=any(bool(segment.get("is_expandable")) for segment in segments),
    )


def _device(segments: Sequence[Mapping[str, Any]], traces: Sequence[Any]) -> int:
    for device, trace in enumerate(traces):
        if any(entry["action"] == "oom" for entry in trace):
            return device
    held: dict[int, int] = {}
    for segment in segments:
        device = int(segment.get("device", 0))
        held[device] = held.get(device, 0) + int(segment["total_size"])
    return max(held, key=held.__getitem__, default=0)


def _block(block: Mapping[str, Any], address: int, size: int, stacks: _Stacks) -> Block:
    frames, requested = block.get("frames"), block.get("requested_size", size)
    history = block.get("history")
    if not frames and history:  # torch before 2.1
        frames, requested = history[0].get("frames"), history[0].get("real_size", size)
    return Block(address, size, int(requested), stacks.of(frames))


_ACTIONS = {"alloc": "alloc", "free_completed": "free", "oom": "oom"}


def _events(trace: Sequence[Mapping[str, Any]], stacks: _Stacks) -> Iterator[Event]:
    for entry in trace:
        action = _ACTIONS.get(entry["action"])
        if action is not None:
            address = int(entry.get("device_free" if action == "oom" else "addr") or 0)
            yield Event(action, address, int(entry["size"]), stacks.of(entry.get("frames")))
