"""What the lines of progress say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automicro.duration import Duration, Unit
from automicro.events.state import Cut, GlobalBatch, LoopState
from automicro.memory import format_bytes, peak_bytes
from automicro.policy import Fixed, Halving, Policy
from automicro.results import EvalResult, StepResult
from automicro.torch_private import is_uninitialized
from automicro.trainer.device import describe_device
from automicro.trainer.speed import Speed
from automicro.trainer.status import SEPARATOR, Status, TimeLeft, describe_seconds

_MOST_METRICS = 8  # in one line


def count_of(number: int, what: str) -> str:
    """A number of things.

    >>> count_of(1, "batch"), count_of(1200, "batch")
    ('1 batch', '1,200 batches')
    """
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number:,} {what if number == 1 else plural}"


def describe_parameters(parameters: Iterable[nn.Parameter]) -> str:
    """How many numbers a model learns; lazy parameters have no shape yet.

    >>> describe_parameters(nn.Linear(999, 2).parameters())
    '2,000 parameters'
    """
    each = list(parameters)
    known = sum(parameter.numel() for parameter in each if not is_uninitialized(parameter))
    more = " and lazy ones" if any(map(is_uninitialized, each)) else ""
    return count_of(known, "parameter") + more


def describe_size(policy: Policy) -> str:
    """A microbatch size as people write it.

    >>> describe_size(Halving()), describe_size(Fixed(4)), describe_size(Fixed(None))
    ('auto', '4', 'whole batch')
    """
    if isinstance(policy, Halving) and policy.state_dict()["limit"] is None:
        return "auto"
    if isinstance(policy, Fixed):
        size = policy.state_dict()["microbatch_size"]
        return "whole batch" if size is None else str(size)
    return repr(policy)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What runs, and on what."""

    device: torch.device
    memory_limit: str | int | float | None
    precision: str
    policies: tuple[Policy, Policy]
    model: nn.Module
    max_duration: Duration
    parallel: str | None = None

    def line(self, num_batches: int | None) -> str:
        """For people, with the batches of an epoch where they are known."""
        train, evaluation = map(describe_size, self.policies)
        limit = self.memory_limit
        parts = [
            f"training on {describe_device(self.device, limit)}",
            "no memory limit" if limit is None else f"memory limit {limit}",
            f"precision {self.precision}",
            f"microbatch size {train} in train, {evaluation} in eval",
            describe_parameters(self.model.parameters()),
            f"max_duration {self.max_duration}",
        ]
        if self.parallel is not None:
            parts.insert(1, self.parallel)
        if num_batches is not None:
            parts.append(f"{count_of(num_batches, 'batch')} per epoch")
        return " · ".join(parts)

    def values(self) -> dict[str, Any]:
        """For loggers."""
        train, evaluation = map(describe_size, self.policies)
        return {
            "device": describe_device(self.device, self.memory_limit),
            "memory_limit": self.memory_limit,
            "precision": self.precision,
            "microbatch_size": train,
            "eval_microbatch_size": evaluation,
            "model": type(self.model).__name__,
            "max_duration": str(self.max_duration),
            "torch": str(torch.__version__),
            **({} if self.parallel is None else {"parallel": self.parallel}),
        }


def position(state: LoopState, max_duration: Duration, num_batches: int | None = None) -> str:
    """How far training has come, in the unit that it is measured in.

    Args:
        state: where training stands.
        max_duration: how far it goes.
        num_batches: of an epoch, to say how far into it.

    >>> position(LoopState(batch=7, samples=448), Duration.parse("1000sp"))
    'sample 448/1,000, batch 7'
    """
    unit, last = max_duration.unit, max_duration.value
    if unit is Unit.EPOCHS and num_batches is None:
        return f"epoch {state.epoch}/{last}, batch {state.batch}"
    if unit is Unit.EPOCHS:
        return f"epoch {state.epoch + 1}/{last}, batch {state.epoch_batch}/{num_batches}"
    if unit is Unit.BATCHES:
        return f"batch {state.batch}/{last}"
    word = "sample" if unit is Unit.SAMPLES else "token"
    return f"{word} {state.done(unit):,}/{last:,}, batch {state.batch}"


def share_done(state: LoopState, max_duration: Duration, num_batches: int | None) -> float | None:
    """How much of training is done, from 0 to 1; None where an epoch's length is not known.

    >>> share_done(LoopState(epoch=1, epoch_batch=3), Duration.parse("4ep"), 12)
    0.3125
    >>> share_done(LoopState(batch=5), Duration.parse("4ba"), None)
    1.0
    """
    if max_duration.unit is not Unit.EPOCHS:
        return min(1.0, state.done(max_duration.unit) / max_duration.value)
    if not num_batches:
        return None
    return min(1.0, (state.epoch + state.epoch_batch / num_batches) / max_duration.value)


def batch_status(
    state: LoopState,
    cut: Cut,
    *,
    max_duration: Duration,
    num_batches: int | None,
    device: torch.device,
    speed: Speed,
    learning_rate: float | None,
    num_devices: int = 1,
    is_measuring: bool = False,
    time_left: TimeLeft | None = None,
) -> Status:
    """Where training stands after a batch."""
    if max_duration.unit is Unit.EPOCHS and num_batches is None:
        where = f"epoch {state.epoch + 1}/{max_duration.value}, batch {state.epoch_batch}"
    else:
        where = position(state, max_duration, num_batches)
    if max_duration.unit is not Unit.EPOCHS:
        where += f", epoch {state.epoch + 1}"
    assert state.loss is not None
    measuring = " (measuring)" if is_measuring else ""
    peak, share = peak_bytes(device), share_done(state, max_duration, num_batches)
    left = None if time_left is None else time_left.at(share)
    loss = f"loss {describe_number(state.loss)}"
    rate = [] if learning_rate is None else [f"lr {learning_rate:.3g}"]
    whole = f"global batch {GlobalBatch.of(state, num_devices).brief}"
    memory = [] if peak is None else [f"peak memory {format_bytes(peak)}"]
    line = [where, loss, *rate, str(speed), f"microbatches {cut}{measuring}", whole, *memory]
    if share is not None:
        line.append(f"{share:.0%} done")
    if left is not None:
        line.append(f"{describe_seconds(left)} left")
    size = f"{cut.num_microbatches} × {cut.microbatch_size}{measuring}"
    return Status(
        line=SEPARATOR.join(line),
        parts=[loss, str(speed), f"microbatches {size}", *memory, where, *rate, whole],
        share=share,
        seconds_left=left,
    )


