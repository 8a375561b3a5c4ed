"""Holders of memory, derived from the stack of each allocation, and their growth between batches.

A stack has files, lines and functions. A ``forward`` makes activations, torch's optimizers make
their state, autograd's engine makes gradients, and constructors and ``.to(…)`` make parameters.
"""

import functools
import itertools
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Frame(NamedTuple):
    """A line of code: file, line number (0 if unknown) and function."""

    file: str
    line: int
    name: str


_ACTIONS = {"alloc": "alloc", "free_completed": "free", "oom": "oom"}

Stack = tuple[Frame, ...]
"""From the innermost frame to the outermost; empty if none was recorded."""


class Event(NamedTuple):
    """An action of the allocator, or a block that is still in use."""

    action: str  # "alloc", "free", "oom" or "held"
    address: int  # of the block; for "oom", the free bytes of the device
    size: int  # bytes, rounded up for blocks
    requested: int  # bytes before rounding
    stack: Stack  # of the request


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The blocks and the history of one device's allocator."""

    blocks: Sequence[Event]  # in use at the last failed request, or when the snapshot was taken
    events: Sequence[Event]  # in order; empty if no history was recorded
    reserved: int  # bytes that the allocator reserved
    largest_free: int  # largest free block in them
    is_expandable: bool  # whether segments can already grow

    @property
    def failed(self) -> Event | None:
        """The last request that failed."""
        return next((each for each in reversed(self.events) if each.action == "oom"), None)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A snapshot contains lists, dicts, numbers and text. A pickle that names anything else
        # might run code.
        raise pickle.UnpicklingError(f"it imports {module}.{name}, but a snapshot imports nothing")


def read_snapshot(path: Path) -> Snapshot:
    """Read the snapshot of the device that ran out of memory, or of the fullest device."""
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
    trace = [each for each in [*traces, []][min(device, len(traces))] if each["action"] in _ACTIONS]
    held = [_event(each, "held", stacks) for each in blocks if each["state"] != "inactive"]
    events = [_event(each, _ACTIONS[each["action"]], stacks) for each in trace]
    return Snapshot(
        blocks=_held_at_failure(held, events),
        events=events,
        reserved=reserved.get(device, 0),
        largest_free=max(free, default=0),
        is_expandable=any(bool(segment.get("is_expandable")) for segment in segments),
    )


def _held_at_failure(blocks: Sequence[Event], events: Sequence[Event]) -> list[Event]:
    # A snapshot is often taken where the error is caught, after frames have released tensors, so
    # events after the failure are undone, the last first.
    failures = (at for at, event in enumerate(events) if event.action == "oom")
    failed = max(failures, default=len(events))
    held = {block.address: block for block in blocks}
    made = {event.address: event for event in events[:failed] if event.action == "alloc"}
    for event in reversed(events[failed:]):
        if event.action == "alloc":
            held.pop(event.address, None)
        elif event.action == "free":  # its stack belongs to the release
            held[event.address] = made.get(event.address, event._replace(action="held", stack=()))
    return list(held.values())


def _event(entry: Mapping[str, Any], action: str, stacks: dict[Any, Stack]) -> Event:
    size = int(entry["size"])
    if size < 0:
        raise ValueError(f"a block of {size} bytes")
    frames = entry.get("frames") or ()
    key = tuple(map(id, frames))  # frames are shared in a file, so each stack is built once
    if key not in stacks:
        stacks[key] = tuple(
            Frame(str(each["filename"]), int(each["line"]), str(each["name"])) for each in frames
        )
    address = entry.get("device_free" if action == "oom" else "addr", entry.get("address"))
    return Event(action, int(address or 0), size, entry.get("requested_size", size), stacks[key])


PARAMETERS, COPY, GRADIENTS = "parameters", "copy of a model", "gradients"
OPTIMIZER, ACTIVATIONS, BACKWARD = "optimizer state", "activations", "made in the backward"
BATCH, TENSORS, UNKNOWN = "batch", "other tensors", "not recorded"
STEP = "of no known module"  # includes activations

