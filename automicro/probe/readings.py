"""What a loss could be a mean over, judged by what lies in the batch."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.slicing import tensor_leaves
from automicro.weighting import IGNORED, Tokens


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One thing that a loss could be.

    Attributes:
        text: what it would be, and the remedy.
        weights: what the parts of each comparison would weigh, in the order of the comparisons.
        needs_proof: whether it could explain losses of zero by chance, as classes do that are
            taken for weights.
    """

    text: str
    weights: Sequence[tuple[float, float]]
    needs_proof: bool = False


def readings(
    parts: Sequence[tuple[Any, Any]], find_targets: Callable[[Any], Any]
) -> Iterator[Reading]:
    """The means over targets or over weights in the batch that are possible.

    Args:
        parts: two batches of rows for each comparison.
        find_targets: finds the targets in a batch.
    """
    shifted = (
        "the labels are shifted by one, so pass loss_average="
        f"{_counting_after_the_first(parts[0][0], find_targets)}"
    )
    over = "a mean over the targets that are not ignored: "
    for text, tokens in (
        (f"{over}pass loss_average='tokens'", Tokens(find_targets)),
        (f"{over}{shifted}", Tokens(find_targets, shift=1)),
    ):
        try:
            counts = [_target_counts(tokens, pair) for pair in parts]
        except (ValueError, IndexError):  # no targets to be found: no such reading
            continue
        yield Reading(text=text, weights=counts)
    leaves = [[dict(tensor_leaves(part)) for part in pair] for pair in parts]
    first = leaves[0][0]
    # Weights are floats as a rule; of integers, a mask comes to mind before classes or lengths.
    for path in sorted(first, key=lambda path: _rank(first[path])):
        if not all(_may_weigh(each.get(path)) for pair in leaves for each in pair):
            continue
        sums = [(_sum(one[path]), _sum(other[path])) for one, other in leaves]
        yield Reading(
            text=f"a mean weighted by {path!r}: pass loss_average=lambda microbatch: "
            f"{_expression(parts[0][0], path)}.sum()",
            weights=sums,
            needs_proof=not first[path].is_floating_point(),
        )


def _counting_after_the_first(batch: Any, find_targets: Callable[[Any], Any]) -> str:
    """A function to copy that counts the targets which a loss on shifted labels averages over."""
    try:
        targets = find_targets(batch)
    except (ValueError, IndexError):
        targets = None
    path = next((path for path, leaf in tensor_leaves(batch) if leaf is targets), None)
    place = None if path is None else _expression(batch, path, name="batch")
    if place is None or "…" in place:
        return "… as a callable that counts the targets after the first"
    return f"lambda batch: ({place}[..., 1:] != {IGNORED}).sum()"


def _target_counts(tokens: Tokens, pair: tuple[Any, Any]) -> tuple[float, float]:
    one, other = (tokens.denominators(part, [part], [1]) for part in pair)
    assert one is not None
    assert other is not None
    return float(one[0]), float(other[0])


def _may_weigh(leaf: Tensor | None) -> bool:
    if (
        leaf is None
        or leaf.layout is not torch.strided
        or leaf.is_nested
        or leaf.is_complex()
        or leaf.dim() == 0
    ):
        return False
    return not bool((leaf < 0).any())


def _rank(leaf: Tensor) -> int:
    return 0 if leaf.is_floating_point() else 1 if leaf.dtype == torch.bool else 2


def _sum(leaf: Tensor) -> float:
    is_narrow = leaf.is_floating_point() and leaf.device.type != "mps"
    return float(leaf.double().sum() if is_narrow else leaf.sum())


def _expression(batch: Any, path: str, *, name: str = "microbatch") -> str:
    """How to reach what lies at a path, such as ``microbatch['masks'][0]``."""
    keys, text = path.split("."), name
    while keys:
        for length, key in enumerate(itertools.accumulate(keys, "{}.{}".format), start=1):
            found = _step(batch, key)
            if found is not None:
                step, batch = found
                text, keys = text + step, keys[length:]
                break
        else:
            return "…"
    return text


def _step(value: Any, key: str) -> tuple[str, Any] | None:
    if isinstance(value, Mapping):
        return (f"[{key!r}]", value[key]) if key in value else None
    if isinstance(value, Sequence) and key.isdecimal():
        return f"[{key}]", value[int(key)]
    return (f".{key}", getattr(value, key)) if hasattr(value, key) else None
