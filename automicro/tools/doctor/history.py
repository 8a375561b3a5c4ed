"""What the events of a snapshot tell: the rounds of a loop, and when each block was made."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from automicro.tools.doctor.keepers import COLLECTS, find_keepers, goes_backward, reaches_backward
from automicro.tools.doctor.origins import (
    ACTIVATIONS,
    BACKWARD,
    TENSORS,
    Origin,
    is_outside,
    origin_of,
)
from automicro.tools.doctor.snapshot import Frame, Snapshot, Stack
from automicro.tools.doctor.source import has_source, is_generator, loop_at

_MOST_KEEPING = 0.4  # of the lines of a loop


@dataclass
class Made:
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
        loop: the lines that led to the loop of rounds, the outermost first.
        loop_lines: lines of its function that ran in each of the last rounds.
        loss_chain: the lines that led to the last tensor before the last backward.
        followed: lines outside of modules, of which tensors were there when a backward began.
        sizes: per line, the bytes that each round asked for.
        singles: per line, the largest request of each round.
    """

    made: dict[int, Made] = field(default_factory=dict)
    rounds: int = 0
    first_loop_round: int = 0
    in_backward: bool = False
    trains: bool = False
    loop: Stack = ()
    loop_lines: frozenset[int] = frozenset()
    loss_chain: Stack = ()
    followed: set[Stack] = field(default_factory=set)
    sizes: dict[Frame, dict[int, int]] = field(default_factory=dict)
    singles: dict[Frame, dict[int, int]] = field(default_factory=dict)

    def is_followed(self, chain: Stack, *, is_driven: bool) -> bool | None:
        """Whether a backward follows what lines make; None where nothing tells.

        Args:
            chain: the lines, the innermost first.
            is_driven: whether a library called them, which may call the backward, too.
        """
        reaches = reaches_backward(chain)
        if reaches or tuple(each for each in chain if is_outside(each)) in self.followed:
            return True
        may_come = not self.trains and any(goes_backward(each.file) for each in chain)
        return None if reaches is None or is_driven or may_come else False


def read_history(snapshot: Snapshot) -> History:
    """Play the events once."""
    rounds, is_loop = _rounds(snapshot)
    history = _play(snapshot, rounds)
    # A loop within one forward looks like one of many forwards. Of many, most lines let go, or a
    # line shows that keeps, or else no backward comes for which all of it would be needed.
    if is_loop and _share_that_keeps(history) > _MOST_KEEPING and not _shows_keepers(history):
        rounds, _ = _rounds(snapshot, with_loops=False)
        history = _play(snapshot, rounds)
    return history


def _shows_keepers(history: History) -> bool:
    kept: Counter[Origin] = Counter()
    for made in history.made.values():
        if history.first_loop_round <= made.round < history.rounds - 1:
            kept[made.origin] += made.size
    if not kept:
        return False
    origin = kept.most_common(1)[0][0]
    chain = up_to_loop(origin.chain, history.loop)
    if not chain or not has_source(chain[-1]):
        return False
    loop = loop_at(chain[-1], history.loop_lines)
    keepers = [each for each in find_keepers(chain, loop=loop) if each.is_strong]
    # What is collected for a backward that comes, such as states of a sequence, is needed.
    is_followed = history.is_followed(origin.chain, is_driven=origin.is_driven)
    return is_followed is False or any(
        keeper.how != COLLECTS or not keeper.is_local for keeper in keepers
    )


def up_to_loop(chain: Stack, loop: Stack) -> Stack:
    """Of the lines that led to an allocation those in the loop of rounds, the innermost first.

    Args:
        chain: the lines, the innermost first.
        loop: those that led to the loop, the outermost first.

    >>> main, step = Frame("/p/t.py", 9, "main"), Frame("/p/t.py", 3, "step")
    >>> up_to_loop((step, main, Frame("/p/cli.py", 1, "run")), (Frame("/p/cli.py", 1, "run"),))
    (Frame(file='/p/t.py', line=3, name='step'), Frame(file='/p/t.py', line=9, name='main'))
    """
    outer = chain[::-1]
    shared = min(len(_shared(outer, loop)), len(outer) - 1)
    for index in range(shared, -1, -1):
        frame = outer[index]
        if is_outside(frame) and (loop_at(frame) is not None or not has_source(frame)):
            # What a generator makes goes to whoever asked for it.
            return outer[max(index - is_generator(frame), 0) :][::-1]
    return outer[max(shared, 0) :][::-1]


