"""Whether the outputs of a few rows are the same when these are computed in two parts.

A prediction has no loss to compare. Where a batch is split, and the output of a row depends on the
rows beside it or there is not one for each row, microbatches joined are not what the whole gives.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.batch.cutting import concat_rows
from automicro.batch.device import on_host
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError
from automicro.loss.conventions import outputs_with_rows
from automicro.loss.informative_rows import Choice
from automicro.loss.look import CLEARLY, limits_of
from automicro.loss.passes import Computation, ExtraPasses, Mode
from automicro.loss.whole_look import shaken_bits

_LEAST_SCALE = 0.01  # an output near zero may be the difference of numbers near one
WHAT_HAS_ROWS = (
    "Return what has its rows in the first dimension, leave it out of the outputs, or let a metric "
    "count it"
)
_KEEP_WHOLE = "keep batches whole with eval_microbatch_size=None"


@dataclass(frozen=True, kw_only=True)
class OutputsSeen:
    """What one look has shown of each output.

    Attributes:
        wrong: what is wrong with it and the remedy, by its path.
        right: paths of those that are the same in parts, or have the same shape where they are
            whole numbers, which rounding may turn over.
    """

    wrong: Mapping[str, str]
    right: frozenset[str] = frozenset()


def look_at_outputs(
    computation: Computation, batch: Any, choice: Choice, mode: Mode
) -> OutputsSeen | None:
    """Compare the outputs of some rows with those of two parts of them, from the state as it is.

    None where that tells nothing: they are others when they are computed once more, or something
    draws that cannot be held constant. Called in evaluation mode, without gradients.

    Args:
        computation: model and loss.
        batch: as a whole.
        choice: of rows.
        mode: which forward.

    Raises:
        CollectiveError: the forward was about to communicate with other ranks.
        BaseException: whatever the forward raises on these rows.
    """
    with on_host():
        together, small, large = (
            computation.layout.take_rows(batch, each)
            for each in (choice.rows, choice.small, choice.large)
        )
    with ExtraPasses(computation) as passes, torch.no_grad():
        drew = False

        def outputs_of(rows: Any) -> Any:
            nonlocal drew
            outputs = outputs_with_rows(passes.losses(rows, mode=mode).outputs)
            drew |= bool(passes.foreign_draws() or passes.silence.unsilenced)
            return map_tensors(outputs, lambda tensor: tensor.detach().clone())

        whole, again = outputs_of(together), dict(tensor_leaves(outputs_of(together)))
        leaves = dict(tensor_leaves(whole))
        parts = outputs_of(small), outputs_of(large)
        wrong = _along_other_dimensions(leaves, parts, choice)
        joined: dict[str, Tensor] = {}
        if not wrong:
            try:
                joined = dict(tensor_leaves(concat_rows(parts)))
            except BatchError:  # so it is of microbatches, where it is said
                return None
            wrong = _of_other_lengths(leaves, joined, len(choice.rows))
        used = passes.silence.dtypes | {each.dtype for each in leaves.values()}
        tolerance = limits_of(used, computation.device).own
        gaps = {
            path: _gap(leaf, joined[path])
            for path, leaf in leaves.items()
            if path in joined and not wrong and leaf.shape == joined[path].shape
        }
        limits = {path: tolerance * max(_LEAST_SCALE, _size(leaf)) for path, leaf in leaves.items()}
        if any(_gap(leaf, again.get(path)) > limits[path] for path, leaf in leaves.items()):
            return None
        apart = {path: gap for path, gap in gaps.items() if gap > limits[path]}
        for bits in shaken_bits(used) if apart else ():
            with passes.shaken(bits):
                moved = dict(tensor_leaves(outputs_of(together)))
            apart = {
                path: gap
                for path, gap in apart.items()
                if gap > limits[path] + CLEARLY * _gap(leaves[path], moved.get(path))
            }
    if drew:
        return None
    for path, gap in apart.items():
        wrong[path] = _depends(path, gap / max(_LEAST_SCALE, _size(leaves[path])), choice)
    return OutputsSeen(wrong=wrong, right=frozenset(gaps.keys() - apart.keys()))


def _along_other_dimensions(
    leaves: Mapping[str, Tensor], parts: tuple[Any, Any], choice: Choice
) -> dict[str, str]:
    """What has the rows in another dimension than the first, or in it as well."""
    small, large = (dict(tensor_leaves(part)) for part in parts)
    counts = len(choice.rows), len(choice.small), len(choice.large)
    found = {}
    for path, leaf in leaves.items():
        every = [leaf, small.get(path), large.get(path)]
        shapes = [tuple(each.shape) for each in every if each is not None and not each.is_nested]
        if len(shapes) < len(every) or len(set(map(len, shapes))) > 1:
            continue
        dims = (dim for dim in range(1, leaf.dim()) if counts == tuple(s[dim] for s in shapes))
        dim = next(dims, None)
        if dim is not None:
            found[path] = (
                f"{_named(path)} has the shape {shapes[0]} for {counts[0]} rows and {shapes[2]} "
                f"for {counts[2]}: its dimension {dim} has the rows, too, and outputs of "
                f"microbatches are joined along the first. {WHAT_HAS_ROWS}, or {_KEEP_WHOLE}"
            )
    return found


def _of_other_lengths(
    leaves: Mapping[str, Tensor], joined: Mapping[str, Tensor], num_rows: int
) -> dict[str, str]:
    """What has other entries where it is joined from parts than for all rows together."""
    found = {}
    for path in leaves.keys() ^ joined.keys() or leaves.keys():
        one, other = leaves.get(path), joined.get(path)
        if one is None or other is None:  # a list that is as long for all rows
            while path and not all(_entries(path, each) for each in (leaves, joined)):
                path = path.rpartition(".")[0]
            lengths = [_entries(path, leaves), _entries(path, joined)]
        elif one.is_nested:
            continue
        else:
            lengths = [one.shape[0], other.shape[0]]
        if lengths[0] == lengths[1]:
            continue
        found[path] = (
            f"{_named(path)} has {lengths[0]} entries for {num_rows} rows, and {lengths[1]} where "
            "it is joined from two parts of these, so it is not one per row (a table of the "
            "model's, a histogram, a list of layers, what is kept of all rows?). "
            f"{WHAT_HAS_ROWS}, or {_KEEP_WHOLE}"
        )
    return found


def _entries(path: str, leaves: Mapping[str, Tensor]) -> int:
    """How many entries a list has; none where there is no such list."""
    prefix = f"{path}." if path else ""
    inside = [each.removeprefix(prefix) for each in leaves if each.startswith(prefix)]
    return len({each.partition(".")[0] for each in inside})


def _depends(path: str, share: float, choice: Choice) -> str:
    return (
        f"{_named(path)} of a row depends on the rows that are computed with it: for "
        f"{len(choice.rows)} rows it differs by {share:.2g} of its size when these are computed in "
        "two parts (a mean or a softmax over the rows, state that each call moves?), so a batch "
        "that is split gives other outputs than as a whole. Compute what all rows have a part in "
        f"before the batch is cut, and give it along with the rows, or {_KEEP_WHOLE}"
    )


def _named(path: str) -> str:
    return f"the output {path!r}" if path else "the output"


def _size(leaf: Tensor) -> float:
    """The largest number in it that is finite."""
    if not _has_fractions(leaf):
        return 0.0
    sizes = _wide(leaf).abs()
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max())


def _gap(one: Tensor, other: Tensor | None) -> float:
    """The largest difference; none of what cannot be compared, or has no fractions."""
    if other is None or one.shape != other.shape:
        return math.inf
    if not _has_fractions(one):
        return 0.0
    a, b = _wide(one), _wide(other)
    is_same = (a == b) | (a.isnan() & b.isnan())
    gap = float(torch.where(is_same, 0.0, (a - b).abs()).max())
    return math.inf if math.isnan(gap) else gap


def _has_fractions(leaf: Tensor) -> bool:
    is_plain = leaf.layout is torch.strided and not leaf.is_nested and leaf.numel() > 0
    return is_plain and (leaf.is_floating_point() or leaf.is_complex())


def _wide(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.is_floating_point() and leaf.dtype.itemsize < 4 else leaf
