"""A batch that did not fit, kept in a file, and run once more."""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automicro.batch.layout import BatchLayout, describe_cut
from automicro.errors import (
    SampleTooLargeError,
    text_of,
)
from automicro.memory.budget import MemoryBudget, active_budget
from automicro.memory.device import limit_memory
from automicro.memory.oom import is_out_of_memory
from automicro.memory.residents import ResidentMemory, measure_residents
from automicro.microbatcher import Microbatcher
from automicro.optimizer.reservation import predict_step_memory
from automicro.options import innermost_optimizer, resolve_device
from automicro.policy.choose import make_policy
from automicro.policy.policy import Outcome, Policy
from automicro.step.results import EvalResult, StepResult
from automicro.step.unit import ROWS, unit_name
from automicro.trainer.failed_batch import FailedBatch, load_batch
from automicro.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """What became of a batch that did not fit, run once more. ``str()`` of it is a few lines.

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
            that it needs at least that. None where nobody counts.
        limit_bytes: of the device; None where nobody knows.
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
        """What the rows of a microbatch take, beside what lies there at any size.

        Where it does not fit, at least that.
        """
        if self.peak_bytes is None:
            return None
        return max(0, self._peak - self.residents.total)

    @property
    def _peak(self) -> int:
        """What it takes; what does not fit needs more than the limit."""
        return max(self.peak_bytes or 0, 0 if self.fits else self.limit_bytes or 0)

    @property
    def dominates(self) -> str | None:
        """What takes most of the memory, in words; None where nobody counts."""
        if self.peak_bytes is None or self.activation_bytes is None:
            return None
        parts = {
            "the activations of its rows": self.activation_bytes,
            "the parameters": self.residents.parameters,
            "the gradients": self.residents.gradients,
            "the optimizer's state": self.residents.optimizer_state,
            "the buffers": self.residents.buffers,
            "what all rows share": self.residents.shared_inputs,
        }
        name = max(parts, key=lambda each: parts[each])
        share = parts[name] / max(1, self._peak)
        of = "the peak" if self.fits else "what it needed"
        return f"{name}, {format_bytes(parts[name])} ({share:.0%} of {of})"

    def _units(self, number: int) -> str:
        return self.microbatch_unit.removesuffix("s") if number == 1 else self.microbatch_unit

    def to_dict(self) -> dict[str, Any]:
        """All of it as values that JSON can hold, without the rows."""
        found = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in ("failed", "residents")
        }
        failed = dataclasses.asdict(dataclasses.replace(self.failed, batches=[]))
        del failed["batches"]
        return {
            **found,
            "failed": failed,
            "residents": dataclasses.asdict(self.residents),
            "activation_bytes": self.activation_bytes,
            "dominates": self.dominates,
        }

    def __str__(self) -> str:
        before = "" if self.failed.limit_bytes is None else format_bytes(self.failed.limit_bytes)
        lines = [
            f"it failed {self.failed.where or 'somewhere'}, on {self.failed.device}"
            + f" of {before}" * bool(before)
        ]
        if self.fits:
            assert self.microbatch_size is not None
            assert self.num_microbatches is not None
            size, unit = self.microbatch_size, self.microbatch_unit
            cut = describe_cut(self.rows, size, self.num_microbatches, unit=unit)
            level = "" if self.level == "plain" else f", {self.level}"
            lines.append(f"fits now: {cut}{' rows' * (unit == 'rows')}{level}")
        else:
            smallest = min(self.tried, default=self.rows)
            units = self._units(smallest)
            of = f" of {self.rows}" if self.microbatch_unit == "rows" else ""
            lines.append(f"does not fit: not even {smallest} {units}{of}")
        if self.tried:
            tried = ", ".join(map(str, self.tried))
            lines.append(f"out of memory with: {tried} {self._units(self.tried[-1])}")
        if self.peak_bytes is not None:
            limit = "" if self.limit_bytes is None else f" of {format_bytes(self.limit_bytes)}"
            # A peak is what was held; what was refused was not.
            what = "peak" if self.fits else "needed at least"
            lines.append(f"{what}: {format_bytes(self.peak_bytes)}{limit}")
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
    unit = unit_name(options.get("microbatch_unit", ROWS))
    policy = _Noting(make_policy(options.pop(name, "auto"), name=name, unit=unit))
    limit = options.pop("memory_limit", None)
    device = resolve_device(options.get("device"), model)
    microbatcher = Microbatcher(
        model, **{"batchnorm": "ignore", "probe": False, **options, name: policy}
    )
    optimizer = innermost_optimizer(options.get("optimizer"))
    modules = [model, *options.get("modules", ())]
    result: StepResult | EvalResult | None = None
    message: str | None = None
    with _limited(limit, device):
        try:
            with microbatcher.rehearsing():
                result = _run(microbatcher, failed)
        except Exception as error:
            if not (isinstance(error, SampleTooLargeError) or is_out_of_memory(error)):
                raise
            message = text_of(error)
        finally:
            microbatcher.release_reservation()
        residents = measure_residents(
            modules,
            optimizer,
            device,
            training=is_training,
            upcoming_bytes=_upcoming_bytes(optimizer),
            memory_limit=limit,
            sums_in_float32=is_training and options.get("gradient_sums", "fp32") == "fp32",
        )
    tried = [each for each in policy.outcomes if not each.fits]
    last = policy.outcomes[-1] if policy.outcomes else None
    return ReplayReport(
        failed=failed,
        fits=result is not None,
        rows=sum(map(BatchLayout(options.get("batch_layout", 0)).num_rows, failed.batches)),
        microbatch_size=None if result is None else result.microbatch_size,
        microbatch_unit=unit,
        num_microbatches=None if result is None else result.num_microbatches,
        tried=tuple(dict.fromkeys(each.microbatch_size for each in tried)),
        peak_bytes=_peak_of(result, last),
        limit_bytes=residents.limit or (None if last is None else last.capacity_bytes),
        residents=residents,
        message=message,
        level="plain" if result is None else result.level,
    )


def _peak_of(result: StepResult | EvalResult | None, last: Outcome | None) -> int | None:
    if result is not None and result.peak_bytes is not None:
        return result.peak_bytes
    return None if last is None else last.peak_bytes


def _limited(
    limit: str | int | float | None, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """The limit, entered; where there is none, whatever counts."""
    if limit is not None:
        return limit_memory(limit, device)
    is_counted = device.type != "cpu" or active_budget() is not None
    return contextlib.nullcontext() if is_counted else MemoryBudget(None)


def _run(microbatcher: Microbatcher, failed: FailedBatch) -> StepResult | EvalResult:
    if failed.phase == "train":
        return microbatcher.accumulate(failed.batches)
    microbatcher.hold_reservation()  # in a run, the optimizer's state lies there by then
    with microbatcher.evaluating():
        return microbatcher.evaluate(failed.batches[0])


def _upcoming_bytes(optimizer: torch.optim.Optimizer | None) -> list[int]:
    """Of each tensor of state that the optimizer has yet to build."""
    if optimizer is None:
        return []
    stateless = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter not in optimizer.state
    ]
    return predict_step_memory(optimizer, stateless).state_bytes if stateless else []


class _Noting(Policy):
    """Another policy, with what became of its sizes."""

    def __init__(self, inner: Policy) -> None:
        self.outcomes: list[Outcome] = []
        self.adapts, self.multiple_of = inner.adapts, inner.multiple_of
        self._inner = inner

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return self._inner.propose(num_rows, cost)

    def record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._inner.record(outcome)
