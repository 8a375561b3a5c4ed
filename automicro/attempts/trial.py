"""One attempt at a step: commit it, or leave no trace of it."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from automicro.batchnorm import needs_two_rows
from automicro.errors import RollbackError
from automicro.memory import Measured, Meter, peak_bytes
from automicro.observer import Narrator
from automicro.oom import Failure, classify, first_line, release
from automicro.transaction import Transaction

T = TypeVar("T")


class Verdict(enum.Enum):
    """What became of an attempt; after all but the first the state is as it was before."""

    COMMITTED = "it went through"
    DECLINED = "it went through, and nobody wants it"
    OUT_OF_MEMORY = "memory ran out"
    NEEDS_TWO_ROWS = "BatchNorm cannot train on the one row of a slice"


@dataclass(frozen=True, kw_only=True)
class Tried(Generic[T]):
    """An attempt that is over.

    Attributes:
        verdict: on it.
        result: where it went through.
        failure: the error where memory ran out. It holds frames: let go of it.
        measured: what it took of the device, where somebody measures.
    """

    verdict: Verdict
    result: T | None = None
    failure: BaseException | None = None
    measured: Measured | None = None


def try_once(
    attempt: Callable[[list[list[int]]], T],
    cuts: list[list[int]],
    *,
    transaction: Transaction,
    device: torch.device,
    can_recut: bool = False,
    accept: Callable[[T], bool] | None = None,
    meter: Meter | None = None,
    narrator: Narrator | None = None,
) -> Tried[T]:
    """Attempt a step once, inside a transaction.

    Args:
        attempt: does the work.
        cuts: rows of each slice of each batch.
        transaction: begun, and committed or rolled back.
        device: where the work runs, for giving its memory back.
        can_recut: whether the caller can avoid slices of a single row.
        accept: asked once the attempt went through; False rolls it back.
        meter: measures it.
        narrator: tells of it.

    Raises:
        RollbackError: the state could not be put back.
        BaseException: whatever else than running out of memory; the state is as it was before.
    """
    result: T | None = None
    measured: Measured | None = None
    try:
        transaction.begin()
        if narrator is not None:
            narrator.begin(cuts)
        if meter is not None:
            meter.begin()
        result = attempt(cuts)
        if meter is not None:
            measured = meter.end()
        if narrator is not None:
            narrator.end()
        if accept is not None and not accept(result):
            transaction.roll_back()
            return Tried(verdict=Verdict.DECLINED, result=result, measured=measured)
        transaction.commit()
        return Tried(verdict=Verdict.COMMITTED, result=result, measured=measured)
    except BaseException as error:
        leaves_one_alone = any(sizes[-1] == 1 < sum(sizes) for sizes in cuts)
        if can_recut and leaves_one_alone and needs_two_rows(error):
            _roll_back(transaction, error)
            return Tried(verdict=Verdict.NEEDS_TWO_ROWS)
        if classify(error) is not Failure.RETRYABLE:
            _roll_back(transaction, error)
            if leaves_one_alone and needs_two_rows(error):
                _explain_lonely_row(error, cuts)
            raise
        failure = error
    # Outside "except": inside it the traceback keeps the failed attempt's tensors alive, and
    # neither the rollback nor a retry could use their memory.
    result = None
    try:
        measured = None if meter is None else meter.end(failure)
        try:
            release(failure, device)
        except BaseException as error:  # the device was lost, or somebody interrupts
            _roll_back(transaction, error)
            raise
        _roll_back(transaction, failure)
        if narrator is not None:
            narrator.fail(first_line(failure), peak_bytes=peak_bytes(device))
        return Tried(verdict=Verdict.OUT_OF_MEMORY, failure=failure, measured=measured)
    finally:
        del failure  # it holds this frame: a cycle


def _explain_lonely_row(error: BaseException, cuts: Sequence[Sequence[int]]) -> None:
    error.add_note(
        f"automicro: BatchNorm cannot train on one row, and slices of at most "
        f"{max(sizes[0] for sizes in cuts)} of {sum(map(sum, cuts))} rows leave one alone; use "
        'another microbatch_size, or "auto", which leaves no row alone'
    )


def _roll_back(transaction: Transaction, cause: BaseException) -> None:
    """Put the state back, in a second try if need be.

    Raises:
        RollbackError: it cannot be put back.
        BaseException: what interrupted the first try, once the second has put the state back.
    """
    failure = _try_roll_back(transaction)
    if failure is None:
        return
    try:
        again = _try_roll_back(transaction)
        if again is not None:
            _give_up_rolling_back(again, cause)
        elif classify(failure) is not Failure.RETRYABLE:
            raise failure
    finally:
        del failure  # it holds this frame: a cycle


def _try_roll_back(transaction: Transaction) -> BaseException | None:
    try:
        transaction.roll_back()
    except BaseException as error:
        return error
    return None


def _give_up_rolling_back(failure: BaseException, cause: BaseException) -> None:
    if classify(cause) is Failure.CONTEXT_LOST:
        cause.add_note(f"automicro: the device is lost, nothing could be put back ({failure})")
        return
    if isinstance(failure, RollbackError):
        raise failure from cause
    if not isinstance(failure, Exception):
        failure.add_note("automicro: the state before the batch could not be put back")
        raise failure
    raise RollbackError(
        f"an attempt failed ({type(cause).__name__}: {cause}), and the state before it could not "
        f"be put back ({type(failure).__name__}: {failure}); continue from a checkpoint"
    ) from cause
