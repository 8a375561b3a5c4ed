"""Propose, attempt, commit or roll back, until a batch fits or nothing smaller is left."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from automicro.batchnorm import needs_two_rows
from automicro.errors import BatchError, RollbackError, SampleTooLargeError
from automicro.memory import ResidentMemory, allocated_bytes, format_bytes, peak_bytes
from automicro.observer import Narrator
from automicro.oom import Failure, classify, release
from automicro.policy import Fixed, Outcome, Policy
from automicro.slicing import balanced_sizes, describe_cut
from automicro.transaction import Transaction

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class CutRule:
    """From a proposed size to the rows of each slice.

    Attributes:
        strict_divisible: whether all slices must have the same number of rows.
        min_rows: the fewest rows of a slice; 2 where BatchNorm refuses a single row.
    """

    strict_divisible: bool = False
    min_rows: int = 1

    def cut(self, num_rows: int, size: int) -> list[int]:
        """The rows of each slice, the largest first.

        Raises:
            BatchError: ``strict_divisible`` is set and the rows do not divide by the size.
        """
        if not self.strict_divisible:
            return balanced_sizes(num_rows, size, min_rows=self.min_rows)
        if num_rows % size:
            raise BatchError(
                f"strict_divisible=True: a batch of {num_rows} rows is not a multiple of "
                f"microbatch_size={size} (remainder {num_rows % size}); make the batch a multiple "
                "of it (drop_last=True in the data loader), or leave strict_divisible out: a "
                "ragged rest is exact"
            )
        return [size] * (num_rows // size)

    def largest_divisor(self, num_rows: int, size: int) -> int:
        """The largest size of at most ``size`` rows that divides the batch."""
        return next(each for each in range(size, 0, -1) if num_rows % each == 0)


@dataclass(frozen=True, kw_only=True)
class Finished(Generic[T]):
    """What came of a step, and how many attempts it took.

    Attributes:
        result: of the attempt that succeeded.
        cuts: rows of each slice of each batch.
        attempts: how many were made.
        failed_sizes: rows of the largest slice of each attempt that ran out of memory.
    """

    result: T
    cuts: list[list[int]]
    attempts: int
    failed_sizes: tuple[int, ...]

    @property
    def microbatch_size(self) -> int:
        """Rows of the largest slice."""
        return _largest(self.cuts)

    @property
    def counts(self) -> dict[str, Any]:
        """What results tell of rows, slices and attempts, by the names of their fields."""
        return {
            "num_samples": sum(map(sum, self.cuts)),
            "microbatch_size": self.microbatch_size,
            "num_microbatches": sum(map(len, self.cuts)),
            "attempts": self.attempts,
            "failed_sizes": self.failed_sizes,
        }


def run_attempts(
    attempt: Callable[[list[list[int]]], T],
    *,
    rows: Sequence[int],
    policy: Policy,
    rule: CutRule,
    transaction: Transaction,
    device: torch.device,
    measure_residents: Callable[[], ResidentMemory] | None = None,
    narrator: Narrator | None = None,
) -> Finished[T]:
    """Attempt a step at the sizes that a policy proposes until one fits.

    Args:
        attempt: does the work for slices of these rows, a list for each batch. Runs inside a
            transaction.
        rows: of each batch that the step takes; usually it is one.
        policy: proposes sizes and learns from each outcome.
        rule: turns sizes into slices.
        transaction: begun, and committed or rolled back, once per attempt.
        device: where the work runs, for giving its memory back.
        measure_residents: what lies there at any size, for saying why none fits.
        narrator: tells of every attempt.

    Raises:
        SampleTooLargeError: the smallest size ran out of memory. As with any other exception, the
            state is as it was before.
        RollbackError: the state could not be put back.
    """
    learned = policy.state_dict()
    tried: list[int] = []
    attempts = 0
    failure: BaseException | None = None
    while True:
        cuts = [_cut(policy, rule, num_rows) for num_rows in rows]
        size = _largest(cuts)
        if failure is not None and size >= tried[-1]:
            try:
                if isinstance(policy, Fixed):
                    _give_up_fixed(failure, max(rows), tried[-1])
                residents = None if measure_residents is None else measure_residents()
                text = _why_nothing_fits(max(rows), tried, rule, residents, device)
                raise SampleTooLargeError(
                    f"{text} The last failure: {_first_line(failure)}"
                ) from failure
            finally:
                failure = None  # it holds this frame: a cycle
                policy.load_state_dict(learned)  # an impossible batch teaches nothing about others
        if failure is not None:
            logger.warning(
                "out of memory, microbatch size %d → %d %s (%s)",
                tried[-1],
                size,
                "row" if size == 1 else "rows",
                describe_cut(sum(rows), size, sum(map(len, cuts))),
            )
            failure = None  # it holds this frame, which the next attempt may leave by an exception
        attempts += 1
        result, failure, floor = _attempt_once(
            transaction, attempt, cuts, policy, rule, device, narrator
        )
        if floor:
            rule.min_rows = 2
            attempts -= 1  # not a question of memory: the same size, cut differently
            continue
        # The batch with the largest slice speaks for the step.
        largest = max(cuts, key=lambda sizes: (sizes[0], sum(sizes)))
        policy.record(Outcome(num_rows=sum(largest), microbatch_size=size, fits=failure is None))
        if failure is None:
            assert result is not None
            return Finished(
                result=result[0], cuts=cuts, attempts=attempts, failed_sizes=tuple(tried)
            )
        tried.append(size)


def _largest(cuts: Sequence[Sequence[int]]) -> int:
    return max(sizes[0] for sizes in cuts)


def _leaves_one_alone(cuts: Sequence[Sequence[int]]) -> bool:
    """Whether a slice has one row although its batch has more."""
    return any(sizes[-1] == 1 < sum(sizes) for sizes in cuts)


def _cut(policy: Policy, rule: CutRule, num_rows: int) -> list[int]:
    size = policy.propose(num_rows)
    if not size >= 1:
        raise ValueError(f"{policy!r} proposed {size} rows; a policy must propose at least one")
    if rule.strict_divisible and not isinstance(policy, Fixed):
        size = rule.largest_divisor(num_rows, min(size, num_rows))
    return rule.cut(num_rows, size)


def _attempt_once(
    transaction: Transaction,
    attempt: Callable[[list[list[int]]], T],
    cuts: list[list[int]],
    policy: Policy,
    rule: CutRule,
    device: torch.device,
    narrator: Narrator | None,
) -> tuple[tuple[T] | None, BaseException | None, bool]:
    """One attempt: its result, or the out-of-memory error, or that slices need two rows."""
    result: T | None = None
    try:
        transaction.begin()
        if narrator is not None:
            narrator.begin(cuts)
        result = attempt(cuts)
        if narrator is not None:
            narrator.end()
        transaction.commit()
        return (result,), None, False
    except BaseException as error:
        if (
            needs_two_rows(error)
            and _leaves_one_alone(cuts)
            and rule.min_rows == 1
            and not isinstance(policy, Fixed)
        ):
            _roll_back(transaction, error)
            return None, None, True
        if classify(error) is not Failure.RETRYABLE:
            _roll_back(transaction, error)
            if needs_two_rows(error) and _leaves_one_alone(cuts):
                error.add_note(
                    f"automicro: BatchNorm cannot train on one row, and slices of at most "
                    f"{_largest(cuts)} of {sum(map(sum, cuts))} rows leave one alone; use another "
                    'microbatch_size, or "auto", which leaves no row alone'
                )
            raise
        failure = error
    # Outside "except": inside it the traceback keeps the failed attempt's tensors alive, and
    # neither the rollback nor a retry could use their memory.
    result = None
    try:
        try:
            release(failure, device)
        except BaseException as error:  # the device was lost, or somebody interrupts
            _roll_back(transaction, error)
            raise
        _roll_back(transaction, failure)
        if narrator is not None:
            narrator.fail(_first_line(failure), peak_bytes=peak_bytes(device))
        return None, failure, False
    finally:
        del failure  # it holds this frame: a cycle


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


def _give_up_fixed(failure: BaseException, num_rows: int, size: int) -> None:
    what = f"the whole batch of {num_rows} rows does" if size == num_rows else None
    failure.add_note(
        f"automicro: the microbatch size is fixed, and {what or f'{size} rows of {num_rows} do'} "
        'not fit; microbatch_size="auto" would try smaller ones. The state is as before the step.'
    )
    raise failure


def _why_nothing_fits(
    num_rows: int,
    tried: list[int],
    rule: CutRule,
    residents: ResidentMemory | None,
    device: torch.device,
) -> str:
    """What there is to say where the smallest size ran out of memory."""
    # A size may have been tried twice, the second time cut into slices of two rows.
    listed = f"(tried: {', '.join(map(str, dict.fromkeys(tried)))})"
    text = f"a microbatch of {tried[-1]} of {num_rows} rows does not fit, and "
    state = "The state is as before the step. What helps:"
    less_state = "an optimizer with less state, " if _has_state(residents) else ""
    if residents is not None and residents.limit is not None and residents.leaves_nothing:
        return (
            f"{text}no size can {listed}: {residents} come to {format_bytes(residents.total)} "
            f"without any row, and the limit is {format_bytes(residents.limit)}. {state} "
            f"{less_state}a smaller model, a higher limit, a larger device."
        )
    floor = ", because BatchNorm cannot train on one row" * (tried[-1] > 1 < rule.min_rows)
    text += f"there is no smaller one{floor} {listed}."
    peak, allocated = peak_bytes(device), allocated_bytes(device)
    if peak is not None:
        text += f" Peak memory on {device} was {format_bytes(peak)}."
    if allocated is not None:
        text += f" Between attempts {format_bytes(allocated)} were allocated."
    if residents is not None and residents.total:
        limit = f" of {format_bytes(residents.limit)}" if residents.limit is not None else ""
        text += f" Every size needs {format_bytes(residents.total)}{limit} for {residents}."
    return (
        f"{text} {state} shorter or smaller samples, activation checkpointing, precision='bf16', "
        f"{less_state}a larger device."
    )


def _has_state(residents: ResidentMemory | None) -> bool:
    return residents is not None and residents.optimizer_state > 0


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
