"""Findings of `verify` as values and as text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from automicro.showing import html_text, short

EXACT, NOT_EXACT, UNVERIFIABLE = "exact", "not exact", "cannot be verified"
_EXIT_CODES = {EXACT: 0, NOT_EXACT: 1, UNVERIFIABLE: 3}
_SHOWN = 5  # names


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fact about a model that matters when its batches are split.

    Attributes:
        kind: subject of the finding: ``"batchnorm"``, ``"state"``, ``"loss average"``,
            ``"across rows"`` (a module), ``"compares rows"`` (the loss),
            ``"fails on fewer rows"``, ``"random"``, ``"non-deterministic"``, ``"lazy"``,
            ``"batch"``, ``"mode"``, ``"dtype"``, ``"loss value"``, ``"parts"`` or ``"unknown"``.
        names: the layers, the state or the loss concerned.
        text: description of the finding.
        evidence: the experiment that shows it, if there was one.
        remedy: what to do about it; empty if nothing is needed.
    """

    kind: str
    names: tuple[str, ...] = ()
    text: str
    evidence: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The whole batch compared with one way to split it.

    Attributes:
        microbatch_size: rows of the largest microbatch.
        num_microbatches: number of microbatches.
        error: the largest relative error of a parameter's gradient; NaN after a failure.
        worst: the parameter with that error.
        loss_error: relative error of the loss.
        failure: why this size could not run; empty if it ran.
    """

    microbatch_size: int
    num_microbatches: int
    error: float
    worst: str = ""
    loss_error: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        shown = (
            f"{self.error:.1e} of the gradient of {self.worst}, {self.loss_error:.1e} of the loss"
        )
        return f"{self.num_microbatches} × {self.microbatch_size} rows: {self.failure or shown}"


@dataclass(frozen=True, kw_only=True, repr=False)
class VerifyReport:
    """Report of `verify`: whether splitting changes a model's gradient, and why.

    Attributes:
        status: ``"exact"`` as configured, ``"not exact"``, or ``"cannot be verified"``.
        verdict: the status in one line, with what to do.
        loss_average: the value that would make the split exact, if there is one; else empty.
        loss_average_is: how the average of the loss is known, as in `StepResult`.
        causes: reasons why the split is not exact or cannot be verified.
        notes: other findings, which do not change the gradient.
        comparisons: one per size.
        num_rows: rows of the batch.
        dtype: precision of the comparison.
    """

    status: str
    verdict: str
    loss_average: str = ""
    loss_average_is: str = "unchecked"
    causes: Sequence[Finding] = ()
    notes: Sequence[Finding] = ()
    comparisons: Sequence[Comparison] = ()
    num_rows: int = 0
    dtype: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code: 0 exact as configured, 1 not exact as configured, 3 unknown."""
        return _EXIT_CODES[self.status]

    @property
    def is_exact(self) -> bool:
        """Whether splitting leaves the gradient unchanged, as configured."""
        return self.status == EXACT

    def __repr__(self) -> str:
        return f"VerifyReport({self.status!r}, {self.num_rows} rows, {short(self.verdict)})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        return html_text(str(self))

    def __str__(self) -> str:
        lines = [self.verdict]
        for title, findings in (("Why", self.causes), ("Good to know", self.notes)):
            lines += ["", f"{title}:"] if findings else []
            for each in findings:
                lines.append(f"  - {each.text}")
                lines += [f"    Shown by: {each.evidence}"] if each.evidence else []
                lines += [f"    What to do: {each.remedy}"] if each.remedy else []
        if self.comparisons:
            lines += ["", f"Relative errors of {self.num_rows} rows in {self.dtype}:"]
            lines += [f"  {each}" for each in self.comparisons]
            lines += [f"The average of the loss: {self.loss_average_is}."]
        return "\n".join(lines)


