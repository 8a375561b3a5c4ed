"""Where training stands. Written by the trainer, read-only for everybody else."""

from dataclasses import dataclass, field

from automicro.duration import Unit
from automicro.results import EvalResult, StepResult
from automicro.slicing import describe_cut


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a batch was cut into microbatches.

    >>> str(Cut(num_rows=512, microbatch_size=128, num_microbatches=4))
    '4 × 128 of 512'
    >>> str(Cut(num_rows=10, microbatch_size=4, num_microbatches=3))
    '3 × up to 4 of 10'
    """

    num_rows: int
    microbatch_size: int
    num_microbatches: int

    @classmethod
    def of(cls, result: StepResult | EvalResult) -> "Cut":
        """The cut of the attempt that succeeded."""
        return cls(
            num_rows=result.num_samples,
            microbatch_size=result.microbatch_size,
            num_microbatches=result.num_microbatches,
        )

    def __str__(self) -> str:
        return describe_cut(self.num_rows, self.microbatch_size, self.num_microbatches)


@dataclass(kw_only=True)
class PhaseState:
    """What training, or evaluation, has seen so far.

    Attributes:
        ooms: attempts that ran out of memory and were rolled back.
        cut: how the latest of the largest batches was cut, so that the rest at the end of an
            epoch does not hide it; None before the first batch.
        metrics: the latest values by name; for training, of the latest complete epoch.
        seconds: time spent.
    """

    ooms: int = 0
    cut: Cut | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, result: StepResult | EvalResult) -> None:
        """Take note of one batch."""
        self.ooms += result.ooms
        if self.cut is None or result.ooms or result.num_samples >= self.cut.num_rows:
            self.cut = Cut.of(result)


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
        tokens: of these rows; None where they cannot be counted.
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
    tokens: int | None = None
    skipped: int = 0
    loss: float | None = None
    train: PhaseState = field(default_factory=PhaseState)
    eval: PhaseState = field(default_factory=PhaseState)
    evaluated_at: dict[str, int] = field(default_factory=dict)

    def done(self, unit: Unit) -> int:
        """How much of what a duration counts is done.

        Raises:
            ValueError: tokens, and those of a batch could not be counted.

        >>> LoopState(batch=3, samples=96).done(Unit.SAMPLES)
        96
        """
        match unit:
            case Unit.EPOCHS:
                return self.epoch
            case Unit.BATCHES:
                return self.batch
            case Unit.SAMPLES:
                return self.samples
            case Unit.TOKENS:
                if self.tokens is None and self.batch:
                    raise ValueError(
                        "something here counts tokens, and those of the batches are not known; "
                        "pass count_tokens=…, a callable from a batch to its number of tokens, or "
                        "count batches or samples instead (100ba, 3200sp)"
                    )
                return self.tokens or 0


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """How large the optimization batches were, on average.

    Attributes:
        rows_per_device: of what one device loads at a time.
        num_devices: that share an optimization batch.
        accumulation: how many of what a device loads make up an optimization batch.

    >>> state = LoopState(batch=2, loader_batches=3, samples=96)
    >>> str(GlobalBatch.of(state))
    '48 = 32 rows per device × 1 device × 1.5 accumulated'
    """

    rows_per_device: float
    num_devices: int
    accumulation: float

    @classmethod
    def of(cls, state: LoopState, num_devices: int = 1) -> "GlobalBatch":
        """The averages over all that was trained on so far."""
        return cls(
            rows_per_device=state.samples / max(state.loader_batches, 1) / num_devices,
            num_devices=num_devices,
            accumulation=state.loader_batches / max(state.batch, 1),
        )

    @property
    def rows(self) -> float:
        """Of an optimization batch."""
        return self.rows_per_device * self.num_devices * self.accumulation

    @property
    def brief(self) -> str:
        """For a line that has much to say: rows, devices, accumulation.

        >>> GlobalBatch(rows_per_device=32, num_devices=1, accumulation=2).brief
        '64 = 32 × 1 × 2'
        """
        factors = (self.rows_per_device, self.num_devices, self.accumulation)
        return f"{_average(self.rows)} = {' × '.join(map(_average, factors))}"

    def __str__(self) -> str:
        devices = f"{self.num_devices} device{'' if self.num_devices == 1 else 's'}"
        return (
            f"{_average(self.rows)} = {_average(self.rows_per_device)} rows per device × "
            f"{devices} × {_average(self.accumulation)} accumulated"
        )


def _average(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")
