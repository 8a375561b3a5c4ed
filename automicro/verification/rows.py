"""A few rows of the batch, each by itself: how the whole's gradient is made of theirs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.forward import Convention
from automicro.oom import Failure, classify
from automicro.probe import Pairs, telling_pairs
from automicro.verification.compare import Measured, loss_error, relative_errors
from automicro.verification.laboratory import Conditions, Laboratory
from automicro.weighting import Average, microbatch_weights

_MAX_ROWS = 12
_MAX_COORDINATES = 20_000


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows, together and in the smallest parts that can be run.

    Attributes:
        parts: which rows of the batch: one per part, or two where one alone fails.
        together: measured in one run.
        alone: the parts, measured in one run each.
    """

    parts: Sequence[Sequence[int]]
    together: Measured
    alone: Sequence[Measured]

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
            parts = [(weight, g) for weight, one in used if (g := one.gradients[key]) is not None]
            gradients[key] = (
                sum((w * g for w, g in parts[1:]), parts[0][0] * parts[0][1]) if parts else None
            )
        added = Measured(loss=total, gradients=gradients)
        return max(relative_errors(added, self.together).values(), default=0.0)

    def solve(self, tolerance: float) -> list[float] | None:
        """The weights with which the rows' gradients add up to the whole's; None without any."""
        finite = [row for row, one in enumerate(self.alone) if one.is_finite]
        if not finite:
            return None
        vectors = [_vector(self.alone[row]) for row in finite]
        scales = [max(float(vector.norm()), 1e-30) for vector in vectors]
        columns = torch.stack([v / s for v, s in zip(vectors, scales, strict=True)], 1)
        wanted = _vector(self.together)
        solution = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0]
        residual = float((columns @ solution - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if not residual <= tolerance:
            return None
        weights = [0.0] * len(self.alone)
        for row, scale, value in zip(finite, scales, solution.tolist(), strict=True):
            weights[row] = value / scale
        return weights


def measure_rows(
    laboratory: Laboratory, conditions: Conditions, indices: Sequence[int]
) -> Rows | str:
    """The rows together and in parts, or why neither one nor two alone can be run."""
    together = laboratory.whole(conditions, indices)
    failure = ""
    for size in (1, 2):
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        if len(parts) > 1 and len(parts[-1]) < size:
            parts[-2:] = [[*parts[-2], *parts[-1]]]
        try:
            alone = [laboratory.whole(conditions, part) for part in parts]
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            failure = failure or f"{type(error).__name__}: {error}"
        else:
            return Rows(parts=parts, together=together, alone=alone)
    return failure


def choose_rows(laboratory: Laboratory, convention: Convention) -> list[int]:
    """Rows that can tell one average from another: of other classes, sizes, ignored targets."""
    rows = _each_row(laboratory)
    classes = labels(rows, convention)
    first_of_class = {label: row for row, label in reversed(list(enumerate(classes)))}
    spread = [row * (len(rows) - 1) // (_MAX_ROWS - 1) for row in range(_MAX_ROWS)]
    pairs = telling(laboratory, convention).pairs
    chosen = [*(row for pair in pairs for row in pair), *first_of_class.values(), *spread]
    return sorted(list(dict.fromkeys(chosen))[:_MAX_ROWS])


def telling(laboratory: Laboratory, convention: Convention) -> Pairs:
    """Pairs of rows that differ in what a loss may count, and whether there are any."""
    rows = _each_row(laboratory)
    return telling_pairs(
        lambda indices: [rows[index] for index in indices],
        len(rows),
        len(laboratory.layout.leaves(laboratory.batch())),
        convention.targets,
    )


def _each_row(laboratory: Laboratory) -> list[Any]:
    batch = laboratory.batch()
    return laboratory.layout.split(batch, [1] * laboratory.layout.num_rows(batch))


def labels(rows: Sequence[Any], convention: Convention) -> list[int]:
    """The class of each row, where a row has one target that is an integer; else nothing."""
    try:
        targets = [convention.targets(row) for row in rows]
    except (ValueError, IndexError):
        return []
    if not all(isinstance(each, Tensor) and each.numel() == 1 for each in targets):
        return []
    if targets[0].is_floating_point():
        return []
    return [int(each) for each in targets]


def weights_by(average: Average, laboratory: Laboratory, rows: Rows) -> list[float] | None:
    """The weights that an average gives to these parts; None where it cannot count them."""
    batch = laboratory.batch([row for part in rows.parts for row in part])
    sizes = [len(part) for part in rows.parts]
    parts = laboratory.layout.split(batch, sizes)
    try:
        weights = microbatch_weights(average, batch, parts, sizes)
    except Exception:  # a candidate that does not suit this batch
        return None
    return [1.0 if weight is None else float(weight) for weight in weights]


def _vector(measured: Measured) -> Tensor:
    """Gradients and loss as one vector, thinned out where it would be long."""
    parts = [g.reshape(-1) for g in measured.gradients.values() if g is not None]
    every = max(1, sum(part.numel() for part in parts) // _MAX_COORDINATES)
    flat = torch.cat([part[::every] for part in parts] or [torch.zeros(0, dtype=torch.float64)])
    return torch.cat([flat, torch.tensor([measured.loss], dtype=torch.float64)])
