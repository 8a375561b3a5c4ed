"""The entry: compare, then explain."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from automicro.checks import check_model, check_unwrapped, resolve_device
from automicro.errors import BatchError, RollbackError, describe_error, text_of
from automicro.forward import choose_convention
from automicro.oom import Failure, classify
from automicro.slicing import BatchLayout, check_microbatch_size
from automicro.verification.examination import Examination
from automicro.verification.laboratory import Conditions, Laboratory
from automicro.verification.observe import observe
from automicro.verification.report import (
    UNVERIFIABLE,
    Finding,
    VerifyReport,
)
from automicro.verification.subject import Subject
from automicro.weighting import Average, LossAverage, read_average

_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def verify(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    loss_average: LossAverage = "auto",
    modules: Iterable[nn.Module] = (),
    sizes: Iterable[int] | None = None,
    batch_layout: int | Mapping[str, Any] = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
) -> VerifyReport:
    """Whether splitting this batch changes this model's gradient, and why.

    The whole batch's gradient is compared with those of a `Microbatcher` at several sizes, dropout
    silenced, in float64 where the model can compute in it. Where they differ, experiments find
    the cause: one suspect at a time is held still.

    Everything runs on deep copies. Where a copy cannot stand for the original (``forward`` uses a
    module by a name of its own), it runs on the original, in its own precision, inside a
    transaction that is rolled back; the report says so. Model, batch, gradients and random
    generators are afterwards as they were.

    Args:
        model: the model, in the mode in which it is trained.
        batch: one batch of at least two rows; it has to fit whole.
        loss_fn: as in `Microbatcher`, and so ``forward``, ``loss_average``, ``modules``,
            ``batch_layout``, ``device``.
        forward: see there.
        loss_average: see there.
        modules: see there.
        sizes: microbatch sizes in rows; a half, a ragged one and small ones unless given.
        batch_layout: see there.
        device: see there.
        dtype: of the comparison: ``"auto"`` tries float64 and falls back on the model's own type.

    Raises:
        LossError: the forward gives no usable loss.
        TypeError, ValueError: arguments that make no sense, each with its remedy.

    Any other error of the model on the whole batch passes through unchanged.

    Example:
        >>> import torch
        >>> from automicro import verify
        >>> batch = (torch.randn(8, 4), torch.randint(3, (8,)))
        >>> report = verify(torch.nn.Linear(4, 3), batch, loss_fn=torch.nn.CrossEntropyLoss())
        >>> report.verdict
        'exact: splitting does not change the gradient (max relative error ... in float64)'
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        >>> report = verify(model, batch, loss_fn=torch.nn.CrossEntropyLoss())
        >>> report.exit_code, report.causes[0].names
        (1, ('1',))
    """
    check_model(model)
    check_unwrapped(model)
    subject = Subject(model=model, modules=tuple(modules), loss_fn=loss_fn, forward=forward)
    convention = choose_convention(model, forward=forward, loss_fn=loss_fn)
    averages = read_average(
        loss_average,
        loss_fn=loss_fn,
        model=model,
        targets=convention.targets,
        reads_model=convention.computes_loss_in_model,
    )
    wanted_sizes = None if sizes is None else [check_microbatch_size(size) for size in sizes]
    wanted = _read_dtype(dtype)
    at = resolve_device(device, model)
    try:
        num_rows = BatchLayout(batch_layout).num_rows(batch)
        if num_rows < 2:
            return _unverifiable(_one_row(), num_rows=num_rows)
        laboratory = Laboratory(subject, batch, batch_layout, at, wanted or torch.float64)
        conditions = Conditions(loss_average=loss_average)
        examination = _look(
            laboratory, conditions, num_rows, averages, may_fall_back=wanted is None
        )
        return examination.report(wanted_sizes)
    except (BatchError, RollbackError) as error:
        return _unverifiable(Finding(kind="batch", text=text_of(error)))
    except torch.OutOfMemoryError as error:
        error.add_note("automicro: verify needs the whole batch at once; pass one with fewer rows")
        raise


def _look(
    laboratory: Laboratory,
    conditions: Conditions,
    num_rows: int,
    averages: Mapping[str, Average],
    *,
    may_fall_back: bool,
) -> Examination:
    """Run the whole batch once: in float64, or where that fails in the model's own precision."""
    why = ""
    try:
        seen = observe(laboratory, conditions)
    except Exception as error:
        recoverable = classify(error) is Failure.UNRELATED and not isinstance(error, BatchError)
        if not (may_fall_back and recoverable and laboratory.dtype is not None):
            raise
        why = f"; not in float64, because there the model fails ({_first_line(error)})"
        laboratory = laboratory.in_own_precision()
        seen = observe(laboratory, conditions)
    used = laboratory.dtype or laboratory.subject.lowest_dtype()
    if seen.lowest is not None and laboratory.dtype is not None:
        why = f"; the model itself casts down to {_named(seen.lowest)}"
        used = min(used, seen.lowest, key=lambda each: each.itemsize)
    tolerance = _ROUNDING.get(used, max(_ROUNDING.values()))
    if used is torch.float32 and seen.measured.gradients and laboratory.is_accelerated:
        tolerance *= 10  # TF32, and sums in another order for every shape
    return Examination(
        laboratory=laboratory,
        conditions=conditions,
        seen=seen,
        tolerance=tolerance,
        precision=_named(used),
        why_precision=why,
        num_rows=num_rows,
        averages=averages,
    )


def _one_row() -> Finding:
    return Finding(
        kind="batch",
        text="the batch has one row, which cannot be split",
        remedy="pass a batch of several rows, a dozen or more",
    )


def _unverifiable(cause: Finding, num_rows: int = 0) -> VerifyReport:
    return VerifyReport(
        status=UNVERIFIABLE,
        verdict=f"{UNVERIFIABLE}: {cause.text}",
        causes=(cause,),
        num_rows=num_rows,
    )


def _read_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto" or (isinstance(found, torch.dtype) and found.is_floating_point):
        return None if dtype == "auto" else found
    raise ValueError(
        f"dtype={dtype!r} is no floating point type; pass 'auto', or one such as torch.float64"
    )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return next(iter(describe_error(error).splitlines()))
