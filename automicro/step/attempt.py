"""One attempt at a step: commit it, or leave no trace of it."""

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from automicro.batchnorm import needs_two_rows
from automicro.errors import RollbackError, add_note, describe_error, remember, text_of
from automicro.memory.device import peak_bytes
from automicro.memory.meter import Measured
from automicro.memory.oom import (
    Failure,
    classify,
    empty_cache,
    first_line,
    release,
    unquoted_shortage,
)
from automicro.memory.residents import ResidentMemory
from automicro.options import ONE_GRAPH_EACH
from automicro.ranks.interface import Ranks, Report, Status, StrayedError
from automicro.step.events import Narrator
from automicro.step.phase import Phase
from automicro.step.plan import Plan
from automicro.transaction.gradients import TouchedGradientsError
from automicro.transaction.transaction import Part, Transaction

_UNKNOWN = -math.inf


def highs_of(measured: Measured | None) -> list[float]:
    """The numbers of one rank; what it does not know is lower than anything.

    >>> highs_of(None)
    []
    """
    if measured is None:
        return []
    # Of capacities the lowest counts.
    capacity = None if measured.capacity_bytes is None else -measured.capacity_bytes
    values = (
        measured.peak_bytes,
        measured.resident_bytes,
        capacity,
        measured.alloc_retries,
        measured.seconds,
    )
    return [_UNKNOWN if value is None else float(value) for value in values]


def measured_by_all(highs: Sequence[float], own: Measured | None) -> Measured | None:
    """What all ranks measured together, the same on every one, where this one measures at all.

    >>> one = Measured(
    ...     peak_bytes=9, resident_bytes=1, capacity_bytes=20, seconds=0.5, alloc_retries=None
    ... )
    >>> measured_by_all([12, 1, -16, -math.inf, 0.75], one).capacity_bytes
    16
    """
    if own is None or not highs or highs[4] == _UNKNOWN:
        return None
    peak, resident, capacity, retries = (
        None if value == _UNKNOWN else int(value) for value in highs[:4]
    )
    return Measured(
        peak_bytes=peak,
        resident_bytes=resident,
        capacity_bytes=None if capacity is None else -capacity,
        seconds=highs[4],
        alloc_retries=retries,
        has_waited=own.has_waited,
    )


T = TypeVar("T")


_USED_TWICE = "backward through the graph a second time"  # as torch says it
# What messages about shapes speak of.
_SHAPES = re.compile(r"\b(sizes?|shapes?|dims?|dimensions?|dimensional|D)\b|\dD\b", re.IGNORECASE)


class Verdict(enum.Enum):
    """What became of an attempt; after all but the first the state is as it was before."""

    COMMITTED = "it went through"
    DECLINED = "it went through, and nobody wants it"
    OUT_OF_MEMORY = "memory ran out"
    NEEDS_TWO_ROWS = "BatchNorm cannot train on the one row of a slice"
    SMALLER_PART = "memory ran out in a part with a size of its own, which is smaller now"
    STRAYED = "collectives of several ranks, or gradients, have to be watched"


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


class Work(Protocol[T]):
    """What an attempt does, and what it may change. Each step has one of its own.

    It keeps no result and no error, which would keep the tensors of a failed attempt alive.

    Attributes:
        narrator: tells of it; None where nobody listens.
    """

    narrator: Narrator | None

    def look(self, plan: Plan) -> None:
        """Look at what splitting may change, before the attempt at a plan that splits."""

    def parts(self) -> Sequence[Part]:
        """All that an attempt may change. They begin in this order, and roll back in the other."""

    def attempt(self, plan: Plan) -> T:
        """Do it, cut as planned."""

    def numbers(self, result: T) -> Sequence[float]:
        """Of several ranks: what of the result is added up over them with the last vote."""

    def combined(self, result: T, sums: Sequence[float]) -> T:
        """The result of all ranks, from this one's and the sums."""

    def accepts(self, result: T) -> bool:
        """Whether to keep what went through; else it is rolled back, and that is the end."""

    def residents(self) -> ResidentMemory | None:
        """What lies on the device at any size, for saying why none fits."""


