"""The fastest size before a run, measured on its own batches; nothing stays changed."""

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automicro.batch.cutting import concat_rows
from automicro.batch.layout import BatchLayout
from automicro.batchnorm import find_batchnorm
from automicro.errors import AutomicroError, SampleTooLargeError
from automicro.microbatcher import Microbatcher
from automicro.options import read_count
from automicro.policy.explore import EXPECTED, ROUND, SIZE, SURE
from automicro.policy.policy import Outcome, Policy
from automicro.policy.search import Candidate, Measurement, Search
from automicro.state.capture import capture
from automicro.tools.pictures import speed_and_memory
from automicro.trainer.rehearsal import undisturbed
from automicro.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rows that are pooled, in batches of the loader.
POOLED = 4
_WARM_UP = 3  # of the largest size, before any is measured


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """What was measured of one size.

    Attributes:
        microbatch_size: rows.
        steps: that were measured.
        rows_per_second: the median.
        spread: the standard deviation of one step in shares of the median, from the median
            deviation; None of a single step.
        peak_bytes: the most that was allocated; None where nobody counts.
        speedup: its median speed in shares of the base's.
    """

    microbatch_size: int
    steps: int
    rows_per_second: float
    spread: float | None
    peak_bytes: int | None
    speedup: float


@dataclass(frozen=True, kw_only=True, repr=False)
class ExploreReport:
    """What was found. ``str()`` of it is a table.

    Attributes:
        phase: ``"train"`` or ``"eval"``.
        microbatch_size: recommended, in rows.
        speedup: its speed in shares of the base's.
        confidence: the probability in percent, given the measured spread, that no size is more
            than 1 % faster; 0 … 99.
        base: the largest size that fits and is no more than the batch, in rows.
        batch_rows: of a batch of the loader.
        global_batch: the multiple of the recommended size that is nearest to these rows.
        measured: sizes, the smallest first.
        too_large: sizes that ran out of memory.
        steps: trials in all.
        seconds: in all.
        ended: why it ended.
        notes: what else there is to know.
    """

    phase: str
    microbatch_size: int
    speedup: float
    confidence: int
    base: int
    batch_rows: int
    global_batch: int
    measured: tuple[MeasuredSize, ...]
    too_large: tuple[int, ...]
    steps: int
    seconds: float
    ended: str
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> list[tuple[int, float | None, float | None, int | None]]:
        """For a picture: of each size the rows per second, their spread, the peak in bytes."""
        known: list[tuple[int, float | None, float | None, int | None]] = [
            (
                each.microbatch_size,
                each.rows_per_second,
                None if each.spread is None else each.spread * each.rows_per_second,
                each.peak_bytes,
            )
            for each in self.measured
        ]
        return known + [(size, None, None, None) for size in sorted(self.too_large)]

    def picture(self) -> "Figure":
        """Draw speed and memory against the size, with the choice.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return speed_and_memory(self.points, chosen=self.microbatch_size)

    def to_dict(self) -> dict[str, Any]:
        """All of it as values that JSON can hold."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        return (
            f"ExploreReport({self.phase}: {self.microbatch_size} rows, {self.speedup:.2f}x base, "
            f"confidence {self.confidence})"
        )

    def __str__(self) -> str:
        lines = [f"{'rows':>6}  {'rows/s':>10}  {'spread':>6}  {'peak':>11}  {'speed':>6}  steps"]
        for each in self.measured:
            spread = "" if each.spread is None else f"{each.spread:.1%}"
            peak = "" if each.peak_bytes is None else format_bytes(each.peak_bytes)
            chosen = "  ←" if each.microbatch_size == self.microbatch_size else ""
            lines.append(
                f"{each.microbatch_size:>6}  {each.rows_per_second:>10,.1f}  {spread:>6}  "
                f"{peak:>11}  {each.speedup:>5.2f}x  {each.steps:>5}{chosen}"
            )
        lines += [f"{size:>6}  does not fit" for size in sorted(self.too_large)]
        key = "microbatch_size" if self.phase == "train" else "eval_microbatch_size"
        lines += [
            "",
            f"{key}: {self.microbatch_size}  ({self.speedup:.2f}x base of {self.base} rows, "
            f"confidence {self.confidence}, {self.ended}; {self.steps} trials in "
            f"{self.seconds:.1f} s)",
        ]
        if self.phase == "train":
            divides = self.batch_rows % self.microbatch_size == 0
            verb = "divides" if divides else "does not divide"
            nearest = "" if divides else f"; the nearest that it does is {self.global_batch}"
            lines.append(f"global batch: it {verb} {self.batch_rows} rows{nearest}")
        return "\n".join([*lines, *self.notes])


