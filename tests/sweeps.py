"""Parametrized cases: make test runs a few, make sweeps a sample, make nightly the others."""

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
    """Return all combinations of the values, all of them sweeps except the quick ones.

    Args:
        values: the values of each argument.
        quick: cases of make test: a value, or a tuple with one of each argument. In a module of
            sweeps they come first in the sample.
        few: the number of sweeps; all other cases are slow. The seed draws the sample, which has
            every value of each argument if the number suffices.
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
    """Draw cases, preferring those with the most values that no earlier case has."""
    left = random.Random(SEED).sample(cases, len(cases))
    seen: set[tuple[int, int]] = set()
    chosen = []
    for _ in range(min(few, len(left))):
        best = max(left, key=lambda case: len({*enumerate(case)} - seen))
        left.remove(best)
        seen |= {*enumerate(best)}
        chosen.append(best)
    return chosen