def try_once(work: Work[T], plan: Plan, phase: Phase, *, can_recut: bool, times: bool) -> Tried[T]:
    """Attempt a step once, inside a transaction: on all ranks, or on none.

    Args:
        work: of the step.
        plan: the slices of each batch.
        phase: that the step belongs to.
        can_recut: whether the caller can avoid slices of a single row.
        times: whether the meter waits for the device, because seconds are compared.

    Raises:
        RollbackError: the state could not be put back.
        PeerFailedError: another rank failed for good.
        BaseException: whatever else than running out of memory; the state is as it was before.
    """
    ranks, meter, narrator, device = phase.ranks, phase.meter, work.narrator, phase.device
    transaction = Transaction(work.parts())
    result: T | None = None
    measured: Measured | None = None
    try:
        transaction.begin()
        if narrator is not None:
            narrator.begin(plan.cuts, unit=plan.unit, is_measuring=plan.is_measuring)
        if meter is not None:
            meter.begin(waits=times)
        with phase.applying(plan.level):
            result = work.attempt(plan)
        if meter is not None:
            measured = meter.end()
        if narrator is not None:
            narrator.end()
        if phase.is_rehearsing or not ranks.is_alone:
            transaction.prepare()  # it needs memory as well
        if not ranks.is_alone:
            report = Report(sums=work.numbers(result), highs=highs_of(measured))
            told = ranks.vote(report)
            measured = measured_by_all(told.highs, measured)
            result = work.combined(result, told.sums)
        if not work.accepts(result):
            transaction.roll_back()
            return Tried(verdict=Verdict.DECLINED, result=result, measured=measured)
        transaction.commit()
        return Tried(verdict=Verdict.COMMITTED, result=result, measured=measured)
    except BaseException as error:
        status = _status(error, plan, phase, can_recut=can_recut)
        if status is Status.FATAL and ranks.is_alone:
            _roll_back(transaction, error)
            _explain(error, plan)
            raise
        failure = error
    # Outside "except": inside it the traceback keeps the failed attempt's tensors alive, and
    # neither the rollback nor a retry could use their memory.
    result = None
    try:
        measured = None if meter is None else meter.end(failure)
        try:
            release(failure, device)
            status = ranks.stop(failure, status, highs_of(measured))
        except BaseException as error:  # a peer failed, the device was lost, somebody interrupts
            _roll_back(transaction, error)
            ranks.fail(error)
            raise
        _roll_back(transaction, failure, ranks)
        # Gradients and copies of this attempt were in the way until now. Kept, their blocks would
        # be cut up by the next one.
        empty_cache(device)
        if status is Status.FATAL:
            _explain(failure, plan)
            raise failure
        if status is Status.STRAYED:
            return Tried(verdict=Verdict.STRAYED)
        if status is Status.TWO_ROWS:
            return Tried(verdict=Verdict.NEEDS_TWO_ROWS)
        if status is Status.SMALLER_PART:
            return Tried(verdict=Verdict.SMALLER_PART)
        if not ranks.is_alone:
            measured = measured_by_all(ranks.told, measured)
        if narrator is not None:
            reports = narrator.fail(first_line(failure), peak_bytes=peak_bytes(device))
            remember(failure, reports=tuple(reports))
        return Tried(verdict=Verdict.OUT_OF_MEMORY, failure=failure, measured=measured)
    finally:
        del failure  # it holds this frame: a cycle


def _status(error: BaseException, plan: Plan, phase: Phase, *, can_recut: bool) -> Status:
    if can_recut and _leaves_one_alone(plan) and needs_two_rows(error):
        return Status.TWO_ROWS
    if isinstance(error, StrayedError | TouchedGradientsError):
        return Status.STRAYED
    if classify(error) is not Failure.RETRYABLE:
        return Status.FATAL
    return Status.SMALLER_PART if phase.has_smaller_parts() else Status.OUT_OF_MEMORY


