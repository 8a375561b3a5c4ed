"""Where training stands. Written by the trainer, read-only for everybody else."""

from dataclasses import dataclass, field

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
        epoch_batch: batches done in the epoch that is running.
        batch: batches done, which is optimizer steps taken.
        samples: rows trained on.
        loss: of the latest batch; None before the first.
        train: sizes, out-of-memory errors and metrics of training.
        eval: the same of evaluation.
    """

    epoch: int = 0
    epoch_batch: int = 0
    batch: int = 0
    samples: int = 0
    loss: float | None = None
    train: PhaseState = field(default_factory=PhaseState)
    eval: PhaseState = field(default_factory=PhaseState)
