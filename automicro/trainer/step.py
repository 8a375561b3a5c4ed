"""One optimization batch: its gradient, and one step of the optimizer.

What to do about a batch whose loss, or the norm of its gradient, is NaN or infinite.

How many tokens a batch has.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.batch.device import on_host
from automicro.errors import NonFiniteLossError
from automicro.events.run import LoopState
from automicro.microbatcher import Microbatcher
from automicro.optimizer.clipping import clip_gradients
from automicro.optimizer.scaling import GradientScaler
from automicro.optimizer.step import step_optimizer
from automicro.options import in_tokens
from automicro.ranks.interface import Ranks
from automicro.step.results import StepResult
from automicro.trainer.metrics import MetricSet
from automicro.trainer.optimizer import Pace, warn_of_haste
from automicro.trainer.progress import Progress, count_of, size_lines
from automicro.units import Duration
from automicro.values import read_scalars

NON_FINITE_MODES = ("stop", "skip", "ignore")
MOST_IN_A_ROW = 50  # a model whose weights are NaN never recovers


class FinitenessGuard:
    """Stops at a batch that is not finite, skips it, or lets it pass.

    Args:
        mode: one of `NON_FINITE_MODES`.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._in_a_row = 0

    @property
    def decides(self) -> bool:
        """Whether anything depends on the loss of a batch being finite."""
        return self._mode != "ignore"

    @property
    def accept(self) -> Callable[[Tensor], bool] | None:
        """Whether a batch with this loss may leave a trace: in BatchNorm's statistics, say.

        None where every batch may. Reading the loss waits for the device.
        """
        return _is_finite if self.decides else None

    def object_to(self, loss: float, norm: float | None, state: LoopState) -> str | None:
        """None where the optimizer may step, else what is not finite, in words.

        Args:
            loss: of the batch.
            norm: of its gradient, where that was computed and has to be finite.
            state: where training stands, with the batch still to be counted.

        Raises:
            NonFiniteLossError: the mode is "stop", or too many batches were skipped in a row.
        """
        if not self.decides:
            return None
        what = _describe_loss(loss, norm)
        if what is None:
            return None
        if self._mode == "skip":
            return self._skip(what, state)
        raise NonFiniteLossError(
            f"{what} {_where(state)}; the optimizer did not step. Lower the learning rate, warm "
            "it up, clip gradients (grad_clip_norm=1.0), look for NaN and infinite values in this "
            "batch, or leave such batches out with non_finite='skip'"
        )

    def object_to_overflow(self, state: LoopState) -> str:
        """What to say of a batch whose gradients overflowed in half precision.

        The scale of the loss is lowered then, so it is no error unless it goes on for long.

        Raises:
            NonFiniteLossError: too many batches were skipped in a row.
        """
        return self._skip("gradients overflowed, so the scale of the loss was lowered", state)

    def take_note_of_step(self) -> None:
        """The optimizer has stepped: the model is not lost."""
        self._in_a_row = 0

    def _skip(self, what: str, state: LoopState) -> str:
        self._in_a_row += 1
        if self._in_a_row <= MOST_IN_A_ROW:
            return f"{what} {_where(state)}"
        raise NonFiniteLossError(
            f"{what} {_where(state)}, as in the {MOST_IN_A_ROW} batches before it, which were "
            "skipped; the weights themselves may be NaN or infinite. Go on from an earlier "
            "checkpoint with a lower learning rate, or clip gradients (grad_clip_norm=1.0)"
        )


def _is_finite(loss: Tensor) -> bool:
    return math.isfinite(loss.item())


def _where(state: LoopState) -> str:
    return (
        f"in epoch {state.epoch + 1}, batch {state.epoch_batch + 1} of the epoch "
        f"({count_of(state.batch, 'batch')} done)"
    )


def _describe_loss(loss: float, norm: float | None) -> str | None:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if norm is not None and not math.isfinite(norm):
        return f"the loss is {loss:.6g}, but the norm of its gradient is {norm}"
    return None


