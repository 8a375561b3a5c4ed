"""A seeded sample of the faults that `make torture` tries exhaustively."""

import random
from collections.abc import Sequence

import pytest

from automicro import Halving, SampleTooLargeError
from tests.torture.faults import Fault, FaultMode
from tests.torture.states import differences, objects, replaced, values
from tests.torture.subjects import FIRST_SIZE, SUBJECTS
from tests.torture.sweep import (
    Scene,
    Verdict,
    attempt,
    call,
    double_faults,
    prepare,
    single_faults,
    sweep,
)
from tests.torture.table import render

BACKWARD = [Scene(subject, "backward", warm) for subject in SUBJECTS for warm in (0, 1)]
IN_BUDGET = [Scene(subject, in_budget=True) for subject in SUBJECTS]


def check(scene: Scene, title: str, plans: Sequence[tuple[Fault, ...]], size: int) -> set[str]:
    """Try a sample of the plans, and give the outcomes."""
    chosen = random.Random(f"{scene} {title}").sample(plans, min(size, len(plans)))
    row = sweep(scene, title, chosen)
    print(render([row]))
    assert row.wrong == []
    assert row.bytes_alive <= 0
    return set(row.outcomes)


@pytest.mark.parametrize("scene", [*BACKWARD, *IN_BUDGET], ids=str)
def test_out_of_memory_anywhere_is_recovered_bit_identically(scene: Scene) -> None:
    outcomes = check(scene, "one out of memory", single_faults(scene, ["oom"]), 6)
    assert "recovered" in outcomes
    assert not any("refused" in outcome for outcome in outcomes)


@pytest.mark.parametrize("scene", BACKWARD[1::2], ids=str)
def test_a_second_fault_in_clean_up_rollback_or_retry_leaves_no_trace(scene: Scene) -> None:
    plans = double_faults(scene, ["oom", "boom", "interrupt"], num_first=1)
    outcomes = check(scene, "two faults", plans, 10)
    assert any(outcome.startswith("state as before") for outcome in outcomes)


@pytest.mark.parametrize("scene", BACKWARD[1::2], ids=str)
def test_foreign_errors_and_interrupts_leave_the_state_as_before(scene: Scene) -> None:
    plans = single_faults(scene, ["boom", "interrupt"])
    outcomes = check(scene, "foreign errors", plans, 12)
    assert outcomes <= {
        "state as before: Boom",
        "state as before: KeyboardInterrupt",
        "committed, then raised",
    }


@pytest.mark.parametrize("subject", SUBJECTS)
def test_metrics_of_an_evaluation_count_once_whatever_fails(subject: str) -> None:
    scene = Scene(subject, "evaluate")
    check(scene, "any fault", single_faults(scene, ["oom", "boom", "interrupt"]), 8)


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_an_optimizer_step_is_applied_once_or_refused(subject: str, warm: int) -> None:
    scene = Scene(subject, "optimizer step", warm)
    outcomes = check(scene, "one out of memory", single_faults(scene, ["oom"]), 6)
    assert outcomes <= {"recovered", "OptimizerStepError: half applied"}


def test_the_harness_sees_what_is_left_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # A part that forgets to roll back must not pass.
    scene = Scene("BatchNorm and dropout")
    monkeypatch.setattr("automicro.transaction.Buffers.roll_back", lambda self: self._forget())
    verdict: Verdict = attempt(scene, [Fault(140)])
    assert any("body.1.running_mean" in fault for fault in verdict.faults)


def test_the_harness_sees_what_is_left_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[BaseException] = []
    scene = Scene("BatchNorm and dropout")

    def hoard(failure: BaseException, *_: object) -> None:
        kept.append(failure)

    monkeypatch.setattr("automicro.attempts.release", hoard)
    verdict = attempt(scene, [Fault(100)])
    assert verdict.survivors > 0
    assert verdict.bytes_alive > 0


def test_no_batch_can_open_a_transaction_without_memory() -> None:
    scene = Scene("tied weights")
    run = prepare(scene, Halving(initial=FIRST_SIZE))
    before, before_objects = values(run), objects(run)
    plan = [Fault(index) for index in range(40)]
    with FaultMode(plan) as mode, pytest.raises(SampleTooLargeError):
        call(scene, run)
    assert len(mode.raised_at) >= 2
    assert differences(before, values(run)) == []
    assert replaced(before_objects, objects(run)) == []
