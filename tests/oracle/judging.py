"""Judge combinations: exact, named, or silently wrong."""

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.errors import BatchNormWarning, LossAverageWarning
from tests.oracle.faults import Scripted
from tests.oracle.jobs import Combination, Job
from tests.oracle.runs import (
    Plan,
    Trace,
    by_hand,
    caught,
    differing,
    is_refusal,
    is_same,
    ours,
    plainly,
)

TOLERANCE = 1e-8
UNCHECKED = re.compile(r"could not (be )?(check|compare|look|tell)|(not|un)( been| be)? ?checked")


class Verdict(enum.Enum):
    EXACT = "exact"
    NAMED = "named"  # wrong, and a warning says so
    UNCHECKED = "could not check"  # a warning says that exactness is unknown
    REFUSED = "refused"  # with a named error and unchanged state
    HALF_NAMED = "half named"  # wrong in two ways, and a warning names only one
    INVALID = "invalid"  # plain torch cannot run it either
    FALSE_ALARM = "false alarm"  # exact at every size, but with a warning
    CRASH = "crash"  # an error that plain torch does not raise
    SILENT = "silent"  # wrong without any warning


BAD = (Verdict.SILENT, Verdict.CRASH, Verdict.FALSE_ALARM)


@dataclasses.dataclass(frozen=True)
class Judgement:
    combination: Combination
    verdict: Verdict
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.verdict.value}: {self.reason}\n    {self.combination!r}"


def judge(one: Combination) -> Judgement:
    """Return the verdict on a combination."""
    with caught():
        try:
            whole = plainly(Job(one))
        except Exception as error:
            return Judgement(one, Verdict.INVALID, f"{type(error).__name__}: {error}"[:200])
    if not all(bool(loss.isfinite()) for loss in whole.losses):
        return Judgement(one, Verdict.INVALID, "the loss of plain torch is not finite")
    trace, plan = _run(one)
    verdict, reason = _faults(one, trace, plan)
    after_error = trace.has_raised and plan.fault.startswith("error")
    if verdict is None and after_error and _is_stateful(one):
        verdict, reason = Verdict.INVALID, "plain torch keeps what the error left, too"
    if verdict is None:
        verdict, reason = _result(one, trace, whole)
    return Judgement(one, verdict, reason)


def _run(one: Combination) -> tuple[Trace, Plan]:
    """Run automicro with the fault of the combination."""
    if one.fault == "none":
        plan = Plan(sizes=one.size)
    elif one.fault == "a budget":
        peaks = []
        for size in (None, 1):
            with_size = ours(Job(one), Plan(sizes=size, measures=True))
            if with_size.error is not None:
                return with_size, Plan(sizes=size)
            peaks.append(max(with_size.peaks))
        room = peaks[1] + (peaks[0] - peaks[1]) * (0.3 + 0.5 * one.fault_place)
        plan = Plan(sizes="auto", limit_bytes=int(room), fault=one.fault)
    else:
        sizes = [[one.size, one.second_size, 1]]
        counting = ours(Job(one), Plan(sizes=Scripted(sizes)))
        if counting.error is not None:
            return counting, Plan(sizes=one.size)
        operation = int(one.fault_place * counting.operations[one.fault_batch])
        plan = Plan(
            sizes=Scripted(sizes),
            fault=one.fault,
            batch=one.fault_batch,
            operation=operation,
        )
    return ours(Job(one), plan), plan


# After a fault: bit-identical to a run without it at the same sizes


def _faults(one: Combination, trace: Trace, plan: Plan) -> tuple[Verdict | None, str]:
    if trace.error is not None:
        text = f"{type(trace.error).__name__}: {trace.error}"[:300]
        is_loud = "Expected more than 1 value per channel" in text  # torch's error for a single row
        refused = is_loud or is_refusal(trace.error)
        return (Verdict.REFUSED if refused else Verdict.CRASH), text
    left = [part for part in trace.left_by_error if part != "attributes"]
    if left and not _may_excuse_state(one, trace, plan):
        return Verdict.SILENT, f"an error left changed: {left}"
    if plan.fault == "none":
        return None, ""
    twin = ours(Job(one), Plan(sizes=Scripted([[_size_of(cut)] for cut in trace.cuts])))
    if twin.error is not None:
        return Verdict.CRASH, f"without the fault: {type(twin.error).__name__}: {twin.error}"[:300]
    if twin.cuts != trace.cuts:
        return Verdict.CRASH, f"the twin was cut into {twin.cuts}, not {trace.cuts}"
    names = ("losses", "gradients", "parameters", "buffers", "attributes", "random", "metric")
    parts = [{name: getattr(run, name) for name in names} for run in (twin, trace)]
    differ = differing(*parts)
    if one.dtype != "float64":  # otherwise torch's bits depend on memory addresses
        close = 1e-4 if one.dtype == "float32" else 5e-2
        values = set(names) - {"attributes", "random"}
        differ = [
            name
            for name in differ
            if name not in values or relative_error(parts[1][name], parts[0][name]) > close
        ]
    if differ and not _may_excuse_state(one, trace, plan):
        return Verdict.SILENT, f"other than without the fault ({trace.ooms} ooms): {differ}"
    return None, ""


