"""What a snapshot shows: who holds what, what stayed from earlier rounds, what grew."""

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from automicro.tools.doctor.history import History, Made, origin_in, up_to_loop
from automicro.tools.doctor.origins import (
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
    is_outside,
    origin_of,
    told,
)
from automicro.tools.doctor.snapshot import Block, Event, Frame, Snapshot, Stack
from automicro.tools.doctor.source import (
    line_of,
    loop_at,
    name_given,
    optimized_at,
    runs_without_grad,
)

_MOVING = frozenset((ACTIVATIONS, BACKWARD, BATCH, TENSORS))  # what comes and goes with a step
_LEAST_GROWTH = 2.0  # the last round of the first
_SMALL = 1 << 20  # bytes, as the allocator has it
_JOINS = re.compile(r"\b(cat|concat|concatenate|hstack|vstack|stack|pad|append|expand|repeat)\(")
_STEPS = ("_multi_tensor", "_single_tensor", "_fused")  # an optimizer's, after its state is there
_MOST_MOMENTS = 400  # of a timeline
EARLIER_LABEL = "made before the recording began"


@dataclass(kw_only=True)
class Holder:
    """Who holds memory.

    Attributes:
        kind: one of the names of `automicro.tools.doctor.origins`.
        owner: a module's class, a line, an optimizer.
        num_bytes: all of it.
        count: of tensors.
        largest_bytes: of one tensor.
        where: the line that made most of it.
        chain: the lines that led to most of what the last round made, the innermost first.
        callers: lines outside of modules that led there, each with its bytes of the last round.
        part: of what most of a model's or its optimizer's bytes are, such as an embedding.
        temporary_bytes: of an optimizer: what is no state, and goes when its step ends.
        kept_bytes: what of it is left from earlier rounds.
        kept_line_bytes: of one line alone.
        kept_rounds: from how many.
        kept_chain: the lines that led to most of them, to that in the loop of rounds.
        kept_loop: that loop.
        grew: bytes of its largest tensor in the first and in the last round, where each took as
            much as the one before or more.
        grown_by: the line that makes it grow, by joining tensors; None where none does.
        usual_bytes: of the largest tensor in earlier rounds; None where there were none.
        failed_bytes: the request that failed, if it was this one's.
        is_trained: of parameters: whether optimizer state belongs to them; None where nothing
            tells.
        is_once: whether its line ran before the first round ended, and no more.
        is_followed: of a forward: whether a backward came after it, or will as the source has it;
            None where nothing tells.
        is_without_grad: whether it runs under ``no_grad``, as the source has it.
        is_driven: whether a library called the program's lines.
    """

    kind: str
    owner: str
    num_bytes: int = 0
    count: int = 0
    largest_bytes: int = 0
    where: Frame | None = None
    chain: Stack = ()
    callers: dict[Frame, int] = field(default_factory=dict)
    part: str = ""
    temporary_bytes: int = 0
    kept_bytes: int = 0
    kept_line_bytes: int = 0
    kept_rounds: int = 0
    kept_chain: Stack = ()
    kept_loop: Frame | None = None
    grew: tuple[int, int] | None = None
    grown_by: Frame | None = None
    usual_bytes: int | None = None
    failed_bytes: int = 0
    is_trained: bool | None = None
    is_once: bool = False
    is_followed: bool | None = None
    is_without_grad: bool = False
    is_driven: bool = False

    @property
    def caller(self) -> Frame | None:
        """The line outside of all modules that led there."""
        return next((each for each in self.chain if is_outside(each)), self.where)


