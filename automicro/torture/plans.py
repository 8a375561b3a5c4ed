"""Which faults to try."""

from collections.abc import Iterable, Sequence

from automicro.torture.faults import Fault
from automicro.torture.trials import Trials

Plan = tuple[Fault, ...]


def single_faults(trials: Trials, kinds: Iterable[str]) -> list[Plan]:
    """A fault before and after each operation."""
    return [
        (Fault(index, after, kind),)
        for kind in kinds
        for index in range(trials.num_operations)
        for after in (False, True)
    ]


def double_faults(
    trials: Trials, kinds: Iterable[str], num_first: int, seed: int = 0
) -> list[Plan]:
    """Out of memory at some operations, and another fault at each later one.

    The second lands in the clean-up, the rollback, and the retry at a smaller size.
    """
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


def sample(trials: Trials, plans: Sequence[Plan], most: int | None, *seed: object) -> list[Plan]:
    """At most so many of the plans, drawn from a seed and tried in order."""
    if most is None or len(plans) <= most:
        return list(plans)
    chosen = sorted(trials.scene.draw(*seed).sample(range(len(plans)), most))
    return [plans[index] for index in chosen]
