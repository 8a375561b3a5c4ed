"""The run as callbacks see it, with the requests that they can make."""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from automicro.durations import Duration, Unit
from automicro.microbatcher import Microbatcher
from automicro.step.results import EvalResult, StepResult


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How a batch was cut into microbatches; ``nested`` has the largest slices of nested parts.

    >>> str(Sizes(num_rows=512, microbatch_size=128, num_microbatches=4))
    '4 × 128 of 512'
    >>> str(Sizes(num_rows=10, microbatch_size=4, num_microbatches=3))
    '3 × up to 4 of 10'
    >>> str(Sizes(num_rows=64, microbatch_size=32, num_microbatches=2, nested={"joint": 4}))
    '2 × 32 of 64, joint 4 at a time'
    """

    num_rows: int
    microbatch_size: int
    num_microbatches: int
    unit: str = "rows"
    level: str = "plain"
    nested: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, result: StepResult | EvalResult) -> "Sizes":
        """Return the cut of the attempt that succeeded."""
        return cls(
            num_rows=result.num_samples,
            microbatch_size=result.microbatch_size,
            num_microbatches=result.num_microbatches,
            unit=result.microbatch_unit,
            level=result.level,
            nested=dict(result.nested_sizes),
        )

    def __str__(self) -> str:
        cut = describe_cut(
            self.num_rows, self.microbatch_size, self.num_microbatches, unit=self.unit
        )
        words = [cut, *(f"{name} {size} at a time" for name, size in self.nested.items())]
        return ", ".join(words if self.level == "plain" else [*words, self.level])


@dataclass(kw_only=True)
class PhaseState:
    """Counts of training or evaluation so far.

    Attributes:
        ooms: number of attempts that ran out of memory and were rolled back.
        cut: how the latest of the largest batches was cut, or None before the first batch. Smaller
            batches, such as the last of an epoch, and batches cut smaller to measure are ignored.
        metrics: latest values by name; for training, those of the latest complete epoch.
        seconds: time spent.
        nested_ooms: how often memory ran out inside nested parts, see `StepResult`.
    """

    ooms: int = 0
    cut: Sizes | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    nested_ooms: int = 0

    def count(self, result: StepResult | EvalResult) -> None:
        """Count one batch."""
        self.ooms += result.ooms
        self.nested_ooms += result.nested_ooms
        # A measured batch was cut smaller than necessary, so its size would be reported as the
        # largest that fits.
        if result.is_measuring and self.cut is not None:
            return
        if self.cut is None or result.ooms or result.num_samples >= self.cut.num_rows:
            self.cut = Sizes.of(result)


@dataclass(kw_only=True)
class LoopState:
    """Progress of training.

    Attributes:
        epoch: number of complete epochs.
        epoch_batch: number of optimization batches done in the current epoch.
        batch: number of optimization batches done.
        loader_batches: number of batches that the data loader gave for them; larger than ``batch``
            if batches are accumulated.
        samples: number of rows trained on.
        most_rows: rows of the largest optimization batch, over all devices.
        tokens: number of tokens in these rows, or None if they cannot be counted.
        data_seconds: duration of the data in these rows (of speech, for example), or None if it is
            not counted.
        skipped: number of batches without an optimizer step, because the loss or gradients were not
            finite.
        loss: loss of the latest batch, or None before the first.
        train: sizes, out-of-memory errors and metrics of training.
        eval: sizes, out-of-memory errors and metrics of evaluation.
        evaluated_at: batches done at the last evaluation, by name of the evaluation.
    """

    epoch: int = 0
    epoch_batch: int = 0
    batch: int = 0
    loader_batches: int = 0
    samples: int = 0
    most_rows: int = 0
    tokens: int | None = None
    data_seconds: float | None = None
    skipped: int = 0
    loss: float | None = None
    train: PhaseState = field(default_factory=PhaseState)
    eval: PhaseState = field(default_factory=PhaseState)
    evaluated_at: dict[str, int] = field(default_factory=dict)

    def count_rows(self, rows: int, *, loaded: int) -> None:
        """Count the rows of an optimization batch."""
        self.samples += rows
        self.loader_batches += loaded
        self.most_rows = max(self.most_rows, rows)

    def done(self, unit: Unit) -> int:
        """Return how much of training is done, in a unit.

        Raises:
            ValueError: the unit is tokens or seconds, and these were not counted.

        >>> LoopState(batch=3, samples=96).done(Unit.SAMPLES)
        96
        """
        known: Mapping[Unit, float | None] = {
            Unit.EPOCHS: self.epoch,
            Unit.BATCHES: self.batch,
            Unit.SAMPLES: self.samples,
            Unit.TOKENS: self.tokens,
            Unit.SECONDS: self.data_seconds,
        }
        amount = known[unit]
        if amount is None and self.batch:
            name = unit.name.lower()
            what, of_batch = ("tokens", "number of tokens")
            if unit is Unit.SECONDS:
                what, of_batch = ("seconds of data", "seconds")
            raise ValueError(
                f"a duration counts {what}, but those of the batches are unknown. Pass "
                f"features=[CountData({name}=…)] (count_{name} in a config) with a callable from a "
                f"batch to its {of_batch}, or count batches or samples (100ba, 3200sp)"
            )
        # Durations are compared as whole numbers, and rounding errors such as those of 0.1 + 0.2
        # seconds must not lose one.
        return math.floor((amount or 0) + _ROUNDING)


_ROUNDING = 1e-6  # error of a sum of seconds


def describe_hours(seconds: float) -> str:
    """Describe a duration of data.

    >>> describe_hours(45.0), describe_hours(5400.0)
    ('45 s', '1.5 h')
    """
    if seconds < 60:
        return f"{_average(seconds)} s"
    return f"{_average(seconds / 60)} min" if seconds < 3600 else f"{_average(seconds / 3600)} h"


class Window:
    """Growth of amounts over the latest part of a run.

    >>> window = Window(10, {"rows": 0})
    >>> [window.gained(place, {"rows": 4 * place}) for place in (5, 10, 15)]
    [{'rows': 20}, {'rows': 40}, {'rows': 40}]
    """

    def __init__(self, width: float, amounts: Mapping[str, float], *, start: float = 0) -> None:
        self._width = width
        self._marks = deque([(start, amounts)])

    def gained(self, place: float, amounts: Mapping[str, float]) -> dict[str, float]:
        """Return the growth since the start of the window, or of the run if that is later."""
        while len(self._marks) > 1 and place - self._marks[1][0] >= self._width:
            self._marks.popleft()
        self._marks.append((place, amounts))
        start = self._marks[0][1]
        return {name: amount - start[name] for name, amount in amounts.items()}


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """Size of the optimization batches: the average, and that of the largest.

    >>> state = LoopState()
    >>> for state.batch, rows in enumerate((64, 64, 16), start=1):
    ...     state.count_rows(rows, loaded=2)
    >>> print(GlobalBatch.of(state))
    64 rows; on average 24 rows per device × 1 device × 2 accumulated = 48 rows
    """

    rows_per_device: float
    num_devices: int
    accumulation: float
    most_rows: int | None = None
    tokens_per_device: float | None = None
    seconds_per_device: float | None = None

    @classmethod
    def of(cls, state: LoopState, num_devices: int = 1) -> "GlobalBatch":
        """Summarize all batches trained on so far."""
        loaded = max(state.loader_batches, 1) * num_devices
        tokens, seconds = state.tokens, state.data_seconds
        return cls(
            rows_per_device=state.samples / loaded,
            tokens_per_device=None if tokens is None else tokens / loaded,
            seconds_per_device=None if seconds is None else seconds / loaded,
            num_devices=num_devices,
            accumulation=state.loader_batches / max(state.batch, 1),
            most_rows=state.most_rows or None,
        )

    @property
    def rows(self) -> float:
        """Average rows of an optimization batch."""
        return self.rows_per_device * self.num_devices * self.accumulation

    @property
    def average(self) -> str:
        """Average rows of a device's batch × devices × accumulation.

        >>> GlobalBatch(
        ...     rows_per_device=32, num_devices=8, accumulation=2, seconds_per_device=400.0
        ... ).average
        '32 rows, 6.7 min per device × 8 devices × 2 accumulated = 512 rows, 1.8 h'
        """
        shares = self.num_devices * self.accumulation
        whole = self._amounts(shares)
        if shares == 1:
            return whole
        devices = f"{self.num_devices} device{'' if self.num_devices == 1 else 's'}"
        accumulated = f"{_average(self.accumulation)} accumulated"
        return f"{self._amounts(1.0)} per device × {devices} × {accumulated} = {whole}"

    def _amounts(self, shares: float) -> str:
        rows = _average(self.rows_per_device * shares)
        parts = [f"{rows} row{'' if rows == '1' else 's'}"]
        if self.tokens_per_device is not None:
            parts.append(f"{self.tokens_per_device * shares:,.0f} tokens")
        if self.seconds_per_device is not None:
            parts.append(describe_hours(self.seconds_per_device * shares))
        return ", ".join(parts)

    def __str__(self) -> str:
        if self.most_rows is None or math.isclose(self.rows, self.most_rows):
            return self.average
        return f"{self.most_rows:,} rows; on average {self.average}"


def _average(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")


IN_TRAINING = "train/"
IN_EVALUATION = "eval/"
NO_EVALUATION = "there is no evaluation in training: pass eval_dataloader=… and an eval_interval"


@dataclass(frozen=True, kw_only=True)
class ExpectedValues:
    """Names of values that training and its evaluations will log; None for unknown metric names.

    >>> expected = ExpectedValues(evaluations={"": ["accuracy"]}, has_one_loss=True)
    >>> expected.gives("eval/accuracy"), expected.gives("eval/acc"), expected.gives("score")
    (True, False, None)
    """

    evaluations: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    training: Collection[str] | None = ()
    has_one_loss: bool = False

    @property
    def names(self) -> list[str]:
        """The names that are known in advance."""
        found = [f"{IN_TRAINING}{each}" for each in ("loss", *(self.training or ()))]
        for name, metrics in self.evaluations.items():
            prefix = _prefix(name)
            found += [f"{prefix}{each}" for each in ("loss", *(metrics or ()))]
        return found

    def gives(self, name: str) -> bool | None:
        """Return whether a value of this name will be logged, or None if that is unknown."""
        if name.startswith(IN_TRAINING):
            # Callbacks also log under this prefix.
            return self._is_of(name.removeprefix(IN_TRAINING), self.training) or None
        if not name.startswith(IN_EVALUATION):
            return None
        answers = [
            self._is_of(name.removeprefix(_prefix(each)), metrics)
            for each, metrics in self.evaluations.items()
            if name.startswith(_prefix(each))
        ]
        return True if True in answers else None if None in answers else False

    def _is_of(self, name: str, metrics: Collection[str] | None) -> bool | None:
        if name == "loss":
            return True
        if name.startswith("loss/"):
            return False if self.has_one_loss else None
        if metrics is None:
            return None
        # A metric with several values logs each as name/index.
        return any(name == each or name.startswith(f"{each}/") for each in metrics)


def _prefix(evaluation: str) -> str:
    return f"{IN_EVALUATION}{evaluation}/" if evaluation else IN_EVALUATION


@dataclass(kw_only=True)
class Requests:
    """Values and requests of callbacks, read by the trainer."""

    max_duration: Duration
    expected: ExpectedValues = field(default_factory=ExpectedValues)
    logged: dict[str, float] = field(default_factory=dict)
    unlogged: dict[str, float] = field(default_factory=dict)
    stop_reason: str | None = None
    wants_checkpoint: bool = False

    def take(self, name: str) -> Any:
        """Return and clear the collected entries of one attribute."""
        value = getattr(self, name)
        setattr(self, name, type(value)())
        return value


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run:
    """A run as callbacks see it: read-only state, with a few requests.

    The model and the optimizer are the real objects; a callback that changes weights or options
    does so at its own risk.

    Attributes:
        state: progress of training, which the trainer itself uses.
        model: the model being trained.
        modules: the model, followed by the additional modules that take part.
        optimizer: the optimizer, or None in an evaluation outside training.
        device: the device on which the model computes.
        evaluations: names of the evaluations; a single empty name if there is only one.
        make_microbatcher: for internal use; call `microbatcher`.
        requests: for internal use.
        rank: number of this process, from 0. Callbacks run on all ranks, loggers on rank 0.
        world_size: number of processes that train the model.
    """

    state: LoopState
    model: nn.Module
    modules: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    evaluations: Sequence[str]
    make_microbatcher: Callable[..., Microbatcher]
    requests: Requests
    rank: int = 0
    world_size: int = 1

    @property
    def max_duration(self) -> Duration:
        """When training ends."""
        return self.requests.max_duration

    @property
    def values(self) -> Mapping[str, float]:
        """Latest logged value of each name."""
        return MappingProxyType(self.requests.logged)

    @property
    def expected(self) -> ExpectedValues:
        """Names of values that will be logged, as far as they are known."""
        return self.requests.expected

    @property
    def stop_reason(self) -> str | None:
        """Why training will end after this batch, or None if no callback asked for it."""
        return self.requests.stop_reason

    def microbatcher(self, **options: Any) -> Microbatcher:
        """Return a `Microbatcher` with this run's model, loss and options, for additional passes.

        With ``precision="fp16"`` its gradients are not scaled, like those at ``gradients_ready``;
        ``backward=`` can scale them.

        Args:
            options: options of `Microbatcher` that replace those of the run, such as ``forward=…``.
        """
        return self.make_microbatcher(**options)

    def log(self, values: Mapping[str, float]) -> None:
        """Send values to the loggers, at the current batch."""
        self.requests.logged.update(values)
        self.requests.unlogged.update(values)

    def show(self, *_: Any) -> NoReturn:
        """Refuse figures, which went."""
        raise TypeError(
            "loggers take no figures. Write them with the logger's own package, such as "
            "SummaryWriter(folder).add_figure(…)"
        )

    def stop(self, reason: str) -> None:
        """Request that training ends after this batch or this evaluation.

        Args:
            reason: completes the sentence "training stopped: …".
        """
        self.requests.stop_reason = self.stop_reason or reason

    def save_checkpoint(self) -> None:
        """Request a checkpoint after this batch, if the run saves checkpoints."""
        self.requests.wants_checkpoint = True


def describe_cut(
    num_rows: int, microbatch_size: int, num_microbatches: int, *, unit: str = "rows"
) -> str:
    """Describe the cut of a batch in a few words.

    >>> describe_cut(512, 128, 4), describe_cut(10, 4, 3)
    ('4 × 128 of 512', '3 × up to 4 of 10')
    >>> describe_cut(48, 2048, 5, unit="tokens")
    '5 × up to 2048 tokens of 48 rows'
    """
    if unit != "rows":
        return f"{num_microbatches} × up to {microbatch_size} {unit} of {num_rows} rows"
    up_to = "" if microbatch_size * num_microbatches == num_rows else "up to "
    return f"{num_microbatches} × {up_to}{microbatch_size} of {num_rows}"
