"""Capture of all state that a forward may change, and its restoration after a failed attempt.

Values need no registration. Everything that the roots reach is held by identity: the attributes of
a module, the elements of a list, the closure cells of a function and the globals that its code
names. Restoring puts the same values back into the same objects, so that all code that shares an
object sees them.

The graph of objects is walked only once. The walk produces flat lists of the contents of tables,
lists and cells, which the next capture compares by identity: if all objects are the same, no walk
is necessary.
"""

import contextlib
import contextvars
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, compress, starmap, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from automicro.errors import RollbackError
from automicro.memory.oom import surely
from automicro.state.tensors import NO_COPIES, SMALL_BYTES, Copies, Leaves, is_freed
from automicro.torch_private import (
    BACKENDS,
    BUFFERS,
    GLOBAL_HOOKS,
    REGISTERED,
    function_modes,
    gradient_hooks,
    is_uninitialized,
    pop_function_modes,
)
from automicro.values import (
    CELL,
    CLASS,
    DEFAULTS,
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
    is_installed,
    is_owned,
    is_plain,
    kinds_within,
    namespaces_of,
    put_table,
    same_objects,
    table_of,
    walk,
)

MOST_VALUES = 200_000  # in all containers together
MOST_ELEMENTS = 2**20  # of a list or dict; longer ones are not captured
MOST_ARRAY_BYTES = 2**20  # arrays have no versions, so each capture copies them
LONG = 10_000  # elements of a list or dict; those of longer ones are not walked
MANY = 128  # the same for lists of tensors, as metrics keep them
_GONE = object()


def capture(
    roots: Mapping[str, Any], *, skip: Iterable[Any] = (), large: Mapping[int, Tensor] | None = None
) -> "Captured":
    """Capture everything that is reached from some values, in its current state.

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
    return Captured(roots, tuple(skip), large)


_NOT_COPIED = "it was changed, but is too large to be copied. Update it after the step"
_NEW = vars(nn.Module())
# Flags about hooks change only together with the tables of hooks.
_TABLES = [name for name, value in _NEW.items() if hasattr(value, "clear") or "hook" in name]
# A forward does not use the hooks of state dicts.
_LOOKED_INTO = [e for e in _TABLES if hasattr(_NEW[e], "clear") and "state_dict" not in e]
# Hooks, compared by content; the tables of parameters, buffers and children by identity.
_APART = frozenset(_TABLES).difference(REGISTERED)
_hooks_of, _looked_into = operator.itemgetter(*_APART), operator.itemgetter(*_LOOKED_INTO)


@functools.lru_cache(5_000)
def _own_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a module's keys except torch's hooks; none if it lacks some of torch's tables."""
    is_whole = _NEW.keys() <= set(keys)
    return tuple(key for key in keys if key not in _APART) if is_whole else ()


class _Holder(NamedTuple):
    """A table, and those of its keys that are captured."""

    owner: Any  # a class, or the table
    table: Mapping[Any, Any]
    keys: tuple[Any, ...]
    used: frozenset[str] | None = None  # the only new names that count; None: all
    apart: frozenset[str] = frozenset()  # keys that are captured separately

    @property
    def is_ordered(self) -> bool:
        """Whether the order of keys matters, unlike that of attributes."""
        return self.used is None and not self.apart and type(self.owner) is dict

    def strangers(self) -> list[Any]:
        """Return keys that were added."""
        come = self.table.keys() if self.used is None else self.used & self.table.keys()
        return list(come - set(self.keys) - self.apart)

    def read(self) -> dict[Any, Any]:
        """Return the current values of the captured and the added keys."""
        seen = {*self.keys, *self.strangers()}
        return {key: value for key, value in self.table.items() if key in seen}

    def write(self, saved: Mapping[Any, Any]) -> None:
        """Restore the captured contents of the table."""
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


_HOLDER = Kind(_Holder.read, _Holder.write)


_Entry = tuple[Any, Kind, Any]  # a value, its kind, and the captured contents
_Name = tuple[str, str]  # a path, and the format of names of parts


