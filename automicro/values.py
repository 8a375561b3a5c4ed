"""Values of any kind: their parts, comparison of two values, and their form as text and numbers."""

import array
import contextlib
import enum
import functools
import io
import logging
import operator
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from automicro.torch_private import (
    REGISTERED,
    gradient_hooks,
    plain_parts,
    scripted_attributes,
    set_scripted,
)

# Objects of these classes keep no state of a forward, or must not be changed while in use.
_OPAQUE_KINDS: tuple[type, ...] = (
    BaseException, enum.Enum, logging.Handler, threading.Thread, weakref.ref,
    np.memmap, np.generic, np.dtype, random.SystemRandom, torch.Size,
    types.GenericAlias, types.UnionType,
    torch.optim.lr_scheduler.LRScheduler, torch.utils.data.Dataset, torch.utils.data.DataLoader,
    torch.utils.data.Sampler,
)  # fmt: skip
# Objects of these packages manage their own state, or refer to almost everything: trainers,
# loggers, tokenizers, tables of data. Classes created at run time belong to "types".
_OPEN = {"argparse", "collections", "contextlib", "types", "weakref", "_weakrefset"}
_OPAQUE_PACKAGES = sys.stdlib_module_names - _OPEN
_OPAQUE_PACKAGES |= {
    *("torch", "numpy", "automicro", "keras", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("accelerate", "deepspeed", "ray", "transformers.trainer", "tokenizers", "datasets", "tqdm"),
    *("transformers.tokenization_utils_base", "sentencepiece", "tiktoken", "wandb", "tensorboard"),
    *("tensorboardX", "mlflow", "comet_ml", "pandas", "pyarrow", "h5py", "PIL", "omegaconf"),
}
# Wrappers for ranks keep the state of collectives, which the guards of the ranks restore.
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.fully_sharded_data_parallel")


class Kind(NamedTuple):
    """One way in which values hold other values."""

    read: Callable[[Any], Any]  # returns the parts, as a new dict or sequence; of a leaf, a copy
    write: Callable[[Any, Any], Any] | None = None  # restores them; None if immutable
    name: str = "[{!r}]"  # format of a part's name, appended to the name of the value
    is_leaf: bool = False  # whether it holds no other values


Kinds: TypeAlias = Callable[[type], tuple[Kind, ...]]


def table_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, as its own dictionary.

    >>> table_of(types.SimpleNamespace(a=1))
    {'a': 1}
    """
    table: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return table


def same_objects(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether two collections hold the same objects, in the same order.

    >>> same_objects([1, None], (1, None)), same_objects([[]], [[]])
    (True, False)
    """
    return len(one) == len(other) and all(map(operator.is_, one, other))


def put_table(table: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Restore the entries of a dict and their order, writing only what differs."""
    # An OrderedDict stores its order separately, so writes with dict methods would break it.
    base: Any = OrderedDict if isinstance(table, OrderedDict) else dict
    if not same_objects(list(base.__iter__(table)), saved):
        base.clear(table)
        for key, value in saved.items():
            base.__setitem__(table, key, value)
        return
    for key, value in saved.items():
        if dict.__getitem__(table, key) is not value:
            dict.__setitem__(table, key, value)


def _container(base: Any, fill: Any) -> Kind:
    """Return the kind of a container, which bypasses overridden methods of subclasses."""

    def write(value: Any, saved: Any) -> None:
        # Leave out weak references that died: the callback that removes them has already run.
        base.clear(value)
        fill(value, [each for each in saved if not _is_dead(each)])

    return Kind(lambda value: list(base.__iter__(value)), write)


def _is_dead(key: Any) -> bool:
    return issubclass(type(key), weakref.ref) and key() is None


def _write_dict(value: dict[Any, Any], saved: dict[Any, Any]) -> None:
    put_table(value, {key: each for key, each in saved.items() if not _is_dead(key)})


def _named(read: Any, put: Any = object.__setattr__, drop: Any = object.__delattr__) -> Kind:
    """Return the kind of a value that holds others by name, which are written one at a time."""

    def write(value: Any, saved: dict[str, Any]) -> None:
        now = read(value)
        for key in now.keys() - saved.keys():
            drop(value, key)
        for key, each in saved.items():
            if key not in now or now[key] is not each:
                put(value, key, each)

    return Kind(read, write, ".{}")


def _attributes(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes of an object that exist, bypassing its own code."""
    found = {}
    for name in names:
        with contextlib.suppress(AttributeError):
            found[name] = object.__getattribute__(value, name)
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are set, in its dictionary and in slots.

    >>> attributes_of(types.SimpleNamespace(a=1))
    {'a': 1}
    """
    # Both, because a subclass without slots has a dictionary, too.
    return dict(getattr(value, "__dict__", ())) | dict(_SLOTS.read(value))


@functools.cache
def _slots(kind: Any) -> list[str]:
    tables = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    each = [item for table in tables for item in table.items()]
    return [name for name, slot in each if type(slot) is types.MemberDescriptorType]


def _read_script(value: Any) -> dict[str, Any]:
    return scripted_attributes(value) | dict(nn.Module.named_children(value))


def state_of(generator: Any) -> Any:
    """Return the state of a generator of torch, NumPy or Python.

    Example:
        >>> own = np.random.default_rng(1)
        >>> before = state_of(own)
        >>> drawn = own.random()
        >>> set_state(own, before)
        >>> own.random() == drawn
        True
    """
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.get_state()
    return state.clone() if isinstance(state, Tensor) else state


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def is_generator(value: Any) -> bool:
    """Whether a value is a random number generator."""
    # SystemRandom has no state that could be restored.
    return issubclass(type(value), _GENERATORS) and not isinstance(value, random.SystemRandom)


def _put_array(value: Any, saved: Any) -> None:
    if value.shape != saved.shape:
        # By default resize() refuses, because other code refers to the array.
        value.resize(saved.shape, refcheck=False)
    if value.flags.writeable:
        value[...] = saved


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_WRAPPING = (
    *(types.MethodType, functools.partial),
    *(staticmethod, classmethod, property, functools.cached_property),
)
_PARTS = ("__func__", "__self__", "fget", "fset", "fdel", "func", "args", "keywords")


def _owner_of(method: Any) -> dict[str, Any]:
    """Return the owner of a method that is written in C, if it can be read."""
    owner = method.__self__
    return {} if UNREADABLE in kinds_of(type(owner)) else {"__self__": owner}


TENSOR = Kind(lambda value: value, is_leaf=True)
OBJECT = Kind(table_of, name=".{}")
DICT = Kind(lambda value: dict(dict.items(value)), _write_dict)
_in_order = OrderedDict.__iter__
LIST = _container(list, list.extend)
FUNCTION = Kind(lambda value: {}, name=".{}")  # its parts are in namespaces: see `namespaces_of`
DEFAULTS = _named(lambda v: {each: getattr(v, each) for each in ("__defaults__", "__kwdefaults__")})
CELL = _named(lambda v: {"cell_contents": v.cell_contents} if _is_filled(v) else {})
CLASS = _named(lambda v: dict(vars(v)), type.__setattr__, type.__delattr__)
# The attributes of an optimizer, as hooks of K-FAC write them, without the state of its parameters.
_OPTIONS = _named(
    lambda v: _attributes(v, [n for n in ("param_groups", *table_of(v)) if n != "state"])
)
_KINDS: tuple[tuple[Any, Kind], ...] = (
    (Tensor, TENSOR),
    (np.ndarray, Kind(np.array, _put_array, is_leaf=True)),
    (torch.jit.ScriptModule, _named(_read_script, set_scripted, lambda v, key: None)),
    ((nn.Module, types.SimpleNamespace), OBJECT),
    (_GENERATORS, Kind(state_of, set_state, is_leaf=True)),
    (torch.optim.Optimizer, _OPTIONS),
    (OrderedDict, DICT._replace(read=lambda v: {k: dict.__getitem__(v, k) for k in _in_order(v)})),
    (dict, DICT),
    (list, LIST),
    (set, _container(set, set.update)),
    (deque, _container(deque, deque.extend)),
    ((tuple, frozenset), Kind(lambda value: list(type(value).__iter__(value)))),
    (
        (bytearray, array.array),
        Kind(lambda v: v[:], lambda v, saved: v.__setitem__(slice(None), saved), is_leaf=True),
    ),
    (type, CLASS),
    (types.FunctionType, FUNCTION),
    (types.BuiltinMethodType, Kind(_owner_of, name="")),
    (_WRAPPING, Kind(lambda value: _attributes(value, _PARTS), name="")),
)
_SLOTS = _named(lambda v: _attributes(v, _slots(type(v))))  # type: ignore[arg-type]
PARALLEL = Kind(lambda value: dict(nn.Module.named_children(value)), name=".{}")
UNREADABLE = Kind(lambda value: None, is_leaf=True)
_WITH_ATTRIBUTES = (dict, list, set, deque, tuple)
_known: dict[type, tuple[Kind, ...]] = {}


def kinds_of(kind: type) -> tuple[Kind, ...]:
    """Return the ways in which values of a type hold others; none if they are immutable.

    >>> kinds_of(int), len(kinds_of(list))
    ((), 1)
    """
    found = _known.get(kind)
    if found is None:
        if len(_known) > 5_000:  # some code creates a new type for each object
            _known.clear()
        found = () if issubclass(kind, _OPAQUE_KINDS) else tuple(_find_kinds(kind))
        _known[kind] = found
    return found


def _find_kinds(kind: type) -> Iterator[Kind]:
    found = next((how for base, how in _KINDS if issubclass(kind, base)), None)
    if found is OBJECT and any(base.__module__.startswith(_WRAPPERS) for base in kind.__mro__):
        found = PARALLEL
    if found is not None:
        yield found
    elif _is_opaque(kind.__module__):
        is_iterator = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
        if is_iterator or issubclass(kind, io.IOBase):
            yield UNREADABLE
        return
    if kind.__dictoffset__ and (found is None or issubclass(kind, _WITH_ATTRIBUTES)):
        yield OBJECT
    elif found is None and not any("__slots__" in vars(base) for base in kind.__mro__):
        yield UNREADABLE  # written in C
    if found is not TENSOR and _slots(kind):
        yield _SLOTS


@functools.cache
def _is_opaque(module: str | None) -> bool:
    """Whether objects that a Python module defines keep no state of a forward.

    >>> _is_opaque("threading"), _is_opaque("collections"), _is_opaque("theirs")
    (True, False, False)
    """
    parts = str(module).split(".")
    return any(".".join(parts[: stop + 1]) in _OPAQUE_PACKAGES for stop in range(len(parts)))


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a Python module belongs to a library, whose code keeps no state of the caller."""
    path = str(getattr(sys.modules.get(str(module)), "__file__", None))
    is_pythons = str(module).partition(".")[0] in sys.stdlib_module_names
    return is_pythons or _is_opaque(module) or "site-packages" in path or "dist-packages" in path


def is_plain(value: Any) -> bool:
    """Whether a value is immutable.

    >>> is_plain("text"), is_plain((1, "one")), is_plain([])
    (True, True, False)
    """
    return not kinds_of(type(value)) or (type(value) is tuple and all(map(is_plain, value)))


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that code and inner code use for globals, attributes and imports."""
    inner = [each for each in code.co_consts if type(each) is types.CodeType]
    given = [each for each in code.co_consts if type(each) is str]  # arguments of setattr
    return frozenset((*code.co_names, *given)).union(*map(_names_in, inner))


class _Names(NamedTuple):
    """Some names of a namespace: of a Python module, or of a library's class."""

    owner: Any
    table: Mapping[str, Any]
    used: frozenset[str]
    is_walked: bool


def namespaces_of(function: types.FunctionType) -> Iterator[_Names]:
    """Yield the namespaces in which the caller's code looks up names."""
    # Modules of libraries are included, but their values are not walked.
    used, home = _names_in(function.__code__), function.__globals__
    if is_installed(home.get("__name__")):
        return
    seen = {id(home)}
    waiting: list[_Names] = [_Names(home, home, used, True)]
    cells = {name: cell.cell_contents for name, cell in cells_of(function) if _is_filled(cell)}
    waiting.append(_Names(None, cells, frozenset(cells), False))
    waiting.append(_Names(None, sys.modules, used - home.keys(), False))  # imports inside the code
    for each in waiting:  # the list grows inside the loop
        if each.owner is not None:
            yield each
        for name in sorted(each.used & each.table.keys()):
            value = each.table[name]
            is_module = type(value) is types.ModuleType
            if id(value) in seen or not (
                is_module or (each.owner is not None and isinstance(value, type))
            ):
                continue
            seen.add(id(value))
            if is_module:
                is_theirs = not is_installed(value.__name__)
                if is_theirs or each.table is not sys.modules:
                    waiting.append(_Names(vars(value), vars(value), used, is_theirs))
            elif is_installed(value.__module__):
                found = _Names(value, vars(value), used & vars(value).keys(), False)
                if found.used:
                    yield found


def cells_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Return the cells of a function's closure with their variable names."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _is_filled(cell: Any) -> bool:
    """Whether a closure cell holds a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def differs(one: Any, other: Any) -> bool:
    """Whether two values differ: numbers by value, tensors by bits, objects by identity.

    >>> differs(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])), differs(1, 1.0)
    (False, True)
    """
    return not same_values(one, other, by_identity=True)


def children(value: Any, kinds: Kinds = kinds_of) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with its name relative to the value."""
    # A name that starts with neither a dot nor a bracket is absolute.
    found = kinds(type(value))
    for kind in found:
        if kind is FUNCTION:
            yield from _inside_function(value)
        elif kind is CLASS:
            own = [each for each in value.__mro__ if not is_installed(each.__module__)]
            for each in own:
                yield from ((f".{name}", part) for name, part in vars(each).items())
            yield from (("", each) for each in own[1:])
        elif not kind.is_leaf:
            held = kind.read(value)
            for name, each in held.items() if type(held) is dict else enumerate(held):
                # Parameters, buffers and children have their own names, without their table's.
                if name in REGISTERED and issubclass(type(value), nn.Module):
                    yield from ((f".{key}", part) for key, part in dict.items(each))
                yield kind.name.format(name), each
        elif kind is TENSOR:
            yield from ((f".{name}", each) for name, each in table_of(value).items())
            hooks = (table for table in gradient_hooks(value) if table)
            yield from ((".hook", hook) for table in hooks for hook in table.values())
    if found and not is_installed(type(value).__module__):
        yield type(value).__name__, type(value)


