"""Everything that a forward may change, captured before an attempt and put back after a failed one.

Nothing has to be known of a value beforehand. What is reached from the roots is held by identity:
of a module its attributes, of a list its elements, of a function the cells of its closure and the
globals that its code names. Put back, the same objects hold the same values again, so that
everything that shares one sees it come back.

The walk happens once. It leaves flat lists of what the tables, lists and cells hold, which the next
capture compares by identity: one that finds the same objects everywhere is as good as a walk.
"""

import operator
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, compress, islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from automicro.errors import RollbackError
from automicro.state.tensors import SMALL_BYTES, Copies, Leaves, is_freed
from automicro.torch_private import BUFFERS, REGISTERED, gradient_hooks, is_uninitialized
from automicro.values import (
    CLASS,
    DICT,
    FUNCTION,
    LIST,
    OBJECT,
    PARALLEL,
    TENSOR,
    UNREADABLE,
    Kind,
    cells_of,
    differs,
    is_filled,
    is_installed,
    is_owned,
    is_plain,
    kinds_of,
    kinds_within,
    namespaces_of,
    put_table,
    same_objects,
    table_of,
    walk,
)

MOST_VALUES = 200_000  # in all containers together
LONG = 10_000  # elements of a list that is expected only to grow
MANY = 128  # the same where they are tensors, as metrics keep them
ENDS = 16  # elements at both ends of a long list that show that it has
MOST_ARRAY_BYTES = 2**20  # arrays have no versions: each is copied each time


def capture(
    roots: Mapping[str, Any],
    *,
    skip: Iterable[Any] = (),
    large: Mapping[int, Tensor] | None = None,
) -> "Captured":
    """Hold all that is reached from some values, as it is now.

    Args:
        roots: modules, functions and other values that a forward may get at, by name. These are
            meant: a long list, or a large array or tensor, that is one comes back whole.
        skip: objects, or classes of objects, that stay as they become.
        large: where a computation waits to be run again: the only large tensors that are copied,
            by their ids. Tensors with a graph are kept meanwhile, as they are part of its input.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.seen = seen = [1]
        >>> captured = capture({"model": model})
        >>> seen.append(2), setattr(model, "late", 3)
        (None, None)
        >>> list(captured.changed())
        ['model.late', 'model.seen[1]']
        >>> captured.put_back()
        >>> model.seen is seen, seen, hasattr(model, "late")
        (True, [1], False)
    """
    return Captured(roots, tuple(skip), large=large)


class _Holder(NamedTuple):
    """A table, and those of its keys that are held."""

    owner: Any  # a class, or the table
    table: Mapping[Any, Any]
    keys: tuple[Any, ...]
    used: frozenset[str] | None = None  # the names that may come, if not all
    apart: frozenset[str] = frozenset()  # keys that are held by themselves

    @property
    def is_ordered(self) -> bool:
        """Whether the order of keys means anything, as it does not among attributes."""
        return self.used is None and not self.apart and type(self.owner) is dict

    def strangers(self) -> list[Any]:
        """Keys that have come."""
        come = self.table.keys() if self.used is None else self.used & self.table.keys()
        return list(come - set(self.keys) - self.apart)

    def put_back(self, saved: dict[Any, Any]) -> None:
        """Let the table hold this again."""
        if self.is_ordered:
            put_table(self.owner, saved)
            return
        of_class = isinstance(self.owner, type)
        for key in self.strangers():
            type.__delattr__(self.owner, key) if of_class else dict.pop(self.owner, key)
        for key, value in saved.items():
            if self.table.get(key, _GONE) is not value:
                put = type.__setattr__ if of_class else dict.__setitem__
                put(self.owner, key, value)


