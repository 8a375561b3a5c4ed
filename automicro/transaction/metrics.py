"""Metrics: what a failed attempt counted is uncounted."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Metrics:
    """Metrics of torchmetrics, collections and wrappers of them, or anything with ``update``.

    Tensor states are copied and list states remembered by their elements. Counters, caches and
    flags come back too. The containers and tensors themselves stay the same objects: members of a
    collection's compute group share them.
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._metrics = list(metrics)
        self._saved: list[tuple[Any, dict[str, Callable[[], Any]]]] = []

    def begin(self) -> None:
        for metric in self._metrics:
            saved = {name: _remember(value) for name, value in vars(metric).items()}
            self._saved.append((metric, saved))

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._saved.clear()

    def roll_back(self) -> None:
        for metric, saved in self._saved:
            attributes = {name: put_back() for name, put_back in saved.items()}
            vars(metric).clear()
            vars(metric).update(attributes)
        self._saved.clear()


def _remember(value: Any) -> Callable[[], Any]:
    """A function that puts a value back to what it is now, and returns it."""
    if isinstance(value, Tensor):
        return functools.partial(_put_tensor_back, value, value.detach().clone())
    if type(value) in (list, dict):
        return _remember_container(value)
    return lambda: value


def _put_tensor_back(tensor: Tensor, copy: Tensor) -> Tensor:
    if tensor.shape != copy.shape:
        return copy
    with torch.no_grad():
        return tensor.copy_(copy)


def _remember_container(value: Any) -> Callable[[], Any]:
    """Lists and dicts by their elements; tensors inside are appended, never written to."""
    if type(value) is list:
        elements = [_remember_container(element) for element in value]

        def put_list_back() -> Any:
            value[:] = [put_back() for put_back in elements]
            return value

        return put_list_back
    if type(value) is dict:
        items = {key: _remember_container(element) for key, element in value.items()}

        def put_dict_back() -> Any:
            restored = {key: put_back() for key, put_back in items.items()}
            value.clear()
            value.update(restored)
            return value

        return put_dict_back
    return lambda: value


def flatten_metrics(metrics: Any) -> list[Any]:
    """Every metric in a metric, a collection, a mapping or a sequence of them.

    Raises:
        TypeError: something in it has no ``update``.
    """
    if metrics is None:
        return []
    if isinstance(metrics, nn.Module):
        inner = [module for module in metrics.modules() if hasattr(module, "update")]
        return inner or _refuse(metrics)
    if isinstance(metrics, Mapping):
        return [each for value in metrics.values() for each in flatten_metrics(value)]
    if isinstance(metrics, list | tuple):
        return [each for value in metrics for each in flatten_metrics(value)]
    return [metrics] if hasattr(metrics, "update") else _refuse(metrics)


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
