"""Values of any kind: what they hold, whether two are the same, as text and as numbers."""

import array
import contextlib
import enum
import functools
import io
import logging
import operator
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from automicro.torch_private import (
    REGISTERED,
    gradient_hooks,
    scripted_attributes,
    set_scripted,
    sparse_parts,
)
from automicro.units import Duration

# Objects of these keep no state of a forward, or must not be touched while others use them.
_OPAQUE_KINDS: tuple[type, ...] = (
    BaseException, enum.Enum, logging.Handler, threading.Thread, weakref.ref,
    np.memmap, np.generic, np.dtype, random.SystemRandom, torch.Size,
    types.GenericAlias, types.UnionType,
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.Dataset,
    torch.utils.data.DataLoader, torch.utils.data.Sampler,
)  # fmt: skip
# Objects of these packages lead a life of their own, or lead to everything: trainers, loggers,
# tokenizers, tables of data.
# Classes that are made at run time count as those of "types".
_OPEN = {"argparse", "collections", "contextlib", "types", "weakref", "_weakrefset"}
_OPAQUE_PACKAGES = sys.stdlib_module_names - _OPEN
_OPAQUE_PACKAGES |= {
    *("torch", "numpy", "automicro", "keras", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("accelerate", "deepspeed", "ray", "transformers.trainer", "tokenizers", "datasets", "tqdm"),
    *("transformers.tokenization_utils_base", "sentencepiece", "tiktoken", "wandb", "tensorboard"),
    *("tensorboardX", "mlflow", "comet_ml", "pandas", "pyarrow", "h5py", "PIL", "omegaconf"),
}
# Ranks' wrappers keep the state of collectives, which the guards of the ranks put back.
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.fully_sharded_data_parallel")


class Kind(NamedTuple):
    """One way in which values hold others.

    Attributes:
        read: gives what a value holds, as a new dict or sequence; of a leaf, its content.
        write: lets a value hold that again; None where it never holds anything else.
        name: format of a part's name, behind the name of what holds it.
        is_leaf: whether it holds no further values.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any] | None = None
    name: str = "[{!r}]"
    is_leaf: bool = False


Kinds: TypeAlias = Callable[[type], tuple[Kind, ...]]


def table_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, where they lie.

    >>> table_of(types.SimpleNamespace(a=1))
    {'a': 1}
    """
    table: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return table


def same_objects(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether both hold the very same objects, in the same order.

    >>> same_objects([1, None], (1, None)), same_objects([[]], [[]])
    (True, False)
    """
    return len(one) == len(other) and all(map(operator.is_, one, other))


def put_table(table: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Let a dict have these entries in this order; writes no more than what differs."""
    # An OrderedDict keeps its order beside the dict that it is: written to as a dict, it loses it.
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
    """A container, past what a subclass may make of its methods."""

    def write(value: Any, saved: Any) -> None:
        # A weak reference that has died meanwhile stays out: what would remove it has been called
        # already.
        base.clear(value)
        fill(value, [each for each in saved if not _is_dead(each)])

    return Kind(lambda value: list(base.__iter__(value)), write)


def _is_dead(key: Any) -> bool:
    return issubclass(type(key), weakref.ref) and key() is None


def _write_dict(value: dict[Any, Any], saved: dict[Any, Any]) -> None:
    put_table(value, {key: each for key, each in saved.items() if not _is_dead(key)})


def _named(read: Any, put: Any = object.__setattr__, drop: Any = object.__delattr__) -> Kind:
    """Something that keeps values by names, which are put and dropped one at a time."""

    def write(value: Any, saved: dict[str, Any]) -> None:
        now = read(value)
        for key in now.keys() - saved.keys():
            drop(value, key)
        for key, each in saved.items():
            if key not in now or now[key] is not each:
                put(value, key, each)

    return Kind(read, write, ".{}")


def _attributes(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Those that an object has, read past its own code."""
    found = {}
    for name in names:
        with contextlib.suppress(AttributeError):
            found[name] = object.__getattribute__(value, name)
    return found


@functools.cache
def _slots(kind: Any) -> list[str]:
    tables = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    each = [item for table in tables for item in table.items()]
    return [name for name, slot in each if type(slot) is types.MemberDescriptorType]


def _read_script(value: Any) -> dict[str, Any]:
    return scripted_attributes(value) | dict(nn.Module.named_children(value))


def state_of(generator: Any) -> Any:
    """Where a generator of torch, NumPy or Python stands, to be set again.

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
    """Put a generator where it stood."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def is_generator(value: Any) -> bool:
    """Whether a value draws random numbers of its own."""
    # SystemRandom has no state that could be put back.
    return issubclass(type(value), _GENERATORS) and not isinstance(value, random.SystemRandom)


def _put_array(value: Any, saved: Any) -> None:
    if value.shape != saved.shape:
        # Others refer to the array while it is put back, for which resize() would refuse.
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
    """The owner of a method that is written in C, where that can be read."""
    owner = method.__self__
    return {} if UNREADABLE in kinds_of(type(owner)) else {"__self__": owner}


TENSOR = Kind(lambda value: value, is_leaf=True)
OBJECT = Kind(table_of, name=".{}")
DICT = Kind(lambda value: dict(dict.items(value)), _write_dict)
_in_order = OrderedDict.__iter__
LIST = _container(list, list.extend)
FUNCTION = Kind(lambda value: {}, name=".{}")  # what it holds lies in others: see `namespaces_of`
DEFAULTS = _named(lambda v: {each: getattr(v, each) for each in ("__defaults__", "__kwdefaults__")})
CELL = _named(lambda v: {"cell_contents": v.cell_contents} if _is_filled(v) else {})
CLASS = _named(lambda v: dict(vars(v)), type.__setattr__, type.__delattr__)
_KINDS: tuple[tuple[Any, Kind], ...] = (
    (Tensor, TENSOR),
    (np.ndarray, Kind(np.array, _put_array, is_leaf=True)),
    (torch.jit.ScriptModule, _named(_read_script, set_scripted, lambda v, key: None)),
    ((nn.Module, types.SimpleNamespace), OBJECT),
    (_GENERATORS, Kind(state_of, set_state, is_leaf=True)),
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
    """The ways in which values of a type hold others; none where nothing in them can change.

    >>> kinds_of(int), len(kinds_of(list))
    ((), 1)
    """
    found = _known.get(kind)
    if found is None:
        if len(_known) > 5_000:  # types that are made anew for each object
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
    """Whether objects that a module of Python defines keep nothing of a forward's.

    >>> _is_opaque("threading"), _is_opaque("collections"), _is_opaque("theirs")
    (True, False, False)
    """
    parts = str(module).split(".")
    return any(".".join(parts[: stop + 1]) in _OPAQUE_PACKAGES for stop in range(len(parts)))


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module of Python belongs to a library, whose code keeps nothing of the caller's."""
    path = str(getattr(sys.modules.get(str(module)), "__file__", None))
    is_pythons = str(module).partition(".")[0] in sys.stdlib_module_names
    return is_pythons or _is_opaque(module) or "site-packages" in path or "dist-packages" in path


def is_plain(value: Any) -> bool:
    """Whether nothing in a value can change.

    >>> is_plain("text"), is_plain((1, "one")), is_plain([])
    (True, True, False)
    """
    return not kinds_of(type(value)) or (type(value) is tuple and all(map(is_plain, value)))


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code uses for globals, attributes and imports, with those of code inside."""
    inner = [each for each in code.co_consts if type(each) is types.CodeType]
    given = [each for each in code.co_consts if type(each) is str]  # to setattr
    return frozenset((*code.co_names, *given)).union(*map(_names_in, inner))


class _Names(NamedTuple):
    """Some names of a namespace: a module's of Python, or a class's of a library."""

    owner: Any
    table: Mapping[str, Any]
    used: frozenset[str]
    is_walked: bool


def namespaces_of(function: types.FunctionType) -> Iterator[_Names]:
    """Where the caller's code looks up names; of a library's modules, what stands there alone."""
    used, home = _names_in(function.__code__), function.__globals__
    if is_installed(home.get("__name__")):
        return
    seen = {id(home)}
    waiting: list[_Names] = [_Names(home, home, used, True)]
    cells = {name: cell.cell_contents for name, cell in cells_of(function) if _is_filled(cell)}
    waiting.append(_Names(None, cells, frozenset(cells), False))
    waiting.append(_Names(None, sys.modules, used - home.keys(), False))  # it imports by itself
    for each in waiting:  # which grows meanwhile
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
    """The cells of a function's closure, by the names that it calls them."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _is_filled(cell: Any) -> bool:
    """Whether a cell of a closure holds anything yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def differs(one: Any, other: Any) -> bool:
    """Whether two values are another: numbers by value, tensors by each bit, objects by identity.

    >>> differs(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])), differs(1, 1.0)
    (False, True)
    """
    return not same_values(one, other, by_identity=True)


def children(value: Any, kinds: Kinds = kinds_of) -> Iterator[tuple[str, Any]]:
    """The children of a value, each with its name behind that of the value.

    A name that begins with neither a dot nor a bracket stands by itself.
    """
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
                # Parameters, buffers and children go by their own names, without that of their
                # table.
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
            used = sorted(names.used & names.table.keys())  # of a set each run has another order
            yield from ((f"{start}{name}", names.table[name]) for name in used)


def is_owned(tensor: Tensor) -> bool:
    """Whether a tensor may have attributes of a forward's: a parameter, or one that is trained."""
    return (tensor.requires_grad and tensor.is_leaf) or isinstance(tensor, nn.Parameter)


def walk(roots: Mapping[str, Any], kinds: Kinds = kinds_of) -> Iterator[tuple[str, Any]]:
    """All values within some that may change, each once, with the shortest path to it.

    >>> [path for path, _ in walk({"model": nn.Sequential(nn.ReLU())}) if path.endswith("0")]
    ['model.0']
    """
    return ((each.path, each.value) for each in places(roots, kinds))


def kinds_within(roots: Mapping[str, Any]) -> Kinds:
    """`kinds_of`, but that what is given by name is walked, even where its class is a host's.

    >>> kinds = kinds_within({"started": threading.Thread()})
    >>> len(kinds(threading.Thread)), len(kinds(threading.Timer))
    (1, 0)
    """
    given = {type(each) for each in roots.values() if hasattr(each, "__dict__")}
    return lambda kind: kinds_of(kind) or ((OBJECT,) if kind in given else ())


class Place(NamedTuple):
    """Where a walk has found a value: `children` of the owner give it by this name."""

    path: str
    value: Any
    owner: Any = None
    name: str = ""


def places(roots: Mapping[str, Any], kinds: Kinds = kinds_of) -> Iterator[Place]:
    """The same with what holds each."""
    waiting = deque(Place(path, value) for path, value in roots.items())
    # Values are kept with their ids, because one that is freed would leave its id to another.
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
    """Whether a value is of a class, or of a subclass of one, that a library calls so.

    >>> import fractions
    >>> comes_from(fractions.Fraction(1), "fractions.Fraction"), comes_from(1, "torch.Tensor")
    (True, False)
    """
    # By names, so that a library that is not in use need not be imported.
    classes = type(value).__mro__
    homes = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in classes}
    return not homes.isdisjoint(names)


