"""Shared parts of integrations: host methods and their replacements, and values that steps emit."""

import ast
import collections
import contextlib
import copy
import functools
import importlib
import importlib.metadata
import inspect
import itertools
import numbers
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automicro.batch.device import on_host
from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import builder, map_tensors, open_container, tensor_leaves
from automicro.batch.types import STRUCTURES, kind_of
from automicro.errors import BatchError, LossError, MetricWarning, warn
from automicro.features import INSTEAD, WORDS, with_features
from automicro.loss.conventions import Output
from automicro.loss.passes import is_extra_pass
from automicro.microbatcher import Microbatcher
from automicro.state.capture import Captured, capture
from automicro.state.part import State
from automicro.step.feature import Feature, MicrobatchRun
from automicro.step.metrics import MetricGuard, Metrics, is_of_torchmetrics
from automicro.step.results import EvalResult, StepResult
from automicro.transaction.transaction import Part
from automicro.values import OBJECT, kinds_of

_MISSING = object()


OURS = (
    "model", "loss_fn", "forward", "backward", "optimizer", "precision", "device", "state",
    "scales_for_ranks", "carry_layout", "update_metric",
)  # fmt: skip
"""Arguments of a `Microbatcher` and words for features that trainers set."""


def check_options(call: str, options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse options that do not exist or that the host sets itself."""
    known = {*inspect.signature(Microbatcher).parameters, *WORDS} - {*own}
    for name in options:
        if name in own:
            raise TypeError(f"{call}({name}=…) is set by {own[name]}. Leave it out")
        if name not in known:
            instead = f"pass options of Microbatcher: {', '.join(sorted(known))}"
            raise TypeError(f"{call}({name}=…) is not known: {INSTEAD.get(name, instead)}")


def microbatcher_of(
    model: nn.Module,
    options: Mapping[str, Any],
    *,
    kind: type[Microbatcher] = Microbatcher,
    recorded: "Recorded | None" = None,
    **own: Any,
) -> Microbatcher:
    """Create a Microbatcher from the user's options and the host's own arguments."""
    # In a host, each rank's loss is the mean over its own rows. A wrong average would otherwise go
    # unnoticed, so the probe raises an error.
    given = {"probe": "error", "scales_for_ranks": False, **options, **own}
    if recorded is not None:
        given["features"] = [*given.get("features", ()), _Announcing(recorded)]
        given["state"] = [recorded, *given.get("state", ())]
    return kind(model, **with_features(given))


def is_written_by(hosts: Iterable[str], code: Any) -> bool:
    """Whether a class or function, without its decorators, belongs to one of these packages."""
    module = getattr(inspect.unwrap(code), "__module__", None)
    return str(module).partition(".")[0] in hosts


def import_host(name: str, *, extra: str) -> ModuleType:
    """Import a module of a host; the error names the extra of automicro that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        # An installed host that lacks one of its own dependencies must not be reported as missing.
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        raise ImportError(
            f"automicro.integrations.{extra} needs {name.partition('.')[0]}, which is not "
            f"installed. Run pip install 'automicro[{extra}]'",
            name=error.name,
        ) from error


def require_seam(
    owner: Any, name: str, parameters: Sequence[str] = (), *, host: str, supported: str
) -> Any:
    """Return a host's method, or raise ImportError if it or one of its parameters is missing."""
    found: Any = getattr(owner, name, None)
    # Check names: another version might keep the method but change its arguments.
    taken = inspect.signature(found).parameters if callable(found) else {}
    lacks = [f"the parameter {each!r} of {name}" for each in parameters if each not in taken]
    if callable(found) and not lacks:
        return found
    raise ImportError(
        f"{host} {importlib.metadata.version(host)} lacks {', '.join(lacks) or name}, which "
        f"automicro needs. Use {supported}, or report it to automicro's developers",
        name=host,
    )


_FOLDS: Mapping[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "mean": lambda values, weights: (
        sum(w * v for w, v in zip(weights, values, strict=True)) / (sum(weights) or 1.0)
    ),
    "sum": lambda values, _: sum(values),
    "max": lambda values, _: max(values),
    "min": lambda values, _: min(values),
}
_LOOKS = 3  # first batches of a phase in which the state that steps change is compared
_DEEPEST = 3  # levels of nested dictionaries that are searched
_ROUNDING = 1e-4  # relative tolerance between a number of all rows and the fold of its parts
RETURNS = "what the step returns"
_STEP = re.compile(r"\.(\w+)|\[(.+?)\](?=[.\[]|$)")  # one attribute or key of a path
_BESIDE = -1  # replaces the index of the call for a number outside the model that a step changes
_Key = tuple[str, int]  # description of a call, and its index among calls with that description
_Heard = dict[_Key, tuple[float, float]]  # value and weight


class Held(NamedTuple):
    """A value that steps may change."""

    what: str  # its path, such as "self.losses"
    key: str  # the last attribute or key of the path
    value: Any


@dataclass(kw_only=True)
class _Note:
    """A call that each microbatch makes, with the values that it was given."""

    what: str  # a description, equal in each microbatch
    nth: int = 0  # index among the calls with the same description
    reduce: str = "mean"  # declared reduction of several values
    is_known: bool = False  # whether no check has to confirm the reduction
    tell: Callable[[Any, Any], Any] | None = None  # takes the batch's value and weight
    whole: Callable[[], Any] | None = None  # returns the batch's value if another object has it
    entries_of: list[Any] | None = None  # the list to which the values, lists too, were appended
    indices: list[int] = field(default_factory=list)  # of the microbatches that made the call
    values: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)  # None: weighted by rows
    is_kept: bool = False  # `values` returns the values without joining them
    is_set: bool = False  # the last value holds
    is_single: bool = False  # a single value without rows, even in a one-row microbatch
    joined: Any = None  # the batch's value

    def part(self, key: Any, values: list[Any]) -> "_Note":
        """One entry of a structured value, by its key."""
        return replace(self, what=f"{self.what}[{key!r}]", values=values, entries_of=None)


