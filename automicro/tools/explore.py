"""The fastest size before a run: "explore" on its own batches; nothing stays changed."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import replace_tensors, tensor_leaves
from automicro.batchnorm import find_batchnorm
from automicro.errors import AutomicroError
from automicro.features import with_features
from automicro.microbatcher import Microbatcher
from automicro.options import read_count
from automicro.policy.explore import Explore
from automicro.policy.policy import Exploration
from automicro.tools.pictures import Point, speed_and_memory
from automicro.trainer.rehearsal import undisturbed
from automicro.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rows that are pooled, in batches of the loader.
POOLED = 4
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
        base: the largest size that fits, in rows.
        batch_rows: of a batch of the loader.
        global_batch: the multiple of the recommended size that is nearest to these rows.
        measured: sizes, the smallest first.
        too_large: sizes that ran out of memory.
        steps: trials that were measured.
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
    forward and backward of the pool's rows, cut as `Explore` says, and rolled back: parameters,
    gradients, buffers and random numbers are as before afterwards, and the optimizer never steps.
    It ends early with Ctrl-C, with the best so far.

    Args:
        model: the model, where it computes.
        batches: a data loader, or batches in a list; an iterator loses what is taken from it.
        evaluate: whether to measure evaluations: forward in evaluation mode, without gradients.
        max_steps: trials that are measured, once it is known what fits.
        max_minutes: that these may take; None for any time.
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
    for name in {*_SIZES, "when_too_large"} & options.keys():
        raise TypeError(
            f"explore() looks for sizes itself, at the plain level: leave {name} out, and let the "
            'run find sizes and levels with microbatch_size="explore"'
        )
    policy = Explore(max_steps=max_steps, max_minutes=max_minutes)
    start, told = time.monotonic(), Exploration(microbatch_size=1, ended="nothing else to try")
    peaks: dict[int, int | None] = {}
    too_large: set[int] = set()
    with undisturbed(batches):
        pool = _Pool(batches, BatchLayout(options.get("batch_layout", 0)), max_rows)
        # No gradient is kept, so it does not matter whether splitting is exact.
        options = {"batchnorm": "ignore", "probe": False, **options}
        sizes = {"eval_microbatch_size" if evaluate else "microbatch_size": policy}
        microbatcher = Microbatcher(model, **with_features({**options, **sizes}))
        run: Callable[[Any], Any] = microbatcher.evaluate if evaluate else microbatcher.backward
        try:
            with microbatcher.rehearsing():
                while not peaks or policy.compares_seconds:
                    result = run(pool.rows)
                    too_large.update(result.failed_sizes)
                    size = result.microbatch_size
                    # A peak of 0 is one that was not counted.
                    peaks[size] = max(result.peak_bytes or 0, peaks.get(size) or 0) or None
                    told = result.exploration or dataclasses.replace(told, microbatch_size=size)
                    if told.is_news and told.steps:
                        emit(told)
        except KeyboardInterrupt:
            # Without a measurement there is no best so far to return.
            if not told.steps:
                raise
            told = dataclasses.replace(told, ended="interrupted")
        finally:
            microbatcher.release_reservation()
    for name in [] if evaluate else find_batchnorm(model)[:1]:
        pool.notes.append(
            f"{name!r} averages over the rows of a microbatch (BatchNorm): its size changes what "
            "is trained, and not only how fast"
        )
    measured = _measured(policy, told, peaks)
    size = told.microbatch_size
    return ExploreReport(
        phase="eval" if evaluate else "train",
        microbatch_size=size,
        speedup=told.speedup,
        confidence=told.confidence,
        base=max((each.microbatch_size for each in measured), default=size),
        batch_rows=pool.batch_rows,
        global_batch=max(size, round(pool.batch_rows / size) * size),
        measured=tuple(measured),
        too_large=tuple(sorted(too_large)),
        steps=told.steps,
        seconds=time.monotonic() - start,
        ended=told.ended or "",
        notes=tuple(pool.notes),
    )


def _measured(
    policy: Explore, told: Exploration, peaks: dict[int, int | None]
) -> list[MeasuredSize]:
    """The measurements of each size with the settings that were chosen, the smallest first."""
    by_size: dict[int, list[float]] = {}
    for (_, size, *settings), seconds, *_ in policy.measurements:
        if settings == list(told.settings.values()):
            by_size.setdefault(int(size), []).append(seconds)
    found: list[MeasuredSize] = []
    for size, times in sorted(by_size.items()):
        median = statistics.median(times)
        deviation = statistics.median(abs(each - median) for each in times)
        found.append(
            MeasuredSize(
                microbatch_size=size,
                steps=len(times),
                rows_per_second=1 / median,
                # By 1.4826 a median deviation becomes the standard deviation of normal noise.
                spread=None if len(times) < 2 else 1.4826 * deviation / median,
                peak_bytes=peaks.get(size),
                speedup=statistics.median(by_size[max(by_size)]) / median,
            )
        )
    return found


class _Pool:
    """Rows of successive batches, in one batch."""

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
        try:
            self.rows = _joined(parts, layout) if parts[1:] else first
        except (AutomicroError, LookupError, RuntimeError, TypeError, ValueError) as error:
            self.rows, rows = first, self.batch_rows
            self.notes.append(
                f"batches of the loader cannot be pooled ({str(error).splitlines()[0]}), so no "
                f"size above {self.batch_rows} rows was tried; batches of one length can be"
            )
        if rows > wanted:
            self.rows = layout.split(self.rows, [wanted, rows - wanted])[0]
        elif rows < wanted and not self.notes:
            self.notes.append(f"the data have {rows} rows to pool, so no larger size was tried")


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
