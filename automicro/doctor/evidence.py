"""What a snapshot shows: who holds what, what stayed from earlier rounds, what grew."""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from automicro.doctor.origins import (
    ACTIVATIONS,
    BACKWARD,
    BATCH,
    COPY,
    EARLIER,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TENSORS,
    Origin,
    origin_of,
)
from automicro.doctor.snapshot import Block, Event, Frame, Snapshot, Stack

_MOVING = frozenset((ACTIVATIONS, BACKWARD, BATCH, TENSORS))  # what comes and goes with a step
_LEAST_GROWTH = 2.0  # the last round of the first
_SMALL = 1 << 20  # bytes, as the allocator has it
_MOST_KEEPING = 0.4  # of the lines of a loop
_MOST_MOMENTS = 400  # of a timeline
EARLIER_LABEL = "made before the recording began"


@dataclass(kw_only=True)
class Holder:
    """Who holds memory.

    Attributes:
        kind: one of the names of `automicro.doctor.origins`.
        owner: a module's class, a line, an optimizer.
        num_bytes: all of it.
        count: of tensors.
        largest_bytes: of one tensor.
        where: the line that made most of it.
        caller: the line outside of all modules that led there.
        kept_bytes: what of it is left from earlier rounds.
        kept_count: of how many tensors.
        kept_rounds: from how many.
        grew: bytes in the first and in the last round, where each took as much as the one before
            or more.
        usual_bytes: of the largest tensor in earlier rounds; None where there were none.
        failed_bytes: the request that failed, if it was this one's.
        is_trained: of parameters: whether gradients or optimizer state belong to them; None where
            nothing tells.
    """

    kind: str
    owner: str
    num_bytes: int = 0
    count: int = 0
    largest_bytes: int = 0
    where: Frame | None = None
    caller: Frame | None = None
    kept_bytes: int = 0
    kept_count: int = 0
    kept_rounds: int = 0
    grew: tuple[int, int] | None = None
    usual_bytes: int | None = None
    failed_bytes: int = 0
    is_trained: bool | None = None


@dataclass
class _Made:
    """One allocation of the history."""

    stack: Stack
    origin: Origin
    size: int
    round: int
    event: int


@dataclass(kw_only=True)
class History:
    """What the events tell: the rounds of a loop, and when each block that is held was made.

    Attributes:
        made: of blocks that are held, by address.
        rounds: how often the loop came round; 0 where none shows.
        first_loop_round: the round in which the last backward ended.
        in_backward: whether the last thing that happened was a backward.
        trains: whether there was any.
        sizes: per line, the bytes that each round asked for.
        singles: per line, the largest request of each round.
    """

    made: dict[int, _Made] = field(default_factory=dict)
    rounds: int = 0
    first_loop_round: int = 0
    in_backward: bool = False
    trains: bool = False
    sizes: dict[Frame, dict[int, int]] = field(default_factory=dict)
    singles: dict[Frame, dict[int, int]] = field(default_factory=dict)


def read_history(snapshot: Snapshot) -> History:
    """Play the events once."""
    rounds, is_loop = _rounds(snapshot)
    history = _play(snapshot, rounds)
    # A loop within one forward looks like one of many forwards. Of many, most lines let go.
    if is_loop and _share_that_keeps(history) > _MOST_KEEPING:
        rounds, _ = _rounds(snapshot, with_loops=False)
        history = _play(snapshot, rounds)
    return history


def _share_that_keeps(history: History) -> float:
    """Of the lines that allocated in earlier rounds, the share with something that is left."""
    youngest = history.rounds - 1
    first = history.first_loop_round
    active = {
        frame
        for frame, totals in history.sizes.items()
        if any(first <= number < youngest for number in totals)
    }
    keeping = {
        made.origin.where for made in history.made.values() if first <= made.round < youngest
    }
    return len(active & keeping) / max(len(active), 1)


