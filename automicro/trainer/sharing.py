"""Data loaders shared among ranks."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from automicro.torch_private import forget_workers
from automicro.trainer.generators import find_generators, generator_states, restore_generators
from automicro.trainer.loading import num_batches
from automicro.trainer.processes import Place
from automicro.trainer.samplers import SharedBatchSampler, SharedSampler
from automicro.warn import warn

ITSELF = "is_sharded"
"""What a loader or a data set has, and is true, where each rank gets rows of its own from it."""


class SharedAlready:
    """Takes loaders as they are: in a process that is alone."""

    def share(self, loader: Any, name: str, *, is_evaluated: bool = False) -> Any:
        """The loader.

        >>> SharedAlready().share([1, 2], "train_dataloader")
        [1, 2]
        """
        return loader


class LoaderSharing:
    """Gives each rank its part of loaders.

    Args:
        place: of this process.
        seed: of the order of rows, the same on all ranks.
        device: where ranks can exchange tensors.
        has_parted_layers: whether some ranks hold parts of one layer, and so need the same rows.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        >>> second = Place(rank=1, world_size=2)
        >>> sharing = LoaderSharing(second, seed=0, device=torch.device("cpu"))
        >>> [rows.tolist() for (rows,) in sharing.share(loader, "train_dataloader")]
        [[2, 3]]
    """

    def __init__(
        self,
        place: Place,
        *,
        seed: int,
        device: torch.device,
        has_parted_layers: bool = False,
    ) -> None:
        self._place = place
        self._seed = seed
        self._device = device
        self._has_parted_layers = has_parted_layers

    def share(self, loader: Any, name: str, *, is_evaluated: bool = False) -> Any:
        """This rank's part of a loader: the loader itself, where it is shared already.

        A ``DataLoader`` over a data set with a length gets a sampler that shares the rows out; all
        else about it stays. All ranks call it.

        Args:
            loader: gives batches.
            name: of its argument, for errors.
            is_evaluated: whether metrics count its rows, so that none may come twice.

        Raises:
            ValueError: data of which every rank would get all, or some twice in an evaluation.

        Warns:
            UserWarning: rows that come twice in an epoch.
        """
        place = self._place
        dataset = getattr(loader, "dataset", None)
        if getattr(loader, ITSELF, False) or getattr(dataset, ITSELF, False):
            return loader
        if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
            if place.world_size > 1:
                raise ValueError(_not_shared(loader, name, place))
            return loader
        batch_sampler = loader.batch_sampler
        for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if isinstance(sampler, DistributedSampler):
                _check_padding(sampler, name, is_evaluated=is_evaluated)
                return loader
        if self._has_parted_layers:
            raise ValueError(
                f"the model has layers that are parted among ranks (tensor parallelism), and "
                f"nothing says which ranks need the same rows of {name}; give it a "
                "DistributedSampler with the rank and the number of the data-parallel groups, or "
                f"set {ITSELF} = True on it"
            )
        order = loader.sampler if batch_sampler is None else batch_sampler
        if place.world_size > 1 and num_batches(order) is None:
            raise ValueError(
                f"the sampler of {name} ({type(order).__name__}) has no length, so its rows "
                f"cannot be shared among {place.world_size} ranks; give it __len__, or let it "
                f"give each rank rows of its own and set {ITSELF} = True on the loader"
            )
        self._put_generators_together(loader)
        return self._with_own_sampler(loader)

    def _with_own_sampler(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        rank, world_size, seed = self._place.rank, self._place.world_size, self._seed
        # A copy keeps workers, collation and whatever else a subclass has; the constructor of a
        # subclass may take other arguments.
        shared = copy.copy(loader)
        forget_workers(shared)
        batch_sampler = loader.batch_sampler
        if batch_sampler is None:
            vars(shared)["sampler"] = SharedSampler(
                loader.sampler, rank=rank, world_size=world_size, seed=seed
            )
        elif type(batch_sampler) is BatchSampler:
            vars(shared)["batch_sampler"] = SharedBatchSampler(
                batch_sampler.sampler,
                batch_sampler.batch_size,
                drop_last=batch_sampler.drop_last,
                rank=rank,
                world_size=world_size,
                seed=seed,
            )
        else:
            vars(shared)["batch_sampler"] = SharedSampler(
                batch_sampler, rank=rank, world_size=world_size, seed=seed
            )
        return shared

    def _put_generators_together(self, loader: DataLoader[Any]) -> None:
        """Let the generators of samplers stand where rank 0's do, so that all draw one order."""
        if self._place.world_size == 1 or not dist.is_initialized():
            return
        mine = [generator_states(loader) if find_generators(loader) else None]
        dist.broadcast_object_list(mine, 0, device=self._device)
        if mine[0] is not None:
            restore_generators(loader, mine[0])


def _not_shared(loader: object, name: str, place: Place) -> str:
    dataset = getattr(loader, "dataset", None)
    what = "an iterable data set" if isinstance(dataset, IterableDataset) else "no DataLoader"
    owner = type(loader if dataset is None else dataset).__name__
    return (
        f"{name} is {what} ({owner}), and each of {place.world_size} ranks would get all of its "
        "rows; pass a DataLoader over a data set with a length, whose rows are shared out, or "
        "let it give each rank rows of its own (by torch.distributed.get_rank()) and say so by "
        f"setting {ITSELF} = True on the loader or the data set"
    )


def _check_padding(sampler: DistributedSampler[Any], name: str, *, is_evaluated: bool) -> None:
    rows: int = len(sampler.dataset)  # type: ignore[arg-type]
    more = sampler.total_size - rows
    if more == 0:
        return
    twice = f"{more} of its {rows} rows come twice" if more > 0 else f"it leaves out {-more} rows"
    text = (
        f"{name} has a DistributedSampler for {sampler.num_replicas} ranks, with which {twice} "
        "in every pass"
    )
    remedy = "leave it out: the Trainer shares the rows out, each exactly once"
    if is_evaluated:
        raise ValueError(f"{text}, so losses and metrics would be wrong; {remedy}")
    warn(f"{text}; {remedy}", UserWarning)
