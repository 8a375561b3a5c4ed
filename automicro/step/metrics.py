"""Metrics, updated with the rows of many microbatches as with those of one batch, or named."""

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

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
from automicro.step.plan import order_of
from automicro.torch_private import children_of
from automicro.transaction.transaction import Part, Transaction

T = TypeVar("T")
UpdateMetric = Callable[[Any, Any, Any, str], None]

_MOST_CHECKS = 3
_MOST_ROWS = 16
_ROUNDING = 1e-6
_EPS = 16.0  # times that of the outputs


class Metrics:
    """Metrics of torchmetrics, collections and wrappers of them, or anything with ``update``.

    Compute groups are formed by all rows of a batch: torchmetrics forms them by the first update,
    where unlike metrics may look alike on one row, and stay merged.
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
        # Else the first microbatch decides which metrics share a state, and few rows look alike.
        for metric, _ in self._ungrouped:
            metric._enable_compute_groups = False

    def sort(self, cuts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Put the rows that lists of states have gained into the order of their batches.

        An update appends a tensor with an entry for each row, or something else, whose order then
        says nothing.
        """
        updates = sum(len(sizes) for sizes, _ in cuts)
        # Metrics of one compute group share their lists: each list is put in order once.
        for values, before in {id(values): (values, n) for values, n in self._grown}.values():
            gained = values[before:]
            # A metric that gains more than one entry for each update is not known, and stays as it
            # is.
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
            # Without any update all states are alike, and all metrics would be merged.
            if any(each.update_count for each in metric.values(copy_state=False)):
                # As `MetricCollection.update` itself does behind its first update.
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
    # One tensor in place of several: torchmetrics joins them at last, too.
    joined = torch.cat(list(values))
    return joined.index_select(0, torch.as_tensor(order, device=joined.device))


def _growing_states(metric: Any) -> list[list[Any]]:
    """Lists that torchmetrics promises only to append to."""
    if not is_of_torchmetrics(metric):
        return []
    table = vars(metric)
    return [
        value
        for name, default in table.get("_defaults", {}).items()
        if isinstance(default, list) and isinstance(value := table.get(name), list)
    ]


def _forms_groups(metric: Any) -> Any:
    """How a collection forms groups, where it has yet to; else None."""
    if not is_of_torchmetrics(metric, "MetricCollection") or metric._groups_checked:
        return None
    return metric._enable_compute_groups or None


def is_of_torchmetrics(metric: Any, class_name: str = "Metric") -> bool:
    """Tell whether a metric is one of torchmetrics, without importing it.

    >>> is_of_torchmetrics("accuracy")
    False
    """
    # Code that made such a metric has imported it; importing it takes seconds.
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
        # Wrappers and collections are modules that hold the metrics that count.
        return _inside(metrics) or _refuse(metrics)
    if isinstance(metrics, Mapping):
        return [each for value in metrics.values() for each in flatten_metrics(value)]
    if isinstance(metrics, list | tuple):
        return [each for value in metrics for each in flatten_metrics(value)]
    if inspect.isfunction(getattr(metrics, "update", None)) and isinstance(metrics, type):
        raise TypeError(f"metrics holds the class {metrics.__name__}; give an object of it")
    return [metrics] if hasattr(metrics, "update") else _refuse(metrics)


def _by_name(metrics: Any) -> Mapping[str, Any]:
    """Metrics by the caller's names, or by those of their classes."""
    if isinstance(metrics, Mapping) and not isinstance(metrics, nn.Module):
        return metrics
    found: dict[str, Any] = {}
    for each in metrics if isinstance(metrics, list | tuple) else [metrics]:
        name = type(each).__name__
        found[f"{name} {len(found)}" if name in found else name] = each
    return found


def _inside(root: nn.Module) -> list[Any]:
    """The metrics in a module, itself included, each once."""
    found: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            # In the order of the caller, as names are counted in it.
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


def naming_metrics(update: Callable[..., None]) -> UpdateMetric:
    """Return what hands a function the metric's name, too, if it has a parameter called ``name``.

    >>> told = []
    >>> naming_metrics(lambda metric, outputs, batch, *, name: told.append(name))(0, 0, 0, "seen")
    >>> naming_metrics(lambda metric, outputs, batch: None)(0, 0, 0, "seen")
    >>> told
    ['seen']
    """
    if not _takes_name(update):
        return lambda metric, outputs, microbatch, name: update(metric, outputs, microbatch)
    return lambda metric, outputs, microbatch, name: update(metric, outputs, microbatch, name=name)