CountTokens = Callable[[Any], int]

_HOW = (
    "pass count_tokens=…, a callable from a batch to its number of tokens, such as "
    "count_tokens=lambda batch: batch['input_ids'].numel()"
)


class TokenCounter:
    """Counts the tokens of whole batches, where they lie, by one reduction per batch.

    In this order: the callable, if there is one; the sum of ``attention_mask``; the elements of
    ``input_ids``. The batch is a mapping that has these, or a pair whose first part is one. A
    mask counts where it has one number per token, and not where it is added to attention scores.

    A batch that lies on a device is counted there, and the host waits for the sum once per batch.

    Args:
        count_tokens: from a batch to its number of tokens; None to read it off the batch.

    Raises:
        TypeError: ``count_tokens`` cannot be called.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.zeros(2, 3), "attention_mask": torch.tensor([[1, 1, 0]])}
        >>> TokenCounter().count(batch)
        2
        >>> TokenCounter(lambda batch: 7).count(batch)
        7
    """

    def __init__(self, count_tokens: CountTokens | None = None) -> None:
        if count_tokens is not None and not callable(count_tokens):
            raise TypeError(f"count_tokens={count_tokens!r} cannot be called; {_HOW}")
        self._count_tokens = count_tokens

    def count(self, batch: Any) -> int | None:
        """The tokens of a batch; None where nothing says what they are.

        Raises:
            TypeError: ``count_tokens`` gave no whole number.
            ValueError: it gave one below 0.
        """
        with on_host():
            if self._count_tokens is not None:
                return _whole(self._count_tokens(batch))
            fields = _fields(batch)
            mask: Any = fields.get("attention_mask")
            if _is_per_token(mask):
                return int(mask.sum())
            return _size(fields.get("input_ids"))

    def require(self, batch: Any, *, name: str, duration: Duration) -> int:
        """The tokens of a batch, for a duration that counts them.

        Args:
            batch: the batch.
            name: the argument that holds the duration.
            duration: what it says.

        Raises:
            ValueError: nothing says what this batch's tokens are.
        """
        tokens = self.count(batch)
        if tokens is None:
            raise ValueError(
                f"{name}='{duration}' counts tokens, but {_describe_batch(batch)}; {_HOW}"
            )
        return tokens


def _whole(value: Any) -> int:
    number = value
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(
            f"count_tokens gave {value!r} ({type(value).__name__}), not a whole number; return "
            "an int, such as batch['input_ids'].numel()"
        )
    if number < 0:
        raise ValueError(
            f"count_tokens gave {number}, and no batch has fewer than 0 tokens; return their number"
        )
    return int(number)


def _fields(batch: Any) -> Mapping[Any, Any]:
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
        batch = batch[0]
    return batch if isinstance(batch, Mapping) else {}


def _is_per_token(mask: Any) -> bool:
    if isinstance(mask, Tensor):
        is_number = not mask.is_floating_point() and not mask.is_complex()
        return mask.dim() <= 2 and is_number
    return isinstance(mask, np.ndarray) and mask.ndim <= 2 and mask.dtype.kind in "biu"


def _size(ids: Any) -> int | None:
    """The elements of a tensor or an array, or of all in a list of these."""
    if isinstance(ids, Tensor):
        return ids.numel()
    if isinstance(ids, np.ndarray):
        return ids.size
    if isinstance(ids, list | tuple) and ids:
        sizes = [_size(each) for each in ids]
        return None if None in sizes else sum(size for size in sizes if size is not None)
    return None


def _describe_batch(batch: Any) -> str:
    fields = _fields(batch)
    if not fields:
        return f"nothing says how many a batch of type {type(batch).__name__} has"
    return (
        "this batch has neither attention_mask nor input_ids (it has "
        f"{', '.join(sorted(map(str, fields)))})"
    )


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
