"""Why the gradients of a few rows do not add up, and what to do about it.

After a look has shown that they do not, each row (or each pair) is run by itself. What weights the
rows have in the gradient of all says what the loss is: a sum, a mean over targets, a mean by
weights in the batch or by class, or no weighted sum of rows at all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.batch.layout import BatchLayout
from automicro.errors import describe_error
from automicro.loss.averages import Average, Candidate, Sum, candidates, named
from automicro.loss.informative_rows import Choice
from automicro.loss.look import Compared, CutRows, dense, look, loss_error, relative_errors
from automicro.loss.passes import Computation, ExtraPasses
from automicro.loss.weights import BatchWeights, CutBatch, microbatch_weights
from automicro.memory.oom import Failure, classify, ignoring_errors

_MAX_COORDINATES = 20_000
_CLOSE = 1e-3  # relative, of weights that were solved for
KEEP_WHOLE = "keep batches whole with microbatch_size=None"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows, together and in the smallest parts that can be run.

    Attributes:
        parts: which rows of the batch: one per part, or two where one alone fails.
        together: measured in one run.
        alone: the parts, measured in one run each.
    """

    parts: Sequence[Sequence[int]]
    together: Compared
    alone: Sequence[Compared]

    def error_of(self, weights: Sequence[float], name: str = "") -> float:
        """The relative error if the rows are added up with these weights.

        With a name, only that loss is looked at, and only its value.
        """
        used = [(weight, one) for weight, one in zip(weights, self.alone, strict=True) if weight]
        if name:
            total = sum(weight * one.losses.get(name, math.nan) for weight, one in used)
            return loss_error(total, self.together.losses[name])
        total = math.fsum(weight * one.loss for weight, one in used if math.isfinite(one.loss))
        gradients: dict[str, Tensor | None] = {}
        for key in self.together.gradients:
            parts = [
                (weight, g) for weight, one in used if (g := one.gradients.get(key)) is not None
            ]
            gradients[key] = (
                sum((w * g for w, g in parts[1:]), parts[0][0] * parts[0][1]) if parts else None
            )
        added = Compared(loss=total, gradients=gradients)
        return max(relative_errors(added, self.together).values(), default=0.0)

    def solve(self, tolerance: float) -> list[float] | None:
        """The weights with which the rows' gradients add up to the whole's; None without any."""
        finite = [row for row, one in enumerate(self.alone) if one.is_finite]
        if not finite:
            return None
        vectors = [_vector(self.alone[row], self.together) for row in finite]
        scales = [max(float(vector.norm()), 1e-30) for vector in vectors]
        columns = torch.stack([v / s for v, s in zip(vectors, scales, strict=True)], 1)
        wanted = _vector(self.together, self.together)
        solution = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0]
        residual = float((columns @ solution - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if not residual <= tolerance:
            return None
        weights = [0.0] * len(self.alone)
        for row, scale, value in zip(finite, scales, solution.tolist(), strict=True):
            weights[row] = value / scale
        return weights


def measure_rows(run: Callable[[Sequence[int]], Compared], indices: Sequence[int]) -> Rows | str:
    """Rows together and in parts, or why neither one nor two alone can be run.

    Args:
        run: forward and backward of the rows at these indices.
        indices: which.
    """
    together = run(indices)
    failure = ""
    for size in (1, 2):
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        if len(parts) > 1 and len(parts[-1]) < size:
            parts[-2:] = [[*parts[-2], *parts[-1]]]
        try:
            alone = [run(part) for part in parts]
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            failure = failure or describe_error(error)
        else:
            return Rows(parts=parts, together=together, alone=alone)
    return failure


def fitting_candidate(
    rows: Rows,
    tried: Sequence[Candidate],
    weights_of: Callable[[Candidate], Sequence[float] | None],
    tolerance: float,
    accepts: Callable[[Candidate], bool],
) -> Candidate | None:
    """The first average that explains the gradient of the rows; or one for each loss by name."""
    weights: dict[str, Sequence[float]] = {}
    for each in tried:
        found = weights_of(each)
        if found is None:
            continue
        weights[each.code] = found
        if rows.error_of(found) <= tolerance and accepts(each):
            return each
    choice = {}
    for name in rows.together.losses:
        fitting = [
            each
            for each in tried
            if each.code in weights and rows.error_of(weights[each.code], name) <= tolerance
        ]
        if not fitting:
            return None
        choice[name] = fitting[0]
    together = named(choice)
    return together if choice and accepts(together) else None


def explain(
    computation: Computation, batch: Any, choice: Choice, wrong: tuple[str, float], tolerance: float
) -> str:
    """What a loss is whose gradients do not add up as it was taken for, and the remedy.

    Args:
        computation: model and loss.
        batch: as a whole.
        choice: the rows that showed it.
        wrong: the parameter that is off most, and by how much.
        tolerance: relative errors up to this one count as rounding.

    Raises:
        BaseException: whatever the forward raises.
    """
    size, taken = _size(wrong), _taken(computation)
    rows = _measured(computation, batch, sorted(choice.rows))
    if isinstance(rows, str):
        return describe_failure(rows, choice.rows, sharing(computation, batch, choice))
    tolerance = max(tolerance, 1e-9)
    found = _candidate(computation, batch, choice, rows, tolerance)
    if found is not None:
        return f"{taken} {found.kind} ({size} otherwise): pass loss_average={found.code}"
    weights = rows.solve(max(math.sqrt(tolerance) * 1e-2, 10 * tolerance))
    slack = math.sqrt(tolerance)
    # Denominators that add up give weights that add up to one; a root of a mean does not.
    if (
        weights is not None
        and min(weights) >= -slack
        and abs(sum(weights) - 1) <= slack
        and not _divides_by_itself(rows)
        and not _are_configured(computation, batch, rows, weights)
    ):
        return (
            f"{taken} a weighted mean with other weights than rows (class weights, or a mean over "
            f"something else; {size} otherwise): pass loss_average=… as a callable that gives what "
            "a microbatch's loss was divided by"
        )
    if _has_constant_term(computation, batch, choice, tolerance):
        return (
            f"{taken} a sum over rows beside a term that does not come from rows, which each "
            "microbatch would add once more (a penalty on parameters, say). Return both in a "
            "mapping, {'rows': …, 'term': …}, with loss_average={'rows': 'none', 'term': 'samples'}"
            f", or {KEEP_WHOLE} ({size})"
        )
    return (
        f"{taken} that no weighting of rows gives the gradient of the batch ({size}): it compares "
        "rows (a contrastive loss, or another computation over the batch), or divides by "
        "something that all rows have a part in (a root, loss / loss.detach()). "
        f"{_several_parts(computation, batch, choice, rows)}Splitting changes its gradient; "
        f"{KEEP_WHOLE} (where whole batches do not fit, automicro.Contrastive runs encoders in "
        "slices, and compares all rows), or ask automicro.verify for the place"
    )


def _divides_by_itself(rows: Rows) -> bool:
    """Whether every row has the same loss, as ``loss / loss.detach()`` has."""
    losses = [one.loss for one in rows.alone if math.isfinite(one.loss)]
    return len(losses) > 2 and max(losses) - min(losses) <= 1e-6 * abs(max(losses))


def _several_parts(computation: Computation, batch: Any, choice: Choice, rows: Rows) -> str:
    """The remedy for a loss of several parts, where these names are accepted."""
    names = sorted(rows.together.losses)
    if len(names) < 2 or "" not in computation.averages:
        return ""
    shown = ", ".join(f"{name!r}: …" for name in names)
    with ignoring_errors(), ExtraPasses(computation) as passes:
        averages = computation.averages_of(dict.fromkeys(names, "samples"))
        cut = CutRows(replace(computation, averages=averages), batch, choice)
        passes.run(cut.together, cut.whole_weights)
        return f"Or its parts average over different things: pass loss_average={{{shown}}}. "
    return ""


def unexplained(computation: Computation, wrong: tuple[str, float], why: str) -> str:
    """That gradients do not add up, where the cause could not be looked for."""
    return (
        f"{_taken(computation)} that it is another ({_size(wrong)}); which one could not be found "
        f"out ({why}). Pass loss_average=…, {KEEP_WHOLE}, or ask automicro.verify"
    )


def taken_for(averages: Mapping[str, Average]) -> str:
    """What losses were taken for, in words."""
    return " and ".join(dict.fromkeys(each.describe() for each in averages.values()))


def _taken(computation: Computation) -> str:
    known = taken_for(computation.averages)
    return f"the loss was taken for {known}, but the gradients of a few rows show"


def _size(wrong: tuple[str, float]) -> str:
    name, error = wrong
    if error < 10:
        return f"{name} is off by {error:.1g} of itself"
    return f"{name} is off by {error:.1g} times itself"


def sharing(
    computation: Computation, batch: Any, choice: Choice
) -> dict[str, dict[str, int | str]]:
    """What else to declare so that parts have a loss, by path: matrices that may be no rows.

    They have as many columns as rows, as a mask over positions may.
    """
    dims, found = computation.layout.row_dims(batch), {}
    for path, leaf in computation.layout.leaves(batch):
        if path not in dims or leaf.layout is not torch.strided or leaf.dim() != 2:
            continue
        if leaf.shape[0] == leaf.shape[1]:
            declared = computation.layout.sharing(path)
            with ignoring_errors(), ExtraPasses(computation) as passes, torch.no_grad():
                for rows in (choice.small, choice.large):
                    passes.losses(BatchLayout(declared).take_rows(batch, rows))
                found[path] = declared
    return found


def describe_failure(
    failure: str, rows: Sequence[int], shared: Mapping[str, Mapping[str, int | str]]
) -> str:
    """What it means that a few rows, taken alone, have no loss although the whole batch has.

    Args:
        failure: of the forward.
        rows: that it was given.
        shared: what to declare for what may be no rows, by path; see `sharing`.
    """
    listed = " and ".join(map(str, sorted(rows)[:2]))
    told = "".join(
        f"Where {path!r} is the same for all rows, as a mask over positions is, declare "
        f"batch_layout={declared}. "
        for path, declared in list(shared.items())[:2]
    )
    return (
        f"the loss cannot be computed on rows {listed} alone ({failure}). {told}A loss or a "
        "target that refers to other rows of the batch, or a forward that writes out the batch "
        f"size or drops its dimension (.squeeze()), cannot be split; {KEEP_WHOLE}. Where rows "
        "come in groups, give sizes that hold whole ones (Halving(multiple_of=4)), and probe=False "
        "once automicro.verify(…, sizes=[8, 4]) says that these are exact"
    )


def _measured(computation: Computation, batch: Any, indices: Sequence[int]) -> Rows | str:
    names = computation.names()
    with ExtraPasses(computation) as passes:
        # By the losses as they are given: every weight is one.
        every = {name: Sum() for name in computation.averages}

        def run(rows: Sequence[int]) -> Compared:
            with on_host():
                taken = computation.layout.take_rows(batch, rows)
                cut = CutBatch(batch=taken, microbatches=[taken], sizes=[len(rows)])
            losses: dict[str, float] = {}
            loss = passes.run(taken, BatchWeights(every, [cut]), losses=losses)
            gradients = passes.take_gradients()
            count = sum(each.numel() for each in passes.leaves)
            step = max(1, count // _MAX_COORDINATES)
            # A forward may make leaves of its own, of as many rows as it is given.
            known = [
                (names.get(id(leaf), f"leaf {index}"), gradient)
                for index, (leaf, gradient) in enumerate(zip(passes.leaves, gradients, strict=True))
                if not names or id(leaf) in names
            ]
            thinned = {name: _thin(gradient, step) for name, gradient in known}
            return Compared(loss=loss, losses=losses, gradients=thinned)

        return measure_rows(run, indices)


def _thin(gradient: Tensor | None, step: int) -> Tensor | None:
    if gradient is None:
        return None
    return dense(gradient).reshape(-1)[::step].to("cpu", torch.float64)


def _candidate(
    computation: Computation, batch: Any, choice: Choice, rows: Rows, tolerance: float
) -> Candidate | None:
    if sum(one.norm > 0 for one in rows.alone) < 2:
        return None  # of a single row a sum and any mean look alike
    indices = [row for part in rows.parts for row in part]
    with on_host():
        together = computation.layout.take_rows(batch, indices)
        sizes = [len(part) for part in rows.parts]
        parts = computation.layout.split(together, sizes)
        tried = list(candidates(together, computation.convention))

    def weights_of(candidate: Candidate) -> list[float] | None:
        with on_host(), ignoring_errors():  # one that does not suit this batch
            average = computation.averages_of(candidate.value)[""]
            return weights_by(average, together, parts, sizes)
        return None

    def accepts(candidate: Candidate) -> bool:
        return _adds_up(computation, batch, choice, candidate.value)

    return fitting_candidate(rows, tried, weights_of, tolerance, accepts)


def _adds_up(computation: Computation, batch: Any, choice: Choice, loss_average: Any) -> bool:
    """Whether the same rows show nothing wrong any more with another ``loss_average``."""
    with ignoring_errors():
        averages = computation.averages_of(loss_average)
        seen = look(replace(computation, averages=averages), batch, choice)
        return seen.wrong is None and not seen.why
    return False


def _are_configured(
    computation: Computation, batch: Any, rows: Rows, weights: Sequence[float]
) -> bool:
    """Whether rows weigh as they were taken to, where one average holds for all losses."""
    average = computation.averages.get("")
    if average is None:
        return False
    indices = [row for part in rows.parts for row in part]
    with on_host():
        together = computation.layout.take_rows(batch, indices)
        sizes = [len(part) for part in rows.parts]
        parts = computation.layout.split(together, sizes)
        taken = weights_by(average, together, parts, sizes)
    return taken is not None and all(
        abs(a - b) <= _CLOSE * max(abs(b), 1e-3) for a, b in zip(weights, taken, strict=True)
    )


def weights_by(
    average: Average, together: Any, parts: Sequence[Any], sizes: Sequence[int]
) -> list[float] | None:
    """The weights that an average gives to parts of rows; None where it cannot count them."""
    with ignoring_errors():  # of a candidate that does not suit this batch
        weights = microbatch_weights(average, together, parts, sizes)
        return [1.0 if weight is None else float(weight) for weight in weights]
    return None


def _has_constant_term(
    computation: Computation, batch: Any, choice: Choice, tolerance: float
) -> bool:
    """Whether the rows' gradients add up once a term is taken off that each of them has whole."""
    small, large = _measured_parts(computation, batch, choice)
    if small is None or large is None:
        return False
    return _common(small) is not None and _agree(_common(small), _common(large), tolerance)


def _measured_parts(
    computation: Computation, batch: Any, choice: Choice
) -> tuple[Rows | None, Rows | None]:
    if min(len(choice.small), len(choice.large)) < 2:
        return None, None
    found = [_measured(computation, batch, sorted(part)) for part in (choice.small, choice.large)]
    small, large = (each if isinstance(each, Rows) else None for each in found)
    return small, large


def _common(rows: Rows) -> Tensor | None:
    """What a sum of rows counts too often, of each row."""
    if len(rows.parts) < 2:
        return None
    total: Tensor = torch.stack([_vector(one, rows.together) for one in rows.alone]).sum(0)
    return (total - _vector(rows.together, rows.together)) / (len(rows.parts) - 1)


def _agree(one: Tensor | None, other: Tensor | None, tolerance: float) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    size = float(one.norm())
    return size > 0 and float((one - other).norm()) <= 10 * tolerance * size


def _vector(measured: Compared, like: Compared) -> Tensor:
    """Gradients and loss as one vector, thinned out where it would be long.

    Args:
        measured: what to read.
        like: what has the entries that count; others are left out, missing ones are zero.
    """
    parts = []
    for name, expected in sorted(like.gradients.items()):
        if expected is not None:
            found = measured.gradients.get(name)
            parts.append((torch.zeros_like(expected) if found is None else found).reshape(-1))
    every = max(1, sum(part.numel() for part in parts) // _MAX_COORDINATES)
    flat = torch.cat([part[::every] for part in parts] or [torch.zeros(0, dtype=torch.float64)])
    return torch.cat([flat, torch.tensor([measured.loss], dtype=torch.float64)])