def _takes_name(update: Callable[..., None]) -> bool:
    try:
        parameters = list(inspect.signature(update).parameters.values())
    except (TypeError, ValueError):  # of builtins it is unknown
        return False
    after = parameters[3:]
    keyword = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(each.name == "name" and each.kind in by_name for each in (*after, *keyword))


class MetricGuard:
    """Warns once of each metric that comes out otherwise when a batch is split.

    Of torchmetrics' own it is known which do. Those that take logits ask of each update whether all
    its numbers lie between 0 and 1, and take these for probabilities then: where microbatches of
    one batch answer otherwise, that is noticed. Any other metric, and each that a function of the
    caller's updates, is checked in the first microbatches: a few rows are counted in one update and
    in two, and the values compared. Nothing of that stays.
    """

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
        self._checks = _Counts()
        self._readings: dict[str, tuple[Any, Readings]] = {}  # of one batch, by the metric's name
        # Batches in a row in which a metric asked nothing of its numbers: watching costs something.
        self._silent = _Counts()
        self._warned: set[str] = set()

    def expect(self, *, is_split: bool) -> None:
        """Say whether the next batches are cut. Called inside the attempt.

        Warns:
            MetricWarning
        """
        for metric, readings in self._readings.values():
            self._warn_of(metric, readings)
            self._silent.put(metric, 0 if readings.asks else self._silent.of(metric) + 1)
        # Of the batch before, whose answers have arrived on the host meanwhile.
        self._readings.clear()
        self._is_split = is_split

    def update(self, metric: Any, outputs: Any, microbatch: Any, name: str) -> None:
        """Update a metric with a microbatch.

        Warns:
            MetricWarning
        """
        self.look(metric, outputs, microbatch, name)
        with self.reading(metric, name):
            self._update(metric, outputs, microbatch, name)

    def look(self, metric: Any, outputs: Any, microbatch: Any, name: str) -> None:
        """Check a metric with some rows of what it is updated with.

        Warns:
            MetricWarning
        """
        if not self._is_split:
            return
        for each in flatten_metrics(metric):
            if reason := _known_reason(each):
                self._warn(each, reason)
        for each in _members(metric):
            if self._may_check(each):
                self._check(each, outputs, microbatch, name)

    @contextlib.contextmanager
    def reading(self, metric: Any, name: str) -> Iterator[None]:
        """Around an update of a metric.

        Warns:
            MetricWarning
        """
        if not (self._is_split and self._silent.of(metric) < _MOST_CHECKS):
            yield
            return
        _, readings = self._readings.setdefault(name, (metric, Readings()))
        with readings:
            yield
        # On a device the answer is read when the next batch begins, which then waits for nothing.
        if not readings.on_device:
            self._warn_of(metric, readings)

    def _warn_of(self, metric: Any, readings: "Readings") -> None:
        if readings.differ:
            self._warn(metric, _TAKES_EITHER)

    def _may_check(self, metric: Any) -> bool:
        checks = self._checks.of(metric)
        if checks >= _MOST_CHECKS:
            return False
        # Counted before it is tried, as a metric that fails would fail each time.
        self._checks.put(metric, checks + 1)
        if not all(callable(getattr(metric, name, None)) for name in ("compute", "reset")):
            return False
        return not _has_peers() and (self._is_callers or _is_unknown(metric))

    def _check(self, metric: Any, outputs: Any, microbatch: Any, name: str) -> None:
        rows = tried(lambda: self._layout.num_rows(microbatch))
        if not isinstance(rows, int):  # there are none to cut by
            return
        # At least three, some of them twice: two pieces of unlike size need as many.
        indices = [index % rows for index in range(max(3, min(rows, _MOST_ROWS)))]
        cut = len(indices) - len(indices) // 3  # unevenly: alike pieces hide a mean of means

        def read(*pieces: list[int]) -> Reading:
            parts = [Metrics(flatten_metrics(metric)), self._random_state()]
            # An update may keep something beside the metric, in a closure or an attribute.
            reached = State(lambda: {"metric": metric, "update_metric": self._update})
            undo = Transaction([reached, *parts])
            try:
                undo.begin()
                metric.reset()
                for piece in pieces:
                    given = self._layout.take_rows(microbatch, piece)
                    self._update(metric, _rows_of(outputs, rows, piece), given, name)
                return _read(metric.compute(), outputs)
            finally:
                undo.roll_back()

        def differing() -> tuple[float, float] | None:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                whole, parts = read(indices), read(indices[:cut], indices[cut:])
                # In another order sums are rounded otherwise.
                found = gaps(whole, parts, (read(indices[::-1]) for _ in range(1)))
            if not found:
                return None
            # Of several numbers the one that is off most.
            most = max(found, key=found.__getitem__)
            return whole.numbers[most], parts.numbers[most]

        found = tried(differing)  # a few rows may be too few for it
        if isinstance(found, tuple):
            one, two = found
            reason = f"counts {len(indices)} rows as {one:.4g} in one update, and {two:.4g} in two"
            self._warn(metric, reason)

    def _warn(self, metric: Any, reason: str) -> None:
        name = metric.__name__ if isinstance(metric, type) else type(metric).__name__
        if name in self._warned:
            return
        self._warned.add(name)
        warn(
            f"the metric {name} {reason}, and a batch that is split updates it once for each "
            "microbatch, so its value depends on the microbatch size. Let it count rows, update it "
            "yourself with the outputs of whole batches (evaluate(batch, return_outputs=True)), or "
            "keep batches whole with microbatch_size=None",
            MetricWarning,
        )


