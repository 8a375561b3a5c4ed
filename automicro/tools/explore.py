"""The fastest size before a run: a race over sizes on its own batches; nothing stays changed."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import replace_tensors, tensor_leaves
from automicro.batchnorm import find_batchnorm
from automicro.errors import AutomicroError, SampleTooLargeError
from automicro.features import with_features
from automicro.microbatcher import Microbatcher
from automicro.options import read_count
from automicro.policy.explore import EXPECTED, ROUND, SURE
from automicro.policy.policy import Exploration, Outcome, Policy
from automicro.policy.race import Arm, Race
from automicro.tools.pictures import Point, speed_and_memory
from automicro.trainer.rehearsal import undisturbed
from automicro.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rows that are pooled, in batches of the loader.
POOLED = 4
# Trials of the largest size before all others: an allocator that has served it serves the others
# faster from then on, so that sizes which were measured before it would seem slower than they are.
_WARM_UP = 3
_SIZES = ("microbatch_size", "eval_microbatch_size", "remember_sizes", "repeatable")


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """The measurements of one size.

    Attributes:
        microbatch_size: rows.
        steps: that were measured.
        rows_per_second: the median.
        spread: the standard deviation of one step in shares of the median, from the median
            deviation; None of a single step.
        peak_bytes: the most that was allocated; None if not counted.
        speedup: its median speed in shares of the base's.
    """

    microbatch_size: int
    steps: int
    rows_per_second: float
    spread: float | None
    peak_bytes: int | None
    speedup: float


@dataclass(frozen=True, kw_only=True)
class ExploreReport:
    """The result of `explore`. ``str()`` of it is a table.

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
    def points(self) -> list[Point]:
        """For a picture: of each size the rows per second, their spread, the peak in bytes."""
        known: list[Point] = []
        for each in self.measured:
            spread = each.spread and each.spread * each.rows_per_second
            known.append((each.microbatch_size, each.rows_per_second, spread, each.peak_bytes))
        return known + [(size, None, None, None) for size in self.too_large]

    def picture(self) -> "Figure":
        """Draw speed and memory against the size, with the choice.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return speed_and_memory(self.points, chosen=self.microbatch_size)

    def to_dict(self) -> dict[str, Any]:
        """All of it as values that JSON can hold."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = ["  rows      rows/s  spread         peak   speed  steps"]
        for each in self.measured:
            spread = "" if each.spread is None else f"{each.spread:.1%}"
            peak = "" if each.peak_bytes is None else format_bytes(each.peak_bytes)
            lines.append(
                f"{each.microbatch_size:>6}  {each.rows_per_second:>10,.1f}  {spread:>6}  "
                f"{peak:>11}  {each.speedup:>5.2f}x  {each.steps:>5}"
                f"{'  ←' * (each.microbatch_size == self.microbatch_size)}"
            )
        lines += [f"{size:>6}  does not fit" for size in self.too_large]
        lines.append(
            f"\n{'eval_' * (self.phase == 'eval')}microbatch_size: {self.microbatch_size}  "
            f"({self.speedup:.2f}x base of {self.base} rows, confidence {self.confidence}, "
            f"{self.ended}; {self.steps} trials in {self.seconds:.1f} s)"
        )
        if self.phase == "train":
            does = "divides {} rows"
            if self.batch_rows % self.microbatch_size:
                does = "does not divide {} rows; the nearest that it does is {}"
            lines.append(f"global batch: it {does.format(self.batch_rows, self.global_batch)}")
        return "\n".join([*lines, *self.notes])


