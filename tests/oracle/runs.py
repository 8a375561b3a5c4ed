"""Training of one combination in several ways: plain torch, pieces by hand, and automicro."""

import contextlib
import copy
import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import automicro
from automicro.errors import AutomicroError, AutomicroWarning
from automicro.memory.budget import MemoryBudget
from tests.oracle.averages import Denominator, per_batch
from tests.oracle.faults import Boom, FaultAt, out_of_memory
from tests.oracle.jobs import Job, random_states, read_outputs, seed_all

PACKAGE = str(Path(automicro.__file__).parent)
Gradients = dict[str, Tensor | None]


@dataclasses.dataclass
class Trace:
    """State of a run after every batch and at the end."""

    losses: list[Tensor] = dataclasses.field(default_factory=list)
    gradients: list[Gradients] = dataclasses.field(default_factory=list)
    parameters: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    buffers: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    replaced: list[list[str]] = dataclasses.field(default_factory=list)  # gradients
    batches: list[Any] = dataclasses.field(default_factory=list)
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    random: dict[str, Any] = dataclasses.field(default_factory=dict)
    metric: Any = None
    evaluated: dict[str, Any] = dataclasses.field(default_factory=dict)
    cuts: list[list[int]] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    operations: list[int] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    ooms: int = 0
    said: list[warnings.WarningMessage] = dataclasses.field(default_factory=list)
    error: BaseException | None = None
    left_by_error: list[str] = dataclasses.field(default_factory=list)
    has_raised: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of automicro's run: sizes per batch, and the fault."""

    sizes: Any
    fault: str = "none"
    batch: int = 0
    operation: int | None = None
    limit_bytes: int | None = None
    measures: bool = False


def plainly(job: Job) -> Trace:
    """Train on whole batches, as users do."""
    return _loop(job, lambda batch, content, index: _whole(job, batch))


def by_hand(job: Job, cuts: Sequence[Sequence[int]], denominator: Denominator) -> Trace:
    """Train on pieces of these sizes, with each loss weighted by its divisor."""

    # Hooks see the gradient of the whole batch, so they need one backward for all pieces.
    at_once = job.of.twist.startswith("hooks")

    def backward(batch: Any, content: Any, index: int) -> Tensor:
        pieces = list(content.cut(list(cuts[index])))
        counts = [denominator(piece.rows) for piece in pieces]
        whole = 1.0 if denominator is per_batch else sum(counts)
        losses = []
        for piece, count in zip(pieces, counts, strict=True):
            loss, _, out = job.whole(job.make_batch(piece, index))
            loss = loss * (count / whole) if count else torch.zeros_like(loss.detach())
            if loss.requires_grad and not at_once:
                (loss * job.scale).backward()
            losses.append(loss if at_once else loss.detach())
            _update_metric(job, out, job.make_batch(piece, index))
        total = torch.stack(losses).sum()
        if at_once and total.requires_grad:
            total.backward()
        return total.detach()

    return _loop(job, backward)


def ours(job: Job, plan: Plan) -> Trace:
    """Train on microbatches with automicro."""
    trace = Trace()
    limit = {} if plan.limit_bytes is None else {"memory_limit": plan.limit_bytes}
    job.options.update(limit)
    fault = FaultAt()

    def backward(batch: Any, content: Any, index: int) -> Tensor:
        nonlocal fault
        microbatcher = microbatchers[index % len(microbatchers)]
        before = _state(job, batch) if plan.fault == "error at an operation" else {}
        with contextlib.ExitStack() as stack:
            budget = None
            if plan.measures:
                budget = stack.enter_context(MemoryBudget(None))
            elif plan.limit_bytes is None:
                fault = _fault(plan, index)
                stack.enter_context(fault)
            try:
                result = microbatcher.backward(batch, job.metric)
            except Boom:
                result = None
        if result is None:
            trace.left_by_error = differing(before, _state(job, batch))
            result = microbatcher.backward(batch, job.metric)
        trace.has_raised |= fault.has_raised
        trace.operations.append(fault.operations)
        if budget is not None:
            trace.peaks.append(budget.peak_bytes)
        trace.ooms += result.ooms
        trace.sizes.append(result.microbatch_size)
        count, rest = divmod(len(content), result.num_microbatches)
        trace.cuts.append([count + (i < rest) for i in range(result.num_microbatches)])
        return result.loss.detach().clone()

    with caught() as heard:
        try:
            microbatchers = job.microbatchers(plan.sizes)
            _loop(job, backward, trace, lambda b: _evaluate(job, microbatchers[0], b))
        except Exception as error:
            trace.error = error
            trace.has_raised |= fault.has_raised
    trace.said = [each for each in heard if issubclass(each.category, AutomicroWarning)]
    return trace


