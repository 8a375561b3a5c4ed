"""Fit a step into memory: plan, attempt, commit or roll back, until it fits or nothing is smaller.

`Sizes` (sizes.py) chooses what to try next, and a `Work` (work.py) computes it.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from automicro.batchnorm import needs_two_rows
from automicro.errors import RollbackError, add_note, describe_error, facts_of, remember, text_of
from automicro.memory.device import Measured, highs_of, measured_by_all, peak_bytes
from automicro.memory.oom import Failure, caught, classify, empty_cache, first_line, release, surely
from automicro.ranks.interface import Ranks, Report, Status, StrayedError, announcing_failure
from automicro.step.phase import Phase
from automicro.step.plan import Finished, Plan, Step
from automicro.step.sizes import Sizes
from automicro.transaction.gradients import TouchedGradientsError
from automicro.transaction.transaction import Part, Transaction

if TYPE_CHECKING:
    from automicro.memory.residents import ResidentMemory

T = TypeVar("T")


class Work(Protocol[T]):
    """The computation of one step's attempts, and the parts that it changes."""

    # It keeps no result and no error: these would keep the tensors of a failed attempt alive.

    def check(self, plan: Plan) -> None:
        """Check what splitting might change, before the attempt at a plan that splits."""

    def parts(self) -> Sequence[Part]:
        """Return all that an attempt might change. They begin in order and roll back in reverse."""

    def run(self, plan: Plan) -> T:
        """Compute all microbatches of a plan."""

    def failed(self, message: str, peak_bytes: int | None) -> Sequence[str]:
        """Report an attempt that ran out of memory; return the report files that were written."""

    def numbers(self, result: T) -> Sequence[float]:
        """Return numbers of the result to add up over ranks with the last vote."""

    def combined(self, result: T, sums: Sequence[float]) -> T:
        """Combine this rank's result with the sums over all ranks."""

    def accepts(self, result: T) -> bool:
        """Whether to commit a result; otherwise it is rolled back and the step ends."""

    def residents(self) -> "ResidentMemory | None":
        """Return the memory held at any size, to explain why no size fits."""


def fit(step: Step, work: Work[T], phase: Phase) -> Finished[T]:
    """Attempt a step at ever smaller sizes, then at the next level, until it fits.

    Raises:
        SampleTooLargeError: the smallest size ran out of memory; the state is as it was before.
        RollbackError: the state could not be restored.
        PeerFailedError: another rank failed for good.
        BaseException: any error except out of memory; the state is as it was before.
    """
    sizes = Sizes(step, phase)
    while True:
        plan = sizes.plan(work.residents)
        if plan.num_microbatches == 0:
            return Finished(result=None, plan=plan, nested_sizes={})
        if plan.num_microbatches > len(plan.cuts):
            # Each rank checks on its own: without an announcement, others would wait for one whose
            # check fails.
            with announcing_failure(phase.ranks):
                work.check(plan)
        phase.ranks.begin(plan.num_microbatches, training=phase.is_training)
        transaction = Transaction(work.parts())
        trying = functools.partial(attempt, transaction, work, plan, phase, sizes)
        done, failure = caught(trying)
        if done is not None:
            return sizes.succeed(plan, *done)
        # Outside "except": inside it the traceback keeps the failed attempt's tensors alive, and
        # neither the rollback nor a retry could use their memory.
        assert failure is not None
        try:
            status, measured = _undo(transaction, failure, plan, phase, sizes)
            if status is Status.FATAL:
                from automicro.step.words import explain

                explain(failure, plan)
                raise failure
            if status is Status.OUT_OF_MEMORY:
                reports = work.failed(first_line(failure), peak_bytes(phase.device))
                remember(failure, reports=tuple(reports))
                sizes.fail(plan, failure, measured)
            else:
                sizes.repeat(status)
        finally:
            del failure, trying, transaction  # break the reference cycle with the traceback


