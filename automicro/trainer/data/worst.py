"""The costliest batches of a loader, found without taking anything from it."""

import contextlib
import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from automicro.batch.device import on_host
from automicro.batch.tensors import Contents
from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.errors import BatchError
from automicro.torch_private import forget_workers
from automicro.trainer.data.loading import (
    announce_epoch,
    begin,
    generator_states,
    num_batches,
    rest,
    restore_generators,
)
from automicro.trainer.data.sharing import SharedSampler

COSTLIEST = 3
"""Batches that are taken for the costliest; the one of the longest rows comes beside them."""
CLASSES = 4
"""Of so many doublings of the longest rows the costliest batch comes beside these."""
SCANNED_BATCHES = 512
SCANNED_SECONDS = 30.0


@runtime_checkable
class KnowsCosts(Protocol):
    """A batch sampler that knows what its batches cost without anybody loading a row.

    ``DataLoader(batch_sampler=…)`` takes such a sampler, and a rehearsal then looks at all batches.
    """

    def batch_costs(self) -> Sequence[float] | None:
        """Of each batch of the pass that begins next, in its order, what it costs.

        Costs compare batches only: rows × the longest row, say, in elements, tokens or seconds. Of
        several ranks, those of this one's batches. None where it does not know after all.
        """


@dataclass(frozen=True, kw_only=True)
class CostlyBatch:
    """One of the costliest batches of a pass.

    Attributes:
        index: among the batches of the pass, from 0.
        cost: of all of it, padding included: elements, or what the sampler counts.
        rows: of the data set, by their indices; None where nobody knows.
        make: gives the batch once more.
    """

    index: int
    cost: float
    rows: tuple[Any, ...] | None
    make: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What was looked at, and what was found.

    Attributes:
        batches: the costliest first.
        seen: how many batches were looked at.
        total: how many the pass has; None where nobody knows.
    """

    batches: Sequence[CostlyBatch]
    seen: int
    total: int | None

    @property
    def is_complete(self) -> bool:
        """Whether no batch of the pass can be costlier."""
        return self.total is not None and self.seen >= self.total

    def __str__(self) -> str:
        of = "an unknown number of" if self.total is None else f"{self.total:,}"
        if self.is_complete:
            return f"all {of} batches"
        return f"the first {self.seen:,} of {of} batches"


def find_costliest(
    loader: Any,
    name: str,
    *,
    epoch: int = 0,
    rows_of: Callable[[Any], int] | None = None,
    most_batches: int | None = None,
    most_seconds: float = SCANNED_SECONDS,
) -> Scan:
    """The costliest batches of the next pass over a loader. Call it inside `undisturbed`.

    A sampler with ``batch_costs`` is asked. Of a data set with indices the batches are made in
    this process from what the sampler gives; anything else is passed over. Both are bounded.

    Args:
        loader: gives batches.
        name: of its argument, for errors.
        epoch: that the pass is of.
        rows_of: counts the rows of a batch; None where only whole batches count.
        most_batches: of the pass; None for all.
        most_seconds: after which no further batch is made to look at it.

    Raises:
        ValueError: it can be passed over only once.

    >>> batches = [torch.zeros(2, 3), torch.zeros(2, 9), torch.zeros(2, 5)]
    >>> scan = find_costliest(batches, "train_dataloader")
    >>> [(each.index, each.cost) for each in scan.batches][0], str(scan)
    ((1, 18.0), 'all 3 batches')
    """
    total = num_batches(loader)
    if most_batches is not None:
        total = most_batches if total is None else min(total, most_batches)
    announce_epoch(loader, epoch)
    order = _order_of(loader)
    if order is None:
        return _scan(_passed_over(loader, name), total, rows_of, most_seconds)
    if isinstance(loader, DataLoader):
        # As a pass begins: workers are seeded before the sampler draws.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    costs = _known_costs(order)
    make = partial(_make, loader)
    if costs is None:
        indices = enumerate(order)
        made = ((index, rows, partial(make, rows)) for index, rows in indices)
        return _scan(made, total, rows_of, most_seconds)
    best = _Best()
    for index, (cost, rows) in enumerate(zip(list(costs)[:total], order, strict=False)):
        listed = _as_tuple(rows) or ()
        this = CostlyBatch(index=index, cost=float(cost), rows=listed, make=partial(make, rows))
        best.add(this, row_cost=float(cost) / max(1, len(listed)))
    return Scan(batches=best.batches, seen=best.seen, total=best.seen)


def _order_of(loader: Any) -> Iterable[Any] | None:
    """What gives the indices of each batch; None where batches come from elsewhere."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _known_costs(order: Any) -> Sequence[float] | None:
    if isinstance(order, SharedSampler):
        costs = _known_costs(order.sampler)
        return None if costs is None else list(costs)[order.rank :: order.world_size]
    return order.batch_costs() if isinstance(order, KnowsCosts) else None


