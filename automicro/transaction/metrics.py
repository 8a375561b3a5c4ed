"""Metrics: updated with the rows of many microbatches as with those of one batch."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.torch_private import children_of


class Metrics:
    """Metrics of torchmetrics, collections and wrappers of them, or anything with ``update``.

    Compute groups are formed by all rows of a batch: torchmetrics forms them by the first update,
    where unlike metrics may look alike on one row, and stay merged.

    Args:
        metrics: flat, see `flatten_metrics`.
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._metrics = list(metrics)
        self._ungrouped: list[tuple[Any, Any]] = []
        self._grown: list[tuple[list[Any], int]] = []  # each with its elements before the batch

    def begin(self) -> None:
        """Take note of the lengths of lists, and form no compute groups meanwhile."""
        states = [values for metric in self._metrics for values in _growing_states(metric)]
        self._grown = [(values, len(values)) for values in states]
        self._ungrouped = [
            (metric, enabled)
            for metric in self._metrics
            if (enabled := _forms_groups(metric)) is not None
        ]
        for metric, _ in self._ungrouped:
            metric._enable_compute_groups = False

    def sort(self, cuts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Put the rows that lists of states have gained into the order of their batches.

        An update appends a tensor with an entry for each row, or something else, whose order then
        says nothing.

        Args:
            cuts: of each batch, the rows of every slice, and of each of its rows the place among
                the rows of all slices.
        """
        updates = sum(len(sizes) for sizes, _ in cuts)
        for values, before in {id(values): (values, n) for values, n in self._grown}.values():
            gained = values[before:]
            if len(gained) != updates:
                continue
            ordered: list[Any] = []
            for sizes, order in cuts:
                own, gained = gained[: len(sizes)], gained[len(sizes) :]
                ordered += [_in_order(own, order)] if _has_rows(own, sizes) else own
            values[before:] = ordered

    def prepare(self) -> None:
        for metric, enabled in self._ungrouped:
            metric._enable_compute_groups = enabled
            if any(each.update_count for each in metric.values(copy_state=False)):
                metric._merge_compute_groups()
                metric._state_is_copy = False
                metric._compute_groups_create_state_ref()
                metric._groups_checked = True
        self._ungrouped = []

    def commit(self) -> None:
        """Nothing is left to do."""

    def roll_back(self) -> None:
        """Capture puts back what they count."""
        self._ungrouped = []


def _has_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return all(
        isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
        for value, size in zip(values, sizes, strict=True)
    ) and all(value.shape[1:] == values[0].shape[1:] for value in values)


def _in_order(values: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    joined = torch.cat(list(values))
    return joined.index_select(0, torch.as_tensor(order, device=joined.device))


def _growing_states(metric: Any) -> list[list[Any]]:
    """Lists that torchmetrics promises only to append to."""
    if not _is_of_torchmetrics(metric, "Metric"):
        return []
    table = vars(metric)
    return [
        value
        for name, default in table.get("_defaults", {}).items()
        if isinstance(default, list) and isinstance(value := table.get(name), list)
    ]


def _forms_groups(metric: Any) -> Any:
    """How a collection forms groups, where it has yet to; else None."""
    if not _is_of_torchmetrics(metric, "MetricCollection") or metric._groups_checked:
        return None
    return metric._enable_compute_groups or None


def _is_of_torchmetrics(metric: Any, class_name: str) -> bool:
    # Whoever made such a metric has imported it; importing it takes seconds.
    kind = getattr(sys.modules.get("torchmetrics"), class_name, None)
    return kind is not None and isinstance(metric, kind)


def flatten_metrics(metrics: Any) -> list[Any]:
    """Every metric in a metric, a collection, a mapping or a sequence of them.

    Raises:
        TypeError: something in it has no ``update``.
    """
    if metrics is None:
        return []
    if isinstance(metrics, nn.Module):
        return _inside(metrics) or _refuse(metrics)
    if isinstance(metrics, Mapping):
        return [each for value in metrics.values() for each in flatten_metrics(value)]
    if isinstance(metrics, list | tuple):
        return [each for value in metrics for each in flatten_metrics(value)]
    return [metrics] if hasattr(metrics, "update") else _refuse(metrics)


def _inside(root: nn.Module) -> list[Any]:
    """The metrics in a module, itself included, each once."""
    found: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += reversed(children_of(module))
    return [module for module in found.values() if hasattr(module, "update")]


def _refuse(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        raise TypeError(
            f"a tensor of shape {tuple(value.shape)} was given where a metric belongs; pass inputs "
            "and targets as one batch: backward((inputs, targets))"
        )
    raise TypeError(
        f"{value!r} (of type {type(value).__name__}) is no metric: it has no update method; pass a "
        "torchmetrics.Metric, a MetricCollection, or a mapping from names to metrics"
    )