class _OneSize(Policy):
    """The size of a trial, and what became of it."""

    def __init__(self) -> None:
        self.size = 1
        self.outcome: Outcome | None = None

    @property
    def compares_seconds(self) -> bool:
        return True

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return min(num_rows, self.size)

    def record(self, outcome: Outcome) -> None:
        self.outcome = outcome


def explore(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    evaluate: bool = False,
    max_steps: int = 60,
    max_minutes: float | None = None,
    max_rows: int | None = None,
    **options: Any,
) -> ExploreReport:
    """Measure which microbatch size is the fastest, and leave everything as it was.

    Sizes do not depend on the loader's batch: its batches are pooled for larger ones. A trial is
    forward and backward of about a batch's rows at one size, rolled back: parameters, gradients,
    buffers and random numbers are as before afterwards, and the optimizer never steps. It ends
    early with Ctrl-C, with the best so far.

    Args:
        model: the model, where it computes.
        batches: a data loader, or batches in a list; an iterator loses what is taken from it.
        evaluate: whether to measure evaluations: forward in evaluation mode, without gradients.
        max_steps: trials.
        max_minutes: in all; None for any time.
        max_rows: of a microbatch; four batches' unless given.
        options: of `Microbatcher`: ``loss_fn``, ``forward``, ``optimizer``, ``memory_limit``, ….

    Raises:
        SampleTooLargeError: not even one row fits.
        BatchError: the batches cannot be read.
        TypeError, ValueError: arguments that make no sense, each with its remedy.

    Example:
        >>> import torch
        >>> from automicro import explore
        >>> batches = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(4)]
        >>> model = torch.nn.Linear(4, 3)
        >>> report = explore(model, batches, loss_fn=torch.nn.CrossEntropyLoss(), max_steps=6)
        >>> report.batch_rows, report.global_batch % report.microbatch_size
        (16, 0)
    """
    read_count("max_steps", max_steps)
    if max_minutes is not None and not max_minutes > 0:
        raise ValueError(
            f"max_minutes={max_minutes!r}: give a positive number of minutes, or None for any time"
        )
    for name in ("microbatch_size", "eval_microbatch_size", "repeatable", "remember_sizes"):
        if name in options:
            raise TypeError(f"explore() looks for sizes itself: leave {name} out")
    if "when_too_large" in options:
        raise TypeError(
            "explore() measures sizes at the plain level: leave when_too_large out, and let the "
            'run find both with microbatch_size="explore"'
        )
    policy = _OneSize()
    options = {"batchnorm": "ignore", "probe": False, **options}
    microbatcher = Microbatcher(
        model, microbatch_size=policy, eval_microbatch_size=policy, **options
    )
    layout = BatchLayout(options.get("batch_layout", 0))
    modules = [model, *options.get("modules", ())]
    with _undone(modules, batches):
        pool = _Pool(batches, layout, max_rows=max_rows)
        trials = _Trials(microbatcher, policy, pool, evaluates=evaluate)
        try:
            report = trials.run(max_steps, math.inf if max_minutes is None else 60 * max_minutes)
        finally:
            microbatcher.release_reservation()
    notes = list(pool.notes)
    averaging = [] if evaluate else find_batchnorm(model)
    if averaging:
        notes.append(
            f"{averaging[0]!r} averages over the rows of a microbatch (BatchNorm): its size "
            "changes what is trained, and not only how fast"
        )
    return dataclasses.replace(report, notes=tuple(notes))


