"""What extra passes change beside tensors of modules: attributes, variables, containers.

Put back afterwards, so that nobody counts rows twice and no state runs ahead.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from automicro.reach import OF_EVERY_MODULE, Variable
from automicro.torch_private import added_tables, gradient_hooks
from automicro.transaction.remembering import CannotRememberError, Remembered, mark_of

MISSING = object()
"""Stands for an attribute that is not there."""

_MOST_BYTES = 2**24  # in a variable that is remembered with all that it holds
_MOST_VALUES = 10_000
_DEPTH = 5


class Added:
    """Hooks and modules that forwards add, with an attribute that says that they have.

    Where such an attribute is put back they have to be as well, or the next forward adds them once
    more. transformers does that at the first forward with ``output_hidden_states``.
    """

    def __init__(self) -> None:
        self._tables: list[dict[Any, Any]] = []
        self._before: dict[int, dict[Any, Any]] = {}  # by id of a table that held anything
        self._leaves: list[tuple[Tensor, list[dict[int, Any]]]] = []

    def add(self, tables: Sequence[dict[Any, Any]]) -> None:
        """Remember what is in these, as `added_tables` gives them, before anything is added."""
        self._tables += tables
        self._before |= {id(table): dict(table) for table in tables if table}

    def add_leaves(self, module: nn.Module) -> None:
        """Hooks of its parameters' gradients, too, where nobody holds them back meanwhile."""
        for leaf in module.parameters(recurse=False):
            self._leaves.append((leaf, [dict(table or {}) for table in gradient_hooks(leaf)]))

    def put_back(self) -> None:
        """Take away what was added, and put back what was taken away."""
        for table in self._tables:
            _put_table(table, self._before.get(id(table), {}))
        for leaf, saved in self._leaves:
            for now, before in zip(gradient_hooks(leaf), saved, strict=True):
                if now is not None:
                    _put_table(now, before)

    def clear(self) -> None:
        """Forget all of it."""
        self._tables.clear()
        self._before.clear()
        self._leaves.clear()