@dataclass
class _Tally:
    """What is counted of one holder, in bytes."""

    holder: Holder
    lines: Counter[Frame] = field(default_factory=Counter)
    origins: Counter[Origin] = field(default_factory=Counter)
    kept: Counter[Origin] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    kept_rounds: set[int] = field(default_factory=set)

    def count(self, block: Block, origin: Origin, part: Origin | None) -> None:
        self.holder.num_bytes += block.size
        self.holder.count += 1
        self.holder.largest_bytes = max(self.holder.largest_bytes, block.size)
        if origin.where is not None:
            self.lines[origin.where] += block.size
        if part is not None and part.chain:
            what = f"the {part.part}" if part.part else "a tensor"
            self.parts[f"{what} at {told(part.chain[0])}"] += block.size

    def count_kept(self, block: Block, origin: Origin, number: int) -> None:
        self.holder.kept_bytes += block.size
        self.kept_rounds.add(number)
        self.kept[origin] += block.size

    def tell(self, history: History) -> None:
        """Note on the holder what most of its bytes are."""
        holder = self.holder
        for where, _ in self.lines.most_common(1):
            holder.where = where
        for origin, _ in self.origins.most_common(1):
            holder.chain, holder.is_driven = origin.chain, origin.is_driven
        for part, num_bytes in self.parts.most_common(1):
            holder.part = part if num_bytes >= 0.5 * holder.num_bytes else ""
        for origin, num_bytes in self.origins.items():
            if origin.caller is not None:
                holder.callers[origin.caller] = holder.callers.get(origin.caller, 0) + num_bytes
        chain: Stack = ()
        for origin, holder.kept_line_bytes in self.kept.most_common(1):
            chain = origin.chain
        holder.kept_chain = up_to_loop(chain or history.loss_chain, history.loop)
        if holder.kept_chain:
            holder.kept_loop = loop_at(holder.kept_chain[-1], history.loop_lines)
        holder.kept_rounds = len(self.kept_rounds)
        if holder.kept_rounds < 2 and holder.kind in (TENSORS, BATCH):  # once, for all rounds
            holder.kept_bytes = holder.kept_rounds = 0


def find_holders(snapshot: Snapshot, history: History) -> list[Holder]:
    """Put together who holds what, the largest first. It costs one look at each block.

    Args:
        snapshot: what is held.
        history: of its events.
    """
    tallies: dict[tuple[str, str], _Tally] = {}
    made_of = [(block.requested, origin_of(block.stack)) for block in snapshot.blocks]
    weights = {size: origin for size, origin in made_of if origin.kind == PARAMETERS}
    parameters = Counter(size for size, origin in made_of if origin.kind == PARAMETERS)
    youngest = history.rounds - 1 - (1 if history.in_backward else 0)
    nobody = -1  # made before the history: the oldest
    ages = {address: made.event for address, made in history.made.items()}
    computed = _computed_sizes(snapshot, parameters)
    youngest_first = sorted(snapshot.blocks, key=lambda each: -ages.get(each.address, nobody))
    failed = failed_request(snapshot)
    in_step = failed is not None and origin_in(failed.stack, snapshot).kind == OPTIMIZER
    for block in youngest_first:
        made = history.made.get(block.address)
        origin = _whose(block, made, snapshot, parameters)
        if origin.kind == BACKWARD:
            origin = computed.get(block.requested, origin)
        holder = Holder(kind=origin.kind, owner=origin.owner)
        tally = tallies.setdefault((origin.kind, origin.owner), _Tally(holder))
        is_of_weights = origin.kind in (PARAMETERS, GRADIENTS, OPTIMIZER)
        tally.count(block, origin, weights.get(block.requested) if is_of_weights else None)
        if made is not None and origin.kind in _MOVING and made.round < youngest:
            tally.count_kept(block, origin, made.round)
        else:
            tally.origins[origin] += block.size
        if in_step and made is not None and made.round == history.rounds - 1:
            tally.holder.temporary_bytes += block.size * origin.part.startswith(_STEPS)
    for tally in tallies.values():
        tally.tell(history)
    holders = {key: tally.holder for key, tally in tallies.items()}
    _note_request(snapshot, holders, computed)
    growing = _growing_lines(history)
    for holder in holders.values():
        _note_rounds(holder, history, growing)
        _note_backward(holder, history)
    _note_training(snapshot, holders)
    return sorted(holders.values(), key=lambda holder: -holder.num_bytes)


