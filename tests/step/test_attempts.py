"""The retry loop: which sizes it tries, records, cleans up after and raises."""

import functools
import gc
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from automicro import Fixed, Halving, Outcome, RollbackError, SampleTooLargeError
from automicro.memory.residents import ResidentMemory
from automicro.policy.ladder import Ladder
from automicro.policy.policy import Policy
from automicro.step.fit import fit as run_step
from automicro.step.phase import Phase
from automicro.step.plan import CutRule, ReadBatch, Step
from automicro.step.setup import Plain, Setup

Attempt = Callable[[list[int]], str]
OOM = "CUDA out of memory."


def fits(most_rows: int, tried: Any = None) -> Attempt:
    def attempt(sizes):
        if tried is not None:
            tried.append(sizes)
        if max(sizes) > most_rows:
            raise torch.OutOfMemoryError(OOM)
        return "done"

    return attempt


def phase_of(policy: Policy, rule: CutRule | None = None) -> Phase:
    setup = Setup(model=nn.Module(), modules=[], device=torch.device("cpu"))
    levels = [Plain() for _ in policy.levels]
    return Phase("train", policy, setup, rule=rule or CutRule(), levels=levels)


def run(
    attempt: Attempt,
    rows: int | Sequence[Any],
    policy: Policy,
    rule: CutRule | None = None,
    *,
    parts: Sequence[Any] = (),
    residents: ResidentMemory | None = None,
) -> Any:
    """Run a step of the given rows, or batches, whose work is the attempt."""
    batches = [rows] if isinstance(rows, int) else rows
    read = [
        each if isinstance(each, ReadBatch) else ReadBatch(batch=None, num_rows=each)
        for each in batches
    ]
    work: Any = types.SimpleNamespace(
        check=lambda plan: None,
        parts=lambda: parts,
        run=lambda plan: attempt([size for cut in plan.cuts for size in cut.sizes]),
        failed=lambda message, peak_bytes: (),
        numbers=lambda result: (),
        combined=lambda result, sums: result,
        accepts=lambda result: True,
        residents=lambda: residents,
    )
    return run_step(Step(batches=read, policy=policy), work, phase_of(policy, rule))


def needs_two(most_rows: int, tried: Any = None) -> Attempt:
    run = fits(most_rows, tried)

    def attempt(sizes):
        if 1 in sizes:
            raise ValueError("Expected more than 1 value per channel when training, got input size")
        return run(sizes)

    return attempt


def raising(error: BaseException) -> Attempt:
    def attempt(sizes):
        raise error

    return attempt


class Stubborn:
    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.num_rollbacks, self.is_open = list(errors), 0, False

    def begin(self):
        self.is_open = True

    def prepare(self):
        pass

    def commit(self):
        self.is_open = False

    def roll_back(self):
        self.num_rollbacks += 1
        if self.errors:
            raise self.errors.pop(0)
        self.is_open = False


# Sizes


def test_size_shrinks_until_attempt_fits_and_is_reused(caplog):
    tried: list[list[int]] = []
    policy = Halving()
    with caplog.at_level(logging.WARNING):
        finished = run(fits(3, tried), 10, policy)
    assert tried == [[10], [5, 5], [3, 3, 2, 2]]
    assert (finished.result, finished.attempts, finished.failed_sizes) == ("done", 3, (10, 5))
    said = "automicro: out of memory at microbatch size"
    assert [record.getMessage() for record in caplog.records] == [
        f"{said} 10: retrying with 5 (2 microbatches of 5 rows)",
        f"{said} 5: retrying with 3 (4 microbatches of up to 3 rows)",
    ]
    assert run(fits(3, tried), 10, policy).failed_sizes == ()


def climbing(policy: Policy, most: Sequence[int], tried: Any) -> Attempt:
    """Return an attempt that fits a given number of rows at each policy level."""

    def attempt(sizes):
        tried.append((policy.level, max(sizes)))
        return fits(most[policy.level])(sizes)

    return attempt


def test_next_level_is_tried_when_single_row_does_not_fit(caplog):
    policy, tried = Ladder(Halving(), ["plain", "recompute"]), list[Any]()
    with caplog.at_level(logging.WARNING, "automicro.attempts"):
        finished = run(climbing(policy, [0, 4], tried), 8, policy)
    assert tried == [(0, 8), (0, 4), (0, 2), (0, 1), (1, 8), (1, 4)]
    assert (finished.plan.level, finished.attempts, finished.plan.size) == (1, 6, 4)
    said = [record.getMessage().split(" (")[0] for record in caplog.records]
    assert said[2] == "automicro: out of memory at microbatch size 2: retrying with 1"
    assert said[3] == "automicro: out of memory at microbatch size 1: retrying with 8 and recompute"
    del tried[:]
    assert run(climbing(policy, [0, 4], tried), 8, policy).plan.level == 1
    assert tried == [(1, 4)]


