"""What modules are wrapped in, and what guards it: imports torch's wrappers, which takes time."""

import functools
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automicro.modules import runs_collectives
from automicro.ranks.guards.collectives import CollectivesGuard
from automicro.ranks.guards.ddp import DdpGuard
from automicro.ranks.guards.fsdp import FsdpGuard
from automicro.ranks.guards.guard import Commons, Guard
from automicro.ranks.warm_up import Use
from automicro.torch_private_distributed import num_data_parallel


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


def uses(modules: Sequence[nn.Module], guards: Sequence[Guard]) -> list[Use]:
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


def refuse_uncovered(modules: Sequence[nn.Module]) -> None:
    """Refuse parameters that need gradients and that no wrapper has, where others are sharded.

    Raises:
        ValueError: there are such.
    """
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


def data_parallel_size(modules: Sequence[nn.Module]) -> int | None:
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
