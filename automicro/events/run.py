"""The run as a callback sees it, and the requests that it may make."""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from automicro.batch.layout import describe_cut
from automicro.microbatcher import Microbatcher
from automicro.step.results import EvalResult, StepResult
from automicro.units import Duration, Unit


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How a batch was cut into microbatches.

    >>> str(Sizes(num_rows=512, microbatch_size=128, num_microbatches=4))
    '4 × 128 of 512'
    >>> str(Sizes(num_rows=10, microbatch_size=4, num_microbatches=3))
    '3 × up to 4 of 10'
    >>> str(Sizes(num_rows=64, microbatch_size=32, num_microbatches=2, nested={"joint": 4}))
    '2 × 32 of 64, joint 4 at a time'

    Attributes:
        num_rows: of the batch.
        microbatch_size: of the largest microbatch.
        num_microbatches: of the batch.
        unit: of sizes.
        level: how microbatches were computed.
        nested: rows of the largest slice of parts with a size of their own, by their names.
    """

    num_rows: int
    microbatch_size: int
    num_microbatches: int
    unit: str = "rows"
    level: str = "plain"
    nested: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, result: StepResult | EvalResult) -> "Sizes":
        """The cut of the attempt that succeeded."""
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
    """Counts of training, or evaluation, so far.

    Attributes:
        ooms: attempts that ran out of memory and were rolled back.
        nested_ooms: how often memory ran out inside of parts with sizes of their own, see
            `StepResult`.
        cut: how the latest of the largest batches was cut, so that neither the rest at the end of
            an epoch hides it nor a batch that was cut smaller to measure; None before the first.
        metrics: the latest values by name; for training, of the latest complete epoch.
        seconds: time spent.
    """

    ooms: int = 0
    cut: Sizes | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    nested_ooms: int = 0

    def count(self, result: StepResult | EvalResult) -> None:
        """Take note of one batch."""
        self.ooms += result.ooms
        self.nested_ooms += result.nested_ooms
        # Such a batch was cut smaller than necessary, and would be told as the size that fits.
        if result.is_measuring and self.cut is not None:
            return
        if self.cut is None or result.ooms or result.num_samples >= self.cut.num_rows:
            self.cut = Sizes.of(result)


@dataclass(kw_only=True)
class LoopState:
    """Where training stands.

    Attributes:
        epoch: complete epochs.
        epoch_batch: optimization batches done in the epoch that is running.
        batch: optimization batches done.
        loader_batches: what the data loader gave for them: more than one for each where batches
            are accumulated.
        samples: rows trained on.
        most_rows: of an optimization batch, over all devices.
        most_loaded: what the data loader gave for that one.
        num_smaller: optimization batches of fewer rows, such as the last of an epoch.
        tokens: of these rows; None where they cannot be counted.
        data_seconds: of these rows, such as those of speech; None if they are not counted.
        skipped: batches after which the optimizer did not step, because of a loss or gradients
            that were not finite.
        loss: of the latest batch; None before the first.
        train: sizes, out-of-memory errors and metrics of training.
        eval: the same of evaluation.
        evaluated_at: batches done at the last evaluation, by its name.
    """

    epoch: int = 0
    epoch_batch: int = 0
    batch: int = 0
    loader_batches: int = 0
    samples: int = 0
    most_rows: int = 0
    most_loaded: int = 1
    num_smaller: int = 0
    tokens: int | None = None
    data_seconds: float | None = None
    skipped: int = 0
    loss: float | None = None
    train: PhaseState = field(default_factory=PhaseState)
    eval: PhaseState = field(default_factory=PhaseState)
    evaluated_at: dict[str, int] = field(default_factory=dict)

    def count_rows(self, rows: int, *, loaded: int) -> None:
        """Take note of an optimization batch that was counted.

        >>> state = LoopState()
        >>> for state.batch, rows in enumerate((32, 32, 8), start=1):
        ...     state.count_rows(rows, loaded=1)
        >>> state.samples, state.most_rows, state.num_smaller
        (72, 32, 1)
        """
        self.samples += rows
        self.loader_batches += loaded
        if rows > self.most_rows:
            # All batches before were smaller than this one.
            self.num_smaller = self.batch - 1
            self.most_rows, self.most_loaded = rows, max(loaded, 1)
        elif rows < self.most_rows:
            self.num_smaller += 1

    def done(self, unit: Unit) -> int:
        """How much of what a duration counts is done.

        Raises:
            ValueError: tokens or seconds, and those of a batch could not be counted.

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
                f"something here counts {what}, and those of the batches are not known; pass "
                f"features=[CountData({name}=…)] (count_{name} in a config) with a callable from a "
                f"batch to its {of_batch}, or count batches or samples instead (100ba, 3200sp)"
            )
        # Durations are compared in whole numbers, and 0.1 + 0.2 seconds must not miss one.
        return math.floor((amount or 0) + _ROUNDING)


