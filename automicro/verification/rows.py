"""A few rows of the batch, in the laboratory: which to take, and what they are labelled with."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from automicro.forward import Convention
from automicro.probe.causes import Rows, measure_rows, weights_by
from automicro.probe.rows import Choice, choose_rows
from automicro.slicing import tensor_leaves
from automicro.verification.laboratory import Conditions, Laboratory
from automicro.weighting import Average

_MAX_ROWS = 12


def measure(laboratory: Laboratory, conditions: Conditions, indices: Sequence[int]) -> Rows | str:
    """The rows together and in parts, or why neither one nor two alone can be run."""
    return measure_rows(lambda rows: laboratory.whole(conditions, rows), indices)


def choose(laboratory: Laboratory) -> Choice:
    """Rows that can tell one average from another: of other classes, sizes, ignored targets."""
    batch = laboratory.batch()
    layout = laboratory.layout
    return choose_rows(layout, batch, layout.num_rows(batch), most=_MAX_ROWS)


def can_tell(laboratory: Laboratory, convention: Convention) -> bool:
    """Whether rows differ in how many targets, or how much weight, a loss may count."""
    batch = laboratory.batch()
    try:
        targets = convention.targets(batch)
    except (ValueError, IndexError):
        targets = None
    paths = {path for path, leaf in tensor_leaves(batch) if leaf is targets}
    return not any(
        kind in ("weight", "size") or (kind == "valid" and path in paths)
        for path, kind in choose(laboratory).pending
    )


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


def weights_in(average: Average, laboratory: Laboratory, rows: Rows) -> list[float] | None:
    """The weights that an average gives to these parts; None where it cannot count them."""
    batch = laboratory.batch([row for part in rows.parts for row in part])
    sizes = [len(part) for part in rows.parts]
    return weights_by(average, batch, laboratory.layout.split(batch, sizes), sizes)