def describe_number(value: float) -> str:
    """A loss or a metric: four decimals, unless it is too small or too large for them.

    >>> describe_number(1.0), describe_number(0.00001234), describe_number(123456.0)
    ('1.0000', '1.234e-05', '1.235e+05')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def recovery_line(phase: str, result: StepResult | EvalResult) -> str:
    """A microbatch size that shrank.

    Args:
        phase: ``"train"`` or ``"eval"``.
        result: of the batch, with failed attempts.

    >>> result = StepResult(
    ...     loss=torch.tensor(0.0),
    ...     num_samples=512,
    ...     num_global_samples=512,
    ...     microbatch_size=128,
    ...     num_microbatches=4,
    ...     attempts=3,
    ...     failed_sizes=(512, 256),
    ... )
    >>> recovery_line("train", result)
    'train: out of memory, microbatch size 512 → 128 rows (4 × 128 of 512; 2 attempts rolled back)'
    """
    size = count_of(result.microbatch_size, "row")
    return (
        f"{phase}: out of memory, microbatch size {result.failed_sizes[0]} → {size} "
        f"({Cut.of(result)}; {count_of(result.ooms, 'attempt')} rolled back)"
    )


def size_lines(phase: str, result: StepResult | EvalResult, settled: Cut | None) -> list[str]:
    """All that is out of the ordinary about the microbatch size of a batch.

    Args:
        phase: ``"train"`` or ``"eval"``.
        result: of the batch.
        settled: the cut of earlier ones; where rows differ in length, more of shorter ones fit
            into as many microbatches, which is no growth.
    """
    lines = []
    if result.recalled_size is not None:
        lines.append(remembered_line(phase, result.recalled_size))
    if result.ooms:
        lines.append(recovery_line(phase, result))
    elif result.is_measuring:
        lines.append(measuring_line(phase, result))
    elif result.grown_from is not None and _is_coarser(Cut.of(result), settled):
        lines.append(growth_line(phase, result))
    return lines


def _is_coarser(cut: Cut, settled: Cut | None) -> bool:
    return (
        settled is None
        or cut.num_microbatches < settled.num_microbatches
        or cut.num_rows > settled.num_rows
    )


def growth_line(phase: str, result: StepResult | EvalResult) -> str:
    """A microbatch size that grew.

    >>> result = StepResult(
    ...     loss=torch.tensor(0.0),
    ...     num_samples=512,
    ...     num_global_samples=512,
    ...     microbatch_size=103,
    ...     num_microbatches=5,
    ...     attempts=1,
    ...     grown_from=64,
    ... )
    >>> growth_line("train", result)
    'train: more fits, microbatch size 64 → 103 rows (5 × up to 103 of 512)'
    """
    size = count_of(result.microbatch_size, "row")
    return f"{phase}: more fits, microbatch size {result.grown_from} → {size} ({Cut.of(result)})"


def measuring_line(phase: str, result: StepResult | EvalResult) -> str:
    """A batch that was cut smaller than fits.

    >>> result = StepResult(
    ...     loss=torch.tensor(0.0),
    ...     num_samples=512,
    ...     num_global_samples=512,
    ...     microbatch_size=32,
    ...     num_microbatches=16,
    ...     attempts=1,
    ...     is_measuring=True,
    ... )
    >>> measuring_line("train", result)
    'train: this batch alone in smaller microbatches (16 × 32 of 512), to measure what rows need'
    """
    return (
        f"{phase}: this batch alone in smaller microbatches ({Cut.of(result)}), to measure what "
        "rows need"
    )


def remembered_line(phase: str, size: int) -> str:
    """A microbatch size that was not looked for.

    >>> remembered_line("train", 128)
    'train: started from 128 rows per microbatch, which an earlier run found'
    """
    rows = count_of(size, "row")
    return f"{phase}: started from {rows} per microbatch, which an earlier run found"


def evaluation_line(
    values: Mapping[str, float], *, samples: int, cut: Cut, where: str, name: str = ""
) -> str:
    """What an evaluation found.

    >>> cut = Cut(num_rows=10, microbatch_size=5, num_microbatches=2)
    >>> evaluation_line({"loss": 0.25, "accuracy": 1.0}, samples=10, cut=cut, where="batch 3")
    'eval after batch 3: loss 0.2500, accuracy 1.0000 · 10 samples · microbatches 2 × 5 of 10'
    """
    after = f"{' ' if name else ''}{name}{f' after {where}' if where else ''}"
    found = describe_values(values)
    return f"eval{after}: {found} · {count_of(samples, 'sample')} · microbatches {cut}"


def describe_values(values: Mapping[str, float]) -> str:
    """Loss and metrics in a few words."""
    shown = [
        f"{name} {describe_number(value)}" for name, value in list(values.items())[:_MOST_METRICS]
    ]
    if len(values) > _MOST_METRICS:
        shown.append(f"and {len(values) - _MOST_METRICS} more")
    return ", ".join(shown) or "nothing to report (no loss, no metrics)"