_ROUNDING = 1e-6  # of sums of seconds


def describe_hours(seconds: float) -> str:
    """An amount of data that is counted in seconds.

    >>> describe_hours(45.0), describe_hours(5400.0)
    ('45 s', '1.5 h')
    """
    if seconds < 60:
        return f"{_average(seconds)} s"
    return f"{_average(seconds / 60)} min" if seconds < 3600 else f"{_average(seconds / 3600)} h"


class Window:
    """How much amounts have grown over the latest stretch of a run.

    >>> window = Window(10, {"rows": 0})
    >>> [window.gained(place, {"rows": 4 * place}) for place in (5, 10, 15)]
    [{'rows': 20}, {'rows': 40}, {'rows': 40}]
    """

    def __init__(self, width: float, amounts: Mapping[str, float], *, start: float = 0) -> None:
        self._width = width
        self._marks = deque([(start, amounts)])

    def gained(self, place: float, amounts: Mapping[str, float]) -> dict[str, float]:
        """The growth since the window's beginning, or since the start where that is later."""
        while len(self._marks) > 1 and place - self._marks[1][0] >= self._width:
            self._marks.popleft()
        self._marks.append((place, amounts))
        start = self._marks[0][1]
        return {name: amount - start[name] for name, amount in amounts.items()}


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """How large the optimization batches were.

    Attributes:
        rows_per_device: of what one device loads at a time, on average.
        num_devices: that share an optimization batch.
        accumulation: how many of what a device loads make up an optimization batch, on average.
        most_rows: of an optimization batch; None where only averages are known.
        most_loaded: what a device loaded for that one.
        num_batches: optimization batches in all.
        num_smaller: those of fewer rows, such as the last one of an epoch.
        tokens_per_device: as ``rows_per_device``; None if unknown.
        seconds_per_device: the same of data, such as speech.

    >>> state = LoopState()
    >>> for state.batch, rows in enumerate((64, 64, 16), start=1):
    ...     state.count_rows(rows, loaded=2)
    >>> str(GlobalBatch.of(state))
    '64 = 32 rows per device × 1 device × 2 accumulated; 1 of 3 had fewer, 48 on average'
    """

    rows_per_device: float
    num_devices: int
    accumulation: float
    most_rows: int | None = None
    most_loaded: int = 1
    num_batches: int = 0
    num_smaller: int = 0
    tokens_per_device: float | None = None
    seconds_per_device: float | None = None

    @classmethod
    def of(cls, state: LoopState, num_devices: int = 1) -> "GlobalBatch":
        """Of all that was trained on so far."""
        loaded = max(state.loader_batches, 1) * num_devices
        tokens, seconds = state.tokens, state.data_seconds
        return cls(
            rows_per_device=state.samples / loaded,
            tokens_per_device=None if tokens is None else tokens / loaded,
            seconds_per_device=None if seconds is None else seconds / loaded,
            num_devices=num_devices,
            accumulation=state.loader_batches / max(state.batch, 1),
            most_rows=state.most_rows or None,
            most_loaded=state.most_loaded,
            num_batches=state.batch,
            num_smaller=state.num_smaller,
        )

    @property
    def rows(self) -> float:
        """Of an optimization batch, on average."""
        return self.rows_per_device * self.num_devices * self.accumulation

    @property
    def average(self) -> str:
        """Rows of a device's batch × devices × accumulation, on average.

        >>> GlobalBatch(
        ...     rows_per_device=32, num_devices=8, accumulation=2, seconds_per_device=400.0
        ... ).average
        '32 rows, 6.7 min per device × 8 devices × 2 accumulated = 512 rows, 1.8 h'
        """
        shares = self.num_devices * self.accumulation
        if shares == 1:
            return self._amounts(1.0)
        devices = f"{self.num_devices} device{'' if self.num_devices == 1 else 's'}"
        accumulated = f"{_average(self.accumulation)} accumulated"
        whole = self._amounts(shares)
        return f"{self._amounts(1.0)} per device × {devices} × {accumulated} = {whole}"

    def _amounts(self, shares: float) -> str:
        rows = _average(self.rows_per_device * shares)
        parts = [f"{rows} row{'' if rows == '1' else 's'}"]
        if self.tokens_per_device is not None:
            parts.append(f"{self.tokens_per_device * shares:,.0f} tokens")
        if self.seconds_per_device is not None:
            parts.append(describe_hours(self.seconds_per_device * shares))
        return ", ".join(parts)

    @property
    def brief(self) -> str:
        """For a line that has much to say: rows, devices, accumulation.

        >>> GlobalBatch(rows_per_device=64, num_devices=1, accumulation=1, most_rows=64).brief
        '64'
        >>> GlobalBatch(
        ...     rows_per_device=32, num_devices=2, accumulation=2, most_rows=128, most_loaded=2
        ... ).brief
        '128 = 32 × 2 × 2'
        """
        if self.most_rows is None:
            return f"{_average(self.rows)} on average"
        factors = self._factors()
        if factors is None:
            return f"{self.most_rows:,}"
        return f"{self.most_rows:,} = {' × '.join(f'{each:,}' for each in factors)}"

    def _factors(self) -> tuple[int, int, int] | None:
        """Rows, devices and accumulation of the largest; None where they say nothing."""
        assert self.most_rows is not None
        shares = self.num_devices * self.most_loaded
        # Ranks may have had unequal parts of it, and a product would then be a lie.
        if shares == 1 or self.most_rows % shares:
            return None
        return self.most_rows // shares, self.num_devices, self.most_loaded

    def __str__(self) -> str:
        if self.most_rows is None:
            return f"{_average(self.rows)} on average"
        devices = f"{self.num_devices} device{'' if self.num_devices == 1 else 's'}"
        factors = self._factors()
        if factors is not None:
            text = f"{self.most_rows:,} = {factors[0]:,} rows per device × {devices} × "
            text += f"{factors[2]} accumulated"
        else:
            text = f"{self.most_rows:,} row{'' if self.most_rows == 1 else 's'}"
            if self.num_devices > 1:
                text += f" on {devices}"
            if self.most_loaded > 1:
                text += f", {self.most_loaded} batches accumulated"
        if self.num_smaller:
            text += f"; {self.num_smaller:,} of {self.num_batches:,} had fewer, "
            text += f"{_average(self.rows)} on average"
        return text


