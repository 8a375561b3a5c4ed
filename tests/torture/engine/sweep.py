"""The sweep: every kind of fault, in every call, of one model."""

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.torture.engine.faults import Fault
from tests.torture.engine.subject import MakeSubject
from tests.torture.engine.trials import CALLS, LOOKS_OVER_AFTER, Scene, Trials

Plan = tuple[Fault, ...]

FOREIGN = ["boom", "interrupt"]


def single_faults(trials: Trials, kinds: Iterable[str]) -> list[Plan]:
    """Yield a fault before and after each operation."""
    return [
        (Fault(index, after, kind),)
        for kind in kinds
        for index in range(trials.num_operations)
        for after in (False, True)
    ]


def faults_at_each(trials: Trials, per_operation: float, seed: int = 0) -> list[Plan]:
    """Yield this many faults per operation: out of memory before and after it, others before it."""
    draw = trials.scene.draw(seed, "each")
    count, one_in = max(1, int(per_operation)), max(1, round(1 / per_operation))
    return [
        (fault,)
        for index in range(draw.randrange(one_in), trials.num_operations, one_in)
        for fault in draw.sample(
            [
                Fault(index),
                Fault(index, after=True),
                *(Fault(index, kind=kind) for kind in FOREIGN),
            ],
            count,
        )
    ]


def double_faults(
    trials: Trials, kinds: Iterable[str], num_first: int, seed: int = 0
) -> list[Plan]:
    """Yield out of memory at some operations, and another fault at each later one."""
    count = trials.num_operations
    draw = trials.scene.draw(seed)
    plans: list[Plan] = []
    for first in draw.sample(range(count), min(num_first, count)):
        retry = trials.reference(trials.retry_size).num_operations
        after = draw.random() < 0.5
        plans += [
            (Fault(first, after), Fault(second, draw.random() < 0.5, kind))
            for kind in kinds
            for second in range(first + 1, first + retry)
        ]
    return plans


