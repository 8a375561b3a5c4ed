"""Metrics of training and evaluation by name, as plain numbers, and the state of their counts."""

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automicro.checkpoints.state import take_apart
from automicro.errors import CheckpointError, CheckpointWarning, add_note, warn
from automicro.memory.oom import once_more
from automicro.sharding import num_ranks
from automicro.step.metrics import flatten_metrics, is_of_torchmetrics
from automicro.values import same_values

if TYPE_CHECKING:
    from torchmetrics import Metric


def _match_peers(metrics: Sequence["Metric"]) -> None:
    """Give metrics without counts on this rank the dtypes and shapes that they have on others."""
    if not metrics or num_ranks() == 1:
        return
    blanks: list[Any] = [None] * num_ranks()
    dist.all_gather_object(blanks, [_blank(metric) for metric in metrics])
    for metric, *others in zip(metrics, *blanks, strict=True):
        elsewhere = next((each for each in others if each is not None), None)
        if metric.update_count == 0 and elsewhere is not None:
            for name, value in elsewhere.items():
                setattr(metric, name, _on_device_of(metric, value))
            metric._update_count = 1  # torchmetrics would warn of 0, but other ranks have counts


def _blank(metric: "Metric") -> dict[str, Any] | None:
    """Create empty states of the form that they have here; None if nothing was counted."""
    if metric.update_count == 0:
        return None
    found: dict[str, Any] = {}
    for name, value in metric.metric_state.items():
        default = metric._defaults[name]
        if isinstance(value, list):
            found[name] = [(each if each.dim() else each[None])[:0].cpu() for each in value[:1]]
        elif isinstance(default, Tensor) and default.numel() == 1:
            found[name] = default.expand(value.shape).to("cpu", value.dtype)
    return found


def _on_device_of(metric: Any, value: Any) -> Any:
    """Copy a state to the device of a metric."""
    if isinstance(value, list):
        return [each.to(metric.device) for each in value]
    return value.to(metric.device, copy=True) if isinstance(value, Tensor) else value


def model_metrics(model: Any, *, is_train: bool) -> dict[str, Any] | None:
    """Return the metrics by name of a model with Composer's interface, if any."""
    interface = ("loss", "eval_forward", "get_metrics")
    if not all(callable(getattr(model, name, None)) for name in interface):
        return None
    metrics = model.get_metrics(is_train=is_train)
    if metrics is None:
        return None
    if isinstance(metrics, Mapping | nn.ModuleDict):  # includes a MetricCollection
        return dict(metrics.items()) or None
    listed = metrics if isinstance(metrics, list | tuple) else [metrics]
    return {type(metric).__name__: metric for metric in listed} or None


