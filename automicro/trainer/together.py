"""What the ranks of a run agree on between steps. For one process all of it is free."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import torch.distributed as dist

from automicro.errors import describe_error
from automicro.finding_ranks import tell_of_construction
from automicro.ranks import TOLD, Ranks
from automicro.trainer.interruption import STOPPED
from automicro.trainer.processes import say_absent

P = ParamSpec("P")


def any_rank(ranks: Ranks, *answers: bool) -> list[bool]:
    """Whether any rank says yes, for each of some questions. All ranks call it.

    >>> from automicro.ranks import OneRank
    >>> any_rank(OneRank(), True, False)
    [True, False]
    """
    return [number > 0 for number in ranks.add_up(map(float, answers))]


@contextlib.contextmanager
def telling_once(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks of an error of this one, unless they know of it.

    An end in order, which all ranks have agreed on, is none.

    >>> from automicro.ranks import OneRank
    >>> with telling_once(OneRank()):
    ...     pass
    """
    try:
        yield
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        if not any(note.startswith(TOLD) or STOPPED in note for note in notes):
            ranks.fail(error)
        raise


def telling_of_failure(
    construct: Callable[P, None],
) -> Callable[P, None]:
    """Let a Trainer that cannot be made on this rank tell the others, also before they have met."""

    @functools.wraps(construct)
    def telling(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            construct(*args, **kwargs)
        except Exception as error:
            is_shared = kwargs.get("parallel") is not None
            tell_of_construction(
                args[1] if len(args) > 1 else kwargs.get("model"), error, is_shared=is_shared
            )
            if is_shared and not dist.is_initialized():
                say_absent(describe_error(error))
            raise

    return telling


def of_all_ranks(ranks: Ranks, value: Any, point: str) -> list[Any]:
    """The values of all ranks, in order, on all of them. All ranks call it.

    Args:
        ranks: of the run.
        value: can be pickled.
        point: in the program, by a name.

    >>> from automicro.ranks import OneRank
    >>> of_all_ranks(OneRank(), "mine", "example")
    ['mine']
    """
    if ranks.world_size == 1:
        return [value]
    ranks.ready(point)
    values: list[Any] = [None] * ranks.world_size
    with ranks.voted():
        dist.all_gather_object(values, value)
    return values


class Stop:
    """Whether a run is to stop: because any rank wants to, and on all at the same point.

    Args:
        ranks: of the run.
        wants: whether this rank wants to.

    Example:
        >>> from automicro.ranks import OneRank
        >>> wishes = [False, True]
        >>> stop = Stop(OneRank(), lambda: wishes.pop(0))
        >>> stop.is_agreed, stop.is_agreed
        (False, True)
    """

    def __init__(self, ranks: Ranks, wants: Callable[[], bool]) -> None:
        self._ranks = ranks
        self._wants = wants
        self._is_agreed = False

    @property
    def is_agreed(self) -> bool:
        """Whether ranks have agreed to stop. One that is alone asks itself."""
        return self._wants() if self._ranks.world_size == 1 else self._is_agreed

    def ask(self, ranks: Ranks) -> bool:
        """Agree now. All ranks call it.

        Args:
            ranks: where those meet that fail at this point of the program.
        """
        return self.take_up(any_rank(ranks, self._wants())[0])

    @property
    def is_wanted(self) -> bool:
        """Whether this rank wants to."""
        return self._wants()

    def take_up(self, wish: bool) -> bool:
        """Note what all ranks have agreed on."""
        self._is_agreed = self._is_agreed or wish
        return self._is_agreed if self._ranks.world_size > 1 else wish
