"""What all Microbatchers of a process share: the votes of its group, and a guard for each wrapper.

A wrapper calls one guard, and what that guard knows of it (which collectives are to come, whether
buffers are stale) is true whichever Microbatcher used it last.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from automicro.distributed.guard import Guard
from automicro.distributed.votes import Votes
from automicro.distributed.warm_up import Use


class Commons:
    """The votes of one process group and the guards that vote with them.

    Args:
        votes: among all ranks of the group.

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

        Args:
            wrappers: that it guards together.
            make: called where there is none yet.

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
    commons: Commons


_opened: _Opened | None = None


def commons_of_group(open_votes: Callable[[], Votes]) -> Commons:
    """What is shared in the present process group. All ranks call it.

    Args:
        open_votes: called once for each process group.
    """
    global _opened
    group = dist.group.WORLD
    if _opened is None or _opened.group is not group:
        _opened = _Opened(group=group, commons=Commons(open_votes()))
    return _opened.commons


def opened_commons() -> Commons | None:
    """What is shared in the present process group; None where nobody has opened it."""
    is_here = _opened is not None and _opened.group is dist.group.WORLD
    return _opened.commons if _opened is not None and is_here else None
