"""The summary of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from automicro.events.run import GlobalBatch, LoopState, Sizes, describe_hours
from automicro.trainer.progress import describe_number
from automicro.units import count_of, format_bytes

TIME_IS_OVER = "max_time is over"
"""The reason to stop of a run that will be resumed."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FitSummary:
    """The summary of `Trainer.fit`; its ``str()`` is a small table.

    Attributes:
        seconds: time in seconds, including evaluations and the wait for data.
        samples_per_second: rows trained per second, without evaluations.
        tokens_per_second: tokens trained per second; None if they cannot be counted.
        peak_memory_bytes: peak memory of live tensors since the call of `fit`, on the device of
            rank 0; None on a CPU without a memory limit.
        epochs: number of complete epochs.
        steps: number of optimizer steps, one per optimization batch that was not skipped.
        skipped_steps: number of batches skipped because their loss or gradients were not finite.
        samples: number of rows trained.
        tokens: number of tokens in these rows; None if they cannot be counted.
        data_seconds: seconds of data in these rows, such as speech; None if not counted.
        global_batch: measured rows of an optimization batch (per device, devices, accumulation),
            the largest and the average.
        train_ooms: attempts in training that ran out of memory and were rolled back.
        eval_ooms: attempts in evaluation that ran out of memory and were rolled back.
        nested_ooms: times that memory ran out inside parts with nested sizes, in training and
            evaluation, which the parts handled with smaller slices.
        microbatch_size: final microbatch size, from the last of the largest batches; batches in
            smaller microbatches for measuring do not count.
        microbatch_unit: unit of the microbatch size.
        level: level at which microbatches of that batch were computed, see `StepResult`.
        nested_sizes: sizes of parts with nested sizes, see `StepResult`.
        num_microbatches: number of microbatches in that batch.
        batch_size: rows of that batch on the device of rank 0.
        eval_microbatch_size: final microbatch size in evaluation; None without an evaluation.
        train_loss: loss of the last batch.
        stop_reason: reason for the end of training before ``max_duration``, or None.
        loss_average_is: how the average of the loss is known, see `StepResult`.
        rehearsed: description of the rehearsed batches; None without ``rehearse`` or after a
            resume.
        train_metrics: metric values by name over the last complete epoch, or over the trained part
            of the first.
        eval_metrics: metric values by name of the last evaluation, with ``"loss"``; empty without
            an evaluation.
    """

    seconds: float
    samples_per_second: float
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None
    epochs: int
    steps: int
    skipped_steps: int = 0
    samples: int
    tokens: int | None = None
    data_seconds: float | None = None
    global_batch: GlobalBatch
    train_ooms: int
    eval_ooms: int
    microbatch_size: int
    num_microbatches: int
    batch_size: int
    eval_microbatch_size: int | None
    microbatch_unit: str = "rows"
    level: str = "plain"
    nested_sizes: Mapping[str, int] = field(default_factory=dict)
    nested_ooms: int = 0
    train_loss: float
    stop_reason: str | None = None
    loss_average_is: str = "unchecked"
    rehearsed: str | None = None
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    eval_metrics: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        ended = (
            "" if self.stop_reason is None else f", stopped: {' '.join(self.stop_reason.split())}"
        )
        return (
            f"FitSummary({self.steps:,} steps, {self.samples:,} samples, "
            f"train_loss={describe_number(self.train_loss)}, {self.ooms} OOMs survived, "
            f"microbatches {self.cut}{ended})"
        )

    @property
    def ooms(self) -> int:
        """Number of attempts in training and evaluation that ran out of memory."""
        return self.train_ooms + self.eval_ooms

    @property
    def cut(self) -> Sizes:
        """Final sizes into which batches were split."""
        return Sizes(
            num_rows=self.batch_size,
            microbatch_size=self.microbatch_size,
            num_microbatches=self.num_microbatches,
            unit=self.microbatch_unit,
            level=self.level,
            nested=self.nested_sizes,
        )

    def __str__(self) -> str:
        rows = self._rows()
        width = max(map(len, rows)) + 2
        return "\n".join(f"{name:<{width}}{value}" for name, value in rows.items())

    def _rows(self) -> dict[str, str]:
        """Collect the reported values by name, without missing ones."""
        peak, is_alone = self.peak_memory_bytes, self.global_batch.num_devices == 1
        memory = "not measured" if peak is None else format_bytes(peak)
        epoch = f"{'last' if self.epochs else 'part of an'} epoch"
        ooms = f"{self.ooms} ({self.train_ooms} in train, {self.eval_ooms} in eval)"
        ooms += f", and {self.nested_ooms} in nested modules" if self.nested_ooms else ""
        size = count_of(self.microbatch_size, self.microbatch_unit.removesuffix("s"))
        size += f" ({self.cut}{'' if is_alone else ' on each device'}) in train"
        if self.eval_microbatch_size is not None:
            size += f", {self.eval_microbatch_size} in eval"

        def shown(values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
            return ((name, describe_number(value)) for name, value in values.items())

        rows = {
            "time": f"{self.seconds:.1f} s",
            "samples per second": f"{self.samples_per_second:,.0f}",
            "tokens per second": _count(self.tokens_per_second),
            f"peak memory{'' if is_alone else ' (of rank 0)'}": memory,
            "epochs": f"{self.epochs:,}",
            "optimizer steps": f"{self.steps:,}",
            "stopped early": self.stop_reason or "",
            "skipped steps (not finite)": _count(self.skipped_steps or None),
            "samples": f"{self.samples:,}",
            "tokens": _count(self.tokens),
            "data": "" if self.data_seconds is None else describe_hours(self.data_seconds),
            "global batch": str(self.global_batch),
            "rehearsed": self.rehearsed or "",
            "train loss (last batch)": describe_number(self.train_loss),
            "loss average": _SURE.get(self.loss_average_is, self.loss_average_is),
            **{f"train {name} ({epoch})": each for name, each in shown(self.train_metrics)},
            **{f"eval {name}": each for name, each in shown(self.eval_metrics)},
            "OOMs survived": ooms,
            "final microbatch size": size,
        }
        return {name: value for name, value in rows.items() if value}


_SURE = {
    "declared": "as declared",
    "read": "known from the loss or the model",
    "checked": "assumed to be over samples, checked on a few rows",
    "unchecked": "assumed to be over samples, not checked",
    "wrong": "wrong: see the warning",
}


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def summarize(state: LoopState, *, num_devices: int, **more: Any) -> FitSummary:
    """Build the summary from the state of the loop and additional fields."""
    cut = state.train.cut
    assert cut is not None
    assert state.loss is not None
    seconds = max(state.train.seconds, 1e-9)
    return FitSummary(
        seconds=state.train.seconds + state.eval.seconds,
        samples_per_second=state.samples / seconds,
        tokens_per_second=None if state.tokens is None else state.tokens / seconds,
        epochs=state.epoch,
        steps=state.batch - state.skipped,
        skipped_steps=state.skipped,
        samples=state.samples,
        tokens=state.tokens,
        data_seconds=state.data_seconds,
        global_batch=GlobalBatch.of(state, num_devices),
        train_ooms=state.train.ooms,
        eval_ooms=state.eval.ooms,
        nested_ooms=state.train.nested_ooms + state.eval.nested_ooms,
        microbatch_size=cut.microbatch_size,
        num_microbatches=cut.num_microbatches,
        microbatch_unit=cut.unit,
        level=cut.level,
        nested_sizes=cut.nested,
        batch_size=cut.num_rows,
        eval_microbatch_size=None if state.eval.cut is None else state.eval.cut.microbatch_size,
        train_loss=state.loss,
        train_metrics=state.train.metrics,
        eval_metrics=state.eval.metrics,
        **more,
    )
