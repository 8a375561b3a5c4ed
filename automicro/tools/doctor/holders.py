"""Who holds memory, read off the stack of each allocation, and what grew from batch to batch.

A stack holds files, lines and functions. A ``forward`` makes activations, torch's optimizers make
their state, autograd's engine makes gradients, constructors and ``.to(…)`` make parameters.
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
    """A line of code: its file, its number (0 where it is not known), its function."""

    file: str
    line: int
    name: str


_ACTIONS = {"alloc": "alloc", "free_completed": "free", "oom": "oom"}

Stack = tuple[Frame, ...]
"""From the innermost frame to the outermost; empty where none was recorded."""


class Event(NamedTuple):
    """An action of the allocator, or a block that it still holds.

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
    """The blocks of one device's allocator, and its history.

    Attributes:
        blocks: that tensors held at the last request that failed; without one, in the snapshot.
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
        # A snapshot is lists, dicts, numbers and text. A pickle that names anything else may run
        # code.
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot names nothing")


def read_snapshot(path: Path) -> Snapshot:
    """Read the snapshot of the device that ran out of memory, or else of the fullest one.

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
    # Often the snapshot is taken where the error is caught, after frames have let go of tensors:
    # what came after the failure is undone, the last first.
    failures = (at for at, event in enumerate(events) if event.action == "oom")
    failed = max(failures, default=len(events))
    held = {block.address: block for block in blocks}
    made = {event.address: event for event in events[:failed] if event.action == "alloc"}
    for event in reversed(events[failed:]):
        if event.action == "alloc":
            held.pop(event.address, None)
        elif event.action == "free":  # its stack says who let go
            held[event.address] = made.get(event.address, event._replace(action="held", stack=()))
    return list(held.values())


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


PARAMETERS, COPY, GRADIENTS = "parameters", "copy of a model", "gradients"
OPTIMIZER, ACTIVATIONS, BACKWARD = "optimizer state", "activations", "made in the backward"
BATCH, TENSORS, UNKNOWN = "batch", "other tensors", "not recorded"
STEP = "of no known module"  # its activations, for one

# Of a stack's lines "file:function", the innermost first.
# Beside optimizers lie schedulers and averaged models, and zero_grad() makes no state.
_OPTIMIZER = re.compile(r"/optim(?:izers?)?/(?:.*/)?(?!lr_sched|swa_)(\w+)\.py:(?!zero_grad\n)")
_CALLED_BY_OPTIMIZER = re.compile(r".*:(?:forward|closure)\n")
# The first that matches decides: a copy that is made inside of a backward is a copy.
_RULES = (
    (COPY, r"optim/swa_utils\.py:|torch/serialization\.py:"),
    (COPY, r"deepcopy\w*\n(?!(?:.*\n)*.*:__init__\n)"),  # inside of a constructor: a model's layers
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
    """The kind of an allocation, its owner, and the line outside of modules that led to it."""

    kind: str
    owner: str
    caller: str = ""


@dataclass(kw_only=True)
class Holder:
    """Tensors of one kind and one owner.

    Attributes:
        kind: one of the names of this module.
        owner: a module by its name, the line that made them, or an optimizer by torch's file.
        caller: the line outside of modules that led there; empty where it is the owner.
        num_bytes: of all of them.
        count: of tensors.
        largest_bytes: of one tensor.
        failed_bytes: of the request that could not be served, where this owner made it.
        passes: bytes that it held when each backward pass began.
        sizes: how many tensors there are of each size, as it was asked for.
    """

    kind: str
    owner: str
    caller: str = ""
    num_bytes: int = 0
    count: int = 0
    largest_bytes: int = 0
    failed_bytes: int = 0
    passes: Sequence[int] = ()
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The bytes that it holds and asked for."""
        return self.num_bytes + self.failed_bytes

    @property
    def growth(self) -> int:
        """By how much it grew from the second backward pass to the last, pass after pass; or 0."""
        held = self.passes[1:]  # the first pass has neither gradients nor optimizer state yet
        # What swings overlaps between the ends, and what has settled does not rise in its second
        # half.
        third, middle = len(held) // 3, len(held) // 2
        if len(held) < 4 or max(held[:third]) >= min(held[-third:]) or held[middle] >= held[-1]:
            return 0
        steps = [after - before for before, after in itertools.pairwise(held)]
        is_steady = sum(each > 0 for each in steps) >= 4 * sum(each < 0 for each in steps)
        return (held[-1] - held[0]) * is_steady


def find_holders(snapshot: Snapshot) -> list[Holder]:
    """Who holds what, the largest first."""
    # A history may be recorded without stacks.
    has_stacks = any(event.stack for event in snapshot.events[:64])

    def origin_of(stack: Stack) -> Origin:
        # Autograd's threads have no Python stack; everything else has one then.
        return Origin(BACKWARD, "the backward") if has_stacks and not stack else read_origin(stack)

    passes = _held_at_passes(snapshot, origin_of)
    found: dict[tuple[str, str], Holder] = {}

    def holder_of(origin: Origin) -> Holder:
        held = [each[origin[:2]] for each in passes]
        return found.setdefault(origin[:2], Holder(**origin._asdict(), passes=held))

    # Blocks from before the recording have no stack either.
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
    """Bytes by kind and owner when each backward pass began."""
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
            # What hooks or the optimizer allocate does not end a backward: the next activations do.
            is_backward = kind == BACKWARD or (is_backward and kind != ACTIVATIONS)
            made[event.address] = (kind, owner), event.size
            held[kind, owner] += event.size
    return passes


@functools.cache
def read_origin(stack: Stack) -> Origin:
    """Read who made what a stack allocated.

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
    # Modules call one another: of use is the line of the program that led into them.
    caller = next((each for each in program if each.name not in _INSIDE), where)
    # An optimizer may call a closure, whose forward makes no state. Lines are the innermost first,
    # so what is left of the split lies inside of it.
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
    """A line for people.

    >>> place(Frame("/home/me/project/train.py", 30, "main")), place(None)
    ('train.py:30 (main)', 'an unknown line')
    """
    if frame is None:
        return "an unknown line"
    return f"{frame.file.rpartition('/')[2]}:{frame.line} ({frame.name})"
