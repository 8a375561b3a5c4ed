"""Data loaders shared among ranks, and the properties that decide the rows of their batches."""

import contextlib
import copy
import itertools
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.data import LengthBatchSampler, with_batch_sampler
from automicro.errors import warn
from automicro.reach import generators_in
from automicro.showing import as_text
from automicro.torch_private_execution import forget_workers
from automicro.trainer.data import loading
from automicro.trainer.data.loading import kinds_of_orders
from automicro.trainer.processes import Process

Indices = Iterable[Any]


class _OneOrder(Sampler[Any]):
    """An order that is equal on all ranks, whatever they have drawn; each rank has a part."""

    def __init__(self, sampler: Indices, *, rank: int, world_size: int, seed: int) -> None:
        self.sampler = sampler  # public: other code finds its generators and calls `set_epoch`
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.checksum: int | None = None  # of the order drawn last
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is drawn next."""
        self._epoch = epoch

    def order(self) -> list[Any]:
        """Draw all entries of the pass, with the same random numbers on all ranks."""
        here = rng_state()
        seed = self.seed + self._epoch
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            order = list(self.sampler)
        finally:
            restore_rng_state(here)
        self.checksum = _checksum(order)
        return order


class SharedBatchSampler(_OneOrder):
    """Cuts the order of a sampler into batches over all ranks and yields the rank's even part.

    >>> parts = [
    ...     SharedBatchSampler(range(9), 2, drop_last=False, rank=rank, world_size=2, seed=0)
    ...     for rank in range(2)
    ... ]
    >>> [list(part) for part in parts]
    [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    """

    # A batch over all ranks has exactly the rows that a single process would train on with the
    # same order and the batch size times the world size. Only the last batch of a pass is smaller.
    # If it has fewer than two rows per rank, some ranks get one batch less.

    def __init__(self, sampler: Indices, batch_size: int, *, drop_last: bool, **place: int) -> None:
        super().__init__(sampler, **place)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.per_batch = batch_size * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for start in range(0, len(order), self.per_batch):
            batch = order[start : start + self.per_batch]
            if self.drop_last and len(batch) < self.per_batch:
                return
            part = batch[self._share(len(batch))]
            if part:
                yield part

    def __len__(self) -> int:
        rows: int = len(self.sampler)  # type: ignore[arg-type]
        full, rest = divmod(rows, self.per_batch)
        last = self._share(rest)
        return full + (last.stop > last.start and not self.drop_last)

    def _share(self, rows: int) -> slice:
        """Part of the rows of a batch that this rank takes; the first ranks get the larger ones."""
        is_enough = self.batch_size == 1 or rows >= 2 * self.world_size
        places = self.world_size if is_enough else max(1, rows // 2)
        if self.rank >= places:
            return slice(0, 0)
        each, more = divmod(rows, places)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))


class SharedSampler(_OneOrder):
    """Yields every n-th entry of a sampler on each rank; entries of a batch sampler are batches.

    >>> list(SharedSampler([[0, 1], [2], [3, 4]], rank=0, world_size=2, seed=0))
    [[0, 1], [3, 4]]
    """

    @property
    def per_batch(self) -> int:
        """Number of entries per batch over all ranks: one for each rank."""
        return self.world_size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.order(), self.rank, None, self.world_size)

    def __len__(self) -> int:
        entries: int = len(self.sampler)  # type: ignore[arg-type]
        return len(range(self.rank, entries, self.world_size))


Shared: TypeAlias = SharedBatchSampler | SharedSampler | LengthBatchSampler


def shared_sampler(loader: object) -> Shared | None:
    """Find the automicro sampler that shares a loader's rows among ranks, if any."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name, None)
        if isinstance(sampler, Shared):
            return sampler
    return None


def _checksum(order: list[Any]) -> int:
    with contextlib.suppress(TypeError, OverflowError):
        return zlib.crc32(array("q", order))
    with contextlib.suppress(TypeError, OverflowError):  # lists of indices
        lengths = zlib.crc32(array("q", map(len, order)))
        return zlib.crc32(array("q", itertools.chain.from_iterable(order)), lengths)
    return zlib.crc32(as_text(order).encode())  # other entries, such as names of rows


ITSELF = "is_sharded"
"""The attribute of a loader or data set that declares that it gives each rank its own rows."""


@dataclass(frozen=True)
class LoaderSharing:
    """Shares loaders among ranks.

    >>> from torch.utils.data import TensorDataset
    >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
    >>> second = Process(rank=1, world_size=2)
    >>> sharing = LoaderSharing(second, seed=0)
    >>> [rows.tolist() for (rows,) in sharing.share(loader, "train_dataloader")]
    [[2, 3]]
    """

    place: Process
    _: KW_ONLY
    seed: int
    has_parted_layers: bool = False  # if so, some ranks need the same rows

    def share(self, loader: Any, name: str, *, is_evaluated: bool = False) -> Any:
        """Return this rank's part of a loader; all ranks must call this."""
        # A loader that is already shared stays as it is, a `LengthBatchSampler` shares its rows
        # itself, and any other `DataLoader` over a data set with a length gets another sampler.
        place = self.place
        dataset = getattr(loader, "dataset", None)
        if getattr(loader, ITSELF, False) or getattr(dataset, ITSELF, False):
            return loader
        if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
            if place.world_size > 1:
                raise ValueError(_not_shared(loader, name, place))
            return loader
        batch_sampler = loader.batch_sampler
        for sampler in loading.samplers_of(loader):
            if isinstance(sampler, DistributedSampler):
                _check_padding(sampler, name, is_evaluated=is_evaluated)
                return loader
        if self.has_parted_layers:
            raise ValueError(
                "ranks hold parts of layers (tensor parallelism), but it is unknown which ranks "
                f"need the same rows of {name}. Give it a DistributedSampler over the "
                f"data-parallel groups, or set {ITSELF} = True on it"
            )
        if isinstance(batch_sampler, LengthBatchSampler):
            if batch_sampler.has_place:
                return loader
            here = batch_sampler.at(rank=place.rank, world_size=place.world_size)
            return with_batch_sampler(loader, here)
        order = loading.batch_order(loader)
        if place.world_size > 1 and loading.num_batches(order) is None:
            raise ValueError(
                f"the sampler of {name} ({type(order).__name__}) has no length, so its rows cannot "
                f"be shared among {place.world_size} ranks. Give it __len__, or let the loader "
                f"give each rank its own rows and set {ITSELF} = True on it"
            )
        self._put_generators_together(loader)
        return self._with_own_sampler(loader)

    def _with_own_sampler(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        # A copy keeps the options and any attributes of a subclass, whose constructor might take
        # other arguments.
        shared = copy.copy(loader)
        forget_workers(shared)
        place = {"rank": self.place.rank, "world_size": self.place.world_size, "seed": self.seed}
        batch_sampler: Any = loader.batch_sampler
        if batch_sampler is None:
            vars(shared)["sampler"] = SharedSampler(loader.sampler, **place)
        elif type(batch_sampler) is not BatchSampler:
            vars(shared)["batch_sampler"] = SharedSampler(batch_sampler, **place)
        else:
            size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
            vars(shared)["batch_sampler"] = SharedBatchSampler(
                batch_sampler.sampler, size, drop_last=drop_last, **place
            )
        return shared

    def _put_generators_together(self, loader: DataLoader[Any]) -> None:
        """Set the generators of samplers to the state of rank 0, so all ranks draw one order."""
        if self.place.world_size == 1 or not dist.is_initialized():
            return
        own = generators_in({"": loader}, kinds_of_orders)
        mine = [loading.read_generators(own) if own else None]
        dist.broadcast_object_list(mine, 0)
        if mine[0] is not None:
            loading.write_generators(own, mine[0])


def _not_shared(loader: object, name: str, place: Process) -> str:
    dataset = getattr(loader, "dataset", None)
    what = "an iterable data set" if isinstance(dataset, IterableDataset) else "no DataLoader"
    owner = type(loader if dataset is None else dataset).__name__
    return (
        f"{name} is {what} ({owner}), so each of {place.world_size} ranks would get all of its "
        "rows. Pass a DataLoader over a data set with a length, or let it give each rank its own "
        f"rows and set {ITSELF} = True on the loader or the data set"
    )


def _check_padding(sampler: DistributedSampler[Any], name: str, *, is_evaluated: bool) -> None:
    rows: int = len(sampler.dataset)  # type: ignore[arg-type]
    more = sampler.total_size - rows
    if more == 0:
        return
    twice = f"{more} of its {rows} rows are repeated" if more > 0 else f"{-more} rows are left out"
    text = (
        f"{name} has a DistributedSampler for {sampler.num_replicas} ranks, but with it {twice} in "
        "every epoch. Leave it out: the Trainer shares the rows out, each exactly once"
    )
    if is_evaluated:  # losses and metrics would be wrong
        raise ValueError(text)
    warn(text, UserWarning)


# Descriptions of loaders by the plain values that decide the rows of their batches

IN_A_RUN = ("batches", "rows", "batch_size", "sampler", "has_generator", "num_workers")
"""Values that cannot change within an epoch without repeating or losing rows."""
OF_SHARED_ORDER = ("shared_by", "sampler", "entries", "entries_per_step")
"""Values that cannot change when another number of ranks resumes within an epoch."""
_ON_RANKS = (
    *("loader", "dataset", "rows", "sampler", "entries"),
    *("batch_sampler", "batches", "batch_size", "drop_last"),
)


def describe_loader(loader: object) -> dict[str, Any]:
    """Describe a loader by the values that classes of torch and automicro have.

    >>> told = describe_loader(DataLoader(range(8), batch_size=4, shuffle=True))
    >>> told["rows"], told["batch_size"], told["sampler"], told["shared_by"]
    (8, 4, 'RandomSampler', None)
    """
    of_loader, batch_sampler, of_batches = loading.samplers_of(loader)
    dataset, shared = getattr(loader, "dataset", None), shared_sampler(loader)
    sampler = of_loader if of_batches is None else of_batches
    is_plain = type(batch_sampler) is BatchSampler or isinstance(batch_sampler, SharedBatchSampler)
    is_of_torch = type(sampler).__module__ == BatchSampler.__module__
    is_stream = isinstance(dataset, IterableDataset)
    own = set(map(id, generators_in({"": shared}, kinds_of_orders).values()))
    return {
        "loader": type(loader).__name__,
        "dataset": None if dataset is None else type(dataset).__name__,
        "batches": loading.num_batches(loader),
        "rows": None if dataset is None else loading.num_batches(dataset),
        "sampler": None if sampler is None else _named(sampler),
        "entries": loading.num_batches(sampler),
        "batch_sampler": None if batch_sampler is None else type(batch_sampler).__name__,
        "batch_size": batch_sampler.batch_size if is_plain else None,
        "drop_last": batch_sampler.drop_last if is_plain else None,
        "has_generator": is_of_torch and getattr(sampler, "generator", None) is not None,
        "num_workers": getattr(loader, "num_workers", None) if is_stream else None,
        "shared_by": None if shared is None else type(shared).__name__,
        "entries_per_step": getattr(shared, "per_batch", None),
        "seed": getattr(shared, "seed", None),
        "world_size": getattr(shared, "world_size", 1),
        "generators": [
            place for place, each in loading.find_generators(loader).items() if id(each) in own
        ],
    }


def describe_for_ranks(loader: object) -> str:
    """Describe a loader in words, with the lengths that decide the rows of each rank.

    >>> describe_for_ranks([1, 2]), describe_for_ranks(None)
    ('loader=list', 'None')
    """
    if loader is None:
        return "None"
    told: Mapping[str, Any] = describe_loader(loader)
    dataset = getattr(loader, "dataset", None)
    has_own_rows = getattr(loader, ITSELF, False) or getattr(dataset, ITSELF, False)
    names: tuple[str, ...] = _ON_RANKS
    if not isinstance(loader, DataLoader):
        names = names[:1]
    elif has_own_rows or isinstance(dataset, IterableDataset):
        names = names[:2]
    return ", ".join(f"{name}={told[name]}" for name in names if told[name] is not None)


def _named(sampler: object) -> str:
    if not isinstance(sampler, DistributedSampler):
        return type(sampler).__name__
    return (
        f"DistributedSampler(num_replicas={sampler.num_replicas}, shuffle={sampler.shuffle}, "
        f"seed={sampler.seed}, drop_last={sampler.drop_last})"
    )


def changed(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List the values that differ, in words, skipping names that only one side has.

    >>> changed({"lr": 0.1, "old": 1}, {"lr": 0.2, "new": 2})
    ['lr=0.1 (here 0.2)']
    """
    return [
        f"{name}={saved[name]} (here {value})"
        for name, value in here.items()
        if name in saved and saved[name] != value
    ]