def _inside_function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from ((name, cell.cell_contents) for name, cell in cells_of(value) if _is_filled(cell))
    yield from (("default", each) for each in (value.__defaults__, value.__kwdefaults__))
    yield from ((f"{value.__name__}.{name}", each) for name, each in vars(value).items())
    for names in namespaces_of(value):
        if names.is_walked:
            start = "" if names.table is value.__globals__ else f"{names.table['__name__']}."
            used = sorted(names.used & names.table.keys())  # the order of a set varies between runs
            yield from ((f"{start}{name}", names.table[name]) for name in used)


def is_owned(tensor: Tensor) -> bool:
    """Whether a tensor belongs to the optimizer: a parameter, or a trained leaf."""
    return (tensor.requires_grad and tensor.is_leaf) or isinstance(tensor, nn.Parameter)


def walk(roots: Mapping[str, Any], kinds: Kinds = kinds_of) -> Iterator[tuple[str, Any]]:
    """Yield all mutable values within some roots, each once, with the shortest path to it.

    >>> [path for path, _ in walk({"model": nn.Sequential(nn.ReLU())}) if path.endswith("0")]
    ['model.0']
    """
    return ((each.path, each.value) for each in places(roots, kinds))


def kinds_within(roots: Mapping[str, Any]) -> Kinds:
    """Return `kinds_of`, extended to walk into the roots themselves, even if their class is opaque.

    >>> kinds = kinds_within({"started": threading.Thread()})
    >>> len(kinds(threading.Thread)), len(kinds(threading.Timer))
    (1, 0)
    """
    given = {type(each) for each in roots.values() if hasattr(each, "__dict__")}

    def kinds(kind: type) -> tuple[Kind, ...]:
        found = kinds_of(kind)
        return (OBJECT,) if kind in given and found in ((), (_OPTIONS,)) else found

    return kinds