def _make(loader: DataLoader[Any], rows: Any) -> Any:
    """A batch from the indices of its rows, as torch's loader makes it."""
    with on_host():
        dataset: Any = loader.dataset
        if loader.batch_sampler is None:
            return loader.collate_fn(dataset[rows])
        if callable(getattr(dataset, "__getitems__", None)):
            return loader.collate_fn(dataset.__getitems__(rows))
        return loader.collate_fn([dataset[row] for row in rows])


def _passed_over(loader: Any, name: str) -> Iterator[tuple[int, Any, Callable[[], Any]]]:
    """The batches of a pass in this process; each is held until the next is made."""
    if not begins_again(loader):
        raise ValueError(
            f"rehearse='worst' looks for the costliest batches before the first step, and {name} "
            f"({_kind_of(loader)}) can be passed over only once, so they would be missing in "
            "the run; pass what begins again with each pass, such as a DataLoader over a data set "
            "with a length, or leave rehearse out"
        )
    for index, batch in enumerate(rest(begin(_in_this_process(loader)))):
        yield index, None, partial(_given, [batch])
        del batch


def begins_again(loader: Any) -> bool:
    """Whether each pass over a loader begins anew, and not where the last one was left.

    Args:
        loader: gives batches.

    >>> begins_again([1, 2]), begins_again(iter([1, 2]))
    (True, False)
    """
    if isinstance(loader, Iterator):
        return False
    if _order_of(loader) is not None:
        return True
    source = loader.dataset if isinstance(loader, DataLoader) else loader
    before = _Attributes(source)
    is_new = iter(source) is not iter(source)
    before.put_back()
    return is_new


def _kind_of(loader: Any) -> str:
    return type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__


def _given(held: list[Any]) -> Any:
    return held[0]


def _in_this_process(loader: Any) -> Any:
    """A loader of torch's without its workers, which would be started for this alone."""
    if not isinstance(loader, DataLoader):
        return loader
    alone = copy.copy(loader)
    forget_workers(alone)
    vars(alone).update(num_workers=0, timeout=0, persistent_workers=False, prefetch_factor=None)
    return alone


def _scan(
    batches: Iterator[tuple[int, Any, Callable[[], Any]]],
    total: int | None,
    rows_of: Callable[[Any], int] | None,
    most_seconds: float,
) -> Scan:
    """Look at batches until a bound is reached."""
    start = time.monotonic()
    best = _Best()
    bound = SCANNED_BATCHES if total is None else min(SCANNED_BATCHES, total)
    is_over = False
    for index, rows, make in batches:
        batch = make()
        num_rows = 1
        with contextlib.suppress(BatchError):  # a callback may make it one that has rows
            num_rows = 1 if rows_of is None else rows_of(batch)
        cost = float(Contents(batch).num_elements)
        del batch
        this = CostlyBatch(index=index, cost=cost, rows=_as_tuple(rows), make=make)
        best.add(this, row_cost=cost / num_rows)
        if best.seen >= bound or time.monotonic() - start >= most_seconds:
            break
    else:
        is_over = True
    return Scan(batches=best.batches, seen=best.seen, total=best.seen if is_over else total)


