"""What `verify` found, as values, as text, and in words."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automicro.loss.averages import Candidate
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
            ``"loss value"``, ``"parts"`` or ``"unknown"``.
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


_SHOWN = 5
KEEP_WHOLE = "keep batches whole with microbatch_size=None"


def batchnorm(names: Sequence[str]) -> Finding:
    """Layers that normalise over the rows."""
    layers = "layer averages" if len(names) == 1 else "layers average"
    return Finding(
        kind="batchnorm",
        names=tuple(names),
        text=f"{len(names)} BatchNorm {layers} over the rows of a microbatch: {listed(names)}",
        remedy="use GroupNorm or LayerNorm, freeze the statistics with .eval() on these layers, or "
        "train on whole batches with batchnorm='disable'",
    )


def buffers(names: Sequence[str]) -> Finding:
    """Buffers that a forward changes and a later one reads."""
    return Finding(
        kind="buffers",
        names=tuple(names),
        text=f"each training forward changes buffers and the next one computes with them: "
        f"{listed(names)}",
        remedy="update them once per step, outside the forward (spectral norm: eval() of the "
        f"parametrization but for one forward per step), or {KEEP_WHOLE}",
    )


def attributes(names: Sequence[str]) -> Finding:
    """State that is no buffer, which a forward changes and a later one reads."""
    names = tuple(name.removeprefix("→") for name in names)
    return Finding(
        kind="attributes",
        names=names,
        text=f"each forward changes state that is not a buffer and the next one computes with it: "
        f"{listed(names)}",
        remedy=f"update it once per step, outside the forward; or {KEEP_WHOLE}",
    )


def loss_average(found: Candidate, configured: str, before: float) -> Finding:
    """A loss that is another mean than it was taken for."""
    return Finding(
        kind="loss average",
        names=(found.code,),
        text=f"the loss is {found.kind}, and was taken for {configured}",
        evidence=f"with loss_average={found.code} nothing differs, on this batch and on some rows "
        f"of it; without it a gradient is off by {before:.1g} of itself",
        remedy=f"pass loss_average={found.code}",
    )


def class_weights(found: Candidate | None, weights: dict[int, float], loss_name: str) -> Finding:
    """A loss that weighs rows by class."""
    shown = ", ".join(f"class {label}: {weight:.4g}" for label, weight in sorted(weights.items()))
    callable_text = (
        f"loss_average={found.code}"
        if found
        else "loss_average=… as a callable that adds up the weights of a microbatch's targets"
    )
    return Finding(
        kind="class weights",
        names=(loss_name,),
        text=f"{loss_name} weighs rows by their class and divides by the sum of these weights "
        f"(in proportion: {shown})",
        remedy=f"pass loss_fn=nn.CrossEntropyLoss(weight=…), which is read off, or {callable_text}",
    )


def other_weights(
    loss_name: str, parts: Sequence[Sequence[int]], weights: Sequence[float]
) -> Finding:
    """A weighted mean over rows, of which nothing shows where the weights come from."""
    pairs = zip(parts, weights, strict=True)
    shown = ", ".join(f"{'+'.join(map(str, part))}: {weight:.3g}" for part, weight in pairs)
    return Finding(
        kind="loss average",
        names=(loss_name,),
        text=f"{loss_name} is a weighted mean of the rows' losses with weights that none of the "
        f"known counts explains (by row: {shown})",
        remedy="pass loss_average=… as a callable that gives what a microbatch's loss was divided "
        "by",
    )


def across_rows(names: Sequence[str]) -> Finding:
    """Modules whose output for a row depends on other rows."""
    whose = "the output of a module" if len(names) == 1 else "the outputs of modules"
    return Finding(
        kind="across rows",
        names=tuple(names),
        text=f"{whose} for a row depends on the other rows: {listed(names)}",
        remedy=f"compute it for each row by itself, or {KEEP_WHOLE}",
    )


def compares_rows(loss_name: str) -> Finding:
    """A loss that is no mean over rows at all."""
    return Finding(
        kind="compares rows",
        names=(loss_name,),
        text=f"{loss_name} compares rows (a contrastive loss, say) or adds a term that does not "
        "come from rows: no weighting of the rows' gradients gives the batch's",
        remedy=f"{KEEP_WHOLE}; where whole batches do not fit, automicro.Contrastive runs encoders "
        "in slices, and computes the loss from what they give for the whole batch",
    )


def fails_on_fewer_rows(loss_name: str, size: int, failure: str) -> Finding:
    """A forward or a loss that only works on whole batches."""
    return Finding(
        kind="fails on fewer rows",
        names=(loss_name,),
        text=f"the forward or the loss ({loss_name}) fails with microbatches of at "
        f"most {size} {'row' if size == 1 else 'rows'}: {failure}",
        remedy="remove what fixes the number of rows or refers to other rows of the batch (a "
        "written-out batch size, .squeeze() without a dimension, targets that are row numbers), "
        f"or {KEEP_WHOLE}",
    )


def fails_on_one_row(loss_name: str, failure: str) -> Finding:
    """A forward or a loss that only works on several rows."""
    return Finding(
        kind="fails on one row",
        names=(loss_name,),
        text=f"the forward or the loss ({loss_name}) fails with a microbatch of one row, and not "
        f"with two: {failure}",
        remedy="give .squeeze() its dimension, as in .squeeze(-1): without one it takes away that "
        f"of the rows, too, where there is one row; or {KEEP_WHOLE}",
    )


def unknown() -> Finding:
    """Nothing that was tried explains the difference."""
    return Finding(
        kind="unknown",
        text="none of the causes that were tried explains the difference",
        remedy="look at the parameters that differ most; pass fewer rows or a part of the model to "
        f"narrow it down, or {KEEP_WHOLE}",
    )


def non_deterministic(error: float) -> Finding:
    """Two runs from one state that differ."""
    return Finding(
        kind="non-deterministic",
        text="the same batch gives another gradient the second time, from the same state and the "
        f"same seeds (relative difference {error:.1g}): non-deterministic kernels, a random "
        "generator outside the model, or a global or captured variable that the forward changes",
        remedy="keep such state in the model, draw with torch's global generator, or switch "
        "on torch.use_deterministic_algorithms(True)",
    )


def random_draws(names: Sequence[str]) -> Finding:
    """Draws that could not be held constant, so that they hide everything else."""
    return Finding(
        kind="random",
        names=tuple(names),
        text=f"the forward draws random numbers that cannot be held constant, from "
        f"{listed(names)}, so each cut of a batch computes something else; whether the rest is "
        "exact cannot be seen",
        remedy="switch the draws off for this check; draw with torch.rand or torch.randn, per row",
    )


def repeated_draws(names: Sequence[str]) -> Finding:
    """Draws of which the forward sets the seed by itself."""
    return Finding(
        kind="random",
        names=tuple(names),
        text="the forward sets the seed of what it draws for its rows by itself, so each "
        "microbatch draws once more what the first rows of the batch get",
        evidence="microbatches draw from the state that the whole batch draws from",
        remedy="draw for all rows before the batch is cut, and give it along with the rows, or "
        f"{KEEP_WHOLE}",
    )


def one_row() -> Finding:
    """A batch that cannot be split."""
    return Finding(
        kind="batch",
        text="the batch has one row, which cannot be split",
        remedy="pass a batch of several rows, a dozen or more",
    )


def scripted() -> Finding:
    """A model that cannot be watched."""
    return Finding(
        kind="scripted",
        text="the model is scripted or traced, and its parts cannot be watched",
        remedy="pass the model that it was made from",
    )


def notes(
    drawn: Sequence[str],
    written: Sequence[str],
    is_training: bool,
    state: Mapping[str, tuple[str, ...]],
) -> list[Finding]:
    """What is worth knowing although it changes no gradient.

    Args:
        drawn: torch's functions that would have drawn, and what drew.
        written: leaves of the batch that the forward wrote into.
        is_training: whether the model was in training mode.
        state: names of what forwards change: buffers, and attributes.
    """
    found = []
    if drawn:
        text = (
            f"the forward draws random numbers ({listed(drawn)}), held the same here. In training "
            "each microbatch draws its own, as each batch does: the expectation is the same, "
            "single steps differ"
        )
        found.append(Finding(kind="random", names=tuple(drawn), text=text))
    if written:
        found.append(
            Finding(
                kind="input written",
                names=tuple(written),
                text=f"the forward writes into its input: {listed(written)}",
                remedy="clone it first. Until then tensors are copied for each microbatch, which "
                "costs memory; other parts of a batch are not protected",
            )
        )
    if not is_training:
        found.append(
            Finding(
                kind="mode",
                text="the model is in evaluation mode and was examined in it",
                remedy="call model.train() first if that is not how it is trained",
            )
        )
    for kind, names in state.items():
        what = "buffers" if kind == "buffers" else "state that is not a buffer"
        found.append(
            Finding(
                kind=kind,
                names=names,
                text=f"each forward changes {what}, now once per microbatch: {listed(names)}",
                remedy="nothing, if it is a cache; else update it once per step, outside of it",
            )
        )
    return found


def parts_in_slices(names: tuple[str, ...]) -> Finding:
    """Parts with sizes of their own, which run in slices whatever the batch does."""
    return Finding(
        kind="parts",
        names=names,
        text="parts with sizes of their own ran in slices with the whole batch, too "
        f"({listed(names)}): whether these change them was not asked here. Each is looked at in "
        "its first calls, and refused where they would",
        remedy="take them back (.remove()) to compare with the model in one piece",
    )


def even_batch() -> Finding:
    """A batch on which different averages look the same."""
    return Finding(
        kind="batch",
        text="every row of this batch has the same number of targets, so that a mean over tokens "
        "looks like the mean over samples that the loss was taken for",
        remedy="verify with a batch whose rows differ in length or in ignored targets, or say "
        "loss_average='tokens'",
    )


def listed(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
