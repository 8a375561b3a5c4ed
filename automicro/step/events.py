"""What a step tells of itself while it runs: its attempts, and each microbatch of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from automicro.errors import Bystander, add_note, facts_of, remember
from automicro.step.plan import Cut


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at a batch. A batch that ran out of memory has several.

    Attributes:
        phase: ``"train"`` or ``"eval"``.
        number: 1 for the first.
        num_rows: of the whole batch.
        microbatch_size: of the largest microbatch: its rows, or in another unit what it costs.
        num_microbatches: into how many the batch is cut.
        is_measuring: whether it is cut smaller than fits, only to measure what its rows need.
        unit: what sizes are counted in, in the plural.
    """

    phase: str
    number: int
    num_rows: int
    microbatch_size: int
    num_microbatches: int
    is_measuring: bool = False
    unit: str = "rows"


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One slice of a batch, inside an attempt that may still be undone.

    Attributes:
        attempt: it belongs to.
        index: 0 for the first.
        batch: its rows, on the device.
        loss: its share of the batch's loss, detached; None before it is known.
    """

    attempt: Attempt
    index: int
    batch: Any
    loss: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """An attempt that ran out of memory and was undone.

    Attributes:
        attempt: that failed.
        message: of the error.
        peak_bytes: the most that was allocated on the device, None where nobody counts.
        reports: files that tell more of it. A callback that writes one adds its path, and the
            error names it if no size fits.
    """

    attempt: Attempt
    message: str
    peak_bytes: int | None
    reports: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Another microbatch size than in the attempt before.

    Attributes:
        phase: ``"train"`` or ``"eval"``.
        num_rows: of the batch.
        before: size of the largest microbatch.
        after: the same from now on.
        unit: what sizes are counted in, in the plural.
    """

    phase: str
    num_rows: int
    before: int
    after: int
    unit: str = "rows"


def blame(error: BaseException, culprit: Bystander, doing: str) -> None:
    """Note what beside the step an exception was raised in; what lies inside of it knows better.

    Args:
        error: the exception.
        culprit: what it was raised in.
        doing: what was done, for people.

    >>> error = MemoryError()
    >>> blame(error, Bystander(kind="metric", name="'f1'"), "while updating the metric 'f1'")
    >>> error.__notes__, bystander(error)
    (["automicro: while updating the metric 'f1'"], "the metric 'f1'")
    """
    add_note(error, f"automicro: {doing}")
    if facts_of(error).bystander is None:
        remember(error, bystander=culprit)


def bystander(error: BaseException) -> str | None:
    """What beside the step an exception was raised in, in words; None where in nothing.

    >>> bystander(MemoryError()) is None
    True
    """
    found = facts_of(error).bystander
    return None if found is None else str(found)


Subject: TypeAlias = Attempt | Microbatch | OutOfMemory | Resize


class Observer(Protocol):
    """Told what happens inside a step. An exception of its own ends the step, undone.

    The events, in order: ``attempt_start``; for each microbatch ``microbatch_start``,
    ``forward_start``, ``forward_end``, ``loss_start``, ``loss_end``, ``backward_start``,
    ``backward_end``, ``microbatch_end``; ``attempt_end`` where all went well. After running out
    of memory ``oom``, and ``resize`` before the next attempt. Evaluation has no loss and backward.
    """

    def __call__(self, event: str, subject: Subject) -> None:
        """Take note."""


Tell: TypeAlias = Callable[..., None]
"""Tells of an event of one microbatch: ``tell("loss_end", loss)``."""


class Narrator:
    """Tells an observer of one step, as it happens.

    Example:
        >>> told = []
        >>> narrator = Narrator(lambda event, subject: told.append((event, subject)), "train")
        >>> narrator.begin([Cut([4, 4])])
        >>> reports = narrator.fail("CUDA out of memory", peak_bytes=None)
        >>> narrator.begin([Cut([2, 2, 2, 2])])
        >>> [event for event, _ in told]
        ['attempt_start', 'oom', 'resize', 'attempt_start']
        >>> told[2][1].before, told[2][1].after, told[3][1].number
        (4, 2, 2)

    Args:
        observer: is told.
        phase: ``"train"`` or ``"eval"``.
    """

    def __init__(self, observer: Observer, phase: str) -> None:
        self._tell = observer
        self._phase = phase
        self._attempt: Attempt | None = None

    def _observer(self, event: str, subject: Subject) -> None:
        try:
            self._tell(event, subject)
        except BaseException as error:
            if bystander(error) is None:  # else it is known which of several callbacks it was
                name = getattr(self._tell, "__qualname__", type(self._tell).__qualname__)
                where = f"{name} (the observer), at {event}"
                blame(error, Bystander(kind="callback", name=where), f"in the callback {where}")
            raise

    def begin(self, cuts: Sequence[Cut], *, unit: str = "rows", is_measuring: bool = False) -> None:
        """An attempt begins, with these cuts of each batch."""
        earlier = self._attempt
        attempt = Attempt(
            phase=self._phase,
            number=1 if earlier is None else earlier.number + 1,
            num_rows=sum(cut.num_rows for cut in cuts),
            microbatch_size=max(cut.largest for cut in cuts),
            num_microbatches=sum(len(cut.sizes) for cut in cuts),
            is_measuring=is_measuring,
            unit=unit,
        )
        if earlier is not None and earlier.microbatch_size != attempt.microbatch_size:
            resize = Resize(
                phase=self._phase,
                num_rows=attempt.num_rows,
                before=earlier.microbatch_size,
                after=attempt.microbatch_size,
                unit=unit,
            )
            self._observer("resize", resize)
        self._attempt = attempt
        self._observer("attempt_start", attempt)

    def end(self) -> None:
        """The attempt went through."""
        assert self._attempt is not None
        self._observer("attempt_end", self._attempt)

    def fail(self, message: str, *, peak_bytes: int | None) -> list[str]:
        """The attempt ran out of memory and was undone; the files that were written of it."""
        if self._attempt is None:  # memory ran out before it could begin
            return []
        failure = OutOfMemory(attempt=self._attempt, message=message, peak_bytes=peak_bytes)
        self._observer("oom", failure)
        return failure.reports

    def microbatch(self, index: int, batch: Any) -> Tell:
        """What tells of the events of one microbatch."""

        def tell(event: str, loss: Tensor | None = None) -> None:
            assert self._attempt is not None
            subject = Microbatch(attempt=self._attempt, index=index, batch=batch, loss=loss)
            self._observer(event, subject)

        return tell
