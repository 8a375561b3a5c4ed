"""A thousand seeded memory functions: few failures, and almost no extra microbatches."""

import collections
import math

import pytest

from automicro.policy.auto import Halving
from tests.policy.memory_functions import FAMILIES, Run, make_device, train

ALL = 1000
SAMPLE = 100


def failures_allowed(run: Run) -> float:
    return math.log2(run.device.batch) + 2 + run.device.doublings


def check(seeds: int) -> None:
    runs = [train(make_device(seed), Halving()) for seed in range(seeds)]
    for family in FAMILIES:
        of_family = [run for run in runs if run.device.family == family]
        failures = sorted(collections.Counter(run.failures for run in of_family).items())
        gaps = sorted(collections.Counter(run.gap for run in of_family).items())
        print(f"\n{family}: {len(of_family)} functions\n  failures {failures}\n  gaps {gaps}")
    for run in runs:
        where = f"seed {run.device.seed}, {run.device.family}, {run.device.batch} rows"
        assert run.gap <= run.gap_allowed, f"{where}: {run.count} microbatches, best {run.best}"
        assert run.failures <= failures_allowed(run), f"{where}: {run.failures} failures"


def test_sampled_memory_functions_end_near_optimum() -> None:
    check(SAMPLE)


@pytest.mark.slow
def test_thousand_memory_functions_end_near_optimum() -> None:
    check(ALL)
