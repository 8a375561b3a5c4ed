"""Passes over a data loader that can be resumed in the middle."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automicro.checkpoints.rng import derived_rng_state, restore_rng_state, rng_state
from automicro.data import LengthBatchSampler
from automicro.errors import CheckpointError, CheckpointWarning, DataLoaderError, warn
from automicro.torch_private_execution import forget_workers
from automicro.trainer.data import loading, sharing
from automicro.values import same_values

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Pass:
    """A pass over the data, with the state needed to begin it again."""

    epoch: int  # as announced to the samplers
    start: dict[str, Any]  # all state that decides its batches
    given: int = 0  # number of batches yielded
    is_complete: bool = False


class Feed:
    """Yields the batches of a loader, pass by pass, and saves and restores its position.

    >>> feed = Feed([1, 2, 3], "train_dataloader")
    >>> batches = feed.batches(epoch=0)
    >>> next(batches)
    1
    >>> later = Feed([1, 2, 3], "train_dataloader")
    >>> later.load_state_dict(feed.state_dict())
    >>> list(later.batches(epoch=0))
    [2, 3]
    """

    # A loader with a `state_dict` (torchdata's StatefulDataLoader) saves its own position. For any
    # other loader, a pass begins again from the same random numbers, and the batches that were
    # already yielded are made and discarded, so that the rest has the same bits. This draws random
    # numbers and then restores them, so restore those of a checkpoint first.
    #
    # Two things are not repeated. A shuffle buffer without workers and without its own generator
    # draws from the process during the pass, and training draws in between. And the state of
    # torchdata has the order of the rows, but not the random numbers of its workers.

    def __init__(self, loader: Any, name: str, *, accumulate_batches: int = 1) -> None:
        self.loader = loader
        self._sampler = sampler = sharing.shared_sampler(loader)
        self._plans = sampler if isinstance(sampler, LengthBatchSampler) else None
        self.group_size = accumulate_batches
        self._name = name
        self._is_persistent = loading.has_persistent_workers(loader)
        self._keeps_state = loading.has_own_state(loader)
        # Persistent workers continue their random numbers from pass to pass, so all passes since
        # they started are needed; otherwise only the last one is.
        self._passes: list[_Pass] = []
        self._loaded: Mapping[str, Any] | None = None  # a loaded state, until the next pass
        self._standing = loading.Standing(loader, name)
        self._seconds = 0.0  # of the batches yielded since `take_seconds`

    def num_batches(self, epoch: int) -> int | None:
        """Number of batches in a pass, if the loader has a length."""
        if self._plans is None:
            return loading.num_batches(self.loader)
        self._plans.set_epoch(epoch)
        return self._plans.num_rounds_before + len(self._plans)

    def groups(self, epoch: int) -> Iterator[list[Any]]:
        """Yield the optimization batches of a pass, each as a list of loader batches."""
        return loading.grouped(self.batches(epoch), self.group_size)

    def num_groups(self, epoch: int) -> int | None:
        """Number of optimization batches in a pass, if the loader has a length."""
        batches = self.num_batches(epoch)
        return None if batches is None else math.ceil(batches / self.group_size)

    @property
    def knows_seconds(self) -> bool:
        """Whether the loader knows the seconds of data in its batches."""
        return self._plans is not None and "seconds" in self._plans.units

    def take_seconds(self) -> float | None:
        """Return the seconds of data yielded since the last call; None if unknown."""
        taken, self._seconds = self._seconds, 0.0
        return taken if self.knows_seconds else None

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of a pass, or the rest of a loaded one."""
        # A loaded pass continues if it belongs to this epoch and has not ended. The rest can be
        # empty.
        iterator, loaded = None, self._loaded
        if loaded is not None:
            iterator, self._loaded = self._take_up(loaded, epoch), None
            # The last batches were one group, so the end was reached before training on them.
            if self._passes and self._passes[-1].is_complete and self._passes[-1].epoch == epoch:
                return
        if iterator is None:
            iterator = self._begin(epoch)
        current = self._passes[-1]
        for batch in loading.rest(iterator):
            if self._plans is not None and self.knows_seconds:
                self._seconds += self._plans.total_of(current.given, "seconds")
            current.given += 1
            yield batch
            del batch
        current.is_complete = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the pass as tensors and plain values."""
        if self._loaded is not None:
            return dict(self._loaded)
        # Calling `state_dict` before a pass makes torchdata's loader begin one.
        own = self.loader.state_dict() if self._passes and self._keeps_state else None
        return {
            "persistent": self._is_persistent,
            "now": self._standing.read(),
            "passes": [dict(vars(each)) for each in self._passes],
            "loader": own,
            "order": sharing.describe_loader(self.loader),
            "accumulate_batches": self.group_size,
        }

    def reshard(self, states: Sequence[Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
        """Convert the state within a pass for another number of ranks."""
        order, last = sharing.describe_loader(self.loader), states[0]["passes"][-1]
        # In the last batches of a pass, some ranks can be out of rows.
        given = max(int(each["passes"][-1]["given"]) for each in states if each["passes"])
        start, is_over = dict(last["start"]), False
        # Workers derive their random numbers from this state.
        start["rng"] = derived_rng_state(start["rng"], rank=rank, world_size=order["world_size"])
        if self._plans is not None:
            # The pass continues from this position without yielding earlier batches again.
            start["position"] = self._place_in_plan(states[0], self._plans, given)
            self._plans.load_state_dict(start["position"])
            given, is_over = 0, len(self._plans) == 0
        else:
            self._refuse_other_order(states, order)
            start["position"] = None
            given = given if order["batches"] is None else min(given, order["batches"])
        return {
            **states[0],
            "persistent": self._is_persistent,
            "passes": [{**last, "start": start, "given": given, "is_complete": is_over}],
            "order": {**order, "seed": states[0]["order"]["seed"]},
        }

    def _place_in_plan(
        self, state: Mapping[str, Any], sampler: LengthBatchSampler, given: int
    ) -> dict[str, int]:
        """Convert the position in a plan for another number of ranks."""
        was, place = state["order"], state["passes"][-1]["start"]["position"]
        if was["shared_by"] != type(sampler).__name__ or place is None:
            raise CheckpointError(
                f"the checkpoint was made without a LengthBatchSampler, but {self._name} now has "
                "one. Pass the same sampler"
            )
        had, ranks = was["world_size"] * state["accumulate_batches"], sampler.world_size
        if had != ranks * self.group_size:
            remedy = f"Pass accumulate_batches={had // ranks}"
            if had % ranks:
                remedy = f"{had} is not a multiple of {ranks} ranks"
            raise CheckpointError(
                f"an optimization batch was made of {had} batches of {self._name} (ranks × "
                f"accumulate_batches), but here it would be made of {ranks} × {self.group_size}. "
                f"{remedy}"
            )
        before = sampler.at(rank=0, world_size=was["world_size"])
        before.load_state_dict(place)
        return before.state_dict(batches_given=given)

    def _refuse_other_order(
        self, states: Sequence[Mapping[str, Any]], here: Mapping[str, Any]
    ) -> None:
        """Raise an error if the ranks share no order, or not the saved one."""
        was, reason = states[0]["order"], ""
        if states[0]["loader"] is not None or hasattr(self.loader, "load_state_dict"):
            reason = "saves its position on each rank separately, which does not fit other ranks"
        elif None in (was["shared_by"], here["shared_by"]):
            where = "here" if here["shared_by"] is None else "in the checkpoint"
            reason = (
                f"has no order that ranks share {where}. Give it a data set with a length and no "
                "DistributedSampler, and pass parallel='ddp' also in one process"
            )
        elif differing := sharing.changed({key: was[key] for key in sharing.OF_SHARED_ORDER}, here):
            reason = (
                f"had {', '.join(differing)}. Pass the same data and sampler, and let the "
                f"DataLoader cut batches of {was['entries_per_step']} over all ranks (batch_size, "
                "or global_batch_size in a config)"
            )
        else:
            for place in was["generators"]:
                each = [state["passes"][-1]["start"]["generators"].get(place) for state in states]
                if not all(same_values(each[0], other) for other in each):
                    reason = f"has a generator {place} whose state differed between ranks"
        if reason:
            raise CheckpointError(f"{self._name} ({type(self.loader).__name__}) {reason}")

    def between_epochs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state to one from which the next pass begins at its start."""
        return {**state, "passes": [], "loader": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; the next call of `batches` continues from it."""
        passes = [_Pass(**each) for each in state["passes"]]
        if state["loader"] is not None and not self._keeps_state:
            raise DataLoaderError(
                f"the checkpoint holds the loader state of {self._name}, but this "
                f"{type(self.loader).__name__} has no load_state_dict. Pass a loader that has one"
            )
        last = passes[-1] if passes else None
        # Training can end with the last batch, before the loader reports the end of the pass.
        is_over = last is None or last.is_complete or last.given == state["order"]["batches"]
        if self._plans is None and last is not None and not is_over:
            self._check_rows(state["order"], last.given)
        if passes and state["persistent"] != self._is_persistent:
            raise DataLoaderError(
                f"the checkpoint was made with persistent_workers={state['persistent']}, without "
                f"which {self._name} would give another order. Pass the same value"
            )
        self._passes, self._loaded = passes, state
        self._standing.write_generators(state["now"])
        if self._sampler is not None and state["order"]["shared_by"] is not None:
            self._sampler.seed = state["order"]["seed"]  # for the following passes
        if last is not None and not last.is_complete:
            self._set_plan(last)

    def _go_back(self, place: Mapping[str, Any]) -> None:
        """Restore all state that decides the batches of a pass."""
        restore_rng_state(place["rng"])
        self._standing.go_back(place)

    def _set_plan(self, start: _Pass) -> None:
        """Restore the position of the sampler before a pass."""
        if self._plans is None:
            return
        if start.start["position"] is None:
            raise CheckpointError(
                f"the batches of {self._name} come from a LengthBatchSampler, but those of the "
                "checkpoint did not. Pass the same sampler, or resume from a checkpoint of the end "
                "of an epoch"
            )
        self._plans.load_state_dict(start.start["position"])

    def _begin(self, epoch: int) -> Iterator[Any]:
        if not self._is_persistent:
            self._passes.clear()
        # The position is set for a `LengthBatchSampler`.
        place = {"rng": rng_state(), "position": None, **self._standing.begin()}
        start = _Pass(epoch=epoch, start=place)
        self._passes.append(start)
        loading.announce_epoch(self.loader, epoch)
        if self._plans is not None:
            start.start["position"] = self._plans.state_dict(batches_given=0)
        return loading.begin(self.loader)

    def _take_up(self, loaded: Mapping[str, Any], epoch: int) -> Iterator[Any] | None:
        """Continue the loaded pass if it was saved in the middle of this epoch."""
        last = self._passes[-1] if self._passes else None
        is_in_the_middle = last is not None and not last.is_complete and last.epoch == epoch
        here, iterator = rng_state(), None
        repeats = self._is_persistent or is_in_the_middle
        if last is not None and (self._passes[0].epoch if repeats else True):
            self._standing.warn_of_lost(self._passes[0].start if repeats else loaded["now"])
        try:
            if last is not None and loaded["loader"] is not None:
                iterator = self._load_position(loaded["loader"], last, is_in_the_middle)
            elif repeats:
                if self._is_persistent:
                    forget_workers(self.loader)
                for each in self._passes:
                    iterator = self._repeat(each)
        finally:
            self._standing.write(loaded["now"])
            restore_rng_state(here)
        return iterator if is_in_the_middle else None

    def _load_position(self, own: Any, last: _Pass, is_in_the_middle: bool) -> Iterator[Any] | None:
        """Load the loader's own state, and begin the pass if it was saved in the middle."""
        self.loader.load_state_dict(own)
        # After the state of a pass that has ended, torchdata's loader would begin twice, and draw
        # twice.
        has_ended = isinstance(own, Mapping) and own.get("_iterator_finished", False)
        if not is_in_the_middle and last.is_complete and not has_ended:
            return None
        self._go_back({**last.start, "generators": {}})
        loading.announce_epoch(self.loader, last.epoch)
        iterator = loading.begin(self.loader)
        if not is_in_the_middle and not last.is_complete:
            # Run to the end, which was not reached before the save.
            for batch in loading.rest(iterator):
                del batch
        return iterator

    def _repeat(self, start: _Pass) -> Iterator[Any]:
        """Begin a pass again and discard the batches that it had yielded."""
        # Checked by type, because calling `iter` on a loader can start workers.
        if isinstance(self.loader, Iterator):
            warn(
                f"{self._name} is an iterator ({type(self.loader).__name__}). Its first "
                f"{start.given} batches are skipped, which is right only if they are the same as "
                "before. Pass a DataLoader, or give it state_dict and load_state_dict",
                CheckpointWarning,
            )
        what = f"the {start.given} batches of epoch {start.epoch + 1} that had been trained on"
        logger.info("%s: repeating %s", self._name, what)
        self._go_back(start.start)
        loading.announce_epoch(self.loader, start.epoch)
        self._set_plan(start)
        iterator = loading.begin(self.loader)
        batches = loading.rest(iterator)
        for given in range(start.given):
            if next(batches, _END) is _END:
                raise DataLoaderError(
                    f"{self._name} ended after {given} batches, but {start.given} batches of this "
                    f"epoch were trained on before the checkpoint. {_SAME_DATA}"
                )
        if start.is_complete:
            next(batches, _END)
        return iterator

    def _check_rows(self, was: Mapping[str, Any], given: int) -> None:
        here = sharing.describe_loader(self.loader)
        differing = sharing.changed(
            {key: was[key] for key in sharing.IN_A_RUN if was[key] is not None}, here
        )
        if given == 0 or not differing:
            return
        said = (
            f"{self._name} has changed since the checkpoint was made, {given} batches into the "
            f"epoch: {', '.join(differing)}"
        )
        if None not in (was["batches"], here["batches"]) and here["batches"] < was["batches"]:
            raise DataLoaderError(f"{said}. {_SAME_DATA}")
        warn(
            f"{said}. Rows may be repeated or missing in this epoch. {_SAME_DATA}",
            CheckpointWarning,
        )


_SAME_DATA = (
    "Pass the same data and loader options, or resume from a checkpoint of the end of an epoch"
)
_END = object()