def _shared(one: Stack, other: Stack) -> Stack:
    """What two stacks begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(frame for frame, _ in pairs)


def _loop_of(snapshot: Snapshot, rounds: Sequence[int]) -> tuple[Stack, frozenset[int]]:
    """The lines that one round and the next most often share, the outermost first.

    Returns them with the lines, in the function where they part, of the last two whole rounds.
    """
    shared: dict[int, Stack] = {}
    seen: defaultdict[int, set[Stack]] = defaultdict(set)
    for number, event in zip(rounds, snapshot.events, strict=True):
        chain = () if event.action == "free" else origin_in(event.stack, snapshot).chain[::-1]
        if chain:
            shared[number] = _shared(shared.get(number, chain), chain)
            seen[number].add(chain)
    last_backward = max(
        (
            number
            for number, event in zip(rounds, snapshot.events, strict=True)
            if event.action != "free" and origin_in(event.stack, snapshot).kind == BACKWARD
        ),
        default=0,
    )
    first = last_backward if rounds and rounds[-1] > last_backward + 1 else 0  # a loop of its own
    pairs = Counter(
        _shared(lines, shared.get(number + 1, ()))
        for number, lines in shared.items()
        if number >= first
    )
    loop = pairs.most_common(1)[0][0] if pairs else ()
    last, depth = rounds[-1] if rounds else 0, len(loop)
    of_two = [
        {chain[depth].line for chain in seen[number] if chain[:depth] == loop != chain}
        for number in (last - 1, last - 2)
    ]
    return loop, frozenset(of_two[0] & of_two[1])


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
    loop, lines = _loop_of(snapshot, rounds)
    history = History(loop=loop, loop_lines=lines)
    fresh: dict[int, Origin] = {}  # made since the last backward
    last: Origin | None = None
    sizes: defaultdict[Frame, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    singles: defaultdict[Frame, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for index, event in enumerate(snapshot.events):
        if event.action == "free":
            history.made.pop(event.address, None)
            fresh.pop(event.address, None)
            continue
        origin = origin_in(event.stack, snapshot)
        number = rounds[index]
        if origin.where is not None:
            sizes[origin.where][number] += event.size
            singles[origin.where][number] = max(singles[origin.where][number], event.size)
        if event.action == "alloc":
            history.made[event.address] = Made(event.stack, origin, event.size, number, index)
        if origin.kind == BACKWARD:
            history.followed.update(each.callers for each in fresh.values())
            fresh.clear()
            history.loss_chain = history.loss_chain if last is None else last.chain
            history.trains = history.in_backward = True
            history.first_loop_round = number
        elif origin.kind in (ACTIVATIONS, TENSORS) and origin.chain:
            history.in_backward = history.in_backward and origin.kind != ACTIVATIONS
            fresh[event.address] = last = origin
    history.rounds = rounds[-1] + 1 if rounds and rounds[-1] else 0
    history.sizes = {frame: dict(each) for frame, each in sizes.items()}
    history.singles = {frame: dict(each) for frame, each in singles.items()}
    return history


def origin_in(stack: Stack, snapshot: Snapshot) -> Origin:
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
        None if event.action == "free" else origin_in(event.stack, snapshot).kind
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
    """The events with which a loop begins anew: where lines of one function jump back.

    A loop of one line has nothing to jump: it begins anew where its first stack comes again.
    """
    depth, again = 0, set[int]()
    while chosen:
        at_depth = [index for index in chosen if len(stacks[index]) > depth]
        if not at_depth:
            return again
        places = Counter(stacks[index][depth] for index in at_depth)
        most, _ = places.most_common(1)[0]
        here = [
            index
            for index in at_depth
            if stacks[index][depth].file == most.file and stacks[index][depth].name == most.name
        ]
        jumps: defaultdict[int, set[int]] = defaultdict(set)
        for before, after in itertools.pairwise(here):
            line = stacks[after][depth].line
            if line < stacks[before][depth].line:
                jumps[line].add(after)
        often = [line for line, events in jumps.items() if len(events) >= 2]
        if often:
            return jumps[min(often)]
        if most.name == "forward":  # what loops inside it is no loop of rounds
            return again
        chosen = [index for index in at_depth if stacks[index][depth] == most]
        if is_outside(most) and loop_at(most) is not None:
            same = {index for index in chosen if stacks[index] == stacks[chosen[0]]}
            again = same - {chosen[0]} if len(same) > 2 else again
        depth += 1
    return again