class MetricSet:
    """Clones of metrics on the device.

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
                f"metrics is a {type(metrics).__name__}, but metrics need names. Pass a mapping "
                f"such as {{'accuracy': metric}}, or a torchmetrics.MetricCollection"
            )
        for metric in flatten_metrics(metrics):
            lacks = [name for name in ("compute", "reset") if not hasattr(metric, name)]
            if lacks:
                raise TypeError(
                    f"{metric!r} has no {' and no '.join(lacks)} method; pass a "
                    "torchmetrics.Metric, or an object with update, compute and reset"
                )
            if not is_of_torchmetrics(metric) and num_ranks() > 1:
                raise TypeError(
                    f"{metric!r} is not a torchmetrics.Metric, so its counts on {num_ranks()} "
                    "ranks cannot be summed. Make it a torchmetrics.Metric, with add_state"
                )
        # A collection is a module that updates its metrics itself; those of a mapping are updated
        # one by one.
        is_mapping = isinstance(metrics, Mapping) and not isinstance(metrics, nn.Module)
        by_name = dict(metrics) if is_mapping else {"": metrics} if metrics is not None else {}
        if "loss" in by_name or (not is_mapping and "loss" in getattr(metrics, "keys", dict)()):
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
        self._states = {name: _MetricState(metric) for name, metric in each.items()}

    @property
    def names(self) -> list[str] | None:
        """Names of all values or their prefixes; None if unknown before the values."""
        return None if "" in self._by_name else list(self._by_name)

    def reset(self) -> None:
        """Reset all counts."""
        for metric in self._by_name.values():
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts so far by the name of each metric."""
        return {name: each.state_dict() for name, each in self._states.items()}

    def differences(self, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """List the metrics that a state lacks, and those that only the state has, in words."""
        lacks = [name for name in self._states if name not in state]
        for name, each in self._states.items():
            if name in state and (reason := each.refusal(state[name])):
                lacks.append(f"{name} ({reason})")
        return lacks, [name for name in state if name not in self._states]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from `state_dict`; metrics that it lacks count from zero."""
        self.reset()
        for name, each in self._states.items():
            if self._is_of(name, state):
                each.load_state_dict(state[name])

    def between_epochs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without counts."""
        return {}

    def reshard(self, states: Sequence[Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
        """Convert the state for another number of ranks: rank 0 gets the counts of all ranks."""
        merged = {}
        for name, each in self._states.items():
            if not all(self._is_of(name, state) for state in states):
                continue  # a warning has named the dropped counts
            try:
                merged[name] = each.reshard([state[name] for state in states], rank=rank)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the metric {name} ({each.class_name}) {error}. Leave it out of the metrics "
                    "of training"
                ) from error
        return merged

    def _is_of(self, name: str, state: Mapping[str, Any]) -> bool:
        return name in state and self._states[name].refusal(state[name]) is None

    def compute(self) -> dict[str, float]:
        """Compute the values over all ranks by name (or ``name/index``); all must call this."""
        _match_peers(self._known)
        found: dict[str, float] = {}
        for name, metric in self._by_name.items():
            value = self._compute(name, metric)
            if not name and not isinstance(value, Mapping):
                name = type(metric).__name__
            found.update(_numbers(name, value))
        return found

    def _compute(self, name: str, metric: Any) -> Any:
        """Compute the value of a metric, again if memory runs out: it changes no counts."""
        try:
            if num_ranks() > 1:  # the other ranks would wait for a second attempt
                return metric.compute()
            return once_more(metric.compute, self._device, doing="computing a metric")
        except Exception as error:
            add_note(
                error, f"automicro: while computing the metric {name or type(metric).__name__!r}"
            )
            raise


def _each_by_name(metrics: Any, name: str = "") -> dict[str, Any]:
    """Collect every metric, including those inside others, by its place."""
    if isinstance(metrics, nn.Module):
        return {
            f"{name}.{place}".strip(".") or type(metrics).__name__: module
            for place, module in metrics.named_modules()
            if hasattr(module, "update") and not is_of_torchmetrics(module, "MetricCollection")
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


# The counts of one metric as tensors and plain values

_TELLING = (type(None), bool, str, torch.dtype, torch.device)


def _merge_attributes(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the attributes that describe the counts, which must be equal on all ranks."""
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
        # An empty entry keeps the dtype, which torchmetrics assumes to be equal on all ranks.
        return entries if is_first or not entries else [dim_zero_cat(entries[:1])[:0]]
    if reduce is dim_zero_cat and default.numel() == 0:
        return torch.cat(list(values)) if is_first else default.clone()
    default = default.to(values[0].device)
    if reduce in elementwise:
        put_together = elementwise[reduce]
        merged: Tensor = functools.reduce(put_together, values)
        nothing = default.expand_as(merged).clone()
        # A default that is not neutral would count once more on each additional rank.
        if torch.equal(put_together(merged, nothing), merged):
            return merged if is_first else nothing
    how = getattr(reduce, "__name__", reduce)
    raise CheckpointError(
        f"has a state {name} that torchmetrics reduces over ranks by {how} from {_shown(default)}, "
        "so ranks without counts would change it"
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return str(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"


class _MetricState:
    """Saves and restores a metric.

    >>> class Rows:
    ...     count = 0
    ...     def update(self, outputs):
    ...         self.count += len(outputs)
    >>> rows = Rows()
    >>> state = _MetricState(rows)
    >>> rows.update([1, 2, 3])
    >>> state.state_dict()["attributes"]
    {'count': 3}
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._is_known = is_of_torchmetrics(metric)
        self._saves_itself = not self._is_known and all(
            callable(getattr(metric, name, None)) for name in ("state_dict", "load_state_dict")
        )
        # A module's own state dict has its tensors, but no other attributes.
        is_module = isinstance(metric, nn.Module)
        self._has_attributes = is_module or not self._saves_itself
        of_all = _of_every_metric() if self._is_known else vars(nn.Module())
        self._ignored = frozenset(of_all) if is_module else frozenset()
        self._given = copy.deepcopy(self._data())
        self._has_warned = False

    @property
    def class_name(self) -> str:
        """Class name of the metric."""
        return type(self._metric).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        self._warn_of_other_attributes()
        changed = {
            name: value
            for name, value in self._data().items()
            if name not in self._given or not same_values(value, self._given[name])
        }
        return {
            "class": self.class_name,
            "own": self._metric.state_dict() if self._saves_itself else None,
            "states": dict(self._counts()),
            "updates": self._metric.update_count if self._is_known else 0,
            "attributes": changed,
        }

    def refusal(self, state: Mapping[str, Any]) -> str | None:
        """Explain why a state does not belong to this metric; None if it does."""
        here, saved = self._counts(), state["states"]
        if state["class"] != self.class_name:
            return f"there a {state['class']}"
        if (state["own"] is not None) != self._saves_itself or here.keys() != saved.keys():
            return f"its states are {', '.join(saved)}, here {', '.join(here)}"
        for name, value in here.items():
            # A state that starts as a scalar or empty can change its shape as it counts.
            is_list = isinstance(value, list)
            is_shaped = not is_list and value.dim() > 0 and value.numel() > 0
            if is_list != isinstance(saved[name], list) or (
                is_shaped and value.shape != saved[name].shape
            ):
                return f"its state {name} is {_shown(saved[name])}"
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from `state_dict` after a reset of the metric."""
        if self._saves_itself:
            self._metric.load_state_dict(state["own"])
        for name, value in state["attributes"].items():
            _put(self._metric, name, value)
        for name, value in state["states"].items():
            setattr(self._metric, name, _on_device_of(self._metric, value))
        if self._is_known:
            # torchmetrics counts the updates, and warns if a metric without any is computed.
            self._metric._update_count = state["updates"]

    def reshard(self, states: Sequence[Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
        """Convert the counts for another number of ranks: rank 0 gets the counts of all ranks.

        >>> from torchmetrics import SumMetric
        >>> metric = SumMetric()
        >>> metric.update(3.0)
        >>> saved = _MetricState(metric).state_dict()
        >>> merged = [_MetricState(metric).reshard([saved, saved], rank=rank) for rank in (0, 1)]
        >>> [each["states"]["sum_value"].item() for each in merged]
        [6.0, 0.0]
        """
        if not self._is_known:
            raise CheckpointError("is not a torchmetrics.Metric, so its counts cannot be summed")
        counts = {
            name: _merge_state(
                self._metric, name, [each["states"][name] for each in states], rank == 0
            )
            for name in self._metric.metric_state
        }
        return {
            **states[0],
            "attributes": _merge_attributes(states),
            "states": counts,
            # Set on all ranks, or torchmetrics would warn on a rank that computes before an update.
            "updates": sum(each["updates"] for each in states),
        }

    def _counts(self) -> dict[str, Any]:
        return self._metric.metric_state if self._is_known else {}

    def _attributes(self) -> dict[str, Any]:
        if not self._has_attributes:
            return {}
        attributes, states = getattr(self._metric, "__dict__", {}), self._counts()
        ignored = self._ignored | states.keys()
        return {name: value for name, value in attributes.items() if name not in ignored}

    def _data(self) -> dict[str, Any]:
        return {name: value for name, value in self._attributes().items() if _is_data(value)}

    def _warn_of_other_attributes(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        # Metrics of torchmetrics keep their counts in states, so other attributes do not matter.
        lost = [
            f"{name} (a {type(value).__name__})"
            for name, value in self._attributes().items()
            if not _is_data(value)
            and not callable(value)
            and not (self._is_known and not isinstance(value, deque | list | dict))
        ]
        if lost:
            warn(
                f"checkpoints cannot hold {', '.join(lost)} of the metric {self.class_name}, so a "
                "run resumed within an epoch loses its earlier counts. Give the metric state_dict "
                "and load_state_dict, with tensors and plain values",
                CheckpointWarning,
            )


def _of_every_metric() -> Mapping[str, Any]:
    """Collect the attributes that every metric of torchmetrics has."""
    from torchmetrics import Metric

    class Bare(Metric):
        def update(self) -> None: ...

        def compute(self) -> None: ...

    return vars(Bare())


def _is_data(value: Any) -> bool:
    """Whether a checkpoint can hold a value."""
    try:
        take_apart({"": value})
    except CheckpointError:
        return False
    return not isinstance(value, nn.Parameter)


def _put(metric: Any, name: str, value: Any) -> None:
    """Set an attribute, in place for containers."""
    # Other objects can share a container, and a defaultdict has its factory.
    old = getattr(metric, name, None)
    if isinstance(old, dict) and isinstance(value, dict):
        old.clear()
        old.update(value)
    elif isinstance(old, list) and isinstance(value, list):
        old[:] = value
    else:
        device = old.device if isinstance(old, Tensor) else getattr(metric, "device", None)
        is_moved = isinstance(value, Tensor) and isinstance(device, torch.device)
        setattr(metric, name, value.to(device) if is_moved else value)
