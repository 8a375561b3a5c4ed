"""A seeded sample of the thousands of faults that `make torture` tries."""

import functools
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from automicro.loss.passes import is_extra_pass
from tests.sweeps import SEED, mostly_in_sweeps
from tests.torture.engine.faults import Fault, FaultMode
from tests.torture.engine.sweep import (
    Plan,
    bursts,
    double_faults,
    render,
    sample,
    scenes,
    single_faults,
    sweep,
)
from tests.torture.engine.trials import LOOKS_OVER_AFTER, Scene, Trials, _count_reservation, attempt
from tests.torture.more_subjects import SUBJECTS
from tests.torture.subjects import classify

pytestmark = pytest.mark.sweep

KINDS = ["oom", "boom", "interrupt"]
LEFT_AS_BEFORE = {
    *("state as before: Boom", "state as before: KeyboardInterrupt", "committed, then raised"),
}
HALF_APPLIED = {f"OptimizerStepError: {what} half applied" for what in ("unscale", "clip", "step")}


def check(trials: Trials, title: str, plans: Sequence[Plan], size: int) -> set[str]:
    """Try a sample of the plans, and return the outcomes."""
    row = sweep(trials, title, sample(trials, plans, size, title))
    print(render([row]))
    assert row.wrong == []
    assert row.bytes_alive <= 0
    return set(row.outcomes)


def scene(name: str, call: str = "backward", warm_steps: int = 1) -> Scene:
    return Scene(name=name, make=SUBJECTS[name], call=call, warm_steps=warm_steps)


@pytest.mark.parametrize("name", mostly_in_sweeps(SUBJECTS, few=16))
def test_failure_is_recovered_bit_identically_or_leaves_no_trace(name: str) -> None:
    trials = Trials(scene(name))
    # Checks are over, except for parts whose targets trigger new ones.
    assert trials.num_extra == 0 or "tail" in name
    num_faults = 8 if trials.num_extra else 2  # a check that runs out of memory has no effect
    outcomes = check(trials, "one out of memory", single_faults(trials, ["oom"]), num_faults)
    assert any(outcome.startswith("recovered") for outcome in outcomes)
    outcomes = check(trials, "foreign errors", single_faults(trials, ["boom", "interrupt"]), 1)
    assert outcomes <= LEFT_AS_BEFORE
    check(trials, "two faults", double_faults(trials, KINDS, num_first=1), 1)
    if trials.can_be_smaller:
        check(trials, "many faults", bursts(trials, 1), 1)


# The first step has a probe and a reservation; a memory budget copies every batch.
@pytest.mark.parametrize(
    "each",
    [
        each
        for name, calls in (
            ("state of every kind", ["backward", "clip", "step"]),
            ("fp16", ["unscale", "clip", "step"]),
        )
        for each in scenes(name, SUBJECTS[name], calls)
    ],
    ids=str,
)
def test_oom_in_any_call_is_recovered_or_named(each: Scene) -> None:
    trials = Trials(each)
    outcomes = check(trials, "one out of memory", single_faults(trials, ["oom"]), 4)
    assert not any("refused" in outcome for outcome in outcomes)
    assert each.is_transaction or outcomes <= HALF_APPLIED


@pytest.mark.parametrize("name", ["BatchNorm and dropout", "tied weights", "compute groups"])
def test_evaluation_metrics_count_each_row_once_after_failure(name: str) -> None:
    settled = Scene(
        name=name, make=SUBJECTS[name], call="evaluate", warm_evaluations=LOOKS_OVER_AFTER
    )
    trials = Trials(settled)
    assert trials.num_extra == 0
    check(trials, "any fault", single_faults(trials, KINDS), 3)
    trials = Trials(scene(name, "evaluate"))
    check(trials, "any fault, first evaluation", single_faults(trials, KINDS), 1)


def test_harness_detects_missing_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    # A part that forgets to roll back must be detected.
    monkeypatch.setattr("automicro.state.capture.Captured.put_back", lambda self: None)
    verdict = attempt(Trials(scene("BatchNorm and dropout")), [Fault(140)])
    assert any("body.1.running_mean" in fault for fault in verdict.faults)


def test_harness_detects_leaked_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[BaseException] = []

    def hoard(failure: BaseException, *_: object) -> None:
        kept.append(failure)

    monkeypatch.setattr("automicro.step.fit.release", hoard)
    verdict = attempt(Trials(scene("BatchNorm and dropout")), [Fault(100)])
    assert verdict.survivors > 0
    assert verdict.bytes_alive > 0


@functools.cache
def hidden() -> list[int]:
    """Return a counter that no library can reach."""
    return [0]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden()[0] += self.training
        out: Tensor = self.layer(x) * (1 + 0.1 * hidden()[0])
        return out


def test_harness_detects_state_out_of_reach() -> None:
    trials = Trials(Scene(name="counting", make=lambda: classify(Counting(), 4)))
    plans = sample(trials, single_faults(trials, ["oom"]), 4)
    assert any("gradient layer.weight" in each for each in sweep(trials, "any", plans).wrong)


class Places(FaultMode):
    """Record which operations belong to a slice of a part in a second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        if {"recompute_fn", "compute_part"} <= names and not is_extra_pass():
            self.found.append(self.num_operations)
        return super().run(func, types, args, kwargs)


def test_failing_slice_in_recompute_excludes_no_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = scene("nested inside recompute", warm_steps=0)
    trials = Trials(first)
    run = trials._prepare()
    with Places() as places, first.cutting(run, None)():
        _count_reservation(run, places)
        first.play(run)
    with caplog.at_level(logging.WARNING, logger="automicro"):
        verdicts = [
            attempt(trials, [Fault(each, after=True)]) for each in places.found[SEED % 3 :: 3]
        ]
    assert any(each.outcome == "recovered: the part is smaller" for each in verdicts)
    assert not any(each.faults for each in verdicts)
    assert "is not recomputed" not in caplog.text