def finding(key: str, names: Iterable[str] = (), evidence: str = "", **words: Any) -> Finding:
    """Build the finding with this key in the table, filled with names and words."""
    names = tuple(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text, remedy = (
        each.format(names=", ".join(names[:_SHOWN]) + more, **words) for each in _SAID[key]
    )
    kind = key.partition(":")[0]
    return Finding(kind=kind, names=names, text=text, evidence=evidence, remedy=remedy)


_WHOLE = "keep batches whole with microbatch_size=None"
# Text and remedy by kind; a suffix after a colon distinguishes findings of one kind.
_SAID = {
    "batchnorm": (
        "BatchNorm averages over the rows of a microbatch: {names}",
        "use GroupNorm or LayerNorm, freeze the statistics with .eval() on these layers, or train "
        "on whole batches with batchnorm='disable'",
    ),
    "state": (
        "each training forward changes state that the next forward uses: {names}",
        "update it once per step, outside the forward (spectral norm: call eval() on the "
        f"parametrization except for one forward per step), or {_WHOLE}",
    ),
    "loss average": (
        "the loss is {kind}, but was assumed to be {taken}",
        "pass loss_average={names}",
    ),
    "across rows": (
        "the output of a module for one row depends on the other rows: {names}",
        f"compute it for each row separately, or {_WHOLE}",
    ),
    "compares rows": (
        "{names} compares rows (as a contrastive loss does), adds a term that does not come from "
        "rows, or is a mean with weights that are not in the batch (as of classes)",
        "pass loss_average=… as a callable that adds up such weights of a microbatch; otherwise "
        f"{_WHOLE}, or use automicro.Contrastive, which runs encoders in slices and computes the "
        "loss from the outputs for the whole batch",
    ),
    "fails on fewer rows": (
        "the forward or the loss ({names}) fails with microbatches of at most {size} row(s): "
        "{failure}",
        "remove code that fixes the number of rows or refers to other rows of the batch (a "
        "hard-coded batch size, .squeeze() without a dimension, targets that are row numbers), or "
        f"{_WHOLE}",
    ),
    "unknown": (
        "none of the causes tried explains the difference",
        f"pass fewer rows or a part of the model to narrow it down, or {_WHOLE}",
    ),
    "non-deterministic": (
        "the same batch gives a different gradient the second time, from the same state and seeds "
        "(relative difference {error:.1g}): non-deterministic kernels, a random generator "
        "outside the model, or a global or captured variable that the forward changes",
        "keep such state in the model, draw with torch's global generator, or call "
        "torch.use_deterministic_algorithms(True)",
    ),
    "random": (
        "the forward draws random numbers that cannot be held constant, from {names}, so each "
        "split of a batch computes something different and the rest cannot be checked",
        "switch these draws off for this check; draw with torch.rand or torch.randn, per row",
    ),
    "random: repeated": (
        "the forward sets the seed of its random draws, so each microbatch repeats the draws of "
        "the first rows of the batch",
        f"draw for all rows before the batch is split, pass the draws with the rows, or {_WHOLE}",
    ),
    "lazy": (
        "the model has lazy modules whose shapes are not initialized yet",
        "run one forward first",
    ),
    "batch: one row": (
        "the batch has one row, which cannot be split",
        "pass a batch of several rows, a dozen or more",
    ),
    "batch: infinite": (
        "the loss of the whole batch is {loss}, or its gradient is not finite",
        "pass a batch on which the model trains, with targets that are not ignored",
    ),
    "batch: no gradient": (
        "the gradient of the whole batch is zero, as any split's would be",
        "pass a batch and a model with a nonzero gradient",
    ),
    # The following change no gradient.
    "dtype": ("the model fails in float64 ({failure}), so rounding is larger", ""),
    "random: held": (
        "the forward draws random numbers ({names}), held constant in this check; in training, "
        "each microbatch draws its own",
        "",
    ),
    "mode": (
        "the model was examined in evaluation mode",
        "call model.train() first if it is trained in that mode",
    ),
    "state: not read": (
        "each forward changes state, which now happens once per microbatch: {names}",
        "nothing if it is a cache; otherwise update it once per step, outside the forward",
    ),
    "loss value": (
        "the loss itself differs (relative error {error:.1g}), but not its gradient",
        "",
    ),
    "batch: even": (
        "every row of this batch has the same number of targets, so a mean over tokens looks "
        "like the assumed mean over samples",
        "verify with a batch whose rows differ in length or in ignored targets, or declare "
        "loss_average='tokens'",
    ),
    "parts": (
        "parts with sizes of their own also ran in slices for the whole batch ({names}), so this "
        "check does not cover them",
        "remove them with .remove() to compare with the unsliced model",
    ),
}
