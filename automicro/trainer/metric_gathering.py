"""Metrics of a rank that has counted nothing, made ready to be put together with the others'."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # it takes seconds to import
    from torchmetrics import Metric

_Form: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def match_peers(metrics: Sequence["Metric"]) -> None:
    """Give what has counted nothing here the types and shapes that it has elsewhere.

    torchmetrics takes what it gathers to be of one type and of as many dimensions on every rank,
    and a state takes these on with its first update. All ranks call it.

    Args:
        metrics: the same on all ranks.

    >>> match_peers([])
    """
    if not metrics or not (dist.is_available() and dist.is_initialized()):
        return
    world_size = dist.get_world_size()
    if world_size == 1:
        return
    forms: list[Any] = [None] * world_size
    dist.all_gather_object(forms, [_forms(metric) for metric in metrics])
    for metric, *others in zip(metrics, *forms, strict=True):
        elsewhere = next((each for each in others if each is not None), None)
        if metric.update_count == 0 and elsewhere is not None:
            _take_on(metric, elsewhere)


def _forms(metric: "Metric") -> dict[str, _Form | None] | None:
    """Of its states, by name; None where nothing was counted."""
    if metric.update_count == 0:
        return None
    return {name: _form(value) for name, value in metric.metric_state.items()}


def _form(value: Tensor | list[Tensor]) -> _Form | None:
    """For a list, that of its entries without the rows; None for an empty one."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    return (value[0].dtype, tuple(value[0].shape[1:])) if value else None


def _take_on(metric: "Metric", forms: dict[str, _Form | None]) -> None:
    for name, value in metric.metric_state.items():
        form = forms[name]
        if form is None:
            continue
        dtype, shape = form
        if isinstance(value, list):
            setattr(metric, name, [torch.empty((0, *shape), dtype=dtype, device=metric.device)])
        elif value.numel() == 1:
            setattr(metric, name, value.expand(shape).to(dtype, copy=True))
    metric._update_count = 1  # none at all would be warned of, and others have some
