"""Passes over a data loader that can be taken up again in the middle."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automicro.checkpoints.rng import derived_rng_state, restore_rng_state, rng_state
from automicro.data import LengthBatchSampler
from automicro.errors import CheckpointError, CheckpointWarning, DataLoaderError, warn
from automicro.ranks.interface import Ranks
from automicro.torch_private import forget_workers
from automicro.trainer.data.described import (
    IN_A_RUN,
    OF_SHARED_ORDER,
    changed,
    describe_loader,
)
from automicro.trainer.data.loading import (
    announce_epoch,
    begin,
    empty,
    generator_states,
    grouped,
    has_persistent_workers,
    num_batches,
    read_attributes,
    rest,
    restore_generators,
    write_attributes,
)
from automicro.trainer.data.sharing import shared_sampler
from automicro.trainer.same_on_all_ranks import require_same_order
from automicro.values import same_values


def _position_of(states: Sequence[Mapping[str, Any]], loader: Any, name: str) -> int:
    """How many batches of the order that all share were given."""
    reason = _why_another(states, loader, f"{name} ({type(loader).__name__})")
    if reason is not None:
        raise CheckpointError(reason)
    return _most_given(states)


def _most_given(states: Sequence[Mapping[str, Any]]) -> int:
    """Batches of the last pass, on the rank that had most."""
    return max(int(each["passes"][-1]["given"]) for each in states if each["passes"])


def _place_in_plan(
    states: Sequence[Mapping[str, Any]],
    sampler: LengthBatchSampler,
    name: str,
    *,
    accumulate_batches: int,
) -> dict[str, int]:
    """Where a `LengthBatchSampler` goes on, where another number of ranks saved its position."""
    was, place = states[0]["order"], states[0]["passes"][-1]["position"]
    if was["shared_by"] != type(sampler).__name__ or place is None:
        raise CheckpointError(
            f"{name} is shared out by a LengthBatchSampler, and was not; pass the same sampler"
        )
    had = was["world_size"] * states[0]["accumulate_batches"]
    if had != sampler.world_size * accumulate_batches:
        each, rest = divmod(had, sampler.world_size)
        remedy = (
            f"{had} are not a multiple of {sampler.world_size} ranks"
            if rest
            else f"pass accumulate_batches={each}"
        )
        raise CheckpointError(
            f"an optimization batch was made of {had} batches of {name} (ranks × "
            f"accumulate_batches), and here it would be of {sampler.world_size} × "
            f"{accumulate_batches}; {remedy}"
        )
    before = sampler.at(rank=0, world_size=was["world_size"])
    before.load_state_dict(place)
    return before.state_dict(batches_given=_most_given(states))


def _why_another(states: Sequence[Mapping[str, Any]], loader: Any, name: str) -> str | None:
    """Why there is no order that both share, or another one; None where all is the same."""
    was, here = states[0]["order"], describe_loader(loader)
    if states[0]["loader"] is not None or hasattr(loader, "load_state_dict"):
        return (
            f"{name} keeps a position of its own on each rank, which says nothing about other "
            "ranks' rows"
        )
    if None in (was["shared_by"], here["shared_by"]):
        where = "here" if here["shared_by"] is None else "in the checkpoint"
        return (
            f"{name} has no order that ranks share {where}, as a DataLoader over a data set with a "
            "length has, without a DistributedSampler; pass parallel='ddp' in one process, too, "
            "from the beginning of the run"
        )
    if differing := changed({key: was[key] for key in OF_SHARED_ORDER}, here):
        rows, ranks = was["entries_per_step"], here["world_size"]
        remedy = "pass the same data and the same sampler"
        if was["shared_by"] == here["shared_by"] and rows != here["entries_per_step"]:
            remedy = f"pass batch_size={rows // ranks}, which global_batch_size in a config does"
            if here["batch_size"] is None:
                remedy = "let the DataLoader cut the batches (batch_size=…)"
            elif rows % ranks:
                remedy = f"{rows} are not a multiple of {ranks} ranks"
        return f"{name} had {', '.join(differing)}; {remedy}"
    for place in was["generators"]:
        first, *others = [each["passes"][-1]["generators"].get(place) for each in states]
        if not all(same_values(first, each) for each in others):
            return f"the generator {place} of {name} stood at another place on each rank"
    return None


logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Pass:
    """A pass, and how to begin it again.

    Attributes:
        epoch: that was announced.
        rng: where the generators of the process stood before it.
        generators: where those of the loader stood before it.
        attributes: plain values of the loader that passes before it had changed.
        position: of a `LengthBatchSampler` before it; None for any other.
        given: batches so far.
        is_complete: whether there are no more.
    """

    epoch: int
    rng: Mapping[str, Any]
    generators: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    position: Mapping[str, int] | None = None
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
        sampler = shared_sampler(loader)
        self._plans = sampler if isinstance(sampler, LengthBatchSampler) else None
        self.group_size = accumulate_batches
        self._name = name
        self._has_peers = has_peers
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

        Raises:
            DataLoaderError: a new pass gave no batch, or the loader is not the one that was saved.
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
        """Compare the order of the pass with that of other ranks. All call it, once it has begun.

        Raises:
            DesyncError: it is another one.
        """
        sampler = shared_sampler(self._loader)
        require_same_order(ranks, None if sampler is None else sampler.checksum, self._name)

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands, as tensors and plain values."""
        if self._loaded is not None:
            return dict(self._loaded)
        # Asking before a pass has begun makes torchdata's loader begin one.
        own = self._loader.state_dict() if self._passes and _keeps_state(self._loader) else None
        return {
            "persistent": has_persistent_workers(self._loader),
            "generators": generator_states(self._loader),
            "passes": [dict(vars(each)) for each in self._passes],
            "attributes": self._changed_attributes(),
            "loader": own,
            "order": describe_loader(self._loader),
            "accumulate_batches": self.group_size,
        }

    def reshard(self, states: Sequence[Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
        """The state for a rank in the middle of a pass, where another number of ranks saved it.

        Raises:
            CheckpointError: the batches to come would hold other rows than they would have.
        """
        order = describe_loader(self._loader)
        count = order["batches"]
        position, is_over = None, False
        if self._plans is not None:
            # The pass goes on from there, and gives none of its batches again.
            given = 0
            position = _place_in_plan(
                states, self._plans, self._name, accumulate_batches=self.group_size
            )
            self._plans.load_state_dict(position)
            is_over = len(self._plans) == 0
        else:
            given = _position_of(states, self._loader, self._name)
        last = {
            **states[0]["passes"][-1],
            # Workers take their random numbers from it.
            "rng": derived_rng_state(
                states[0]["passes"][-1]["rng"], rank=rank, world_size=order["world_size"]
            ),
            # Of the last batches of a pass, some ranks have no rows.
            "given": given if count is None else min(given, count),
            "position": position,
            "is_complete": is_over,
        }
        return {
            **states[0],
            "persistent": has_persistent_workers(self._loader),
            "passes": [last],
            "order": {**order, "seed": states[0]["order"]["seed"]},
        }

    def between_epochs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state from which the next pass begins anew, in the order that its generators give."""
        return {**state, "passes": [], "loader": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next `batches`.

        Raises:
            DataLoaderError: the loader is not the one that was saved.

        Warns:
            CheckpointWarning: it has become longer, its batches have other rows, or it cannot begin
                again.
        """
        passes = [_Pass(**each) for each in state["passes"]]
        if state["loader"] is not None and not _keeps_state(self._loader):
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
        if passes and state["persistent"] != has_persistent_workers(self._loader):
            was, now = ("with", "without") if state["persistent"] else ("without", "with")
            raise DataLoaderError(
                f"the checkpoint was made {was} persistent workers, and {self._name} is {now}: "
                "its batches would come in another order; pass persistent_workers="
                f"{state['persistent']}"
            )
        self._passes, self._loaded = passes, state
        restore_generators(self._loader, state["generators"])
        sampler = shared_sampler(self._loader)
        if sampler is not None and state["order"]["shared_by"] is not None:
            sampler.seed = state["order"]["seed"]  # of the passes to come
        if self._plans is not None and passes and not passes[-1].is_complete:
            self._go_to(passes[-1])

    def _go_to(self, start: _Pass) -> None:
        """Let the sampler stand where it stood before a pass."""
        if self._plans is None:
            return
        if start.position is None:
            raise CheckpointError(
                f"the batches of {self._name} come from a LengthBatchSampler, and those of the "
                "checkpoint did not; pass the same sampler, or go on from a checkpoint of the end "
                "of an epoch"
            )
        self._plans.load_state_dict(start.position)

    def _begin(self, epoch: int) -> Iterator[Any]:
        if not has_persistent_workers(self._loader):
            self._passes.clear()
        start = _Pass(
            epoch=epoch,
            rng=rng_state(),
            generators=generator_states(self._loader),
            attributes=self._changed_attributes(),
        )
        self._passes.append(start)
        announce_epoch(self._loader, epoch)
        if self._plans is not None:
            start.position = self._plans.state_dict(batches_given=0)
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
            elif has_persistent_workers(self._loader):
                forget_workers(self._loader)
                self._warn_of_repetition(is_in_the_middle=is_in_the_middle)
                for number, each in enumerate(self._passes, start=1):
                    iterator = self._repeat(each, number)
            elif is_in_the_middle:
                assert last is not None
                self._check_repeatable(last.given)
                iterator = self._repeat(last, 1)
        finally:
            restore_generators(self._loader, self._loaded["generators"])
            write_attributes(self._loader, self._loaded["attributes"])
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
        restore_rng_state(last.rng)
        self._go_back(last)
        announce_epoch(self._loader, last.epoch)
        iterator = begin(self._loader)
        if not is_in_the_middle and not last.is_complete:
            for batch in rest(iterator):  # its end has not been seen
                del batch
        return iterator

    def _repeat(self, start: _Pass, number: int) -> Iterator[Any]:
        """Begin a pass once more and throw away the batches that it gave."""
        logger.info(
            "%s: making the %d batches of pass %d of %d again that were trained on",
            self._name,
            start.given,
            number,
            len(self._passes),
        )
        restore_rng_state(start.rng)
        restore_generators(self._loader, start.generators)
        self._go_back(start)
        announce_epoch(self._loader, start.epoch)
        self._go_to(start)
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

    def _changed_attributes(self) -> dict[str, Any]:
        """Plain values of the loader that are no longer what they were before any pass."""
        first = self._first_attributes
        return {
            place: value
            for place, value in read_attributes(self._loader).items()
            if place not in first or not same_values(first[place], value)
        }

    def _go_back(self, start: _Pass) -> None:
        """Let plain values of the loader be as they were before a pass."""
        write_attributes(self._loader, {**self._first_attributes, **start.attributes})

    def _warn_of_repetition(self, *, is_in_the_middle: bool) -> None:
        earlier = len(self._passes) - is_in_the_middle
        if earlier > 0:
            logger.warning(
                "automicro: %s: persistent workers go on with their random numbers from pass to "
                "pass, so the earlier ones are made again (%d); a run with "
                "persistent_workers=False need not",
                self._name,
                earlier,
            )

    def _check_repeatable(self, given: int) -> None:
        # Only an iterator is its own iterator; asking a loader for one may start workers.
        if isinstance(self._loader, Iterator):
            warn(
                f"{self._name} is an iterator ({type(self._loader).__name__}), which cannot begin "
                f"again: {given} batches are taken from it and thrown away, which is right only "
                "if it is new and gives the same ones. Pass what can begin again, such as a "
                "DataLoader, or give it state_dict and load_state_dict",
                CheckpointWarning,
            )

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


def _keeps_state(loader: object) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
