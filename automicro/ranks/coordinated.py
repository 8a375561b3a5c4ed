"""Coordination of several ranks: agreeing, voting and stopping, with guards for wrappers."""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automicro.errors import (
    PeerFailedError,
    PeerLostError,
    PeerStoppedError,
    RankError,
    add_note,
    describe_error,
    facts_of,
    remember,
)
from automicro.memory.oom import Failure, classify
from automicro.modules import is_parallel, runs_collectives
from automicro.ranks.exchange import Exchange, GlooGroup, plan_levels, ranks_by_node
from automicro.ranks.guards.collectives import (
    Call,
    keep_in_step,
    keeping_between_steps,
    open_entrance,
    own_collectives,
)
from automicro.ranks.guards.ddp import DdpGuard
from automicro.ranks.guards.fsdp import FsdpGuard
from automicro.ranks.guards.guard import (
    CollectivesGuard,
    GroupState,
    Guard,
    opened_state,
    state_of_group,
)
from automicro.ranks.heartbeat import watch_peers
from automicro.ranks.interface import (
    Agreement,
    HeldBackError,
    OneRank,
    Proposal,
    Ranks,
    Report,
    Status,
    StrayedError,
    Sync,
)
from automicro.ranks.votes import Votes
from automicro.ranks.warm_up import Use, WarmUp
from automicro.torch_private_distributed import PrefixStore, Store, default_store, num_data_parallel

_CANNOT_TAKE_BACK = (
    "automicro: messages between ranks (send, isend) had not been received at that point, and a "
    "second attempt would mistake them for its own; exchange with all_to_all or all_gather "
    "instead, or use a fixed microbatch_size that fits on every rank"
)

logger = logging.getLogger(__name__)