class MetricUpdates(Feature):
    """Updates metrics with every row of a step."""

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
    """Why the value of a metric of torchmetrics depends on how its rows are cut; else empty."""
    torchmetrics = sys.modules.get("torchmetrics")  # code that made one has imported it
    if torchmetrics is None or not isinstance(metric, torchmetrics.Metric):
        return ""
    names = {each.__name__ for each in type(metric).__mro__}
    if "Running" in names:
        return f"looks at the last {getattr(metric, 'window', 'few')} updates"
    if "BootStrapper" in names:
        return "draws anew with every update"
    # Only these take a range from what they are given.
    ranged = {"StructuralSimilarityIndexMeasure", "MultiScaleStructuralSimilarityIndexMeasure"}
    if names & ranged and getattr(metric, "data_range", 1.0) is None:
        return "takes the range of the data from each update (give it data_range)"
    return ""


def _members(metric: Any) -> Sequence[Any]:
    """The metrics of a collection, each on its own."""
    kind = getattr(sys.modules.get("torchmetrics"), "MetricCollection", None)
    if kind is None or not isinstance(metric, kind):
        return [metric]
    return list(metric.values(copy_state=False))


def _is_unknown(metric: Any) -> bool:
    package, _, module = type(metric).__module__.partition(".")
    # Those that aggregate count whatever they are given, which may be a mean over a microbatch, and
    # wrappers may look at each call.
    return package != "torchmetrics" or module.partition(".")[0] in ("aggregation", "wrappers")


_TAKES_EITHER = (
    "takes its numbers for probabilities where all of an update lie between 0 and 1, and for "
    "logits elsewhere (give it probabilities: sigmoid or softmax)"
)


class Readings(TorchFunctionMode):
    """How metrics of torchmetrics read their numbers: around each update of one batch.

    Attributes:
        asks: whether it depends on the numbers.
        on_device: whether to know it is to wait for a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asks = self.on_device = False
        self._first: list[bool | str] | None = None
        self._differ = False
        self._waiting: list[list[Tensor | str]] = []  # of updates, the last one's at the end

    @property
    def differ(self) -> bool:
        """Whether one update read other than another."""
        for waiting in self._waiting:
            # Here, and only here, the device is waited for.
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
            self._waiting.pop()  # an update that ended early said nothing

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call it; note what torchmetrics makes probabilities, and on a device whether it does."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ("all", "any", "sigmoid", "softmax", "where"):
            return result
        # The caller may use these functions, too: only what torchmetrics calls counts.
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") == __name__ and frame.f_back:  # of another such mode
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


class _Counts:
    """A number for each metric, none at first; they need not be hashable."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}  # the metric, too: ids are used again

    def of(self, metric: Any) -> int:
        known, count = self._known.get(id(metric), (None, 0))
        return count if known is metric else 0

    def put(self, metric: Any, count: int) -> None:
        self._known[id(metric)] = metric, count


def _rows_of(outputs: Any, num_rows: int, rows: list[int]) -> Any:
    """Some rows of outputs; where their lists of rows are not known, of their tensors alone."""
    layout = BatchLayout(0)
    with contextlib.suppress(BatchError):
        if layout.num_rows(outputs) == num_rows:
            return layout.take_rows(outputs, rows)

    def few(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and len(tensor) == num_rows else tensor

    return map_tensors(outputs, few)


def _has_peers() -> bool:
    """Whether computing a value may be a collective."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _read(value: Any, outputs: Any) -> Reading:
    """The numbers in a metric's value; texts and objects are not compared."""
    numbers = {}
    for at, each in enumerate(_numbers(value)):
        with contextlib.suppress(TypeError, ValueError):
            numbers[str(at)] = float(each)
    # Outputs in half precision give metrics that are no more exact.
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
