"""The findings of `verify`, as values, as text, and in words."""

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automicro.showing import html_text, short

EXACT, NOT_EXACT, UNVERIFIABLE = "exact", "not exact", "cannot be verified"
_EXIT_CODES = {EXACT: 0, NOT_EXACT: 1, UNVERIFIABLE: 3}
_SHOWN = 5  # names, and parameters


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about a model that matters when its batches are split.

    Attributes:
        kind: what it is about, in a word or two: ``"batchnorm"``, ``"buffers"``, ``"attributes"``,
            ``"loss average"``, ``"class weights"``, ``"across rows"`` (a module),
            ``"compares rows"`` (the loss), ``"fails on fewer rows"``, ``"input written"``,
            ``"random"``, ``"non-deterministic"``, ``"scripted"``, ``"lazy"``, ``"batch"``,
            ``"mode"``, ``"loss value"``, ``"parts"`` or ``"unknown"``.
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
        method: why it was not compared in float64, if it was not.
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
        text = json.dumps({**dataclasses.asdict(self), "exit_code": self.exit_code})
        values: dict[str, Any] = json.loads(text, parse_constant=lambda each: str(float(each)))
        return values

    def __repr__(self) -> str:
        return f"VerifyReport({self.status!r}, {self.num_rows} rows, {short(self.verdict)})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_text(str(self))

    def __str__(self) -> str:
        lines = [self.verdict]
        for title, findings in (("Why", self.causes), ("Good to know", self.notes)):
            lines += ["", f"{title}:"] if findings else []
            for each in findings:
                lines.append(f"  - {each.text}")
                lines += [f"    Shown by: {each.evidence}"] if each.evidence else []
                lines += [f"    What to do: {each.remedy}"] if each.remedy else []
        lines += ["", *_table(self.comparisons)] if self.comparisons else []
        worst = sorted(self.parameter_errors.items(), key=lambda item: -item[1])
        wrong = [f"  {error:9.1e}  {name}" for name, error in worst if error > self.tolerance]
        lines += ["", "Parameters that differ most:", *wrong[:_SHOWN]] if wrong else []
        if len(wrong) > _SHOWN:
            lines.append(f"  and {len(wrong) - _SHOWN} of {len(worst)} more")
        if self.dtype:
            lines += [
                "",
                f"{self.num_rows} rows, compared in {self.dtype} (rounding: up to "
                f"{self.tolerance:.0e}){self.method and ', '}{self.method}. The average of the "
                f"loss: {self.loss_average_is}.",
            ]
        return "\n".join(lines)