class Place(NamedTuple):
    """The place where a walk found a value: `children` of the owner yield it by this name."""

    path: str
    value: Any
    owner: Any = None
    name: str = ""


def places(roots: Mapping[str, Any], kinds: Kinds = kinds_of) -> Iterator[Place]:
    """Yield the same values as `walk`, with their owners."""
    waiting = deque(Place(path, value) for path, value in roots.items())
    # Keep values with their ids, because the id of a freed value can be reused.
    seen = dict[int, Any]()
    while waiting:
        # Breadth first, so that the path to a value is the shortest.
        place = waiting.popleft()
        path, value = place.path, place.value
        if id(value) not in seen and kinds(type(value)):
            seen[id(value)] = value
            yield place
            for name, each in children(value, kinds):
                if id(each) not in seen and kinds(type(each)):
                    start = path if name[:1] in ("", ".", "[") else ""
                    waiting.append(Place(f"{start}{name}".lstrip("."), each, value, name))


def comes_from(value: object, *names: str) -> bool:
    """Whether a value's class, or a base of it, has one of these names in its library.

    >>> import fractions
    >>> comes_from(fractions.Fraction(1), "fractions.Fraction"), comes_from(1, "torch.Tensor")
    (True, False)
    """
    # By name, so that a library that is not in use does not have to be imported.
    homes = (f"{e.__module__.partition('.')[0]}.{e.__name__}" for e in type(value).__mro__)
    return not set(names).isdisjoint(homes)