def same_content(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every bit agree, so that NaN agrees with NaN. Waits for the device.

    Example:
        >>> import torch
        >>> same_content(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
        True
    """
    if one.dtype != other.dtype or one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if not one.is_nested and one.shape != other.shape:  # ragged sizes are symbols
        return False
    # Without data there is nothing else to compare.
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    parts = _dense_parts(one.detach())
    others = _dense_parts(other.detach().to(one.device))
    return len(parts) == len(others) and all(map(_same_bits, parts, others))


def _dense_parts(value: Tensor) -> list[Tensor]:
    """The dense tensors that a sparse, quantized, nested or sharded one is made of.

    >>> import torch
    >>> len(_dense_parts(torch.eye(2).to_sparse()))
    2
    """
    if hasattr(value, "__tensor_flatten__"):
        inner = (getattr(value, name) for name in value.__tensor_flatten__()[0])
        tensors = (each for each in inner if isinstance(each, Tensor))  # and no mesh of ranks
        return [part for each in tensors for part in _dense_parts(each)]
    if value.is_nested:
        return list(value.unbind())
    if value.is_quantized:
        return [value.int_repr()]
    if value.layout is torch.sparse_coo:
        return sparse_parts(value)
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return [value]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    # As whole numbers: for floats NaN is unlike itself, and 0.0 like -0.0.
    bits = _BITS[min(one.itemsize, 8)]
    # A conjugate or a negative is only marked as one, over the bits of the other.
    lines = [each.resolve_conj().resolve_neg().reshape(-1) for each in (one, other)]
    return torch.equal(*(each.view(bits) for each in lines))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES = (dict, list, tuple, int, float, complex, str, bytes, bytearray, array.array, torch.Size)


def same_values(one: Any, other: Any, *, by_identity: bool = False) -> bool:
    """Whether two values are alike: plain ones, tensors and arrays, nested as they may be.

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
    """One tensor of several 0-d ones, in the widest type of them, which holds each exactly.

    >>> stack_scalars([torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16)])
    tensor([1., 2.])
    """
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in scalars))
    place = scalars[0].device
    return torch.stack([each.detach().to(place, dtype) for each in scalars])