def _size_of(cut: Sequence[int]) -> int:
    """Return the size that leads to this cut; a smaller one if single rows are not allowed."""
    return max(cut) if len(_cut(sum(cut), max(cut))) == len(cut) else min(cut)


STATEFUL = (
    "carried state",
    "counted calls",
    "a history in a list",
    "rows counted",
    "cached by the largest batch",
    "counts its calls",
    "a counting closure",
    "a running baseline",
    "NumPy noise in a closure",
    "a teacher that trains its BatchNorm",
)


def _is_stateful(one: Combination) -> bool:
    return any(each in STATEFUL for each in (one.model, one.loss, one.wiring))


def _may_excuse_state(one: Combination, trace: Trace, plan: Plan) -> bool:
    """Return whether a warning names state that cannot be restored by any means.

    After an error, plain torch leaves it changed, too, and no warning is needed.
    """
    return _is_stateful(one) and (bool(trace.said) or plan.fault == "error at an operation")


# Comparison with plain torch


def _result(one: Combination, trace: Trace, whole: Trace) -> tuple[Verdict, str]:
    truth = whole
    if one.draws:
        truth_or_none = _drawn_truth(one, trace)
        if truth_or_none is None:  # no split of it is exact
            was_split = any(len(cut) > 1 for cut in trace.cuts)
            wrong = ["the loss compares rows that draw"] if was_split else []
            return _verdict(one, trace, wrong)
        truth = truth_or_none
    return _verdict(one, trace, wrong_parts(one, trace, truth, whole))


def _drawn_truth(one: Combination, trace: Trace) -> Trace | None:
    model, loss = one.parts
    trains_teacher = one.wiring == "a teacher that trains its BatchNorm"
    if loss.true is None or not model.splits or trains_teacher:
        return None
    with caught():
        return by_hand(Job(one), trace.cuts, loss.true)


def wrong_parts(one: Combination, trace: Trace, truth: Trace, whole: Trace) -> list[str]:
    """Return the parts that differ from the truth."""
    bound = TOLERANCE
    first_only = one.dtype != "float64"
    if first_only:
        exact = plainly_in_float64(one) if not one.draws else truth
        own = (
            max(
                relative_error(whole.gradients[0], exact.gradients[0]),
                relative_error(whole.losses[:1], exact.losses[:1]),
            )
            if not one.draws
            else 0.0
        )
        truth = exact
        bound = 6 * own + (2e-4 if one.dtype == "float32" else 4e-2)
    wrong = []
    for name in ("losses", "gradients", "parameters"):
        ours_, theirs = getattr(trace, name), getattr(truth, name)
        if first_only:
            ours_, theirs = ours_[:1], theirs[:1]
        if first_only and name == "parameters":
            continue
        errors = [relative_error(a, b) for a, b in zip(ours_, theirs, strict=True)]
        if not max(errors) <= bound:
            at = next(i for i, error in enumerate(errors) if not error <= bound)
            wrong.append(f"{name} by {errors[at]:.1e} at batch {at}")
    if trace.replaced != whole.replaced:
        wrong.append(f"gradients in other tensors: {trace.replaced}")
    if first_only:
        return wrong
    if relative_error(trace.buffers[-1], truth.buffers[-1]) > bound:
        wrong.append("buffers")
    if relative_error(_flat(trace.metric), _flat(truth.metric)) > 1e-6:
        wrong.append(f"the metric: {_flat(trace.metric)} for {_flat(truth.metric)}"[:120])
    if truth.evaluated and not one.draws:
        shared = trace.evaluated.keys() & truth.evaluated.keys()
        for name in sorted(shared):
            if relative_error(trace.evaluated[name], truth.evaluated[name]) > 1e-7:
                wrong.append(f"evaluate's {name}")
    if not is_same(trace.random, truth.random):
        changed = differing(truth.random, trace.random)
        wrong.append(f"random states: {changed}")
    if not _same_attributes(trace.attributes, truth.attributes):
        wrong.append(f"attributes: {differing(truth.attributes, trace.attributes)[:3]}")
    for index, (batch, plain, before) in enumerate(
        zip(trace.batches, whole.batches, _batches(one), strict=True)
    ):
        if not is_same(batch, before) and not is_same(batch, plain):
            wrong.append(f"the caller's batch {index}")
            break
    return wrong


