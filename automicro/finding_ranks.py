"""Which ranks train a model together: found from what it is wrapped in."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from automicro.model_modes import is_lazy
from automicro.ranks import OneRank, Ranks


def find_ranks(modules: Sequence[nn.Module]) -> Ranks:
    """The ranks that train modules together. All of them call it.

    Raises:
        ValueError: a wrapper under which no attempt can be undone, or a lazy module in it.

    >>> find_ranks([nn.Linear(2, 2)]).world_size
    1
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    from automicro.distributed import coordinate  # slow to import, and not needed by one process

    ranks = coordinate(modules)
    if not ranks.is_alone and is_lazy(modules):
        raise ValueError(
            "some module takes its shapes from its first input (a lazy module), which several "
            "ranks cannot do together; run the model once on one row before it is wrapped"
        )
    return ranks
