"""Who talks to whom in a vote: everybody with everybody on one node, a tree beyond it."""

from collections.abc import Sequence
from typing import NamedTuple

FAN_OUT = 8
"""How many nodes, or groups of nodes, talk to each other directly."""


class Topology(NamedTuple):
    """A rank's place in the tree.

    Attributes:
        groups: the ranks that this one talks to, from its node upwards, as far as it takes part:
            the first of each group speaks for it in the next.
        height: how many levels the whole tree has.
    """

    groups: list[list[int]]
    height: int


def arrange(rank: int, world_size: int, local_world_size: int) -> Topology:
    """The place of a rank.

    On one node all ranks exchange directly. On several nodes that would cost each rank as many
    messages as there are ranks, so nodes agree within themselves first, then their leaders in
    groups of eight, and so on.

    Args:
        rank: whose place.
        world_size: how many ranks there are.
        local_world_size: how many of them are on one node, with successive numbers.

    >>> arrange(1, 4, 4)
    Topology(groups=[[0, 1, 2, 3]], height=1)
    >>> arrange(2, 4, 2)
    Topology(groups=[[2, 3], [0, 2]], height=2)
    >>> arrange(3, 4, 2)
    Topology(groups=[[2, 3]], height=2)
    """
    levels = plan_levels(world_size, local_world_size)
    groups = [block for blocks in levels for block in blocks if rank in block]
    return Topology(groups, len(levels))


def plan_levels(world_size: int, local_world_size: int) -> list[list[list[int]]]:
    """All groups of the tree, level by level from the nodes upwards.

    >>> plan_levels(4, 2)
    [[[0, 1], [2, 3]], [[0, 2]]]
    """
    members: Sequence[int] = range(world_size)
    width = local_world_size
    levels: list[list[list[int]]] = []
    while True:
        if levels and len(members) <= FAN_OUT:
            width = len(members)
        levels.append([list(members[at : at + width]) for at in range(0, len(members), width)])
        if len(levels[-1]) == 1:
            return levels
        members = [block[0] for block in levels[-1]]
        width = FAN_OUT