class _Tables:
    """Tables and their captured contents."""

    def __init__(self, holders: Iterable[_Holder]) -> None:
        # One itemgetter reads all tables of the same keys: layers are many, their classes few.
        groups: dict[tuple[Any, ...], list[_Holder]] = {}
        for each in holders:
            # For a single key, itemgetter returns no tuple.
            keys = each.keys * 2 if len(each.keys) == 1 else each.keys
            groups.setdefault(keys, []).append(each._replace(keys=keys))
        self._holders = list(chain.from_iterable(groups.values()))
        self._groups = [
            (operator.itemgetter(*keys), [each.table for each in group])
            for keys, group in groups.items()
            if keys
        ]
        self.held = list(self._now())  # the values of all tables in a row
        # The indices of tensors that are not trained.
        self.places = {place for place, each in enumerate(self.held) if _is_content(each)}

    def _now(self) -> Iterator[Any]:
        # Runs entirely in C, for any number of groups and tables.
        return chain.from_iterable(chain.from_iterable(starmap(map, self._groups)))

    def refresh(self) -> bool:
        """Capture the current contents; return False if containers or objects come or go."""
        try:
            now = list(self._now())
        except KeyError:  # a key was removed
            return False
        others = list(compress(range(len(now)), map(operator.is_not, now, self.held)))
        if not all(_may_pass(self.held[i]) and _may_pass(now[i]) for i in others):
            return False
        self.places.update(place for place in others if _is_content(now[place]))
        self.held = now
        return True

    def content(self) -> Iterator[Tensor]:
        """Return the captured tensors that are not trained."""
        return filter(_is_content, map(self.held.__getitem__, self.places))

    def change_content(self, change: Callable[[Any], Any]) -> None:
        """Replace the captured tensors."""
        for place in self.places:
            self.held[place] = change(self.held[place])

    def entries(self) -> Iterator[_Entry]:
        """Yield each table with its captured contents."""
        rest = iter(self.held)
        for holder in self._holders:
            yield holder, _HOLDER, dict(zip(holder.keys, rest, strict=False))