def same_content(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every bit agree, including NaN. Waits for the device.

    Example:
        >>> import torch
        >>> same_content(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
        True
    """
    if one.dtype != other.dtype or one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if not one.is_nested and one.shape != other.shape:  # sizes of nested tensors are symbols
        return False
    # Meta tensors have no data to compare.
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    pair = one.detach(), other.detach().to(one.device)
    parts, others = ([e for part in plain_parts(each) for e in _dense(part)] for each in pair)
    return len(parts) == len(others) and all(map(_same_bits, parts, others))


def _dense(part: Tensor) -> Sequence[Tensor]:
    """Return the dense tensors that hold the data of a plain, nested or quantized tensor."""
    if part.is_nested:
        return part.unbind()
    return [part.int_repr() if part.is_quantized else part]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    # Compare as integers, because float NaN differs from itself, and 0.0 equals -0.0.
    bits = _BITS[min(one.itemsize, 8)]
    # Conjugate and negative views share the bits of the original and only have a flag.
    # Contiguous, because complex numbers with gaps between them cannot be viewed as integers.
    lines = [each.resolve_conj().resolve_neg().contiguous().view(-1) for each in (one, other)]
    return torch.equal(*(each.view(bits) for each in lines))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES = (dict, list, tuple, int, float, complex, str, bytes, bytearray, array.array, torch.Size)


def same_values(one: Any, other: Any, *, by_identity: bool = False) -> bool:
    """Whether two values are equal: plain values, tensors and arrays, and containers of them.

    Example:
        >>> import torch
        >>> same_values({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 1]})
        True
    """
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    if issubclass(kind, Tensor):
        return same_content(one, other)
    if issubclass(kind, np.ndarray):
        return _same_arrays(one, other)
    if by_identity and kind not in _VALUES:
        return False
    same = functools.partial(same_values, by_identity=by_identity)
    if issubclass(kind, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if issubclass(kind, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    is_nan = kind in (float, complex) and one != one and other != other
    return is_nan or bool(one == other)


def _same_arrays(one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.hasobject:
        return all(map(operator.is_, one.flat, other.flat))
    return bool(one.tobytes() == other.tobytes())


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Stack 0-d tensors in their widest dtype, which holds each exactly.

    >>> stack_scalars([torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16)])
    tensor([1., 2.])
    """
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in scalars))
    place = scalars[0].device
    return torch.stack([each.detach().to(place, dtype) for each in scalars])


def alone(scalar: Tensor) -> Tensor:
    """Detach a scalar tensor, in memory that holds nothing else.

    >>> scalar = torch.nn.functional.mse_loss(torch.ones(1000), torch.zeros(1000))
    >>> alone(scalar), alone(scalar).untyped_storage().nbytes()
    (tensor(1.), 4)
    """
    # Kernels may write a mean into the memory of its terms, which it would keep alive.
    detached = scalar.detach()
    if type(detached) is not Tensor or detached.layout is not torch.strided:
        return detached
    is_alone = detached.untyped_storage().nbytes() <= detached.element_size()
    return detached if is_alone else detached.clone()


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of 0-d tensors, waiting for a device only once.

    >>> read_scalars([torch.tensor(1.0), torch.tensor(2.0)])
    [1.0, 2.0]
    """
    there = [each for each in scalars if each.device.type != "cpu"]
    if len(there) < 2:
        return [each.item() for each in scalars]
    read = iter(stack_scalars(there).tolist())
    return [each.item() if each.device.type == "cpu" else next(read) for each in scalars]
