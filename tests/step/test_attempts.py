"""The retry loop: which sizes it tries, records, cleans up after and raises."""

import gc
import logging
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from automicro import Fixed, Halving, Outcome, RollbackError, SampleTooLargeError
from automicro.memory.residents import ResidentMemory
from automicro.policy.ladder import Ladder
from automicro.policy.policy import Policy
from automicro.step.fit import fit as run_step
from automicro.step.phase import Phase
from automicro.step.plan import CutRule, Finished, Plan, ReadBatch, Step
from automicro.step.setup import Plain, Setup
from automicro.transaction.transaction import Part


def fits(most_rows: int, tried: list[list[int]]) -> Callable[[list[int]], str]:
    def attempt(sizes: list[int]) -> str:
        tried.append(sizes)
        if max(sizes) > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    return attempt


class Attempt:
    """A work that runs a given attempt with fixed transaction parts."""

    def __init__(
        self,
        attempt: Callable[[list[int]], str],
        parts: Sequence[Part] = (),
        residents: ResidentMemory | None = None,
    ) -> None:
        self._attempt, self._parts, self._residents = attempt, parts, residents

    def check(self, plan: Plan) -> None:
        pass

    def parts(self) -> Sequence[Part]:
        return self._parts

    def run(self, plan: Plan) -> str:
        return self._attempt([size for cut in plan.cuts for size in cut.sizes])

    def failed(self, message: str, peak_bytes: int | None) -> Sequence[str]:
        return ()

    def numbers(self, result: str) -> Sequence[float]:
        return ()

    def combined(self, result: str, sums: Sequence[float]) -> str:
        return result

    def accepts(self, result: str) -> bool:
        return True

    def residents(self) -> ResidentMemory | None:
        return self._residents


def phase_of(policy: Policy, rule: CutRule | None = None) -> Phase:
    setup = Setup(model=nn.Module(), modules=[], device=torch.device("cpu"))
    levels = [Plain() for _ in policy.levels]
    return Phase("train", policy, setup, rule=rule or CutRule(), levels=levels)


def run(
    attempt: Callable[[list[int]], str],
    num_rows: int | list[int],
    policy: Policy,
    rule: CutRule | None = None,
    *,
    parts: Sequence[Part] = (),
    residents: ResidentMemory | None = None,
) -> Finished[str]:
    rows = [num_rows] if isinstance(num_rows, int) else num_rows
    step = Step(batches=[ReadBatch(batch=None, num_rows=each) for each in rows], policy=policy)
    phase = phase_of(policy, rule)
    return run_step(step, Attempt(attempt, parts, residents), phase)


def needs_two(most_rows: int, tried: Sequence[list[int]] = ()) -> Callable[[list[int]], str]:
    """Reject slices of one row, as BatchNorm does."""
    run = fits(most_rows, tried if isinstance(tried, list) else [])

    def attempt(sizes: list[int]) -> str:
        if 1 in sizes:
            raise ValueError("Expected more than 1 value per channel when training, got input size")
        return run(sizes)

    return attempt


def raising(error: Exception) -> Callable[[list[int]], str]:
    def attempt(sizes: list[int]) -> str:
        raise error

    return attempt


