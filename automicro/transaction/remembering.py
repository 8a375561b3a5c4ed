"""What values hold, whatever they are, put back into the very same objects."""

import array
import contextlib
import copy
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import itertools
import logging
import math
import operator
import pathlib
import re
import threading
import types
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.errors import RollbackError
from automicro.memory.oom import Failure, classify
from automicro.reach import OF_EVERY_MODULE, is_generator
from automicro.torch_private import is_uninitialized
from automicro.transaction.parameters import TensorCopy, seen_version
from automicro.transaction.rng import set_state, state_of
from automicro.transaction.transaction import Part

# What cannot be changed, or is no state: held by reference.
_CONSTANT = (
    type(None), bool, int, float, complex, str, bytes, range, slice, frozenset,
    np.generic, np.dtype, torch.dtype, torch.device, torch.layout, torch.Size, torch.memory_format,
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    types.MappingProxyType, property, operator.attrgetter, operator.itemgetter,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal,
    fractions.Fraction, uuid.UUID, pathlib.PurePath, re.Pattern, enum.Enum, inspect.Signature,
    weakref.ref, logging.Logger, type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
# Objects of theirs are no counts: tokenizers are slow to copy, and refer to whole vocabularies; a
# module of Lightning's refers to its trainer, and that to loaders and files.
_UNCHANGING_PACKAGES = (
    *("tokenizers", "sentencepiece", "automicro"),
    *("lightning", "lightning_fabric", "pytorch_lightning"),
)
_UNCHANGING_KINDS = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
)
_MOST_VALUES = 200_000
_WATCHED = 32  # elements at each end of a growing list
# What a mark looks into: values in all, bytes of arrays, elements at each end of a container.
_MOST_MARKED = 5_000
_MOST_BYTES_MARKED = 2**22
_END_MARKED = 500
# What a snapshot looks into: values in all, containers in containers, bytes of a tensor.
_MOST_FROZEN, _DEPTH_FROZEN, _MOST_BYTES_FROZEN = 10_000, 12, 2**24
_ROUNDING = 1e-5  # of the state of a forward in float32, added up in another order


class CannotRememberError(Exception):
    """Something can neither be copied nor is known not to change.

    Attributes:
        path: where it was found, from the outside in.
        value: what was found.
    """

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []
        self.value = value


class Growth:
    """What is known of lists from one batch to the next: those that only grow.

    What came to rest in such a list, tensors and tuples, is not remembered itself: it would be more
    with every batch. The tensors at both ends are watched.
    """

    def __init__(self) -> None:
        # By id of a list: its length, the ids of its ends, their versions, and how many elements
        # from its first on are at rest.
        self._known: dict[int, tuple[int, tuple[int, ...], tuple[Any, ...], int]] = {}

    def at_rest(self, values: list[Any]) -> int:
        """How many elements from the first on need not be looked into."""
        length, ends, versions, rest = self._known.get(id(values), (0, (), (), 0))
        is_as_it_was = (
            0 < length <= len(values)
            and _ids(values, length) == ends
            and _versions(values, length) == versions
        )
        if not is_as_it_was:
            rest = 0
        elif length < len(values) and all(map(_can_rest, values[rest:length])):
            rest = length
        now = len(values)
        self._known[id(values)] = (now, _ids(values, now), _versions(values, now), rest)
        return rest


