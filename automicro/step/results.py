"""Results of a training step and of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from automicro.policy.policy import Exploration

Where: TypeAlias = bool | Literal["host", "device"]
"""Whether outputs are kept, and where: True where their batch lies."""


@dataclass(frozen=True, kw_only=True, repr=False)
class _Result:
    """The fields of both results. `StepResult` says what they are."""

    loss: Tensor | None
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    num_samples: int
    num_global_samples: int
    microbatch_size: int
    num_microbatches: int
    attempts: int
    failed_sizes: tuple[int, ...] = ()
    microbatch_unit: str = "rows"
    recalled_size: int | None = None
    is_measuring: bool = False
    grown_from: int | None = None
    exploration: Exploration | None = None
    stops: bool = False
    peak_bytes: int | None = None
    level: str = "plain"
    nested_sizes: Mapping[str, int] = field(default_factory=dict)
    nested_ooms: int = 0
    outputs: Any = None
    carry: Any = None

    @property
    def ooms(self) -> int:
        """How many attempts ran out of memory, and had to be smaller."""
        return len(self.failed_sizes)

    def __repr__(self) -> str:
        """In one line without tensors but the loss, whose value is waited for."""
        loss = "None" if self.loss is None else f"{float(self.loss):.6g}"
        words = [f"loss={loss}", f"{self.num_samples} samples"]
        up_to = "" if self.microbatch_unit == "rows" else "up to "
        size = f"{self.microbatch_size} {self.microbatch_unit}"
        words.append(f"{self.num_microbatches} × {up_to}{size}")
        words += [f"{name} {size} at a time" for name, size in self.nested_sizes.items()]
        if self.level != "plain":
            words.append(self.level)
        if self.ooms:
            words.append(f"out of memory with {', '.join(map(str, self.failed_sizes))}")
        if self.nested_ooms:
            words.append(f"out of memory {self.nested_ooms} times inside of parts")
        if self.is_measuring:
            words.append("measuring")
        if isinstance(self, StepResult) and not self.is_committed:
            words.append("not committed")
        if self.outputs is not None:
            words.append("with outputs")
        return f"{type(self).__name__}({', '.join(words)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class StepResult(_Result):
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
    rank_loss: Tensor
    is_committed: bool = True
    loss_average_is: str = "unchecked"


@dataclass(frozen=True, kw_only=True, repr=False)
class EvalResult(_Result):
    """One batch, evaluated: metrics counted every row once.

    Every other attribute is as in `StepResult`, of this rank's rows alone.

    Attributes:
        loss: None where the forward gives none, or there is no row.
        denominators: what the losses were divided by, by name, or one for all under ``""``; None
            for a sum. With them the losses of several batches add up exactly; see `LossMean`.
    """

    denominators: Mapping[str, float | Tensor | None] = field(default_factory=dict)
