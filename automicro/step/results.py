"""Results of a training step and of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

from torch import Tensor

from automicro.policy.policy import Exploration

Where: TypeAlias = bool | Literal["host", "device"]
"""Whether outputs are kept, and where: True where their batch lies."""


class Counts(TypedDict):
    """Counts of rows, slices and attempts in both results; see `StepResult`."""

    num_samples: int
    num_global_samples: int
    microbatch_size: int
    microbatch_unit: str
    num_microbatches: int
    attempts: int
    failed_sizes: tuple[int, ...]
    recalled_size: int | None
    is_measuring: bool
    grown_from: int | None
    exploration: Exploration | None
    stops: bool
    peak_bytes: int | None
    level: str
    nested_sizes: Mapping[str, int]
    nested_ooms: int


@dataclass(frozen=True, kw_only=True, repr=False)
class StepResult:
    """One optimization batch, trained on: its exact gradient is in ``.grad``.

    Attributes:
        outputs: of the forward, for all rows (of this rank) in order, detached, where they were
            asked for: what it returned beside the loss.
        carry: state for the next batch, detached, its rows in order, where the Microbatcher has a
            `Carry`.
        loss: 0-d, detached, of the whole batch (of all ranks), on the device: reading it waits for
            the device. On the host where ``accept`` was given.
        losses: the parts of the loss by name, where the forward gives several; as ``loss``. Each is
            taken for the same average as the loss, so that a number that is no mean (a maximum, a
            perplexity, a count) is not that of the whole batch; metrics are for those.
        rank_loss: the loss of this rank's rows alone, divided by what they count; ``loss`` itself
            where there is one rank.
        num_samples: rows of the batch, on several ranks of this one's.
        num_global_samples: rows of the batches of all ranks.
        microbatch_size: of the largest microbatch used, on any rank: its rows, or in another
            unit what it cost with its padding.
        microbatch_unit: what that is counted in: ``"rows"``, ``"tokens"``, …
        num_microbatches: microbatches of the attempt that succeeded, as many on every rank.
        attempts: attempts that were made; all but the last were rolled back.
        failed_sizes: rows of the largest microbatch of each attempt that ran out of memory.
        is_committed: False where the caller did not accept the loss, and all was rolled back.
        recalled_size: rows that an earlier run found, where this batch was the first to start
            from them.
        is_measuring: whether the batch was cut smaller than fits, only to measure what rows need.
        grown_from: rows that had been known to fit, where this batch was the first that fitted
            with more after memory had run out.
        exploration: how far the search for the fastest size has come; None where there is none,
            or it is over since an earlier batch.
        stops: whether any rank was asked to end the run, see `Microbatcher.wants_to_stop`.
        peak_bytes: the most that live tensors held in the attempt that succeeded, on any rank; None
            where it is not counted, or sizes are fixed.
        level: how microbatches were computed: ``"plain"``, or what saved memory, such as
            ``"recompute"``; see ``when_too_large``.
        nested_sizes: rows of the largest slice of each part with a size of its own, by its name.
        nested_ooms: how often memory ran out inside of such parts, on this rank, and their slices
            became smaller; `ooms` has none of these.
        loss_average_is: how sure it is what the loss averages over: ``"declared"`` by the caller,
            ``"read"`` off the loss or the model, ``"checked"`` on a few rows, ``"unchecked"``, or
            ``"wrong"`` where a few rows showed that it is another. Ranks other than 0 do not look.
    """

    loss: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    rank_loss: Tensor
    num_samples: int
    num_global_samples: int
    microbatch_size: int
    num_microbatches: int
    attempts: int
    failed_sizes: tuple[int, ...] = ()
    microbatch_unit: str = "rows"
    is_committed: bool = True
    recalled_size: int | None = None
    is_measuring: bool = False
    grown_from: int | None = None
    exploration: Exploration | None = None
    stops: bool = False
    peak_bytes: int | None = None
    level: str = "plain"
    nested_sizes: Mapping[str, int] = field(default_factory=dict)
    nested_ooms: int = 0
    loss_average_is: str = "unchecked"
    outputs: Any = None
    carry: Any = None

    @property
    def ooms(self) -> int:
        """How many attempts ran out of memory, and had to be smaller."""
        return len(self.failed_sizes)

    def __repr__(self) -> str:
        return _one_line(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class EvalResult:
    """One batch, evaluated: metrics counted every row once.

    Attributes:
        loss: as in `StepResult`, but of this rank's rows alone, as everything here; None where the
            forward gives none, or there is no row.
        losses: as in `StepResult`.
        outputs: the model's outputs for all rows in order, on the device of the batch, where
            they were asked for.
        num_samples: rows of the batch.
        num_global_samples: as in `StepResult`.
        microbatch_size: as in `StepResult`.
        microbatch_unit: as in `StepResult`.
        num_microbatches: microbatches of the attempt that succeeded.
        attempts: attempts that were made; all but the last were rolled back.
        failed_sizes: rows of the largest microbatch of each attempt that ran out of memory.
        denominators: what the losses were divided by, by name, or one for all under ``""``; None
            for a sum. With them the losses of several batches add up exactly; see `LossMean`.
        recalled_size: as in `StepResult`.
        is_measuring: as in `StepResult`.
        grown_from: as in `StepResult`.
        exploration: as in `StepResult`.
        stops: as in `StepResult`.
        peak_bytes: as in `StepResult`.
        level: as in `StepResult`.
        nested_sizes: as in `StepResult`.
        nested_ooms: as in `StepResult`.
        carry: as in `StepResult`.
    """

    loss: Tensor | None
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Any = None
    num_samples: int
    num_global_samples: int
    microbatch_size: int
    num_microbatches: int
    attempts: int
    failed_sizes: tuple[int, ...] = ()
    microbatch_unit: str = "rows"
    denominators: Mapping[str, float | Tensor | None] = field(default_factory=dict)
    recalled_size: int | None = None
    is_measuring: bool = False
    grown_from: int | None = None
    exploration: Exploration | None = None
    stops: bool = False
    peak_bytes: int | None = None
    level: str = "plain"
    nested_sizes: Mapping[str, int] = field(default_factory=dict)
    nested_ooms: int = 0
    carry: Any = None

    @property
    def ooms(self) -> int:
        """How many attempts ran out of memory, and had to be smaller."""
        return len(self.failed_sizes)

    def __repr__(self) -> str:
        return _one_line(self)


def _one_line(result: StepResult | EvalResult) -> str:
    """A result without its tensors but the loss, whose value is waited for."""
    loss = "None" if result.loss is None else f"{float(result.loss):.6g}"
    words = [f"loss={loss}", f"{result.num_samples} samples"]
    up_to = "" if result.microbatch_unit == "rows" else "up to "
    size = f"{result.microbatch_size} {result.microbatch_unit}"
    words.append(f"{result.num_microbatches} × {up_to}{size}")
    words += [f"{name} {size} at a time" for name, size in result.nested_sizes.items()]
    if result.level != "plain":
        words.append(result.level)
    if result.ooms:
        words.append(f"out of memory with {', '.join(map(str, result.failed_sizes))}")
    if result.nested_ooms:
        words.append(f"out of memory {result.nested_ooms} times inside of parts")
    if result.is_measuring:
        words.append("measuring")
    if isinstance(result, StepResult) and not result.is_committed:
        words.append("not committed")
    if result.outputs is not None:
        words.append("with outputs")
    return f"{type(result).__name__}({', '.join(words)})"
