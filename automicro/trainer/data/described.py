"""Loaders in plain values that decide which rows their batches have, for ranks and runs."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from automicro.trainer.data.loading import attached_generators, num_batches, samplers_of
from automicro.trainer.data.sharing import ITSELF, SharedBatchSampler, shared_sampler

IN_A_RUN = ("batches", "rows", "batch_size", "sampler", "has_generator", "num_workers")
"""Values that stay the same in the middle of a pass, or rows come twice or not at all."""
OF_SHARED_ORDER = ("shared_by", "sampler", "entries", "entries_per_step")
"""Values that stay the same where another number of ranks goes on in the middle of a pass."""
_ON_RANKS = (
    *("loader", "dataset", "rows", "sampler", "entries"),
    *("batch_sampler", "batches", "batch_size", "drop_last"),
)


def describe_loader(loader: object) -> dict[str, Any]:
    """All that is known of a loader, as far as torch's classes and ours tell.

    >>> told = describe_loader(DataLoader(range(8), batch_size=4, shuffle=True))
    >>> told["rows"], told["batch_size"], told["sampler"], told["shared_by"]
    (8, 4, 'RandomSampler', None)
    """
    of_loader, batch_sampler, of_batches = samplers_of(loader)
    dataset, shared = getattr(loader, "dataset", None), shared_sampler(loader)
    sampler = of_loader if of_batches is None else of_batches
    is_plain = type(batch_sampler) is BatchSampler or isinstance(batch_sampler, SharedBatchSampler)
    is_of_torch = type(sampler).__module__ == BatchSampler.__module__
    is_stream = isinstance(dataset, IterableDataset)
    own = {id(each) for each in attached_generators(shared).values()}
    return {
        "loader": type(loader).__name__,
        "dataset": None if dataset is None else type(dataset).__name__,
        "batches": num_batches(loader),
        "rows": None if dataset is None else num_batches(dataset),
        "sampler": None if sampler is None else _named(sampler),
        "entries": num_batches(sampler),
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
            place for place, each in attached_generators(loader).items() if id(each) in own
        ],
    }


def describe_for_ranks(loader: object) -> str:
    """A loader in words, with the lengths that decide which rows each rank gets.

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
    """The values that were others, in words. A name that only one of both has is left out.

    >>> changed({"lr": 0.1, "old": 1}, {"lr": 0.2, "new": 2})
    ['lr=0.1 (here 0.2)']
    """
    return [
        f"{name}={saved[name]} (here {value})"
        for name, value in here.items()
        if name in saved and saved[name] != value
    ]