def _play(snapshot: Snapshot, rounds: Sequence[int]) -> History:
    history = History()
    sizes: defaultdict[Frame, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    singles: defaultdict[Frame, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for index, event in enumerate(snapshot.events):
        if event.action == "free":
            history.made.pop(event.address, None)
            continue
        origin = _origin(event.stack, snapshot)
        number = rounds[index]
        if origin.where is not None:
            sizes[origin.where][number] += event.size
            singles[origin.where][number] = max(singles[origin.where][number], event.size)
        if event.action == "alloc":
            history.made[event.address] = _Made(event.stack, origin, event.size, number, index)
        if origin.kind == BACKWARD:
            history.trains = history.in_backward = True
            history.first_loop_round = number
        elif origin.kind == ACTIVATIONS:
            history.in_backward = False
    history.rounds = rounds[-1] + 1 if rounds and rounds[-1] else 0
    history.sizes = {frame: dict(each) for frame, each in sizes.items()}
    history.singles = {frame: dict(each) for frame, each in singles.items()}
    return history


def _origin(stack: Stack, snapshot: Snapshot) -> Origin:
    """Whose it is; without a stack, while others have one, it is of autograd's own thread."""
    if not stack and snapshot.records_stacks:
        return Origin(BACKWARD, "the backward")
    known: Origin | None = snapshot.origins.get(
        id(stack)
    )  # each stack is there once, and as long as these
    if known is not None:
        return known
    origin = origin_of(stack)
    if origin.kind == BACKWARD:
        origin = Origin(BACKWARD, "the backward", origin.where)
    snapshot.origins[id(stack)] = origin
    return origin


def _rounds(snapshot: Snapshot, *, with_loops: bool = True) -> tuple[list[int], bool]:
    """The round of the training loop, or of another one, in which each event came.

    A round of training ends where a backward begins. Without any, or after the last, a loop shows
    in the outermost function whose lines go back to where they were. Returns whether one did.
    """
    kinds = [
        None if event.action == "free" else _origin(event.stack, snapshot).kind
        for event in snapshot.events
    ]
    last = max((index for index, kind in enumerate(kinds) if kind == BACKWARD), default=-1)
    starts: set[int] = set()
    if with_loops:
        stacks = [tuple(reversed(event.stack)) for event in snapshot.events]
        starts = _starts(stacks, [index for index in range(last + 1, len(kinds)) if kinds[index]])
    rounds, number, was_backward = [], 0, False
    for index, kind in enumerate(kinds):
        if kind == BACKWARD and not was_backward:
            number, was_backward = number + 1, True
        elif kind == ACTIVATIONS:
            was_backward = False
        number += index in starts
        rounds.append(number)
    return rounds, bool(starts)


def _starts(stacks: Sequence[Stack], chosen: Sequence[int]) -> set[int]:
    """The events with which a loop begins anew: where lines of one function jump back."""
    depth = 0
    while chosen:
        at_depth = [index for index in chosen if len(stacks[index]) > depth]
        if not at_depth:
            return set()
        places = Counter(stacks[index][depth] for index in at_depth)
        (file, _, name), _ = places.most_common(1)[0]
        here = [
            index
            for index in at_depth
            if stacks[index][depth].file == file and stacks[index][depth].name == name
        ]
        jumps: defaultdict[int, set[int]] = defaultdict(set)
        for before, after in itertools.pairwise(here):
            line = stacks[after][depth].line
            if line < stacks[before][depth].line:
                jumps[line].add(after)
        often = [line for line, events in jumps.items() if len(events) >= 2]
        if often:
            return jumps[min(often)]
        if name == "forward":  # what loops inside it is no loop of rounds
            return set()
        most = places.most_common(1)[0][0]
        chosen = [index for index in at_depth if stacks[index][depth] == most]
        depth += 1
    return set()


def find_holders(snapshot: Snapshot, history: History) -> list[Holder]:
    """Put together who holds what, the largest first. It costs one look at each block.

    Args:
        snapshot: what is held.
        history: of its events.
    """
    holders: dict[tuple[str, str], Holder] = {}
    lines: defaultdict[tuple[str, str], Counter[Frame]] = defaultdict(Counter)
    kept: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    parameters = Counter(
        block.requested for block in snapshot.blocks if origin_of(block.stack).kind == PARAMETERS
    )
    youngest = history.rounds - 1 - (1 if history.in_backward else 0)
    nobody = -1  # made before the history: the oldest
    ages = {address: made.event for address, made in history.made.items()}
    computed = _computed_sizes(snapshot, parameters)
    youngest_first = sorted(snapshot.blocks, key=lambda each: -ages.get(each.address, nobody))
    for block in youngest_first:
        made = history.made.get(block.address)
        origin = _whose(block, made, snapshot, parameters)
        if origin.kind == BACKWARD:
            origin = computed.get(block.requested, origin)
        key = (origin.kind, origin.owner)
        holder = holders.setdefault(key, Holder(kind=origin.kind, owner=origin.owner))
        holder.num_bytes += block.size
        holder.count += 1
        holder.largest_bytes = max(holder.largest_bytes, block.size)
        holder.caller = holder.caller or origin.caller
        if origin.where is not None:
            lines[key][origin.where] += block.size
        if made is not None and origin.kind in _MOVING and made.round < youngest:
            holder.kept_bytes += block.size
            holder.kept_count += 1
            kept[key].add(made.round)
    for key, holder in holders.items():
        holder.kept_rounds = len(kept[key])
        if lines[key]:
            holder.where = lines[key].most_common(1)[0][0]
    _note_request(snapshot, holders, computed)
    for holder in holders.values():
        _note_rounds(holder, history)
    _note_training(snapshot, holders)
    return sorted(holders.values(), key=lambda holder: -holder.num_bytes)


def _whose(
    block: Block, made: _Made | None, snapshot: Snapshot, parameters: Counter[int]
) -> Origin:
    """Whose a block is. Each parameter has one gradient, the last of its size: others are kept."""
    if made is not None:
        origin = made.origin
    elif block.stack:
        origin = _origin(block.stack, snapshot)
    else:
        return Origin(EARLIER, EARLIER_LABEL)
    if origin.kind == BACKWARD and parameters[block.requested]:
        parameters[block.requested] -= 1
        return Origin(GRADIENTS, "gradients of the parameters")
    if origin.kind == GRADIENTS:
        return Origin(GRADIENTS, "buckets of gradients", origin.where)
    return origin


def _computed_sizes(snapshot: Snapshot, parameters: Counter[int]) -> dict[int, Origin]:
    """Whose activations are of each size: the backward makes gradients of the same sizes.

    A backward runs where no stack tells for which module it does. Small sizes are many modules'.
    """
    found: dict[int, Origin] = {}
    for block in snapshot.blocks:
        if block.size > _SMALL and block.stack and block.requested not in parameters:
            origin = origin_of(block.stack)
            if origin.kind == ACTIVATIONS:
                found.setdefault(block.requested, origin)
    return found


def _note_request(
    snapshot: Snapshot, holders: dict[tuple[str, str], Holder], computed: Mapping[int, Origin]
) -> None:
    failed = failed_request(snapshot)
    if failed is None:
        return
    origin = _origin(failed.stack, snapshot)
    if origin.kind == BACKWARD:
        origin = computed.get(failed.size, origin)
    key = (origin.kind, origin.owner)
    holder = holders.setdefault(key, Holder(kind=origin.kind, owner=origin.owner))
    holder.failed_bytes = failed.size
    if holder.where is None or failed.size > holder.num_bytes:
        holder.where, holder.caller = origin.where, origin.caller


def _note_rounds(holder: Holder, history: History) -> None:
    """How a holder's line did in earlier rounds."""
    if holder.where is None or history.rounds < 3 or holder.kind not in (*_MOVING, COPY):
        return
    totals = history.sizes.get(holder.where, {})
    amounts = [totals[number] for number in sorted(totals)]
    if len(amounts) >= 4:
        whole = list(itertools.pairwise(amounts[:-1]))  # the last round was cut short
        rises = sum(after > before for before, after in whole)
        falls = sum(after < before for before, after in whole)
        if falls == 0 and rises >= 3 and amounts[-2] >= _LEAST_GROWTH * amounts[0]:
            holder.grew = (amounts[0], max(amounts))
    singles = history.singles.get(holder.where, {})
    earlier = [size for number, size in singles.items() if number < max(singles)]
    if len(earlier) >= 2:
        holder.usual_bytes = int(statistics.median(earlier))


def _note_training(snapshot: Snapshot, holders: dict[tuple[str, str], Holder]) -> None:
    """Which parameters have optimizer state or gradients of their sizes."""
    trained: Counter[int] = Counter()
    for block in snapshot.blocks:
        if origin_of(block.stack).kind == OPTIMIZER:
            trained[block.requested] += 1
    models = [holder for holder in holders.values() if holder.kind == PARAMETERS]
    if not trained:
        return
    for holder in models:
        sizes = [
            block.requested
            for block in snapshot.blocks
            if block.stack
            and origin_of(block.stack).kind == PARAMETERS
            and origin_of(block.stack).owner == holder.owner
        ]
        found = sum(size for size in sizes if trained[size])
        holder.is_trained = found >= 0.5 * sum(sizes)


def failed_request(snapshot: Snapshot) -> Event | None:
    """The last request that could not be served."""
    return next((each for each in reversed(snapshot.events) if each.action == "oom"), None)


_LABELS = {OPTIMIZER: "optimizer", GRADIENTS: "gradients", PARAMETERS: "parameters", BATCH: "batch"}


def timeline_of(snapshot: Snapshot) -> list[tuple[float, dict[str, int]]]:
    """Who held how much after each of a few hundred events; empty where nothing was recorded.

    Of the events that fall together, that with the most held is told.
    """
    if not snapshot.events:
        return []
    sizes = {block.requested for block in snapshot.blocks if _kind_of(block) == PARAMETERS}
    held: defaultdict[str, int] = defaultdict(int)
    label_of: dict[int, tuple[str, int]] = {}
    for address, label, size in _from_before(snapshot):
        held[label] += size
        label_of[address] = (label, size)
    samples: list[tuple[float, dict[str, int]]] = []
    total, width = sum(held.values()), max(len(snapshot.events) // _MOST_MOMENTS, 1)
    most, fullest = -1, dict(held)
    for index, event in enumerate(snapshot.events):
        if event.action == "alloc":
            label = _label(event.stack, event.size, snapshot, sizes)
            label_of[event.address] = (label, event.size)
            held[label] += event.size
            total += event.size
        elif event.action == "free" and event.address in label_of:
            label, size = label_of.pop(event.address)
            held[label] -= size
            total -= size
        if total > most:
            most, fullest = total, dict(held)
        if (index + 1) % width == 0 or index + 1 == len(snapshot.events):
            samples.append(
                (float(index + 1), {each: size for each, size in fullest.items() if size})
            )
            most, fullest = -1, {}
    return samples


def _from_before(snapshot: Snapshot) -> Iterator[tuple[int, str, int]]:
    """Blocks that were there before the first event: held still, or given back since."""
    made: set[int] = set()
    for event in snapshot.events:
        if event.action == "alloc":
            made.add(event.address)
        elif event.action == "free" and event.address not in made:
            made.add(event.address)
            yield event.address, EARLIER_LABEL, event.size
    for block in snapshot.blocks:
        if block.address not in made:
            label = _label(block.stack, block.requested, snapshot, set()) if block.stack else ""
            yield block.address, label or EARLIER_LABEL, block.size


def _label(stack: Stack, size: int, snapshot: Snapshot, parameters: set[int]) -> str:
    origin = _origin(stack, snapshot)
    if origin.kind == BACKWARD and size in parameters:
        return "gradients"
    return _LABELS.get(origin.kind, origin.owner)


def _kind_of(block: Block) -> str:
    return origin_of(block.stack).kind
