"""Measurement of the fastest size before a run, with rollback of all effects."""

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

# Rows to pool, in batches of the loader.
POOLED = 4
_SIZES = ("microbatch_size", "eval_microbatch_size", "remember_sizes", "repeatable")


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """The measurements of one size.

    Attributes:
        microbatch_size: rows of a microbatch.
        steps: number of measured steps.
        rows_per_second: median speed.
        peak_bytes: peak memory in bytes, or None if not counted.
        speedup: median speed relative to the base.
    """

    microbatch_size: int
    steps: int
    rows_per_second: float
    peak_bytes: int | None
    speedup: float


@dataclass(frozen=True, kw_only=True)
class ExploreReport:
    """The result of `explore`. ``str()`` of it is a table.

    Attributes:
        phase: ``"train"`` or ``"eval"``.
        microbatch_size: recommended size in rows.
        speedup: speed of that size relative to the base.
        confidence: probability in percent, given the measured spread, that no size is more than 1 %
            faster; 0 … 99.
        base: the largest size that fits, in rows.
        batch_rows: rows of a batch of the loader.
        global_batch: the multiple of the recommended size that is nearest to ``batch_rows``.
        measured: measurements by size, smallest first.
        too_large: sizes that ran out of memory.
        steps: number of measured trials.
        seconds: total duration.
        ended: why exploring ended.
        notes: additional remarks.
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

    def picture(self) -> "Figure":
        """Draw speed and memory against the size, and mark the recommended size.

        Raises:
            ImportError: matplotlib is not installed.
        """
        points: list[Point] = [
            (each.microbatch_size, each.rows_per_second, each.peak_bytes) for each in self.measured
        ]
        points += [(size, None, None) for size in self.too_large]
        return speed_and_memory(points, chosen=self.microbatch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = ["  rows      rows/s         peak   speed  steps"]
        for each in self.measured:
            peak = "" if each.peak_bytes is None else format_bytes(each.peak_bytes)
            lines.append(
                f"{each.microbatch_size:>6}  {each.rows_per_second:>10,.1f}  {peak:>11}  "
                f"{each.speedup:>5.2f}x  {each.steps:>5}"
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
                does = "does not divide {} rows; the nearest multiple of it is {}"
            lines.append(f"global batch: it {does.format(self.batch_rows, self.global_batch)}")
        return "\n".join([*lines, *self.notes])


def explore(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    evaluate: bool = False,
    max_steps: int = 60,
    max_rows: int | None = None,
    emit: Callable[[Exploration], None] = lambda _: None,
    **options: Any,
) -> ExploreReport:
    """Measure which microbatch size is fastest, and leave everything unchanged.

    Sizes are not limited by the loader's batches, which are pooled for larger sizes. A trial runs
    forward and backward on the pooled rows, cut as `Explore` proposes, and is rolled back. The
    optimizer never steps, and parameters, gradients, buffers and random states are unchanged
    afterwards. Ctrl-C ends it early and returns the best size so far.

    Args:
        model: the model, on its device.
        batches: a data loader or a list of batches; an iterator loses the batches taken from it.
        evaluate: whether to measure evaluation: forward in evaluation mode, without gradients.
        max_steps: maximum number of trials to measure after the sizes that fit are known.
        max_rows: maximum rows of a microbatch; by default those of four batches.
        emit: called after each round with the size, its speed and the confidence so far.
        options: options of `Microbatcher`: ``loss_fn``, ``forward``, ``optimizer``,
            ``memory_limit``, and so on.

    Raises:
        SampleTooLargeError: not even one row fits.
        BatchError: the batches cannot be read.
        TypeError, ValueError: invalid arguments; the message has the remedy.

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
            f"explore() chooses sizes itself, and only at the plain level: leave {name} out. To "
            'find sizes and levels during a run, use microbatch_size="explore"'
        )
    if "max_minutes" in options:
        raise TypeError("explore() has no argument max_minutes. Limit it by max_steps")
    policy = Explore(max_steps=max_steps)
    start, told = time.monotonic(), Exploration(microbatch_size=1, ended="nothing else to try")
    peaks: dict[int, int | None] = {}
    too_large: set[int] = set()
    with undisturbed(batches):
        pool = _Pool(batches, BatchLayout(options.get("batch_layout", 0)), max_rows)
        # No gradient is kept, so exactness of the split does not matter.
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
                    # A peak of 0 means that it was not counted.
                    peaks[size] = max(result.peak_bytes or 0, peaks.get(size) or 0) or None
                    told = result.exploration or dataclasses.replace(told, microbatch_size=size)
                    if told.is_news and told.steps:
                        emit(told)
        except KeyboardInterrupt:
            # Without a measurement there is no best size to return.
            if not told.steps:
                raise
            told = dataclasses.replace(told, ended="interrupted")
        finally:
            microbatcher.release_reservation()
    for name in [] if evaluate else find_batchnorm(model)[:1]:
        pool.notes.append(
            f"{name!r} averages over the rows of a microbatch (BatchNorm), so the microbatch "
            "size changes results as well as speed"
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
    """Return the measurements of each size with the chosen settings, smallest first."""
    by_size: dict[int, list[float]] = {}
    for (_, size, *settings), seconds, *_ in policy.measurements:
        if settings == list(told.settings.values()):
            by_size.setdefault(int(size), []).append(seconds)
    medians = {size: statistics.median(times) for size, times in sorted(by_size.items())}
    return [
        MeasuredSize(
            microbatch_size=size,
            steps=len(by_size[size]),
            rows_per_second=1 / median,
            peak_bytes=peaks.get(size),
            speedup=medians[max(medians)] / median,
        )
        for size, median in medians.items()
    ]


class _Pool:
    """Rows of successive batches, joined into one batch."""

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
                f"size above {self.batch_rows} rows was tried; give batches of one length"
            )
        if rows > wanted:
            self.rows = layout.split(self.rows, [wanted, rows - wanted])[0]
        elif rows < wanted and not self.notes:
            self.notes.append(f"only {rows} rows could be pooled, so no larger size was tried")


def _joined(parts: Sequence[Any], layout: BatchLayout) -> Any:
    """Join successive batches of one structure; data without rows come from the first batch."""
    dims = layout.row_dims(parts[0])
    if not dims:  # rows that are not collated, packed rows, or nested tensors
        return concat_rows(parts)
    leaves = [dict(tensor_leaves(each)) for each in parts]
    whole = {
        id(leaves[0][path]): torch.cat([each[path] for each in leaves], dim)
        for path, dim in dims.items()
    }
    return replace_tensors(parts[0], whole)