def _leaves_one_alone(plan: Plan) -> bool:
    # Fillers have one row as well.
    return plan.num_fillers > 0 or any(cut.leaves_one_alone for cut in plan.cuts)


def _explain(error: BaseException, plan: Plan) -> None:
    _explain_lonely_row(error, plan)
    if _USED_TWICE in text_of(error) and any(cut.is_split for cut in plan.cuts):
        add_note(
            error,
            "automicro: each microbatch goes backward by itself, so what the forward uses of a "
            f"graph that was made before it is gone after the first; {ONE_GRAPH_EACH}",
        )
    shortage = unquoted_shortage(error)
    if shortage is not None:
        add_note(
            error,
            f"automicro: memory ran out before this ({first_line(shortage)}), in what this error "
            "neither was raised from nor quotes, so the batch is not tried again with fewer rows; "
            "if that is what failed, raise it from that error, or let that one through",
        )


def _explain_lonely_row(error: BaseException, plan: Plan) -> None:
    if not needs_two_rows(error):
        _explain_shapes(error, plan)
        return
    num_rows = sum(cut.num_rows for cut in plan.cuts)
    if num_rows == 1:
        rows = plan.num_global_rows
        who = "the batch has" if rows == 1 else f"of {rows} rows of all ranks this one has"
        add_note(
            error,
            f"automicro: BatchNorm cannot train on one row, and {who} no more; use drop_last=True "
            "in the data loader, which leaves such a last batch out, or another batch size",
        )
        return
    if not _leaves_one_alone(plan):
        return
    add_note(
        error,
        f"automicro: BatchNorm cannot train on one row, and slices of at most "
        f"{plan.size} of {num_rows} rows leave one alone; use "
        'another microbatch_size, or "auto", which leaves no row alone',
    )


def _explain_shapes(error: BaseException, plan: Plan) -> None:
    """What works with several rows and not with one has lost the dimension of rows, most likely.

    And what works with a whole batch and not with a part may take its rows in pairs or groups.
    """
    is_of_shapes = isinstance(error, RuntimeError | IndexError | ValueError | TypeError)
    if not (is_of_shapes and _SHAPES.search(text_of(error))):
        return
    alone = [cut for cut in plan.cuts if cut.leaves_one_alone]
    if alone:
        which = "each microbatch has" if alone[0].largest == 1 else "the last microbatch has"
        add_note(
            error,
            f"automicro: {which} one of {alone[0].num_rows} rows; where more rows do not fail, a "
            ".squeeze() without a dimension may have taken away that of the rows, too: name the "
            "dimension, as in .squeeze(-1)",
        )
        return
    split = [cut for cut in plan.cuts if cut.is_split]
    if split:
        add_note(
            error,
            f"automicro: microbatches have at most {split[0].largest} of {split[0].num_rows} rows; "
            "where the whole batch does not fail, the forward may take its rows in groups: give "
            "sizes that hold whole groups, as in microbatch_size=Halving(multiple_of=4); what is "
            "as long as the batch and holds no rows (a table, positions) needs batch_layout="
            "{'its name': 'shared'}; or keep batches whole with microbatch_size=None",
        )


def _roll_back(transaction: Transaction, cause: BaseException, ranks: Ranks | None = None) -> None:
    """Put the state back, in a second try if need be, or let other ranks know that it failed.

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
    except BaseException as error:
        if ranks is not None:
            ranks.fail(error)
        raise
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
        add_note(
            cause,
            f"automicro: the device is lost, nothing could be put back ({text_of(failure)})",
        )
        return
    if isinstance(failure, RollbackError):
        raise failure from cause
    if not isinstance(failure, Exception):
        add_note(failure, "automicro: the state before the batch could not be put back")
        raise failure
    raise RollbackError(
        f"an attempt failed ({describe_error(cause)}), and the state before it could not "
        f"be put back ({describe_error(failure)}); continue from a checkpoint"
    ) from cause
