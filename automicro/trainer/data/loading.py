"""Fetching batches from a data loader on the host, and the state that decides them."""

import copy
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from automicro.batch.device import on_host
from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.data import LengthBatchSampler
from automicro.data.sampler import AverageBatch
from automicro.durations import Duration, Unit, read_duration
from automicro.errors import DataLoaderError
from automicro.options import read_count
from automicro.reach import generators_in, kinds_of_loading
from automicro.values import comes_from, is_generator, same_values, set_state, state_of

Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

_PARTS = {"dataset", "sampler", "batch_sampler"}


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


def attached_generators(loader: object) -> dict[str, Generator]:
    """Find the generators that are attributes of a loader, its dataset and its samplers."""
    found: dict[str, Generator] = {}
    seen: set[int] = set()
    for place, owner in _owners(loader).items():
        for name, value in sorted(vars(owner).items()):
            if is_generator(value) and id(value) not in seen:
                found[place + name] = value
                seen.add(id(value))
    return found


def _owners(loader: object) -> dict[str, object]:
    """Collect a loader, its dataset and its samplers by the prefix of their attributes."""
    found: dict[str, object] = {}
    waiting = [("", loader)]
    while waiting:
        place, owner = waiting.pop(0)
        if not hasattr(owner, "__dict__") or any(owner is each for each in found.values()):
            continue
        found[place] = owner
        parts = sorted(_PARTS & vars(owner).keys())
        waiting += [(f"{place}{name}.", vars(owner)[name]) for name in parts]
    return found


def read_attributes(loader: object) -> dict[str, Any]:
    """Read the attributes that can decide the rows of a pass: plain values and samplers' orders.

    >>> import types
    >>> sampler = types.SimpleNamespace(epoch=0, order=[1, 0])
    >>> read_attributes(types.SimpleNamespace(sampler=sampler))
    {'sampler.epoch': 0, 'sampler.order': [1, 0]}
    """
    found = {}
    # Classes of torch and automicro need no restoring, because `set_epoch` sets their state.
    for place, owner in _owners(loader).items():
        if type(owner).__module__.partition(".")[0] in ("torch", "automicro"):
            continue
        is_dataset = place.endswith("dataset.")
        for name, value in vars(owner).items():
            if type(value) in _PLAIN or (not is_dataset and _is_order(value)):
                found[place + name] = _copied(value)
    return found


def write_attributes(loader: object, values: Mapping[str, Any]) -> None:
    """Restore the attributes that have changed since `read_attributes`, lists in place."""
    owners = _owners(loader)
    for place, value in values.items():
        owner, dot, name = place.rpartition(".")
        if owner + dot not in owners:
            continue
        own = vars(owners[owner + dot])
        here = own.get(name)
        if name in own and same_values(_copied(here), value):
            continue
        if isinstance(here, list) and isinstance(value, list):
            here[:] = value
        else:
            own[name] = _copied(value)


_PLAIN = {type(None), bool, int, float, str}


def _is_order(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if isinstance(value, Tensor):
        return value.layout is torch.strided and not (value.is_meta or value.requires_grad)
    if type(value) not in (list, tuple):
        return False
    return all(type(each) in _PLAIN or _is_order(each) for each in value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def read_generators(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Read the states of generators as tensors and plain values.

    >>> generators = {"order": random.Random(3)}
    >>> states = read_generators(generators)
    >>> drawn = generators["order"].random()
    >>> write_generators(generators, states)
    >>> generators["order"].random() == drawn
    True
    """
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
