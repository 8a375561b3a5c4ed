"""What a training step and an evaluation give back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimization batch, trained on: its exact gradient is in ``.grad``.

    Attributes:
        loss: 0-d, detached, of the whole batch, on the device: reading it waits for the device.
        losses: the parts of the loss by name, where the forward gives several; as ``loss``.
        num_samples: rows of the batch.
        microbatch_size: rows of the largest microbatch used.
        num_microbatches: microbatches of the attempt that succeeded.
        attempts: attempts that were made; all but the last were rolled back.
        failed_sizes: rows of the largest microbatch of each attempt that ran out of memory.
        is_committed: False where the caller did not accept the loss, and all was rolled back.
        recalled_size: rows that an earlier run found, where this batch was the first to start
            from them.
    """

    loss: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    num_samples: int
    microbatch_size: int
    num_microbatches: int
    attempts: int
    failed_sizes: tuple[int, ...] = ()
    is_committed: bool = True
    recalled_size: int | None = None

    @property
    def ooms(self) -> int:
        """How many attempts ran out of memory."""
        return len(self.failed_sizes)


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """One batch, evaluated: metrics counted every row once.

    Attributes:
        loss: as in `StepResult`; None where the forward gives none.
        losses: as in `StepResult`.
        outputs: the model's outputs for all rows in order, on the device of the batch, where
            they were asked for.
        num_samples: rows of the batch.
        microbatch_size: rows of the largest microbatch used.
        num_microbatches: microbatches of the attempt that succeeded.
        attempts: attempts that were made; all but the last were rolled back.
        failed_sizes: rows of the largest microbatch of each attempt that ran out of memory.
        denominators: what the losses were divided by, by name, or one for all under ``""``; None
            for a sum. With them the losses of several batches add up exactly; see `LossMean`.
        recalled_size: as in `StepResult`.
    """

    loss: Tensor | None
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Any = None
    num_samples: int
    microbatch_size: int
    num_microbatches: int
    attempts: int
    failed_sizes: tuple[int, ...] = ()
    denominators: Mapping[str, float | Tensor | None] = field(default_factory=dict)
    recalled_size: int | None = None

    @property
    def ooms(self) -> int:
        """How many attempts ran out of memory."""
        return len(self.failed_sizes)