def _put_table(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    is_same = table.keys() == before.keys()
    if not is_same or any(table[key] is not value for key, value in before.items()):
        table.clear()
        table.update(before)


class Surroundings:
    """Plain attributes of modules, and variables of functions: changed or replaced, all is undone.

    Hooks and modules that were added, too. Containers, tensors, arrays and objects stay the same
    ones; what they held comes back into them. What cannot be copied stays as it is, and of a
    variable what is large. A part of a transaction.

    Args:
        modules: whose attributes are put back.
        variables: of functions.
        objects: whose attributes are put back.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> module.seen = [1]
        >>> surroundings = Surroundings([module])
        >>> surroundings.begin()
        >>> module.seen.append(2)
        >>> surroundings.roll_back()
        >>> module.seen
        [1]
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        variables: Sequence[Variable] = (),
        objects: Sequence[Any] = (),
    ) -> None:
        found = {id(each): each for root in modules for each in root.modules()}
        self._modules = list(found.values())
        self._variables = variables
        self._objects = objects
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Variable, Any]] = []
        self._added = Added()
        self._remembered = Remembered()

    def begin(self) -> None:
        for module in self._modules:
            self._added.add(added_tables(module))
            self._added.add_leaves(module)
            self._begin_table(vars(module), apart_from=OF_EVERY_MODULE)
        for each in self._objects:
            self._begin_table(vars(each))
        for variable in self._variables:
            value = variable.value
            self._values.append((variable, value))
            if _is_light(value):
                self._remember(value)

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._tables.clear()
        self._values.clear()
        self._added.clear()
        self._remembered = Remembered()

    def roll_back(self) -> None:
        self._remembered.put_back()
        for variable, value in self._values:
            variable.put(value)
        for table, before in self._tables:
            table.clear()
            table.update(before)
        self._added.put_back()
        self.commit()

    def _begin_table(self, table: dict[str, Any], apart_from: Iterable[str] = ()) -> None:
        self._tables.append((table, dict(table)))
        for name, value in table.items():
            if name not in apart_from and not isinstance(value, nn.Module):
                self._remember(value)

    def _remember(self, value: Any) -> None:
        with contextlib.suppress(CannotRememberError):
            self._remembered.add(value)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a value lies that forwards change: an attribute of a module, or a variable.

    Attributes:
        name: for people.
        read: gives the value; `MISSING` where there is none.
        write: puts it back, or takes it away.
        is_of_metric: whether it is an attribute of a metric, which counts updates by itself.
        owner: the module of which it is an attribute; None for any other place.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    is_of_metric: bool = False
    owner: nn.Module | None = None


class ChangingState:
    """State of Python's that forwards are known to change. A part of a transaction.

    With that of a module go the hooks and modules that its forward adds, also further inside.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._before: list[Any] = []
        self._added = Added()
        self._remembered = Remembered()

    def begin(self) -> None:
        owners = [place.owner for place in self._places if place.owner is not None]
        for module in {id(each): each for root in owners for each in root.modules()}.values():
            self._added.add(added_tables(module))
        for place in self._places:
            value = place.read()
            self._before.append(value)
            with contextlib.suppress(CannotRememberError):
                self._remembered.add(value)

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._before.clear()
        self._added.clear()
        self._remembered = Remembered()

    def roll_back(self) -> None:
        self._remembered.put_back()
        for place, value in zip(self._places, self._before, strict=False):
            place.write(value)
        self._added.put_back()
        self.commit()


class Watched:
    """Notices which attributes and which variables change from one call to the next.

    Args:
        modules: whose attributes are looked at.
        variables: of functions.
        objects: that functions are methods of, whose attributes are looked at.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        variables: Sequence[Variable],
        objects: Sequence[Any] = (),
    ) -> None:
        self._modules = {
            id(module): (f"{name}", module)
            for root in modules
            for name, module in root.named_modules()
        }
        self._variables = variables
        self._objects = objects
        self._marks = self._mark_all()

    def changed(self) -> list[Place]:
        """Where something else lies, or something changed inside, since this was made."""
        places = []
        for key, mark in self._mark_all().items():
            if self._marks.get(key) == mark:
                continue
            kind, where, name = key
            if kind == "variable":
                variable = self._variables[where]
                places.append(
                    Place(name=name, read=lambda v=variable: v.value, write=variable.put)  # type: ignore[misc]
                )
            elif kind == "object":
                owner = self._objects[where]
                what = getattr(owner, "__name__", type(owner).__name__)
                places.append(_attribute(f"{what}.{name}", vars(owner), name))
            else:
                path, module = self._modules[where]
                place = _attribute(f"{path}.{name}".lstrip("."), vars(module), name)
                is_of_metric = all(hasattr(module, each) for each in ("update", "compute", "reset"))
                places.append(replace(place, is_of_metric=is_of_metric, owner=module))
        return places

    def _mark_all(self) -> dict[tuple[str, int, str], Any]:
        marks: dict[tuple[str, int, str], Any] = {}
        for key, (_, module) in self._modules.items():
            table = vars(module)
            for name in table.keys() - OF_EVERY_MODULE:
                if not isinstance(table[name], nn.Module):
                    marks["attribute", key, name] = mark_of(table[name])
        for index, owner in enumerate(self._objects):
            for name, value in vars(owner).items():
                if not isinstance(value, nn.Module):
                    marks["object", index, name] = mark_of(value)
        for index, variable in enumerate(self._variables):
            marks["variable", index, variable.name] = mark_of(variable.value)
        return marks


def plain_marks(root: nn.Module) -> list[Any]:
    """What is another when a plain attribute of any module is: a number, or what a list holds.

    Not where a tensor is replaced, as by a module that keeps what it gave last.

    >>> module = nn.Linear(2, 2)
    >>> before = plain_marks(module)
    >>> module.share = 0.5
    >>> before == plain_marks(module)
    False
    """
    return [
        (name, mark_of(value))
        for module in root.modules()
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and not isinstance(value, nn.Module | Tensor)
    ]


def _attribute(path: str, table: dict[str, Any], name: str) -> Place:
    def write(value: Any) -> None:
        if value is MISSING:
            table.pop(name, None)
        else:
            table[name] = value

    return Place(name=path, read=lambda: table.get(name, MISSING), write=write)


def _is_light(value: Any) -> bool:
    """Whether all that a value holds is little enough to be copied for nothing but a look."""
    waiting, seen, bytes_left = [(value, _DEPTH)], set(), _MOST_BYTES
    while waiting:
        each, depth = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor | np.ndarray):
            bytes_left -= each.nbytes
        elif isinstance(each, nn.Module | type) or callable(each):
            continue
        elif isinstance(each, Mapping):
            waiting += [(part, depth - 1) for part in each.values()]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            waiting += [(part, depth - 1) for part in each]
        elif hasattr(each, "__iter__") and not isinstance(each, str | bytes):
            return False  # loaders and files have a life of their own
        else:
            waiting += [(part, depth - 1) for part in getattr(each, "__dict__", {}).values()]
        if bytes_left < 0 or len(seen) > _MOST_VALUES or depth == 0:
            return False
    return True