@dataclass(kw_only=True)
class _Together:
    """Rows that a check runs together and then again in parts."""

    rows: int = 0  # 0 if no parts follow
    heard: _Heard = field(default_factory=dict)  # numbers emitted for all rows together
    moved: dict[str, float] = field(default_factory=dict)  # changed numbers outside the model
    state: Captured | None = None  # state outside the model after all rows ran together
    parts: list[tuple[int, _Heard]] = field(default_factory=list)  # rows and numbers of each part

    @property
    def left(self) -> int:
        """Number of rows that have not run in a part yet."""
        return self.rows - sum(rows for rows, _ in self.parts)


class Recorded:
    """Combine the values that microbatches emit into the values of the batch.

    Example:
        >>> recorded, told = Recorded(), []
        >>> recorded.begin()
        >>> for rows, value in ((2, 0.5), (1, 2.0)):
        ...     with recorded.step(rows):
        ...         tell = lambda value, weight: told.append(value)
        ...         recorded.note("accuracy", value, weight=rows, tell=tell)
        ...         recorded.came_to(None)
        >>> recorded.prepare()
        >>> recorded.tell(None)
        >>> told
        [1.0]
    """

    # Numbers are averaged by rows unless checks have shown that they are a sum, maximum, minimum or
    # the loss itself. Values with rows are concatenated. Any other value is named in one warning.
    # Entries that a step appends to a list are taken out of it and recorded like other values, so
    # that each microbatch finds the list as a whole batch would.

    def __init__(
        self,
        # Objects outside the model that steps change, by name. The first one owns the step, and
        # lists in its attributes are joined.
        beside: Callable[[], Mapping[str, Any]] = dict,
        # Whether an attribute, given as object, name and value, belongs to the user.
        is_own: Callable[[Any, str, Any], bool] = lambda owner, name, value: True,
        hosts: Sequence[str] = (),  # packages of the host
        *,
        # Additional objects that are neither captured nor rolled back.
        skip: Callable[[], Sequence[Any]] = tuple,
        dims: Sequence[int] = (0,),  # dimensions of tensors that may hold rows
        # Plural name of the unit that rows are sorted by; None if rows keep their order.
        sorted_by: str | None = None,
        concat: Callable[[list[Tensor], int], Tensor] = torch.cat,
        # The known reduction of numbers at a path or in a named list.
        fold_of: Callable[[str], str | None] = lambda place: None,
    ) -> None:
        self._roots, self._is_own, self._hosts, self._fold_of = beside, is_own, hosts, fold_of
        self._skip = skip
        self._beside = State(beside, skip=self._skipped, is_held=False)
        self._num_split: collections.Counter[bool] = collections.Counter()  # by whether it trains
        # Number of comparisons of each changed path, in training (True) and evaluation (False).
        self._looks = collections.defaultdict[bool, collections.Counter[str]](collections.Counter)
        self._dims, self._sorted_by, self._concat = dims, sorted_by, concat
        self._verdicts: dict[_Key, str] = {}
        self._checked: set[_Key] = set()
        self._named: set[str] = set()
        self._single: set[str] = set()
        self._heard: _Heard | None = None
        self._heard_rows = 0
        # Whether the next step only serves the collectives of other ranks.
        self.is_filler = False
        self._forget()

    def _forget(self) -> None:
        self.rows: list[int] = []
        self._losses: list[Tensor | None] = []
        self._notes: dict[_Key, _Note] = {}
        self._later: list[Callable[[], None]] = []
        self._starts: dict[str, int] = {}  # lengths of lists before the step
        self._times: collections.Counter[str] = collections.Counter()
        self._counts: Mapping[str, float] = {}  # of the current step
        self._may_be_loss: list[tuple[Tensor, Tensor]] = []
        self._first: Captured | None = None  # state after the first microbatch
        self._changed: set[str] = set()  # paths that the first microbatch changed
        self._num_modules: dict[str, int] = {}  # number of submodules after the first microbatch
        self._is_open = False
        self._together = _Together()

    def _skipped(self) -> list[Any]:
        roots = self._roots().values()
        others = itertools.chain(*(self._of(each, False).values() for each in roots))
        own = set(map(id, roots))  # a root may be a part of another
        return [*self._skip(), *(each for each in others if id(each) not in own)]

    # Part of the transaction

    def begin(self) -> None:
        self._forget()
        self._beside.begin()
        self._measure_lists()

    def prepare(self) -> None:
        """Join the values of microbatches; later steps of a commit must not allocate memory."""
        self._is_open = False
        if self.is_split:
            self._take_entries()
            self._compare()
        for note in self._notes.values():
            if self.is_split and all(map(is_number, note.values)) and not note.whole:
                note.joined = self._join_numbers(note)  # converted once the loss is known
            elif not (note.whole or note.is_kept):
                note.joined = self._join(note)
            if note.entries_of is not None and not note.is_set:
                # In place, because other objects may hold a reference to this list.
                note.entries_of.extend(note.joined)

    def commit(self) -> None:
        self._beside.commit()

    def roll_back(self) -> None:
        self._beside.roll_back()
        self._forget()

    # During a batch

    @property
    def is_split(self) -> bool:
        """Whether at least two microbatches of the batch have started."""
        return len(self.rows) > 1

    def _is_due(self) -> bool:
        """Whether this split batch looks for state that steps change: 1, 2, 3, then 4, 8, 16."""
        # Comparing a trainer's whole state is slow, and most steps change the same.
        trains = torch.is_grad_enabled()
        self._num_split[trains] += 1
        count = self._num_split[trains]
        return count <= _LOOKS or count & (count - 1) == 0

    @contextlib.contextmanager
    def step(self, rows: int, counts: Mapping[str, float] | None = None) -> Iterator[None]:
        """Record the values emitted by a microbatch, or compare those emitted by a check."""
        # `counts` has the weights of means that are not over rows, by the name of their list.
        if is_extra_pass():
            with self._hearing(rows, counts or {}):
                yield
            return
        if self.is_filler:
            beside = State(self._roots, skip=self._skipped, is_held=False)
            beside.begin()
            try:
                yield
            finally:
                beside.roll_back()
            return
        self.is_filler = dist.is_initialized() and dist.get_world_size() > 1
        if self.rows:
            self._take_entries()
        self.rows.append(rows)
        if len(self.rows) == 2 and self._is_due():
            self._changed = self._places(self._beside.captured)
            looks, paths = self._looks[torch.is_grad_enabled()], {*self._changed, ""}  # "": any
            # A capture takes memory from the batch, so state that is known is not captured again.
            if any(looks[each] < _LOOKS for each in paths):
                looks.update(paths)
                self._num_modules = self._modules()
                self._first = capture(self._roots(), skip=self._skipped())
        self._times.clear()
        self._counts = counts or {}
        self._is_open = True
        yield

    def came_to(
        self,
        loss: Tensor | None,
        outputs: Any = None,
        *,
        own: Tensor | None = None,  # the loss that the step returned, if it is another than `loss`
        is_kept: bool = False,  # the caller reads the outputs with `values`
    ) -> Output | None:
        """End the step; return its output for a check, or None for a microbatch."""
        own = loss if own is None else own
        if self._heard is not None:
            return self._seen(loss, outputs, _number(own))
        if not self._is_open:
            return None
        if outputs is not None:
            self.note(RETURNS, outputs, is_kept=is_kept)
        self._is_open = False
        self._losses.append(None if own is None else own.detach())
        return None

    def note(self, what: str, value: Any, *, weight: Any = None, **how: Any) -> None:
        """Record a value that a step emits; see `_Note` for further arguments."""
        if self._heard is not None:
            is_heard = not (how.get("whole") or how.get("is_known"))
            for name, each in _numbers_in(what, value) if is_heard else ():
                self._hear(name, each, self._heard_rows if weight is None else weight)
        elif self._is_open:
            self._record(what, value, weight, **how)

    def note_log(
        self, call: str, log: Callable[..., Any], metrics: Mapping[str, Any], *rest: Any
    ) -> None:
        """Record a call that logs values by their names."""

        def tell(joined: Any, _: Any) -> None:
            for each in joined if isinstance(joined, list) else [joined]:
                log(each, *rest)

        # By their names, because a step may make only some of its calls for a microbatch.
        self.note(f"{call}({', '.join(map(repr, metrics))})", dict(metrics), tell=tell)

    def _record(self, what: str, value: Any, weight: Any, **how: Any) -> _Note:
        key = what, self._times[what]
        self._times[what] += 1
        note = self._notes.setdefault(key, _Note(what=what, nth=key[1], **how))
        note.indices.append(len(self.rows) - 1)
        # Its graph would keep the microbatch's activations alive until the end of the batch.
        note.values.append(detached(value))
        note.weights.append(weight)
        note.is_single = what in self._single
        return note

    @property
    def has_told(self) -> bool:
        """Whether the current step has emitted a value."""
        return bool(self._times)

    def is_single(self, what: str, value: Any) -> bool:
        """Whether an emitted value has no row dimension; ambiguous values follow earlier steps."""
        leaves, sizes = _opened(value)
        if not all(isinstance(each, str | bool | None) or _is_one(each) for each in leaves):
            return False
        # Ambiguous if a list or tensor happens to have as many entries as the step has rows.
        if (self._heard_rows if self._heard is not None else self.rows[-1]) not in sizes:
            self._single.add(what)
        return what in self._single and any(map(_is_one, leaves))

    def later(self, tell: Callable[[], None]) -> None:
        """Defer a call until the batch is committed."""
        self._later.append(tell)

    # State outside the model that steps change

    def _compare(self) -> None:
        """Warn of state that each microbatch changes, unless checks have shown that it adds up."""
        if self._first is None:
            return
        again, roots = self._places(self._first), self._roots()

        def depends(path: str) -> bool:
            verdict = self._verdicts.get((path, _BESIDE))
            if verdict is not None:
                return verdict != "sum"
            value = _at(roots, path)
            return (isinstance(value, int) and value == self.rows[-1] > 1) or any(
                each == path or each.startswith((f"{path}.", f"{path}[")) for each in again
            )

        # A module created on first use exists before the second microbatch. If the number still
        # grows after that, each microbatch creates one.
        now, before = self._modules(), self._num_modules
        grown = {what for what, number in now.items() if number != before.get(what, number)}
        new = sorted({*filter(depends, self._changed), *grown} - self._named)
        self._named.update(new)
        if new:
            warn(
                f"{', '.join(new)} changed in each microbatch of a batch, but a whole batch "
                "changes it once. Change it in code that runs once per batch (a callback), or let "
                "it add up over rows. This warning appears once",
                MetricWarning,
            )

    def _places(self, captured: Captured | None) -> set[str]:
        """Paths changed since a capture, except inside modules that count rows."""
        assert captured is not None
        with on_host():  # the comparison must not take device memory from the batch
            found = set(captured.changed())
        roots = self._roots()
        apart = tuple(f"{each.what}." for each in self.held() if _counts_rows(each))
        kept = (e for e in found if not (e.startswith(apart) or self._fold_of(e) == "sum"))
        return {_with_ends(roots, each) for each in kept}

    def _modules(self) -> dict[str, int]:
        """Number of children of each module, to find trackers that add a module per step."""
        roots = {**self._roots(), **{each.what: each.value for each in self.held()}}
        return {
            f"{path}.{name}".rstrip("."): len(list(each.children()))
            for path, root in roots.items()
            for name, each in (root.named_modules() if isinstance(root, nn.Module) else ())
        }

    def _take_entries(self) -> None:
        """Record the entries that a step has appended to lists, and take them out of the lists."""
        rows = self.rows[-1] if self._heard is None else self._heard_rows
        for what, name, values in self._lists():
            new = values[self._starts.get(what, 0) :]
            if new:
                fold = self._fold_of(name)
                how = {"reduce": fold or "mean", "is_known": fold is not None}
                weight = self._counts.get(name)
                if self._heard is None:
                    note = self._record(what, new, weight, **how)
                    # A step that puts a new list in its place does not append to it.
                    note.is_set |= note.entries_of is not None and note.entries_of is not values
                    note.entries_of = values
                    if not note.is_set:
                        del values[-len(new) :]
                elif len(new) != rows or rows == 1:
                    self.note(what, new, weight=weight, **how)

    def _measure_lists(self) -> None:
        self._starts = {each.what: len(each.value) for each in self._lists()}

    def _of(self, owner: Any, is_own: bool) -> dict[str, Any]:
        """Attributes that belong to the user (``is_own=True``), or all other attributes."""
        table = getattr(owner, "__dict__", {})
        return {k: v for k, v in table.items() if self._is_own(owner, k, v) == is_own}

    def held(self) -> Iterator[Held]:
        """Iterate over values in attributes, in their dictionaries, and in objects of the user."""
        name, owner = next(iter(self._roots().items()), ("", None))
        waiting = [Held(f"{name}.{key}", key, each) for key, each in self._of(owner, True).items()]
        for held in waiting:  # grows during the loop
            yield held
            path, _, value = held
            if isinstance(value, dict) and path.count("[") < _DEEPEST:
                waiting += [Held(f"{path}[{key!r}]", str(key), e) for key, e in value.items()]
            elif path.count(".") == 1 and OBJECT in kinds_of(type(value)):
                is_users = not isinstance(value, nn.Module)
                if is_users and not is_written_by(self._hosts, type(value)):
                    waiting += [Held(f"{path}.{key}", key, e) for key, e in vars(value).items()]

    def _lists(self) -> list[Held]:
        return [each for each in self.held() if isinstance(each.value, list)]

    def _numbers(self, places: Iterable[str]) -> dict[str, float]:
        roots = self._roots()
        found = {place: _number(_at(roots, place)) for place in places}
        return {place: number for place, number in found.items() if number is not None}

    # Checks of rows, together and in parts

    @contextlib.contextmanager
    def _hearing(self, rows: int, counts: Mapping[str, float]) -> Iterator[None]:
        together = self._together
        # A check runs all rows first and then their parts; any other number of rows starts over.
        if not 0 < rows <= together.left or rows == together.rows:
            together = self._together = _Together(rows=rows)
        self._heard, self._heard_rows = {}, rows
        starts, self._counts = self._starts, counts
        self._times.clear()
        self._beside.begin()
        try:
            # Parts start from the state that all rows together have left. Starting from 0, a number
            # that a step sets would look like one that adds up.
            if together.state is not None:
                together.state.put_back()
            self._measure_lists()
            yield
        except BaseException:
            self._together = _Together()  # the next rows belong to another comparison
            raise
        finally:
            self._heard, self._starts = None, starts
            self._beside.roll_back()
        if not together.parts:
            before = self._numbers(together.moved)
            for place, number in together.moved.items():
                together.heard[place, _BESIDE] = number - before.get(place, 0.0), 1.0

    def _seen(self, loss: Tensor | None, outputs: Any, own: float | None) -> Output:
        """The loss, the outputs with rows, and the numbers of the finished step."""
        assert self._heard is not None
        rows, heard, kept = self._heard_rows, self._heard, {}
        for path, each in tensor_leaves(_without_lists(outputs, rows)):
            dims = [dim for dim in self._dims if each.shape[dim : dim + 1] == (rows,)]
            if each.dim():
                kept[path] = each.movedim(dims[0], 0) if dims else each
        if outputs is not None:
            self.note(RETURNS, outputs)
        self._take_entries()
        told = dict(heard)  # a copy: `_learn` adds numbers outside the model
        self._learn(self._together, rows, heard)
        named = {
            what if not nth else f"{what}, {nth + 1}": each
            for (what, nth), each in told.items()
            if self._verdicts.get((what, nth), "mean") == "mean"
        }
        is_loss = frozenset(name for name, (value, _) in named.items() if value == own)
        return Output(loss, {}, kept, told=named, told_as_loss=is_loss)

    def _hear(self, what: str, value: Any, weight: Any) -> None:
        assert self._heard is not None
        number, weight = _number(value), _number(weight)
        key = what, self._times[what]
        self._times[what] += 1
        if number is not None and weight:
            self._heard[key] = number, weight
            self._checked.add(key)

    def _learn(self, together: _Together, rows: int, heard: _Heard) -> None:
        """Once all parts have run, find the reduction that gives the numbers of all rows."""
        if together.state is None:
            together.heard = heard
            if self._beside.captured is not None:
                together.moved = self._numbers(self._beside.captured.changed())
            together.state = capture(self._roots(), skip=self._skipped())
            return
        now = self._numbers(together.moved)
        for place, start in together.moved.items():
            heard[place, _BESIDE] = now.get(place, 0.0) - start, 1.0
        together.parts.append((rows, heard))
        if together.left:
            return
        # Rows of the next check might happen to fit as parts of this one.
        self._together = _Together()
        parts = [each for _, each in together.parts]
        for key, (number, _) in together.heard.items() if len(parts) > 1 else ():
            if not all(key in each for each in parts):
                continue
            values, weights = zip(*(each[key] for each in parts), strict=True)
            # Relative to the largest number, because a sum of both signs may be near 0.
            least = _ROUNDING * max(map(abs, (number, *values)))
            fitting = [
                name
                for name, fold in _FOLDS.items()
                if abs(fold(values, weights) - number) <= least
            ]
            if key[1] == _BESIDE:
                adds_up = "sum" in fitting
                # A constant or a running maximum may seem to add up, but the last part leaves it
                # unchanged.
                if not adds_up or (number and values[-1]):
                    self._verdicts[key] = "sum" if adds_up else "another"
            # Equal numbers fit mean, max and min alike, and decide nothing.
            elif len(fitting) == 1:
                self._verdicts[key] = fitting[0]
            elif "mean" in fitting and "sum" not in fitting:  # the same number in all parts
                self._verdicts.setdefault(key, "mean")

    # After the batch

    def tell(self, loss: Tensor | None) -> None:
        """Make the deferred calls with the values of the whole batch, given its loss."""
        for note in self._notes.values():
            if note.tell is not None:
                weight = note.weights[-1]
                # If a microbatch gave no weight, pass on the last one (usually None): the host then
                # uses its own.
                if self.is_split and None not in note.weights:
                    weight = self._weight(note)
                note.tell(self._settled(note, loss), weight)
        self._settle(loss)
        for tell in self._later:
            tell()
        self._forget()

    def values(self, what: str) -> list[Any]:
        """The values recorded in each microbatch, not joined."""
        note = self._notes.get((what, 0))
        return [] if note is None else note.values

    def join(self, what: str, values: Sequence[Any]) -> Any:
        """Join the values of microbatches into the value of the batch."""
        indices, weights = list(range(len(values))), [None] * len(values)
        return self._join(_Note(what=what, indices=indices, values=list(values), weights=weights))

    def told(self, what: str, loss: Tensor | None) -> Any:
        """The batch's value of a record without a call; None if nothing was recorded."""
        note = self._notes.get((what, 0))
        return None if note is None else self._settled(note, loss)

    def _settled(self, note: _Note, loss: Tensor | None) -> Any:
        """The batch's value, or its loss if the value was the loss in each microbatch."""
        if not self.is_split:
            return note.values[-1]
        self._settle(loss)
        if note.whole is not None:
            return note.whole()
        is_python = is_number(note.values[0]) and not isinstance(note.values[0], Tensor)
        return note.joined.item() if is_python else note.joined

    def _settle(self, loss: Tensor | None) -> None:
        """Write the batch's loss, which may be no mean over rows, to where it was emitted."""
        for value, is_loss in self._may_be_loss:
            if loss is not None:
                # Decide on the device: reading the answer would synchronize once for each number
                # that is logged.
                value.copy_(torch.where(is_loss, loss.to(value), value))
        self._may_be_loss.clear()

    def _is_loss(self, note: _Note) -> Tensor | None:
        """Whether the numbers equal the losses of the microbatches; None if they cannot."""
        losses: list[Tensor] = [each for each in self._losses if each is not None]
        several = torch.stack([_tensor(each) for each in note.values])
        if not len(several) == len(losses) == len(self.rows) or not several.is_floating_point():
            return None
        own = torch.stack([each.to(several) for each in losses])
        return (own == several).all()

    def _weight(self, note: _Note) -> Any:
        """The weight of the batch's value: the sum of weights, unless the weight is constant."""
        counts, rows = note.weights, [self.rows[each] for each in note.indices]
        is_fixed = len(set(counts)) == 1 and counts != rows
        # A weight that is equal in all microbatches may be the whole batch's, or a constant like 1.
        is_fixed = is_fixed and (counts[0] == sum(rows) or any(counts[0] % each for each in rows))
        return counts[0] if is_fixed else sum(counts)

    # Joining values

    def _join(self, note: _Note) -> Any:
        """Join one value per microbatch into one value."""
        what, values, first = note.what, note.values, note.values[0]
        if not self.is_split:
            if self._sorted_by is not None and _holds_rows(first, sum(self.rows)):
                self._refuse_rows(what)
            return first
        if note.is_set:
            return values[-1]
        # A step that returns None for each microbatch also returns None for the batch.
        if all(each is None for each in values):
            return None
        if all(map(is_number, values)):
            joined = self._join_numbers(note)
            return joined if isinstance(first, Tensor) else joined.item()
        is_appended = note.entries_of is not None
        if all(isinstance(each, list) for each in values):
            # One entry of each microbatch of one row is more likely one of the batch.
            are_rows = not note.is_single and self._are_rows(values)
            if are_rows and not (is_appended and max(self.rows) == 1):
                self._refuse_rows(what)
                return [each for value in values for each in value]
            lengths = list(map(len, values))
            if is_appended and lengths != lengths[:1] * len(self.rows):
                self.name_once(
                    what,
                    f"{what} got {lengths} entries from the microbatches of one batch, so they "
                    "depend on the microbatch size. Append once per batch, in a hook that runs "
                    "after it",
                )
                return [each for value in values for each in value]
        if len(values) < len(self.rows) or any(type(each) is not type(first) for each in values):
            return self._as_they_are(what, values)
        if isinstance(first, Tensor):
            return self._join_tensors(note)
        if kind_of(type(first)) in STRUCTURES or isinstance(first, list | tuple):
            keys = list(open_container(first)[0])
            opened = [dict(zip(*open_container(each), strict=True)) for each in values]
            if all(each.keys() == set(keys) for each in opened):
                parts = [self._join(note.part(key, [e[key] for e in opened])) for key in keys]
                return builder(first, keys)(parts)
            return self._as_they_are(what, values)
        if isinstance(first, str | bytes | bool) and all(each == first for each in values):
            return first
        with contextlib.suppress(BatchError, TypeError):
            together = concat_rows(values)
            self._refuse_rows(what)
            return together
        return self._as_they_are(what, values)

    def _join_numbers(self, note: _Note) -> Tensor:
        """Reduce numbers as checks have shown, or else as declared."""
        rows = [self.rows[each] for each in note.indices]
        several = torch.stack([_tensor(each) for each in note.values])
        verdict = note.reduce if note.is_known else self._verdicts.get((note.what, note.nth))
        fold = verdict or self._assumed(note, several, rows)
        is_loss = self._is_loss(note)
        if fold in ("nanmin", "nanmax"):
            kept = several[~several.isnan()]
            several, fold = kept if len(kept) else several, fold.removeprefix("nan")
        if fold != "mean":
            joined: Tensor = several.sum(0) if fold == "sum" else getattr(several, f"a{fold}")(0)
        else:
            weights = note.weights
            if None in weights or self._weight(note) != sum(weights):
                weights = rows
            # float32 would round integers above 2^24.
            wide = torch.promote_types(several.dtype, torch.float32)
            wide = wide if several.is_floating_point() else torch.float64
            shares = torch.tensor(weights, dtype=wide).to(several.device) / sum(weights)
            mean = (several.to(wide) * shares).sum(0)
            # A mean of equal numbers may differ in the last bit, but a constant must stay exact.
            is_same = (several == several[0]).all()
            joined = torch.where(is_same, several[0].to(wide), mean).to(several.dtype)
        if is_loss is not None:
            self._may_be_loss.append((joined, is_loss))
        return joined

    def _assumed(self, note: _Note, several: Tensor, rows: Sequence[int]) -> str:
        """The reduction of numbers that no check has shown; a guess is reported in a warning."""
        fold = note.reduce if note.reduce in _FOLDS else "mean"
        is_same = bool((several == several[0]).all())
        is_checked = (note.what, note.nth) in self._checked
        if several.tolist() == list(rows):
            # With equal sizes, a count of rows looks like a constant that happens to be as large.
            fold, is_sure = "sum", not is_same
        elif fold == "mean" and not several.is_floating_point():
            fold, is_sure = "mean" if is_same else "sum", is_same
        elif fold == "mean" and (is_same or is_checked or None not in note.weights):
            is_sure = True
        else:
            is_loss = self._is_loss(note)
            is_sure = is_loss is not None and bool(is_loss)
        if not is_sure:
            self.name_once(
                note.what,
                f"{note.what} is one number in each microbatch, and automicro takes their {fold} "
                "as the value of the batch, which no check has confirmed. Let a metric count it, "
                "return a value for each row, or keep batches whole with microbatch_size=None",
            )
        return fold

    def _join_tensors(self, note: _Note) -> Any:
        what, values = note.what, note.values
        if note.is_single:
            joined = self._join(replace(note, values=[each.reshape(()) for each in values]))
            return joined.reshape(values[0].shape)
        for dim in self._dims:
            if [each.shape[dim : dim + 1] for each in values] == [(n,) for n in self.rows]:
                self._refuse_rows(what)
                with contextlib.suppress(RuntimeError):
                    return self._concat(list(values), dim)
        return self._as_they_are(what, values)

    def _are_rows(self, pieces: Sequence[Sequence[Any]]) -> bool:
        """Whether each microbatch has an entry for each of its rows."""
        # Two tensors of two rows each match the number of rows only by chance: their rows are
        # inside the tensors.
        if [len(each) for each in pieces] != self.rows:
            return False
        rows = self.rows[0]
        return (
            rows == 1
            or any(each != rows for each in self.rows)
            or not all(
                isinstance(entry, Tensor)
                and any(entry.shape[dim : dim + 1] == (rows,) for dim in self._dims)
                for piece in pieces
                for entry in piece
            )
        )

    # Errors and warnings

    def _refuse_rows(self, what: str) -> None:
        if self._sorted_by is not None:
            raise LossError(
                f"{what} has a value for each row, but microbatch_unit={self._sorted_by!r} sorts "
                "the rows, so the values would be in another order. Return one number (a mean, or "
                "a metric), or use microbatch_unit='rows'"
            )

    def _as_they_are(self, what: str, values: Sequence[Any]) -> Any:
        self.name_once(
            what,
            f"{what} is a {type(values[0]).__name__} in each microbatch, and the {len(values)} "
            "values of a batch cannot be joined, so they are returned as a list. Return numbers "
            "or one value per row, or keep batches whole with microbatch_size=None, "
            "eval_microbatch_size=None",
        )
        return list(values)

    def name_once(self, what: str, text: str) -> None:
        """Warn about an emitted value once."""
        if what not in self._named:
            self._named.add(what)
            warn(text, MetricWarning)


