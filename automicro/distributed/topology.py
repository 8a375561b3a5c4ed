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
    width = local_world_size
    nodes = [list(range(at, min(at + width, world_size))) for at in range(0, world_size, width)]
    levels = plan_levels(nodes)
    groups = [block for blocks in levels for block in blocks if rank in block]
    return Topology(groups, len(levels))


def ranks_by_node(local_world_sizes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node; all in one where what they say does not fit together.

    Args:
        local_world_sizes: what each rank says of its own node, in order.

    >>> ranks_by_node([2, 2, 1])
    [[0, 1], [2]]
    >>> ranks_by_node([2, 1, 2])
    [[0, 1, 2]]
    """
    world_size = len(local_world_sizes)
    nodes: list[list[int]] = []
    while (start := sum(map(len, nodes))) < world_size:
        size = local_world_sizes[start]
        if size < 1 or list(local_world_sizes[start : start + size]) != [size] * size:
            return [list(range(world_size))]
        nodes.append(list(range(start, start + size)))
    return nodes


def plan_levels(nodes: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """All groups of the tree, level by level from the nodes upwards.

    >>> plan_levels([[0, 1], [2, 3]]), plan_levels([[0, 1, 2]])
    ([[[0, 1], [2, 3]], [[0, 2]]], [[[0, 1, 2]]])
    """
    levels = [[list(node) for node in nodes]]
    while len(levels[-1]) > 1:
        leaders = [block[0] for block in levels[-1]]
        levels.append([leaders[at : at + FAN_OUT] for at in range(0, len(leaders), FAN_OUT)])
    return levels
