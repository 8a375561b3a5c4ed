"""Events inside a step: its attempts and their microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from automicro.errors import Bystander, blame, facts_of
from automicro.step.feature import Attempt, Feature, MicrobatchRun


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One slice of a batch, inside an attempt that might still be rolled back.

    Attributes:
        attempt: the attempt that it belongs to.
        index: 0 for the first.
        batch: its rows, on the device.
        loss: its share of the loss of the batch, detached; None before it is known.
    """

    attempt: Attempt
    index: int
    batch: Any
    loss: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """An attempt that ran out of memory and was rolled back.

    Attributes:
        attempt: the attempt that failed.
        message: the text of the error.
        peak_bytes: the most bytes allocated on the device; None if not counted.
        reports: report files. A callback that writes one adds its path, and the error names it if
            no size fits.
    """

    attempt: Attempt
    message: str
    peak_bytes: int | None
    reports: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True, kw_only=True)
class Resize:
    """A microbatch size that differs from that of the previous attempt.

    Attributes:
        phase: ``"train"`` or ``"eval"``.
        num_rows: rows of the batch.
        before: size of the largest microbatch in the previous attempt.
        after: size of the largest microbatch from now on.
        unit: the unit of sizes, in the plural.
    """

    phase: str
    num_rows: int
    before: int
    after: int
    unit: str = "rows"


Subject: TypeAlias = Attempt | Microbatch | OutOfMemory | Resize


class Observer(Protocol):
    """A callable that receives the events of a step. An exception rolls the step back and ends it.

    The events, in order: ``attempt_start``; for each microbatch ``microbatch_start``,
    ``forward_start``, ``forward_end``, ``loss_start``, ``loss_end``, ``backward_start``,
    ``backward_end``, ``microbatch_end``; ``attempt_end`` on success. After running out of memory
    ``oom``, and ``resize`` before the next attempt. Evaluation has no loss and backward events.
    """

    def __call__(self, event: str, subject: Subject) -> None:
        """Handle one event."""


class Observing(Feature):
    """A feature that notifies an observer of each attempt and each microbatch, as it happens.

    Args:
        observer: ``observer(event, subject)``; see `Observer`.

    Example:
        >>> from torch import nn, randn
        >>> from automicro import Microbatcher
        >>> told = []
        >>> observing = Observing(lambda event, subject: told.append(event))
        >>> microbatcher = Microbatcher(
        ...     nn.Linear(8, 2), loss_fn=nn.MSELoss(), microbatch_size=4, features=[observing]
        ... )
        >>> _ = microbatcher.backward((randn(4, 8), randn(4, 2)))
        >>> told[:3], told[-2:]
        (['attempt_start', 'microbatch_start', 'forward_start'], ['microbatch_end', 'attempt_end'])
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._attempt: Attempt | None = None

    def _tell(self, event: str, subject: Subject) -> None:
        try:
            self._observer(event, subject)
        except BaseException as error:
            if facts_of(error).bystander is None:  # otherwise the error already names the callback
                named = getattr(self._observer, "__qualname__", type(self._observer).__qualname__)
                where = f"{named} (the observer), at {event}"
                blame(error, Bystander(kind="callback", name=where), f"in the callback {where}")
            raise

    def begin(self, attempt: Attempt) -> None:
        earlier, self._attempt = self._attempt, attempt
        # Before the first attempt at a batch came another batch, so a difference is not a resize.
        if earlier is not None and attempt.number > 1:
            before, after = earlier.microbatch_size, attempt.microbatch_size
            if before != after:
                resize = Resize(
                    phase=attempt.phase,
                    num_rows=attempt.num_rows,
                    before=before,
                    after=after,
                    unit=attempt.unit,
                )
                self._tell("resize", resize)
        self._tell("attempt_start", attempt)

    def end(self, attempt: Attempt) -> None:
        self._tell("attempt_end", attempt)

    def failed(self, attempt: Attempt, message: str, peak_bytes: int | None) -> Sequence[str]:
        failure = OutOfMemory(attempt=attempt, message=message, peak_bytes=peak_bytes)
        self._tell("oom", failure)
        return failure.reports

    def before(self, run: MicrobatchRun) -> None:
        self._say(run, "microbatch_start", "forward_start")

    def forwarded(self, run: MicrobatchRun) -> None:
        assert self._attempt is not None
        self._say(run, "forward_end", *["loss_start"] * (self._attempt.phase == "train"))

    def before_backward(self, run: MicrobatchRun) -> None:
        self._say(run, "loss_end", "backward_start", loss=run.loss)

    def computed(self, run: MicrobatchRun) -> None:
        if run.loss is not None:
            self._say(run, "backward_end", loss=run.loss)

    def after(self, run: MicrobatchRun) -> None:
        self._say(run, "microbatch_end")

    def _say(self, run: MicrobatchRun, *events: str, loss: Tensor | None = None) -> None:
        assert self._attempt is not None
        for event in events:
            subject = Microbatch(attempt=self._attempt, index=run.index, batch=run.rows, loss=loss)
            self._tell(event, subject)