class Remembered:
    """Values as they are now: tensors, arrays, containers, generators and objects, nested.

    Everything is put back into the object that held it, so whoever shares it sees it come back.
    Modules are watched and not copied, but for their buffers and plain attributes.

    Args:
        growth: what is known of lists; None for nothing.

    Example:
        >>> counts = {"rows": [1, 2], "seen": {3}, "sums": np.zeros(2)}
        >>> remembered = Remembered()
        >>> _ = remembered.add(counts)
        >>> counts["rows"].append(4), counts["seen"].clear(), counts.update(new=1)
        (None, None, None)
        >>> counts["sums"] += 1
        >>> remembered.put_back()
        >>> counts
        {'rows': [1, 2], 'seen': {3}, 'sums': array([0., 0.])}
    """

    def __init__(self, growth: Growth | None = None) -> None:
        self._growth = growth or Growth()
        self._undo: list[Callable[[], Any]] = []
        self._seen: dict[int, tuple[Any, Any]] = {}  # the values, too: else ids are used again

    def add(self, value: Any) -> Any:
        """Remember a value; gives what has to stand in its place when it is put back.

        Raises:
            CannotRememberError: it cannot be remembered.
        """
        kind = type(value)
        if kind in _KINDS:
            remember = _KINDS[kind]
        else:
            remember = _KINDS[kind] = _kind_of(value)
        if remember is None:
            return value
        known = self._seen.get(id(value))
        if known is not None:
            return known[1]
        if len(self._seen) >= _MOST_VALUES:
            raise CannotRememberError(value, f"it is one of more than {_MOST_VALUES} values")
        self._seen[id(value)] = (value, value)
        result = remember(self, value)
        if result is not value:
            self._seen[id(value)] = (value, result)
        return result

    def add_attributes(self, owner: Any, *, apart_from: Sequence[str] = ()) -> None:
        """Remember the attributes of an object, in its ``__dict__``, its slots or its class.

        Args:
            owner: the object, or a class.
            apart_from: attributes that are remembered themselves, but not what they hold.
        """
        if isinstance(owner, type):
            self._add_class(owner)
            return
        table = getattr(owner, "__dict__", None)
        if isinstance(table, dict):
            saved = dict(table)
            self._add_parts(saved, apart_from)
            self._undo.append(functools.partial(_put_table_back, table, saved))
        for name in _slots(owner.__class__):
            with_value = hasattr(owner, name)
            value = getattr(owner, name, None)
            value = self._add_at(name, value) if with_value else None
            self._undo.append(functools.partial(_put_slot_back, owner, name, with_value, value))
        for each in type(owner).__mro__:
            if _is_own_class(each):
                for name, value in vars(each).items():
                    if isinstance(value, Tensor | np.ndarray | list | dict | set | deque):
                        self._add_at(name, value)

    def put_back(self) -> None:
        """Put everything back.

        Raises:
            RollbackError: something that was only watched was changed.
        """
        failure: RollbackError | None = None
        for undo in self._undo:
            try:
                undo()
            except RollbackError as error:
                failure = error
        if failure is not None:
            raise failure

    def _add_at(self, name: Any, value: Any) -> Any:
        try:
            return self.add(value)
        except CannotRememberError as error:
            error.path.insert(0, str(name))
            raise

    def _add_parts(self, table: dict[Any, Any], apart_from: Sequence[str] = ()) -> None:
        """What values of a table hold; the table is a copy, and takes what stands for them."""
        for key, value in table.items():
            if _KINDS.get(type(value), ...) is None or key in apart_from:
                continue
            back = self._add_at(key, value)
            if back is not value:
                table[key] = back

    def _add_class(self, owner: type) -> None:
        for name, value in list(vars(owner).items()):
            if name.startswith("__") or isinstance(value, classmethod | staticmethod):
                continue
            back = self._add_at(name, value)
            self._undo.append(functools.partial(_put_class_attribute_back, owner, name, back))
        names = set(vars(owner))
        self._undo.append(functools.partial(_remove_new_class_attributes, owner, names))

    def _add_tensor(self, value: Tensor) -> Tensor:
        if not is_uninitialized(value):
            self._undo.append(TensorCopy(value).put_back)
        return value

    def _add_array(self, value: Any) -> Any:
        if value.dtype.hasobject:
            for index, each in enumerate(value.flat):
                self._add_at(index, each)
        saved = value.copy()
        shape = value.shape
        flags = value.flags.writeable

        def put_back() -> None:
            if value.shape != shape:
                value.resize(shape, refcheck=False)
            if flags:
                value[...] = saved

        self._undo.append(put_back)
        return value

    def _add_list(self, value: list[Any]) -> Any:
        saved = list(value)
        rest = self._growth.at_rest(value)
        for index in range(rest, len(saved)):
            each = saved[index]
            if _KINDS.get(type(each), ...) is not None:
                saved[index] = self._add_at(index, each)
        if rest:
            self._undo.append(functools.partial(_check_rest, saved, rest, _versions(saved, rest)))
        self._undo.append(functools.partial(_put_list_back, value, saved))
        return self._with_attributes(value)

    def add_growing(self, value: list[Any]) -> None:
        """Remember a list that is known only to grow by tensors: its elements alone."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = (value, value)
        saved = list(value)
        last = saved[-1:]
        self._undo.append(functools.partial(_check_rest, last, len(last), _versions(last, 1)))
        self._undo.append(functools.partial(_put_list_back, value, saved))

    def _add_dict(self, value: dict[Any, Any]) -> Any:
        saved = dict(value)
        self._add_parts(saved)
        self._undo.append(functools.partial(_put_dict_back, value, saved))
        return self._with_attributes(value)

    def _add_set(self, value: set[Any]) -> Any:
        saved = set(value)
        self._undo.append(functools.partial(_put_set_back, value, saved))
        return self._with_attributes(value)

    def _add_deque(self, value: deque[Any]) -> Any:
        saved = [self._add_at(index, each) for index, each in enumerate(value)]

        def put_back() -> None:
            value.clear()
            value.extend(saved)

        self._undo.append(put_back)
        return self._with_attributes(value)

    def _add_flat(self, value: Any) -> Any:
        """Bytes and typed arrays."""
        saved = value[:]
        self._undo.append(lambda: value.__setitem__(slice(None), saved))
        return value

    def _add_tuple(self, value: tuple[Any, ...]) -> Any:
        parts = [self._add_at(index, each) for index, each in enumerate(value)]
        if all(map(operator.is_, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

    def _add_partial(self, value: Any) -> Any:
        for name, part in (("args", value.args), ("keywords", value.keywords)):
            self._add_at(name, part)
        return value

    def _add_generator(self, value: Any) -> Any:
        self._undo.append(functools.partial(set_state, value, state_of(value)))
        return value

    def _add_object(self, value: Any) -> Any:
        self.add_attributes(value)
        return value

    def _with_attributes(self, value: Any) -> Any:
        """A container of a class of its own may have attributes, too."""
        if hasattr(value, "__dict__"):
            self.add_attributes(value)
        return value

    def _add_module(self, value: nn.Module) -> Any:
        if hasattr(value, "update"):  # a metric
            self.add_attributes(value)
            return value
        watched = []
        for name, module in value.named_modules():
            self._seen[id(module)] = (module, module)
            table = vars(module)
            saved = dict(table)
            self._add_parts(saved, _OF_EVERY_MODULE)
            self._undo.append(functools.partial(_put_table_back, table, saved))
            for key, buffer in module.named_buffers(recurse=False):
                self._add_at(f"{name}.{key}", buffer)
            watched += [
                (f"{name}.{key}".lstrip("."), parameter, seen_version(parameter))
                for key, parameter in module.named_parameters(recurse=False)
            ]
        self._undo.append(functools.partial(_check_parameters, type(value).__name__, watched))
        return value

    def _by_state_dict(self, value: Any) -> Any:
        with _naming_what_cannot_be_copied(value):
            state = copy.deepcopy(value.state_dict())
        self._undo.append(lambda: value.load_state_dict(state))
        return value

    def _copied(self, value: Any) -> Any:
        """Another object with the same content has to stand in its place."""
        with _naming_what_cannot_be_copied(value):
            return copy.deepcopy(value)


@contextlib.contextmanager
def _naming_what_cannot_be_copied(value: Any) -> Iterator[None]:
    """Running out of memory is another matter."""
    try:
        yield
    except Exception as error:
        if classify(error) is not Failure.UNRELATED:
            raise
        raise CannotRememberError(value, _reason(error)) from error


def mark_of(value: Any) -> Any:
    """Something that is another once `Remembered` would have something to put back.

    Tensors are told by their versions, arrays by what they hold. Of what is large, both ends of
    containers are looked into, and of iterators nothing.

    Example:
        >>> counts = {"rows": [1, {"seen": {3}}]}
        >>> before = mark_of(counts)
        >>> counts["rows"][1]["seen"].add(4)
        >>> mark_of(counts) == before
        False
    """
    return _Marker().mark(value)


class _Same:
    """Stands for an object, and keeps it, so that its id is not used again."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