def bursts(trials: Trials, count: int, seed: int = 0) -> list[Plan]:
    """Return plans with out of memory in consecutive attempts, at other sizes and levels."""
    draw = trials.scene.draw(seed, "bursts")
    most = trials.num_operations
    plans: list[Plan] = []
    for _ in range(count):
        index = draw.randrange(most)
        plan = [Fault(index, draw.random() < 0.5)]
        for _ in range(draw.randint(2, MOST_IN_A_ROW - 1)):
            index += draw.randint(-(-most // 3), most)  # after the rollback
            plan.append(Fault(index, draw.random() < 0.5))
        plans.append(tuple(plan))
    return plans


def sample(trials: Trials, plans: Sequence[Plan], most: int, *seed: object) -> list[Plan]:
    """Return at most this many plans, drawn from a seed and tried in order."""
    if len(plans) <= most:
        return list(plans)
    chosen = sorted(trials.scene.draw(*seed).sample(range(len(plans)), most))
    return [plans[index] for index in chosen]


@dataclass
class Row:
    """One line of the table."""

    name: str
    what: str
    operations: int
    plans: int = 0
    faults: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    bytes_alive: int = 0
    wrong: list[str] = field(default_factory=list)
    extra: int = 0

    @property
    def recovered(self) -> int:
        """The number of trials that continued as if nothing had happened."""
        return sum(
            count
            for outcome, count in self.outcomes.items()
            if outcome.startswith(("recovered", "no attempt lost"))
        )


def add_up(name: str, rows: Sequence[Row]) -> Row:
    """Add up several rows."""
    total = Row(name, "", sum(row.operations for row in rows))
    total.plans = sum(row.plans for row in rows)
    total.faults = sum(row.faults for row in rows)
    total.outcomes = sum((row.outcomes for row in rows), Counter())
    total.bytes_alive = max((row.bytes_alive for row in rows), default=0)
    total.wrong = [each for row in rows for each in row.wrong]
    return total


def render(rows: Sequence[Row], *, by_model: bool = False) -> str:
    """Format one line for each row or model, one for all, and the outcomes by cause."""
    total = add_up("all", rows)
    lines = rows
    if by_model:
        names = dict.fromkeys(row.name for row in rows)
        lines = [add_up(name, [row for row in rows if row.name == name]) for name in names]
    titles = [f"{row.name}: {row.what}" if row.what else row.name for row in lines]
    width = max(map(len, titles), default=3)
    heads = ("operations", "plans", "faults", "recovered", "refused", "bytes alive", "wrong")
    text = [f"{'':{width}}  " + "  ".join(heads)]
    for title, row in zip([*titles, "all"], [*lines, total], strict=True):
        refused = row.plans - row.recovered
        numbers = (
            row.operations, row.plans, row.faults, row.recovered, refused, row.bytes_alive,
            len(row.wrong),
        )  # fmt: skip
        cells = (f"{each:>{len(head)}}" for each, head in zip(numbers, heads, strict=True))
        text.append(f"{title:{width}}  " + "  ".join(cells))
    text.append("")
    text += [f"{count:>8}  {outcome}" for outcome, count in total.outcomes.most_common()]
    text += [f"WRONG  {each}" for each in total.wrong[:MOST_SHOWN]]
    if len(total.wrong) > MOST_SHOWN:
        text.append(f"and {len(total.wrong) - MOST_SHOWN} more")
    return "\n".join(text)


MOST_SHOWN = 20


MOST_IN_A_ROW = 8


def torture(
    make: MakeSubject,
    *,
    name: str,
    most_plans: int,
    faults_per_operation: float,
    seed: int = 0,
) -> list[Row]:
    """Fail every operation of a model's step once, and compare the remaining state."""
    with quiet():
        choice = Choice(most_plans, faults_per_operation, seed)
        return [sweep(*each) for each in _work(make, name, choice)]


def scenes(name: str, make: MakeSubject, calls: Sequence[str] = CALLS) -> list[Scene]:
    """Return every call: the first one, later ones, and on a simulated device."""
    found = []
    if "backward" in calls:
        found += [Scene(name=name, make=make, warm_steps=warm) for warm in (0, 1)]
        found.append(Scene(name=name, make=make, in_budget=True))
    if "evaluate" in calls:
        found += [
            Scene(name=name, make=make, call="evaluate", warm_evaluations=warm)
            for warm in (0, LOOKS_OVER_AFTER)
        ]
    found += [
        Scene(name=name, make=make, call=call, warm_steps=warm)
        for call, warms in (
            ("unscale", (1,)),
            ("clip", (1,)),
            ("step", (0, 1)),
        )
        for warm in warms
        if call in calls and (call != "unscale" or make().scaler is not None)
    ]
    return found


@dataclass(frozen=True)
class Choice:
    """Selection of trials."""

    most: int
    per_operation: float
    seed: int


def _work(make: MakeSubject, name: str, choice: Choice) -> Iterator[tuple[Trials, str, list[Plan]]]:
    most, seed = choice.most, choice.seed
    for scene in scenes(name, make):
        trials = Trials(scene)
        is_whole = scene.is_settled and not scene.in_budget
        if is_whole:
            plans = faults_at_each(trials, choice.per_operation, seed)
            for what, kinds in ("one out of memory", ["oom"]), ("foreign errors", FOREIGN):
                yield trials, what, [plan for plan in plans if plan[0].kind in kinds]
        else:
            plans = single_faults(trials, ["oom"])
            yield trials, "one out of memory", sample(trials, plans, most, seed, "one")
        if not scene.is_transaction or scene.in_budget:
            continue
        if not is_whole:
            plans = single_faults(trials, FOREIGN)
            yield trials, "foreign errors", sample(trials, plans, most, seed, "foreign")
        plans = double_faults(trials, ["oom", *FOREIGN], num_first=3, seed=seed)
        yield trials, "two faults", sample(trials, plans, most, seed, "two")
        if trials.can_be_smaller:
            yield trials, "many faults", bursts(trials, most, seed)


def sweep(trials: Trials, what: str, plans: Sequence[Plan]) -> Row:
    """Try every plan and add up the outcomes."""
    title = str(trials.scene).removeprefix(f"{trials.scene.name}: ")
    row = Row(trials.scene.name, f"{title}, {what}", trials.num_operations)
    row.extra = trials.num_extra
    trials.get_ready()
    for plan in plans:
        verdict = trials.attempt(plan)
        row.plans += 1
        row.faults += len(plan)
        row.outcomes[verdict.outcome] += 1
        row.bytes_alive = max(row.bytes_alive, verdict.bytes_alive)
        if verdict.faults:
            found = "; ".join(verdict.faults)
            row.wrong.append(f"{trials.scene}: {plan}: {verdict.outcome}: {found}")
    return row


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress logs of retries, and exclude existing objects from garbage collection."""
    logger = logging.getLogger("automicro")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        logger.setLevel(level)
