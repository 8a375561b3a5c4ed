"""Guards keep the collectives of a wrapped model matched; models without a guard.

A wrapper calls one guard, and what that guard knows of it (which collectives are to come, whether
buffers are stale) is true whichever Microbatcher used it last.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

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


class Guard(Protocol):
    """Stands between a wrapper (DDP, FSDP2) and its collectives.

    Either it votes before each collective (*guarded*), so that no rank enters one that another
    will not reach; or, once it knows which collectives an attempt has, it does not (*replay*), and
    a rank that failed plays those that its peers still wait for.
    """

    communicates_in_forward: bool
    """Whether a forward outside of a step needs all ranks."""

    @property
    def latest(self) -> Sync:
        """How late the wrapper may reduce gradients with the same sums."""

    def uses(self) -> list[Use]:
        """The collectives of the wrapper, in an order that is the same on all ranks."""

    def stay_guarded(self) -> None:
        """Never replay, because other collectives run in between."""

    def require_known(self, parameters: Sequence[Tensor]) -> None:
        """Refuse parameters to train that are inside the wrapper and that it does not know.

        Raises:
            ValueError: they came into the model, or were thawed, after it was wrapped.
        """

    def settle(self) -> None:
        """Between steps: undo what a forward outside of one has left."""

    def prepare(self) -> None:
        """Before the ranks agree: allocate what `meet` needs."""

    def meet(self, *, training: bool) -> None:
        """Right after the ranks agreed: run the collectives that come before an attempt.

        The agreement is the vote before them, so nothing may fail in between.
        """

    def open(self, num_microbatches: int, *, training: bool, sync: Sync) -> None:
        """All ranks begin an attempt."""

    def microbatch(self, index: int, *, weightless: bool = False) -> AbstractContextManager[None]:
        """Around forward and backward of a microbatch. At its end it may vote.

        Raises:
            StrayedError: collectives are others than were known, and it did not run them.
            HeldBackError: gradients were held back that the last microbatch does not reduce.
            ValueError: gradients were computed that nothing reduces.
        """

    @property
    def is_replaying(self) -> bool:
        """Whether a rank that failed now would play collectives, and not vote right away."""

    def owns(self, call: Call) -> bool:
        """Whether a collective that is about to run is the wrapper's, and guarded as such."""

    @property
    def has_strayed(self) -> bool:
        """Whether the attempt's collectives were others than were known."""

    @property
    def unused(self) -> Sequence[bool]:
        """Of each parameter that it reduces, whether no microbatch of this rank used it."""

    def commit(self, *, any_strayed: bool, unused: Sequence[bool]) -> None:
        """All ranks ended the attempt well: learn from it."""

    def play_rest(self) -> None:
        """After a failure here: run the collectives up to the peers' next vote."""

    def recover(self) -> None:
        """Put the wrapper back in order after an attempt that did not end. All ranks call it."""


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
    """Let every wrapped model without a guard refuse to communicate in an attempt.

    >>> from automicro.ranks.simulated import SimulatedWorld
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


class GroupState:
    """The votes of one process group and the guards that vote with them.

    Attributes:
        connected: what communicators were warmed up for.
    """

    def __init__(self, votes: Votes) -> None:
        self.votes = votes
        self._num_users = 0
        # A wrapper holds its guard, so both go together.
        self._guards: weakref.WeakValueDictionary[frozenset[int], Guard] = (
            weakref.WeakValueDictionary()
        )
        self.connected: set[Use] = set()

    def count(self) -> int:
        """One more takes part: its number, the same on all ranks."""
        self._num_users += 1
        return self._num_users

    def guard_of(self, wrappers: Iterable[nn.Module], make: Callable[[], Guard]) -> Guard:
        """The one guard of these wrappers.

        Raises:
            ValueError: some of them have a guard together with others.
        """
        wrappers = list(wrappers)
        key = frozenset(map(id, wrappers))
        guard = self._guards.get(key)
        if guard is None:
            if any(key & other for other in list(self._guards.keys())):
                raise ValueError(
                    f"{type(wrappers[0]).__name__} is part of a model that another Microbatcher "
                    "has as a whole (or the other way round), and each wrapper can be guarded in "
                    "one way only; give every Microbatcher the same outermost module"
                )
            guard = self._guards[key] = make()
        return guard


@dataclass(frozen=True, kw_only=True)
class _Opened:
    group: object
    state: GroupState


_opened: _Opened | None = None


def state_of_group(open_votes: Callable[[], Votes]) -> GroupState:
    """The shared state of the present process group. All ranks call it."""
    global _opened
    group = dist.group.WORLD
    if _opened is None or _opened.group is not group:
        _opened = _Opened(group=group, state=GroupState(open_votes()))
    return _opened.state


def opened_state() -> GroupState | None:
    """The shared state of the present process group; None while it is not open."""
    is_here = _opened is not None and _opened.group is dist.group.WORLD
    return _opened.state if _opened is not None and is_here else None
