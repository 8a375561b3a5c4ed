"""Whether all members of a group came to a collective: found by adding up numbers of all ranks.

Each rank brings numbers drawn from what it is about to run. The first member of a group brings
them negative, as many times as there are others, so that they add up to nothing where all came,
however many groups there are. So does who sends, and who receives.
"""

import hashlib
import struct
from collections.abc import Sequence

from automicro.distributed.entrance import Call

COUNT = 4
_LARGEST = 1 << 24  # times the ranks of any world it is exact in fp64


def brought(call: Call, rank: int) -> tuple[float, ...]:
    """The numbers of one rank.

    >>> both = [Call(name="all_reduce", members=(0, 1), shape="3 float32")] * 2
    >>> [sum(each) for each in zip(*(brought(call, rank) for rank, call in enumerate(both)))]
    [0.0, 0.0, 0.0, 0.0]
    """
    if call.peer is not None:
        pair = (rank, call.peer) if call.sends else (call.peer, rank)
        factor = -1 if call.sends else 1
        text = f"{pair} {call.shape}"
    else:
        factor = -(len(call.members) - 1) if rank == call.members[0] else 1
        text = str(call)
    drawn = struct.unpack(f"{COUNT}I", hashlib.sha256(text.encode()).digest()[: 4 * COUNT])
    return tuple(float(factor * (1 + each % (_LARGEST - 1))) for each in drawn)


class Messages:
    """What was sent to one peer and not received yet, by all ranks together.

    A message that is on its way when an attempt fails would be taken for one of the next attempt.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[float, ...]] = []

    @property
    def are_under_way(self) -> bool:
        """Whether some have not been received."""
        return bool(self._under_way)

    def note(self, together: Sequence[float], *, any_receives: bool) -> bool:
        """Take down what all ranks brought to a vote; whether all that is received was sent.

        >>> messages = Messages()
        >>> messages.note([-3.0], any_receives=False), messages.are_under_way
        (True, True)
        >>> messages.note([3.0], any_receives=True), messages.are_under_way
        (True, False)
        >>> messages.note([3.0], any_receives=True)
        False
        """
        numbers = tuple(together)
        if not any(numbers):
            return True
        if not any_receives:
            self._under_way.append(numbers)
            return True
        sent = tuple(-each for each in numbers)
        if sent in self._under_way:
            self._under_way.remove(sent)
            return True
        return False

    def clear(self) -> None:
        """Forget all."""
        self._under_way.clear()