def _average(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")


IN_TRAINING = "train/"
IN_EVALUATION = "eval/"
NO_EVALUATION = "there is no evaluation in training: pass eval_dataloader=… and an eval_interval"


@dataclass(frozen=True, kw_only=True)
class ExpectedValues:
    """The names of values that training and its evaluations will log.

    Attributes:
        evaluations: the metrics of each evaluation that happens in training, by its name, an empty
            one where there is only one; None for metrics whose names come with their values.
        training: the metrics of training; None as above.
        has_one_loss: whether losses of several names are out of the question.

    >>> expected = ExpectedValues(evaluations={"": ["accuracy"]}, has_one_loss=True)
    >>> expected.gives("eval/accuracy"), expected.gives("eval/acc"), expected.gives("score")
    (True, False, None)
    """

    evaluations: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    training: Collection[str] | None = ()
    has_one_loss: bool = False

    @property
    def names(self) -> list[str]:
        """The names that are known."""
        found = [f"{IN_TRAINING}{each}" for each in ("loss", *(self.training or ()))]
        for name, metrics in self.evaluations.items():
            prefix = _prefix(name)
            found += [f"{prefix}{each}" for each in ("loss", *(metrics or ()))]
        return found

    def gives(self, name: str) -> bool | None:
        """Whether there will be a value of a name: None while unknown."""
        if name.startswith(IN_TRAINING):
            # Callbacks log there, too.
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
        # A metric of several values gives each as name/index.
        return any(name == each or name.startswith(f"{each}/") for each in metrics)


def _prefix(evaluation: str) -> str:
    return f"{IN_EVALUATION}{evaluation}/" if evaluation else IN_EVALUATION


@dataclass(kw_only=True)
class Requests:
    """Values and requests of callbacks; the trainer takes them.

    Attributes:
        max_duration: when training ends.
        expected: the names of values that will be logged, as far as they are known.
        logged: the latest of every value, by name.
        unlogged: values that loggers have not got yet.
        unshown: pictures that loggers have not got yet.
        stop_reason: why training ends after this batch; None while it was not asked for.
        wants_checkpoint: whether one was asked for.
    """

    max_duration: Duration
    expected: ExpectedValues = field(default_factory=ExpectedValues)
    logged: dict[str, float] = field(default_factory=dict)
    unlogged: dict[str, float] = field(default_factory=dict)
    unshown: dict[str, Any] = field(default_factory=dict)
    stop_reason: str | None = None
    wants_checkpoint: bool = False

    def take(self, name: str) -> Any:
        """The entries of one of these since it was last taken."""
        value = getattr(self, name)
        setattr(self, name, type(value)())
        return value


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run:
    """A run as callbacks see it: to be read, with a few requests.

    Models and optimizers are the real ones, and changing their weights or options is a callback's
    own responsibility.

    Attributes:
        state: where training stands; training goes by it.
        model: the model that is trained.
        modules: the model, then further modules that take part.
        optimizer: what steps; None in an evaluation outside of training.
        device: where the model computes.
        rank: this process's number, from 0. Callbacks run on all ranks, loggers on rank 0.
        world_size: how many processes train the model.
        evaluations: the names of what is evaluated on; an empty one where there is only one.
        make_microbatcher: for the trainer.
        requests: for the trainer.
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
        """The latest of every value that was logged, by name."""
        return MappingProxyType(self.requests.logged)

    @property
    def expected(self) -> ExpectedValues:
        """The names of values that will be logged, as far as they are known."""
        return self.requests.expected

    @property
    def stop_reason(self) -> str | None:
        """Why training ends after this batch; None while it was not asked for."""
        return self.requests.stop_reason

    def microbatcher(self, **options: Any) -> Microbatcher:
        """A `Microbatcher` of this run's model, loss and options, for passes of one's own.

        With ``precision="fp16"`` its gradients are not scaled, like those at ``gradients_ready``;
        ``backward=`` may scale them.

        Args:
            options: of `Microbatcher`, in place of the run's: ``forward=…``, say.
        """
        return self.make_microbatcher(**options)

    def log(self, values: Mapping[str, float]) -> None:
        """Hand values to the loggers, with the batch that is running."""
        self.requests.logged.update(values)
        self.requests.unlogged.update(values)

    def show(self, name: str, picture: Any) -> None:
        """Hand a picture to the loggers that show any, with the batch that is running.

        Args:
            name: under which it stands.
            picture: a figure of matplotlib, such as those of `automicro.tools.pictures`.
        """
        self.requests.unshown[name] = picture

    def stop(self, reason: str) -> None:
        """Ask to end training after this batch, or after this evaluation.

        Args:
            reason: in words that complete "training stopped: …".
        """
        self.requests.stop_reason = self.stop_reason or reason

    def save_checkpoint(self) -> None:
        """Ask for a checkpoint after this batch, where the run makes any."""
        self.requests.wants_checkpoint = True