# Patterns for lines "file:function" of a stack, innermost first.
# Next to optimizers there are schedulers and averaged models, and zero_grad() makes no state.
_OPTIMIZER = re.compile(r"/optim(?:izers?)?/(?:.*/)?(?!lr_sched|swa_)(\w+)\.py:(?!zero_grad\n)")
_CALLED_BY_OPTIMIZER = re.compile(r".*:(?:forward|closure)\n")
# The first match decides: a copy made inside a backward is a copy.
_RULES = (
    (COPY, r"optim/swa_utils\.py:|torch/serialization\.py:"),
    (COPY, r"deepcopy\w*\n(?!(?:.*\n)*.*:__init__\n)"),  # in a constructor, it copies layers
    (BACKWARD, r"autograd::(?:Engine|python::PythonEngine)|:_engine_run_backward\n"),
    (BACKWARD, r"torch/utils/checkpoint\.py:(?:unpack_hook|recompute)"),
    (GRADIENTS, r"\A(?!(?:.*\n)*.*:forward\n)(?:.*\n)*.*torch/nn/parallel/"),
    (
        PARAMETERS,
        r"torch/nn/.*:(?:__init__|reset_parameters|to|to_empty|cuda|xpu|load_state_dict)\n",
    ),
    (PARAMETERS, r"torch/nn/.*:(?:half|float|double|bfloat16)\n|:from_pretrained\n"),
    (ACTIVATIONS, r":forward\n|torch/nn/modules/module\.py:|torch/nn/functional\.py:"),
    (TENSORS, r""),
)
_PLUMBING = re.compile(
    r"/torch/(?!.*/site-packages/)|/lib/python3\.\d+/(?!(?:site|dist)-packages/)|^<|^\?\?|\.(?:cpp|h|c|cu)$|^"
    + re.escape(Path(__file__).parents[2].as_posix())
)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_INSIDE = ("forward", "__init__", "__call__", "<genexpr>", "<listcomp>", "<dictcomp>")


class Origin(NamedTuple):
    """Kind and owner of an allocation, and the line outside modules that led to it."""

    kind: str
    owner: str
    caller: str = ""


@dataclass(kw_only=True)
class Holder:
    """Tensors of one kind and one owner."""

    kind: str  # a name of this module
    owner: str  # a module name, the line that made them, or the file of a torch optimizer
    caller: str = ""  # the line outside modules that led there; empty if it is the owner
    num_bytes: int = 0
    count: int = 0  # of tensors
    largest_bytes: int = 0  # of one tensor
    failed_bytes: int = 0  # of the failed request, if this owner made it
    passes: Sequence[int] = ()  # bytes held at the start of each backward pass
    sizes: dict[int, int] = field(default_factory=dict)  # number of tensors by requested size

    @property
    def total_bytes(self) -> int:
        """Bytes held plus bytes of the failed request."""
        return self.num_bytes + self.failed_bytes

    @property
    def growth(self) -> int:
        """Steady growth in bytes from the second backward pass to the last; otherwise 0."""
        held = self.passes[1:]  # the first pass has no gradients and no optimizer state yet
        # Fluctuating bytes overlap between the two ends, and settled bytes do not grow in the
        # second half.
        third, middle = len(held) // 3, len(held) // 2
        if len(held) < 4 or max(held[:third]) >= min(held[-third:]) or held[middle] >= held[-1]:
            return 0
        steps = [after - before for before, after in itertools.pairwise(held)]
        is_steady = sum(each > 0 for each in steps) >= 4 * sum(each < 0 for each in steps)
        return (held[-1] - held[0]) * is_steady


def find_holders(snapshot: Snapshot) -> list[Holder]:
    """Return all holders, largest first."""
    # A history can be recorded without stacks.
    has_stacks = any(event.stack for event in snapshot.events[:64])

    def origin_of(stack: Stack) -> Origin:
        # Autograd's threads have no Python stack, while all others have one if stacks are recorded.
        return Origin(BACKWARD, "the backward") if has_stacks and not stack else read_origin(stack)

    passes = _held_at_passes(snapshot, origin_of)
    found: dict[tuple[str, str], Holder] = {}

    def holder_of(origin: Origin) -> Holder:
        held = [each[origin[:2]] for each in passes]
        return found.setdefault(origin[:2], Holder(**origin._asdict(), passes=held))

    # Blocks from before the recording have no stack.
    recorded = {event.address for event in snapshot.events if event.action == "alloc"}
    reads = [origin_of if each.address in recorded else read_origin for each in snapshot.blocks]
    origins = [(each, read(each.stack)) for each, read in zip(snapshot.blocks, reads, strict=True)]
    weights = Counter(each.requested for each, of in origins if of.kind in (PARAMETERS, UNKNOWN))
    for block, origin in origins:
        if origin.kind == BACKWARD and weights[block.requested]:
            weights[block.requested] -= 1  # one gradient for each parameter; the rest is kept
            origin = Origin(GRADIENTS, "the parameters")
        holder = holder_of(origin)
        holder.num_bytes += block.size
        holder.count += 1
        holder.largest_bytes = max(holder.largest_bytes, block.size)
        holder.sizes[block.requested] = holder.sizes.get(block.requested, 0) + 1
    if snapshot.failed is not None:
        holder_of(origin_of(snapshot.failed.stack)).failed_bytes = snapshot.failed.size
    return sorted(found.values(), key=lambda holder: -holder.num_bytes)


