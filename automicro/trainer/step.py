"""One optimization batch: its gradient and one optimizer step."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from automicro.errors import CheckpointWarning, NonFiniteLossError, warn
from automicro.events.run import LoopState
from automicro.microbatcher import Microbatcher
from automicro.savers.levels import PLAIN
from automicro.step.results import StepResult
from automicro.trainer.context import RunContext, TrainedBatch
from automicro.trainer.counting import Counter
from automicro.trainer.metrics import MetricSet
from automicro.trainer.optimizer import Update
from automicro.trainer.progress import place_of, size_lines

MOST_IN_A_ROW = 50  # skipped batches: a model with NaN in its weights never recovers


class FinitenessGuard:
    """Stops at a batch that is not finite, skips it, or ignores it."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.in_a_row = 0  # skipped batches since the last step

    @property
    def accept(self) -> Callable[[Tensor], bool] | None:
        """Predicate of the losses whose batches are committed; None to commit every batch."""
        # A batch that is rolled back leaves no trace, for example in BatchNorm's statistics. The
        # predicate reads the loss, which waits for the device.
        return None if self._mode == "ignore" else _is_finite

    def object_to(self, loss: float, norm: float | None, state: LoopState) -> str | None:
        """Describe the value that is not finite; None if the optimizer can step."""
        if self._mode == "ignore" or (math.isfinite(loss) and math.isfinite(norm or 0.0)):
            return None
        what = f"the loss is {loss:.6g}"
        if math.isfinite(loss):
            what += f", but the norm of its gradient is {norm}"
        if self._mode == "skip":
            return self.skip(what, state)
        raise NonFiniteLossError(
            f"{what} in {place_of(state)}; the optimizer did not step. Lower the learning rate, "
            "clip gradients (grad_clip_norm=1.0), check this batch for NaN, or skip such batches "
            "(non_finite='skip')"
        )

    def skip(self, what: str, state: LoopState) -> str:
        """Describe a skipped batch; raise an error after too many in a row."""
        self.in_a_row += 1
        if self.in_a_row <= MOST_IN_A_ROW:
            return f"{what} in {place_of(state)}"
        raise NonFiniteLossError(
            f"{what} in {place_of(state)}, as in the {MOST_IN_A_ROW} skipped batches before it; "
            "the weights may be NaN. Resume from an earlier checkpoint with a lower learning rate, "
            "or clip gradients (grad_clip_norm=1.0)"
        )


def _is_finite(loss: Tensor) -> bool:
    return math.isfinite(loss.item())


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingStep:
    """Trains on one optimization batch: its gradient, the optimizer step, and all counts."""

    microbatcher: Microbatcher
    update: Update
    metrics: MetricSet
    guard: FinitenessGuard
    tokens: Counter
    seconds: Counter
    context: RunContext
    _told: set[str] = field(default_factory=lambda: {PLAIN})  # levels that were reported

    def run(
        self, batches: Sequence[Any], *, known_seconds: float | None = None
    ) -> TrainedBatch | None:
        """Train on an optimization batch and record the result; None if no rank has rows."""
        start = time.perf_counter()
        update, context = self.update, self.context
        state, ranks, progress = context.state, context.ranks, context.progress
        rates = update.learning_rates
        tokens = self.tokens.count_all(batches)
        seconds = self.seconds.count_all(batches, known=known_seconds)
        where = f"in {place_of(state)}"
        with context.failures.kept(batches, phase="train", where=where):
            result = self.microbatcher.accumulate(
                batches, self.metrics.metrics, accept=self.guard.accept
            )
        if not batches and result.num_global_samples == 0:
            return None
        was_counted = state.tokens is not None or state.data_seconds is not None
        if ranks.world_size > 1 and (state.batch == 0 or was_counted):
            total, unknown, total_seconds, unknown_seconds = ranks.add_up(
                [*_known(tokens), *_known(seconds)]
            )
            tokens = None if unknown else int(total)
            seconds = None if unknown_seconds else total_seconds
        for line in size_lines("train", result, state.train.cut):
            progress.line(line)
        if result.level not in self._told:
            self._told.add(result.level)
            does = self.microbatcher.describe_level(result.level)
            progress.line(f"train: too large as it is, so {does} ({result.level})")
        state.train.count(result)
        norm = None
        if result.is_committed:
            if context.callbacks.listens("gradients_ready"):
                update.unscale()
                context.tell("gradients_ready", result)
            norm = update.clip()
        # The guard has already read the loss, so this usually waits for nothing new.
        state.loss, length, losses = self._read(result, norm)
        # With a scaled loss, gradients overflow occasionally, and the scaler skips the step.
        checked = None if update.scaler is not None else length
        objection = self.guard.object_to(state.loss, checked, state)
        if objection is None and not update.step():
            # The scaler lowers the scale, so this is an error only after many batches in a row.
            what = "gradients overflowed, so the scale of the loss was lowered"
            objection = self.guard.skip(what, state)
        if objection is None:
            self.guard.in_a_row = 0
        else:
            state.skipped += 1
            progress.line(f"train: {objection}; skipped")
        update.clear()
        state.batch += 1
        state.epoch_batch += 1
        state.count_rows(result.num_global_samples, loaded=len(batches))
        state.tokens = tokens if state.batch == 1 else _add(state.tokens, tokens)
        state.data_seconds = seconds if state.batch == 1 else _add(state.data_seconds, seconds)
        # After the batch is counted, because the optimizer has stepped even if the scheduler fails.
        if objection is None:
            update.end("batch")
        state.train.seconds += time.perf_counter() - start
        return TrainedBatch(result=result, losses=losses, grad_norm=length, learning_rates=rates)

    def warn_of_unsaved_state(self, batch: Any) -> None:
        """Warn of state that forwards change and no checkpoint holds, with forwards rolled back."""
        names = self.microbatcher.unsaved_state(batch)
        if names:
            shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            warn(
                f"each forward changes {shown}, but no checkpoint holds it, so a resumed run "
                "begins with its first value. Make it a buffer, or give its module get_extra_state "
                "and set_extra_state",
                CheckpointWarning,
            )

    def _read(
        self, result: StepResult, norm: Tensor | None
    ) -> tuple[float, float | None, dict[str, float]]:
        """Read the loss, the norm and the parts of the loss from the device."""
        numbers = [result.loss, *result.losses.values()]
        numbers += [] if norm is None else [norm]
        read = self.update.read(numbers)
        losses = dict(zip(result.losses, read[1:], strict=False))
        return read[0], None if norm is None else read[-1], losses


def _known(amount: float | None) -> tuple[float, float]:
    """Convert an amount to a pair to sum over ranks: the amount, and 1 if it is unknown."""
    return float(amount or 0), float(amount is None)


Amount = TypeVar("Amount", int, float)


def _add(one: Amount | None, other: Amount | None) -> Amount | None:
    return None if one is None or other is None else one + other
