"""Shared parts of integrations: seams of hosts, methods, reports, and values of steps."""

import ast
import collections
import contextlib
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
from torch import Tensor, nn

from automicro.batch.device import on_host
from automicro.batch.joining import concat_rows
from automicro.batch.tensors import builder, map_tensors, open_container, tensor_leaves
from automicro.batch.types import STRUCTURES, kind_of
from automicro.errors import BatchError, LossError, MetricWarning, warn
from automicro.features import WORDS, with_features
from automicro.loss.conventions import Output
from automicro.loss.passes import is_extra_pass
from automicro.microbatcher import Microbatcher
from automicro.state.capture import Captured, capture
from automicro.state.part import State
from automicro.step.results import EvalResult, StepResult
from automicro.values import OBJECT, kinds_of

_MISSING = object()


OURS = (
    "model", "loss_fn", "forward", "backward", "optimizer", "precision", "device", "state",
    "scales_for_ranks", "carry_layout", "update_metric",
)  # fmt: skip
"""Arguments of a `Microbatcher` and words for features that trainers give themselves."""


def check_options(call: str, options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse an option that there is not, or that is the host's own.

    Raises:
        TypeError: one of these was given.

    >>> check_options("enable", {"microbatch_size": 4}, {"forward": "the host's"})
    """
    known = {*inspect.signature(Microbatcher).parameters, *WORDS} - {*own}
    for name in options:
        if name in own:
            raise TypeError(f"{call}({name}=…): that is {own[name]}; leave it out")
        if name not in known:
            raise TypeError(
                f"{call}({name}=…) is not known; give options of Microbatcher: "
                f"{', '.join(sorted(known))}"
            )


def microbatcher_of(
    model: nn.Module,
    options: Mapping[str, Any],
    *,
    kind: type[Microbatcher] = Microbatcher,
    **own: Any,
) -> Microbatcher:
    """A Microbatcher with the options of a user, and what a host says itself.

    In a host each rank's loss is a mean of its own, and a wrong average would go unseen.
    """
    given = {"probe": "error", "scales_for_ranks": False, **options, **own}
    return kind(model, **with_features(given))


def is_written_by(hosts: Iterable[str], code: Any) -> bool:
    """Whether a class or a function, under its decorators, is of one of these packages."""
    module = getattr(inspect.unwrap(code), "__module__", None)
    return str(module).partition(".")[0] in hosts


def import_host(name: str, *, extra: str) -> ModuleType:
    """A module of a host's.

    Args:
        name: of the module.
        extra: of automicro, which installs it.

    Raises:
        ImportError: it is not there; the message says how to get it.

    Example:
        >>> import_host("json", extra="json").__name__
        'json'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        # A host that is there and lacks a package of its own must not be called missing.
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise  # it is there, and lacks something else
        raise ImportError(
            f"automicro.integrations.{extra} works inside {name.partition('.')[0]}, which is not "
            f"installed; pip install 'automicro[{extra}]'",
            name=error.name,
        ) from error


def require_seam(
    owner: Any, name: str, parameters: Sequence[str] = (), *, host: str, supported: str
) -> Any:
    """A method of the host's that an integration stands on.

    Args:
        owner: the object or module that has it.
        name: of the method.
        parameters: that it has to take by these names.
        host: the package, as it is installed.
        supported: which versions are, in words.

    Raises:
        ImportError: this version of the host has it no more, or it takes other parameters.

    Example:
        >>> import json
        >>> require_seam(json, "dumps", ["obj"], host="json", supported="json 2") is json.dumps
        True
    """
    found: Any = getattr(owner, name, None)
    place = getattr(owner, "__name__", type(owner).__name__)
    lacks = [] if callable(found) else [f"{place}.{name}"]
    if not lacks:
        # By name, as a version may keep the method and mean other things by its arguments.
        taken = inspect.signature(found).parameters
        lacks = [f"the parameter {each!r} of {name}" for each in parameters if each not in taken]
    if not lacks:
        return found
    try:
        version = importlib.metadata.version(host)
    except importlib.metadata.PackageNotFoundError:
        version = "of no known version"
    raise ImportError(
        f"{host} {version} lacks {', '.join(lacks)}, which automicro stands on; use {supported}, "
        "or tell automicro's developers",
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
_LOOKS = 3  # at batches that are cut
_DEEPEST = 3  # of mappings in mappings
_ROUNDING = 1e-4  # of a number that a check computes in one part and in several
RETURNS = "what the step returns"
_STEP = re.compile(r"\.(\w+)|\[(.+?)\](?=[.\[]|$)")  # in a path
_BESIDE = -1  # in place of which call it was, of a number that a step has moved
_Key = tuple[str, int]  # what it is, and which of such calls
_Heard = dict[_Key, tuple[float, float]]  # each with its weight
_Tell = Callable[[Any, Any], Any]


class Held(NamedTuple):
    """A value that steps may change.

    Attributes:
        what: it is, in words.
        key: the last name in there.
        value: that.
    """

    what: str
    key: str
    value: Any


@dataclass(kw_only=True)
class _Note:
    """One call that microbatches make, and what it was given in each.

    Attributes:
        what: it is, in words.
        nth: of the calls that are the same in words.
        reduce: how several become one, as far as that was said.
        tell: the call, of the batch's value and weight; None where the value is asked for.
        whole: gives the batch's value, where something else knows it.
        indices: of the microbatches.
        values: in these.
        weights: likewise; None where rows weigh.
        is_kept: whether it is asked for as it is.
        is_single: whether it has nothing of rows, though a microbatch may have one row.
        joined: the batch's.
    """

    what: str
    nth: int = 0
    reduce: str = "mean"
    tell: _Tell | None = None
    whole: Callable[[], Any] | None = None
    indices: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    is_kept: bool = False
    is_single: bool = False
    joined: Any = None

    def part(self, key: Any, values: Sequence[Any]) -> "_Note":
        """A part of what was given, by its key."""
        return replace(self, what=f"{self.what}[{key!r}]", values=list(values), weights=[])


@dataclass(kw_only=True)
class _Together:
    """Some rows that a check runs together, and then in parts.

    Attributes:
        rows: how many; 0 where no parts are to come.
        heard: what they told.
        moved: numbers beside the model that they have changed, by place.
        state: what lies beside the model behind them.
        parts: rows and numbers of the parts so far.
    """

    rows: int = 0
    heard: _Heard = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    state: Captured | None = None
    parts: list[tuple[int, _Heard]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Rows of which no part has run."""
        return self.rows - sum(rows for rows, _ in self.parts)


class Recorded:
    """Values that the microbatches of a batch emit, as those of the batch: a part.

    A number is their mean, weighted by rows, unless checks have shown that the number of some rows
    is the sum, the most or the least of those of their parts; one that is always the loss is the
    loss of the batch. What has rows is joined. All else is named once.

    Args:
        beside: gives what steps change beside the model, by name; first what has the step, whose
            own lists are joined.
        is_own: whether an attribute of one of these is the user's: its object, name and value.
        hosts: packages of the host.
        skip: gives further objects that stay as they become.
        dims: where tensors may have rows.
        sorted_by: what rows are sorted by the cost of, in the plural; None for rows in order.
        concat: joins tensors with rows.
        fold_of: how numbers at a place, or in a list of a name, become one; None if unknown.

    Attributes:
        rows: of each microbatch.

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

    def __init__(
        self,
        beside: Callable[[], Mapping[str, Any]] = dict,
        is_own: Callable[[Any, str, Any], bool] = lambda owner, name, value: True,
        hosts: Sequence[str] = (),
        *,
        skip: Callable[[], Sequence[Any]] = tuple,
        dims: Sequence[int] = (0,),
        sorted_by: str | None = None,
        concat: Callable[[list[Tensor], int], Tensor] = torch.cat,
        fold_of: Callable[[str], str | None] = lambda place: None,
    ) -> None:
        self._roots, self._is_own, self._hosts, self._fold_of = beside, is_own, hosts, fold_of
        self._skip = skip
        self._beside = State(beside, skip=self._skipped, is_held=False)
        # At what microbatches change: in training, and in evaluation.
        self._looks: collections.Counter[bool] = collections.Counter()
        self._dims, self._sorted_by, self._concat = dims, sorted_by, concat
        self._verdicts: dict[_Key, str] = {}
        self._checked: set[_Key] = set()
        self._named: set[str] = set()
        self._single: set[str] = set()
        self._heard: _Heard | None = None
        self._heard_rows = 0
        self._forget()

    def _forget(self) -> None:
        self.rows: list[int] = []
        self._losses: list[Tensor | None] = []
        self._notes: dict[_Key, _Note] = {}
        self._later: list[Callable[[], None]] = []
        self._lengths: list[dict[str, int]] = []
        self._times: collections.Counter[str] = collections.Counter()
        self._counts: list[Mapping[str, float]] = []
        self._may_be_loss: list[tuple[Tensor, Tensor]] = []
        self._first: Captured | None = None  # what the first microbatch has left
        self._changed: set[str] = set()  # by that
        self._num_modules: dict[str, int] = {}  # behind it
        self._is_open = False
        self._together = _Together()

    def _skipped(self) -> list[Any]:
        others = (self._of(each, False).values() for each in self._roots().values())
        return [*self._skip(), *itertools.chain(*others)]

    # As a part of the transaction

    def begin(self) -> None:
        self._forget()
        self._beside.begin()
        self._note_lengths()

    def prepare(self) -> None:
        """Join what microbatches told: only here may it take memory."""
        self._is_open = False
        for note in self._notes.values():
            if not (note.whole or note.is_kept or all(map(is_number, note.values))):
                note.joined = self._join(note)
        if self.is_split:
            self._compare()
            for each in self._lists():
                self._join_list(each)

    def commit(self) -> None:
        self._beside.commit()

    def roll_back(self) -> None:
        self._beside.roll_back()
        self._forget()

    # While it runs

    @property
    def is_split(self) -> bool:
        """Whether the batch has several microbatches, as far as they have begun."""
        return len(self.rows) > 1

    @contextlib.contextmanager
    def step(self, rows: int, counts: Mapping[str, float] | None = None) -> Iterator[None]:
        """Around the step of some rows: of a microbatch, or of a check, which is not reported.

        Args:
            rows: it has.
            counts: what else means are over, by the name of a list.
        """
        if is_extra_pass():
            with self._hearing(rows, counts or {}):
                yield
            return
        self.rows.append(rows)
        trains = torch.is_grad_enabled()
        # A comparison of all that a trainer holds costs time, and a step does the same each time.
        if len(self.rows) == 2 and self._looks[trains] < _LOOKS:
            self._looks[trains] += 1
            self._changed, self._num_modules = self._places(self._beside.captured), self._modules()
            self._first = capture(self._roots(), skip=self._skipped())
        self._times.clear()
        self._counts.append(counts or {})
        self._is_open = True
        yield

    def came_to(
        self,
        loss: Tensor | None,
        outputs: Any = None,
        *,
        own: Tensor | None = None,
        is_kept: bool = False,
    ) -> Output | None:
        """The step is over; gives what a check sees of it, None for a microbatch.

        Args:
            loss: that is trained on.
            outputs: of the step.
            own: the loss that the step gave, where it is another.
            is_kept: whether `values` is asked for the outputs.
        """
        own = loss if own is None else own
        if self._heard is not None:
            return self._seen(loss, outputs, _number(own))
        if outputs is not None:
            self.note(RETURNS, outputs, is_kept=is_kept)
        self._is_open = False
        self._losses.append(None if own is None else own.detach())
        self._note_lengths()
        return None

    def note(
        self,
        what: str,
        value: Any,
        *,
        weight: Any = None,
        reduce: str = "mean",
        tell: _Tell | None = None,
        whole: Callable[[], Any] | None = None,
        is_kept: bool = False,
    ) -> None:
        """A step tells something.

        Args:
            what: it is, in words: the same in each microbatch.
            value: a number, or something with rows.
            weight: of a mean, where that is not the rows.
            reduce: how numbers of several batches become one, as far as that was said.
            tell: the call that waits, of the batch's value and weight.
            whole: gives the batch's value, where something else knows it.
            is_kept: whether `values` is asked for it.
        """
        if self._heard is not None:
            for name, each in _numbers_in(what, value) if whole is None else ():
                self._hear(name, each, self._heard_rows if weight is None else weight)
            return
        if not self._is_open:
            return
        key = what, self._times[what]
        self._times[what] += 1
        if key not in self._notes:
            self._notes[key] = _Note(what=what, nth=key[1], reduce=reduce, tell=tell, whole=whole)
        note = self._notes[key]
        note.indices.append(len(self.rows) - 1)
        # With its graph, it would hold a microbatch's activations to the end of the batch.
        note.values.append(detached(value))
        note.weights.append(weight)
        note.is_kept, note.is_single = is_kept, what in self._single

    @property
    def has_told(self) -> bool:
        """Whether the step that runs has told something."""
        return bool(self._times)

    def is_single(self, what: str, value: Any) -> bool:
        """Whether what a step tells has nothing of rows, as far as it can be told from one."""
        leaves, sizes = _opened(value)
        if not all(isinstance(each, str | bool | None) or _is_one(each) for each in leaves):
            return False
        # Of one row, or as many as a list has entries, it might be either.
        if (self._heard_rows if self._heard is not None else self.rows[-1]) not in sizes:
            self._single.add(what)
        return what in self._single and any(map(_is_one, leaves))

    def later(self, tell: Callable[[], None]) -> None:
        """Something is told once for the batch, when that is certain."""
        self._later.append(tell)

    # What steps change beside the model

    def _compare(self) -> None:
        """Name what each microbatch has changed, unless checks have seen that it adds up."""
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

        # Made where it was missing, a module is made once; others come with each microbatch.
        now, before = self._modules(), self._num_modules
        grown = {what for what, number in now.items() if number != before.get(what, number)}
        new = sorted({*filter(depends, self._changed), *grown} - self._named)
        self._named.update(new)
        if new:
            warn(
                f"{', '.join(new)} changed in each microbatch of one "
                "batch, and would have changed once; change it where something runs once a batch "
                "(a callback), or let it add up by rows; said once",
                MetricWarning,
            )

    def _places(self, captured: Captured | None) -> set[str]:
        """Where something has changed since a capture, and is neither joined nor counts rows."""
        assert captured is not None
        roots, starts = self._roots(), self._lengths[0]
        with on_host():  # what is compared takes no memory of a batch
            found = set(captured.changed())
        # Of a list that grows, what is new is joined; modules there, such as metrics, count rows.
        apart = [f"{each.what}." for each in self.held() if _counts_rows(each)]
        for what, _, values in self._lists():
            apart += [f"{what}[{n}]" for n in range(starts.get(what, 0), len(values))]
        kept = (e for e in found if not (e.startswith(tuple(apart)) or self._fold_of(e) == "sum"))
        return {_with_ends(roots, each) for each in kept}

    def _modules(self) -> dict[str, int]:
        """How many modules each module of the step has, such as a tracker of metrics by steps."""
        roots = {**self._roots(), **{each.what: each.value for each in self.held()}}
        return {
            f"{path}.{name}".rstrip("."): len(list(each.children()))
            for path, root in roots.items()
            for name, each in (root.named_modules() if isinstance(root, nn.Module) else ())
        }

    def _note_lengths(self) -> None:
        self._lengths.append({each.what: len(each.value) for each in self._lists()})

    def _of(self, owner: Any, is_own: bool) -> dict[str, Any]:
        """Attributes that are the user's, or those that are not."""
        table = getattr(owner, "__dict__", {})
        return {k: v for k, v in table.items() if self._is_own(owner, k, v) == is_own}

    def held(self) -> Iterator[Held]:
        """All in attributes, in dictionaries there, and in objects that are not a host's."""
        name, owner = next(iter(self._roots().items()), ("", None))
        waiting = [Held(f"{name}.{key}", key, each) for key, each in self._of(owner, True).items()]
        for held in waiting:  # which grows
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

    # In a check of some rows together and in parts

    @contextlib.contextmanager
    def _hearing(self, rows: int, counts: Mapping[str, float]) -> Iterator[None]:
        together = self._together
        # Parts come behind the whole, in the order of a check; other rows begin anew.
        if not 0 < rows <= together.left or rows == together.rows:
            together = self._together = _Together(rows=rows)
        self._heard, self._heard_rows = {}, rows
        lengths = len(self._lengths)
        self._times.clear()
        self._counts.append(counts)
        self._beside.begin()
        try:
            if together.state is not None:
                self._go_on(together, together.state)
            self._note_lengths()
            yield
        except BaseException:
            self._together = _Together()  # what is compared next has nothing to do with this
            raise
        finally:
            self._heard = None
            self._counts.pop()
            del self._lengths[lengths:]
            self._beside.roll_back()

    def _go_on(self, together: _Together, state: Captured) -> None:
        """Let a part find what the whole has left.

        From 0, or where there is none, a number that a step sets seems to add up.
        """
        if not together.parts:
            starts = self._numbers(together.moved)
            for place, number in together.moved.items():
                together.heard[place, _BESIDE] = number - starts.get(place, 0.0), 1.0
        state.put_back()

    def _seen(self, loss: Tensor | None, outputs: Any, own: float | None) -> Output:
        """The loss, outputs with rows, and numbers of the step that has run."""
        assert self._heard is not None
        rows, heard, kept = self._heard_rows, self._heard, {}
        for path, each in tensor_leaves(_without_lists(outputs, rows)):
            dims = [dim for dim in self._dims if each.shape[dim : dim + 1] == (rows,)]
            if each.dim():
                kept[path] = each.movedim(dims[0], 0) if dims else each
        for what, each in _numbers_in(RETURNS, outputs):
            self._hear(what, each, rows)
        for what, name, values in self._lists():
            new = values[self._lengths[-1].get(what, 0) :]
            for value in new if len(new) != rows or rows == 1 else ():
                for label, each in _numbers_in(what, value):
                    self._know(name, (label, self._times[label]))
                    self._hear(label, each, self._counts[-1].get(name, rows))
        told = dict(heard)  # without what lies beside the model, which is learned of, too
        self._learn(self._together, rows, heard)
        named = {
            what if not nth else f"{what}, {nth + 1}": each
            for (what, nth), each in told.items()
            if self._verdicts.get((what, nth), "mean") == "mean"
        }
        is_loss = frozenset(name for name, (value, _) in named.items() if value == own)
        return Output(loss, {}, kept, told=named, told_as_loss=is_loss)

    def _know(self, name: str, key: _Key) -> None:
        """Use the known fold for the numbers of a list."""
        if (fold := self._fold_of(name)) is not None:
            self._verdicts[key] = fold

    def _hear(self, what: str, value: Any, weight: Any) -> None:
        assert self._heard is not None
        number, weight = _number(value), _number(weight)
        key = what, self._times[what]
        self._times[what] += 1
        if number is not None and weight:
            self._heard[key] = number, weight
            self._checked.add(key)

    def _learn(self, together: _Together, rows: int, heard: _Heard) -> None:
        """Tell, once all parts of some rows were seen, how their numbers become those of all."""
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
        # Rows of the next check may add up to those of this one, by chance.
        self._together = _Together()
        parts = [each for _, each in together.parts]
        for key, (number, _) in together.heard.items() if len(parts) > 1 else ():
            if not all(key in each for each in parts):
                continue
            values, weights = zip(*(each[key] for each in parts), strict=True)
            # Relative to the largest, as a sum of both signs may be near 0.
            least = _ROUNDING * max(map(abs, (number, *values)))
            fitting = [
                name
                for name, fold in _FOLDS.items()
                if abs(fold(values, weights) - number) <= least
            ]
            if key[1] == _BESIDE:
                adds_up = "sum" in fitting
                # A constant that is set moves nothing in the last, and neither does a largest so
                # far.
                if not adds_up or (number and values[-1]):
                    self._verdicts[key] = "sum" if adds_up else "another"
            # Equal numbers fit a mean, a largest and a smallest alike, and say nothing.
            elif len(fitting) == 1:
                self._verdicts[key] = fitting[0]
            elif "mean" in fitting and "sum" not in fitting:  # it was the same in all parts
                self._verdicts.setdefault(key, "mean")

    # Afterwards

    def tell(self, loss: Tensor | None) -> None:
        """Make the calls that waited, with what the batch would have given.

        Args:
            loss: of the batch.
        """
        for note in self._notes.values():
            if note.tell is not None:
                weight = note.weights[-1]
                # Without a weight in each, the host takes its own, of the last microbatch.
                if self.is_split and None not in note.weights:
                    weight = self._weight(note)
                note.tell(self._settled(note, loss), weight)
        for tell in self._later:
            tell()
        self._forget()

    def values(self, what: str) -> list[Any]:
        """The values noted in each microbatch, as they are."""
        note = self._notes.get((what, 0))
        return [] if note is None else note.values

    def join(self, what: str, values: Sequence[Any]) -> Any:
        """Join the values of microbatches to that of the batch."""
        return self._join(_Note(what=what, indices=list(range(len(values))), values=list(values)))

    def told(self, what: str, loss: Tensor | None) -> Any:
        """The value noted without a call, as of the batch; None where there is none."""
        note = self._notes.get((what, 0))
        return None if note is None else self._settled(note, loss)

    def _settled(self, note: _Note, loss: Tensor | None) -> Any:
        """The batch's value, with its loss in the place of numbers that always were the loss.

        What a loss averages over need not be rows, so its mean over rows would be another number.
        """
        if not self.is_split:
            return note.values[-1]
        for value, is_loss in self._may_be_loss:
            if loss is not None:
                # On the device, without looking at the answer: that would wait once for each number
                # that is logged.
                value.copy_(torch.where(is_loss, loss.to(value), value))
        self._may_be_loss.clear()
        if note.whole is not None:
            return note.whole()
        if not all(map(is_number, note.values)):
            return note.joined
        joined = self._join_numbers(note)
        are_losses = None if loss is None else self._is_loss(note)
        if loss is None or are_losses is None:
            return joined
        if isinstance(joined, Tensor):
            return torch.where(are_losses, loss.to(joined), joined)
        return float(loss) if bool(are_losses) else joined

    def _is_loss(self, note: _Note) -> Tensor | None:
        """Whether numbers are each microbatch's loss; None where they cannot be."""
        losses: list[Tensor] = [each for each in self._losses if each is not None]
        several = torch.stack([_tensor(each) for each in note.values])
        if not len(several) == len(losses) == len(self.rows) or not several.is_floating_point():
            return None
        own = torch.stack([each.to(several) for each in losses])
        return (own == several).all()

    def _weight(self, note: _Note) -> Any:
        """The weight of a batch's value: counts add up, but for what is always the same."""
        counts, rows = note.weights, [self.rows[each] for each in note.indices]
        is_fixed = len(set(counts)) == 1 and counts != rows
        # What is the same in each microbatch may be the whole batch's, or a constant such as 1.
        is_fixed = is_fixed and (counts[0] == sum(rows) or any(counts[0] % each for each in rows))
        return counts[0] if is_fixed else sum(counts)

    # Several values as one

    def _join(self, note: _Note) -> Any:
        """Several values of one kind, one for each microbatch, as one."""
        what, values, first = note.what, note.values, note.values[0]
        if not self.is_split:
            if self._sorted_by is not None and _holds_rows(first, sum(self.rows)):
                self._refuse_rows(what)
            return first
        # A step that returns nothing returns nothing of a batch, too.
        if all(each is None for each in values):
            return None
        if len(values) < len(self.rows) or any(type(each) is not type(first) for each in values):
            return self._as_they_are(what, values)
        if all(map(is_number, values)):
            joined, is_loss = self._join_numbers(note), self._is_loss(note)
            if is_loss is not None and isinstance(joined, Tensor):
                self._may_be_loss.append((joined, is_loss))
            return joined
        if isinstance(first, Tensor):
            return self._join_tensors(note)
        if isinstance(first, list) and not note.is_single and self._are_rows(values):
            self._refuse_rows(what)
            return [each for value in values for each in value]
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
            together = concat_rows(list(values))
            self._refuse_rows(what)
            return together
        return self._as_they_are(what, values)

    def _join_numbers(self, note: _Note) -> Any:
        """Numbers as one: as checks have shown that they come together, else as is said."""
        first, rows = note.values[0], [self.rows[each] for each in note.indices]
        several = torch.stack([_tensor(each) for each in note.values])
        fold = self._verdicts.get((note.what, note.nth)) or self._assumed(note, several, rows)
        if fold in ("nanmin", "nanmax"):
            kept = several[~several.isnan()]
            several, fold = kept if len(kept) else several, fold.removeprefix("nan")
        if fold != "mean":
            joined = several.sum(0) if fold == "sum" else getattr(several, f"a{fold}")(0)
            return joined if isinstance(first, Tensor) else joined.item()
        weights = note.weights
        if not weights or None in weights or self._weight(note) != sum(weights):
            weights = rows
        # Whole numbers beyond 2^24 would be rounded in float32.
        wide = torch.promote_types(several.dtype, torch.float32)
        wide = wide if several.is_floating_point() else torch.float64
        shares = torch.tensor(weights, dtype=wide).to(several.device) / sum(weights)
        mean = (several.to(wide) * shares).sum(0)
        # A mean of equal numbers may be off by the last bit, and a constant should stay what it is.
        is_same = (several == several[0]).all()
        joined = torch.where(is_same, several[0].to(wide), mean).to(several.dtype)
        return joined if isinstance(first, Tensor) else joined.item()

    def _assumed(self, note: _Note, several: Tensor, rows: Sequence[int]) -> str:
        """How numbers come together that no check has shown, which is said where it is a guess."""
        fold = note.reduce if note.reduce in _FOLDS else "mean"
        is_same = bool((several == several[0]).all())
        if several.tolist() == list(rows):
            # Equal sizes cannot tell a count of rows from a constant that is as large by chance.
            fold, is_sure = "sum", not is_same
        elif fold == "mean" and not several.is_floating_point():
            fold, is_sure = "mean" if is_same else "sum", is_same
        else:
            is_mean = fold == "mean" and (is_same or (note.what, note.nth) in self._checked)
            is_weighted = fold == "mean" and bool(note.weights) and None not in note.weights
            is_loss = None if is_mean or is_weighted else self._is_loss(note)
            is_sure = is_mean or is_weighted or (is_loss is not None and bool(is_loss))
        if not is_sure:
            self.name_once(
                note.what,
                f"{note.what} is one number in each microbatch, and the {fold} of them is taken "
                "for the batch's, which no check has shown. Let a metric count it, give a value "
                "for each row, or keep batches whole with microbatch_size=None",
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
        """Whether each microbatch has an entry for each of its rows.

        Two tensors of two rows are as many by chance: they have the rows in them.
        """
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

    def _join_list(self, growing: Held) -> None:
        """Let a list have the entries of the batch, where each microbatch has appended its own."""
        what, name, values = growing
        ends = [each.get(what, 0) for each in self._lengths]
        pieces = [values[one:other] for one, other in itertools.pairwise(ends)]
        lengths = [len(each) for each in pieces]
        # The list was cleared or cut meanwhile, so that places in it mean nothing.
        if len(values) != ends[-1] or not any(lengths):
            return
        if self._are_rows(pieces) and max(lengths) > 1:
            self._refuse_rows(what)
            return
        if len(set(lengths)) > 1:
            self.name_once(
                what,
                f"{what} got {lengths} entries from the microbatches of one batch, so they depend "
                "on the microbatch size; append once a batch, in a hook that runs after it",
            )
            return
        for nth, each in enumerate(zip(*pieces, strict=True)):
            note = _Note(what=what, nth=nth, values=list(each), indices=list(range(len(each))))
            self._know(name, (what, nth))
            note.weights = [counts.get(name) for counts in self._counts]
            # In place, as others may hold this very list.
            values[ends[0] + nth] = self._join(note)
        del values[ends[0] + lengths[0] :]

    # What is said

    def _refuse_rows(self, what: str) -> None:
        if self._sorted_by is not None:
            raise LossError(
                f"{what} has a value for each row, and microbatch_unit={self._sorted_by!r} sorts "
                "rows: they would come in another order; let it have none (a mean, or a metric), "
                "or count microbatch_unit='rows'"
            )

    def _as_they_are(self, what: str, values: Sequence[Any]) -> Any:
        self.name_once(
            what,
            f"{what} is a {type(values[0]).__name__} in each microbatch, and nothing says how the "
            f"{len(values)} of a batch become one: they are given as a list. Values with a row for "
            "each of the batch, and numbers, are joined; or keep batches whole with "
            "microbatch_size=None, eval_microbatch_size=None",
        )
        return list(values)

    def name_once(self, what: str, text: str) -> None:
        """Warn of something that is told, unless that was warned of."""
        if what not in self._named:
            self._named.add(what)
            warn(text, MetricWarning)


def detached(value: Any) -> Any:
    """Without the graph, which holds the memory of the forward."""
    if isinstance(value, Tensor):
        return value.detach()
    return map_tensors(value, Tensor.detach) if isinstance(value, Mapping | list | tuple) else value


def is_number(value: Any) -> bool:
    """Whether it is one number, and no truth."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype is not torch.bool and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    return (
        float(value.detach() if isinstance(value, Tensor) else value) if is_number(value) else None
    )


def _at(roots: Mapping[str, Any], path: str) -> Any:
    """The value at a place that `Captured.changed` gives; None where it is no more."""
    first, *rest = _STEP.findall(f".{path}")
    found: Any = roots.get(first[0])
    for name, key in rest:
        try:
            found = getattr(found, name) if name else found[ast.literal_eval(key)]
        except (AttributeError, LookupError, TypeError, ValueError, SyntaxError):
            return None
    return found


def _opened(value: Any) -> tuple[list[Any], set[int]]:
    """All that containers hold, and how many entries lists and tensors have."""
    if not isinstance(value, Mapping | list | tuple):
        return [value], set(value.shape[:1] if isinstance(value, Tensor) else ())
    parts = [_opened(each) for each in open_container(value)[1]]
    sizes = {len(value)} if isinstance(value, list) else set()
    return [e for leaves, _ in parts for e in leaves], sizes.union(*(s for _, s in parts))


def _is_one(value: Any) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return is_number(value.reshape(()) if is_one else value)


def _with_ends(roots: Mapping[str, Any], path: str) -> str:
    """A place that has changed; of a queue all, as places in it mean nothing where it moves."""
    owner = path.rpartition("[")[0]
    return owner if owner and isinstance(_at(roots, owner), collections.deque) else path


def _counts_rows(held: Held) -> bool:
    """Whether it is a module of the step's, or a metric in a table: others there are only held."""
    is_metric = callable(getattr(held.value, "compute", None))
    return isinstance(held.value, nn.Module) and (is_metric or held.what.count(".") == 1)


def _tensor(number: Any) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=None if isinstance(number, int) else torch.float64)


def _without_lists(value: Any, rows: int) -> Any:
    """Outputs without lists that have an entry for each row, which are joined entry by entry."""
    if isinstance(value, list) and len(value) == rows and not isinstance(value[0], Tensor):
        return None
    if isinstance(value, Mapping):
        return {key: _without_lists(each, rows) for key, each in value.items()}
    return tuple(_without_lists(e, rows) for e in value) if type(value) is tuple else value


def _numbers_in(what: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Numbers in structures, each with what it is."""
    if isinstance(value, Mapping | list | tuple):
        for key, each in zip(*open_container(value), strict=True):
            yield from _numbers_in(f"{what}[{key!r}]", each)
    elif is_number(value):
        yield what, value


def _holds_rows(value: Any, num_rows: int) -> bool:
    """Whether a value of one microbatch of several rows may have one thing for each of them."""
    if num_rows < 2:
        return False
    if isinstance(value, list) and len(value) == num_rows:
        return True
    return any(num_rows in tensor.shape for _, tensor in tensor_leaves(value))


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not hold its object; any other function is as it was.

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
        ReferenceError: the object of Host.step is there no more
    """
    if not inspect.ismethod(method):
        return method
    # A cycle between trainer and Microbatcher would keep both, and the device's memory, until the
    # garbage collector comes.
    reference, name = weakref.WeakMethod(method), method.__qualname__

    def call(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is None:
            raise ReferenceError(f"the object of {name} is there no more")
        return found(*args, **kwargs)

    return call


class Replacements:
    """Methods of one object or another that stand in for the host's own, until they are undone.

    On the instance, so that subclasses keep theirs and other objects of the class are left alone.

    Example:
        >>> class Host:
        ...     def step(self):
        ...         return "the host's"
        >>> host, replacements = Host(), Replacements()
        >>> own = replacements.put(host, "step", lambda: "ours, around " + own())
        >>> host.step()
        "ours, around the host's"
        >>> replacements.undo()
        >>> host.step(), vars(host)
        ("the host's", {})
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> Any:
        """Let a function stand in the place of a method; returns that."""
        own = getattr(owner, name)
        earlier = vars(owner).get(name, _MISSING)
        self._undo.append(functools.partial(_put_back, owner, name, earlier))
        # No bound method or plain function: a capture of the owner would take each new one for a
        # change.
        setattr(owner, name, _StandIn(function))
        return own

    def undo(self) -> None:
        """Give every place back, the last first."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Replacements":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


class Results:
    """The results of a host's steps.

    Attributes:
        last: of the last training batch; None before the first.
        last_evaluation: of the last evaluated one.
    """

    last: StepResult | None = None
    last_evaluation: EvalResult | None = None

    @property
    def microbatch_size(self) -> int | None:
        """Rows of the largest microbatch of the last training batch; None before the first."""
        return None if self.last is None else self.last.microbatch_size

    @property
    def eval_microbatch_size(self) -> int | None:
        """The same of the last evaluated batch."""
        return None if self.last_evaluation is None else self.last_evaluation.microbatch_size


class _StandIn:
    """A function, of which another for each batch is no news to what captures its owner."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """As functions are bound, in the place of one of a class."""
        return self if owner is None else types.MethodType(self, owner)


def _put_back(owner: Any, name: str, earlier: Any) -> None:
    # The method was the class's: an entry on the instance would hide later changes of it.
    if earlier is _MISSING:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, earlier)