def attempt(
    transaction: Transaction, work: Work[T], plan: Plan, phase: Phase, sizes: Sizes
) -> tuple[T, bool, Measured | None]:
    """Attempt a step once: on all ranks, or on none. An error leaves the transaction open.

    Returns:
        The result, whether it was committed (otherwise the state is as it was before), and the
        measured memory and time.
    """
    ranks, meter = phase.ranks, sizes.meter
    transaction.begin()
    # After the transaction made its copies, which exist at any size and count as resident.
    if meter is not None:
        meter.begin(waits=sizes.compares_seconds)
    with phase.applying(plan.level):
        result = work.run(plan)
    measured = None if meter is None else meter.end()
    transaction.prepare()  # before the vote, because it allocates memory and can fail
    # The vote confirms that every rank has prepared: after it no rank has a reason to fail.
    report = Report(sums=work.numbers(result), highs=highs_of(measured))
    told = ranks.vote(report)
    if told is not report:
        measured = measured_by_all(told.highs, measured)
    result = work.combined(result, told.sums)
    # The loss is that of all ranks, so they all accept it, or none does.
    is_committed = work.accepts(result)
    if is_committed:
        transaction.commit()
    else:
        transaction.roll_back()
    return result, is_committed, measured


def _undo(
    transaction: Transaction, failure: BaseException, plan: Plan, phase: Phase, sizes: Sizes
) -> tuple[Status, Measured | None]:
    """Free the memory of a failed attempt, notify other ranks, and roll back.

    Returns:
        The status of all ranks, and what the attempt measured.
    """
    ranks, meter, device = phase.ranks, sizes.meter, phase.device
    try:
        status = _status(failure, plan, phase, sizes)
        # The meter reads what the attempt held, before `release` frees it.
        measured = None if meter is None else meter.end(failure)
        # The frames of a fatal error on a single rank stay for debuggers.
        if status is not Status.FATAL or not ranks.is_alone:
            release(failure, device)
        status = ranks.stop(failure, status, highs_of(measured))
    except BaseException as error:  # a failed peer, a lost device, or Ctrl-C
        del failure
        _roll_back(transaction, error)
        ranks.fail(error)
        raise
    _roll_back(transaction, failure, ranks)
    if status is Status.FATAL:
        return status, None
    # Only now are this attempt's gradients and copies freed. If the cache kept their blocks, the
    # next attempt would fragment them.
    empty_cache(device)
    return status, measured_by_all(ranks.told or highs_of(measured), measured)


def _status(error: BaseException, plan: Plan, phase: Phase, sizes: Sizes) -> Status:
    # A single row in BatchNorm is not a shortage: the same size is cut again, without single rows.
    if sizes.can_recut and plan.leaves_one_alone and needs_two_rows(error):
        return Status.TWO_ROWS
    if isinstance(error, StrayedError | TouchedGradientsError):
        return Status.STRAYED
    # A batch whose commit ran out of memory, in a part of the caller's, must not be added again.
    if classify(error) is not Failure.RETRYABLE or facts_of(error).is_committed:
        return Status.FATAL
    # If parts have already shrunk their own sizes, the batch is tried again at the same size.
    return Status.SMALLER_PART if phase.has_smaller_parts() else Status.OUT_OF_MEMORY


def _roll_back(transaction: Transaction, cause: BaseException, ranks: Ranks | None = None) -> None:
    """Restore the state, with a second try if necessary, or notify other ranks of the failure."""
    _, failure = caught(functools.partial(surely, transaction.roll_back))
    if failure is None:
        return
    try:
        if transaction.is_open:
            # Nothing can be restored on a lost device, whose loss is the error that users need.
            if classify(cause) is Failure.CONTEXT_LOST:
                lost = f"the device is lost, so nothing could be restored ({text_of(failure)})"
                add_note(cause, f"automicro: {lost}")
                return
            if isinstance(failure, Exception):
                raise _lost_state(failure, cause) from cause
            add_note(failure, "automicro: the state before the batch could not be restored")
        raise failure  # an interrupt (Ctrl-C), or an error after which the state was restored
    except BaseException as error:
        if ranks is not None:
            ranks.fail(error)
        raise
    finally:
        del failure  # break the reference cycle with the traceback


def _lost_state(failure: Exception, cause: BaseException) -> RollbackError:
    if isinstance(failure, RollbackError):
        return failure
    return RollbackError(
        f"an attempt failed ({describe_error(cause)}), and the state before it could not be "
        f"restored ({describe_error(failure)}). Resume from a checkpoint"
    )