class _Announcing(Feature):
    """Mark the microbatches of a batch, in contrast to fillers for other ranks."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def before(self, run: MicrobatchRun) -> None:
        self._recorded.is_filler = False


def detached(value: Any) -> Any:
    """Detach a value from the graph, which holds the activations of the forward."""
    if isinstance(value, Tensor):
        return value.detach()
    return map_tensors(value, Tensor.detach) if isinstance(value, Mapping | list | tuple) else value


def is_number(value: Any) -> bool:
    """Whether a value is a single real number and not a bool."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype is not torch.bool and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    return (
        float(value.detach() if isinstance(value, Tensor) else value) if is_number(value) else None
    )


def _at(roots: Mapping[str, Any], path: str) -> Any:
    """The value at a path from `Captured.changed`; None if it no longer exists."""
    first, *rest = _STEP.findall(f".{path}")
    found: Any = roots.get(first[0])
    for name, key in rest:
        try:
            found = getattr(found, name) if name else found[ast.literal_eval(key)]
        except (AttributeError, LookupError, TypeError, ValueError, SyntaxError):
            return None
    return found


def _opened(value: Any) -> tuple[list[Any], set[int]]:
    """All leaves of nested containers, and the lengths of lists and tensors."""
    if not isinstance(value, Mapping | list | tuple):
        return [value], set(value.shape[:1] if isinstance(value, Tensor) else ())
    parts = [_opened(each) for each in open_container(value)[1]]
    sizes = {len(value)} if isinstance(value, list) else set()
    return [e for leaves, _ in parts for e in leaves], sizes.union(*(s for _, s in parts))


