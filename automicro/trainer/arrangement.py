"""A model on its device, and shared with other ranks where there are any."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from automicro.checks import resolve_device, unwrapped
from automicro.trainer.alike import require_alike
from automicro.trainer.building import gather_modules, place_modules
from automicro.trainer.device import choose_device, seed_everything
from automicro.trainer.outline import outline_options
from automicro.trainer.parallel import (
    check_parallel,
    read_parallel,
    splits_layers,
    wrap,
)
from automicro.trainer.processes import (
    Place,
    meet,
    own_device,
    place_here,
    said_by_first,
)
from automicro.trainer.sharing import LoaderSharing, SharedAlready
from automicro.wrapped import is_parallel


class Arrangement:
    """Where a model is, who else has it, and what of the data is for this rank.

    Args:
        model: bare, or wrapped already.
        modules: further ones that take part.
        loss_fn: may be one, too.
        parallel: how to wrap the model; None to take it as it is.
        device: that was asked for.
        compiles: whether the model is to be compiled.
        channels_last: whether weights of convolutions get the channels last in memory.
        optimizer: of the run, or what makes it.

    Raises:
        ValueError: what cannot be trained like this, each with its remedy.

    Attributes:
        place: of this process among the ranks.
        device: of this process.
        model: bare; its parameters have the names that they had before.
        called: what a step calls: the model, or the wrapper around it.
        modules: the bare model, then further ones.
        is_shared: whether other ranks train the same model.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module],
        loss_fn: Callable[..., Any] | None,
        *,
        parallel: str | None,
        device: torch.device | str,
        compiles: bool,
        channels_last: bool,
        optimizer: object,
    ) -> None:
        self._channels_last = channels_last
        self._parallel = read_parallel(parallel)
        everything = gather_modules(model, modules, loss_fn)
        is_wrapped = is_parallel(everything)
        self.place: Place = place_here()
        check_parallel(
            self._parallel,
            everything,
            self.place,
            compiles=compiles,
            channels_last=channels_last,
            loss_fn=loss_fn,
            optimizer=optimizer,
        )
        self.is_shared = is_wrapped or parallel is not None
        if self._parallel is not None:
            device = own_device(device, self.place)
        elif is_wrapped and device == "auto":
            device = resolve_device(None, model)
        self.device = choose_device(device)
        self.called = model
        self.model = unwrapped(model)
        self.modules = [self.model, *everything[1:]]

    @property
    def name(self) -> str | None:
        """In how many processes, in a few words; None for one that is alone."""
        if not self.is_shared:
            return None
        size = self.place.world_size
        ranks = "1 rank, start more with torchrun" if size == 1 else f"{size} ranks"
        return f"{self._parallel or 'wrapped by the caller'}, {ranks}"

    def put_in_place(self, given: Mapping[str, Any]) -> None:
        """Move the model, let the processes meet, and wrap it. All ranks call it.

        Args:
            given: the trainer's arguments by name, which are to be alike on all ranks.

        Raises:
            ValueError: nothing in the model has channels, or the processes cannot meet.
            DesyncError: ranks were given different things.
        """
        resolve_device(None, self.model)  # refuses a model without data, which cannot be moved
        place_modules(self.modules, self.device, channels_last=self._channels_last)
        if self._parallel is not None:
            meet(self.device, self.place)
        # Before anything else that ranks do together, and where those would wait that differ.
        require_alike(self.device, partial(outline_options, given))
        if self._parallel is not None:
            self.called = wrap(self._parallel, self.modules, self.device, self.place)

    def sharing(self, seed: int | None) -> LoaderSharing | SharedAlready:
        """What gives this rank its part of a loader. All ranks call it.

        Args:
            seed: of the run, which decides the order of rows where no generator does.
        """
        if not self.is_shared:
            return SharedAlready()
        order = torch.initial_seed() if seed is None else seed
        order = said_by_first(order % 2**32, self.device)
        return LoaderSharing(
            self.place,
            seed=order,
            device=self.device,
            has_parted_layers=splits_layers(self.modules),
        )

    def seed_apart(self, seed: int | None) -> None:
        """Let ranks draw random numbers of their own, now that all have the same weights.

        Args:
            seed: of the run; this rank's is ``seed + rank``. None leaves all as it is.
        """
        if self.is_shared and seed is not None and not self.place.is_first:
            seed_everything((seed + self.place.rank) % 2**32)