class CoordinatedRanks(Ranks):
    """Implementation for several processes."""

    def __init__(
        self,
        votes: Votes,
        guards: Sequence[Guard] = (),
        *,
        warm_up: WarmUp | None = None,
        copies: int = 1,
        name: str = "",
    ) -> None:
        super().__init__()
        self._votes = votes
        self._guards = guards
        self._warm_up = warm_up or WarmUp([], set())
        self.rank = votes.rank
        self.world_size = votes.world_size
        self.copies = copies
        self._name = name
        self._looks_alone = False
        self._trained: list[int] = []  # ids of the parameters
        self._strayed: StrayedError | None = None  # at a collective of this attempt
        self.sync = Sync.REPLICAS_LAST
        self._at = 0, 1  # level and size of the attempt
        self.is_alone = False
        self.communicates_in_forward = any(each.communicates_in_forward for each in guards)
        self.communication_share = self._warm_up.share

    def sync_late(self) -> None:
        """Reduce sharded gradients with the last microbatch, if wrappers and memory allow it."""
        if any(isinstance(guard, FsdpGuard) for guard in self._guards):
            self.sync = Sync.LAST

    @property
    def num_votes(self) -> int:
        """Number of exchanges, agreements included."""
        return self._votes.count

    def agree(self, proposal: Proposal) -> Agreement:
        self._begin_anew()
        try:
            # Work that might fail for lack of memory comes before the agreement. Right after it the
            # peers enter collectives, where a failed rank would leave them waiting.
            self._warm_up.prepare()
            for guard in self._guards:
                guard.prepare()
        except BaseException as error:
            self.fail(error)
            raise
        # The earliest reduction that any rank needs applies to all.
        proposal = replace(proposal, sync=self._latest_here())
        with self._between_steps():
            # The name of this point includes groups to be connected, so ranks that differ get an
            # error instead of mismatched collectives.
            agreement = self._votes.agree(proposal, asker=f"{self._name}{self._warm_up}")
        self.synced = agreement.sync if proposal.training else Sync.EACH
        self._at = level, size = agreement.level, agreement.microbatch_size
        # Whole gradients once did not fit at this size, on any rank.
        if size >= self.whole_fits_below.get(level, math.inf):
            self.synced = min(self.synced, Sync.REPLICAS_LAST)
        try:
            # If no rank has rows, no collective of a step runs.
            if agreement.max_extent:
                with own_collectives():
                    self._warm_up.run()
                    for guard in self._guards:
                        guard.meet(training=proposal.training)
        except BaseException as error:
            self.fail(error)
            raise
        return agreement

    def _latest_here(self) -> Sync:
        return min([self.sync, *(guard.latest for guard in self._guards)])

    def drop_whole_gradients(self) -> bool:
        if self.synced is not Sync.LAST:
            return False
        level, size = self._at
        self.whole_fits_below[level] = size
        return True

    def settle(self, parameters: Sequence[Tensor] = ()) -> None:
        for guard in self._guards:
            guard.settle()
        trained = [id(each) for each in parameters if each.requires_grad]
        # Compared by id, which is quick: this runs in every step and parameters seldom change.
        if trained and trained != self._trained:
            for guard in self._guards:
                guard.require_known(parameters)
            self._trained = trained

    def begin(self, num_microbatches: int, *, training: bool = True) -> None:
        if num_microbatches == 1:
            self.synced = Sync.EACH  # the only microbatch is the last one
        try:
            for guard in self._guards:
                guard.open(num_microbatches, training=training, sync=self.synced)
        except BaseException as error:
            self.fail(error)
            raise
        self._votes.is_in_attempt = True
        self._strayed = None
        keep_in_step(self)

    @contextlib.contextmanager
    def microbatch(self, index: int, *, weightless: bool = False) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for guard in self._guards:
                stack.enter_context(guard.microbatch(index, weightless=weightless))
            yield

    def before(self, call: Call) -> None:
        """Vote before a collective of a model, a loss or a callback."""
        # The guard has already voted on it.
        if any(guard.owns(call) for guard in self._guards):
            return
        if self._looks_alone:
            raise ValueError(f"{call}: only this rank checks the loss, so no other rank would join")
        if call.name == "recv_any_source":
            raise ValueError(
                "a message from any rank (recv without src) cannot be voted on, so this rank "
                "would wait forever if the sender ran out of memory; pass src=…"
            )
        if not self._votes.is_in_attempt:
            with self._between_steps():
                self._votes.collective(call, where="between batches")
            return
        # Peers that replay vote next at the end of the microbatch or attempt, and a vote from here
        # would be paired with that one.
        if any(guard.is_replaying for guard in self._guards):
            self._strayed = StrayedError(f"{call} was not known")
            raise self._strayed
        for guard in self._guards:
            guard.stay_guarded()  # replayed collectives must be all that peers wait for
        self._votes.collective(call, where="in a step")

    @contextlib.contextmanager
    def looking_alone(self) -> Iterator[None]:
        self._looks_alone = True
        try:
            yield
        finally:
            self._looks_alone = False

    def voted(self) -> AbstractContextManager[None]:
        return own_collectives()

    def guarding_calls(self) -> AbstractContextManager[None]:
        return keeping_between_steps(self)

    def _leave(self) -> None:
        """End the attempt on this rank."""
        self._votes.is_in_attempt = False
        keep_in_step(None)

    def vote(self, report: Report = Report()) -> Report:  # noqa: B008 (it is frozen)
        if self._strayed is not None:
            raise self._strayed  # user code caught it
        strayed = any(guard.has_strayed for guard in self._guards)
        self._leave()
        # One exchange for all guards.
        own = [each for guard in self._guards for each in guard.unused]
        any_strayed, together, unused = self._votes.commit(report, flag=strayed, unused=own)
        for guard in self._guards:
            count = len(guard.unused)
            guard.commit(any_strayed=any_strayed, unused=unused[:count])
            unused = unused[count:]
        return together

    def stop(self, failure: BaseException, status: Status, highs: Sequence[float] = ()) -> Status:
        self._leave()
        self._strayed = None
        if isinstance(failure, RankError) and not isinstance(failure, PeerStoppedError):
            return Status.FATAL  # no rank is left to vote with
        # A rank that learned of the failure by a vote replays nothing: all ranks stopped at that
        # vote, and no peer waits in a collective.
        is_first_to_know = self._votes.stopped is None
        if is_first_to_know:
            if self._votes.has_messages_under_way and status is not Status.FATAL:
                failure.add_note(_CANNOT_TAKE_BACK)
                status = Status.FATAL
            self._play_rest()
        # Gradients held back say nothing about the collectives to come.
        has_strayed = isinstance(failure, StrayedError) and not isinstance(failure, HeldBackError)
        # Peers reach their next vote only after the collectives just replayed.
        together = self._votes.report(status, highs, strayed=has_strayed)
        self.told = self._votes.told
        # Its error is raised later: if a rank is fatal, all ranks, including this one, first
        # exchange reasons below.
        trouble = self._recover()
        self._votes.clear()
        if together is Status.FATAL:
            is_culprit = is_first_to_know and status is Status.FATAL
            self._raise_reasons(failure if is_culprit else None, rolls_back=True)
        elif trouble is not None:
            self.fail(trouble)
            raise trouble
        elif is_first_to_know:
            logger.debug("rank %d ended the attempt: %s", self.rank, failure)
        return together

    def _recover(self) -> Exception | None:
        try:
            with own_collectives():
                for guard in self._guards:
                    if self._votes.any_strayed:
                        # Collectives that depend on the input cannot be predicted.
                        guard.stay_guarded()
                    guard.recover()
        except Exception as error:
            return error
        return None

    def _play_rest(self) -> None:
        try:
            for guard in self._guards:
                guard.play_rest()
        except Exception as error:
            if classify(error) is not Failure.RETRYABLE:
                self._votes.give_up(error, "the collectives of a batch")
            raise RankError(
                f"rank {self.rank} ran out of memory again during the collectives that its peers "
                "still wait for, so it cannot notify them; start again from the last checkpoint "
                "with a smaller microbatch_size"
            ) from error

    def fail(self, failure: BaseException) -> None:
        if isinstance(failure, PeerLostError):
            self._votes.require_hosts(failure)
        if self._votes.is_over or isinstance(failure, RankError) or facts_of(failure).stopped:
            return  # all ranks know
        self._votes.report(Status.FATAL)
        self._raise_reasons(failure)

    def ready(self, point: str) -> None:
        with self._between_steps():
            self._votes.cast(point)

    def from_first(self, values: Iterable[float]) -> list[float]:
        return self.add_up(each if self.rank == 0 else 0.0 for each in values)

    def from_rank(self, rank: int, message: bytes) -> bytes:
        point = f"a message of rank {rank}"
        # A vote first: a failed rank would not reach the broadcast, which has no guard.
        self.ready(point)
        sent = [message]
        try:
            with own_collectives():
                dist.broadcast_object_list(sent, rank)
        except RuntimeError as error:
            self._votes.give_up(error, point)
        return sent[0]

    def add_up(self, values: Iterable[float]) -> list[float]:
        with self._between_steps():
            return self._votes.add_up(list(values))

    def most(self, value: float) -> float:
        with self._between_steps():
            return self._votes.most(value)

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Treat a peer's stop outside an attempt as a permanent failure."""
        self._begin_anew()
        try:
            yield
        except PeerStoppedError:
            self._raise_reasons(None)
            raise

    def _begin_anew(self) -> None:
        """Clear an error that all ranks know about, so that they can continue together."""
        if self._votes.is_over:
            self._votes.is_over = False
            self._votes.clear()

    def _raise_reasons(self, own: BaseException | None, *, rolls_back: bool = False) -> None:
        """Exchange the reasons of failed ranks, and raise them unless this rank failed."""
        self._votes.is_over = True
        reasons = self._votes.explain(None if own is None else describe_error(own))
        if own is None:
            raise PeerFailedError(
                f"rank {self.rank} of {self.world_size} stops because another rank failed:\n"
                f"{reasons}\n{self._votes.state_here(rolls_back=rolls_back)} Fix the cause on "
                "that rank (its log has the traceback), and start again from the last checkpoint."
            )
        _note_told(own, self.rank, self.world_size, "the other ranks were notified and stop too")