def test_fixed_size_climbs_levels_and_final_error_mentions_it():
    policy, tried = Ladder(Fixed(4), ["plain", "recompute"]), list[Any]()
    assert run(climbing(policy, [3, 4], tried), 8, policy).plan.level == 1
    assert tried == [(0, 4), (1, 4)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(climbing(policy, [3, 3], tried), 8, policy)
    assert "the microbatch size is fixed" in "".join(caught.value.__notes__)


def test_failure_at_highest_level_leaves_policy_state_unchanged():
    policy, tried = Ladder(Halving(), ["plain", "recompute"]), list[Any]()
    before = policy.state_dict()
    with pytest.raises(SampleTooLargeError):
        run(climbing(policy, [0, 0], tried), 2, policy)
    assert tried == [(0, 2), (0, 1), (1, 2), (1, 1)]
    assert policy.state_dict() == before


def test_step_runs_at_highest_level_any_batch_needs():
    policy = Ladder(Halving(), ["plain", "recompute"])
    rows = [ReadBatch(batch=None, num_rows=4, cost=cost) for cost in (10.0, 1.0)]
    policy.record(Outcome(num_rows=4, microbatch_size=1, fits=False, cost=10.0))
    policy.climb(10.0)
    policy.record(Outcome(num_rows=4, microbatch_size=4, fits=True, cost=10.0, level=1))
    assert [run(fits(4), each, policy).plan.level for each in (rows, rows[1:])] == [1, 0]


class Noting(Halving):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes, self.told = list(sizes), list[Any]()

    def propose(self, num_rows, cost=None):
        return self.sizes[0] if self.sizes else super().propose(num_rows, cost)

    def record(self, outcome):
        self.told.append((outcome.num_rows, outcome.microbatch_size, outcome.fits))
        super().record(outcome)
        del self.sizes[: not outcome.fits]


def test_proposal_with_identical_cut_is_recorded_but_not_retried():
    policy, tried = Noting(55, 34, 21, 13, 8), list[Any]()
    run(fits(16, tried), 64, policy)
    assert tried == [[32, 32], [16, 16, 16, 16]]
    assert policy.told == [(64, 32, False), (64, 32, False), (64, 16, True)]


def test_accumulated_batches_are_cut_separately_at_one_size():
    policy, tried = Noting(), list[Any]()
    finished = run(fits(5, tried), [4, 10, 9], policy)
    assert tried == [[4, 10, 9], [4, 5, 5, 5, 4]]
    assert [cut.sizes for cut in finished.plan.cuts] == [[4], [5, 5], [5, 4]]
    assert (finished.plan.size, finished.counts["num_microbatches"]) == (5, 5)
    assert finished.failed_sizes == (10,)
    assert policy.told == [(10, 10, False), (10, 5, True)]  # of the largest slice


def test_minimum_rows_rise_to_two_when_layer_rejects_one():
    tried, rule = list[Any](), CutRule()
    assert run(needs_two(2, tried), 4, Halving(initial=1), rule).attempts == 1
    assert tried == [[2, 2]]
    assert rule.min_rows == 2
    cuts = run(needs_two(2), [4, 2, 6], Halving()).plan.cuts
    assert [cut.sizes for cut in cuts] == [[2, 2], [2], [2, 2, 2]]


@pytest.mark.parametrize(
    ("rows", "size", "sizes"),
    [(50, 16, [16, 16, 16, 2]), (48, 24, [24, 24]), (7, 8, [7]), (20, 6, [5, 5, 5, 5])],
)
def test_slices_except_last_are_multiples_when_size_is(rows, size, sizes):
    assert CutRule().cut(rows, size, multiple_of=8) == sizes


# Cleaning up


def test_tensors_of_failed_attempt_are_freed_before_retry():
    made: list[Any] = []

    def attempt(sizes):
        assert all(each() is None for each in made)
        tensor = torch.zeros(3)
        made.append(weakref.ref(tensor))
        return fits(2)(sizes)

    gc.disable()
    try:
        run(attempt, 8, Halving())
    finally:
        gc.enable()
    assert len(made) == 3


def test_rollback_is_retried_after_oom():
    part = Stubborn(MemoryError())
    assert run(fits(2), 4, Halving(), parts=[part]).failed_sizes == (4,)
    assert part.num_rollbacks == 2
    assert not part.is_open


def test_batch_is_not_added_again_if_commit_runs_out_of_memory():
    tried: list[Any] = []
    part: Any = Stubborn()
    part.commit = functools.partial(raising(torch.OutOfMemoryError(OOM)), [])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(fits(4, tried), 4, Halving(), parts=[part])
    assert tried == [[4]]
    assert "the batch was committed" in caught.value.__notes__[0]


@pytest.mark.parametrize("cause", [torch.OutOfMemoryError(OOM), ValueError(), None])
def test_interrupt_is_raised_after_rollback_completes(cause, monkeypatch):
    interrupt = KeyboardInterrupt()
    part = Stubborn(*([interrupt] if cause else []))
    if cause is None:  # it comes while memory is released
        monkeypatch.setattr("automicro.step.fit.release", lambda *_: raising(interrupt)([]))
    with pytest.raises(KeyboardInterrupt) as caught:
        run(raising(cause or torch.OutOfMemoryError(OOM)), 4, Halving(), parts=[part])
    assert caught.value is interrupt
    assert not part.is_open


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ((ValueError("first"), ValueError("second")), "second"),
        ([RollbackError("clone the input")] * 2, "^clone the input$"),
    ],
)
def test_repeated_rollback_failure_raises_rollback_error(errors, message):
    with pytest.raises(RollbackError, match=message) as caught:
        run(fits(2), 4, Halving(), parts=[Stubborn(*errors)])
    if message == "second":
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_lost_device_is_reported_even_if_rollback_fails():
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    part = Stubborn(RuntimeError("gone"), RuntimeError("gone"))
    with pytest.raises(RuntimeError) as caught:
        run(raising(lost), 4, Halving(), parts=[part])
    assert caught.value is lost
    assert "the device is lost" in lost.__notes__[0]


