"""Cases of which make test tries a few, and make sweeps the others."""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_in_sweeps(*values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Every combination of the values; those that are not among the quick ones are sweeps.

    Args:
        values: of each argument.
        quick: what make test tries: a value, or a tuple with one of each argument.
    """
    combinations = [each if len(values) > 1 else each[0] for each in itertools.product(*values)]
    unknown = [each for each in quick if each not in combinations]
    assert not unknown, f"no such case: {unknown}"
    return [
        pytest.param(
            *(each if len(values) > 1 else (each,)),
            marks=() if each in quick else pytest.mark.sweep,
        )
        for each in combinations
    ]