TIMEOUT_SECONDS = 600.0
"""How long a vote waits for the slowest rank, which might be compiling or writing a checkpoint."""


_POLL_SECONDS = 0.01


_FAILED = "failed"


_group: object = None


_count = 0


def _exchange_words(word: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[str]:
    """Exchange one word per rank, in rank order. Each rank calls this or `_say_failed`."""
    # Over the store, because groups for votes are created later, and because a failed rank can
    # report there without waiting.
    store, rank, world_size = _meeting(), dist.get_rank(), dist.get_world_size()
    keys = list(map(str, range(world_size)))
    store.set(keys[rank], _plain(word))
    end = time.monotonic() + timeout_seconds
    # Polled, because a blocking wait for these keys would not notice that a rank failed.
    while not store.check(keys):
        if store.check([_FAILED]):
            raise PeerFailedError(
                f"rank {rank} of {world_size} stops because another rank failed:\n"
                f"{_read(store, _FAILED)}\nFix the cause on that rank (its log has the "
                "traceback), and start again."
            )
        if time.monotonic() > end:
            missing = ", ".join(key for key in keys if not store.check([key]))
            raise PeerLostError(
                f"rank {rank} of {world_size} waited {timeout_seconds:g} s for rank {missing} to "
                "create its Microbatcher or Trainer. The log of the missing rank has the cause; "
                "start all processes again"
            )
        time.sleep(_POLL_SECONDS)
    return [_read(store, key) for key in keys]


def _say_failed(reason: str) -> None:
    """Report, without waiting, that this rank will not join the next exchange of words, and why."""
    _meeting().set(_FAILED, _plain(f"rank {dist.get_rank()}: {reason}"))


def _plain(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _read(store: Store, key: str) -> str:
    word: str = store.get(key).decode(errors="replace")
    return word


def _meeting() -> Store:
    """Return a namespace of the store that is used for one exchange only."""
    global _group, _count
    group = dist.group.WORLD
    assert group is not None
    # A world that was destroyed and created again counts from the beginning.
    if _group is not group:
        _group, _count = group, 0
    _count += 1
    return PrefixStore(f"automicro/words of {group.group_name}, {_count}", default_store())


def coordinate(modules: Sequence[nn.Module]) -> Ranks:
    """Return the coordination that steps of these modules need. All ranks must call this.

    >>> type(coordinate([nn.Linear(2, 2)])).__name__
    'OneRank'
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    if not is_parallel(modules):
        return OneRank()  # each rank trains its own model
    group = state_of_group(_open_votes)
    guards = _find_guards(modules, group)
    for guard in guards:
        guard.settle()
    size = _data_parallel_size(modules)
    if size is not None:
        _refuse_uncovered(modules)
    # Ranks of tensor parallelism share their rows, which count once.
    copies = group.votes.world_size // (size or 1)
    name = f"Microbatcher {group.count()} ({type(modules[0]).__name__})"
    warm_up = WarmUp(_uses(modules, guards), group.connected)
    return CoordinatedRanks(group.votes, guards, warm_up=warm_up, copies=copies, name=name)


def announce_absence(error: Exception) -> None:
    """Notify the other ranks, once, that this rank will not join them."""
    if isinstance(error, RankError) or facts_of(error).is_told:
        return
    group = opened_state()
    if group is not None:
        CoordinatedRanks(group.votes).fail(error)
        return
    _say_failed(describe_error(error))
    _note_told(error, dist.get_rank(), dist.get_world_size(), "the other ranks were notified")


def wait_for_all(point: str) -> None:
    """Wait until all ranks arrive, or raise if one reports that it will not. All must call this."""
    group = opened_state()
    if group is None:
        _exchange_words(point)
    else:
        CoordinatedRanks(group.votes).ready(point)


def _open_votes() -> Votes:
    exchange = open_exchange()
    open_entrance()
    return Votes(exchange, watch_peers(exchange))


def _find_guards(modules: Sequence[nn.Module], group: GroupState) -> list[Guard]:
    """Return a guard for each wrapper, reusing existing guards."""
    # By id: a module shared by two roots gets one guard.
    everything = list({id(each): each for root in modules for each in root.modules()}.values())
    if any(isinstance(each, FullyShardedDataParallel) for each in everything):
        raise ValueError(
            "the model is wrapped by FullyShardedDataParallel, which cannot continue after running "
            "out of memory; use fully_shard (FSDP2)"
        )
    votes = group.votes
    guards: list[Guard] = []
    for each in everything:
        if isinstance(each, DistributedDataParallel):
            guards.append(group.guard_of([each], functools.partial(DdpGuard, each, votes)))
    for root, sharded in _sharded_parts(modules):
        guards.append(group.guard_of(sharded, functools.partial(FsdpGuard, [root], votes)))
    if runs_collectives(modules):
        guards.append(CollectivesGuard(modules))
    if len(guards) > 1:
        # Replayed collectives must be all that peers wait for.
        for guard in guards:
            guard.stay_guarded()
    return guards


def _uses(modules: Sequence[nn.Module], guards: Sequence[Guard]) -> list[Use]:
    """Return the collectives of steps: those of wrappers, and the sum of losses."""
    found = [use for guard in guards for use in guard.uses()]
    lying = (each.device for root in modules for each in root.parameters())
    devices = dict.fromkeys([*(use.device for use in found), *lying])
    world = dist.group.WORLD
    assert world is not None
    return [*(Use("all_reduce", world, device) for device in list(devices)[:1]), *found]


def _sharded_parts(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return each module that has parts of its own with `fully_shard`, and these parts."""
    seen: set[int] = set()
    found = []
    for root in modules:
        sharded = [part for part in root.modules() if isinstance(part, FSDPModule)]
        if any(id(part) not in seen for part in sharded):
            found.append((root, list[nn.Module](sharded)))
        seen.update(map(id, sharded))
    return found


def _refuse_uncovered(modules: Sequence[nn.Module]) -> None:
    covered = {
        id(parameter)
        for root in modules
        for module in root.modules()
        if isinstance(module, DistributedDataParallel)
        for parameter in module.parameters()
    }
    for root in modules:
        for name, parameter in root.named_parameters():
            is_covered = id(parameter) in covered or isinstance(parameter, DTensor)
            if parameter.requires_grad and not is_covered:
                raise ValueError(
                    f"the parameter {name!r} of {type(root).__name__} is in no wrapper, so its "
                    "gradient would differ between ranks; wrap its module as well (also a loss "
                    "with parameters), or freeze it with requires_grad_(False)"
                )


def _data_parallel_size(modules: Sequence[nn.Module]) -> int | None:
    """Return the number of ranks with rows of their own, or None if all ranks share their rows."""
    everything = [each for root in modules for each in root.modules()]
    if any(isinstance(each, DistributedDataParallel) for each in everything):
        return dist.get_world_size()
    sharded = [each for each in everything if isinstance(each, FSDPModule)]
    if not sharded:
        if not any(isinstance(p, DTensor) for root in modules for p in root.parameters()):
            raise ValueError(
                "the model has SyncBatchNorm but no wrapper, so its ranks share statistics but "
                "not gradients; wrap it in DistributedDataParallel"
            )
        return None
    return max(num_data_parallel(each) for each in sharded)


def open_exchange() -> Exchange:
    """Open an exchange among all ranks, on groups of its own. All ranks must call this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return Exchange([], height=0, rank=0, world_size=1)
    told = _exchange_words(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    # Nodes might run different numbers of processes.
    levels = plan_levels(ranks_by_node([int(each) for each in told]))
    blocks = [block for level in levels for block in level]
    groups = [(block, GlooGroup(block, timeout_seconds=TIMEOUT_SECONDS)) for block in blocks]
    own = [group for block, group in groups if rank in block]
    return Exchange(own, height=len(levels), rank=rank, world_size=world_size)


def _note_told(error: BaseException, rank: int, world_size: int, told: str) -> None:
    add_note(error, f"automicro: this happened on rank {rank} of {world_size}; {told}")
    remember(error, is_told=True)