class _Group:
    """Tables with the same keys, whose values are read and compared together, by identity.

    Attributes:
        holders: the tables.
        held: their values, one table's after the other's; a later capture may put others there.
        places: where tensors lie among these.
    """

    def __init__(self, keys: tuple[Any, ...], holders: list["_Holder"]) -> None:
        self.holders = holders
        self._num_keys = len(keys)
        self._get = operator.itemgetter(*keys)
        self._tables = [each.table for each in holders]
        self.held: list[Any] = list(self._now())
        self.places = {place for place, each in enumerate(self.held) if _is_content(each)}

    def _now(self) -> Iterator[Any]:
        each = map(self._get, self._tables)
        # Of one key alone, itemgetter gives no tuple.
        return chain.from_iterable(each) if self._num_keys > 1 else each

    def is_as_held(self) -> bool:
        """Whether each value is the one that is held; no key or cell that is gone holds any."""
        try:
            return all(map(operator.is_, self._now(), self.held))
        except (KeyError, ValueError):
            return False

    def differences(self) -> tuple[list[Any], list[int]]:
        """What is there now, and at which places it is another."""
        now = list(self._now())
        return now, list(compress(range(len(now)), map(operator.is_not, now, self.held)))

    def each(self) -> Iterator[tuple["_Holder", dict[Any, Any]]]:
        """Each table with what is held of it."""
        rest = iter(self.held)
        for holder in self.holders:
            yield holder, dict(zip(holder.keys, rest, strict=False))


class _Cells(_Group):
    """Cells of closures."""

    def __init__(self, cells: list[Any]) -> None:
        self.holders, self.cells = [], cells
        self.held = list(self._now())
        self.places = {place for place, each in enumerate(self.held) if _is_content(each)}

    def _now(self) -> Iterator[Any]:
        return map(_CONTENTS, self.cells)


_GONE = object()
_MODE = ("training",)
_CONTENTS = operator.attrgetter("cell_contents")
_OF_MODULE = tuple(vars(nn.Module()))
# What says how hooks are called changes with the tables of hooks alone.
_TABLES_OF_MODULE = frozenset(
    name for name, value in vars(nn.Module()).items() if hasattr(value, "clear") or "hook" in name
)
# Of these no forward has any use.
_OF_STATE_DICTS = frozenset(name for name in _TABLES_OF_MODULE if "state_dict" in name)


