"""Cases of which make test tries a few, make sweeps a sample, and make nightly the others."""

import itertools
import os
import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest

SEED = int(os.environ.get("AUTOMICRO_SEED", "0"))  # the date in make nightly


def mostly_in_sweeps(
    *values: Iterable[Any], quick: Collection[Any] = (), few: int | None = None
) -> list[Any]:
    """Return all combinations of the values, of which only the quick ones are not sweeps.

    Args:
        values: of each argument.
        quick: what make test tries: a value, or a tuple with one of each argument. In a module of
            sweeps they are the first of the sample.
        few: how many are sweeps, where the others are slow: a sample by the seed, which has every
            value of an argument where that many suffice.
    """
    axes = [[*each] for each in values]
    cases = [*itertools.product(*(range(len(each)) for each in axes))]

    def of(case: tuple[int, ...]) -> Any:
        found = tuple(axis[place] for axis, place in zip(axes, case, strict=True))
        return found if len(axes) > 1 else found[0]

    unknown = [each for each in quick if each not in map(of, cases)]
    assert not unknown, f"no such case: {unknown}"
    swept = [case for case in cases if of(case) not in quick]
    if few is not None:
        swept = _sample(swept, few)
    marks = {case: pytest.mark.sweep if case in swept else pytest.mark.slow for case in cases}
    return [
        pytest.param(
            *(of(case) if len(axes) > 1 else (of(case),)),
            marks=() if of(case) in quick else marks[case],
        )
        for case in cases
    ]


def _sample(cases: list[tuple[int, ...]], few: int) -> list[tuple[int, ...]]:
    """Draw cases, always one of those with the most values that no earlier one has."""
    left = random.Random(SEED).sample(cases, len(cases))
    seen: set[tuple[int, int]] = set()
    chosen = []
    for _ in range(min(few, len(left))):
        best = max(left, key=lambda case: len({*enumerate(case)} - seen))
        left.remove(best)
        seen |= {*enumerate(best)}
        chosen.append(best)
    return chosen
