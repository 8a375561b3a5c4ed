"""Guards that keep the collectives of a wrapped model matched, and checks for unguarded models.

Each wrapper has a single guard, because its knowledge (the collectives to come, whether buffers are
stale) holds for every Microbatcher that uses the wrapper.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from automicro.ranks.guards.collectives import Call
from automicro.ranks.interface import Sync
from automicro.ranks.votes import Votes
from automicro.ranks.warm_up import Use
from automicro.torch_private_distributed import collectives_of, comm_hooks
from automicro.torch_private_execution import is_compiled


class Guard:
    """Guard between a wrapper (DDP, FSDP2) and its collectives. The defaults are of no wrapper."""

    # A guarded attempt votes before each collective, so no rank enters one that another will not
    # reach. Once its collectives are known, an attempt replays: it does not vote on them, and a
    # failed rank runs those that its peers still wait for.

    communicates_in_forward: bool = True
    """Whether a forward outside a step needs all ranks."""

    has_strayed: bool = False
    """Whether the attempt's collectives differed from the known ones."""

    unused: Sequence[bool] = ()
    """For each reduced parameter, whether no microbatch of this rank used it."""

    @property
    def latest(self) -> Sync:
        """How late the wrapper can reduce gradients with unchanged sums."""
        return Sync.LAST

    def uses(self) -> list[Use]:
        """Return the collectives of the wrapper, in the same order on all ranks."""
        return []

    def stay_guarded(self) -> None:
        """Never replay, because other collectives run in between."""

    def require_known(self, parameters: Sequence[Tensor]) -> None:
        """Refuse trained parameters inside the wrapper that it does not know."""

    def settle(self) -> None:
        """Undo, between steps, the effects of a forward outside a step."""

    def prepare(self) -> None:
        """Allocate memory for `meet`, before the ranks agree."""

    def meet(self, *, training: bool) -> None:
        """Run the collectives that precede an attempt, right after the ranks agreed."""
        # The agreement is the vote on them, so nothing may fail in between.

    def open(self, num_microbatches: int, *, training: bool, sync: Sync) -> None:
        """Begin an attempt on all ranks."""

    def microbatch(self, index: int, *, weightless: bool = False) -> AbstractContextManager[None]:
        """Return a context for forward and backward of a microbatch; it can end with a vote."""
        return contextlib.nullcontext()

    @property
    def is_replaying(self) -> bool:
        """Whether a rank that failed now would replay collectives before it votes."""
        return False

    def owns(self, call: Call) -> bool:
        """Return whether a collective about to run is the wrapper's own and already guarded."""
        return False

    def commit(self, *, any_strayed: bool, unused: Sequence[bool]) -> None:
        """End a successful attempt and learn from it."""

    def play_rest(self) -> None:
        """After a failure on this rank, run the collectives up to the peers' next vote."""

    def recover(self) -> None:
        """Restore the wrapper after a failed attempt. All ranks must call this."""


class CollectivesGuard(Guard):
    """Guard for collectives outside wrappers: each is voted on, and none is replayed."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        if any(is_compiled(module) for root in modules for module in root.modules()):
            raise ValueError(
                "the model is compiled and runs collectives of its own (SyncBatchNorm, tensor "
                "parallelism), which cannot be guarded inside compiled code; leave out "
                "torch.compile, or use a fixed microbatch size that fits on every rank"
            )


# Not in the hook, which is copied and pickled with its model.
_votes: weakref.WeakSet[Votes] = weakref.WeakSet()
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_stranger(model: nn.Module) -> NoReturn:
    """Refuse collectives of a model in an attempt that does not guard them."""
    if isinstance(model, DistributedDataParallel):
        name = f"{type(model.module).__name__} in DistributedDataParallel"
    else:
        name = f"{type(model).__name__} (fully_shard)"
    raise ValueError(
        f"the forward uses a second wrapped model, {name}, that this Microbatcher does not know: "
        "if one rank runs out of memory, the others would wait forever in its collectives; pass "
        "it as modules=[…], or call it outside the step"
    )


def watch_for_strangers(votes: Votes) -> None:
    """Let every wrapped model without a guard refuse to communicate in an attempt."""
    _votes.add(votes)
    for found in gc.get_objects():  # torch keeps no list of wrappers
        # Not isinstance(), because some objects raise an error when asked for their class.
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
    """Return whether a guard is called before its collectives and can refuse them."""
    if isinstance(model, DistributedDataParallel):
        return any(getattr(hook, "is_guarded", False) for hook, _ in comm_hooks(model))
    assert isinstance(model, FSDPModule)
    return any(hasattr(each, "guard") for each in collectives_of(model) or ())


def _communicates(model: nn.Module) -> bool:
    if isinstance(model, DistributedDataParallel):
        sends = model.will_sync_module_buffers()  # type: ignore[no-untyped-call]
        return torch.is_grad_enabled() or bool(sends)
    assert isinstance(model, FSDPModule)
    return collectives_of(model) is not None  # otherwise all its parameters lie in wrapped children


class WrapperGuard(Guard):
    """Guard of a wrapper, whose collectives are voted on at first, and replayed once known."""

    def __init__(self, votes: Votes) -> None:
        self._votes = votes
        self._can_replay = True
        self._training = False
        self._is_open = False
        self._has_looked = False
        self._votes_here = False

    def stay_guarded(self) -> None:
        self._can_replay = False

    def prepare(self) -> None:
        if not self._has_looked:
            watch_for_strangers(self._votes)
            self._has_looked = True


class GroupState:
    """Votes of one process group, and the guards that use them."""

    def __init__(self, votes: Votes) -> None:
        self.votes = votes
        self._num_users = 0
        # A wrapper holds its guard, so both are freed together.
        self._guards: weakref.WeakValueDictionary[frozenset[int], Guard] = (
            weakref.WeakValueDictionary()
        )
        self.connected: set[Use] = set()  # uses whose communicators were warmed up

    def count(self) -> int:
        """Count one more participant and return its number, the same on all ranks."""
        self._num_users += 1
        return self._num_users

    def guard_of(self, wrappers: Iterable[nn.Module], make: Callable[[], Guard]) -> Guard:
        """Return the single guard of these wrappers."""
        wrappers = list(wrappers)
        key = frozenset(map(id, wrappers))
        guard = self._guards.get(key)
        if guard is None:
            if any(key & other for other in list(self._guards.keys())):
                raise ValueError(
                    f"{type(wrappers[0]).__name__} is part of a model that another Microbatcher "
                    "uses as a whole (or the other way round), and a wrapper can have only one "
                    "guard; give every Microbatcher the same outermost module"
                )
            guard = self._guards[key] = make()
        return guard


@dataclass(frozen=True, kw_only=True)
class _Opened:
    group: object
    state: GroupState


_opened: _Opened | None = None


def state_of_group(open_votes: Callable[[], Votes]) -> GroupState:
    """Return the shared state of the current process group. All ranks must call this."""
    global _opened
    group = dist.group.WORLD
    if _opened is None or _opened.group is not group:
        _opened = _Opened(group=group, state=GroupState(open_votes()))
    return _opened.state


def opened_state() -> GroupState | None:
    """Return the shared state of the current process group, or None if it is not open."""
    is_here = _opened is not None and _opened.group is dist.group.WORLD
    return _opened.state if _opened is not None and is_here else None
