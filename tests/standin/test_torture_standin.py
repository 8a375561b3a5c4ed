"""The torture sweep on the device: every kind of fault, and a check of the remaining state."""

import functools
from collections.abc import Callable

import pytest
import torch

from tests.torture.conftest import without_log_and_long_collections  # noqa: F401
from tests.torture.engine.subject import Subject
from tests.torture.engine.sweep import Plan, double_faults, render, sample, single_faults, sweep
from tests.torture.engine.trials import Scene, Trials
from tests.torture.more_subjects import SUBJECTS

NAMES = ["MLP", "BatchNorm and dropout", "tied weights"]
CALLS = [("backward", 0), ("backward", 1), ("evaluate", 1), ("step", 0)]


def on_the_device(make: Callable[[], Subject]) -> Subject:
    with torch.device("standin"):
        return make()


def trials_of(name: str, call: str, warm_steps: int) -> Trials:
    make = functools.partial(on_the_device, SUBJECTS[name])
    return Trials(Scene(name=name, make=make, call=call, warm_steps=warm_steps))


def spread(plans: list[Plan], number: int) -> list[Plan]:
    """Return points across the call, up to the last; failing checks at its start cost nothing."""
    return plans[::-1][:: max(1, len(plans) // number)]


@pytest.mark.parametrize(("call", "warm_steps"), CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_device_failure_is_recovered_or_leaves_no_trace(
    name: str, call: str, warm_steps: int
) -> None:
    trials = trials_of(name, call, warm_steps)
    run = trials.scene.make()
    assert {each.device.type for each in run.model.parameters()} == {"standin"}
    plans = spread(single_faults(trials, ["oom"]), 7)
    if trials.scene.is_transaction:
        plans += sample(trials, single_faults(trials, ["boom", "interrupt"]), 2, "foreign")
        faults = ["oom", "boom", "interrupt"]
        plans += sample(trials, double_faults(trials, faults, num_first=1), 2, "two")
    row = sweep(trials, "faults", plans)
    print(render([row]))
    assert row.wrong == []
    assert row.bytes_alive <= 0
    assert row.plans == len(plans)
    if trials.scene.is_transaction and warm_steps:  # a first batch consists mostly of checks
        assert row.outcomes["recovered"] > 0