@contextlib.contextmanager
def _undone(modules: Sequence[nn.Module], data: Any) -> Iterator[None]:
    """Put back random numbers, what modules and a data loader hold, and gradients."""
    captured = capture({f"modules[{index}]": each for index, each in enumerate(modules)})
    parameters = [each for module in modules for each in module.parameters()]
    gradients = [(each, each.grad) for each in parameters]
    try:
        with undisturbed(data):
            yield
    finally:
        captured.put_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _Pool:
    """Rows of successive batches, from which trials take as many as they need."""

    def __init__(
        self, batches: Iterable[Any], layout: BatchLayout, *, max_rows: int | None
    ) -> None:
        self._layout = layout
        self.notes: list[str] = []
        taken = iter(batches)
        first = next(taken, None)
        if first is None:
            raise ValueError(
                "there is no batch to measure: give a data loader, or a list of batches"
            )
        self.batch_rows = rows = layout.num_rows(first)
        wanted = POOLED * rows if max_rows is None else read_count("max_rows", max_rows)
        parts = [first]
        for batch in itertools.islice(taken, max(0, -(-wanted // rows))):
            if rows >= wanted:
                break
            parts.append(batch)
            rows += layout.num_rows(batch)
        try:
            self._all = first if len(parts) == 1 else _joined(parts, layout.row_dims(first))
            self.num_rows = min(wanted, layout.num_rows(self._all))
        except (AutomicroError, RuntimeError, TypeError, ValueError) as error:
            self._all, self.num_rows = first, min(wanted, self.batch_rows)
            self.notes.append(
                f"batches of the loader cannot be pooled ({str(error).splitlines()[0]}), so no "
                f"size above {self.batch_rows} rows was tried; batches of one length can be"
            )
        if self.num_rows < wanted and not self.notes:
            self.notes.append(
                f"the data have {self.num_rows} rows to pool, so no larger size was tried"
            )

    def take(self, rows: int) -> Any:
        """A batch of so many rows."""
        most = self._layout.num_rows(self._all)
        if rows >= most:
            return self._all
        return self._layout.split(self._all, [rows, most - rows])[0]


def _joined(parts: Sequence[Any], row_dims: Mapping[str, int], path: str = "") -> Any:
    """Successive batches of one structure as one batch; what holds no rows is the first's."""
    first = parts[0]

    def of_key(key: Any) -> Any:
        return _joined([part[key] for part in parts], row_dims, f"{path}.{key}".lstrip("."))

    if isinstance(first, Tensor) and path in row_dims:
        return torch.cat(list(parts), row_dims[path])
    if not row_dims:  # rows that are not collated, packed or nested ones
        return concat_rows(parts)
    if isinstance(first, Mapping):
        return {key: of_key(key) for key in first}
    if type(first) in (list, tuple):
        return type(first)(of_key(index) for index in range(len(first)))
    return first


class _Trials:
    """Trials at sizes that a search asks for."""

    def __init__(
        self, microbatcher: Microbatcher, policy: _OneSize, pool: _Pool, *, evaluates: bool
    ) -> None:
        self._microbatcher = microbatcher
        self._policy = policy
        self._pool = pool
        self._evaluates = evaluates
        self._steps = 0
        self._seconds: dict[int, list[float]] = {}
        self._peaks: dict[int, int | None] = {}
        self._too_large: list[int] = []

    def run(self, max_steps: int, max_seconds: float) -> ExploreReport:
        start = time.monotonic()
        search = self._begin(max_steps)
        ended = ""
        try:
            while not ended:
                found = search.find()
                is_sure = found.confidence >= SURE and bool(self._seconds)
                beside = self._beside(search) if is_sure else None
                if is_sure and beside is None:
                    ended = "sure enough"
                elif self._steps >= max_steps:
                    ended = f"max_steps={max_steps}"
                elif time.monotonic() - start >= max_seconds:
                    ended = f"max_minutes={max_seconds / 60:g}"
                else:
                    self._round(search, beside or int(found.next[SIZE]), max_steps)
        except KeyboardInterrupt:
            if not self._seconds:
                raise
            ended = "interrupted"
        search.base = self._base()
        found = search.find()
        size = int(found.best[SIZE])
        rows = self._pool.batch_rows
        return ExploreReport(
            phase="eval" if self._evaluates else "train",
            microbatch_size=size,
            speedup=found.speedup,
            confidence=found.confidence,
            base=int(search.base[SIZE]),
            batch_rows=rows,
            global_batch=max(size, round(rows / size) * size),
            measured=self._measured(int(search.base[SIZE])),
            too_large=tuple(self._too_large),
            steps=self._steps,
            seconds=time.monotonic() - start,
            ended=ended,
        )

    def _begin(self, max_steps: int) -> Search:
        """All sizes, and one that fits: the batch's, or half of it, or half of that.

        The largest comes first: an allocator that has served it serves the others faster from then
        on, so that sizes which were measured before it would seem slower than they are.
        """
        most = self._pool.num_rows
        sizes = sorted(set(ladder(most)) | {min(most, self._pool.batch_rows)})
        start = min(most, self._pool.batch_rows)
        search = Search(
            [Candidate.of(**{SIZE: size}) for size in sizes[::-1]],
            Candidate.of(**{SIZE: start}),
            EXPECTED,
        )
        for _ in range(min(_WARM_UP, max_steps // 10) if sizes[-1] > start else 0):
            if not self._try(search, sizes[-1]):
                break
        while not self._try(search, start):
            start = max(size for size in sizes if size <= max(1, start // 2))
        search.base = Candidate.of(**{SIZE: start})
        return search

    def _base(self) -> Candidate:
        """The largest that was measured and is no more than the batch."""
        known = [size for size in self._seconds if size <= self._pool.batch_rows]
        return Candidate.of(**{SIZE: max(known, default=min(self._seconds, default=1))})

    def _beside(self, search: Search) -> int | None:
        """Half or twice the base, where it was not measured: a cliff shows at no other size."""
        base = int(search.base[SIZE])
        sizes = {int(each[SIZE]) for each in search.candidates} - self._seconds.keys()
        return next((size for size in (base // 2, 2 * base) if size in sizes), None)

    def _round(self, search: Search, size: int, max_steps: int) -> None:
        is_new = size not in self._peaks
        if is_new and not self._try(search, size):
            return
        for _ in range(ROUND):
            if self._steps >= max_steps and self._seconds:
                return
            if not self._try(search, size, counts=True):
                return

    def _try(self, search: Search, size: int, *, counts: bool = False) -> bool:
        """One trial; whether it fitted. The first at a size is not counted."""
        rows = size * max(1, round(self._pool.batch_rows / size))
        if rows > self._pool.num_rows:
            rows = max(size, self._pool.num_rows // size * size)
        batch = self._pool.take(rows)
        self._policy.size, self._policy.outcome = size, None
        self._steps += 1
        try:
            if self._evaluates:
                self._microbatcher.evaluate(batch)
            else:
                self._microbatcher.accumulate([batch], accept=_decline)
        except SampleTooLargeError:
            if size == 1:
                raise
            self._too_large = [*self._too_large, size]
            larger = [each for each in search.candidates if int(each[SIZE]) >= size]
            search.exclude(larger)
            return False
        outcome = self._policy.outcome
        assert outcome is not None
        assert outcome.seconds is not None
        self._peaks[size] = max(
            (each for each in (outcome.peak_bytes, self._peaks.get(size)) if each is not None),
            default=None,
        )
        if counts:
            seconds = outcome.seconds / rows
            self._seconds.setdefault(size, []).append(seconds)
            candidate = Candidate.of(**{SIZE: size})
            search.tell(Measurement(candidate=candidate, seconds=seconds, step=self._steps))
        return True

    def _measured(self, base: int) -> tuple[MeasuredSize, ...]:
        medians = {size: statistics.median(each) for size, each in self._seconds.items()}
        return tuple(
            MeasuredSize(
                microbatch_size=size,
                steps=len(self._seconds[size]),
                rows_per_second=1 / median,
                spread=_spread(self._seconds[size]),
                peak_bytes=self._peaks[size],
                speedup=medians[base] / median,
            )
            for size, median in sorted(medians.items())
        )


def _decline(_: Any) -> bool:
    return False


def _spread(seconds: Sequence[float]) -> float | None:
    if len(seconds) < 2:
        return None
    median = statistics.median(seconds)
    return 1.4826 * statistics.median(abs(each - median) for each in seconds) / median


def ladder(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 … rows.

    >>> ladder(20)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    found = {number * 2**power // 2 for power in range(most.bit_length() + 1) for number in (2, 3)}
    return sorted(each for each in found if each <= most)


__all__ = ["ExploreReport", "MeasuredSize", "explore"]
