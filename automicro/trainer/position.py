"""Where a pass stands in the one order of rows that ranks share, however many they are."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from automicro.content import same_values
from automicro.errors import CheckpointError
from automicro.trainer.generators import find_generators
from automicro.trainer.loading import num_batches
from automicro.trainer.samplers import Shared, SharedBatchSampler, shared_sampler


def describe_order(loader: object) -> dict[str, Any] | None:
    """The order that ranks share, as plain values; None where they share none of ours.

    Args:
        loader: anything that gives batches.

    >>> describe_order([1, 2]) is None
    True
    """
    sampler = shared_sampler(loader)
    if sampler is None:
        return None
    own = {id(each) for each in find_generators(sampler).values()}
    return {
        "kind": type(sampler).__name__,
        "sampler": type(sampler.sampler).__name__,
        "seed": sampler.seed,
        "entries": num_batches(sampler.sampler),
        "per_batch": sampler.per_batch,
        "world_size": sampler.world_size,
        "generators": [place for place, each in find_generators(loader).items() if id(each) in own],
    }


def restore_order(loader: object, saved: Mapping[str, Any] | None) -> None:
    """Let the passes to come have the order that they would have had.

    Args:
        loader: shared by the same rules.
        saved: what `describe_order` gave; None leaves all as it is.
    """
    sampler = shared_sampler(loader)
    if sampler is not None and saved is not None:
        sampler.seed = saved["seed"]


def position_of(states: Sequence[Mapping[str, Any]], loader: Any, name: str) -> int:
    """How many batches of the order that all share were given.

    Each of them holds the same rows at any number of ranks, as long as it has as many of them.

    Args:
        states: of the feeds of all ranks that saved.
        loader: of this rank, of another number of them.
        name: of its argument, for errors.

    Raises:
        CheckpointError: the batches to come would hold other rows, with the remedy.
    """
    reason = _why_no_order(states[0], loader, name) or _why_another(states, loader, name)
    if reason is not None:
        raise CheckpointError(reason)
    return max(int(each["passes"][-1]["given"]) for each in states if each["passes"])


def _why_no_order(saved: Mapping[str, Any], loader: Any, name: str) -> str | None:
    """Why there is no order that both share; None where there is one."""
    here, was = shared_sampler(loader), saved.get("order")
    if saved["loader"] is not None or hasattr(loader, "load_state_dict"):
        return (
            f"{name} ({type(loader).__name__}) keeps a position of its own on each rank, which "
            "says nothing about other ranks' rows"
        )
    if was is not None and here is None and isinstance(loader, DataLoader):
        return (
            f"the order of {name} was one that ranks share, and this {type(loader).__name__} "
            "draws another one; pass parallel='ddp' in one process, too, and leave a "
            "DistributedSampler out"
        )
    if here is None:
        return (
            f"{name} ({type(loader).__name__}) has no order that ranks share, as a DataLoader over "
            "a data set with a length has"
        )
    if was is None:
        return (
            f"the batches of {name} came from one process that drew an order of its own, or were "
            "not shared out by the Trainer; begin such a run with parallel='ddp', in one process, "
            "too"
        )
    return None


def _why_another(states: Sequence[Mapping[str, Any]], loader: Any, name: str) -> str | None:
    """Why the order, or how it is cut, is not the one that was saved; None where it is."""
    was, here, sampler = states[0]["order"], describe_order(loader), shared_sampler(loader)
    assert sampler is not None
    assert here is not None
    for key, what in (("kind", "is shared out by a"), ("sampler", "has its order from a")):
        if was[key] != here[key]:
            return f"{name} {what} {here[key]}, and was by a {was[key]}; pass the same sampler"
    if was["entries"] != here["entries"]:
        return f"{name} has {here['entries']} rows, and had {was['entries']}; pass the same data"
    if was["per_batch"] != here["per_batch"]:
        return _why_other_size(was, sampler, name)
    for place in was["generators"]:
        first, *others = [each["passes"][-1]["generators"].get(place) for each in states]
        if not all(same_values(first, each) for each in others):
            return f"the generator {place} of {name} stood at another place on each rank"
    return None


def _why_other_size(was: Mapping[str, Any], here: Shared, name: str) -> str:
    if not isinstance(here, SharedBatchSampler):
        return (
            f"{was['per_batch']} batches at a time, one for each rank, were those of {name}, and "
            f"here they would be {here.per_batch}, so every step would be of another number of "
            "rows; let the DataLoader cut the batches (batch_size=…)"
        )
    rows, ranks = was["per_batch"], here.world_size
    numbers = (
        f"a batch of {name} had {rows} rows over {was['world_size']} ranks, and here it has "
        f"{here.per_batch} over {ranks} (batch_size={here.batch_size})"
    )
    if rows % ranks:
        return f"{numbers}, while {rows} rows are not a multiple of {ranks} ranks"
    return (
        f"{numbers}; pass a DataLoader with batch_size={rows // ranks}, which global_batch_size "
        "in a config sees to"
    )