def _table(comparisons: Sequence[Comparison]) -> list[str]:
    rows = [("microbatches", "rel. error of gradient", "of loss", "worst parameter")]
    for each in comparisons:
        shape = f"{each.num_microbatches} × {each.microbatch_size}"
        found = (f"{each.error:.1e}", f"{each.loss_error:.1e}", each.worst)
        failure = ("-", "-", textwrap.shorten(each.failure, 60))
        rows.append((shape, *(failure if each.failure else found)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:3]
    return ["  ".join([*map(str.rjust, row, widths), row[3]]) for row in rows]


def finding(key: str, names: Iterable[str] = (), evidence: str = "", **words: Any) -> Finding:
    """The text for a kind of finding, by its key in the table, with these names and words."""
    names = tuple(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    words |= {"names": ", ".join(names[:_SHOWN]) + more, "count": len(names)}
    words["what"] = "buffers" if key.startswith("buffers") else "attributes or variables"
    words["layers"] = "layer averages" if len(names) == 1 else "layers average"
    text, remedy = (each.format(**words) for each in _SAID[key])
    kind = key.partition(":")[0]
    return Finding(kind=kind, names=names, text=text, evidence=evidence, remedy=remedy)


_WHOLE = "keep batches whole with microbatch_size=None"
_STATE = (
    "each training forward changes {what} and the next one computes with them: {names}",
    "update them once per step, outside the forward (spectral norm: eval() of the parametrization "
    f"but for one forward per step), or {_WHOLE}",
)
_STATE_NOT_READ = (
    "each forward changes {what}, now once per microbatch: {names}",
    "nothing, if they are a cache; else update them once per step, outside of it",
)
# By kind, and behind a colon which of several of one kind: what was found, and what to do.
_SAID = {
    "batchnorm": (
        "{count} BatchNorm {layers} over the rows of a microbatch: {names}",
        "use GroupNorm or LayerNorm, freeze the statistics with .eval() on these layers, or train "
        "on whole batches with batchnorm='disable'",
    ),
    "buffers": _STATE,
    "attributes": _STATE,
    "loss average": (
        "the loss is {kind}, and was taken for {taken}",
        "pass loss_average={names}",
    ),
    "class weights": (
        "{names} weighs rows by their class and divides by the sum of these weights (in "
        "proportion: {weights})",
        "pass loss_fn=nn.CrossEntropyLoss(weight=…), which is read off, or loss_average={code}",
    ),
    "loss average: by row": (
        "{names} is a weighted mean of the rows' losses with weights that none of the known counts "
        "explains (by row: {weights})",
        "pass loss_average=… as a callable that gives what a microbatch's loss was divided by",
    ),
    "across rows": (
        "what a module gives for a row depends on the other rows: {names}",
        f"compute it for each row by itself, or {_WHOLE}",
    ),
    "compares rows": (
        "{names} compares rows (a contrastive loss, say) or adds a term that does not come from "
        "rows: no weighting of the rows' gradients gives the batch's",
        f"{_WHOLE}; where whole batches do not fit, automicro.Contrastive runs encoders in slices, "
        "and computes the loss from what they give for the whole batch",
    ),
    "fails on fewer rows": (
        "the forward or the loss ({names}) fails with microbatches of at most {size} row(s): "
        "{failure}",
        "remove what fixes the number of rows or refers to other rows of the batch (a written-out "
        "batch size, .squeeze() without a dimension, which takes away that of a single row, "
        f"targets that are row numbers), or {_WHOLE}",
    ),
    "unknown": (
        "none of the causes that were tried explains the difference",
        "look at the parameters that differ most; pass fewer rows or a part of the model to narrow "
        f"it down, or {_WHOLE}",
    ),
    "non-deterministic": (
        "the same batch gives another gradient the second time, from the same state and the same "
        "seeds (relative difference {error:.1g}): non-deterministic kernels, a random generator "
        "outside the model, or a global or captured variable that the forward changes",
        "keep such state in the model, draw with torch's global generator, or switch on "
        "torch.use_deterministic_algorithms(True)",
    ),
    "random": (
        "the forward draws random numbers that cannot be held constant, from {names}, so each cut "
        "of a batch computes something else; whether the rest is exact cannot be seen",
        "switch the draws off for this check; draw with torch.rand or torch.randn, per row",
    ),
    "random: repeated": (
        "the forward sets the seed of what it draws for its rows by itself, so each microbatch "
        "draws once more what the first rows of the batch get",
        f"draw for all rows before the batch is cut, and give it along with the rows, or {_WHOLE}",
    ),
    "scripted": (
        "the model is scripted or traced, and its parts cannot be watched",
        "pass the model that it was made from",
    ),
    "lazy": (
        "the model has lazy modules, whose shapes no forward has set yet",
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
        "the gradient of the whole batch is zero, and so would any split's be",
        "pass a batch and a model with a gradient",
    ),
    # What changes no gradient
    "random: held": (
        "the forward draws random numbers ({names}), held the same here. In training each "
        "microbatch draws its own, as each batch does: the expectation is the same, single steps "
        "differ",
        "",
    ),
    "input written": (
        "the forward writes into its input: {names}",
        "clone it first. Until then tensors are copied for each microbatch, which costs memory; "
        "other parts of a batch are not protected",
    ),
    "mode": (
        "the model is in evaluation mode and was examined in it",
        "call model.train() first if that is not how it is trained",
    ),
    "buffers: not read": _STATE_NOT_READ,
    "attributes: not read": _STATE_NOT_READ,
    "loss value": (
        "the loss itself differs (relative error {error:.1g}), without a gradient",
        "",
    ),
    "batch: even": (
        "every row of this batch has the same number of targets, so that a mean over tokens looks "
        "like the mean over samples that the loss was taken for",
        "verify with a batch whose rows differ in length or in ignored targets, or say "
        "loss_average='tokens'",
    ),
    "parts": (
        "parts with sizes of their own ran in slices with the whole batch, too ({names}): whether "
        "these change them was not asked here. Each is looked at in its first calls, and refused "
        "where they would",
        "take them back (.remove()) to compare with the model in one piece",
    ),
}
