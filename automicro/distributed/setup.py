"""Finding out what a model is wrapped in, and guarding it."""

import os
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automicro.distributed.collectives import CollectivesGuard, runs_collectives
from automicro.distributed.coordination import CoordinatedRanks
from automicro.distributed.ddp import DdpGuard
from automicro.distributed.exchange import AloneExchange, Exchange, TreeExchange
from automicro.distributed.fsdp import FsdpGuard
from automicro.distributed.groups import GlooGroup
from automicro.distributed.guard import Guard
from automicro.distributed.roll_call import RollCall
from automicro.distributed.topology import plan_levels
from automicro.distributed.votes import Votes
from automicro.distributed.watching import watch_peers
from automicro.ranks import OneRank, Ranks
from automicro.torch_private_distributed import default_store, num_data_parallel

TIMEOUT_SECONDS = 600.0


def coordinate(modules: Sequence[nn.Module], *, timeout_seconds: float = TIMEOUT_SECONDS) -> Ranks:
    """What a step of these modules needs of the other ranks. All ranks call it.

    Args:
        modules: the model, then further modules that take part, wrapped already.
        timeout_seconds: how long a vote waits for the slowest rank, which may compile, read data
            or write a checkpoint meanwhile.

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
    exchange = open_exchange(timeout_seconds=timeout_seconds)
    votes = Votes(exchange, roll_call=_roll_call(), watch=watch_peers(exchange))
    guards = find_guards(modules, votes)
    size = _data_parallel_size(modules)
    if size is not None:
        _refuse_uncovered(modules)
    copies = votes.world_size // (size or 1)
    return CoordinatedRanks(votes, guards, copies=copies)


def is_parallel(modules: Sequence[nn.Module]) -> bool:
    """Whether modules communicate with other ranks.

    >>> is_parallel([nn.Linear(2, 2)])
    False
    """
    wrappers = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    return runs_collectives(modules) or any(
        isinstance(module, wrappers) for root in modules for module in root.modules()
    )


def find_guards(modules: Sequence[nn.Module], votes: Votes) -> list[Guard]:
    """A guard for each wrapper among modules.

    Raises:
        ValueError: a wrapper that cannot be guarded.
    """
    everything = list({id(each): each for root in modules for each in root.modules()}.values())
    if any(isinstance(each, FullyShardedDataParallel) for each in everything):
        raise ValueError(
            "the model is wrapped by FullyShardedDataParallel, which cannot go on after running "
            "out of memory; use fully_shard (FSDP2)"
        )
    replicated = [each for each in everything if isinstance(each, DistributedDataParallel)]
    is_sharded = any(isinstance(each, FSDPModule) for each in everything)
    communicates = runs_collectives(modules)
    # Collectives that are played must be all that peers wait for.
    always_guarded = communicates or len(replicated) + is_sharded > 1
    guards: list[Guard] = [
        DdpGuard(each, votes, always_guarded=always_guarded) for each in replicated
    ]
    if is_sharded:
        guards.append(FsdpGuard(modules, votes, always_guarded=always_guarded))
    if communicates:
        guards.append(CollectivesGuard(modules, votes))
    return guards


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


def open_exchange(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Exchange:
    """An exchange among all ranks on groups of its own. All ranks call it.

    The number of ranks on a node is read from ``LOCAL_WORLD_SIZE``, which torchrun sets.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return AloneExchange()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    levels = plan_levels(world_size, min(local_world_size, world_size))
    blocks = [block for level in levels for block in level]
    groups = [(block, GlooGroup(block, timeout_seconds=timeout_seconds)) for block in blocks]
    own = [group for block, group in groups if rank in block]
    return TreeExchange(own, height=len(levels), rank=rank, world_size=world_size)


def _roll_call() -> RollCall:
    return RollCall(default_store(), rank=dist.get_rank(), world_size=dist.get_world_size())