class _Containers:
    """All other values that hold values or content, each read by its kind."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.places: set[int] = set()  # indices of entries that hold tensors that are not trained

    def add(self, value: Any, kind: Kind, held: Any) -> None:
        """Add a value with its captured contents."""
        self._entries.append((value, kind, held))
        if not kind.is_leaf and any(map(_is_content, _parts(held))):
            self.places.add(len(self._entries) - 1)

    def refresh(self) -> bool:
        """Capture the current contents; return False if containers or objects come or go."""
        for place, (value, kind, held) in enumerate(self._entries):
            # Lists may be many, such as those of an optimizer with a group for each parameter.
            if kind is LIST and type(value) is list and same_objects(value, held):
                continue
            now = kind.read(value)
            if not (kind.is_leaf or _same_parts(now, held)):
                pairs = zip_longest(_parts(now), _parts(held))
                others = chain.from_iterable(pair for pair in pairs if pair[0] is not pair[1])
                if not all(map(_may_pass, others)) or _is_long(now) > _is_long(held):
                    return False
                if any(map(_is_content, _parts(now))):
                    self.places.add(place)
            self._entries[place] = value, kind, now
        return True

    def content(self) -> Iterator[Tensor]:
        held = (_parts(self._entries[place][2]) for place in self.places)
        return filter(_is_content, chain.from_iterable(held))

    def change_content(self, change: Callable[[Any], Any]) -> None:
        for place in self.places:
            value, kind, held = self._entries[place]
            self._entries[place] = value, kind, _with_parts(held, change)

    def let_go(self) -> None:
        """Release the content of leaves."""
        for place, (value, kind, _) in enumerate(self._entries):
            if kind.is_leaf:
                self._entries[place] = value, kind, None

    def entries(self) -> Iterator[_Entry]:
        return iter(self._entries)


def _put_back(value: Any, kind: Kind, held: Any) -> None:
    now = kind.read(value)
    if not kind.is_leaf:
        held = _with_parts(held, _again)
    if type(held) is dict:
        # A wrapper that freed a tensor has already replaced it.
        held = held | {key: now[key] for key, e in held.items() if is_freed(e) and key in now}
    # Compare containers by identity, because equal numbers may be 0.0 and -0.0, and order matters.
    if not (_same_parts(now, held) if type(held) in (dict, list) else not differs(now, held)):
        assert kind.write is not None
        kind.write(value, held)


def _changes(value: Any, kind: Kind, held: Any, names: Mapping[int, _Name]) -> Iterator[str]:
    """Yield the paths at which a value differs now."""
    owner = value.owner if kind is _HOLDER else value
    if id(owner) not in names:
        return  # it was removed, which its former owner reports
    (path, form), now = names[id(owner)], kind.read(value)
    if kind.is_leaf:
        yield from [path] * differs(held, now)
        return
    old, new = (each if type(each) is dict else dict(enumerate(each)) for each in (held, now))
    pairs = ((key, _again(old.get(key, _GONE)), new.get(key, _GONE)) for key in {**old, **new})
    places = [key for key, one, other in pairs if one is not other and differs(one, other)]
    yield from (f"{path}{form.format(key)}".lstrip(".") for key in places)
    is_ordered = value.is_ordered if kind is _HOLDER else isinstance(value, dict)
    if is_ordered and not places and not same_objects(old, new):
        yield path


class _Context:
    """The context variables, and how many modules are imported."""

    def __init__(self) -> None:
        self.values = contextvars.copy_context()
        self.num_modules = len(sys.modules)

    def __eq__(self, other: Any) -> bool:
        # By identity, because values may have no truth value when they are compared.
        one, two = ({e: id(held) for e, held in each.values.items()} for each in (self, other))
        return one == two


def _put_context(context: _Context) -> None:
    # What modules set when they are imported, such as torch's configuration, they set only once.
    saved, has_imported = context.values, len(sys.modules) != context.num_modules
    for variable in saved if has_imported else {**contextvars.copy_context(), **saved}:
        # A variable cannot be unset, but an empty context knows its default. One without a default
        # keeps its value: libraries create theirs at the first use.
        with contextlib.suppress(LookupError):
            is_saved = variable in saved
            variable.set(saved[variable] if is_saved else contextvars.Context().run(variable.get))


def _nesting() -> int:
    # Torch has no getter, and returns the nesting only when it changes.
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


def _set_nesting(nesting: int) -> None:
    for _ in range(_nesting() - nesting):
        torch.autocast_decrement_nesting()
    for _ in range(nesting - _nesting()):  # a context around a computation that is replayed
        torch.autocast_increment_nesting()


_OWN: list[tuple[Any, Any]] = [  # one per device type
    (torch.is_autocast_enabled, torch.set_autocast_enabled),
    (torch.get_autocast_dtype, torch.set_autocast_dtype),
]
_SETTINGS: list[tuple[Any, Any]] = [
    (function_modes, pop_function_modes),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_nesting, _set_nesting),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
    *BACKENDS,
    (_Context, _put_context),
]


@functools.cache
def _settings() -> list[tuple[Any, Any]]:
    types = ["cpu"]
    if torch.accelerator.is_available():
        types.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    own = [(partial(read, each), partial(write, each)) for each in types for read, write in _OWN]
    return [*_SETTINGS, *own]


def _read_settings() -> list[Any]:
    """Return all settings of this thread and process."""
    return [read() for read, _ in _settings()]


def _put_settings_back(saved: list[Any]) -> None:
    """Restore the settings that differ."""
    if _read_settings() != saved:
        for (read, write), value in zip(_settings(), saved, strict=True):
            if read() != value:
                write(value)
        # It may hold casts of the failed attempt, whose graph was freed.
        torch.clear_autocast_cache()


class _Standing:
    """A placeholder for a tensor with a graph, which does not extend its lifetime."""

    # If the tensor was freed, it is restored without its graph; a large one is not restored.
    def __init__(self, value: Tensor) -> None:
        self.ref = weakref.ref(value)
        self.alias = value.detach() if value.nbytes <= SMALL_BYTES else None


def _again(value: Any) -> Any:
    """Return the tensor of a placeholder, and other captured values as they are."""
    if type(value) is not _Standing:
        return value
    there = value.ref()
    return value.alias if there is None else there


def _is_content(value: Any) -> bool:
    """Whether a value is a tensor that is not a parameter and has its shape."""
    if type(value) is Tensor:  # the common case
        return not (value.requires_grad and value.is_leaf)
    is_tensor = issubclass(type(value), Tensor)
    return is_tensor and not (is_owned(value) or is_uninitialized(value))


def _may_pass(value: Any) -> bool:
    """Whether a value can be added or removed without a new walk."""
    return is_plain(value) or (type(value) is Tensor and not is_owned(value))


def _is_long(value: Any) -> bool:
    """Whether a list or dict is so long that its elements are not walked."""
    if type(value) is not list:
        return isinstance(value, dict) and dict.__len__(value) > LONG
    return len(value) > LONG or (len(value) > MANY and set(map(type, value)) == {Tensor})


def _parts(held: Any) -> Iterable[Any]:
    return held.values() if type(held) is dict else held


def _with_parts(held: Any, change: Callable[[Any], Any]) -> Any:
    if type(held) is dict:
        return {key: change(each) for key, each in held.items()}
    return list(map(change, held))


def _same_parts(one: Any, other: Any) -> bool:
    return same_objects(one, other) and (
        type(one) is not dict or same_objects(one.values(), other.values())
    )


def _write_objects(value: Any, saved: list[Any]) -> None:
    for place, each in enumerate(saved):
        value.flat[place] = each


_OBJECT_ARRAY = Kind(lambda value: list(value.flat), _write_objects)


class _Walk:
    """The values that some roots reach, sorted by the way they are captured."""

    def __init__(self, roots: Mapping[str, Any], skip: tuple[Any, ...]) -> None:
        self._given = set(map(id, roots.values()))
        self.left_out: list[tuple[Any, str]] = []  # values that cannot be restored, with the reason
        self.holders: dict[int, _Holder] = {}
        self.objects: list[Any] = []
        self.modules: list[dict[str, Any]] = []
        self.containers = _Containers()
        self.buffers: dict[int, None] = {}  # ids of the buffers of modules
        self.content: list[Tensor] = []
        self.trained: list[Tensor] = []
        skipped = tuple(each for each in skip if isinstance(each, type))
        seen, left = set(map(id, skip)), MOST_VALUES
        hooks = GLOBAL_HOOKS.values()
        # Most tables of modules and tensors are empty.
        self.empty: list[Any] = [each for each in hooks if not each]
        waiting, kinds = [*roots.values(), *filter(None, hooks)], kinds_within(roots)
        for number, value in enumerate(waiting):  # the list grows inside the loop
            if id(value) in seen or (skipped and issubclass(type(value), skipped)):
                continue
            seen.add(id(value))
            for kind in kinds(type(value)):
                if left < 0:
                    rest = [v for v in waiting[number:] if not (is_plain(v) or id(v) in seen)]
                    why = f"it is one of over {MOST_VALUES} values"
                    self.left_out += [(each, why) for each in (value, *rest)]
                    return
                before = len(waiting)
                waiting += self._hold(value, kind)
                left -= 0 if id(value) in self._given else len(waiting) - before

    def _hold(self, value: Any, kind: Kind) -> Iterable[Any]:
        """Capture a value by one of its kinds; return its parts that may hold values themselves."""
        if kind is TENSOR:
            return self._hold_tensor(value)
        if kind is OBJECT:
            self.objects.append(value)
            return self._hold_object(value)
        if kind is FUNCTION:
            return self._hold_function(value)
        if kind is CLASS:
            # A library's class holds no state of the caller, but may have bases of the caller.
            if is_installed(value.__module__):
                return [each for each in value.__mro__ if not is_installed(each.__module__)]
            table = vars(value)
            self.holders[id(value)] = _Holder(value, table, tuple(table))
            return [*table.values(), *value.__mro__[1:]]
        is_table = type(value) is dict and len(value) <= LONG
        if is_table and all(type(key) is str for key in value):
            return self._hold_table(value)
        if kind is PARALLEL:
            table = table_of(value)
            used = frozenset(["training"])
            self.holders[id(table)] = _Holder(table, table, tuple(used), used)
        return self._hold_other(value, kind)

    def _hold_table(self, table: dict[Any, Any]) -> Iterable[Any]:
        if table:
            self.holders[id(table)] = _Holder(table, table, tuple(table))
        else:
            self.empty.append(table)
        return table.values()

    def _hold_tensor(self, value: Tensor) -> Iterable[Any]:
        if is_owned(value) or is_uninitialized(value):
            # Only compared and not copied: they are large, and only the optimizer may change them.
            self.trained.append(value)
        else:
            self.content.append(value)
            if id(value) in self._given:  # copied at any size
                self.buffers[id(value)] = None
        if type(value).__module__.startswith("torch.distributed"):
            return ()
        tables = (each for each in gradient_hooks(value) if each is not None)
        return [*tables, *self._hold_table(table_of(value))]

    def _hold_object(self, value: Any) -> Iterable[Any]:
        table = table_of(value)
        own = _own_keys(tuple(table)) if issubclass(type(value), nn.Module) else ()
        if not own:
            return [type(value), *self._hold_table(table)]
        self.holders[id(table)] = _Holder(table, table, own, apart=_APART)
        # Tables of a wrapper that shards are not walked themselves.
        found = [type(value), *(table[key] for key in own if key not in REGISTERED)]
        self.modules.append(table)
        for inner in _looked_into(table):
            if inner:
                found += inner.values() if _is_sharded(inner) else [inner]
            else:
                self.empty.append(inner)
        if buffers := table[BUFFERS]:
            self.buffers |= dict.fromkeys(map(id, buffers.values()))
        return found

    def _hold_function(self, value: types.FunctionType) -> Iterable[Any]:
        found = list(self._hold_other(value, DEFAULTS))
        found += self._hold_table(value.__dict__)
        for _, cell in cells_of(value):
            found += self._hold_other(cell, CELL)
        for names in namespaces_of(value):
            # Functions of a module share its globals: capture the names that any of them uses.
            known = self.holders.get(id(names.owner))
            used = names.used if known is None else names.used | (known.used or frozenset())
            if known is None or known.used is not None:
                keys = tuple(key for key in used if key in names.table)
                self.holders[id(names.owner)] = _Holder(names.owner, names.table, keys, used)
            if names.is_walked:
                found += [names.table[key] for key in names.used & names.table.keys()]
        return found

    def _hold_other(self, value: Any, kind: Kind) -> Iterable[Any]:
        if kind is UNREADABLE:
            return self._leave_out(value, "its state can be neither read nor restored")
        is_given, is_array = id(value) in self._given, isinstance(value, np.ndarray)
        if is_array and value.nbytes > MOST_ARRAY_BYTES and not is_given:
            return self._leave_out(value, f"it is an array of over {MOST_ARRAY_BYTES} bytes")
        if is_array and value.dtype == object:
            kind = _OBJECT_ARRAY
        held = kind.read(value)
        if kind in (DICT, LIST) and _is_long(value) and not is_given:
            if len(held) > MOST_ELEMENTS:
                return self._leave_out(value, f"it holds over {MOST_ELEMENTS} values")
            if not all(map(is_plain, _parts(held))):
                self._leave_out(value, "it has too many elements to restore the state of each")
            kind = kind._replace(is_leaf=True)
        if kind.write is not None:
            self.containers.add(value, kind, held)
        return () if kind.is_leaf else [type(value), *_parts(held)]

    def _leave_out(self, value: Any, why: str) -> tuple[()]:
        self.left_out.append((value, why))
        return ()


class Captured:
    """The result of `capture`."""

    def __init__(self, roots: Mapping[str, Any], skip: tuple[Any, ...], large: Any = None) -> None:
        self._roots, self._skip, self._large = roots, skip, large
        found = _Walk(roots, skip)
        self.left_out = found.left_out  # values that cannot be restored, with the reason
        self._copied = found.buffers if large is None else large  # copied at any size
        # The caller may replace a table of hooks between captures.
        self._modules, self._hooks = found.modules, list(map(_hooks_of, found.modules))
        self._empty = found.empty
        self._objects, self._classes = found.objects, list(map(type, found.objects))
        self._tables, self._containers = _Tables(found.holders.values()), found.containers
        self._sized = [each.table for each in found.holders.values()]
        self._sizes = list(map(len, self._sized))
        self._in_order = [each.table for each in found.holders.values() if each.is_ordered]
        self._keys = list(chain.from_iterable(self._in_order))
        self._leaves = Leaves(found.trained)
        in_places = set(map(id, self._in_places()))
        # Tensors elsewhere, such as in tuples and sets.
        self._inner = [each for each in found.content if id(each) not in in_places]
        self._is_new = True  # until a commit shows which values attempts replace
        self._take_content()

    def _entries(self) -> Iterator[_Entry]:
        return chain(self._tables.entries(), self._containers.entries())

    def _in_places(self) -> Iterator[Tensor]:
        """Return the tensors in tables and containers."""
        return chain(self._tables.content(), self._containers.content())

    def _take_content(self) -> None:
        content = {id(each): each for each in chain(self._inner, self._in_places())}
        # Placeholders replace tensors with a graph, so that graphs do not live longer than usual.
        stands = {key: _Standing(each) for key, each in content.items() if each.grad_fn is not None}
        if stands and self._large is None:
            self._change_content(lambda value: stands.get(id(value), value))
        tensors = [*(e for key, e in content.items() if key not in stands), *self._leaves.small]
        self._copies = Copies(tensors, self._copied, watches_others=self._large is not None)
        self._global = _read_settings()

    def _change_content(self, change: Callable[[Any], Any]) -> None:
        self._tables.change_content(change)
        self._containers.change_content(change)

    # Later captures

    def again(self) -> "Captured":
        """Return a new capture, which needs no walk if only numbers, texts and tensors changed."""
        # This capture must not be used afterwards.
        if not self._is_refreshed():
            return Captured(self._roots, self._skip, self._large)
        self._take_content()
        return self

    def _is_refreshed(self) -> bool:
        """Capture the current contents; return False if that needs a walk."""
        # Steps that change this capture come last, because it is discarded after any failed check.
        return (
            not any(self._empty)
            and self._has_same_keys()
            and list(map(type, self._objects)) == self._classes
            and list(map(_hooks_of, self._modules)) == self._hooks
            and self._leaves.refresh()
            and self._tables.refresh()
            and self._containers.refresh()
        )

    def _has_same_keys(self) -> bool:
        has_same_number = list(map(len, self._sized)) == self._sizes
        return has_same_number and list(chain.from_iterable(self._in_order)) == self._keys

    def let_go(self, *, is_committed: bool = True) -> bool:
        """Release all content between attempts, so that no tensor is kept alive."""
        # Afterwards nothing can be restored until `again` captures the current state.
        if is_committed and self._is_new:
            self._is_new = False
            if not self._is_refreshed():
                return False  # discard it, so that it does not keep replaced values alive
        self._copies.settle()
        self._copies = NO_COPIES
        self._change_content(lambda value: None if _is_content(value) else value)
        self._containers.let_go()
        self._leaves.let_go()
        self._global = []  # context variables may hold tensors
        return True

    # Restoring

    def put_back(self) -> None:
        """Restore everything. It may be called again after a failure."""
        # A failed try is repeated, for example after running out of memory or Ctrl-C.
        surely(self._put_back)

    def _put_back(self) -> None:
        for value, its_class in self._of_other_classes():
            object.__setattr__(value, "__class__", its_class)
        for table, hooks in zip(self._modules, self._hooks, strict=True):
            table.update(zip(_APART, hooks, strict=True))
        for table in filter(None, self._empty):
            table.clear()
        failures: list[tuple[Any, Exception | str]] = []
        for value, kind, held in self._entries():
            try:
                _put_back(value, kind, held)
            except Exception as error:  # restore the rest nevertheless
                # The traceback would keep this frame alive.
                failures.append((value, error.with_traceback(None)))
        failures += self._copies.put_back()
        self._leaves.put_back()
        if self._large is None:  # otherwise the replayed code sets its modes itself
            failures += ((each, _NOT_COPIED) for each in self.written())
            # Last, because contexts that were entered manually end here when they are released, and
            # set modes.
            _put_settings_back(self._global)
        if failures:
            names = self.names()
            told = [f"{names.get(id(value), '?')[0]}: {why}" for value, why in failures]
            errors = (why for _, why in failures if isinstance(why, Exception))
            raise RollbackError("; ".join(told)) from next(errors, None)

    def _of_other_classes(self) -> Iterator[tuple[Any, type]]:
        return (e for e in zip(self._objects, self._classes, strict=True) if type(e[0]) is not e[1])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are copied or compared, and whose writes are counted."""
        return self._copies.counted

    def written(self) -> list[Tensor]:
        """Return large tensors and frozen parameters that were written to, and not copied."""
        return [*self._copies.written(), *self._leaves.written()]

    def changed(self) -> Iterator[str]:
        """Yield the paths of changed values. Waits for the device."""
        names = self.names()
        for value, kind, held in self._entries():
            yield from _changes(value, kind, held, names)
        tensors = chain(self._copies.changed(), self._leaves.changed())
        others = (value for value, _ in self._of_other_classes())
        for each in chain(tensors, filter(None, self._empty), others):
            if id(each) in names:
                yield names[id(each)][0]
        if _read_settings() != self._global:
            yield "torch"

    def changed_tensors(self, *, by_content: bool) -> set[int]:
        """Return the ids of changed tensors; comparing only versions is cheap."""
        return set(map(id, self._copies.changed(by_content=by_content)))

    def names(self) -> dict[int, tuple[str, str]]:
        """Return the path of each value or table, by id, and the format of names of its parts."""
        start = "torch.nn.modules.module."
        found: dict[int, _Name] = {
            id(table): (start + name, "[{!r}]") for name, table in GLOBAL_HOOKS.items()
        }
        kinds = kinds_within(self._roots)
        for path, value in walk(self._roots, kinds):
            found.setdefault(id(value), (path, kinds(type(value))[0].name))
            if type(value) is types.FunctionType:
                found.setdefault(id(table_of(value)), (value.__name__, ".{}"))
                for each in namespaces_of(value):
                    is_home = each.table is value.__globals__
                    home = "" if is_home else each.table.get("__name__", "")
                    found.setdefault(id(each.owner), (home, ".{}"))
                for name, cell in cells_of(value):
                    found.setdefault(id(cell), (name, ""))
            if issubclass(type(value), Tensor):
                found |= {id(each): (f"{path}.hook", "[{!r}]") for each in gradient_hooks(value)}
            if type(value).__dictoffset__:
                table = table_of(value)
                found.setdefault(id(table), (path, ".{}"))
                if issubclass(type(value), nn.Module):
                    for name in _TABLES:
                        start = path if name in REGISTERED else f"{path}.{name}"
                        found.setdefault(id(table.get(name)), (start, ".{}"))
        return found


def _is_sharded(table: Any) -> bool:
    """Whether a table's tensors belong to a wrapper that shards and gathers them for a forward."""
    each = table.values() if type(table) is dict else ()  # tables of hooks are of another type
    return any(type(e).__module__.startswith("torch.distributed.") for e in each)