def _whose(block: Block, made: Made | None, snapshot: Snapshot, parameters: Counter[int]) -> Origin:
    """Whose a block is. Each parameter has one gradient, the last of its size: others are kept."""
    if made is not None:
        origin = made.origin
    elif block.stack:
        origin = origin_in(block.stack, snapshot)
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
    origin = origin_in(failed.stack, snapshot)
    if origin.kind == BACKWARD:
        origin = computed.get(failed.size, origin)
    key = (origin.kind, origin.owner)
    holder = holders.setdefault(key, Holder(kind=origin.kind, owner=origin.owner))
    holder.failed_bytes = failed.size
    if holder.where is None or failed.size > holder.num_bytes:
        holder.where = origin.where
    if not holder.chain or failed.size > holder.num_bytes:
        holder.chain, holder.is_driven = origin.chain, origin.is_driven


def _growing_lines(history: History) -> dict[Frame, tuple[int, int]]:
    """Lines of which the largest tensor grows, with its bytes in the first and the last round."""
    found = {}
    for frame, singles in history.singles.items():
        amounts = [singles[number] for number in sorted(singles)]
        whole = list(itertools.pairwise(amounts[:-1]))  # the last round was cut short
        rises = sum(after > before for before, after in whole)
        falls = sum(after < before for before, after in whole)
        if falls == 0 and rises >= 3 and amounts[-2] >= _LEAST_GROWTH * amounts[0]:
            found[frame] = (amounts[0], max(amounts))
    return found


def _note_rounds(
    holder: Holder, history: History, growing: Mapping[Frame, tuple[int, int]]
) -> None:
    """How a holder's line did in earlier rounds."""
    if holder.where is None or holder.kind not in (*_MOVING, COPY):
        return
    is_first = set(history.singles.get(holder.where, {})) <= {0} and not holder.failed_bytes
    holder.is_once = is_first and (history.rounds > 1 or not any(map(loop_at, holder.chain)))
    holder.grew = growing.get(holder.where)
    if holder.grew is not None:
        joining = [frame for frame in growing if _JOINS.search(line_of(frame))]
        holder.grown_by = holder.where if holder.where in joining else (*joining, None)[0]
    singles = history.singles.get(holder.where, {})
    earlier = [size for number, size in singles.items() if number < max(singles)]
    if len(earlier) >= 2:
        holder.usual_bytes = int(statistics.median(earlier))


def _note_backward(holder: Holder, history: History) -> None:
    """Whether what a forward keeps is for a backward."""
    chain = holder.chain or holder.kept_chain
    if holder.kind not in (ACTIVATIONS, TENSORS) or not chain:
        return
    holder.is_without_grad = runs_without_grad(chain)
    holder.is_followed = history.is_followed(chain, is_driven=holder.is_driven)


def _note_training(snapshot: Snapshot, holders: dict[tuple[str, str], Holder]) -> None:
    """Which parameters have optimizer state of their sizes; before any, as the source has it."""
    trained: Counter[int] = Counter()
    for block in snapshot.blocks:
        if origin_of(block.stack).kind == OPTIMIZER:
            trained[block.requested] += 1
    models = [holder for holder in holders.values() if holder.kind == PARAMETERS]
    if not trained:
        for holder in models:
            names = set() if holder.where is None else optimized_at(holder.where)
            if names and holder.where is not None:
                holder.is_trained = name_given(holder.where) in names
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
    origin = origin_in(stack, snapshot)
    if origin.kind == BACKWARD and size in parameters:
        return "gradients"
    return _LABELS.get(origin.kind, origin.owner)


def _kind_of(block: Block) -> str:
    return origin_of(block.stack).kind
