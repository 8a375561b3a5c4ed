"""Fetching batches from a data loader on the host, and the state that decides them."""

import enum
import functools
import math
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from automicro.batch.device import on_host
from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.data import LengthBatchSampler
from automicro.data.sampler import AverageBatch
from automicro.durations import Duration, Unit, read_duration
from automicro.errors import CheckpointWarning, DataLoaderError, warn
from automicro.options import read_count
from automicro.reach import CONTAINERS, generators_in
from automicro.values import (
    OBJECT,
    Kind,
    comes_from,
    kinds_of,
    same_values,
    set_state,
    state_of,
    table_of,
    walk,
)

Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def find_generators(loader: object) -> dict[str, Generator]:
    """Find all generators that a loader can draw from in a pass, by their place.

    >>> rows = torch.utils.data.TensorDataset(torch.zeros(4))
    >>> mine, noise = torch.Generator(), random.Random(0)
    >>> def adding(noise):
    ...     return lambda rows: [(row, noise.random()) for row in rows]
    >>> list(find_generators(DataLoader(rows, generator=mine, collate_fn=adding(noise))))
    ['generator', 'noise']
    """
    # Includes those that its dataset, samplers, transforms and `collate_fn` can reach.
    return generators_in({"": loader}, kinds_of_loading)


class Standing:
    """All state that decides the batches of the next pass, but the process's random numbers.

    It has generators, and the attributes of data sets and of all that decides the order of rows.

    >>> loader = DataLoader(range(9), shuffle=True, generator=torch.Generator())
    >>> standing = Standing(loader, "train_dataloader")
    >>> here = standing.read()
    >>> rows = [int(row) for row in loader]
    >>> standing.write(here)
    >>> rows == [int(row) for row in loader]
    True
    """

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name
        owners, self._first = self._owners(), dict[str, dict[Any, Any]]()
        self._first, self._iterators = self._changed(owners), _unsaved_iterators(owners)

    def begin(self) -> dict[str, Any]:
        """Return the state at the start of a pass."""
        owners = self._owners()
        here, self._iterators = self._read(owners), _unsaved_iterators(owners)
        return here

    def read(self) -> dict[str, Any]:
        """Return the state; of attributes, only those that have changed."""
        return self._read(self._owners())

    def _read(self, owners: Mapping[str, Any]) -> dict[str, Any]:
        # An iterator that outlives a pass has a position, which only its owner may know.
        now, before = _unsaved_iterators(owners), self._iterators
        return {
            "generators": read_generators(find_generators(self._loader)),
            "attributes": self._changed(owners),
            "own": {place: each.state_dict() for place, each in _keepers(owners).items()},
            "iterators": [place for place in now if now[place] is before.get(place)],
        }

    def write(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `read`."""
        self.write_generators(state)
        owners = self._owners()
        for place in owners.keys() & state["attributes"].keys():
            _write(owners[place], state["attributes"][place])
        keepers = _keepers(owners)
        for place in keepers.keys() & state["own"].keys():
            keepers[place].load_state_dict(state["own"][place])

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `begin`, including attributes that have changed since here."""
        changed, first = state["attributes"], self._first
        places = dict.fromkeys([*first, *changed])
        attributes = {place: first.get(place, {}) | changed.get(place, {}) for place in places}
        self.write({**state, "attributes": attributes})

    def write_generators(self, state: Mapping[str, Any]) -> None:
        """Restore the generators alone."""
        write_generators(find_generators(self._loader), state["generators"])

    def warn_of_lost(self, state: Mapping[str, Any]) -> None:
        """Warn of state that cannot be restored here."""
        lost = [*state["iterators"], *(state["attributes"].keys() - self._owners().keys())]
        if lost:
            warn(
                f"the state of {self._name} cannot be restored at {', '.join(sorted(lost))}, so "
                "its batches can differ from those of an undisturbed run. Keep positions and "
                "counts in attributes of the sampler, as numbers and lists, from its start on",
                CheckpointWarning,
            )

    def _changed(self, owners: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
        """Copy the attributes that are not as they were first."""
        found = {
            place: {
                name: _copied(value)
                for name, value in held.items()
                if not _is_same(value, self._first.get(place, {}).get(name, _NOTHING))
            }
            for place, held in _attributes(owners).items()
        }
        return {place: held for place, held in found.items() if held}

    def _owners(self) -> dict[str, Any]:
        """Collect all objects and dicts with attributes of their own, by place."""
        everything = dict(walk({"": self._loader}, kinds_of_loading))
        samplers = {place: each for place, each in everything.items() if isinstance(each, Sampler)}
        found = {place: each for place, each in everything.items() if _is_dataset(place, each)}
        found |= dict(walk({"": self._loader, **samplers}, kinds_of_orders))
        # Classes of torch and automicro need no restoring, because `set_epoch` sets their state. A
        # loader with its own state restores that itself.
        owners = {
            place: each
            for place, each in found.items()
            # By type, because proxies and slots have no dictionary of their own.
            if (type(each).__dictoffset__ or isinstance(each, dict))
            and not (is_library(type(each)) or (each is self._loader and has_own_state(each)))
        }
        # A class may count the passes of all its instances.
        kinds = dict.fromkeys(kind for each in owners.values() for kind in type(each).__mro__)
        return owners | {f"{k.__module__}.{k.__qualname__}": k for k in kinds if not is_library(k)}


def _attributes(owners: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """Read the values that can decide the rows of a pass; of data sets, only plain ones."""
    return {
        place: {
            name: value
            for name, value in _table(owner).items()
            if _is_plain(value) or (not _is_dataset(place, owner) and _is_data(value, owner))
        }
        for place, owner in owners.items()
    }


def _keepers(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Select the owners of iterators that save and restore their state themselves."""
    return {place: e for place, e in owners.items() if _iterators(e) and has_own_state(e)}


def _unsaved_iterators(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Read the iterators whose position no owner saves."""
    return {
        f"{place}.{name}".lstrip("."): value
        for place, owner in owners.items()
        if (found := _iterators(owner)) and not has_own_state(owner)
        for name, value in found.items()
    }


def has_own_state(loader: object) -> bool:
    """Whether a loader saves and restores its own position."""
    methods = (getattr(loader, each, None) for each in ("state_dict", "load_state_dict"))
    return not isinstance(loader, type) and all(map(callable, methods))


def _is_dataset(place: str, value: object) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, Dataset) or place.rpartition(".")[2] == "dataset"


def _iterators(owner: Any) -> dict[Any, Any]:
    values = _table(owner).items()
    # Iterators with attributes are restored by these.
    return {k: v for k, v in values if isinstance(v, Iterator) and not hasattr(v, "__dict__")}


def _table(owner: Any) -> dict[Any, Any]:
    table = owner if isinstance(owner, dict) else table_of(owner)
    is_class = isinstance(owner, type)  # Python keeps its own values there
    return {k: v for k, v in table.items() if not k.startswith("__")} if is_class else table


_NOTHING = object()
_MOST_BYTES = 2**20  # of an array of several dimensions in a loader
_PLAIN = {type(None), bool, int, float, complex, str, bytes}


def _is_plain(value: Any) -> bool:
    return type(_plain(value)) in _PLAIN


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):  # many are ints or text, too
        return value.value
    return value.item() if isinstance(value, np.number | np.bool_) else value


def _is_data(value: Any, owner: Any = None) -> bool:
    """Whether a checkpoint can hold a value of an owner, which is not the rows themselves.

    >>> _is_data({"order": [1, (2, 3)]}), _is_data([object()])
    (True, False)
    """
    if isinstance(value, np.ndarray | Tensor):
        if isinstance(value, Tensor):
            is_held = value.layout is torch.strided and not (value.is_meta or value.requires_grad)
        else:
            is_held = not (value.dtype.hasobject or isinstance(value, np.memmap))
        # Loaders may hold all rows, which are not copied. A sampler has a table of scores at most.
        are_rows = value.ndim > 1 and value.nbytes > _MOST_BYTES and not isinstance(owner, Sampler)
        return is_held and not are_rows
    if isinstance(value, dict):
        return all(_is_part(part, owner) for item in value.items() for part in item)
    if isinstance(value, list | set | deque) or type(value) is tuple:
        return _is_flat(value) or all(_is_part(part, owner) for part in value)
    return _is_plain(value)


def _is_part(value: Any, owner: Any) -> bool:
    # Other classes are kept by attributes alone, where `_write` finds them.
    is_other = isinstance(value, dict | list | set | deque | enum.Enum)
    return _is_data(value, owner) and not (is_other and type(value) not in (dict, list, set))


def _is_flat(values: Iterable[Any]) -> bool:
    # Orders of rows can be long.
    return set(map(type, values)) <= {int, float, str}


def _is_same(value: Any, copied: Any) -> bool:
    """Whether a value is the one that `_copied` returned a copy of."""
    if isinstance(value, np.ndarray | Tensor):
        return same_values(value, copied)
    if isinstance(value, list) and type(copied) is list and _is_flat(value) and _is_flat(copied):
        return bool(value == copied)
    return same_values(_copied(value), copied)


def _copied(value: Any) -> Any:
    """Copy data, as types that checkpoints can hold."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {_copied(key): _copied(each) for key, each in value.items()}
    if isinstance(value, list | deque):
        return list(value) if _is_flat(value) else [_copied(each) for each in value]
    if isinstance(value, set):
        return set(map(_copied, value))
    return tuple(map(_copied, value)) if type(value) is tuple else _plain(value)


def _write(owner: Any, values: Mapping[Any, Any]) -> None:
    """Write the values that differ, into containers in place."""
    table = _table(owner)
    put: Callable[[Any, Any], None] = table.__setitem__
    if isinstance(owner, type):
        put = functools.partial(setattr, owner)
    for name, value in values.items():
        here = table.get(name, _NOTHING)
        if _is_same(here, value):
            continue
        if isinstance(here, list | deque) and isinstance(value, list):
            here.clear()
            here.extend(_copied(value))
        elif isinstance(here, dict | set) and isinstance(value, dict | set):
            here.clear()
            here.update(_copied(value))
        elif type(here) is not type(value) and type(_plain(here)) is type(value):
            put(name, type(here)(value))
        else:
            put(name, _copied(value))


def read_generators(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Read the states of generators as tensors and plain values.

    >>> generators = {"order": random.Random(3)}
    >>> states = read_generators(generators)
    >>> drawn = generators["order"].random()
    >>> write_generators(generators, states)
    >>> generators["order"].random() == drawn
    True
    """
    with on_host():
        return {place: state_of(each) for place, each in generators.items()}


def write_generators(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Restore the states from `read_generators`."""
    for place, each in generators.items():
        # Generators that a loader creates when a pass begins have no saved state.
        if place in states:
            state = states[place]
            set_state(each, state.cpu() if isinstance(state, Tensor) else state)


def check_loader(name: str, loader: Any) -> None:
    """Raise an error for an object that cannot yield batches."""
    if isinstance(loader, Mapping):
        raise TypeError(
            f"{name} is a {type(loader).__name__} with the keys {list(loader)}, not a loader; "
            "pass the loader itself"
        )
    if type(loader) in (list, tuple) and any(
        isinstance(e, DataLoader | Iterator) or comes_from(e, "automicro.Evaluator") for e in loader
    ):
        raise TypeError(
            f"{name} is a {type(loader).__name__} of loaders, not of batches. Name evaluations in "
            "a mapping, or join data sets with torch.utils.data.ConcatDataset"
        )
    # Objects with `__getitem__` can be iterated over, but a class is not such an object.
    is_indexable = hasattr(type(loader), "__getitem__") and not isinstance(loader, type)
    if not (loader is None or isinstance(loader, Iterable) or is_indexable):
        raise TypeError(
            f"{name} is a {type(loader).__name__} and cannot be iterated over. Pass a "
            "torch.utils.data.DataLoader, or any iterable of whole batches"
        )


def check_passes(
    name: str, loader: object, max_duration: Duration, every: Duration | None = None
) -> None:
    """Raise an error for an iterator if training, or an evaluation, needs several passes."""
    if every is None:  # of training, in which a duration in batches can end within the first pass
        is_once = max_duration.unit is not Unit.EPOCHS or max_duration.value == 1
    else:
        is_once = every.unit is max_duration.unit and every.value >= max_duration.value
    if isinstance(loader, Iterator) and not is_once:
        raise ValueError(
            f"{name} is an iterator ({type(loader).__name__}), which can be iterated only once, "
            f"but max_duration='{max_duration}' needs more than one epoch. Pass a DataLoader or a "
            "list, or give the duration in batches"
        )


def fetch(loader: Any) -> Iterator[Any]:
    """Yield the batches of one pass, allocated on the host."""
    # Persistent workers draw a seed only when they start, so a resumed run would draw one more
    # than an uninterrupted run. The random numbers are restored after the draw.
    here = rng_state() if has_persistent_workers(loader) else None
    iterator = begin(loader)
    if here is not None:
        restore_rng_state(here)
    yield from rest(iterator)


def begin(loader: Any) -> Iterator[Any]:
    """Begin a pass, with its allocations on the host."""
    with on_host():
        return iter(loader)


def rest(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the remaining batches of a pass, each made on the host."""
    while True:
        with on_host():
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
        del batch


def empty(loader: object, name: str) -> DataLoaderError:
    """Create the error for a pass without a batch."""
    dataset = getattr(loader, "dataset", None)
    rows = None if dataset is None else num_batches(dataset)
    had = "" if rows is None else f" from {rows} rows"
    return DataLoaderError(
        f"{name} ({type(loader).__name__}) gave no batch{had}. Check its data set and sampler: "
        "drop_last=True drops an incomplete batch, and an iterator can be iterated only once"
    )


def grouped(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield batches in groups of a size; the last group of a pass can be smaller.

    >>> [list(group) for group in grouped([1, 2, 3], 2)]
    [[1, 2], [3]]
    """
    # The list is emptied before the next batch is fetched, so that the host never holds more than
    # one group, even if a caller keeps the list.
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        del batch
        if len(group) == size:
            yield group
            group.clear()
    if group:
        yield group


def num_batches(loader: object) -> int | None:
    """Number of batches in a pass; None if the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a loader over an endless dataset raises these
        return None


def average_batch(loader: object) -> AverageBatch | None:
    """Average batch of a loader on one device; None if unknown.

    >>> rows = torch.utils.data.TensorDataset(torch.zeros(8))
    >>> average_batch(DataLoader(rows, batch_size=4)).rows
    4.0
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, LengthBatchSampler):
        return sampler.average_batch()
    batch_size = getattr(loader, "batch_size", None)
    return AverageBatch(rows=float(batch_size)) if isinstance(batch_size, int) else None


def read_accumulation(value: object) -> int | Duration:
    """Read the number of batches in an optimization batch, or the size that they must reach.

    >>> read_accumulation(4), read_accumulation("1024sp")
    (4, Duration.parse('1024sp'))
    """
    if not isinstance(value, str | Duration):
        return read_count("accumulate_batches", value)
    size = read_duration("accumulate_batches", value)
    if size.unit is Unit.EPOCHS:
        raise ValueError(
            f"accumulate_batches={str(value)!r} is not the size of a batch; give a number of "
            "batches, or a size as in '1024sp' (samples), '1e6tok' (tokens), '5h' (hours of data)"
        )
    return size.value if size.unit is Unit.BATCHES else size


def choose_accumulation(size: Duration, loader: object, num_devices: int) -> int:
    """Choose the number of batches per device that make an optimization batch reach a size.

    >>> rows = torch.utils.data.TensorDataset(torch.zeros(64))
    >>> choose_accumulation(Duration.parse("100sp"), DataLoader(rows, batch_size=8), 4)
    4
    """
    said = f"accumulate_batches='{size}'"
    average = average_batch(loader)
    held = {
        Unit.SAMPLES: average and average.rows,
        Unit.TOKENS: average and average.tokens,
        Unit.SECONDS: average and average.seconds,
    }[size.unit]
    if not held:
        what = size.unit.name.lower()
        raise ValueError(
            f"{said}: the number of {what} in a batch of train_dataloader is unknown. Pass a "
            f"DataLoader with a batch_size, one whose LengthBatchSampler has unit='{what}' "
            "(sampling_mode and its unit in a config), or a number of batches"
        )
    return max(1, math.ceil(size.value / (held * num_devices) - 1e-9))


def has_persistent_workers(loader: object) -> bool:
    """Whether the workers of a loader persist from pass to pass."""
    return bool(getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0))


def samplers_of(loader: object) -> tuple[Any, Any, Any]:
    """Return a loader's sampler, its batch sampler, and the latter's sampler; None if missing."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)


def batch_order(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return the sampler that yields the indices of each batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def announce_epoch(loader: object, epoch: int) -> None:
    """Call `set_epoch` of a loader, its dataset and its samplers, with epochs counted from 0."""
    told: list[object] = []
    for each in (loader, getattr(loader, "dataset", None), *samplers_of(loader)):
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch) and not any(each is one for one in told):
            set_epoch(epoch)
            told.append(each)


_MOST_ELEMENTS = 100  # of a container; longer ones in a loader hold data
# Attributes of loaders and samplers: the current pass, and an alias of the dataset.
_NOTHING_OF_ITS_OWN = frozenset(("_iterator", "data_source"))
_NO_ORDER = _NOTHING_OF_ITS_OWN | {"dataset", "collate_fn"}


@functools.lru_cache(5_000)
def kinds_of_loading(kind: type) -> tuple[Kind, ...]:
    """Return kinds for a walk through a loader, which enters samplers and datasets, but no data."""
    found = kinds_of(kind)
    if issubclass(kind, CONTAINERS):
        return tuple(each._replace(read=functools.partial(_read_short, each)) for each in found)
    # Reading an iterator would consume elements of the current pass.
    is_a_pass = issubclass(kind, Iterator | type | types.ModuleType)
    is_of_python = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    if found or is_a_pass or is_of_python or not kind.__dictoffset__:
        return found
    return (_LOADING,)


@functools.lru_cache(5_000)
def kinds_of_orders(kind: type) -> tuple[Kind, ...]:
    """Return kinds for a walk through a loader, which enters all that decides the order of rows."""
    # A member of an enumeration is the same object everywhere.
    is_of_data = issubclass(kind, nn.Module | Dataset | type | types.FunctionType | enum.Enum)
    is_order = issubclass(kind, DataLoader | Sampler | torch.Generator)
    if is_of_data or (is_library(kind) and not is_order):
        return ()
    found = kinds_of_loading(kind)
    return tuple(_ORDER if each in (OBJECT, _LOADING) else each for each in found)


def is_library(kind: type) -> bool:
    """Whether a class belongs to torch or to this package, so that its state is known."""
    return kind.__module__.partition(".")[0] in ("torch", "automicro")


def _read_short(kind: Kind, value: Any) -> Any:
    return kind.read(value) if len(value) <= _MOST_ELEMENTS else ()


def _read_except(names: frozenset[str], value: Any) -> dict[str, Any]:
    table = table_of(value)
    # Sorted, because the order of a set varies between runs.
    return {name: table[name] for name in sorted(table.keys() - names)}


_LOADING = OBJECT._replace(read=functools.partial(_read_except, _NOTHING_OF_ITS_OWN))
_ORDER = OBJECT._replace(read=functools.partial(_read_except, _NO_ORDER))