def _is_one(value: Any) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return is_number(value.reshape(()) if is_one else value)


def _with_ends(roots: Mapping[str, Any], path: str) -> str:
    """The path of a changed value, or of its deque, because indices in a deque shift."""
    owner = path.rpartition("[")[0]
    return owner if owner and isinstance(_at(roots, owner), collections.deque) else path


def _counts_rows(held: Held) -> bool:
    """Whether a value is a module in an attribute of the step's owner, or a metric anywhere."""
    is_metric = callable(getattr(held.value, "compute", None))
    return isinstance(held.value, nn.Module) and (is_metric or held.what.count(".") == 1)


def _tensor(number: Any) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=None if isinstance(number, int) else torch.float64)


def _without_lists(value: Any, rows: int) -> Any:
    """Outputs without lists with an entry per row, which are joined entry by entry."""
    if isinstance(value, list) and len(value) == rows and not isinstance(value[0], Tensor):
        return None
    if isinstance(value, Mapping):
        return {key: _without_lists(each, rows) for key, each in value.items()}
    return tuple(_without_lists(e, rows) for e in value) if type(value) is tuple else value


def _numbers_in(what: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the numbers in nested containers, with a description of each."""
    if isinstance(value, Mapping | list | tuple):
        for key, each in zip(*open_container(value), strict=True):
            yield from _numbers_in(f"{what}[{key!r}]", each)
    elif is_number(value):
        yield what, value


def _holds_rows(value: Any, num_rows: int) -> bool:
    """Whether a value may have one entry for each of several rows."""
    if num_rows < 2:
        return False
    if isinstance(value, list) and len(value) == num_rows:
        return True
    return any(num_rows in tensor.shape for _, tensor in tensor_leaves(value))


# Metrics of torchmetrics

_OF_A_CALL = BatchLayout({"0": "fields"})  # positional arguments, each with all rows
_REDUCED = {"SumMetric": "sum", "MaxMetric": "max", "MinMetric": "min"}


class StepMetrics(Metrics):
    """Metrics of torchmetrics that a step calls, as a part of its transaction."""

    # Each microbatch updates them with its rows. A value without rows, such as the loss, updates
    # them once, with the value of the batch. If the result of a call is logged, the logged value is
    # that of the batch.

    def __init__(
        self, model: Callable[[], nn.Module], recorded: Recorded, random_state: Callable[[], Part]
    ) -> None:
        super().__init__(())
        self._model, self._recorded = model, recorded
        self._guard = MetricGuard(self._check, _OF_A_CALL, random_state, is_callers=False)
        self._own: Callable[..., Any] | None = None  # the original method that a check calls
        self._is_filler = False  # whether the step only serves the collectives of other ranks
        self._forget()

    def _forget(self) -> None:
        self._shadows: list[tuple[Any, Any]] = []
        # By the id of a returned value: the value itself (ids are reused), its metric and its key.
        self._returned: dict[int, tuple[Any, Any, Any]] = {}
        self._of_batch: dict[int, Any] = {}  # by the metric's id
        self._places = Replacements()

    def _found(self) -> dict[str, Any]:
        found = {name: each for name, each in self._model().named_modules() if _is_metric(each)}
        known = set(map(id, found.values()))
        # Metrics in dictionaries, plain objects and trainers are not submodules of the model.
        held = (each for each in self._recorded.held() if _is_metric(each.value))
        return found | {each.what: each.value for each in held if id(each.value) not in known}

    def begin(self) -> None:
        self._forget()
        self._metrics = list(self._found().values())
        super().begin()

    def _check(self, metric: Any, call: Any, same: Any) -> None:
        assert self._own is not None
        self._own(*call[0], **call[1])

    def _listen(self, metric: Any, what: str, *, counts: bool) -> None:
        """Record the arguments and results of a metric's calls."""
        # `counts` is False in a check, where metrics get their values immediately.
        shadow: Any = None
        of_batch = self._of_batch  # the next batch may have replaced it before the deferred call

        def waits(call: Any, own: Callable[..., Any]) -> bool:
            """Whether the value has no rows, so that the metric gets the batch's value once."""
            is_one = len(call[0]) == 1 and not call[1]
            value = call[0][0] if is_one else call
            if not self._recorded.is_single(what, value):
                return False

            def tell(joined: Any, _: Any) -> None:
                given, named = ([joined], {}) if is_one else joined
                of_batch[id(metric)] = own(*given, **named)

            reduce = _REDUCED.get(type(metric).__name__, "mean")
            self._recorded.note(what, value, reduce=reduce, tell=tell)
            return counts

        def called(own: Callable[..., Any], is_forward: bool, /, *given: Any, **named: Any) -> Any:
            nonlocal shadow
            # A check of this metric, or of one that contains it, calls the original method.
            if self._own is not None or self._is_filler:
                return own(*given, **named)
            value, call = None, (given, named)
            if not waits(call, own):
                if is_forward and counts and shadow is None:
                    shadow = _emptied(metric)
                    self._shadows.append((metric, shadow))
                self._look(metric, call, own)
                # A forward also updates the metric.
                with contextlib.nullcontext() if is_forward else self._guard.reading(metric, what):
                    value = own(*given, **named)
                if shadow is not None and is_forward:
                    named = {key: detached(each) for key, each in named.items()}
                    shadow.update(*map(detached, given), **named)
            elif is_forward:  # the microbatch's value, from an empty metric
                value = _emptied(metric)(*given, **named)
            for key, part in value.items() if isinstance(value, Mapping) else [(None, value)]:
                self._returned[id(part)] = part, metric, key
            return value

        for name in ("update", "forward"):
            own = getattr(metric, name)
            self._places.put(metric, name, functools.partial(called, own, name == "forward"))

    def _look(self, metric: Any, call: Any, own: Callable[..., Any]) -> None:
        self._own = own
        try:
            self._guard.look(metric, call, call)
        finally:
            self._own = None

    @contextlib.contextmanager
    def step(
        self, rows: int, num_rows: int, counts: Mapping[str, float] | None = None
    ) -> Iterator[None]:
        """Record what a microbatch of a batch emits, and its calls of metrics."""
        self._is_filler = self._recorded.is_filler and not is_extra_pass()
        with self._recorded.step(rows, counts), self._heard(is_split=rows < num_rows):
            yield

    @contextlib.contextmanager
    def _heard(self, *, is_split: bool) -> Iterator[None]:
        """Record calls of metrics during a step; in a batch, recording goes on until `prepare`."""
        is_extra = is_extra_pass()
        is_first = is_split and len(self._recorded.rows) == 1 and not self._is_filler
        if is_extra or is_first:
            self._guard.expect(is_split=not is_extra)
            for name, metric in self._found().items():
                if hasattr(metric, "_forward_cache"):
                    what = f"{type(metric).__name__} ({name})"
                    self._listen(metric, what, counts=not is_extra)
        try:
            yield
        finally:
            if is_extra:
                self._places.close()
                self._returned.clear()

    def whole_of(self, value: Any) -> Callable[[], Any] | None:
        """Return a getter for the batch's value if a metric returned this value; None otherwise."""
        found = self._returned.get(id(value))
        if found is None or found[0] is not value:
            return None
        (_, metric, key), of_batch = found, self._of_batch
        return lambda: of_batch[id(metric)] if key is None else of_batch[id(metric)][key]

    def prepare(self) -> None:
        self._places.close()
        self._returned.clear()
        for metric, shadow in self._shadows:
            metric._forward_cache = self._of_batch[id(metric)] = shadow.compute()
        super().prepare()

    def commit(self) -> None:
        self._forget()

    def roll_back(self) -> None:
        self._places.close()
        super().roll_back()
        self._forget()


def _is_metric(module: Any) -> bool:
    return is_of_torchmetrics(module) or is_of_torchmetrics(module, "MetricCollection")


def _emptied(metric: Any) -> Any:
    """Return an empty copy of a metric, without copying its states."""
    # Cached results may hold a graph, which cannot be copied.
    metric._forward_cache = metric._computed = None
    # States may fill the device, because curves keep all rows.
    states = [getattr(metric, name) for name in metric._defaults]
    memo = {id(each): [] if isinstance(each, list) else each for each in states}
    shadow = copy.deepcopy(metric, memo)
    # A copied replacement of `forward` calls the original metric, also inside of a wrapper.
    for each in shadow.modules():
        vars(each).pop("forward", None)
    shadow.reset()
    shadow._to_sync = metric.dist_sync_on_step  # like the value that a forward returns
    return shadow


# Methods of hosts


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method so that it holds its object weakly; return other functions unchanged.

    Example:
        >>> class Host:
        ...     def step(self):
        ...         return "done"
        >>> host = Host()
        >>> step = weakly(host.step)
        >>> step()
        'done'
        >>> del host
        >>> step()
        Traceback (most recent call last):
        ...
        ReferenceError: the object of Host.step no longer exists
    """
    if not inspect.ismethod(method):
        return method
    # A reference cycle between trainer and Microbatcher would keep both, with their device memory,
    # until the next garbage collection.
    reference, name = weakref.WeakMethod(method), method.__qualname__

    def call(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is None:
            raise ReferenceError(f"the object of {name} no longer exists")
        return found(*args, **kwargs)

    return call


class Replacements(contextlib.ExitStack):
    """Replace methods of a host until `close` restores them, in reverse order.

    Example:
        >>> class Host:
        ...     def step(self):
        ...         return "the host's"
        >>> host, replacements = Host(), Replacements()
        >>> own = replacements.put(host, "step", lambda: "ours, around " + own())
        >>> host.step()
        "ours, around the host's"
        >>> replacements.close()
        >>> host.step(), vars(host)
        ("the host's", {})
    """

    def put(self, owner: Any, name: str, function: Any) -> Any:
        """Replace a method with a function, or a class's property; return the original."""
        # On the instance, so that subclasses and other objects of the class are not affected.
        own = getattr(owner, name)
        earlier = vars(owner).get(name, _MISSING)
        self.callback(_put_back, owner, name, earlier)
        # A capture of the owner would report each new bound method or plain function as a change.
        setattr(owner, name, function if isinstance(function, property) else _StandIn(function))
        return own


class Results:
    """Results of a host's last training and evaluation steps."""

    last: StepResult | None = None  # of the last training batch
    last_evaluation: EvalResult | None = None  # of the last evaluated batch

    @property
    def microbatch_size(self) -> int | None:
        """Rows of the largest microbatch of the last training batch; None before the first."""
        return None if self.last is None else self.last.microbatch_size

    @property
    def eval_microbatch_size(self) -> int | None:
        """Rows of the largest microbatch of the last evaluated batch; None before the first."""
        return None if self.last_evaluation is None else self.last_evaluation.microbatch_size


class _StandIn:
    """A replaced method that a capture of its owner does not report as a change."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Bind like a function, if put on a class."""
        return self if owner is None else types.MethodType(self, owner)


def _put_back(owner: Any, name: str, earlier: Any) -> None:
    # Remove the entry of a method that came from the class: it would hide later changes there.
    if earlier is not _MISSING:
        setattr(owner, name, earlier)
    elif name in vars(owner):
        delattr(owner, name)