class _Marker:
    def __init__(self) -> None:
        self._values_left, self._bytes_left = _MOST_MARKED, _MOST_BYTES_MARKED
        self._seen: set[int] = set()

    def mark(self, value: Any) -> Any:
        kind = type(value)
        if kind in (type(None), bool, int, float, complex, str, bytes):
            return kind, value
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        same = _Same(value)
        self._values_left -= 1
        if self._values_left < 0 or id(value) in self._seen:
            return same
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            return same, seen_version(value)
        if isinstance(value, np.ndarray | bytearray | array.array):
            self._bytes_left -= _nbytes(value)
            return (same, bytes(value)) if self._bytes_left >= 0 else same
        remember = _remember_of(value)
        if remember is Remembered._add_tuple:
            return kind, self._all(value)
        if remember in (Remembered._add_list, Remembered._add_deque):
            return same, len(value), self._all(value)
        if remember is Remembered._add_dict:
            return same, list(_both_ends(value)), self._all(list(value.values()))
        if remember is Remembered._add_set:
            return same, set(value)
        if remember is Remembered._add_object:
            table = _attributes_of(value)
            return same, list(table), self._all(list(table.values()))
        return same

    def _all(self, values: Sequence[Any]) -> list[Any]:
        return [self.mark(each) for each in _both_ends(values)]


