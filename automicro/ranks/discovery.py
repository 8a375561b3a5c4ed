"""Which ranks train a model together: found from what it is wrapped in, and guarded.

Which ranks train a model together: found from what it is wrapped in.

Ranks say a word to each other before they have votes: in the store that they met in.

Nobody waits for a rank that could not come this far, as long as it says so.

Finding out what a model is wrapped in, and guarding it.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automicro.errors import PeerFailedError, PeerLostError, RankError, describe_error
from automicro.modules import ModuleIndex, is_parallel, runs_collectives
from automicro.ranks.coordinated import CoordinatedRanks
from automicro.ranks.exchange import (
    AloneExchange,
    Exchange,
    GlooGroup,
    TreeExchange,
    plan_levels,
    ranks_by_node,
)
from automicro.ranks.guards.collectives import CollectivesGuard, open_entrance
from automicro.ranks.guards.ddp import DdpGuard
from automicro.ranks.guards.fsdp import FsdpGuard
from automicro.ranks.guards.guard import Commons, Guard, commons_of_group, opened_commons
from automicro.ranks.heartbeat import RollCall, watch_peers
from automicro.ranks.interface import TOLD, OneRank, Ranks
from automicro.ranks.votes import Votes
from automicro.ranks.warm_up import Use, WarmUp
from automicro.torch_private_distributed import (
    PrefixStore,
    Store,
    default_store,
    num_data_parallel,
)

P = ParamSpec("P")


def find_ranks(modules: Sequence[nn.Module]) -> Ranks:
    """The ranks that train modules together. All of them call it.

    Raises:
        ValueError: a wrapper under which no attempt can be undone, or a lazy module in it.

    >>> find_ranks([nn.Linear(2, 2)]).world_size
    1
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()

    ranks = coordinate(modules)
    if not ranks.is_alone and ModuleIndex(modules).is_lazy:
        raise ValueError(
            "some module takes its shapes from its first input (a lazy module), which several "
            "ranks cannot do together; run the model once on one row before it is wrapped"
        )
    return ranks


