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
        cut: how the latest of the largest batches was cut, so that neither the rest at the end of
            an epoch hides it nor a batch that was cut smaller to measure; None before the first.
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
        if result.is_measuring and self.cut is not None:
            return
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
        most_rows: of an optimization batch, over all devices.
        most_loaded: what the data loader gave for that one.
        num_smaller: optimization batches of fewer rows, such as the last of an epoch.
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
    most_rows: int = 0
    most_loaded: int = 1
    num_smaller: int = 0
    tokens: int | None = None
    skipped: int = 0
    loss: float | None = None
    train: PhaseState = field(default_factory=PhaseState)
    eval: PhaseState = field(default_factory=PhaseState)
    evaluated_at: dict[str, int] = field(default_factory=dict)

    def count_rows(self, rows: int, *, loaded: int) -> None:
        """Take note of an optimization batch that was counted.

        Args:
            rows: of it, over all devices.
            loaded: what the data loader gave for it.

        >>> state = LoopState()
        >>> for state.batch, rows in enumerate((32, 32, 8), start=1):
        ...     state.count_rows(rows, loaded=1)
        >>> state.samples, state.most_rows, state.num_smaller
        (72, 32, 1)
        """
        self.samples += rows
        self.loader_batches += loaded
        if rows > self.most_rows:
            self.num_smaller = self.batch - 1
            self.most_rows, self.most_loaded = rows, max(loaded, 1)
        elif rows < self.most_rows:
            self.num_smaller += 1

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
    """How large the optimization batches were.

    Attributes:
        rows_per_device: of what one device loads at a time, on average.
        num_devices: that share an optimization batch.
        accumulation: how many of what a device loads make up an optimization batch, on average.
        most_rows: of an optimization batch; None where only averages are known.
        most_loaded: what a device loaded for that one.
        num_batches: optimization batches in all.
        num_smaller: those of fewer rows, such as the last one of an epoch.

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

    @classmethod
    def of(cls, state: LoopState, num_devices: int = 1) -> "GlobalBatch":
        """Of all that was trained on so far."""
        return cls(
            rows_per_device=state.samples / max(state.loader_batches, 1) / num_devices,
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
