"""Replay of a batch that did not fit, from a file."""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automicro.batch.layout import BatchLayout
from automicro.errors import SampleTooLargeError, text_of
from automicro.events.run import describe_cut
from automicro.features import with_features
from automicro.lengths.unit import unit_name
from automicro.memory.budget import MemoryBudget, limit_memory
from automicro.memory.device import active_budget
from automicro.memory.oom import is_out_of_memory
from automicro.memory.residents import ResidentMemory
from automicro.microbatcher import Microbatcher
from automicro.options import resolve_device
from automicro.policy.policy import Outcome, Policy, make_policy
from automicro.step.results import EvalResult, StepResult
from automicro.trainer.failed_batch import FailedBatch, load_batch
from automicro.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The result of replaying a batch that did not fit. ``str()`` of it is a few lines.

    Attributes:
        failed: the saved batch.
        fits: whether it fits now.
        rows: rows of the batch.
        microbatch_size: size at which it fits, or None if it does not.
        microbatch_unit: unit of sizes: ``"rows"``, ``"tokens"``, and so on.
        num_microbatches: number of microbatches of that size, or None if it does not fit.
        tried: sizes that ran out of memory.
        peak_bytes: peak memory of live tensors at the size that fits. If none fits, a lower bound:
            bytes in use plus bytes refused at the smallest size tried. None if not counted.
        limit_bytes: memory limit of the device, or None if unknown.
        residents: memory that is on the device at any size.
        message: message of the error, or None if the batch fits.
        level: level at which microbatches were computed, see ``when_too_large``.
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

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the rows as JSON values."""
        failed = dataclasses.replace(self.failed, batches=[])
        found = dataclasses.asdict(dataclasses.replace(self, failed=failed))
        del found["failed"]["batches"]
        return found

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
            # A peak counts only bytes that were granted, not the refused request.
            what = "peak" if self.fits else "needed at least"
            lines.append(f"{what}: {format_bytes(self.peak_bytes)}{of(self.limit_bytes)}")
        return "\n".join([*lines, f"at any size: {self.residents}"])


def replay(
    file: str | os.PathLike[str] | FailedBatch,
    model: nn.Module,
    *,
    like: Any = None,
    **options: Any,
) -> ReplayReport:
    """Run a batch that did not fit again, and report whether it fits now.

    Forward and backward run with memory reserved for the optimizer's first state, and are rolled
    back. The optimizer never steps, and parameters, gradients, buffers and random states are
    unchanged afterwards.

    Args:
        file: the file of a failed run, or the result of `load_batch`.
        model: the model, on its device.
        like: a batch of the same kind, needed if the saved batch has a custom class.
        options: options of `Microbatcher`: ``loss_fn``, ``forward``, ``optimizer``,
            ``memory_limit``, and so on.

    Raises:
        UnreadableBatchError: see `load_batch`.
        BatchError, LossError: the model does not accept the batch.
        TypeError, ValueError: invalid options; the message has the remedy.

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
    # No gradient is kept, so exactness of the split does not matter.
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
                    microbatcher.hold_reservation()  # a run would hold it at this point
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
    """Return a context with the limit, or one that only counts."""
    if limit is not None:
        return limit_memory(limit, device)
    # A plain CPU counts nothing, but a budget without a limit counts and refuses nothing.
    is_counted = device.type != "cpu" or active_budget() is not None
    return contextlib.nullcontext() if is_counted else MemoryBudget(None)


class _Noting(Policy):
    """Wrapper of a policy that keeps the outcomes."""

    def __init__(self, inner: Policy) -> None:
        self.outcomes: tuple[Outcome, ...] = ()  # a list would be reset when the caller gives up
        self.adapts, self.multiple_of = inner.adapts, inner.multiple_of
        self._inner = inner

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return self._inner.propose(num_rows, cost)

    def record(self, outcome: Outcome) -> None:
        self.outcomes += (outcome,)
        self._inner.record(outcome)
