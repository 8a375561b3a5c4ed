"""What weights the rows of a batch have in its gradient: each is run by itself."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.checking.reading import Compared, loss_error, relative_errors
from automicro.errors import describe_error
from automicro.loss.averages import Average, Candidate, named
from automicro.loss.weights import microbatch_weights
from automicro.memory.oom import Failure, classify, ignoring_errors

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


def weights_by(
    average: Average, together: Any, parts: Sequence[Any], sizes: Sequence[int]
) -> list[float] | None:
    """The weights that an average gives to parts of rows; None where it cannot count them."""
    with ignoring_errors():  # of a candidate that does not suit this batch
        weights = microbatch_weights(average, together, parts, sizes)
        return [1.0 if weight is None else float(weight) for weight in weights]
    return None


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
