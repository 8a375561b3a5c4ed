"""The search itself, with its counts: ``python -m tests.search.search 2000 [first seed]``.

A bad combination is made simpler, one ingredient after the other, as long as it stays bad in the
same way. What is left names the cause, and many bad combinations share few causes.
"""

import collections
import sys
import time
from collections.abc import Iterable, Iterator

from tests.search.drawing import SIMPLE, simpler
from tests.search.oracle import BAD, Judgement, Verdict, judge, judge_combination
from tests.torture.engine.sweep import quiet

AXES = ("model", "loss", "wiring", "twist", "form", "metric", "fault", "dtype")


def search(seeds: Iterable[int]) -> Iterator[Judgement]:
    """Judge the combination of every seed."""
    with quiet():
        for seed in seeds:
            yield judge(seed)


def search_valid(count: int, first: int = 0) -> Iterator[Judgement]:
    """Judge until `count` combinations were such that plain torch can run them."""
    last = first + 2 * count + 10
    for judgement in search(range(first, last)):
        yield judgement
        count -= judgement.verdict is not Verdict.INVALID
        if not count:
            return
    raise AssertionError(f"of the seeds {first} … {last} plain torch runs fewer than half")


def reproduce(seed: int) -> Judgement:
    """Judge one combination again; a breakpoint here leads to it."""
    with quiet():
        return judge(seed)


def simplified(judgement: Judgement) -> Judgement:
    """The simplest combination found that gets the same verdict."""
    with quiet():
        while True:
            found = (judge_combination(each) for each in simpler(judgement.combination))
            smaller = next((j for j in found if j.verdict is judgement.verdict), None)
            if smaller is None:
                return judgement
            judgement = smaller


def cause(judgement: Judgement) -> str:
    """What is left of a simplified combination beside the simplest ingredients."""
    one = judgement.combination
    left = [
        f"{axis}={getattr(one, axis)!r}" for axis, it in SIMPLE.items() if getattr(one, axis) != it
    ]
    return ", ".join(left) or "nothing special"


def table(judgements: list[Judgement]) -> str:
    """Counts by verdict, and by ingredient of those that are bad."""
    counts = collections.Counter(each.verdict for each in judgements)
    lines = [f"{len(judgements)} combinations"]
    lines += [f"{counts[verdict]:7d}  {verdict.value}" for verdict in Verdict]
    bad = [each for each in judgements if each.verdict in BAD]
    for axis in AXES if bad else ():
        tried = collections.Counter(str(getattr(e.combination, axis)) for e in judgements)
        found = collections.Counter(str(getattr(e.combination, axis)) for e in bad)
        listed = [f"{name} {n} of {tried[name]}" for name, n in found.most_common(8)]
        lines.append(f"bad by {axis}: " + ", ".join(listed))
    return "\n".join(lines)


def causes(judgements: Iterable[Judgement]) -> str:
    """Each cause with how often it was found, its verdict and a seed that shows it."""
    found: dict[str, list[Judgement]] = collections.defaultdict(list)
    for each in judgements:
        if each.verdict in BAD:
            small = simplified(each)
            found[f"{small.verdict.value:12s} {cause(small)}"].append(small)
    lines = []
    for name, those in sorted(found.items(), key=lambda item: -len(item[1])):
        seeds = [each.combination.seed for each in those[:4]]
        lines.append(f"{len(those):5d}  {name}\n         reproduce({seeds[0]}), also {seeds[1:]}")
        lines.append(f"         {those[0].reason.splitlines()[0][:150]}")
    return "\n".join(lines)


def main() -> None:
    count, first = (int(each) for each in [*sys.argv[1:], *("2000", "0")[len(sys.argv) - 1 :]])
    started = time.monotonic()
    judgements = list(search_valid(count, first))
    print(table(judgements))
    print(causes(judgements))
    print(f"{time.monotonic() - started:.0f} seconds")
    sys.exit(any(each.verdict in BAD for each in judgements))


if __name__ == "__main__":
    main()