def _both_ends(values: Any) -> Iterable[Any]:
    """All of a few values, else those at both ends."""
    if len(values) <= 2 * _END_MARKED:
        return list(values)
    ends = itertools.islice(values, _END_MARKED), itertools.islice(reversed(values), _END_MARKED)
    return [*ends[0], *ends[1]]


def _remember_of(value: Any) -> "_Remember":
    kind = type(value)
    return _KINDS[kind] if kind in _KINDS else _kind_of(value)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Those in the dictionary and in the slots of an object."""
    slots = _slots(value.__class__)
    return {
        **getattr(value, "__dict__", {}),
        **{name: getattr(value, name, None) for name in slots},
    }


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) * (value.itemsize if isinstance(value, array.array) else 1)


class Snapshot:
    """What a value is at one moment, to be compared with what it is at another.

    Tensors and arrays are copied. What is too deep or too much, and what says nothing of itself,
    counts as the same.

    Args:
        value: any.

    Example:
        >>> before = Snapshot({"step": 1, "mean": np.zeros(2)})
        >>> before.is_like(Snapshot({"step": 1, "mean": np.full(2, 1e-9)}))
        True
        >>> before.is_like(Snapshot({"step": 2, "mean": np.zeros(2)}))
        False
    """

    def __init__(self, value: Any) -> None:
        self._left = _MOST_FROZEN
        self._frozen = self._freeze(value, _DEPTH_FROZEN)

    def is_like(self, other: "Snapshot") -> bool:
        """Whether both are the same but for rounding."""
        return _are_alike(self._frozen, other._frozen, near_zero=True)

    def repeats(self, other: "Snapshot") -> bool:
        """Whether both are the same to the digits that count, however small they are.

        As the same computation leaves them: two durations do not, though both are near zero.
        """
        return _are_alike(self._frozen, other._frozen, near_zero=False)

    def _freeze(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
            return value
        if isinstance(value, Tensor | np.ndarray | np.generic):
            # Rounding is the only difference that does not count.
            is_plain = not isinstance(value, Tensor) or value.layout is torch.strided
            if not is_plain or value.nbytes > _MOST_BYTES_FROZEN:
                return tuple(value.shape)
            if not isinstance(value, Tensor):
                # Of objects and texts, the shape: torch has no such numbers.
                if np.asarray(value).dtype.kind not in "biufc":
                    return tuple(value.shape)
                value = torch.from_numpy(np.array(value))
            wide = torch.complex128 if value.is_complex() else torch.float64
            return value.detach().cpu().to(wide, copy=True)
        remember = _remember_of(value)
        if depth == 0 or self._left <= 0:
            return type(value)
        if isinstance(value, Mapping):
            return {str(k): self._freeze(each, depth - 1) for k, each in list(value.items())}
        if isinstance(value, list | tuple | deque | bytearray | array.array):
            return [self._freeze(each, depth - 1) for each in list(value)]
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if remember is Remembered._add_object:
            return self._freeze(_attributes_of(value), depth - 1)
        return type(value)


def _are_alike(one: Any, other: Any, *, near_zero: bool) -> bool:
    """Whether they are, to ``_ROUNDING`` of them, or, near zero, of one."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not one.numel():
            return one.shape == other.shape
        scale = 1.0 if near_zero else float(one.nan_to_num().abs().max())
        rounding = _ROUNDING * scale
        return torch.allclose(one, other, rtol=_ROUNDING, atol=rounding, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        rounding = _ROUNDING if near_zero else 0.0
        return one == other or math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=rounding)
    are_alike = functools.partial(_are_alike, near_zero=near_zero)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_alike(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return type(one) is type(other) and bool(one == other)


_Remember = Callable[[Remembered, Any], Any] | None
_KINDS: dict[type, _Remember] = {}
_OF_EVERY_MODULE = tuple(OF_EVERY_MODULE)


class State:
    """Values of the caller's as a part of a transaction: what a failed attempt did is undone.

    Args:
        values: whatever an attempt may change: lists, dicts, modules, objects with attributes.

    Example:
        >>> told = ["before"]
        >>> state = State([told])
        >>> state.begin()
        >>> told.append("in an attempt that fails")
        >>> state.roll_back()
        >>> told
        ['before']
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = list(values)
        self._growth = Growth()
        self._remembered: Remembered | None = None

    def begin(self) -> None:
        """Remember them.

        Raises:
            TypeError: one holds what can neither be copied nor is known not to change.
        """
        remembered = self._remembered = Remembered(self._growth)
        for value in self._values:
            try:
                if remembered.add(value) is not value:
                    raise CannotRememberError(value, "only another one could stand in its place")
            except CannotRememberError as error:
                where = "".join(f" → {name}" for name in error.path)
                raise TypeError(
                    f"state=[…] holds a {type(value).__name__}{where} of type "
                    f"{type(error.value).__name__}, which cannot be put back ({error}), so what a "
                    "failed attempt does to it could not be undone; pass what changes in it "
                    "alone, or an object with begin, prepare, commit and roll_back"
                ) from error

    def prepare(self) -> None:
        """Nothing can fail."""

    def commit(self) -> None:
        self._remembered = None

    def roll_back(self) -> None:
        if self._remembered is not None:
            self._remembered.put_back()
        self._remembered = None


_PART = ("begin", "prepare", "commit", "roll_back")


def read_state(values: Iterable[Any]) -> list[Part]:
    """What a caller gave as further state, as parts of a transaction.

    Raises:
        TypeError: a value that nothing can change, so that another must have been meant.
    """
    parts: list[Part] = []
    plain: list[Any] = []
    for value in values:
        if isinstance(value, _CONSTANT):
            raise TypeError(
                f"state=[…] holds {value!r} (of type {type(value).__name__}), which nothing can "
                "change in place; pass the object that holds it"
            )
        if all(callable(getattr(value, name, None)) for name in _PART):
            parts.append(value)
        else:
            plain.append(value)
    return [*parts, State(plain)] if plain else parts


def _kind_of(value: Any) -> _Remember:
    """How values of a type are remembered; None for those that cannot change."""
    kind = type(value)
    kinds: tuple[tuple[Any, _Remember], ...] = (
        (Tensor, Remembered._add_tensor),
        (np.ndarray, Remembered._add_array),
        (nn.Module, Remembered._add_module),
        (_UNCHANGING_KINDS, None),
        (_CONSTANT, None),
        (dict, Remembered._add_dict),
        (list, Remembered._add_list),
        (deque, Remembered._add_deque),
        (set, Remembered._add_set),
        (tuple, Remembered._add_tuple),
        ((bytearray, array.array), Remembered._add_flat),
        (functools.partial, Remembered._add_partial),
    )
    if is_generator(value):
        return Remembered._add_generator
    for known, remember in kinds:
        if issubclass(kind, known):
            return remember
    if kind.__module__.partition(".")[0] in _UNCHANGING_PACKAGES:
        return None
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        return Remembered._copied  # where it stands is no attribute
    if _base(kind) is object:
        return Remembered._add_object
    if all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return Remembered._by_state_dict
    if callable(value) and not hasattr(value, "__dict__"):
        return None  # functions written in other languages
    return Remembered._copied


def _base(kind: type) -> type:
    """The class in another language than Python that a class builds upon."""
    for base in kind.__mro__:
        new = vars(base).get("__new__")
        if base is object or getattr(new, "__self__", None) is base:
            return base
    return object


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            mangled = f"_{each.__name__.lstrip('_')}{name}"
            names.append(mangled if name.startswith("__") and not name.endswith("__") else name)
    return tuple(names)


@functools.cache
def _is_own_class(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package not in ("builtins", "torch", "torchmetrics", "collections", "abc", "typing")


def _can_rest(value: Any) -> bool:
    """Whether nothing in a list's element is changed, unless a tensor is written into."""
    parts = value if type(value) is tuple else (value,)
    return all(isinstance(each, Tensor) or _KINDS.get(type(each), ...) is None for each in parts)


def _ids(values: list[Any], length: int) -> tuple[int, ...]:
    return tuple(map(id, _ends(values, length)))


def _versions(values: list[Any], length: int) -> tuple[Any, ...]:
    return tuple(
        seen_version(each) if isinstance(each, Tensor) else None for each in _ends(values, length)
    )


def _ends(values: list[Any], length: int) -> Iterator[Any]:
    if length <= 2 * _WATCHED:
        return itertools.islice(values, length)
    return itertools.chain(values[:_WATCHED], values[length - _WATCHED : length])


def _check_rest(saved: list[Any], length: int, versions: tuple[Any, ...]) -> None:
    if _versions(saved, length) != versions:
        raise RollbackError(
            "the failed attempt wrote into a tensor of a list that earlier batches had only "
            "appended to, so it was not copied; continue from a checkpoint, and let the metric "
            "replace such tensors (values[i] = values[i] + more) instead of writing into them"
        )


def _check_parameters(owner: str, watched: list[tuple[str, Tensor, int | None]]) -> None:
    for name, parameter, version in watched:
        if seen_version(parameter) != version:
            raise RollbackError(
                f"the failed attempt changed the parameter {name!r} of a {owner} inside a metric, "
                "which is not copied; continue from a checkpoint, and keep what a metric changes "
                "in buffers or states"
            )


def _put_table_back(table: dict[str, Any], saved: dict[str, Any]) -> None:
    table.clear()
    table.update(saved)


def _put_slot_back(owner: Any, name: str, with_value: bool, value: Any) -> None:
    if with_value:
        object.__setattr__(owner, name, value)
    elif hasattr(owner, name):
        object.__delattr__(owner, name)


def _put_class_attribute_back(owner: type, name: str, value: Any) -> None:
    if vars(owner).get(name, ...) is not value:
        setattr(owner, name, value)


def _remove_new_class_attributes(owner: type, names: set[str]) -> None:
    for name in [name for name in vars(owner) if name not in names]:
        delattr(owner, name)


def _put_list_back(value: list[Any], saved: list[Any]) -> None:
    list.__setitem__(value, slice(None), saved)


def _put_dict_back(value: dict[Any, Any], saved: dict[Any, Any]) -> None:
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    kind.clear(value)
    kind.update(value, saved)


def _put_set_back(value: set[Any], saved: set[Any]) -> None:
    set.clear(value)
    set.update(value, saved)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
