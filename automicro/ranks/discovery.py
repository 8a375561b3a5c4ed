"""Which ranks train a model together: found from what it is wrapped in.

Ranks say a word to each other before they have votes: in the store that they met in.

Nobody waits for a rank that could not come this far, as long as it says so.

What wrappers need lies in `automicro.ranks.guards.wrappers`: one process need not import it.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch.distributed as dist
from torch import nn

from automicro.errors import PeerFailedError, PeerLostError, RankError, describe_error
from automicro.modules import ModuleIndex, is_parallel
from automicro.ranks.coordinated import CoordinatedRanks
from automicro.ranks.exchange import (
    AloneExchange,
    Exchange,
    GlooGroup,
    TreeExchange,
    plan_levels,
    ranks_by_node,
)
from automicro.ranks.guards.collectives import open_entrance
from automicro.ranks.guards.guard import commons_of_group, opened_commons
from automicro.ranks.heartbeat import RollCall, watch_peers
from automicro.ranks.interface import TOLD, OneRank, Ranks
from automicro.ranks.votes import Votes
from automicro.ranks.warm_up import WarmUp
from automicro.torch_private_distributed import (
    PrefixStore,
    Store,
    default_store,
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
    from automicro.ranks.guards.wrappers import (
        data_parallel_size,
        find_guards,
        refuse_uncovered,
        uses,
    )

    commons = commons_of_group(_open_votes)
    guards = find_guards(modules, commons)
    size = data_parallel_size(modules)
    if size is not None:
        refuse_uncovered(modules)
    copies = commons.votes.world_size // (size or 1)
    name = f"Microbatcher {commons.count()} ({type(modules[0]).__name__})"
    warm_up = WarmUp(uses(modules, guards), commons.connected)
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
