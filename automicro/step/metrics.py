"""Metrics, updated by many microbatches as by one batch, with warnings if that is impossible."""

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.checking.bench import tried
from automicro.checking.reading import Reading, gaps
from automicro.errors import BatchError, Bystander, MetricWarning, blame, warn
from automicro.state.part import State
from automicro.step.feature import Attempt, Feature, MicrobatchRun
from automicro.step.outputs import order_of
from automicro.torch_private import children_of
from automicro.transaction.transaction import Part, Transaction

UpdateMetric = Callable[[Any, Any, Any], None]

_MOST_CHECKS = 3
_MOST_ROWS = 16
_ROUNDING = 1e-6
_EPS = 16.0  # times that of the outputs


class Metrics:
    """Metrics of torchmetrics, collections and wrappers of them, or any objects with ``update``."""

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._metrics = list(metrics)
        self._ungrouped: list[tuple[Any, Any]] = []
        self._grown: list[tuple[list[Any], int]] = []  # each with its length before the batch

    def begin(self) -> None:
        """Record the lengths of lists of states, and disable compute groups during the batch."""
        states = [values for metric in self._metrics for values in _growing_states(metric)]
        self._grown = [(values, len(values)) for values in states]
        self._ungrouped = [
            (metric, enabled)
            for metric in self._metrics
            if (enabled := _forms_groups(metric)) is not None
        ]
        # torchmetrics groups metrics after the first update and never separates them: on the few
        # rows of one microbatch, different metrics might have equal states.
        for metric, _ in self._ungrouped:
            metric._enable_compute_groups = False

    def sort(self, cuts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Restore the order of the batch in the rows that lists of states have gained."""
        # An update appends a tensor with an entry for each row, or something else, whose order has
        # no meaning.
        updates = sum(len(sizes) for sizes, _ in cuts)
        # Metrics of one compute group share their lists, so sort each list only once.
        for values, before in {id(values): (values, n) for values, n in self._grown}.values():
            gained = values[before:]
            # If a metric gains more than one entry per update, its layout is unknown: leave it.
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
            # Without any update all states are equal, and all metrics would be merged.
            if any(each.update_count for each in metric.values(copy_state=False)):
                # The same as `MetricCollection.update` does after its first update.
                metric._merge_compute_groups()
                metric._state_is_copy = False
                metric._compute_groups_create_state_ref()
                metric._groups_checked = True
        self._ungrouped = []

    def commit(self) -> None:
        """Do nothing."""

    def roll_back(self) -> None:
        """Restore only the grouping; capture restores the counts."""
        self._ungrouped = []


def _has_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return all(
        isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
        for value, size in zip(values, sizes, strict=True)
    ) and all(value.shape[1:] == values[0].shape[1:] for value in values)


def _in_order(values: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    # One tensor replaces several: in the end torchmetrics joins them, too.
    joined = torch.cat(list(values))
    return joined.index_select(0, torch.as_tensor(order, device=joined.device))


def _growing_states(metric: Any) -> list[list[Any]]:
    """Return the lists that torchmetrics promises only to append to."""
    if not is_of_torchmetrics(metric):
        return []
    table = vars(metric)
    return [
        value
        for name, default in table.get("_defaults", {}).items()
        if isinstance(default, list) and isinstance(value := table.get(name), list)
    ]


def _forms_groups(metric: Any) -> Any:
    """Return how a collection will form groups; None if it already has, or does not."""
    if not is_of_torchmetrics(metric, "MetricCollection") or metric._groups_checked:
        return None
    return metric._enable_compute_groups or None


def is_of_torchmetrics(metric: Any, class_name: str = "Metric") -> bool:
    """Whether a metric is one of torchmetrics, without importing it.

    >>> is_of_torchmetrics("accuracy")
    False
    """
    # Importing torchmetrics takes seconds, and code that made a metric has already imported it.
    kind = getattr(sys.modules.get("torchmetrics"), class_name, None)
    return kind is not None and isinstance(metric, kind)


def flatten_metrics(metrics: Any) -> list[Any]:
    """Return every metric in a metric, a collection, a mapping or a sequence of them."""
    if metrics is None:
        return []
    if isinstance(metrics, nn.Module):
        # Wrappers and collections are modules that hold the metrics that count.
        return _inside(metrics) or _refuse(metrics)
    if isinstance(metrics, Mapping):
        return [each for value in metrics.values() for each in flatten_metrics(value)]
    if isinstance(metrics, list | tuple):
        return [each for value in metrics for each in flatten_metrics(value)]
    if inspect.isfunction(getattr(metrics, "update", None)) and isinstance(metrics, type):
        raise TypeError(f"metrics holds the class {metrics.__name__}. Pass an instance of it")
    return [metrics] if hasattr(metrics, "update") else _refuse(metrics)


def _by_name(metrics: Any) -> Mapping[str, Any]:
    """Return metrics by the caller's names, or by those of their classes."""
    if isinstance(metrics, Mapping) and not isinstance(metrics, nn.Module):
        return metrics
    found: dict[str, Any] = {}
    for each in metrics if isinstance(metrics, list | tuple) else [metrics]:
        name = type(each).__name__
        found[f"{name} {len(found)}" if name in found else name] = each
    return found


def _inside(root: nn.Module) -> list[Any]:
    """Return the metrics in a module, including itself, each once."""
    found: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            # Keep the order of the caller, because names are numbered in it.
            waiting += reversed(children_of(module))
    return [module for module in found.values() if hasattr(module, "update")]


def _refuse(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        raise TypeError(
            f"a tensor of shape {tuple(value.shape)} is not a metric. Pass inputs and targets as "
            "one batch: backward((inputs, targets))"
        )
    raise TypeError(
        f"{value!r} (of type {type(value).__name__}) is not a metric: it has no update method. "
        "Pass a torchmetrics.Metric, a MetricCollection, or a mapping from names to metrics"
    )


@dataclass(slots=True)
class _Known:
    """A metric, kept so that its id is not reused."""

    metric: Any
    checks: int = 0
    # Consecutive batches in which it did not test its numbers: observing it costs time.
    silent: int = 0


class MetricGuard:
    """The guard that warns once of each metric whose value changes when a batch is split."""

    # For metrics of torchmetrics the answer is known, except for those that take logits: if all
    # numbers of an update lie between 0 and 1, they treat them as probabilities. The guard notices
    # if microbatches of one batch disagree. Any other metric, and any that a function of the caller
    # updates, is checked in the first microbatches: it counts a few rows in one update and in two,
    # the values are compared, and everything is rolled back.
    def __init__(
        self,
        update: UpdateMetric,
        layout: BatchLayout,
        random_state: Callable[[], Part],
        *,
        is_callers: bool,
    ) -> None:
        self._update = update
        self._is_callers = is_callers
        self._layout = layout
        self._random_state = random_state
        self._is_split = False
        self._known: dict[int, _Known] = {}
        self._readings: dict[str, tuple[Any, Readings]] = {}  # of one batch, by the metric's name
        self._warned: set[str] = set()

    def expect(self, *, is_split: bool) -> None:
        """Prepare for batches that are split or whole; warn of metrics of the previous batch."""
        for metric, readings in self._readings.values():
            self._warn_of(metric, readings)
            known = self._of(metric)
            known.silent = 0 if readings.asks else known.silent + 1
        # The readings belong to the previous batch, whose answers have reached the host by now.
        self._readings.clear()
        self._is_split = is_split

    def update(self, metric: Any, outputs: Any, microbatch: Any, name: str) -> None:
        """Update a metric with a microbatch, and warn if its value depends on the split."""
        self.look(metric, outputs, microbatch)
        with self.reading(metric, name):
            self._update(metric, outputs, microbatch)

    def look(self, metric: Any, outputs: Any, microbatch: Any) -> None:
        """Check a metric with some rows of its update."""
        if not self._is_split:
            return
        for each in flatten_metrics(metric):
            if reason := _known_reason(each):
                self._warn(each, reason)
        for each in _members(metric):
            if self._may_check(each):
                self._check(each, outputs, microbatch)

    @contextlib.contextmanager
    def reading(self, metric: Any, name: str) -> Iterator[None]:
        """Observe how a metric reads its numbers during an update."""
        if not (self._is_split and self._of(metric).silent < _MOST_CHECKS):
            yield
            return
        _, readings = self._readings.setdefault(name, (metric, Readings()))
        with readings:
            yield
        # On an accelerator the answer is read when the next batch begins, without waiting.
        if not readings.on_device:
            self._warn_of(metric, readings)

    def _warn_of(self, metric: Any, readings: "Readings") -> None:
        if readings.differ:
            self._warn(metric, _TAKES_EITHER)

    def _of(self, metric: Any) -> "_Known":
        # By id, because metrics do not have to be hashable.
        return self._known.setdefault(id(metric), _Known(metric))

    def _may_check(self, metric: Any) -> bool:
        known = self._of(metric)
        if known.checks >= _MOST_CHECKS:
            return False
        # Counted before the check, because a metric that fails would fail each time.
        known.checks += 1
        if not all(callable(getattr(metric, name, None)) for name in ("compute", "reset")):
            return False
        return not _has_peers() and (self._is_callers or _is_unknown(metric))

    def _check(self, metric: Any, outputs: Any, microbatch: Any) -> None:
        rows = tried(lambda: self._layout.num_rows(microbatch))
        if not isinstance(rows, int):  # there are no rows to cut
            return
        # At least three rows, repeated if necessary: two pieces of different size need them.
        indices = [index % rows for index in range(max(3, min(rows, _MOST_ROWS)))]
        cut = len(indices) - len(indices) // 3  # uneven, because equal pieces hide a mean of means

        def read(*pieces: list[int]) -> Reading:
            parts = [Metrics(flatten_metrics(metric)), self._random_state()]
            # An update may also change state outside the metric, in a closure or an attribute.
            reached = State(lambda: {"metric": metric, "update_metric": self._update})
            undo = Transaction([reached, *parts])
            try:
                undo.begin()
                metric.reset()
                for piece in pieces:
                    given = self._layout.take_rows(microbatch, piece)
                    self._update(metric, _rows_of(outputs, rows, piece), given)
                return _read(metric.compute(), outputs)
            finally:
                undo.roll_back()

        def differing() -> tuple[float, float] | None:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                whole, parts = read(indices), read(indices[:cut], indices[cut:])
                # Another order of rows shows how much rounding changes the value.
                found = gaps(whole, parts, (read(indices[::-1]) for _ in range(1)))
            if not found:
                return None
            # Report the number that differs most.
            most = max(found, key=found.__getitem__)
            return whole.numbers[most], parts.numbers[most]

        found = tried(differing)  # a metric may fail on so few rows
        if isinstance(found, tuple):
            one, two = found
            reason = f"counts {len(indices)} rows as {one:.4g} in one update, but {two:.4g} in two"
            self._warn(metric, reason)

    def _warn(self, metric: Any, reason: str) -> None:
        name = metric.__name__ if isinstance(metric, type) else type(metric).__name__
        if name in self._warned:
            return
        self._warned.add(name)
        warn(
            f"the metric {name} {reason}. A split batch updates it once per microbatch, so its "
            "value depends on the microbatch size. Let it count rows, update it with the outputs "
            "of whole batches (evaluate(batch, return_outputs=True)), or keep batches whole with "
            "microbatch_size=None",
            MetricWarning,
        )


class MetricUpdates(Feature):
    """The feature that updates metrics with every row of a step."""

    def __init__(
        self,
        metrics: Any,
        guard: MetricGuard,
        counted: Metrics,
        sees: Callable[[MicrobatchRun], Any],
        *,
        sorts: bool,
    ) -> None:
        self._named = _by_name(metrics)
        self._metrics, self._guard, self._counted = metrics, guard, counted
        self._sees, self._sorts = sees, sorts

    def parts(self) -> Sequence[Part]:
        return [self._counted]

    def begin(self, attempt: Attempt) -> None:
        is_split = self._metrics is not None and any(cut.is_split for cut in attempt.cuts)
        self._guard.expect(is_split=is_split)

    def computed(self, run: MicrobatchRun) -> None:
        outputs = self._sees(run)
        for name, metric in self._named.items():
            try:
                self._guard.update(metric, outputs, run.inputs, name)
            except Exception as error:
                named = Bystander(kind="metric", name=repr(name))
                blame(error, named, f"while updating {named}")
                raise

    def end(self, attempt: Attempt) -> None:
        if self._sorts:
            self._counted.sort([(cut.sizes, order_of([cut]) or ()) for cut in attempt.cuts])


def _known_reason(metric: Any) -> str:
    """Return why the cut of a batch changes the value of a torchmetrics metric; else ""."""
    if not is_of_torchmetrics(metric):
        return ""
    names = {each.__name__ for each in type(metric).__mro__}
    if "Running" in names:
        return f"covers the last {getattr(metric, 'window', 'few')} updates"
    if "BootStrapper" in names:
        return "draws random numbers in every update"
    # Only these infer a range from their inputs.
    ranged = {"StructuralSimilarityIndexMeasure", "MultiScaleStructuralSimilarityIndexMeasure"}
    if names & ranged and getattr(metric, "data_range", 1.0) is None:
        return "takes the range of the data from each update (give it data_range)"
    return ""


def _members(metric: Any) -> Sequence[Any]:
    """Return the single metrics of a collection."""
    if is_of_torchmetrics(metric, "MetricCollection"):
        return list(metric.values(copy_state=False))
    return [metric]


def _is_unknown(metric: Any) -> bool:
    package, _, module = type(metric).__module__.partition(".")
    # Aggregators count any value, which might be a mean over a microbatch, and wrappers may depend
    # on each call.
    return package != "torchmetrics" or module.partition(".")[0] in ("aggregation", "wrappers")


_TAKES_EITHER = (
    "treats its numbers as probabilities if all numbers of an update lie between 0 and 1, and as "
    "logits otherwise (give it probabilities: sigmoid or softmax)"
)


class Readings(TorchFunctionMode):
    """How metrics of torchmetrics read their numbers, observed in each update of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = False  # whether the reading depends on the numbers
        self.on_device = False  # whether the answer is on an accelerator, so that reading it waits
        self._first: list[bool | str] | None = None
        self._differ = False
        self._waiting: list[list[Tensor | str]] = []  # one list per update

    @property
    def differ(self) -> bool:
        """Whether one update read its numbers differently from another."""
        for waiting in self._waiting:
            # This is the only place that waits for the device.
            said = [each if isinstance(each, str) else bool(each) for each in waiting]
            if self._first is None:
                self._first = said
            self._differ = self._differ or said != self._first
        self._waiting.clear()
        return self._differ

    def __enter__(self) -> "Readings":
        super().__enter__()  # type: ignore[no-untyped-call]
        self._waiting.append([])
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        if kind is not None:
            self._waiting.pop()  # a failed update gives no answer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function; record whether torchmetrics makes, or might make, probabilities."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ("all", "any", "sigmoid", "softmax", "where"):
            return result
        # The caller may use these functions, too: only calls by torchmetrics count.
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") == __name__ and frame.f_back:  # skip nested modes
            frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("torchmetrics."):
            return result
        if name in ("all", "any"):
            self.asks = self.asks or "classification" in module or module.endswith(".compute")
        elif name != "where":
            self._waiting[-1].append(name)
        elif len(args) == 3 and args[0].dtype == torch.bool and args[0].dim() == 0:
            self.on_device = self.on_device or args[0].device.type != "cpu"
            self._waiting[-1].append(args[0])
        return result


def _rows_of(outputs: Any, num_rows: int, rows: list[int]) -> Any:
    """Return some rows of outputs; if their layout is unknown, only of their tensors."""
    layout = BatchLayout(0)
    with contextlib.suppress(BatchError):
        if layout.num_rows(outputs) == num_rows:
            return layout.take_rows(outputs, rows)

    def few(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and len(tensor) == num_rows else tensor

    return map_tensors(outputs, few)


def _has_peers() -> bool:
    """Whether computing a value could be a collective."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _read(value: Any, outputs: Any) -> Reading:
    """Return the numbers in a metric's value; texts and objects are not compared."""
    numbers = {}
    for at, each in enumerate(_numbers(value)):
        with contextlib.suppress(TypeError, ValueError):
            numbers[str(at)] = float(each)
    # Metrics are no more exact than their outputs, which may be in half precision.
    types = [leaf.dtype for _, leaf in tensor_leaves(outputs) if leaf.is_floating_point()]
    eps = max(torch.finfo(each).eps for each in (torch.float32, *types))
    scales = {name: abs(number) for name, number in numbers.items()}
    floors = {name: _EPS * eps * scale + _ROUNDING for name, scale in scales.items()}
    return Reading(numbers=numbers, scales=scales, floors=floors)


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [number for key in value for number in _numbers(value[key])]
    if isinstance(value, list | tuple):
        return [number for each in value for number in _numbers(each)]
    if isinstance(value, Tensor):
        return value.detach().cpu().flatten().tolist()
    if isinstance(value, np.ndarray):
        return list(value.ravel().tolist())
    return [value]
