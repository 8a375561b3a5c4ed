"""One optimization batch: its gradient, and one step of the optimizer."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from automicro.batch.device import on_host
from automicro.errors import CheckpointWarning, NonFiniteLossError, warn
from automicro.events.run import LoopState
from automicro.microbatcher import Microbatcher
from automicro.savers.levels import PLAIN
from automicro.step.results import StepResult
from automicro.trainer.context import RunContext, TrainedBatch
from automicro.trainer.metrics import MetricSet
from automicro.trainer.optimizer import Update
from automicro.trainer.progress import level_line, place_of, size_lines
from automicro.units import Duration, Unit

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
            f"{what} in {place_of(state)}; the optimizer did not step. Lower the learning rate, "
            "warm it up, clip gradients (grad_clip_norm=1.0), look for NaN and infinite values in "
            "this batch, or leave such batches out with non_finite='skip'"
        )

    def object_to_overflow(self, state: LoopState) -> str:
        """The error for a batch whose gradients overflowed in half precision.

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
            return f"{what} in {place_of(state)}"
        raise NonFiniteLossError(
            f"{what} in {place_of(state)}, as in the {MOST_IN_A_ROW} batches before it, which were "
            "skipped; the weights themselves may be NaN or infinite. Go on from an earlier "
            "checkpoint with a lower learning rate, or clip gradients (grad_clip_norm=1.0)"
        )


def _is_finite(loss: Tensor) -> bool:
    return math.isfinite(loss.item())


def _describe_loss(loss: float, norm: float | None) -> str | None:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if norm is not None and not math.isfinite(norm):
        return f"the loss is {loss:.6g}, but the norm of its gradient is {norm}"
    return None


CountTokens = Callable[[Any], int]

_HOW = (
    "pass count_tokens=…, a callable from a batch to its number of tokens, such as "
    "count_tokens=lambda batch: batch['input_ids'].numel(); a config names one of yours with "
    "{call: pkgutil.resolve_name, args: {name: my_data.count_tokens}}"
)


