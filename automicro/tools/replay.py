"""A batch that did not fit, kept in a file, and run once more."""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automicro.batch.layout import BatchLayout, describe_cut
from automicro.errors import SampleTooLargeError, text_of
from automicro.features import with_features
from automicro.lengths.unit import unit_name
from automicro.memory.budget import MemoryBudget, active_budget
from automicro.memory.device import limit_memory
from automicro.memory.oom import is_out_of_memory
from automicro.memory.residents import ResidentMemory
from automicro.microbatcher import Microbatcher
from automicro.options import resolve_device
from automicro.policy.choose import make_policy
from automicro.policy.policy import Outcome, Policy
from automicro.step.results import EvalResult, StepResult
from automicro.trainer.failed_batch import FailedBatch, load_batch
from automicro.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The result of running a batch that did not fit again. ``str()`` of it is a few lines.

    Attributes:
        failed: the batch, as it was kept.
        fits: whether it went through.
        rows: of it.
        microbatch_size: at which it fits; None where it does not.
        microbatch_unit: what sizes are counted in: ``"rows"``, ``"tokens"``, ….
        num_microbatches: of that size; None where it does not fit.
        tried: sizes that ran out of memory.
        peak_bytes: the most that live tensors held, at the size that fits; of a batch that does not
            fit, what they held at the smallest size that was tried and what was refused to it, so
            that it needs at least that. None if not counted.
        limit_bytes: of the device; None if unknown.
        residents: what lies on the device at any size.
        message: of the error; None where it fits.
        level: how microbatches were computed, see ``when_too_large``.
    """

    failed: FailedBatch
    fits: bool
    rows: int
    microbatch_size: int | None
    microbatch_unit: str
    num_microbatches: int | None
    tried: tuple[int, ...]
    peak_bytes: int | None
    limit_bytes: int | None
    residents: ResidentMemory
    message: str | None
    level: str = "plain"

    @property
    def activation_bytes(self) -> int | None:
        """Bytes that the rows of a microbatch take, beside those held at any size.

        Where it does not fit, at least that.
        """
        return None if self.peak_bytes is None else max(0, self._needed - self.residents.total)

    @property
    def _needed(self) -> int:
        """The bytes needed; what does not fit needs more than the limit."""
        return max(self.peak_bytes or 0, 0 if self.fits else self.limit_bytes or 0)

    @property
    def dominates(self) -> str | None:
        """The largest holder of memory, in words; None if not counted."""
        if self.activation_bytes is None:
            return None
        parts = {"activations of its rows": self.activation_bytes, **self.residents.parts}
        name = max(parts, key=lambda each: parts[each])
        share = f"{parts[name] / max(1, self._needed):.0%}"
        of = "the peak" if self.fits else "what it needed"
        return f"the {name}, {format_bytes(parts[name])} ({share} of {of})"

    def to_dict(self) -> dict[str, Any]:
        """All of it as values that JSON can hold, without the rows."""
        failed = dataclasses.replace(self.failed, batches=[])
        found = dataclasses.asdict(dataclasses.replace(self, failed=failed))
        del found["failed"]["batches"]
        return found | {"activation_bytes": self.activation_bytes, "dominates": self.dominates}

    def __str__(self) -> str:
        def of(num_bytes: int | None) -> str:
            return "" if num_bytes is None else f" of {format_bytes(num_bytes)}"

        failed, unit = self.failed, self.microbatch_unit
        where = failed.where or "somewhere"
        lines = [f"it failed {where}, on {failed.device}{of(failed.limit_bytes)}"]
        last = self.tried[-1] if self.tried else self.rows
        noun = unit.removesuffix("s") if last == 1 else unit
        if self.microbatch_size is not None and self.num_microbatches is not None:
            cut = describe_cut(self.rows, self.microbatch_size, self.num_microbatches, unit=unit)
            level = f", {self.level}" * (self.level != "plain")
            lines.append(f"fits now: {cut}{' rows' * (unit == 'rows')}{level}")
        else:
            rows = f" of {self.rows}" * (unit == "rows")
            lines.append(f"does not fit: not even {last} {noun}{rows}")
        if self.tried:
            lines.append(f"out of memory with: {', '.join(map(str, self.tried))} {noun}")
        if self.peak_bytes is not None:
            # A peak is what was held; what was refused was not.
            what = "peak" if self.fits else "needed at least"
            lines.append(f"{what}: {format_bytes(self.peak_bytes)}{of(self.limit_bytes)}")
        lines.append(f"at any size: {self.residents}")
        if self.dominates is not None:
            lines.append(f"most of it: {self.dominates}")
        return "\n".join(lines)


def replay(
    file: str | os.PathLike[str] | FailedBatch,
    model: nn.Module,
    *,
    like: Any = None,
    **options: Any,
) -> ReplayReport:
    """Run a batch that did not fit once more, and say whether it fits now.

    Forward and backward, with the optimizer's first state reserved, are rolled back: parameters,
    gradients, buffers and random numbers are as before afterwards, and the optimizer never steps.

    Args:
        file: that a run has left, or what `load_batch` read from it.
        model: the model, where it computes.
        like: a batch of the same kind, where the file's is of a class of your own.
        options: of `Microbatcher`: ``loss_fn``, ``forward``, ``optimizer``, ``memory_limit``, ….

    Raises:
        UnreadableBatchError: see `load_batch`.
        BatchError, LossError: the model does not take the batch.
        TypeError, ValueError: options that make no sense, each with its remedy.

    Example:
        >>> failed = FailedBatch(
        ...     batches=[(torch.randn(8, 4), torch.randint(3, (8,)))],
        ...     phase="train",
        ...     message="",
        ...     where="in training",
        ...     device="cpu",
        ...     limit_bytes=None,
        ... )
        >>> report = replay(failed, nn.Linear(4, 3), loss_fn=nn.CrossEntropyLoss())
        >>> report.fits, report.microbatch_size
        (True, 8)
    """
    failed = file if isinstance(file, FailedBatch) else load_batch(file, like=like)
    is_training = failed.phase == "train"
    name = "microbatch_size" if is_training else "eval_microbatch_size"
    unit = unit_name(options.get("microbatch_unit", "rows"))
    policy = _Noting(make_policy(options.pop(name, "auto"), name=name, unit=unit))
    limit = options.pop("memory_limit", None)
    # No gradient is kept, so it does not matter whether splitting is exact.
    options = {"batchnorm": "ignore", "probe": False, **options, name: policy}
    microbatcher = Microbatcher(model, **with_features(options))
    result: StepResult | EvalResult | None = None
    message: str | None = None
    with _limited(limit, resolve_device(options.get("device"), model)):
        try:
            with microbatcher.rehearsing():
                if is_training:
                    result = microbatcher.accumulate(failed.batches)
                else:
                    microbatcher.hold_reservation()  # in a run, it lies there by then
                    result = microbatcher.evaluate(failed.batches[0])
        except Exception as error:
            if not (isinstance(error, SampleTooLargeError) or is_out_of_memory(error)):
                raise
            message = text_of(error)
        finally:
            microbatcher.release_reservation()
        residents = microbatcher.residents(training=is_training)
    too_large = [each.microbatch_size for each in policy.outcomes if not each.fits]
    last = policy.outcomes[-1] if policy.outcomes else None
    return ReplayReport(
        failed=failed,
        fits=result is not None,
        rows=sum(map(BatchLayout(options.get("batch_layout", 0)).num_rows, failed.batches)),
        microbatch_size=None if result is None else result.microbatch_size,
        microbatch_unit=unit,
        num_microbatches=None if result is None else result.num_microbatches,
        tried=tuple(dict.fromkeys(too_large)),
        peak_bytes=None if last is None else last.peak_bytes,
        limit_bytes=residents.limit or (None if last is None else last.capacity_bytes),
        residents=residents,
        message=message,
        level="plain" if result is None else result.level,
    )


def _limited(
    limit: str | int | float | None, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """The limit, entered; where there is none, whatever counts."""
    if limit is not None:
        return limit_memory(limit, device)
    # A plain CPU counts nothing; a budget without a limit counts and refuses nothing.
    is_counted = device.type != "cpu" or active_budget() is not None
    return contextlib.nullcontext() if is_counted else MemoryBudget(None)


class _Noting(Policy):
    """Another policy, with what became of its sizes."""

    def __init__(self, inner: Policy) -> None:
        self.outcomes: tuple[Outcome, ...] = ()  # no list: giving up would put that back
        self.adapts, self.multiple_of = inner.adapts, inner.multiple_of
        self._inner = inner

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return self._inner.propose(num_rows, cost)

    def record(self, outcome: Outcome) -> None:
        self.outcomes += (outcome,)
        self._inner.record(outcome)