def alone(scalar: Tensor) -> Tensor:
    """A number without a graph, in memory that holds nothing else.

    Kernels may leave a mean in the memory of its terms, which would live as long as the mean does.

    >>> scalar = torch.nn.functional.mse_loss(torch.ones(1000), torch.zeros(1000))
    >>> alone(scalar), alone(scalar).untyped_storage().nbytes()
    (tensor(1.), 4)
    """
    detached = scalar.detach()
    if type(detached) is not Tensor or detached.layout is not torch.strided:
        return detached
    is_alone = detached.untyped_storage().nbytes() <= detached.element_size()
    return detached if is_alone else detached.clone()


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """The values of 0-d tensors. Waits once for a device, however many there are.

    >>> read_scalars([torch.tensor(1.0), torch.tensor(2.0)])
    [1.0, 2.0]
    """
    there = [each for each in scalars if each.device.type != "cpu"]
    if len(there) < 2:
        return [each.item() for each in scalars]
    read = iter(stack_scalars(there).tolist())
    return [each.item() if each.device.type == "cpu" else next(read) for each in scalars]


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def as_text(value: Any) -> str:
    """A value as text without what is another in each process, such as an address.

    >>> as_text({"lr": [0.1, None]}), as_text(nn.MSELoss()), as_text(nn.functional.mse_loss)
    ("{'lr': [0.1, None]}", 'MSELoss', 'mse_loss')
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, Duration | Path):
        return repr(str(value))
    if isinstance(value, Mapping) and not isinstance(value, nn.Module):
        return "{" + ", ".join(f"{as_text(k)}: {as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if isinstance(value, functools.partial):
        options = as_text(value.keywords) if value.keywords else ""
        return f"partial({', '.join([as_text(value.func), *map(as_text, value.args), options])})"
    if type(value).__module__.startswith("automicro."):
        return _ADDRESS.sub("", repr(value))
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return name
