"""The entry: compare several sizes, explain differences, judge."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from automicro.batch.layout import BatchLayout, balanced_sizes, check_microbatch_size
from automicro.batchnorm import needs_two_rows
from automicro.checking.reading import loss_error, relative_errors
from automicro.errors import BatchError, LossError, RollbackError, describe_error, text_of
from automicro.loss.averages import Average, LossAverage, is_declared, read_average
from automicro.loss.conventions import choose_convention
from automicro.memory.oom import Failure, classify
from automicro.nested.split import attached_parts
from automicro.options import check_model, check_unwrapped, resolve_device
from automicro.verification import report as findings
from automicro.verification.experiments import Diagnosing, Diagnosis, failure_on_fewer_rows
from automicro.verification.laboratory import Conditions, Examined, Laboratory, can_tell
from automicro.verification.observation import Observation, observe
from automicro.verification.report import (
    EXACT,
    NOT_EXACT,
    UNVERIFIABLE,
    Comparison,
    Finding,
    VerifyReport,
)

_MAX_MICROBATCHES = 32
_ONE = "BatchNorm needs two values per channel"


@dataclass(kw_only=True)
class Examination:
    """One model and batch, once the whole batch has been run.

    Attributes:
        laboratory: where they run.
        conditions: as configured by the caller.
        seen: what a run of the whole batch changed.
        tolerance: relative errors up to this one count as rounding.
        precision: the type in which it was computed, in words.
        why_precision: why it is not another, to be appended to a sentence.
        num_rows: rows of the batch.
        averages: what the losses were taken for.
    """

    laboratory: Laboratory
    conditions: Conditions
    seen: Observation
    tolerance: float
    precision: str
    why_precision: str
    num_rows: int
    averages: Mapping[str, Average]

    def report(self, sizes: Sequence[int] | None) -> VerifyReport:
        """Compare, explain, judge.

        Args:
            sizes: of microbatches; None for the usual ones.

        Raises:
            ValueError: none of the sizes splits the batch.
        """
        cause = self._why_incomparable()
        if cause is not None:
            return self._report(UNVERIFIABLE, f"{UNVERIFIABLE}: {cause.text}", causes=[cause])
        cuts = _cuts(self.num_rows, sizes)
        compared = [self._compare(size) for size in cuts]
        comparisons = [comparison for comparison, _ in compared]
        errors = _largest([errors for _, errors in compared])
        ran = [each for each in comparisons if not each.failure]
        broken = [
            each for each in comparisons if each.failure and not each.failure.startswith(_ONE)
        ]
        diagnosis = (
            Diagnosis() if ran else Diagnosis(causes=[findings.batchnorm(self.seen.batchnorm)])
        )
        if ran and max(each.error for each in ran) > self.tolerance:
            diagnosis = self._diagnose(max(ran, key=lambda each: each.error))
        if broken:
            diagnosis = self._with_failure(diagnosis if ran else Diagnosis(), broken[0])
        if self.seen.repeats and not diagnosis.is_random:
            causes = [*diagnosis.causes, findings.repeated_draws(self.seen)]
            diagnosis = replace(diagnosis, causes=causes)
        status, verdict = self._judge(diagnosis, errors)
        return self._report(
            status,
            verdict,
            causes=diagnosis.causes,
            comparisons=comparisons,
            parameter_errors=errors,
            loss_average="" if diagnosis.loss_average is None else diagnosis.loss_average.code,
        )

    def _why_incomparable(self) -> Finding | None:
        whole = self.seen.measured
        if not whole.is_finite:
            return Finding(
                kind="batch",
                text=f"the loss of the whole batch is {whole.loss}, or its gradient is not finite",
                remedy="pass a batch on which the model trains, with targets that are not ignored",
            )
        if whole.norm == 0:
            return Finding(
                kind="batch",
                text="the gradient of the whole batch is zero, and so would any split's be",
                remedy="pass a batch and a model with a gradient",
            )
        again = self.laboratory.whole(self.conditions)
        difference = max(relative_errors(again, whole).values())
        if difference > self.tolerance or not loss_error(again.loss, whole.loss) <= self.tolerance:
            return findings.non_deterministic(difference)
        return None

    def _compare(self, size: int) -> tuple[Comparison, Mapping[str, float]]:
        count = len(balanced_sizes(self.num_rows, size))
        try:
            split = self.laboratory.split(self.conditions, size)
        except (BatchError, LossError, RollbackError):
            raise
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            text = _ONE if needs_two_rows(error) else describe_error(error)
            failed = Comparison(
                microbatch_size=size, num_microbatches=count, error=math.nan, failure=text
            )
            return failed, {}
        errors = relative_errors(split, self.seen.measured)
        worst = max(errors, key=lambda name: errors[name])
        comparison = Comparison(
            microbatch_size=size,
            num_microbatches=count,
            error=errors[worst],
            worst=worst,
            loss_error=loss_error(split.loss, self.seen.measured.loss),
        )
        return comparison, errors

    def _can_tell(self) -> bool:
        """Whether this batch would show that an assumed average is wrong."""
        if all(average.is_known for average in self.averages.values()):
            return True
        subject = self.laboratory.subject
        convention = choose_convention(
            subject.model, forward=subject.forward, loss_fn=subject.loss_fn
        )
        return can_tell(self.laboratory, convention)

    def _sureness(self, status: str, loss_average: str) -> str:
        if status == NOT_EXACT and loss_average:
            return "wrong"
        if is_declared(self.conditions.loss_average):
            return "declared"
        if all(average.is_known for average in self.averages.values()):
            return "read"
        return "checked" if status == EXACT and self._can_tell() else "unchecked"

    def _with_failure(self, diagnosis: Diagnosis, broken: Comparison) -> Diagnosis:
        """A diagnosis of the sizes that ran, and that another one fails."""
        failure = failure_on_fewer_rows(
            self.laboratory, self.conditions, broken.microbatch_size, broken.failure
        )
        others = [cause for cause in diagnosis.causes if cause.kind != failure.kind]
        return replace(diagnosis, causes=[failure, *others])

    def _diagnose(self, worst: Comparison) -> Diagnosis:
        diagnosis = Diagnosing(
            self.laboratory, self.conditions, self.seen, worst.microbatch_size, self.tolerance
        ).run()
        return diagnosis if diagnosis.causes else Diagnosis(causes=[findings.unknown()])

    def _judge(
        self,
        diagnosis: Diagnosis,
        errors: Mapping[str, float],
    ) -> tuple[str, str]:
        error = max(errors.values(), default=math.nan)
        if not diagnosis.causes:
            text = (
                f"{EXACT}: splitting does not change the gradient (max relative error "
                f"{error:.0e} in {self.precision})"
            )
            return EXACT, text
        first, *others = diagnosis.causes
        if diagnosis.is_random:
            return UNVERIFIABLE, f"{UNVERIFIABLE}: {first.text}"
        found = diagnosis.loss_average
        if found is not None and not others:
            taken_for = " and ".join(dict.fromkeys(a.describe() for a in self.averages.values()))
            text = (
                f"exact with loss_average={found.code} ({found.kind}); as configured ({taken_for}) "
                f"the relative error is {error:.2g}"
            )
            return NOT_EXACT, text
        more = f", and {len(others)} more below" if others else ""
        size = f" (relative error {error:.2g})" if error > self.tolerance else ""
        return NOT_EXACT, f"{NOT_EXACT}: {first.text}{size}{more}"

    def _report(
        self,
        status: str,
        verdict: str,
        *,
        causes: Sequence[Finding],
        comparisons: Sequence[Comparison] = (),
        parameter_errors: Mapping[str, float] | None = None,
        loss_average: str = "",
    ) -> VerifyReport:
        notes = findings.notes(self.seen)
        if any(cause.kind == "random" for cause in causes):
            notes = [note for note in notes if note.kind != "random"]
        notes += findings.state_notes(self.seen, causes)
        wrong = [each.loss_error for each in comparisons if each.loss_error > self.tolerance]
        if wrong and status == EXACT:
            notes.append(
                Finding(
                    kind="loss value",
                    text=f"the loss itself differs (relative error {max(wrong):.1g}), in a part "
                    "that has no gradient",
                )
            )
        if status == EXACT and not self._can_tell():
            notes.append(findings.even_batch())
        subject = self.laboratory.subject
        if parts := tuple(attached_parts([subject.model, *subject.modules])):
            notes.append(findings.parts_in_slices(parts))
        where = self.laboratory.why_in_place
        how = (
            f"on the model itself in its own precision, rolled back, because {where}"
            if where
            else "on a copy"
        )
        return VerifyReport(
            status=status,
            verdict=verdict,
            loss_average=loss_average,
            loss_average_is=self._sureness(status, loss_average),
            causes=tuple(causes),
            notes=tuple(notes),
            comparisons=tuple(comparisons),
            parameter_errors=parameter_errors or {},
            num_rows=self.num_rows,
            dtype=self.precision,
            tolerance=self.tolerance,
            method=f"{how}{self.why_precision}",
        )


def _cuts(num_rows: int, sizes: Sequence[int] | None) -> list[int]:
    """Sizes of the largest microbatch, each cut once.

    Raises:
        ValueError: none of the sizes splits the batch.
    """
    if sizes is None:
        ragged = next((pieces for pieces in range(3, num_rows) if num_rows % pieces), 2)
        most = [-(-num_rows // 2), num_rows] if num_rows <= _MAX_MICROBATCHES else [16]
        sizes = [-(-num_rows // pieces) for pieces in (2, ragged, *most)]
    cuts = [balanced_sizes(num_rows, size)[0] for size in sizes if size < num_rows]
    if not cuts:
        raise ValueError(
            f"sizes={list(sizes)} leaves the batch of {num_rows} rows whole; give sizes below it"
        )
    return sorted(set(cuts), reverse=True)


def _largest(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in errors for name in each)
    return {name: max(each[name] for each in errors if name in each) for name in names}


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
    subject = Examined(model=model, modules=tuple(modules), loss_fn=loss_fn, forward=forward)
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
        if isinstance(model, torch.jit.ScriptModule):
            return _unverifiable(_scripted(), num_rows=num_rows)
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
        said = describe_error(error).splitlines()[0]
        why = f"; not in float64, because there the model fails ({said})"
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


def _scripted() -> Finding:
    return Finding(
        kind="scripted",
        text="the model is scripted or traced, and its parts cannot be watched",
        remedy="pass the model that it was made from",
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