def _same_attributes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        relative_error(
            [float(v) for v in one.values() if isinstance(v, int | float)],
            [float(v) for v in other.values() if isinstance(v, int | float)],
        )
        <= 1e-7
        and one.keys() == other.keys()
    )


def _batches(one: Combination) -> list[Any]:
    job = Job(one)
    return [
        job.make_batch(content.take(0, len(content)), index)
        for index, content in enumerate(job.contents)
    ]


def plainly_in_float64(one: Combination) -> Trace:
    """Run a low-precision job in float64, from the same parameters and batches."""
    job = Job(one)
    for module in job.modules().values():
        module.double()
    for leaf in job.extra.values():
        if isinstance(leaf, Tensor):
            leaf.data = leaf.data.double()
    job.contents = [
        dataclasses.replace(
            each,
            rows={n: v.double() if v.is_floating_point() else v for n, v in each.rows.items()},
        )
        for each in job.contents
    ]
    with caught():
        return plainly(job)


def _verdict(one: Combination, trace: Trace, wrong: Sequence[str]) -> tuple[Verdict, str]:
    said = trace.said
    kinds = {each.category for each in said}
    texts = " / ".join(f"{each.category.__name__}: {str(each.message)[:160]}" for each in said)
    if not said:
        return (Verdict.SILENT, "; ".join(wrong)) if wrong else (Verdict.EXACT, "")
    if all(UNCHECKED.search(str(each.message)) for each in said):
        return Verdict.UNCHECKED, texts
    if wrong:
        has_batchnorm = one.parts[0].has_batchnorm
        about_gradients = any(not each.startswith(("buffers", "attributes")) for each in wrong)
        both = {BatchNormWarning, LossAverageWarning}
        if about_gradients and has_batchnorm and one.has_wrong_average and not both <= kinds:
            return Verdict.HALF_NAMED, f"{'; '.join(wrong)}; said: {texts}"
        return Verdict.NAMED, texts
    if is_exact_at_every_size(one):
        return Verdict.FALSE_ALARM, texts
    return Verdict.NAMED, texts


def is_exact_at_every_size(one: Combination) -> bool:
    """Return whether pieces of 1, 2 and 3 rows, weighted as automicro does, give the whole.

    This is computed by hand in float64, without twists and faults. Random jobs use the declaration.
    """
    if not one.parts[0].splits:
        return False
    if one.model == "clamps its weight":
        return False  # parameters written by an attempt cannot be rolled back, and are named
    if one.metric == "a running window" or one.wiring == "a teacher that trains its BatchNorm":
        return False
    job = Job(one)
    if not all(one.taken(content.rows) for content in job.contents):
        return False  # a batch in which nothing counts deserves a warning
    if one.draws:
        return not job.buffers() and one.parts[1].true is one.taken
    bare = one.plain(dtype="float64")
    with caught():
        try:
            whole = plainly(Job(bare))
            for size in (1, 2, 3):
                cuts = [_cut(rows, size) for rows in one.num_rows]
                pieces = by_hand(Job(bare), cuts, one.taken)
                parts = ("losses", "gradients", "buffers")
                for name in parts:
                    pairs = zip(getattr(pieces, name), getattr(whole, name), strict=True)
                    if max(relative_error(a, b) for a, b in pairs) > TOLERANCE:
                        return False
                if not _same_attributes(pieces.attributes, whole.attributes):
                    return False
        except Exception:  # a failure of the pieces is no reason to be silent
            return False
    return True


def _cut(rows: int, size: int) -> list[int]:
    count = -(-rows // size)
    least, rest = divmod(rows, count)
    return [least + (index < rest) for index in range(count)]


# Comparison


def relative_error(ours_: Any, theirs: Any) -> float:
    """Return the largest relative error of any tensor, with a floor for tiny tensors."""
    one, other = _flat(ours_), _flat(theirs)
    if one.keys() != other.keys():
        return float("inf")
    norms = {name: float(value.norm()) for name, value in other.items() if value is not None}
    floor = 1e-6 * max(norms.values(), default=0.0) + 1e-30
    worst = 0.0
    for name, value in other.items():
        found = one[name]
        if (found is None) is not (value is None):
            # If nothing reached the parameter, a gradient of zero equals none.
            present = found if found is not None else value
            assert present is not None
            gap = float(present.norm()) / floor
        elif found is None or value is None:
            continue
        elif found.shape != value.shape:
            return float("inf")
        else:
            gap = float((found - value).norm()) / max(norms[name], floor)
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def _flat(value: Any, name: str = "") -> dict[str, Tensor | None]:
    if value is None:
        return {name: None}
    if isinstance(value, Tensor):
        return {name: value.detach().to_dense().double()}
    if isinstance(value, int | float):
        return {name: torch.tensor(float(value), dtype=torch.float64)}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    found: dict[str, Tensor | None] = {}
    for key, each in items:
        found.update(_flat(each, f"{name}.{key}"))
    return found
