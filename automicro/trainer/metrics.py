"""Metrics by name: separate for training and evaluation, given back as plain numbers."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automicro.errors import CheckpointError, add_note
from automicro.memory.oom import once_more
from automicro.trainer.resume.metrics import MetricState, is_of_torchmetrics
from automicro.transaction.metrics import flatten_metrics

if TYPE_CHECKING:
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
        self._device = device
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
            _refuse_uncounted(metric)
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
        each = _each_by_name(self._by_name)
        self._known = [metric for metric in each.values() if is_of_torchmetrics(metric)]
        self._states = {name: MetricState(metric) for name, metric in each.items()}

    @property
    def names(self) -> list[str] | None:
        """The names of all values, or what these begin with; None where only values tell.

        >>> MetricSet(None, torch.device("cpu")).names
        []
        """
        return None if "" in self._by_name else list(self._by_name)

    def reset(self) -> None:
        """Count from zero."""
        for metric in self._by_name.values():
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """What was counted so far, by the name and the class of each metric."""
        return {
            name: {"class": each.class_name, **each.state_dict()}
            for name, each in self._states.items()
        }

    def differences(self, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """What a state lacks of these metrics, and what only it has, in words.

        Args:
            state: what `state_dict` gave, of whatever metrics.
        """
        lacks, extra = [], []
        for name, each in self._states.items():
            if name not in state:
                lacks.append(name)
            elif not self._is_of(name, state):
                reason = each.refusal(state[name])
                was = state[name]["class"]
                is_other = was != each.class_name
                lacks.append(f"{name} ({f'there a {was}' if is_other else reason})")
        extra += [name for name in state if name not in self._states]
        return lacks, extra

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` gave; what it lacks counts from zero."""
        self.reset()
        for name, each in self._states.items():
            if self._is_of(name, state):
                each.load_state_dict(state[name])

    def reshard(self, states: Sequence[Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
        """The state for a rank, where another number of ranks has counted.

        The first goes on with what all have counted, the others with nothing.

        Args:
            states: what `state_dict` gave on each of them.
            rank: the one that goes on.

        Raises:
            CheckpointError: the counts of a metric cannot be put together.
        """
        merged = {}
        for name, each in self._states.items():
            if not all(self._is_of(name, state) for state in states):
                continue  # it was said what of that is dropped
            try:
                counts = each.reshard([state[name] for state in states], rank=rank)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the metric {name} ({each.class_name}) {error}; leave it out of the metrics "
                    "of training"
                ) from error
            merged[name] = {"class": each.class_name, **counts}
        return merged

    def _is_of(self, name: str, state: Mapping[str, Any]) -> bool:
        if name not in state or state[name]["class"] != self._states[name].class_name:
            return False
        return self._states[name].refusal(state[name]) is None

    def compute(self) -> dict[str, float]:
        """The values by name; of a metric with several values, each as ``name/index``.

        Those of all ranks together, which all call it.
        """
        match_peers(self._known)
        found: dict[str, float] = {}
        for name, metric in self._by_name.items():
            value = self._compute(name, metric)
            if not name and not isinstance(value, Mapping):
                name = type(metric).__name__
            found.update(_numbers(name, value))
        return found

    def _compute(self, name: str, metric: Any) -> Any:
        """One metric's value: computing changes no counts, so that it may be done again."""
        try:
            if _has_peers():  # who would wait for it
                return metric.compute()
            return once_more(metric.compute, self._device, doing="computing a metric")
        except Exception as error:
            add_note(
                error, f"automicro: while computing the metric {name or type(metric).__name__!r}"
            )
            raise


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _refuse_uncounted(metric: Any) -> None:
    """Refuse a metric that would know the rows of one rank only."""
    if not is_of_torchmetrics(metric) and _has_peers():
        raise TypeError(
            f"{metric!r} is no torchmetrics.Metric, and nothing adds up what it counts on each of "
            f"{dist.get_world_size()} ranks; make it a torchmetrics.Metric, with add_state"
        )


def _each_by_name(metrics: Any, name: str = "") -> dict[str, Any]:
    """Every metric, also those within others, by its place."""
    if isinstance(metrics, nn.Module):
        return {
            f"{name}.{place}".strip(".") or type(metrics).__name__: module
            for place, module in metrics.named_modules()
            if hasattr(module, "update")
        }
    if isinstance(metrics, Mapping):
        return {
            place: each
            for key, value in metrics.items()
            for place, each in _each_by_name(value, f"{name}.{key}".strip(".")).items()
        }
    if isinstance(metrics, list | tuple):
        return _each_by_name(dict(enumerate(metrics)), name)
    return {name or type(metrics).__name__: metrics}


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
