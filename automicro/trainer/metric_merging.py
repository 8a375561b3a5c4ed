"""What several ranks have counted of one metric, put together for another number of ranks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from automicro.errors import CheckpointError

if TYPE_CHECKING:  # it takes seconds to import
    from torchmetrics import Metric

_TELLING = (type(None), bool, str, torch.dtype, torch.device)


def merge_counts(
    metric: Any, states: Sequence[Mapping[str, Any]], *, is_first: bool
) -> dict[str, Any]:
    """What one rank goes on with: the first with all that was counted, others with nothing.

    That is exact where what a metric reduces over ranks does not change by a rank that has
    counted nothing: sums from zero, the highest and the lowest, and what is put one after the
    other.

    Args:
        metric: of torchmetrics, or a collection of these; nothing about it is changed.
        states: of all ranks that saved it, as `MetricState` gives them.
        is_first: whether the rank is the first.

    Raises:
        CheckpointError: its counts cannot be put together, in words that follow its name.

    Example:
        >>> from torchmetrics import SumMetric
        >>> from automicro.trainer.metric_state import MetricState
        >>> metrics = SumMetric(), SumMetric()
        >>> saving = [MetricState(each) for each in metrics]
        >>> for metric, value in zip(metrics, (3.0, 4.0)):
        ...     metric.update(value)
        >>> states = [each.state_dict() for each in saving]
        >>> merge_counts(SumMetric(), states, is_first=True)["states"]
        {'sum_value': tensor(7.)}
        >>> merge_counts(SumMetric(), states, is_first=False)["states"]
        {'sum_value': tensor(0.)}
    """
    first = states[0]
    merged: dict[str, Any] = {"attributes": _merge_attributes(states)}
    if "own" in first:  # what a collection has of its metrics, each of which comes by itself
        return {"own": first["own"], **merged}
    updates = sum(each["updates"] for each in states)
    merged["states"] = {
        name: _merge_state(metric, name, [each["states"][name] for each in states], is_first)
        for name in metric.metric_state
    }
    # On all: who computes before any update of its own would be warned.
    return {**merged, "updates": updates}


def _merge_attributes(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Attributes that tell what is counted, and so are the same wherever they are."""
    merged: dict[str, Any] = {}
    for state in states:
        for name, value in state["attributes"].items():
            if not isinstance(value, _TELLING) or merged.setdefault(name, value) != value:
                raise CheckpointError(
                    f"keeps {name} outside of the states that torchmetrics reduces over ranks "
                    "(add_state)"
                )
    return merged


def _merge_state(metric: "Metric", name: str, values: Sequence[Any], is_first: bool) -> Any:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    elementwise: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        dim_zero_sum: torch.add,
        dim_zero_max: torch.maximum,
        dim_zero_min: torch.minimum,
    }
    reduce, default = metric._reductions[name], metric._defaults[name]
    if isinstance(default, list):
        if reduce is not dim_zero_cat:
            raise CheckpointError(f"has a list {name} that torchmetrics does not join over ranks")
        entries = [each for value in values for each in value]
        # Of their type: torchmetrics takes it to be the same on all ranks.
        return entries if is_first or not entries else [dim_zero_cat(entries[:1])[:0]]
    if reduce is dim_zero_cat and default.numel() == 0:
        return torch.cat(list(values)) if is_first else default.clone()
    default = default.to(values[0].device)
    if reduce in elementwise:
        put_together = elementwise[reduce]
        merged: Tensor = functools.reduce(put_together, values)
        nothing = default.expand_as(merged).clone()
        # What began elsewhere would count once more on each further rank.
        if torch.equal(put_together(merged, nothing), merged):
            return merged if is_first else nothing
    how = getattr(reduce, "__name__", reduce)
    raise CheckpointError(
        f"has a state {name} that torchmetrics reduces over ranks by {how} from {_shown(default)}, "
        "which other ranks that have counted nothing would change"
    )


def _shown(value: Tensor) -> str:
    return str(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
