"""One optimization batch: its gradient, and one step of the optimizer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automicro.duration import Duration
from automicro.events import LoopState
from automicro.microbatcher import Microbatcher
from automicro.optimization import GradientScaler, clip_gradients, step_optimizer
from automicro.ranks import Ranks
from automicro.results import StepResult
from automicro.scalars import read_scalars
from automicro.trainer.arguments import in_tokens
from automicro.trainer.finiteness import FinitenessGuard
from automicro.trainer.lines import size_lines
from automicro.trainer.metric_set import MetricSet
from automicro.trainer.pace import Pace, warn_of_haste
from automicro.trainer.progress import Progress
from automicro.trainer.tokens import TokenCounter

SCHEDULER_INTERVALS = ("batch", "epoch")
"""After what a scheduler may be stepped: each optimizer step, or each pass over the data."""


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """What came of one optimization batch.

    Attributes:
        result: of its forward and backward.
        losses: the parts of its loss by name, read.
        grad_norm: of its gradient before clipping; None where it is not clipped.
        learning_rates: that its step took, for each group of parameters.
    """

    result: StepResult
    losses: Mapping[str, float]
    grad_norm: float | None
    learning_rates: tuple[float, ...]


class TrainingStep:
    """Gradient, clip, optimizer step, clear the gradients; scheduler step, unless it is per epoch.

    Args:
        microbatcher: gives the gradient.
        metrics: updated with every row.
        modules: whose gradients are cleared.
        optimizer: steps once per batch.
        scheduler: steps once per optimizer step, or once per epoch; None for none.
        scheduler_interval: after what it is stepped: one of `SCHEDULER_INTERVALS`.
        grad_clip_norm: the largest norm of the gradient; None for any.
        scaler: of the loss in half precision, which gives the microbatcher its backward; None
            for none.
        guard: decides about losses that are not finite.
        tokens: counts the tokens of batches.
        token_durations: by name, those that count tokens, so that every batch must tell them.
        device: where it all happens.
        ranks: all that train the model.
    """

    def __init__(
        self,
        microbatcher: Microbatcher,
        *,
        metrics: MetricSet,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        scheduler_interval: str,
        grad_clip_norm: float | None,
        scaler: GradientScaler | None,
        guard: FinitenessGuard,
        tokens: TokenCounter,
        token_durations: Mapping[str, Duration],
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self._microbatcher = microbatcher
        self._metrics = metrics
        self._modules = modules
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scheduler_interval = scheduler_interval
        self._grad_clip_norm = grad_clip_norm
        self._scaler = scaler
        self._guard = guard
        self._tokens = tokens
        self._token_durations = token_durations
        self._device = device
        self._ranks = ranks

    def run(
        self,
        batches: Sequence[Any],
        state: LoopState,
        progress: Progress,
        gradients_ready: Callable[[StepResult], None] | None = None,
    ) -> TrainedBatch | None:
        """Train on an optimization batch, and write down what came of it.

        Returns None where no rank has rows, and nothing was done.

        Args:
            batches: what the data loader gave for it; none where other ranks may have more rows.
            state: where training stands; updated.
            progress: where to say what is out of the ordinary.
            gradients_ready: called when ``.grad`` holds the unscaled gradient, before clipping.

        Raises:
            NonFiniteLossError: before the optimizer steps.
        """
        start = time.perf_counter()
        rates = tuple(float(g["lr"]) for g in self._optimizer.param_groups if "lr" in g)
        tokens = self._count_tokens(batches)
        result = self._microbatcher.accumulate(
            batches, self._metrics.metrics, accept=self._guard.accept
        )
        if not batches and result.num_global_samples == 0:
            return None
        if self._ranks.world_size > 1 and (state.batch == 0 or state.tokens is not None):
            tokens = self._tokens_of_all(tokens)
        for line in size_lines("train", result, state.train.cut):
            progress.line(line)
        state.train.count(result)
        norm = self._finish_gradients(result, gradients_ready) if result.is_committed else None
        length: float | None = None
        objection: str | None = None
        reads_first = self._guard.decides or self._scaler is not None
        if reads_first:  # where the guard decides, the loss is on the host already
            state.loss, length, losses = self._read(result, norm)
            # A scale that was too large makes gradients overflow now and then, which the scaler
            # itself answers.
            objection = self._guard.object_to(
                state.loss, length if self._scaler is None else None, state
            )
        if objection is None and not step_optimizer(
            self._optimizer, self._device, scaler=self._scaler
        ):
            objection = self._guard.object_to_overflow(state)
        if not reads_first:  # late: the device has the optimizer's step to do meanwhile
            state.loss, length, losses = self._read(result, norm)
        if objection is None:
            self._guard.take_note_of_step()
        else:
            state.skipped += 1
            progress.line(f"train: {objection}; skipped")
        self.clear_gradients()
        state.batch += 1
        state.epoch_batch += 1
        state.count_rows(result.num_global_samples, loaded=len(batches))
        state.tokens = tokens if state.batch == 1 else _add(state.tokens, tokens)
        # After the batch is counted: a scheduler that fails does so after the optimizer's step.
        if objection is None:
            self._step_scheduler("batch")
        state.train.seconds += time.perf_counter() - start
        return TrainedBatch(result=result, losses=losses, grad_norm=length, learning_rates=rates)

    def require_tokens(self, name: str, duration: Duration) -> None:
        """Let every batch tell its tokens from now on, where a duration counts them.

        Args:
            name: of the argument that it came in.
            duration: any.
        """
        self._token_durations = {**self._token_durations, **in_tokens(**{name: duration})}

    def end_epoch(self) -> None:
        """Step a scheduler that counts epochs."""
        self._step_scheduler("epoch")

    def warn_of_haste(self, num_batches: int, max_duration: Duration) -> None:
        """Warn of a scheduler that counts epochs and is stepped after every batch.

        Args:
            num_batches: optimizer steps of an epoch.
            max_duration: of the run.
        """
        if self._scheduler is not None and self._scheduler_interval == "batch":
            warn_of_haste(self._scheduler, Pace.of(num_batches, max_duration))

    def _step_scheduler(self, interval: str) -> None:
        if self._scheduler is not None and self._scheduler_interval == interval:
            self._scheduler.step()

    @property
    def loss_average_is(self) -> str:
        """How sure it is what the loss averages over; see `StepResult`."""
        return self._microbatcher.loss_average_is

    def clear_gradients(self) -> None:
        """Forget gradients, also those of parameters that the optimizer does not have.

        Nobody else would clear those, and they would pile up.
        """
        self._optimizer.zero_grad(set_to_none=True)
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.forget()  # of a batch that was left out, or interrupted

    def _count_tokens(self, batches: Sequence[Any]) -> int | None:
        for name, duration in self._token_durations.items():
            for batch in batches:
                self._tokens.require(batch, name=name, duration=duration)
        tokens: int | None = 0
        for batch in batches:
            tokens = _add(tokens, self._tokens.count(batch))
        return tokens

    def _tokens_of_all(self, tokens: int | None) -> int | None:
        """The tokens of all ranks; None where one cannot count its own."""
        total, unknown = self._ranks.add_up([float(tokens or 0), float(tokens is None)])
        return None if unknown else int(total)

    def _finish_gradients(
        self, result: StepResult, gradients_ready: Callable[[StepResult], None] | None
    ) -> Tensor | None:
        """Unscale and clip; the norm before clipping."""
        if gradients_ready is not None:
            self._unscale()
            gradients_ready(result)
        if self._grad_clip_norm is None:
            return None
        self._unscale()
        return clip_gradients(
            self._optimizer, self._grad_clip_norm, self._device, ranks=self._ranks
        )

    def _read(
        self, result: StepResult, norm: Tensor | None
    ) -> tuple[float, float | None, dict[str, float]]:
        """Loss, norm and the parts of the loss in one go: each reading waits for the device."""
        numbers = [result.loss, *result.losses.values()]
        numbers += [] if norm is None else [norm]
        if self._scaler is None:
            read = read_scalars(numbers)
        else:
            read = self._scaler.read(self._optimizer, numbers)
        losses = dict(zip(result.losses, read[1:], strict=False))
        return read[0], None if norm is None else read[-1], losses

    def _unscale(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale(self._optimizer)


def _add(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