# The error when nothing fits


def refusal(**held: int) -> str:
    residents = ResidentMemory(**held) if held else None
    with pytest.raises(SampleTooLargeError) as caught:
        run(fits(0), 2, Halving(), residents=residents)
    return str(caught.value)


def test_error_lists_resident_memory_and_remedies_when_it_exceeds_limit():
    assert refusal(parameters=1024, gradients=1024, optimizer_state=3072, limit=4096) == (
        "a microbatch of 1 of 2 rows does not fit, and no size can (tried: 2, 1): parameters 1.00 "
        "KiB, gradients 1.00 KiB, optimizer state 3.00 KiB take 5.00 KiB without any row, and "
        "the limit is 4.00 KiB.\n"
        "The state is as before the step. What helps:\n"
        "- an optimizer with less state\n"
        "- a smaller model\n"
        "- a higher limit\n"
        "- a larger device\n"
        "The last failure: CUDA out of memory."
    )


HELPS = "What helps:\n- "


@pytest.mark.parametrize(
    ("held", "advice"),
    [
        (
            {"parameters": 512, "shared_inputs": 3072, "limit": 4096},
            "- smaller tensors in the parts of the batch that all rows share\n- act",
        ),
        (
            {"parameters": 2048, "gradients": 1024, "limit": 4096},
            f"{HELPS}a smaller model\n- activation checkpointing",
        ),
        (
            {"parameters": 1024, "limit": 4096},
            f"{HELPS}shorter or smaller samples\n- activation checkpointing",
        ),
        (
            {"parameters": 1024, "gradients": 1024, "limit": 4096},
            "Every size needs 2.00 KiB of 4.00 KiB for parameters 1.00 KiB, gradients",
        ),
        (
            {"parameters": 1024, "buffers": 512},
            "Every size needs 1.50 KiB for parameters 1.00 KiB, buffers 512 bytes.",
        ),
    ],
)
def test_advice_targets_largest_memory_component(held, advice):
    text = refusal(**held)
    assert advice in text
    assert "less state" not in text  # there is no optimizer state


def test_unknown_memory_is_not_reported():
    assert "Every size" not in refusal()


def test_error_explains_two_row_minimum_without_repeating_sizes():
    with pytest.raises(SampleTooLargeError) as caught:
        run(needs_two(0), 8, Halving())
    text = str(caught.value)
    assert "a microbatch of 2 of 8 rows does not fit" in text
    assert "no smaller one, because BatchNorm cannot train on one row (tried: 8, 4, 2)" in text