class _Modes:
    """What holds for the whole thread: gradients, autocast, the default dtype."""

    def __init__(self) -> None:
        self._types = ["cpu"]
        if torch.accelerator.is_available():
            self._types.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]

    def read(self) -> list[Any]:
        """As they are now."""
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return [
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_cache_enabled(),
            nesting,
            *(
                (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
                for each in self._types
            ),
        ]

    def put_back(self, saved: list[Any]) -> None:
        """As they were."""
        if self.read() == saved:
            return
        grad, dtype, cache, nesting, *autocast = saved
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.set_autocast_cache_enabled(cache)
        for each, (enabled, its_dtype) in zip(self._types, autocast, strict=True):
            torch.set_autocast_enabled(each, enabled)
            torch.set_autocast_dtype(each, its_dtype)
        while torch.autocast_increment_nesting() - 1 > nesting:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


class Captured:
    """What `capture` gives.

    Attributes:
        left_out: what is not put back, each with why.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        skip: tuple[Any, ...],
        *,
        large: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._roots, self._skip, self._large = roots, skip, large
        self._given = set(map(id, roots.values()))
        self.left_out: list[tuple[Any, str]] = []
        self._holders: dict[int, _Holder] = {}
        self._empty: list[Any] = []  # tables of modules and tensors: most are
        self._objects: list[Any] = []
        self._flags: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._defaults: list[tuple[types.FunctionType, Any, Any]] = []
        self._cells: list[Any] = []
        self._lists: list[list[Any]] = []
        self._others: list[tuple[Any, Kind, Any]] = []
        self._buffers: dict[int, None] = {}
        self._content: list[Tensor] = []
        self._trained: list[Tensor] = []
        self._walk()
        self._classes = list(map(type, self._objects))
        groups: dict[tuple[Any, ...], list[_Holder]] = {}
        for each in self._holders.values():
            groups.setdefault(each.keys, []).append(each)
        self._bare = groups.pop((), [])
        self._groups = [_Group(keys, group) for keys, group in groups.items()]
        self._of_cells = _Cells(self._cells)
        self._groups.append(self._of_cells)
        self._sized = [each.table for each in self._holders.values()]
        self._sizes = list(map(len, self._sized))
        self._in_order = [each.table for each in self._holders.values() if each.is_ordered]
        self._keys = list(chain.from_iterable(self._in_order))
        self._held_lists = list(map(list.copy, self._lists))
        self._modes = _Modes()
        self._leaves = Leaves(self._trained)
        self._lists_of_tensors = {
            place for place, held in enumerate(self._held_lists) if any(map(_is_content, held))
        }
        in_places = set(map(id, self._in_places()))
        # In tuples and sets, say.
        self._inner = [each for each in self._content if id(each) not in in_places]
        self._content.clear()
        self._take_content()

    def _in_places(self) -> Iterator[Tensor]:
        """The tensors that lie in tables, cells and lists."""
        for group in self._groups:
            yield from filter(_is_content, map(group.held.__getitem__, group.places))
        for place in self._lists_of_tensors:
            yield from filter(_is_content, self._held_lists[place])

    def _take_content(self) -> None:
        content = {id(each): each for each in chain(self._inner, self._in_places())}
        self._let_graphs_go(content)
        self._copies = self._copy(content.values())
        self._global = self._modes.read()

    def _copy(self, tensors: Iterable[Tensor]) -> Copies:
        if self._large is None:
            return Copies(list(tensors), self._buffers)
        return Copies(list(tensors), self._large, watches_others=True)

    # The walk

    def _walk(self) -> None:
        skipped = tuple(each for each in self._skip if isinstance(each, type))
        seen, left = set(map(id, self._skip)), MOST_VALUES
        waiting = list(self._roots.values())
        for number, value in enumerate(waiting):  # which grows meanwhile
            kinds = kinds_of(type(value))
            if id(value) in seen or (skipped and issubclass(type(value), skipped)):
                continue
            seen.add(id(value))
            if not kinds and number < len(self._roots) and hasattr(value, "__dict__"):
                kinds = (OBJECT,)  # given by name, it is meant
            for kind in kinds:
                if left < 0:
                    rest = {
                        id(v): v for v in waiting[number:] if not is_plain(v) and id(v) not in seen
                    }
                    why = f"it is one of over {MOST_VALUES} values"
                    self.left_out += [(each, why) for each in (value, *rest.values())]
                    return
                before = len(waiting)
                waiting += self._hold(value, kind)
                left -= 0 if id(value) in self._given else len(waiting) - before

    def _hold(self, value: Any, kind: Kind) -> Iterable[Any]:
        """Hold what a value holds in one way; gives what of it may hold something itself."""
        if kind is TENSOR:
            return self._hold_tensor(value)
        if kind is OBJECT:
            self._objects.append(value)
            return self._hold_object(value)
        if kind is FUNCTION:
            return self._hold_function(value)
        if kind is CLASS:
            if is_installed(value.__module__):
                return [each for each in value.__mro__ if not is_installed(each.__module__)]
            table = vars(value)
            self._holders[id(value)] = _Holder(value, table, tuple(table))
            return [*table.values(), *value.__mro__[1:]]
        if kind in (DICT, LIST) and self._is_long(value):
            self.left_out.append((value, "of a long list or dict only growth is undone"))
            self._others.append((value, _LONG, _ends(value)))
            return _ends(value)[1:]
        if kind is DICT and type(value) is dict and all(type(key) is str for key in value):
            return self._hold_table(value)
        if kind is LIST and type(value) is list:
            self._lists.append(value)
            return list(value)
        if kind is PARALLEL:
            table = table_of(value)
            self._holders[id(table)] = _Holder(table, table, _MODE, frozenset(_MODE))
        return self._hold_other(value, kind)

    def _hold_table(self, table: dict[Any, Any]) -> Iterable[Any]:
        if table:
            self._holders[id(table)] = _Holder(table, table, tuple(table))
        else:
            self._empty.append(table)
        return table.values()

    def _hold_tensor(self, value: Tensor) -> Iterable[Any]:
        if is_owned(value) or is_uninitialized(value):
            self._trained.append(value)
        else:
            self._content.append(value)
            if id(value) in self._given:  # however large
                self._buffers[id(value)] = None
        if type(value).__module__.startswith("torch.distributed"):
            return ()
        tables = filter(None, gradient_hooks(value))
        found = [hook for table in tables for hook in table.values()]
        return [*found, *self._hold_table(table_of(value))]

    def _hold_object(self, value: Any) -> Iterable[Any]:
        table = table_of(value)
        if not (issubclass(type(value), nn.Module) and table.keys() >= set(_OF_MODULE)):
            return [type(value), *self._hold_table(table)]
        own = tuple(key for key in table if key not in _TABLES_OF_MODULE)
        self._holders[id(table)] = _Holder(table, table, own, apart=_TABLES_OF_MODULE)
        found = [type(value), *(table[key] for key in own)]
        self._flags.append((table, {name: table[name] for name in _TABLES_OF_MODULE}))
        for name in _TABLES_OF_MODULE - _OF_STATE_DICTS:
            inner = table[name]
            if not hasattr(inner, "clear"):
                continue
            if not inner:
                self._empty.append(inner)
            elif name not in REGISTERED or not _is_sharded(inner):
                if name == BUFFERS:
                    self._buffers |= dict.fromkeys(map(id, inner.values()))
                found.append(inner)
            else:
                found += inner.values()
        return found

    def _hold_function(self, value: types.FunctionType) -> Iterable[Any]:
        defaults = value.__defaults__, value.__kwdefaults__
        self._defaults.append((value, *defaults))
        found: list[Any] = list(defaults)
        found += self._hold_table(value.__dict__)
        cells = [cell for _, cell in cells_of(value)]
        self._cells += filter(is_filled, cells)
        self._others += [(c, _EMPTY_CELL, [False]) for c in cells if not is_filled(c)]
        found += [cell.cell_contents for cell in cells if is_filled(cell)]
        for names in namespaces_of(value):
            known = self._holders.get(id(names.owner))
            used = names.used if known is None else names.used | (known.used or frozenset())
            if known is None or known.used is not None:
                keys = tuple(key for key in used if key in names.table)
                self._holders[id(names.owner)] = _Holder(names.owner, names.table, keys, used)
            if names.is_walked:
                found += [names.table[key] for key in names.used & names.table.keys()]
        return found

    def _hold_other(self, value: Any, kind: Kind) -> Iterable[Any]:
        if kind is UNREADABLE:
            self.left_out.append((value, "its state can be neither read nor set"))
            return ()
        is_large = isinstance(value, np.ndarray) and value.nbytes > MOST_ARRAY_BYTES
        if is_large and id(value) not in self._given:
            self.left_out.append((value, f"it is an array of over {MOST_ARRAY_BYTES} bytes"))
            return ()
        if isinstance(value, np.ndarray) and value.dtype == object:
            kind = _OBJECT_ARRAY
        held = kind.read(value)
        if kind.write is not None:
            self._others.append((value, kind, held))
        if kind.is_leaf:
            return ()
        parts = list(held.values()) if type(held) is dict else held
        return [type(value), *parts]

    def _is_long(self, value: Any) -> bool:
        return id(value) not in self._given and _is_long(value)

    # Later captures

    def again(self) -> "Captured":
        """What `capture` would give now; soon where only numbers, texts and tensors are others.

        This one is used up.
        """
        if not self._is_refreshed():
            return Captured(self._roots, self._skip, large=self._large)
        self._take_content()
        return self

    def _is_refreshed(self) -> bool:
        """Take note of what is there now; not done where that takes a walk."""
        if any(self._empty) or not self._has_same_keys() or not self._leaves.refresh():
            return False
        if list(map(type, self._objects)) != self._classes or self._changed_defaults():
            return False
        if not self._take_others():
            return False
        for group in self._groups:
            if group.is_as_held():
                continue
            try:
                now, places = group.differences()
            except (KeyError, ValueError):  # gone
                return False
            if not all(_may_pass(group.held[i]) and _may_pass(now[i]) for i in places):
                return False
            group.places |= {i for i in places if _is_content(now[i])}
            group.held = now
        return self._take_lists()

    def _changed_defaults(self) -> list[str]:
        return [
            f"{function.__name__}.__defaults__"
            for function, defaults, named in self._defaults
            if function.__defaults__ is not defaults or function.__kwdefaults__ is not named
        ]

    def _has_same_keys(self) -> bool:
        if list(map(len, self._sized)) != self._sizes:
            return False
        return list(chain.from_iterable(self._in_order)) == self._keys

    def _take_lists(self) -> bool:
        lists = list(map(list.copy, self._lists))
        for place, (now, held) in enumerate(zip(lists, self._held_lists, strict=True)):
            if not same_objects(now, held):
                others = (pair for pair in zip_longest(now, held) if pair[0] is not pair[1])
                if not all(map(_may_pass, chain.from_iterable(others))):
                    return False
                if self._is_long(self._lists[place]):
                    return False
                if any(map(_is_content, now)):
                    self._lists_of_tensors.add(place)
        self._held_lists = lists
        return True

    def _take_others(self) -> bool:
        for place, (value, kind, held) in enumerate(self._others):
            now = kind.read(value)
            is_same = kind.is_leaf or _same_parts(now, held)
            if not (is_same or all(map(is_plain, chain(_parts(now), _parts(held))))):
                return False
            self._others[place] = value, kind, now
        return True

    def let_go(self) -> None:
        """Hold no content between attempts, and keep no tensor alive; `again` takes what is there.

        What was captured can then no longer be put back.
        """
        self._copies.settle()
        self._copies = self._copy(())
        for group in self._groups:
            for place in group.places:
                group.held[place] = None
        for place in self._lists_of_tensors:
            held = self._held_lists[place]
            self._held_lists[place] = [None if _is_content(each) else each for each in held]
        self._others = [
            (value, kind, None if kind.is_leaf else held) for value, kind, held in self._others
        ]

    def is_settled(self) -> bool:
        """Whether the next capture will need no walk, as things stand."""
        return self._is_refreshed()

    def _let_graphs_go(self, tensors: dict[int, Tensor]) -> None:
        """Let something else stand for tensors with a graph, which lives no longer than meant."""
        stands = {key: _Standing(each) for key, each in tensors.items() if each.grad_fn is not None}
        if not stands:
            return
        for key in stands:
            del tensors[key]
        if self._large is not None:
            return
        for values in (*(group.held for group in self._groups), *self._held_lists):
            for place, each in enumerate(values):
                if id(each) in stands:
                    values[place] = stands[id(each)]
        self._others = [
            (value, kind, _replaced(held, stands)) for value, kind, held in self._others
        ]

    # Putting back

    def put_back(self) -> None:
        """Let everything be as it was. Right also when called twice.

        Raises:
            RollbackError: something was changed that is watched, and not copied. All else is back.
        """
        failures: list[tuple[Any, str]] = []
        for value, its_class in zip(self._objects, self._classes, strict=True):
            if type(value) is not its_class:
                object.__setattr__(value, "__class__", its_class)
        for table, flags in self._flags:
            table.update(flags)
        for function, *defaults in self._defaults:
            function.__defaults__, function.__kwdefaults__ = defaults
        for table in filter(None, self._empty):
            table.clear()
        for holder in self._bare:
            holder.put_back({})
        others = self._groups
        if self._has_same_keys():
            others = [group for group in self._groups if not group.is_as_held()]
        for holder, saved in chain.from_iterable(group.each() for group in others):
            holder.put_back(_meant(saved, holder.table))
        for cell, value in zip(self._cells, self._of_cells.held, strict=True):
            cell.cell_contents = _again(value)
        for values, held in zip(self._lists, self._held_lists, strict=True):
            if not same_objects(values, meant := list(map(_again, held))):
                values[:] = meant
        for value, kind, held in self._others:
            try:
                _put_other_back(value, kind, held)
            except Exception as error:  # the rest comes back all the same
                failures.append((value, str(error)))
        failures += self._copies.put_back()
        moved = list(self._leaves.put_back())
        failures += moved if self._large is None else ()
        if self._large is None:  # else what runs again sets its modes itself
            # Last: contexts that were entered by hand and are let go of here end, and set modes.
            self._modes.put_back(self._global)
        if failures:
            names = self.names()
            told = [f"{names.get(id(value), '?')[0]}: {why}" for value, why in failures]
            raise RollbackError("; ".join(told))

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are copied or watched, and whose writes are counted."""
        return self._copies.counted

    def written(self) -> list[Tensor]:
        """Large tensors and frozen parameters that were written to, and not copied."""
        return [*self._copies.written(), *self._leaves.written()]

    def changed(self) -> Iterator[str]:
        """Where something is not as it was, by path. Waits for the device."""
        names = self.names()
        named = chain.from_iterable(group.each() for group in self._groups)
        for holder, saved in chain(named, ((each, {}) for each in self._bare)):
            now = holder.table
            keys = [key for key, value in saved.items() if _is_gone(value, now.get(key, _GONE))]
            keys += holder.strangers()
            if id(holder.owner) in names:
                path, form = names[id(holder.owner)]
                yield from (f"{path}{form.format(key)}".lstrip(".") for key in keys)
                if not keys and holder.is_ordered and not same_objects(now, saved):
                    yield path
        for values, held in zip(self._lists, self._held_lists, strict=True):
            yield from _changes(names, values, dict(enumerate(held)), dict(enumerate(values)))
        for value, kind, held in self._others:
            now = kind.read(value)
            if kind.is_leaf:
                yield from (
                    names[id(value)][0] for _ in range(differs(held, now)) if id(value) in names
                )
            else:
                yield from _changes(names, value, _as_dict(held), _as_dict(now))
        kinds = zip(self._objects, self._classes, strict=True)
        others = (value for value, kind in kinds if type(value) is not kind)
        for each in chain(
            self._copies.changed(), self._leaves.changed(), filter(None, self._empty), others
        ):
            if id(each) in names:
                yield names[id(each)][0]
        for cell, value in zip(self._cells, self._of_cells.held, strict=True):
            if _is_gone(value, cell.cell_contents):
                yield names.get(id(cell), names.get(id(cell.cell_contents), ("a closure",)))[0]
        yield from self._changed_defaults()
        if self._modes.read() != self._global:
            yield "torch"

    def is_changed(self, tensor: Tensor, *, by_content: bool) -> bool:
        """Whether a tensor is not as it was; by its version alone, that costs next to nothing."""
        return self._copies.is_changed(tensor, by_content=by_content)

    def names(self) -> dict[int, tuple[str, str]]:
        """By the id of a value, or of its table, its path, and how parts are named behind it."""
        found: dict[int, tuple[str, str]] = {}
        kinds = kinds_within(self._roots)
        for path, value in walk(self._roots, kinds):
            kind = kinds(type(value))[0]
            found.setdefault(id(value), (path, kind.name))
            if type(value) is types.FunctionType:
                found.setdefault(id(table_of(value)), (value.__name__, ".{}"))
                for names in namespaces_of(value):
                    start = (
                        "" if names.table is value.__globals__ else names.table.get("__name__", "")
                    )
                    found.setdefault(id(names.owner), (start, ".{}"))
                for name, cell in cells_of(value):
                    found.setdefault(id(cell), (name, ""))
            if hasattr(type(value), "__dict__") and type(value).__dictoffset__:
                table = table_of(value)
                found.setdefault(id(table), (path, ".{}"))
                if issubclass(type(value), nn.Module):
                    inner = ((name, table.get(name)) for name in _TABLES_OF_MODULE)
                    for name, each in inner:
                        start = path if name in REGISTERED else f"{path}.{name}"
                        found.setdefault(id(each), (start, ".{}"))
        return found


class _Standing:
    """Stands for a tensor with a graph, which lives no longer than others want it to.

    One that is gone comes back without its graph; a large one does not come back.
    """

    def __init__(self, value: Tensor) -> None:
        self._ref = weakref.ref(value)
        self._alias = value.detach() if value.nbytes <= SMALL_BYTES else None

    def value(self) -> Tensor | None:
        """The tensor."""
        there = self._ref()
        return self._alias if there is None else there


def _again(value: Any) -> Any:
    """What was held, with the tensors themselves in place of what stands for them."""
    return value.value() if type(value) is _Standing else value


def _meant(saved: dict[Any, Any], now: Mapping[Any, Any]) -> dict[Any, Any]:
    """What a table is to hold; what a wrapper has freed, it has replaced by itself."""
    return {
        key: now[key] if is_freed(value) and key in now else _again(value)
        for key, value in saved.items()
    }


def _is_content(value: Any) -> bool:
    """Whether a value is a tensor that is no parameter, and has its shape."""
    is_tensor = issubclass(type(value), Tensor)
    return is_tensor and not (is_owned(value) or is_uninitialized(value))


def _may_pass(value: Any) -> bool:
    """Whether a value can come and go without a walk."""
    return is_plain(value) or (type(value) is Tensor and not is_owned(value))


def _is_gone(held: Any, now: Any) -> bool:
    """Whether something else lies in the place of what was held."""
    meant = _again(held)
    return meant is not now and (now is _GONE or differs(meant, now))


def _is_sharded(table: Mapping[str, Any]) -> bool:
    """Whether a table's tensors belong to a wrapper that shards, and gathers them for a forward."""
    return any(type(each).__module__.startswith("torch.distributed.") for each in table.values())


def _is_long(value: Any) -> bool:
    if isinstance(value, dict):
        return dict.__len__(value) > LONG
    length = list.__len__(value)
    return length > LONG or (length > MANY and set(map(type, list.__iter__(value))) == {Tensor})


def _ends(value: Any, length: int | None = None) -> tuple[Any, ...]:
    """How many elements there are, and which at both ends of the first so many."""
    base: Any = dict if isinstance(value, dict) else list
    more = 0 if length is None else base.__len__(value) - length
    first, last = base.__iter__(value), islice(base.__reversed__(value), max(more, 0), None)
    return base.__len__(value) - more, *islice(first, ENDS), *islice(last, ENDS)


def _cut(value: Any, saved: tuple[Any, ...]) -> None:
    if not same_objects(_ends(value, saved[0])[1:], saved[1:]):
        raise RollbackError("more than growth was to be undone of so many elements")
    if isinstance(value, dict):
        while dict.__len__(value) > saved[0]:
            dict.popitem(value)
    else:
        list.__delitem__(value, slice(saved[0], None))


def _empty_cell(cell: Any, _: Any) -> None:
    if is_filled(cell):
        del cell.cell_contents


def _write_objects(value: Any, saved: list[Any]) -> None:
    for place, each in enumerate(saved):
        value.flat[place] = each


_OBJECT_ARRAY = Kind(lambda value: list(value.flat), _write_objects)
_LONG = Kind(_ends, _cut, is_leaf=True)
_EMPTY_CELL = Kind(lambda cell: [is_filled(cell)], _empty_cell)


def _parts(held: Any) -> Iterable[Any]:
    return held.values() if type(held) is dict else held


def _as_dict(held: Any) -> dict[Any, Any]:
    return held if type(held) is dict else dict(enumerate(held))


def _same_parts(one: Any, other: Any) -> bool:
    return same_objects(one, other) and (
        type(one) is not dict or same_objects(one.values(), other.values())
    )


def _replaced(held: Any, stands: Mapping[int, Any]) -> Any:
    if type(held) is dict:
        return {key: stands.get(id(each), each) for key, each in held.items()}
    return [stands.get(id(each), each) for each in held] if type(held) is list else held


def _changes(
    names: Mapping[int, tuple[str, str]], owner: Any, held: dict[Any, Any], now: dict[Any, Any]
) -> Iterator[str]:
    """Places in a container where there is something else now."""
    if id(owner) not in names:
        return  # it is gone, which shows where it was
    path, form = names[id(owner)]
    places = [key for key in {**held, **now} if _is_gone(held.get(key, _GONE), now.get(key, _GONE))]
    yield from (f"{path}{form.format(key)}" for key in places)
    if not places and isinstance(owner, dict) and not same_objects(held, now):
        yield path


def _put_other_back(value: Any, kind: Kind, held: Any) -> None:
    now = kind.read(value)
    if kind.is_leaf:
        is_changed = differs(now, held) if kind is not _LONG else not same_objects(now, held)
    else:
        held = _meant(held, now) if type(held) is dict else list(map(_again, held))
        is_changed = not _same_parts(now, held)
    if is_changed:
        assert kind.write is not None
        kind.write(value, held)
