"""What `verify` found, as values and as text."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automicro.showing import html_text, short

EXACT, NOT_EXACT, UNVERIFIABLE = "exact", "not exact", "cannot be verified"
_EXIT_CODES = {EXACT: 0, NOT_EXACT: 1, UNVERIFIABLE: 3}
_PARAMETERS_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about a model that matters when its batches are split.

    Attributes:
        kind: what it is about, in a word or two: ``"batchnorm"``, ``"buffers"``, ``"attributes"``,
            ``"loss average"``, ``"class weights"``, ``"across rows"`` (a module),
            ``"compares rows"`` (the loss), ``"fails on fewer rows"``, ``"fails on one row"``,
            ``"input written"``, ``"random"``, ``"non-deterministic"``, ``"batch"``, ``"mode"``,
            ``"loss value"`` or ``"unknown"``.
        names: layers, buffers, attributes, leaves of the batch or the loss, whichever it is about.
        text: what was found.
        evidence: the experiment that shows it, where there was one.
        remedy: what to do about it; empty where nothing need be done.
    """

    kind: str
    names: tuple[str, ...] = ()
    text: str
    evidence: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The whole batch against one way to split it.

    Attributes:
        microbatch_size: rows of the largest microbatch.
        num_microbatches: how many there were.
        error: the largest relative error of a parameter's gradient; NaN where it failed.
        worst: that parameter.
        loss_error: relative error of the loss.
        failure: why this size could not be run; empty where it could.
    """

    microbatch_size: int
    num_microbatches: int
    error: float
    worst: str = ""
    loss_error: float = 0.0
    failure: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class VerifyReport:
    """Whether splitting changes a model's gradient, and why.

    Attributes:
        status: ``"exact"`` as configured, ``"not exact"``, or ``"cannot be verified"``.
        verdict: the same in a line that says what to do.
        loss_average: where another one would be exact, what to write; else empty.
        loss_average_is: how sure it is what the loss averages over, as in `StepResult`.
        causes: why it is not exact, or cannot be verified.
        notes: what is worth knowing and changes no gradient.
        comparisons: one per size.
        parameter_errors: the largest relative error of each parameter's gradient.
        num_rows: rows of the batch.
        dtype: the precision of the comparison.
        tolerance: relative errors up to this one count as rounding.
        method: how the caller's model was kept as it was.
    """

    status: str
    verdict: str
    loss_average: str = ""
    loss_average_is: str = "unchecked"
    causes: Sequence[Finding] = ()
    notes: Sequence[Finding] = ()
    comparisons: Sequence[Comparison] = ()
    parameter_errors: Mapping[str, float] = field(default_factory=dict)
    num_rows: int = 0
    dtype: str = ""
    tolerance: float = 0.0
    method: str = ""

    @property
    def exit_code(self) -> int:
        """0 exact as configured, 1 not exact (or with another setting only), 3 unknown."""
        return _EXIT_CODES[self.status]

    @property
    def is_exact(self) -> bool:
        """Whether splitting does not change the gradient, as configured."""
        return self.status == EXACT

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values that JSON can hold."""
        values: dict[str, Any] = _plain(dataclasses.asdict(self))
        return {**values, "exit_code": self.exit_code}

    def __repr__(self) -> str:
        return f"VerifyReport({self.status!r}, {self.num_rows} rows, {short(self.verdict)})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_text(str(self))

    def __str__(self) -> str:
        lines = [self.verdict]
        for title, findings in (("Why", self.causes), ("Good to know", self.notes)):
            if findings:
                lines += ["", f"{title}:"]
            for each in findings:
                lines.append(f"  - {each.text}")
                if each.evidence:
                    lines.append(f"    Shown by: {each.evidence}")
                if each.remedy:
                    lines.append(f"    What to do: {each.remedy}")
        if self.comparisons:
            lines += ["", *_table(self.comparisons)]
        worst = sorted(self.parameter_errors.items(), key=lambda item: -_order(item[1]))
        wrong = [item for item in worst if not item[1] <= self.tolerance]
        if wrong:
            lines += ["", "Parameters that differ most:"]
            lines += [f"  {error:9.1e}  {name}" for name, error in wrong[:_PARAMETERS_SHOWN]]
            if len(wrong) > _PARAMETERS_SHOWN:
                lines.append(f"  and {len(wrong) - _PARAMETERS_SHOWN} of {len(worst)} more")
        if self.dtype:
            lines += [
                "",
                f"{self.num_rows} rows, compared in {self.dtype} (rounding: up to "
                f"{self.tolerance:.0e}), {self.method}. The average of the loss: "
                f"{self.loss_average_is}.",
            ]
        return "\n".join(lines)


def _table(comparisons: Sequence[Comparison]) -> list[str]:
    rows = [("microbatches", "rel. error of gradient", "of loss", "worst parameter")]
    for each in comparisons:
        shape = f"{each.num_microbatches} × {each.microbatch_size}"
        if each.failure:
            rows.append((shape, "-", "-", textwrap.shorten(each.failure, 60)))
        else:
            rows.append((shape, f"{each.error:.1e}", f"{each.loss_error:.1e}", each.worst))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    # Not numbers in JSON.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
