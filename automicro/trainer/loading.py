"""One batch after the other from a data loader, fetched on the host."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from automicro.errors import DataLoaderError
from automicro.memory import active_budget


def check_loader(name: str, loader: object) -> None:
    """Refuse what gives no batches.

    Raises:
        TypeError: it cannot be iterated over.

    >>> check_loader("train_dataloader", [("a", "batch")])
    """
    if loader is not None and not isinstance(loader, Iterable) and not _is_indexable(loader):
        raise TypeError(
            f"{name} is a {type(loader).__name__} and cannot be iterated over; pass a "
            "torch.utils.data.DataLoader, or any iterable of whole batches"
        )


def fetch(loader: Any, name: str) -> Iterator[Any]:
    """Yield the batches of one pass.

    What a loader allocates lies on the host: under a simulated memory limit it is not counted.

    Raises:
        DataLoaderError: there is not one batch.

    >>> list(fetch([1, 2], "train_dataloader"))
    [1, 2]
    """
    with _on_host():
        iterator = iter(loader)
    num_batches = 0
    while True:
        with _on_host():
            try:
                batch = next(iterator)
            except StopIteration:
                break
        num_batches += 1
        yield batch
        # Held by nobody while the next one is made: two batches at a time would lie on the host.
        del batch
    if num_batches == 0:
        raise DataLoaderError(_why_empty(loader, iterator, name))


def num_batches(loader: object) -> int | None:
    """How many batches a pass has, where the loader knows.

    >>> num_batches([1, 2]), num_batches(iter([1, 2])) is None
    (2, True)
    """
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a loader over an endless dataset has a broken one
        return None


def announce_epoch(loader: object, epoch: int) -> None:
    """Tell samplers that shuffle by epoch which one begins, counted from 0."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler)
    inner = getattr(batch_sampler, "sampler", None)
    told: list[object] = []
    for sampler in (*samplers, inner):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch) and not any(sampler is each for each in told):
            set_epoch(epoch)
            told.append(sampler)


def _on_host() -> contextlib.AbstractContextManager[None]:
    budget = active_budget()
    return contextlib.nullcontext() if budget is None else budget.host()


def _why_empty(loader: object, iterator: object, name: str) -> str:
    if iterator is loader:
        return (
            f"{name} gave no batch: it is an iterator ({type(loader).__name__}) and used up, "
            "because an iterator can be passed over only once; pass something that starts again "
            "for each epoch, such as a DataLoader or a list"
        )
    dataset = getattr(loader, "dataset", None)
    rows = num_batches(dataset) if dataset is not None else None
    batch_size = getattr(loader, "batch_size", None)
    if rows and batch_size and rows < batch_size and getattr(loader, "drop_last", False):
        return (
            f"{name} gave no batch: its dataset has {rows} rows, fewer than batch_size="
            f"{batch_size}, and drop_last=True drops them; use drop_last=False or a smaller batch"
        )
    if rows == 0:
        return f"{name} gave no batch: its dataset is empty; check the path and the filters"
    return (
        f"{name} ({type(loader).__name__}) gave no batch; check its dataset and its sampler: it "
        "must give at least one batch in every pass"
    )


def _is_indexable(loader: object) -> bool:
    return hasattr(type(loader), "__getitem__") and not isinstance(loader, type)
