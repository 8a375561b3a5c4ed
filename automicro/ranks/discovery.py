"""Which ranks train a model together: found from what it is wrapped in.

Light to import: all that several ranks need is imported where there are any.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch.distributed as dist
from torch import nn

from automicro.modules import ModuleIndex, is_parallel
from automicro.ranks.interface import OneRank, Ranks

P = ParamSpec("P")


def find_ranks(modules: Sequence[nn.Module]) -> Ranks:
    """The ranks that train modules together. All of them call it.

    Args:
        modules: that take part, wrapped already.

    Raises:
        ValueError: a wrapper under which no attempt can be undone, or a lazy module in it.

    >>> find_ranks([nn.Linear(2, 2)]).world_size
    1
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()

    from automicro.ranks.coordinated import coordinate

    ranks = coordinate(modules)
    if not ranks.is_alone and ModuleIndex(modules).is_lazy:
        raise ValueError(
            "some module takes its shapes from its first input (a lazy module), which several "
            "ranks cannot do together; run the model once on one row before it is wrapped"
        )
    return ranks


def announcing_failed_construction(
    construct: Callable[P, None],
) -> Callable[P, None]:
    """Let a constructor that fails on this rank tell the others, who would wait for it.

    Args:
        construct: an ``__init__`` whose first argument, ``model``, is wrapped for several ranks
            where it is for them.
    """

    @functools.wraps(construct)
    def announcing_failure(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            construct(*args, **kwargs)
        except Exception as error:
            model = args[1] if len(args) > 1 else kwargs.get("model")
            is_shared = kwargs.get("parallel") is not None
            announce_failed_construction(model, error, is_shared=is_shared)
            raise

    return announcing_failure


def announce_failed_construction(model: Any, error: Exception, *, is_shared: bool = False) -> None:
    """Tell the other ranks, if there are any, that this one could not make what all of them make.

    Args:
        model: of which this rank would have trained its part.
        error: why it cannot.
        is_shared: whether the model was to be wrapped for several ranks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return

    from automicro.ranks.coordinated import announce_absence

    if is_shared or (isinstance(model, nn.Module) and is_parallel([model])):
        announce_absence(error)
