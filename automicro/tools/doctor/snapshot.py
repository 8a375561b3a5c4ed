"""Reads a memory snapshot of torch without running anything that the file names.

A pickle can name functions to be called while it is read. A snapshot holds plain values alone
(numbers, text, lists, tuples, mappings), so a file that names anything is refused.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Frame(NamedTuple):
    """A line of code: its file, its number (0 where it is not known), its function."""

    file: str
    line: int
    name: str


_ACTIONS = {"alloc": "alloc", "free_completed": "free", "oom": "oom"}

Stack = tuple[Frame, ...]
"""From the innermost frame to the outermost; empty where none was recorded."""


class Event(NamedTuple):
    """What the allocator did, or a block that it still holds.

    Attributes:
        action: ``"alloc"``, ``"free"``, ``"oom"`` or ``"held"``.
        address: of the block; of an "oom" what the device had free.
        size: bytes, of a block as rounded up.
        requested: bytes as they were asked for.
        stack: of what asked.
    """

    action: str
    address: int
    size: int
    requested: int
    stack: Stack


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the allocator of one device held, and what it had done before.

    Attributes:
        blocks: that tensors hold.
        events: in order; empty where no history was recorded.
        reserved: bytes that the allocator has of the device.
        largest_free: the largest free piece of them.
        is_expandable: whether segments grow already.
    """

    blocks: Sequence[Event]
    events: Sequence[Event]
    reserved: int
    largest_free: int
    is_expandable: bool

    @property
    def failed(self) -> Event | None:
        """The last request that could not be served."""
        return next((each for each in reversed(self.events) if each.action == "oom"), None)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot names nothing")


def read_snapshot(path: Path) -> Snapshot:
    """Read the snapshot of the device that ran out of memory, or else of the fullest one.

    Args:
        path: written by ``torch.cuda.memory._dump_snapshot``.

    Raises:
        Exception: the file names code, is damaged, or is no snapshot.
    """
    with path.open("rb") as file:
        content = _PlainUnpickler(file).load()
    return _take_apart(content["segments"], content.get("device_traces") or [])


def _take_apart(content: Sequence[Mapping[str, Any]], traces: Sequence[Any]) -> Snapshot:
    stacks: dict[tuple[int, ...], Stack] = {}
    ran_out = [any(entry["action"] == "oom" for entry in trace) for trace in traces]
    reserved = dict.fromkeys(range(len(traces)), 0)
    for segment in content:
        device = int(segment.get("device", 0))
        reserved[device] = reserved.get(device, 0) + int(segment["total_size"])
    device = max(reserved, key=lambda each: (*ran_out[each : each + 1], reserved[each]), default=0)
    segments = [each for each in content if each.get("device", 0) == device]
    blocks = [block for segment in segments for block in segment["blocks"]]
    free = [int(block["size"]) for block in blocks if block["state"] == "inactive"]
    trace = [each for each in [*traces, []][device] if each["action"] in _ACTIONS]
    return Snapshot(
        blocks=[_event(each, "held", stacks) for each in blocks if each["state"] != "inactive"],
        events=[_event(each, _ACTIONS[each["action"]], stacks) for each in trace],
        reserved=reserved.get(device, 0),
        largest_free=max(free, default=0),
        is_expandable=any(bool(segment.get("is_expandable")) for segment in segments),
    )


def _event(entry: Mapping[str, Any], action: str, stacks: dict[Any, Stack]) -> Event:
    size = int(entry["size"])
    if size < 0:
        raise ValueError(f"a block of {size} bytes")
    frames = entry.get("frames") or ()
    key = tuple(map(id, frames))  # frames are shared in a file, so each stack is made once
    if key not in stacks:
        stacks[key] = tuple(
            Frame(str(each["filename"]), int(each["line"]), str(each["name"])) for each in frames
        )
    address = entry.get("device_free" if action == "oom" else "addr", entry.get("address"))
    return Event(action, int(address or 0), size, entry.get("requested_size", size), stacks[key])