def explore(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    evaluate: bool = False,
    max_steps: int = 60,
    max_minutes: float | None = None,
    max_rows: int | None = None,
    emit: Callable[[Exploration], None] = lambda _: None,
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
        emit: called after each round with the size, its speed and the confidence so far.
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
    for name in {*_SIZES, "when_too_large"} & options.keys():
        raise TypeError(
            f"explore() looks for sizes itself, at the plain level: leave {name} out, and let the "
            'run find sizes and levels with microbatch_size="explore"'
        )
    start = time.monotonic()
    with undisturbed(batches):
        pool = _Pool(batches, BatchLayout(options.get("batch_layout", 0)), max_rows)
        trials = _Trials(pool.batch_rows, pool.num_rows, emit)
        # No gradient is kept, so it does not matter whether splitting is exact.
        options = {"batchnorm": "ignore", "probe": False, **options}
        sizes = {"microbatch_size": trials, "eval_microbatch_size": trials}
        microbatcher = Microbatcher(model, **with_features({**options, **sizes}))
        run: Callable[[Any], object] = microbatcher.evaluate if evaluate else microbatcher.backward
        try:
            with microbatcher.rehearsing():
                for size in trials.sizes(max_steps, max_minutes):
                    try:
                        run(pool.about_a_batch(size))
                    except SampleTooLargeError:
                        if size == 1:
                            raise
        except KeyboardInterrupt:
            # Without a measurement there is no best so far to return.
            if not trials.seconds:
                raise
            trials.ended = "interrupted"
        finally:
            microbatcher.release_reservation()
    for name in [] if evaluate else find_batchnorm(model)[:1]:
        pool.notes.append(
            f"{name!r} averages over the rows of a microbatch (BatchNorm): its size changes what "
            "is trained, and not only how fast"
        )
    found = trials.race.find()
    size = _size(found.best)
    return ExploreReport(
        phase="eval" if evaluate else "train",
        microbatch_size=size,
        speedup=found.speedup,
        confidence=found.confidence,
        base=_size(trials.race.base),
        batch_rows=pool.batch_rows,
        global_batch=max(size, round(pool.batch_rows / size) * size),
        measured=tuple(trials.measured()),
        too_large=tuple(sorted(trials.too_large)),
        steps=trials.steps,
        seconds=time.monotonic() - start,
        ended=trials.ended,
        notes=tuple(pool.notes),
    )


class _Pool:
    """Rows of successive batches, from which trials take as many as they need."""

    def __init__(self, batches: Iterable[Any], layout: BatchLayout, max_rows: int | None) -> None:
        taken = iter(batches)
        first = next(taken, None)
        if first is None:
            raise ValueError(
                "there is no batch to measure: give a data loader, or a list of batches"
            )
        self.batch_rows = rows = layout.num_rows(first)
        wanted = POOLED * rows if max_rows is None else read_count("max_rows", max_rows)
        parts = [first]
        while rows < wanted and (batch := next(taken, None)) is not None:
            parts.append(batch)
            rows += layout.num_rows(batch)
        self.notes: list[str] = []
        self._layout = layout
        try:
            self._all = _joined(parts, layout) if parts[1:] else first
            self._num_rows = layout.num_rows(self._all)
        except (AutomicroError, LookupError, RuntimeError, TypeError, ValueError) as error:
            self._all, self._num_rows = first, self.batch_rows
            self.notes.append(
                f"batches of the loader cannot be pooled ({str(error).splitlines()[0]}), so no "
                f"size above {self.batch_rows} rows was tried; batches of one length can be"
            )
        self.num_rows = min(wanted, self._num_rows)
        if self.num_rows < wanted and not self.notes:
            self.notes.append(
                f"the data have {self.num_rows} rows to pool, so no larger size was tried"
            )

    def about_a_batch(self, size: int) -> Any:
        """So many microbatches of a size that they have about the rows of a batch."""
        rows = size * max(1, min(round(self.batch_rows / size), self.num_rows // size))
        if rows == self._num_rows:
            return self._all
        return self._layout.split(self._all, [rows, self._num_rows - rows])[0]


def _joined(parts: Sequence[Any], layout: BatchLayout) -> Any:
    """Successive batches of one structure as one batch; what holds no rows is the first's."""
    dims = layout.row_dims(parts[0])
    if not dims:  # rows that are not collated, packed or nested ones
        return concat_rows(parts)
    leaves = [dict(tensor_leaves(each)) for each in parts]
    whole = {
        id(leaves[0][path]): torch.cat([each[path] for each in leaves], dim)
        for path, dim in dims.items()
    }
    return replace_tensors(parts[0], whole)


class _Trials(Policy):
    """The size of each trial, what the trials have shown, and which size is tried next.

    The base is the largest size that was measured and is no more than the batch.
    """

    compares_seconds = True

    def __init__(self, batch_rows: int, most: int, emit: Callable[[Exploration], None]) -> None:
        sizes = sorted({*ladder(most), min(batch_rows, most)}, reverse=True)
        # The largest size comes first, for the reason that is given at _WARM_UP.
        self._batch_rows, self._size, self._counts = batch_rows, sizes[0], False
        base = (min(batch_rows, most),)
        self.race = Race([(size,) for size in sizes], base, EXPECTED)
        self._peaks: dict[int, int | None] = {}
        self.steps, self.ended, self._emit = 0, "sure enough", emit
        self.too_large: set[int] = set()

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return min(num_rows, self._size)

    def record(self, outcome: Outcome) -> None:
        race, size = self.race, self._size
        if not outcome.fits:
            self.too_large.add(size)
            # Told before exclude(), which puts the first of the rest in the base's place, measured
            # or not.
            is_lost = _size(race.base) >= size
            race.exclude([each for each in race.arms if _size(each) >= size])
            if is_lost and race.arms:
                smaller = [each for each in map(_size, race.arms) if each <= size // 2]
                race.base = (max(self.seconds, default=max(smaller)),)
            return
        assert outcome.seconds is not None
        # A peak of 0 is one that was not counted.
        self._peaks[size] = max(outcome.peak_bytes or 0, self._peaks.get(size) or 0) or None
        if self._counts:
            seconds = outcome.seconds / outcome.num_rows
            race.measurements.append(((size,), seconds, self.steps, 1.0))
            if _size(race.base) < size <= self._batch_rows:
                race.base = (size,)

    @property
    def seconds(self) -> dict[int, list[float]]:
        """Of a row, by the sizes that fit."""
        found: dict[int, list[float]] = {}
        for arm, seconds, *_ in self.race.measurements:
            if arm in self.race.arms:
                found.setdefault(_size(arm), []).append(seconds)
        return found

    def sizes(self, max_steps: int, max_minutes: float | None) -> Iterator[int]:
        """Sizes to try; the first trial at a size does not count."""
        race, start = self.race, time.monotonic()
        counting = [False] * min(_WARM_UP, max_steps // 10)
        while True:
            # An attribute counts here, because record() reads it while the trial is under way.
            for self._counts in counting:
                is_late = max_minutes is not None and time.monotonic() - start >= 60 * max_minutes
                if self.seconds and (is_late or self.steps >= max_steps):
                    self.ended = f"{max_minutes=:g}" if is_late else f"{max_steps=}"
                    return
                if self._size not in self.too_large:
                    self.steps += 1
                    yield self._size
            found = race.find()
            self._size = _size(found.next)
            if self.seconds:
                told: dict[str, Any] = {"speedup": found.speedup, "confidence": found.confidence}
                self._emit(Exploration(microbatch_size=_size(found.best), steps=self.steps, **told))
            if self.seconds and found.confidence >= SURE:
                # A cliff beside the base shows at no other size.
                beside = {_size(race.base) // 2, 2 * _size(race.base)} - self.seconds.keys()
                beside &= {*map(_size, race.arms)}
                if not beside:
                    return
                self._size = min(beside)
            # The first trial at a size pays for what later ones find done: memory of that size,
            # kernels chosen.
            counting = [False] * (self._size not in self._peaks) + [True] * ROUND

    def measured(self) -> Iterator[MeasuredSize]:
        """The measurements of each size, the smallest first."""
        base = statistics.median(self.seconds[_size(self.race.base)])
        for size, seconds in sorted(self.seconds.items()):
            median = statistics.median(seconds)
            deviation = statistics.median(abs(each - median) for each in seconds)
            yield MeasuredSize(
                microbatch_size=size,
                steps=len(seconds),
                rows_per_second=1 / median,
                # By 1.4826 a median deviation becomes the standard deviation of normal noise.
                spread=None if len(seconds) < 2 else 1.4826 * deviation / median,
                peak_bytes=self._peaks[size],
                speedup=base / median,
            )


def _size(arm: Arm) -> int:
    return int(arm[0])


def ladder(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 … rows.

    >>> ladder(20)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    found = {number * 2**power // 2 for power in range(most.bit_length() + 1) for number in (2, 3)}
    return sorted(each for each in found if each <= most)