class TokenCounter:
    """Counts the tokens of whole batches, where they lie, by one reduction per batch.

    In this order: the callable, if there is one; the sum of ``attention_mask``; the elements of
    ``input_ids``. The batch is a mapping that has these, or a pair whose first part is one. A
    mask counts where it has one number per token, and not where it is added to attention scores.

    A batch that lies on a device is counted there, and the host waits for the sum once per batch.

    Args:
        count_tokens: from a batch to its number of tokens; None to read it off the batch.
        durations: by the names of arguments: every batch must tell its tokens for those that
            count them.

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

    def __init__(
        self, count_tokens: CountTokens | None = None, **durations: Duration | None
    ) -> None:
        if count_tokens is not None and not callable(count_tokens):
            raise TypeError(f"count_tokens={count_tokens!r} cannot be called; {_HOW}")
        self._count_tokens = count_tokens
        self._wanted: str | None = None  # by an argument, if any
        for name, duration in durations.items():
            if duration is not None:
                self.require_for(name, duration)

    def require_for(self, name: str, duration: Duration) -> None:
        """Let every batch tell its tokens from now on, where a duration counts them.

        Args:
            name: of the argument that it came in.
            duration: any.
        """
        if duration.unit is Unit.TOKENS:
            self._wanted = self._wanted or f"{name}='{duration}'"

    def count_all(self, batches: Sequence[Any]) -> int | None:
        """The tokens of several batches; None where one of them does not tell.

        Raises:
            ValueError: a duration counts tokens, and nothing says what a batch's are.
        """
        tokens: int | None = 0
        for batch in batches:
            own = self.count(batch)
            if own is None and self._wanted is not None:
                raise ValueError(
                    f"{self._wanted} counts tokens, but {_describe_batch(batch)}; {_HOW}"
                )
            tokens = _add(tokens, own)
        return tokens

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


CountSeconds = Callable[[Any], float]


class SecondsCounter:
    """Counts the seconds of data in batches, such as those of speech.

    Args:
        count_seconds: from a batch to its seconds; None to take what the loader knows.
        is_known: whether the loader knows: a `LengthBatchSampler` of which ``unit="seconds"``.
        durations: by the names of arguments, of which some may count seconds.

    Raises:
        TypeError: ``count_seconds`` cannot be called.
        ValueError: a duration counts seconds, and nothing says what a batch's are.

    Example:
        >>> SecondsCounter(lambda batch: sum(batch)).count_all([[1.5, 2.0], [0.5]], known=None)
        4.0
    """

    def __init__(
        self,
        count_seconds: CountSeconds | None = None,
        *,
        is_known: bool = False,
        **durations: Duration | None,
    ) -> None:
        if count_seconds is not None and not callable(count_seconds):
            raise TypeError(f"count_seconds={count_seconds!r} cannot be called; {_HOW_LONG}")
        self._count_seconds = count_seconds
        self._is_known = is_known or count_seconds is not None
        for name, duration in durations.items():
            if duration is not None:
                self.require_for(name, duration)

    def require_for(self, name: str, duration: Duration) -> None:
        """Refuse a duration in seconds of data without a count of them.

        Args:
            name: of the argument that it came in.
            duration: any.

        Raises:
            ValueError: it is one.
        """
        if duration.unit is Unit.SECONDS and not self._is_known:
            raise ValueError(
                f"{name}='{duration}' counts seconds of data, and nothing says how many a batch "
                f"has; {_HOW_LONG}; a limit in time is max_time='2h30m'"
            )

    def count_all(self, batches: Sequence[Any], *, known: float | None) -> float | None:
        """The seconds of several batches; None where nothing says what they are.

        Args:
            batches: what the loader gave.
            known: what it knows of them.

        Raises:
            TypeError: ``count_seconds`` gave no number.
            ValueError: it gave one below 0 or not finite.
        """
        if self._count_seconds is None:
            return known
        with on_host():
            return math.fsum(_seconds(self._count_seconds(batch)) for batch in batches)


_HOW_LONG = (
    "pass count_seconds=…, a callable from a batch to its seconds, such as "
    "count_seconds=lambda batch: float(batch['seconds'].sum()), or batches of a "
    "LengthBatchSampler with unit='seconds' (sampling_mode.unit in a config)"
)


def _seconds(value: Any) -> float:
    number = value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(
            f"count_seconds gave {value!r} ({type(value).__name__}), not a number; return a float"
        )
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"count_seconds gave {number}, and no batch has that many seconds; return their number"
        )
    return float(number)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingStep:
    """One optimization batch: its gradient, the optimizer's step, and what is counted.

    Attributes:
        microbatcher: gives the gradient.
        update: what becomes of it.
        metrics: updated with every row.
        guard: decides about losses that are not finite.
        tokens: counts the tokens of batches.
        seconds: counts the seconds of data in them.
        context: of the run; its state is written here.
    """

    microbatcher: Microbatcher
    update: Update
    metrics: MetricSet
    guard: FinitenessGuard
    tokens: TokenCounter
    seconds: SecondsCounter
    context: RunContext
    _told: set[str] = field(default_factory=lambda: {PLAIN})  # levels

    def run(
        self,
        batches: Sequence[Any],
        *,
        known_seconds: float | None = None,
    ) -> TrainedBatch | None:
        """Train on an optimization batch, and write down what came of it.

        Returns None where no rank has rows, and nothing was done.

        Args:
            batches: what the data loader gave for it; none where other ranks may have more rows.
            known_seconds: of data, in these batches, as the loader has it.

        Raises:
            NonFiniteLossError: before the optimizer steps.
        """
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
            progress.line(level_line("train", result.level, does))
        state.train.count(result)
        norm = None
        if result.is_committed:
            if context.callbacks.listens("gradients_ready"):
                update.unscale()
                context.tell("gradients_ready", result)
            norm = update.clip()
        length: float | None = None
        objection: str | None = None
        reads_first = self.guard.decides or update.is_scaled
        if reads_first:  # where the guard decides, the loss is on the host already
            state.loss, length, losses = self._read(result, norm)
            # A scale that was too large makes gradients overflow now and then, which the scaler
            # itself answers.
            objection = self.guard.object_to(
                state.loss, None if update.is_scaled else length, state
            )
        if objection is None and not update.step():
            objection = self.guard.object_to_overflow(state)
        if not reads_first:  # late: the device has the optimizer's step to do meanwhile
            state.loss, length, losses = self._read(result, norm)
        if objection is None:
            self.guard.take_note_of_step()
        else:
            state.skipped += 1
            progress.line(f"train: {objection}; skipped")
        update.clear()
        state.batch += 1
        state.epoch_batch += 1
        state.count_rows(result.num_global_samples, loaded=len(batches))
        state.tokens = tokens if state.batch == 1 else _add(state.tokens, tokens)
        state.data_seconds = seconds if state.batch == 1 else _add(state.data_seconds, seconds)
        # After the batch is counted: a scheduler that fails does so after the optimizer's step.
        if objection is None:
            update.end("batch")
        state.train.seconds += time.perf_counter() - start
        return TrainedBatch(result=result, losses=losses, grad_norm=length, learning_rates=rates)

    def warn_of_unsaved_state(self, batch: Any) -> None:
        """Name what forwards change and no checkpoint holds. What that takes leaves no trace.

        Args:
            batch: that was trained on.
        """
        names = self.microbatcher.unsaved_state(batch)
        if names:
            shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            warn(
                f"each forward changes {shown}, which no checkpoint holds: a run that is taken up "
                "begins with what it was at first. Make it a buffer (register_buffer), or let its "
                "module have get_extra_state and set_extra_state",
                CheckpointWarning,
            )

    @property
    def loss_average_is(self) -> str:
        """How sure it is what the loss averages over; see `StepResult`."""
        return self.microbatcher.loss_average_is

    def _read(
        self, result: StepResult, norm: Tensor | None
    ) -> tuple[float, float | None, dict[str, float]]:
        """Loss, norm and the parts of the loss."""
        numbers = [result.loss, *result.losses.values()]
        numbers += [] if norm is None else [norm]
        read = self.update.read(numbers)
        losses = dict(zip(result.losses, read[1:], strict=False))
        return read[0], None if norm is None else read[-1], losses


def _known(amount: float | None) -> tuple[float, float]:
    """An amount, and how many ranks do not know theirs."""
    return float(amount or 0), float(amount is None)


Amount = TypeVar("Amount", int, float)


def _add(one: Amount | None, other: Amount | None) -> Amount | None:
    return None if one is None or other is None else one + other