class _Best:
    """The costliest of the batches that were seen: of all, and of those with shorter rows.

    What a batch of long rows needs says little of one with many short ones, so of each doubling of
    the cost of a row the costliest batch is kept.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._costliest: list[CostlyBatch] = []
        self._of_class: dict[int, tuple[float, CostlyBatch]] = {}  # with the cost of a row
        self._longest: tuple[float, CostlyBatch] | None = None

    @property
    def batches(self) -> list[CostlyBatch]:
        """The costliest first, then that of the longest rows, then those of shorter ones."""
        highest = sorted(self._of_class, reverse=True)[:CLASSES]
        beside = [self._longest, *(self._of_class[each] for each in highest)]
        found = {each.index: each for each in self._costliest}
        for each in beside:
            if each is not None:
                found.setdefault(each[1].index, each[1])
        return list(found.values())

    def add(self, batch: CostlyBatch, *, row_cost: float) -> None:
        """Take note of the next one."""
        self.seen += 1
        if len(self._costliest) < COSTLIEST or batch.cost > self._costliest[-1].cost:
            ranked = sorted([*self._costliest, batch], key=lambda each: (-each.cost, each.index))
            self._costliest = ranked[:COSTLIEST]
        if self._longest is None or row_cost > self._longest[0]:
            self._longest = row_cost, batch
        doubling = math.floor(math.log2(row_cost)) if row_cost > 0 else 0
        known = self._of_class.get(doubling)
        if known is None or (batch.cost, row_cost) > (known[1].cost, known[0]):
            self._of_class[doubling] = row_cost, batch


def _as_tuple(rows: Any) -> tuple[Any, ...] | None:
    if rows is None:
        return None
    return tuple(rows) if isinstance(rows, list | tuple) else (rows,)


@contextlib.contextmanager
def undisturbed(loader: Any, *others: object) -> Iterator[None]:
    """Put back where random numbers stand, and what a loader's parts hold.

    That are generators of the process and of the loader, its data set and samplers, and the
    attributes of these; of samplers also what lists, arrays and tables there hold.

    Args:
        loader: that is looked at meanwhile.
        others: further objects whose attributes are put back, with their generators and what their
            lists hold.

    >>> import random
    >>> order = torch.utils.data.SequentialSampler(range(3))
    >>> order.mood = ["calm"]
    >>> with undisturbed(torch.utils.data.DataLoader(range(3), sampler=order)):
    ...     _ = order.mood.append("excited"), random.random(), setattr(order, "epoch", 1)
    >>> order.mood, hasattr(order, "epoch")
    (['calm'], False)
    """
    state = rng_state()
    generators = [(each, generator_states(each)) for each in (loader, *others)]
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler)
    inner = [getattr(each, "sampler", None) for each in samplers]
    kept = [_Attributes(each, inside=True) for each in (*samplers, *inner, *others)]
    kept += [_Attributes(each) for each in (getattr(loader, "dataset", None), loader)]
    try:
        yield
    finally:
        for each in kept:
            each.put_back()
        for owner, states in generators:
            restore_generators(owner, states)
        restore_rng_state(state)


class _Attributes:
    """The attributes of an object, as they are now.

    Args:
        owner: the object; None for none.
        inside: whether to remember what lists, arrays and tables hold, too.
    """

    def __init__(self, owner: object, *, inside: bool = False) -> None:
        self._table: dict[str, Any] | None = getattr(owner, "__dict__", None)
        self._before = dict(self._table or {})
        self._held: list[tuple[Any, Any]] = []
        if inside:
            for value in self._before.values():
                if type(value) in (list, dict, set, deque) or isinstance(value, np.ndarray):
                    self._held.append((value, copy.copy(value)))
                elif isinstance(value, Tensor) and value.device.type == "cpu":
                    self._held.append((value, value.detach().clone()))

    def put_back(self) -> None:
        if self._table is None:
            return
        for name in [name for name in self._table if name not in self._before]:
            del self._table[name]
        for name, value in self._before.items():
            if name not in self._table or self._table[name] is not value:
                self._table[name] = value
        for value, then in self._held:
            if isinstance(value, np.ndarray):
                value[...] = then
            elif isinstance(value, Tensor):
                if not torch.equal(value, then):
                    value.detach().copy_(then)
            elif isinstance(value, list):
                value[:] = then
            else:
                value.clear()
                (value.extend if isinstance(value, deque) else value.update)(then)
