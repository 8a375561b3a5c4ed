"""Results of a training step and of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from automicro.policy.policy import Exploration

Where: TypeAlias = bool | Literal["host", "device"]
"""Whether outputs are kept, and where: True keeps them on the device of their batch."""


# Not frozen, which would make each assignment of a field a call, and so take longer than a plan.
@dataclass(kw_only=True, repr=False)
class _Result:
    """The fields that both results share, documented in `StepResult`."""

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
        """How many attempts ran out of memory and were repeated with smaller slices."""
        return len(self.failed_sizes)

    def __repr__(self) -> str:
        """Format it in one line with no tensor except the loss, which waits for the device."""
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
            words.append(f"out of memory {self.nested_ooms} times inside parts")
        if self.is_measuring:
            words.append("measuring")
        if isinstance(self, StepResult) and not self.is_committed:
            words.append("not committed")
        if self.outputs is not None:
            words.append("with outputs")
        return f"{type(self).__name__}({', '.join(words)})"


@dataclass(kw_only=True, repr=False)
class StepResult(_Result):
    """The result of training on one optimization batch; its exact gradient is in ``.grad``.

    Attributes:
        outputs: everything that the forward returned except the loss, for all rows (of this rank)
            in order, detached; None if it was not requested.
        carry: state for the next batch, detached, its rows in order, if the Microbatcher has a
            `Carry`.
        loss: 0-d, detached, of the whole batch (of all ranks), on the device: reading it waits for
            the device. On the host if ``accept`` was given.
        losses: the parts of the loss by name, if the forward returns several; as ``loss``. Each is
            averaged like the loss, so a number that is not a mean (a maximum, a perplexity, a
            count) is not that of the whole batch; use a metric for it.
        rank_loss: the mean loss over this rank's own rows (equal to ``loss`` on a single rank).
        num_samples: rows of the batch (of this rank).
        num_global_samples: rows of the batches of all ranks.
        microbatch_size: size of the largest microbatch on any rank: its rows, or in another unit
            its cost including padding.
        microbatch_unit: the unit of that size: ``"rows"``, ``"tokens"``, …
        num_microbatches: microbatches of the attempt that succeeded, equal on every rank.
        attempts: number of attempts; all but the last were rolled back.
        failed_sizes: rows of the largest microbatch of each attempt that ran out of memory.
        is_committed: False if the caller did not accept the loss and the step was rolled back.
        recalled_size: rows that an earlier run found, if this batch was the first to start from
            them.
        is_measuring: whether the batch was cut smaller than necessary, only to measure the memory
            of its rows.
        grown_from: the previous largest size in rows, if this batch was the first to fit with more
            after memory had run out.
        exploration: progress of the search for the fastest size; None if there is no search, or it
            ended in an earlier batch.
        stops: whether any rank asked for the end of the run, see `Microbatcher.wants_to_stop`.
        peak_bytes: the most bytes that live tensors held in the attempt that succeeded, on any
            rank; None if they are not counted, or sizes are fixed.
        level: how microbatches were computed: ``"plain"``, or the memory saver in use, such as
            ``"recompute"``; see ``when_too_large``.
        nested_sizes: rows of the largest slice of each part with a size of its own, by its name.
        nested_ooms: how often memory ran out inside these parts on this rank, so that their slices
            became smaller; not included in `ooms`.
        loss_average_is: how reliably the average of the loss is known: ``"declared"`` by the
            caller, ``"read"`` from the loss or the model, ``"checked"`` on a few rows,
            ``"unchecked"``, or ``"wrong"`` if a few rows showed that it is another. Only rank 0
            checks.
    """

    loss: Tensor
    rank_loss: Tensor
    is_committed: bool = True
    loss_average_is: str = "unchecked"


@dataclass(kw_only=True, repr=False)
class EvalResult(_Result):
    """The result of evaluating one batch, in which metrics counted every row once.

    All other attributes are as in `StepResult`, but cover only the rows of this rank.

    Attributes:
        loss: None if the forward returns none, or there is no row.
        denominators: the divisors of the losses by name, or one for all under ``""``; None for a
            sum. With them the losses of several batches add up exactly; see `LossMean`.
    """

    denominators: Mapping[str, float | Tensor | None] = field(default_factory=dict)
