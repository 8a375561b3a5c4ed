"""The search itself: ``python -m tests.search.search 2000 [first seed]``."""

import collections
import sys
import time
from collections.abc import Iterable, Iterator

from automicro.torture.torture import quiet
from tests.search.oracle import BAD, Judgement, Verdict, judge


def search(seeds: Iterable[int]) -> Iterator[Judgement]:
    """Judge the combination of every seed."""
    with quiet():
        for seed in seeds:
            yield judge(seed)


def search_valid(count: int, first: int = 0) -> Iterator[Judgement]:
    """Judge until `count` combinations were such that plain torch can run them."""
    seed = first
    with quiet():
        while count:
            judgement = judge(seed)
            seed += 1
            count -= judgement.verdict is not Verdict.INVALID
            yield judgement


def reproduce(seed: int) -> Judgement:
    """Judge one combination again; a breakpoint here leads to it."""
    with quiet():
        return judge(seed)


def table(judgements: list[Judgement]) -> str:
    """Counts by verdict, then by ingredient of those that are bad, then how to see each."""
    counts = collections.Counter(each.verdict for each in judgements)
    lines = [f"{sum(counts.values())} combinations"]
    lines += [f"{counts[verdict]:7d}  {verdict.value}" for verdict in Verdict]
    bad = [each for each in judgements if each.verdict in BAD]
    for axis in ("model", "loss", "wiring", "twist", "form", "metric", "fault", "dtype"):
        tried = collections.Counter(str(getattr(e.combination, axis)) for e in judgements)
        found = collections.Counter(str(getattr(e.combination, axis)) for e in bad)
        if found:
            listed = [f"{name} {n} of {tried[name]}" for name, n in found.most_common(12)]
            lines.append(f"bad by {axis}: " + ", ".join(listed))
    return "\n".join([*lines, *map(str, bad)])


def main() -> None:
    count, first = (int(each) for each in [*sys.argv[1:], *("2000", "0")[len(sys.argv) - 1 :]])
    started, judgements = time.monotonic(), []
    for judgement in search_valid(count, first):
        judgements.append(judgement)
        if judgement.verdict in BAD:
            print(judgement, flush=True)
    print(table(judgements))
    print(f"{time.monotonic() - started:.0f} seconds")
    sys.exit(any(each.verdict in BAD for each in judgements))


if __name__ == "__main__":
    main()