@contextlib.contextmanager
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield heard


def is_refusal(error: BaseException) -> bool:
    """Return whether automicro itself refused, rather than code inside it or the model."""
    if isinstance(error, AutomicroError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised_by_us = bool(frames) and frames[-1].filename.startswith(PACKAGE)
    return raised_by_us and isinstance(error, ValueError | TypeError)


def _fault(plan: Plan, index: int) -> FaultAt:
    if plan.fault not in ("oom at an operation", "error at an operation") or index != plan.batch:
        return FaultAt()
    error = out_of_memory() if plan.fault.startswith("oom") else Boom("a bug in the model")
    return FaultAt(plan.operation, error)


def _loop(
    job: Job,
    backward: Callable[[Any, Any, int], Tensor],
    trace: Trace | None = None,
    evaluate: Callable[[Any], dict[str, Any]] | None = None,
) -> Trace:
    trace = Trace() if trace is None else trace
    job.model.train()
    _keep_frozen(job)
    seed_all(job.of.seed + 7)
    for index, content in enumerate(job.contents):
        job.before_batch(index)
        batch = job.make_batch(content.take(0, len(content)), index)
        if job.of.twist == "evaluates between" and index == 1:
            trace.evaluated = (evaluate or (lambda b: _evaluate_plainly(job, b)))(
                job.make_batch(content.take(0, len(content)), index)
            )
        grads = {name: leaf.grad for name, leaf in job.leaves.items() if leaf.grad is not None}
        trace.losses.append(backward(batch, content, index))
        trace.replaced.append([n for n, grad in grads.items() if job.leaves[n].grad is not grad])
        trace.gradients.append(job.after_backward())
        trace.batches.append(batch)
        job.step()
        trace.parameters.append(job.parameters())
        trace.buffers.append(job.buffers())
    trace.attributes = job.attributes()
    trace.random = random_states()
    trace.metric = job.metric_value()
    return trace


def _keep_frozen(job: Job) -> None:
    if "frozen" in job.of.model:
        for module in job.model.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.eval()


def _whole(job: Job, batch: Any) -> Tensor:
    again = copy.deepcopy(batch) if job.metric_kind else None  # because the forward may modify it
    loss, _, out = job.whole(batch)
    (loss * job.scale).backward()
    _update_metric(job, out, again)
    return loss.detach().clone()


def _update_metric(job: Job, out: Any, batch: Any) -> None:
    if job.metric_kind is not None:
        job.options["update_metric"](job.metric, out.detach(), batch)


def _evaluate_plainly(job: Job, batch: Any) -> dict[str, Any]:
    modes = {module: module.training for module in job.model.modules()}
    job.model.eval()
    with torch.no_grad():
        try:
            if job.of.wiring == "Composer":
                model: Any = job.model
                return {"outputs": model.eval_forward(batch)}
            loss, _, out = job.whole(batch)
            return {"loss": loss} if out is None else {"loss": loss, "outputs": out}
        finally:
            job.model.train()
            for module, mode in modes.items():
                module.training = mode


def _evaluate(job: Job, microbatcher: Any, batch: Any) -> dict[str, Any]:
    result = microbatcher.evaluate(batch, return_outputs=True)
    outputs = read_outputs(result.outputs)
    found = {} if outputs is None else {"outputs": outputs}
    return found if result.loss is None else {**found, "loss": result.loss}


def _state(job: Job, batch: Any) -> dict[str, Any]:
    """Return all state that an exception must leave unchanged."""
    gradients = {n: None if v.grad is None else v.grad.clone() for n, v in job.leaves.items()}
    metric = copy.deepcopy(job.metric.__dict__) if job.metric is not None else None
    if job.metric is not None and hasattr(job.metric, "metric_state"):
        metric = copy.deepcopy(job.metric.metric_state)
    return {
        "parameters": job.parameters(),
        "gradients": gradients,
        "buffers": job.buffers(),
        "random": random_states(),
        "batch": copy.deepcopy(batch),
        "metric": metric,
        "attributes": job.attributes(),
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not is_same(one[name], other[name])]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal bit by bit, through containers, arrays and tensors."""
    import numpy as np

    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.is_nested and other.is_nested:
            return is_same(list(one.unbind()), list(other.unbind()))
        if one.is_sparse or other.is_sparse:
            one, other = one.to_dense(), other.to_dense()
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(torch.nan_to_num(one.detach()), torch.nan_to_num(other.detach()))
        )
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    if hasattr(one, "keys") and hasattr(other, "keys"):
        names = list(one.keys())
        return set(names) == set(other.keys()) and all(is_same(one[n], other[n]) for n in names)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and is_same(vars(one), vars(other))
    return type(one) is type(other) and bool(one == other)
