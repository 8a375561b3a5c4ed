"""Passes over a data loader that can be taken up again in the middle."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automicro.checkpoints.rng import derived_rng_state, restore_rng_state, rng_state
from automicro.data import LengthBatchSampler
from automicro.errors import CheckpointError, CheckpointWarning, DataLoaderError, warn
from automicro.ranks.interface import Ranks
from automicro.torch_private import forget_workers
from automicro.trainer.data.loading import (
    announce_epoch,
    begin,
    empty,
    find_generators,
    grouped,
    has_persistent_workers,
    num_batches,
    read_attributes,
    read_generators,
    rest,
    write_attributes,
    write_generators,
)
from automicro.trainer.data.sharing import (
    IN_A_RUN,
    OF_SHARED_ORDER,
    changed,
    describe_loader,
    shared_sampler,
)
from automicro.trainer.same_on_all_ranks import require_same_order
from automicro.values import same_values

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Pass:
    """A pass, and how to begin it again.

    Attributes:
        epoch: that was announced.
        start: where all stood that its batches come from; see `Feed._place`.
        given: batches so far.
        is_complete: whether there are no more.
    """

    epoch: int
    start: dict[str, Any]
    given: int = 0
    is_complete: bool = False


class Feed:
    """Gives the batches of a loader, pass after pass, and says where it stands.

    A loader with a ``state_dict`` of its own (torchdata's StatefulDataLoader) is asked for it.
    With any other, the pass begins once more from the same random numbers, and the batches that
    were given are made and thrown away, so that the rest is the same to the bit. Random numbers
    are drawn meanwhile and put back, so restore those of a checkpoint first.

    Two things are not repeated. A loader that goes on drawing random numbers of the process for an
    order that it keeps (a shuffle buffer without workers, without a generator of its own) draws
    others, because training draws in between. And torchdata's state has the order of the rows, but
    not the random numbers of its workers.

    Example:
        >>> feed = Feed([1, 2, 3], "train_dataloader")
        >>> batches = feed.batches(epoch=0)
        >>> next(batches)
        1
        >>> later = Feed([1, 2, 3], "train_dataloader")
        >>> later.load_state_dict(feed.state_dict())
        >>> list(later.batches(epoch=0))
        [2, 3]
    """

    def __init__(
        self, loader: Any, name: str, *, has_peers: bool = False, accumulate_batches: int = 1
    ) -> None:
        self._loader = loader
        self._sampler = sampler = shared_sampler(loader)
        self._plans = sampler if isinstance(sampler, LengthBatchSampler) else None
        self.group_size = accumulate_batches
        self._name = name
        self._has_peers = has_peers
        self._is_persistent = has_persistent_workers(loader)
        methods = (getattr(loader, each, None) for each in ("state_dict", "load_state_dict"))
        self._keeps_state = all(map(callable, methods))
        # Persistent workers go on with their random numbers, so all passes since they started
        # count; otherwise only the last one does.
        self._passes: list[_Pass] = []
        self._loaded: Mapping[str, Any] | None = None  # a state that no pass has followed yet
        self._first_attributes = read_attributes(loader)
        self._seconds = 0.0  # of batches that were given, and not yet asked for

    def num_batches(self, epoch: int) -> int | None:
        """How many batches a pass has, where the loader knows."""
        if self._plans is None:
            return num_batches(self._loader)
        self._plans.set_epoch(epoch)
        return self._plans.num_rounds_before + len(self._plans)

    def groups(self, epoch: int) -> Iterator[list[Any]]:
        """Yield optimization batches of a pass, each as the loader's batches that make it up."""
        return grouped(self.batches(epoch), self.group_size)

    def num_groups(self, epoch: int) -> int | None:
        """How many optimization batches a pass has, where the loader knows."""
        batches = self.num_batches(epoch)
        return None if batches is None else math.ceil(batches / self.group_size)

    @property
    def knows_seconds(self) -> bool:
        """Whether the loader knows how many seconds of data its batches have."""
        return self._plans is not None and "seconds" in self._plans.units

    def take_seconds(self) -> float | None:
        """The seconds of data in the batches given since it was last asked; None if unknown."""
        taken, self._seconds = self._seconds, 0.0
        return taken if self.knows_seconds else None

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of a pass, or the rest of the one that was loaded.

        A pass that was loaded is taken up if it is of this epoch and has not ended; the rest may
        be no batch at all. Nothing happens before the first batch is asked for.
        """
        iterator = None
        if self._loaded is not None:
            iterator = self._take_up(epoch)
            self._loaded = None
            # Its last batches were one group, so its end was seen before they were trained on.
            if self._passes and self._passes[-1].is_complete and self._passes[-1].epoch == epoch:
                return
        if iterator is None:
            iterator = self._begin(epoch)
        current = self._passes[-1]
        for batch in rest(iterator):
            if self._plans is not None and self.knows_seconds:
                self._seconds += self._plans.total_of(current.given, "seconds")
            current.given += 1
            yield batch
            del batch
        current.is_complete = True
        if current.given == 0 and not self._has_peers:
            raise self.emptiness()

    def emptiness(self) -> DataLoaderError:
        """The error that a pass gave no batch, on any rank."""
        return empty(self._loader, self._name)

    def require_same_order(self, ranks: Ranks) -> None:
        """Compare the order of a pass that has begun with that of other ranks. All call it."""
        checksum = None if self._sampler is None else self._sampler.checksum
        require_same_order(ranks, checksum, self._name)

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands, as tensors and plain values."""
        if self._loaded is not None:
            return dict(self._loaded)
        # Asking before a pass has begun makes torchdata's loader begin one.
        own = self._loader.state_dict() if self._passes and self._keeps_state else None
        return {
            "persistent": self._is_persistent,
            "now": self._place(),
            "passes": [dict(vars(each)) for each in self._passes],
            "loader": own,
            "order": describe_loader(self._loader),
            "accumulate_batches": self.group_size,
        }

    def reshard(self, states: Sequence[Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
        """The state for a rank in the middle of a pass, where another number of ranks saved it."""
        order, last = describe_loader(self._loader), states[0]["passes"][-1]
        # Of the last batches of a pass, some ranks have no rows.
        given = max(int(each["passes"][-1]["given"]) for each in states if each["passes"])
        start, is_over = dict(last["start"]), False
        # Workers take their random numbers from it.
        start["rng"] = derived_rng_state(start["rng"], rank=rank, world_size=order["world_size"])
        if self._plans is not None:
            # The pass goes on from there, and gives none of its batches again.
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
        """The position of a plan that another number of ranks saved, for this one."""
        was, place = state["order"], state["passes"][-1]["start"]["position"]
        if was["shared_by"] != type(sampler).__name__ or place is None:
            raise CheckpointError(
                f"{self._name} is shared out by a LengthBatchSampler, and was not; pass the same "
                "sampler"
            )
        had, ranks = was["world_size"] * state["accumulate_batches"], sampler.world_size
        if had != ranks * self.group_size:
            remedy = f"pass accumulate_batches={had // ranks}"
            if had % ranks:
                remedy = f"{had} are not a multiple of {ranks} ranks"
            raise CheckpointError(
                f"an optimization batch was made of {had} batches of {self._name} (ranks × "
                f"accumulate_batches), and here it would be of {ranks} × {self.group_size}; "
                f"{remedy}"
            )
        before = sampler.at(rank=0, world_size=was["world_size"])
        before.load_state_dict(place)
        return before.state_dict(batches_given=given)

    def _refuse_other_order(
        self, states: Sequence[Mapping[str, Any]], here: Mapping[str, Any]
    ) -> None:
        """Refuse where there is no order that ranks share, or another one."""
        was, reason = states[0]["order"], ""
        if states[0]["loader"] is not None or hasattr(self._loader, "load_state_dict"):
            reason = "keeps a position of its own on each rank, which says nothing about other rows"
        elif None in (was["shared_by"], here["shared_by"]):
            where = "here" if here["shared_by"] is None else "in the checkpoint"
            reason = (
                f"has no order that ranks share {where}, as a DataLoader over a data set with a "
                "length has, without a DistributedSampler; pass parallel='ddp' in one process, "
                "too, from the beginning of the run"
            )
        elif differing := changed({key: was[key] for key in OF_SHARED_ORDER}, here):
            rows = was["entries_per_step"]
            reason = (
                f"had {', '.join(differing)}; pass the same data and the same sampler, and let the "
                f"DataLoader cut batches of {rows} over all ranks (batch_size, or "
                "global_batch_size in a config)"
            )
        else:
            for place in was["generators"]:
                each = [state["passes"][-1]["start"]["generators"].get(place) for state in states]
                if not all(same_values(each[0], other) for other in each):
                    reason = f"has a generator {place} that stood at another place on each rank"
        if reason:
            raise CheckpointError(f"{self._name} ({type(self._loader).__name__}) {reason}")

    def between_epochs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state from which the next pass begins anew, in the order that its generators give."""
        return {**state, "passes": [], "loader": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next `batches`."""
        passes = [_Pass(**each) for each in state["passes"]]
        if state["loader"] is not None and not self._keeps_state:
            raise DataLoaderError(
                f"the checkpoint holds the position of a {self._name} that kept its own, and this "
                f"{type(self._loader).__name__} has no load_state_dict; pass the same kind of "
                "loader, or go on from a checkpoint that was made with this kind"
            )
        last = passes[-1] if passes else None
        # Training may end with the last batch, before the end of the pass is seen.
        is_over = last is None or last.is_complete or last.given == state["order"]["batches"]
        if self._plans is None and last is not None and not is_over:
            self._check_rows(state["order"], last.given)
        if passes and state["persistent"] != self._is_persistent:
            raise DataLoaderError(
                f"the checkpoint was made with persistent_workers={state['persistent']}, without "
                f"which the batches of {self._name} would come in another order; pass that"
            )
        self._passes, self._loaded = passes, state
        write_generators(find_generators(self._loader), state["now"]["generators"])
        if self._sampler is not None and state["order"]["shared_by"] is not None:
            self._sampler.seed = state["order"]["seed"]  # of the passes to come
        if last is not None and not last.is_complete:
            self._set_plan(last)

    def _place(self) -> dict[str, Any]:
        """Where all stands that batches come from: random numbers, generators, attributes."""
        first = self._first_attributes
        return {
            "rng": rng_state(),
            "generators": read_generators(find_generators(self._loader)),
            # Those that are no longer what they were before any pass.
            "attributes": {
                place: value
                for place, value in read_attributes(self._loader).items()
                if place not in first or not same_values(first[place], value)
            },
            "position": None,  # of a `LengthBatchSampler`
        }

    def _go_back(self, place: Mapping[str, Any]) -> None:
        """Let all stand where it stood before a pass."""
        restore_rng_state(place["rng"])
        write_generators(find_generators(self._loader), place["generators"])
        write_attributes(self._loader, {**self._first_attributes, **place["attributes"]})

    def _set_plan(self, start: _Pass) -> None:
        """Let the sampler stand where it stood before a pass."""
        if self._plans is None:
            return
        if start.start["position"] is None:
            raise CheckpointError(
                f"the batches of {self._name} come from a LengthBatchSampler, and those of the "
                "checkpoint did not; pass the same sampler, or go on from a checkpoint of the end "
                "of an epoch"
            )
        self._plans.load_state_dict(start.start["position"])

    def _begin(self, epoch: int) -> Iterator[Any]:
        if not self._is_persistent:
            self._passes.clear()
        start = _Pass(epoch=epoch, start=self._place())
        self._passes.append(start)
        announce_epoch(self._loader, epoch)
        if self._plans is not None:
            start.start["position"] = self._plans.state_dict(batches_given=0)
        return begin(self._loader)

    def _take_up(self, epoch: int) -> Iterator[Any] | None:
        """The pass of an epoch where it was left, if it was left in the middle."""
        assert self._loaded is not None
        last = self._passes[-1] if self._passes else None
        is_in_the_middle = last is not None and not last.is_complete and last.epoch == epoch
        here = rng_state()
        iterator = None
        try:
            if self._loaded["loader"] is not None:
                assert last is not None
                iterator = self._load_position(last, is_in_the_middle=is_in_the_middle)
            elif self._is_persistent:
                forget_workers(self._loader)
                for each in self._passes:
                    iterator = self._repeat(each)
            elif is_in_the_middle:
                assert last is not None
                iterator = self._repeat(last)
        finally:
            now = self._loaded["now"]
            write_generators(find_generators(self._loader), now["generators"])
            write_attributes(self._loader, now["attributes"])
            restore_rng_state(here)
        return iterator if is_in_the_middle else None

    def _load_position(self, last: _Pass, *, is_in_the_middle: bool) -> Iterator[Any] | None:
        """Hand a loader its own state; a new pass is left to begin by itself if it can."""
        assert self._loaded is not None
        own = self._loaded["loader"]
        self._loader.load_state_dict(own)
        # torchdata's begins twice after the state of a pass that has ended, and would draw twice.
        has_ended = isinstance(own, Mapping) and own.get("_iterator_finished", False)
        if not is_in_the_middle and last.is_complete and not has_ended:
            return None
        self._go_back({**last.start, "generators": {}})
        announce_epoch(self._loader, last.epoch)
        iterator = begin(self._loader)
        if not is_in_the_middle and not last.is_complete:
            for batch in rest(iterator):  # its end has not been seen
                del batch
        return iterator

    def _repeat(self, start: _Pass) -> Iterator[Any]:
        """Begin a pass once more and throw away the batches that it gave."""
        # Only an iterator is its own iterator; asking a loader for one may start workers.
        if isinstance(self._loader, Iterator):
            warn(
                f"{self._name} is an iterator ({type(self._loader).__name__}), which cannot begin "
                f"again: {start.given} batches are taken from it and thrown away, which is right "
                "only if it is new and gives the same ones. Pass what can begin again, such as a "
                "DataLoader, or give it state_dict and load_state_dict",
                CheckpointWarning,
            )
        logger.info(
            "%s: making the %d batches of epoch %d again that were trained on%s",
            self._name,
            start.given,
            start.epoch + 1,
            ", as persistent workers draw from pass to pass" if self._is_persistent else "",
        )
        self._go_back(start.start)
        announce_epoch(self._loader, start.epoch)
        self._set_plan(start)
        iterator = begin(self._loader)
        batches = rest(iterator)
        for given in range(start.given):
            if next(batches, _END) is _END:
                raise DataLoaderError(
                    f"{self._name} ended after {given} batches, and {start.given} of this pass "
                    "were trained on when the checkpoint was made; pass the same data, or go on "
                    "from a checkpoint of the end of an epoch"
                )
        if start.is_complete:
            next(batches, _END)
        return iterator

    def _check_rows(self, was: Mapping[str, Any], given: int) -> None:
        here = describe_loader(self._loader)
        differing = changed({key: was[key] for key in IN_A_RUN if was[key] is not None}, here)
        if given == 0 or not differing:
            return
        said = (
            f"{self._name} gives other batches than when the checkpoint was made, after {given} of "
            f"a pass: {', '.join(differing)}"
        )
        remedy = "pass the same data and the same options of the loader, or"
        if None not in (was["batches"], here["batches"]) and here["batches"] < was["batches"]:
            raise DataLoaderError(
                f"{said}; {remedy} go on from a checkpoint of the end of an epoch"
            )
        warn(
            f"{said}. Rows may come twice or not at all in this epoch; {remedy} change them at the "
            "end of an epoch",
            CheckpointWarning,
        )


_END = object()