def _held_at_passes(
    snapshot: Snapshot, origin_of: Callable[[Stack], Origin]
) -> list[Mapping[tuple[str, str], int]]:
    """Return the bytes by kind and owner at the start of each backward pass."""
    passes: list[Mapping[tuple[str, str], int]] = []
    held: Counter[tuple[str, str]] = Counter()
    made: dict[int, tuple[tuple[str, str], int]] = {}
    is_backward = False
    for event in snapshot.events:
        if event.action == "free" and event.address in made:
            key, size = made.pop(event.address)
            held[key] -= size
        elif event.action == "alloc":
            kind, owner, _ = origin_of(event.stack)
            if kind == BACKWARD and not is_backward:
                passes.append(held.copy())
            # Allocations of hooks or the optimizer do not end a backward; new activations do.
            is_backward = kind == BACKWARD or (is_backward and kind != ACTIVATIONS)
            made[event.address] = (kind, owner), event.size
            held[kind, owner] += event.size
    return passes


@functools.cache
def read_origin(stack: Stack) -> Origin:
    """Find the origin of an allocation from its stack.

    >>> read_origin((Frame("/p/model.py", 9, "forward"), Frame("/p/train.py", 3, "main")))
    Origin(kind='activations', owner='model.py:9 (forward)', caller='train.py:3 (main)')
    >>> read_origin(()).kind
    'not recorded'
    """
    if not stack:
        return Origin(UNKNOWN, "made before the recording began")
    stack = tuple(each._replace(file=each.file.replace("\\", "/")) for each in stack)
    lines = "".join(f"{each.file}:{each.name}\n" for each in stack)
    kind = next(kind for kind, pattern in _RULES if re.search(pattern, lines))
    own = [each for each in stack if not _PLUMBING.search(each.file)]
    program = [each for each in own if not _INSTALLED.search(each.file)]
    where = next(iter(own), None)
    # Modules call each other, so the useful line is the one in the program that called them.
    caller = next((each for each in program if each.name not in _INSIDE), where)
    # An optimizer might call a closure, whose forward makes no state. Lines are innermost first,
    # so only an optimizer in the part before a forward or closure counts.
    optimizer = _OPTIMIZER.search(_CALLED_BY_OPTIMIZER.split(lines, 1)[0])
    if optimizer:
        name = f"{optimizer[1]} (foreach)" if ":_multi_tensor_" in lines else optimizer[1]
        return Origin(OPTIMIZER, name, place(caller))
    if kind in (BACKWARD, GRADIENTS):
        names = {BACKWARD: "the backward", GRADIENTS: "buckets of torch.nn.parallel"}
        return Origin(kind, names[kind])
    if kind != COPY and where is not None and where.name in ("__init__", "reset_parameters"):
        kind = PARAMETERS
    if kind in (PARAMETERS, COPY):
        return Origin(kind, place(caller))
    if kind == ACTIVATIONS:
        where = next((each for each in own if each.name == "forward"), where)
    return Origin(kind, place(where), "" if caller == where else place(caller))


def place(frame: Frame | None) -> str:
    """Return a readable form of a line of code.

    >>> place(Frame("/home/me/project/train.py", 30, "main")), place(None)
    ('train.py:30 (main)', 'an unknown line')
    """
    if frame is None:
        return "an unknown line"
    return f"{frame.file.rpartition('/')[2]}:{frame.line} ({frame.name})"