def telling_of_failure(
    construct: Callable[P, None],
) -> Callable[P, None]:
    """Let a constructor that fails on this rank tell the others, who would wait for it.

    Args:
        construct: an ``__init__`` whose first argument, ``model``, is wrapped for several ranks
            where it is for them.
    """

    @functools.wraps(construct)
    def telling(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            construct(*args, **kwargs)
        except Exception as error:
            tell_of_construction(args[1] if len(args) > 1 else kwargs.get("model"), error)
            raise

    return telling


def tell_of_construction(model: Any, error: Exception, *, is_shared: bool = False) -> None:
    """Tell the other ranks, if there are any, that this one could not make what all of them make.

    Args:
        model: of which this rank would have trained its part.
        error: why it cannot.
        is_shared: whether the model was to be wrapped for several ranks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return

    if is_shared or (isinstance(model, nn.Module) and is_parallel([model])):
        tell_of_absence(error)


TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.01
_FAILED = "failed"

_group: object = None
_count = 0


def exchange_words(word: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[str]:
    """The words of all ranks, in order. All ranks call it, or `say_failed` in its place.

    Args:
        word: of this rank.
        timeout_seconds: how long to wait for the slowest.

    Raises:
        PeerFailedError: a rank said that it failed.
        PeerLostError: a rank said nothing.
    """
    store, rank, world_size = _meeting(), dist.get_rank(), dist.get_world_size()
    keys = list(map(str, range(world_size)))
    store.set(keys[rank], _plain(word))
    end = time.monotonic() + timeout_seconds
    while not store.check(keys):
        if store.check([_FAILED]):
            raise PeerFailedError(
                f"rank {rank} stops because another rank failed:\n{_read(store, _FAILED)}\nMend "
                "the cause on that rank (its log has the traceback), and start again."
            )
        if time.monotonic() > end:
            missing = ", ".join(key for key in keys if not store.check([key]))
            raise PeerLostError(
                f"rank {rank} of {world_size} waited {timeout_seconds:g} s for rank {missing} to "
                "make its Microbatcher or Trainer, in vain; the log of the missing rank has the "
                "cause: start all processes again"
            )
        time.sleep(_POLL_SECONDS)
    return [_read(store, key) for key in keys]


def say_failed(reason: str) -> None:
    """Say that this rank will not come to the next exchange of words, and why; wait for nobody."""
    _meeting().set(_FAILED, _plain(f"rank {dist.get_rank()}: {reason}"))


def _plain(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _read(store: Store, key: str) -> str:
    word: str = store.get(key).decode(errors="replace")
    return word


def _meeting() -> Store:
    """A place in the store for this meeting alone: the next one has another."""
    global _group, _count
    group = dist.group.WORLD
    assert group is not None
    if _group is not group:
        _group, _count = group, 0
    _count += 1
    return PrefixStore(f"automicro/words of {group.group_name}, {_count}", default_store())


"""How long a vote waits for the slowest rank, which may compile or write a checkpoint."""


def coordinate(modules: Sequence[nn.Module]) -> Ranks:
    """What a step of these modules needs of the other ranks. All ranks call it.

    Args:
        modules: the model, then further modules that take part, wrapped already.

    Raises:
        ValueError: a wrapper, or an option of one, under which no attempt can be undone, or an
            ``AUTOMICRO_PEER_TIMEOUT`` that is no number of seconds.

    >>> type(coordinate([nn.Linear(2, 2)])).__name__
    'OneRank'
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    if not is_parallel(modules):
        return OneRank()  # every rank trains a model of its own
    commons = commons_of_group(_open_votes)
    guards = find_guards(modules, commons)
    size = _data_parallel_size(modules)
    if size is not None:
        _refuse_uncovered(modules)
    copies = commons.votes.world_size // (size or 1)
    name = f"Microbatcher {commons.count()} ({type(modules[0]).__name__})"
    warm_up = WarmUp(_uses(modules, guards), commons.connected)
    return CoordinatedRanks(commons.votes, guards, warm_up=warm_up, copies=copies, name=name)


def tell_of_absence(error: Exception) -> None:
    """Tell the other ranks that this one does not come to what they wait for, once.

    Args:
        error: why.
    """
    notes = getattr(error, "__notes__", [])
    if isinstance(error, RankError) or any(note.startswith(TOLD) for note in notes):
        return
    commons = opened_commons()
    if commons is not None:
        CoordinatedRanks(commons.votes).fail(error)
        return
    say_failed(describe_error(error))
    error.add_note(f"{TOLD} {dist.get_rank()} of {dist.get_world_size()}; the others were told")


def wait_for_all(point: str) -> None:
    """Go on where all ranks have come, or where one says that it will not. All ranks call it.

    Args:
        point: in the program, by a name.

    Raises:
        RankError: some rank does not come.
    """
    commons = opened_commons()
    if commons is None:
        exchange_words(point)
    else:
        CoordinatedRanks(commons.votes).ready(point)


def _open_votes() -> Votes:
    exchange = open_exchange()
    open_entrance()
    return Votes(exchange, roll_call=_roll_call(), watch=watch_peers(exchange))


def find_guards(modules: Sequence[nn.Module], commons: Commons) -> list[Guard]:
    """A guard for each wrapper among modules, the one that it has or a new one.

    Raises:
        ValueError: a wrapper that cannot be guarded.
    """
    everything = list({id(each): each for root in modules for each in root.modules()}.values())
    if any(isinstance(each, FullyShardedDataParallel) for each in everything):
        raise ValueError(
            "the model is wrapped by FullyShardedDataParallel, which cannot go on after running "
            "out of memory; use fully_shard (FSDP2)"
        )
    votes = commons.votes
    guards: list[Guard] = []
    for each in everything:
        if isinstance(each, DistributedDataParallel):
            guards.append(commons.guard_of([each], functools.partial(DdpGuard, each, votes)))
    for root, sharded in _sharded_parts(modules):
        guards.append(commons.guard_of(sharded, functools.partial(FsdpGuard, [root], votes)))
    if runs_collectives(modules):
        guards.append(CollectivesGuard(modules))
    if len(guards) > 1:
        # Collectives that are played must be all that peers wait for.
        for guard in guards:
            guard.stay_guarded()
    return guards


def _uses(modules: Sequence[nn.Module], guards: Sequence[Guard]) -> list[Use]:
    """The collectives of steps: those of the wrappers, and the one that adds up losses."""
    found = [use for guard in guards for use in guard.uses()]
    lying = (each.device for root in modules for each in root.parameters())
    devices = dict.fromkeys([*(use.device for use in found), *lying])
    world = dist.group.WORLD
    assert world is not None
    return [*(Use("all_reduce", world, device) for device in list(devices)[:1]), *found]


def _sharded_parts(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Each module that has parts of its own that `fully_shard` was applied to, and these."""
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
                    "gradient would be another on every rank; wrap what it belongs to as well "
                    "(a loss with parameters too), or freeze it with requires_grad_(False)"
                )


def _data_parallel_size(modules: Sequence[nn.Module]) -> int | None:
    """How many ranks have rows of their own; None where all work on the same rows.

    Raises:
        ValueError: ranks share statistics, and nothing averages their gradients.
    """
    everything = [each for root in modules for each in root.modules()]
    if any(isinstance(each, DistributedDataParallel) for each in everything):
        return dist.get_world_size()
    sharded = [each for each in everything if isinstance(each, FSDPModule)]
    if not sharded:
        if not any(isinstance(p, DTensor) for root in modules for p in root.parameters()):
            raise ValueError(
                "the model has SyncBatchNorm and no wrapper, so its ranks share statistics and "
                "not their gradients; wrap it in DistributedDataParallel"
            )
        return None
    return max(num_data_parallel(each) for each in sharded)


def open_exchange() -> Exchange:
    """An exchange among all ranks on groups of its own. All ranks call it.

    Each rank says how many there are on its node, by ``LOCAL_WORLD_SIZE``, which torchrun sets.

    Raises:
        PeerFailedError: another rank will not come.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return AloneExchange()
    told = exchange_words(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    # Nodes may have different numbers of processes.
    levels = plan_levels(ranks_by_node([int(each) for each in told]))
    blocks = [block for level in levels for block in level]
    groups = [(block, GlooGroup(block, timeout_seconds=TIMEOUT_SECONDS)) for block in blocks]
    own = [group for block, group in groups if rank in block]
    return TreeExchange(own, height=len(levels), rank=rank, world_size=world_size)


def _roll_call() -> RollCall:
    return RollCall(default_store(), rank=dist.get_rank(), world_size=dist.get_world_size())
