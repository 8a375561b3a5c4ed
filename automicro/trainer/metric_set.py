"""Metrics by name: separate for training and evaluation, given back as plain numbers."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from automicro.transaction import flatten_metrics


class MetricSet:
    """Clones of metrics, on the device.

    Args:
        metrics: a torchmetrics Metric (named after its class), a MetricCollection, or a mapping
            from names to these; None for no metrics.
        device: where the model's outputs are.

    Raises:
        TypeError: something in it is no metric.
        ValueError: a metric is called ``"loss"``, the name of the loss.

    >>> from torchmetrics import MeanMetric
    >>> metrics = MetricSet({"size": MeanMetric()}, torch.device("cpu"))
    >>> metrics.metrics["size"].update(torch.tensor([1.0, 2.0]))
    >>> metrics.compute()
    {'size': 1.5}
    """

    def __init__(self, metrics: Any, device: torch.device) -> None:
        if isinstance(metrics, list | tuple):
            raise TypeError(
                f"metrics is a {type(metrics).__name__}, and metrics need names: pass a mapping "
                "such as {'accuracy': metric}, or a torchmetrics.MetricCollection"
            )
        for metric in flatten_metrics(metrics):
            lacks = [name for name in ("compute", "reset") if not hasattr(metric, name)]
            if lacks:
                raise TypeError(
                    f"{metric!r} has no {' and no '.join(lacks)} method; pass a "
                    "torchmetrics.Metric, or an object with update, compute and reset"
                )
        # A collection is a module and hands its arguments on; a mapping is updated one by one.
        is_mapping = isinstance(metrics, Mapping) and not isinstance(metrics, nn.Module)
        by_name = dict(metrics) if is_mapping else {"": metrics} if metrics is not None else {}
        if "loss" in by_name or (not is_mapping and "loss" in _names(metrics)):
            raise ValueError(
                "a metric is called 'loss', which is the name of the loss in all results; "
                "give the metric another name"
            )
        self._by_name = {name: _clone(each, device) for name, each in by_name.items()}
        self.metrics: Any = None
        if self._by_name:
            self.metrics = self._by_name if is_mapping else self._by_name[""]

    def reset(self) -> None:
        """Count from zero."""
        for metric in self._by_name.values():
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """What was counted so far, by the place of each metric: tensors and plain values."""
        return {str(index): _state_of(metric) for index, metric in enumerate(self._each())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` gave.

        Raises:
            ValueError: of other metrics.
        """
        metrics = self._each()
        if len(state) != len(metrics):
            raise ValueError(
                f"it has {len(state)} metrics, and here are {len(metrics)}; pass the same metrics"
            )
        for index, metric in enumerate(metrics):
            _load_state(metric, state[str(index)])

    def _each(self) -> list[Any]:
        return flatten_metrics(self.metrics)

    def compute(self) -> dict[str, float]:
        """The values by name; of a metric with several values, each as ``name/index``."""
        found: dict[str, float] = {}
        for name, metric in self._by_name.items():
            value = metric.compute()
            if not name and not isinstance(value, Mapping):
                name = type(metric).__name__
            found.update(_numbers(name, value))
        return found


def _state_of(metric: Any) -> dict[str, Any]:
    """Of a torchmetrics metric its states, else what its own ``state_dict`` gives."""
    if not isinstance(metric, Metric):
        return metric.state_dict() if hasattr(metric, "state_dict") else {}
    states = {name: copy.copy(value) for name, value in metric.metric_state.items()}
    return {"states": states, "updates": metric.update_count}


def _load_state(metric: Any, state: Mapping[str, Any]) -> None:
    if not isinstance(metric, Metric):
        if hasattr(metric, "load_state_dict"):
            metric.load_state_dict(state)
        return
    metric.reset()
    for name, value in state["states"].items():
        put = [each.to(metric.device) for each in value] if isinstance(value, list) else value
        setattr(metric, name, put.to(metric.device) if isinstance(put, Tensor) else put)
    # torchmetrics counts updates itself, and a metric without any warns when it is computed.
    metric._update_count = state["updates"]


def _names(metrics: Any) -> list[str]:
    return list(metrics.keys()) if isinstance(metrics, Mapping) else []


def _clone(metric: Any, device: torch.device) -> Any:
    clone = metric.clone() if hasattr(metric, "clone") else copy.deepcopy(metric)
    if hasattr(clone, "to"):
        clone = clone.to(device)
    clone.reset()
    return clone


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(f"{name}/{key}" if name else str(key), each)
    elif isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0):
        for index, each in enumerate(value):
            yield from _numbers(f"{name}/{index}", each)
    else:
        yield name, float(value)
