"""Several ranks: agreeing on sizes, voting on outcomes, and guarding what they wait for.

`coordinate` looks at a model and gives what a step needs; see `automicro.ranks` for how a step
uses it.
"""

from automicro.distributed.coordination import CoordinatedRanks
from automicro.distributed.ddp import VotingHook
from automicro.distributed.entrance import own_collectives
from automicro.distributed.setup import coordinate, tell_of_absence, wait_for_all
from automicro.distributed.simulated import SimulatedWorld
from automicro.distributed.votes import Votes

__all__ = [
    "CoordinatedRanks",
    "SimulatedWorld",
    "Votes",
    "VotingHook",
    "coordinate",
    "own_collectives",
    "tell_of_absence",
    "wait_for_all",
]