class Stubborn:
    """A transaction part whose rollback fails a given number of times."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.num_rollbacks = 0
        self.is_open = False

    def begin(self) -> None:
        self.is_open = True

    def prepare(self) -> None:
        pass

    def commit(self) -> None:
        self.is_open = False

    def roll_back(self) -> None:
        self.num_rollbacks += 1
        if self.errors:
            raise self.errors.pop(0)
        self.is_open = False


def test_size_shrinks_until_attempt_fits() -> None:
    tried: list[list[int]] = []
    finished = run(fits(3, tried), 10, Halving())
    assert tried == [[10], [5, 5], [3, 3, 2, 2]]
    assert (finished.result, finished.attempts, len(finished.failed_sizes)) == ("done", 3, 2)


def test_found_size_is_reused_for_next_batch() -> None:
    policy = Halving()
    tried: list[list[int]] = []
    for _ in range(2):
        finished = run(fits(4, tried), 8, policy)
    assert tried == [[8], [4, 4], [4, 4]]
    assert len(finished.failed_sizes) == 0


def climbing(
    policy: Policy, most: Sequence[int], tried: list[tuple[int, int]]
) -> Callable[[list[int]], str]:
    """Return an attempt that fits a given number of rows at each policy level."""

    def attempt(sizes: list[int]) -> str:
        tried.append((policy.level, max(sizes)))
        if max(sizes) > most[policy.level]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    return attempt


def test_next_level_is_tried_when_single_row_does_not_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Ladder(Halving(), ["plain", "recompute"])
    tried: list[tuple[int, int]] = []
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


def test_fixed_size_climbs_levels_and_final_error_mentions_it() -> None:
    policy = Ladder(Fixed(4), ["plain", "recompute"])
    tried: list[tuple[int, int]] = []
    assert run(climbing(policy, [3, 4], tried), 8, policy).plan.level == 1
    assert tried == [(0, 4), (1, 4)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(climbing(policy, [3, 3], tried), 8, policy)
    assert "the microbatch size is fixed" in "".join(caught.value.__notes__)


def test_failure_at_highest_level_leaves_policy_state_unchanged() -> None:
    policy = Ladder(Halving(), ["plain", "recompute"])
    before = policy.state_dict()
    tried: list[tuple[int, int]] = []
    with pytest.raises(SampleTooLargeError):
        run(climbing(policy, [0, 0], tried), 2, policy)
    assert tried == [(0, 2), (0, 1), (1, 2), (1, 1)]
    assert policy.state_dict() == before


def test_step_runs_at_highest_level_any_batch_needs() -> None:
    policy = Ladder(Halving(), ["plain", "recompute"])
    rows = [ReadBatch(batch=None, num_rows=4, cost=cost) for cost in (10.0, 1.0)]
    policy.record(Outcome(num_rows=4, microbatch_size=1, fits=False, cost=10.0))
    policy.climb(10.0)
    policy.record(Outcome(num_rows=4, microbatch_size=4, fits=True, cost=10.0, level=1))
    levels = []
    for batches in (rows, rows[1:]):
        step = Step(batches=batches, policy=policy)
        phase = phase_of(policy)
        levels.append(run_step(step, Attempt(lambda _: "done"), phase).plan.level)
    assert levels == [1, 0]


class Fibonacci(Policy):
    """A policy that proposes equivalent cuts: for 64 rows, 55 and 34 both mean two slices of 32."""

    def __init__(self) -> None:
        self.sizes, self.told = [55, 34, 21, 13, 8], list[tuple[int, bool]]()

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return self.sizes[0]

    def record(self, outcome: Outcome) -> None:
        self.told.append((outcome.microbatch_size, outcome.fits))
        if not outcome.fits:
            del self.sizes[0]


def test_proposal_with_identical_cut_is_recorded_but_not_retried() -> None:
    policy, tried = Fibonacci(), list[list[int]]()
    run(fits(16, tried), 64, policy)
    assert tried == [[32, 32], [16, 16, 16, 16]]
    assert policy.told == [(32, False), (32, False), (16, True)]


def test_minimum_rows_rise_to_two_when_layer_rejects_one() -> None:
    tried: list[list[int]] = []
    rule = CutRule()

    assert run(needs_two(2, tried), 4, Halving(initial=1), rule).attempts == 1
    assert tried == [[2, 2]]
    assert rule.min_rows == 2


def test_tensors_of_failed_attempt_are_freed_before_retry() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def attempt(sizes: list[int]) -> str:
        assert all(each() is None for each in made)
        tensor = torch.zeros(3)
        made.append(weakref.ref(tensor))
        return fits(2, [])(sizes)

    gc.disable()
    try:
        run(attempt, 8, Halving())
    finally:
        gc.enable()
    assert len(made) == 3


def test_rollback_is_retried_after_oom() -> None:
    part = Stubborn(MemoryError())
    assert run(fits(2, []), 4, Halving(), parts=[part]).failed_sizes == (4,)
    assert part.num_rollbacks == 2
    assert not part.is_open


@pytest.mark.parametrize("cause", [torch.OutOfMemoryError("CUDA out of memory."), ValueError()])
def test_interrupt_during_rollback_is_raised_after_rollback_completes(cause: Exception) -> None:
    interrupt = KeyboardInterrupt()
    part = Stubborn(interrupt)

    with pytest.raises(KeyboardInterrupt) as caught:
        run(raising(cause), 4, Halving(), parts=[part])
    assert caught.value is interrupt
    assert not part.is_open


def test_repeated_rollback_failure_raises_rollback_error() -> None:
    part = Stubborn(ValueError("first"), ValueError("second"))
    with pytest.raises(RollbackError, match="second") as caught:
        run(fits(2, []), 4, Halving(), parts=[part])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_rollback_error_message_is_passed_through_unchanged() -> None:
    error = RollbackError("clone the input")
    part = Stubborn(error, error)
    with pytest.raises(RollbackError, match=r"^clone the input$"):
        run(fits(2, []), 4, Halving(), parts=[part])


def test_interrupt_during_memory_release_is_raised_after_rollback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = Stubborn()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("automicro.step.fit.release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(fits(2, []), 4, Halving(), parts=[part])
    assert not part.is_open


def test_lost_device_is_reported_even_if_rollback_fails() -> None:
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    part = Stubborn(RuntimeError("gone"), RuntimeError("gone"))

    with pytest.raises(RuntimeError) as caught:
        run(raising(lost), 4, Halving(), parts=[part])
    assert caught.value is lost
    assert "the device is lost" in lost.__notes__[0]


def test_each_retry_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(fits(3, []), 10, Halving())
    assert [record.getMessage() for record in caplog.records] == [
        "automicro: out of memory at microbatch size 10: retrying with 5 (2 microbatches of 5 "
        "rows)",
        "automicro: out of memory at microbatch size 5: retrying with 3 (4 microbatches of up to 3 "
        "rows)",
    ]


def refusal(residents: ResidentMemory | None) -> str:
    with pytest.raises(SampleTooLargeError) as caught:
        run(fits(0, []), 2, Halving(), residents=residents)
    return str(caught.value)


def test_error_lists_resident_memory_and_remedies_when_it_exceeds_limit() -> None:
    held = ResidentMemory(parameters=1024, gradients=1024, optimizer_state=3072, limit=4096)
    assert refusal(held) == (
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


def test_advice_targets_largest_memory_component() -> None:
    table = refusal(ResidentMemory(parameters=512, shared_inputs=3072, limit=4096))
    assert "- smaller tensors in the parts of the batch that all rows share\n- act" in table
    model = refusal(ResidentMemory(parameters=2048, gradients=1024, limit=4096))
    assert "What helps:\n- a smaller model\n- activation checkpointing" in model
    rows = refusal(ResidentMemory(parameters=1024, limit=4096))
    assert "What helps:\n- shorter or smaller samples\n- activation checkpointing" in rows


def test_smaller_samples_are_advised_when_limit_allows_or_is_unknown() -> None:
    known = refusal(ResidentMemory(parameters=1024, gradients=1024, limit=4096))
    unknown = refusal(ResidentMemory(parameters=1024, buffers=512))
    assert "Every size needs 2.00 KiB of 4.00 KiB for parameters 1.00 KiB, gradients" in known
    assert "Every size needs 1.50 KiB for parameters 1.00 KiB, buffers 512 bytes." in unknown
    for text in (known, unknown):
        assert "What helps:\n- shorter or smaller samples" in text
        assert "less state" not in text  # there is no optimizer state
    assert "Every size" not in refusal(None)


def test_error_explains_two_row_minimum_without_repeating_sizes() -> None:
    with pytest.raises(SampleTooLargeError) as caught:
        run(needs_two(0), 8, Halving())
    text = str(caught.value)
    assert "a microbatch of 2 of 8 rows does not fit" in text
    assert "no smaller one, because BatchNorm cannot train on one row (tried: 8, 4, 2)" in text


def test_accumulated_batches_are_cut_separately_at_one_size() -> None:
    tried: list[list[int]] = []
    policy = Halving()
    finished = run(fits(5, tried), [10, 9, 4], policy)
    assert tried == [[10, 9, 4], [5, 5, 5, 4, 4]]
    assert [cut.sizes for cut in finished.plan.cuts] == [[5, 5], [5, 4], [4]]
    assert (finished.plan.size, finished.counts["num_microbatches"]) == (5, 5)
    assert finished.failed_sizes == (10,)


def test_policy_records_outcome_of_batch_with_largest_slice() -> None:
    outcomes = []

    class Noting(Halving):
        def record(self, outcome: Outcome) -> None:
            outcomes.append((outcome.num_rows, outcome.microbatch_size, outcome.fits))
            super().record(outcome)

    run(fits(4, []), [3, 9], Noting())
    assert outcomes == [(9, 9, False), (9, 5, False), (9, 3, True)]


def test_two_row_minimum_applies_to_every_accumulated_batch() -> None:
    cuts = run(needs_two(2), [4, 2, 6], Halving()).plan.cuts
    assert [cut.sizes for cut in cuts] == [[2, 2], [2], [2, 2, 2]]


@pytest.mark.parametrize(
    ("rows", "size", "sizes"),
    [(50, 16, [16, 16, 16, 2]), (48, 24, [24, 24]), (7, 8, [7]), (20, 6, [5, 5, 5, 5])],
)
def test_slices_except_last_are_multiples_when_size_is(
    rows: int, size: int, sizes: list[int]
) -> None:
    assert CutRule().cut(rows, size, multiple_of=8) == sizes
