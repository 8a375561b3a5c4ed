"""Wrapped models that take part in a step and were given to no Microbatcher."""

import gc
import weakref
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from automicro.distributed.votes import Votes
from automicro.torch_private_distributed import collectives_of, comm_hooks

# Not in the hook, which is copied and pickled with its model.
_votes: weakref.WeakSet[Votes] = weakref.WeakSet()
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_stranger(model: nn.Module) -> NoReturn:
    """Say that a model's collectives run in an attempt that does not guard them.

    Raises:
        ValueError: always.
    """
    if isinstance(model, DistributedDataParallel):
        name = f"{type(model.module).__name__} in DistributedDataParallel"
    else:
        name = f"{type(model).__name__} (fully_shard)"
    raise ValueError(
        f"the forward uses a second wrapped model, {name}, that this Microbatcher does not know: "
        "where one rank runs out of memory, the others would wait in its collectives for ever; "
        "pass it as modules=[…], or call it outside of the step"
    )


def watch_for_strangers(votes: Votes) -> None:
    """Let every wrapped model that nobody guards refuse to communicate in an attempt.

    Args:
        votes: that know of an attempt.

    >>> from automicro.distributed import SimulatedWorld
    >>> watch_for_strangers(Votes(SimulatedWorld(1).exchange(0)))
    """
    _votes.add(votes)
    for found in gc.get_objects():  # torch keeps no list of wrappers
        # Not isinstance(), which asks objects, and there are such as answer with an error.
        if not issubclass(type(found), DistributedDataParallel | FSDPModule):
            continue
        if found not in _watched and not _is_guarded(found):
            found.register_forward_pre_hook(_refuse_in_attempts, prepend=True)  # before a gather
            _watched.add(found)


def _refuse_in_attempts(model: nn.Module, inputs: Any) -> None:
    is_in_attempt = any(votes.is_in_attempt for votes in _votes)
    if is_in_attempt and not _is_guarded(model) and _communicates(model):
        refuse_stranger(model)


def _is_guarded(model: nn.Module) -> bool:
    """Whether a guard is asked before its collectives, and can refuse them itself."""
    if isinstance(model, DistributedDataParallel):
        return any(getattr(hook, "is_guarded", False) for hook, _ in comm_hooks(model))
    assert isinstance(model, FSDPModule)
    return any(hasattr(each, "guard") for each in collectives_of(model) or ())


def _communicates(model: nn.Module) -> bool:
    if isinstance(model, DistributedDataParallel):
        sends = model.will_sync_module_buffers()  # type: ignore[no-untyped-call]
        return torch.is_grad_enabled() or bool(sends)
    assert isinstance(model, FSDPModule)
    return collectives_of(model) is not None  # else all that it has lies in wrapped children
