"""Whether other processes of the same run speak too: told without torch where there are none."""

import os
import sys


def has_peers() -> bool:
    """Tell whether this is one of several processes.

    >>> has_peers()
    False
    """
    if _is_surely_alone():
        return False
    from automicro.trainer.processes import place_for_output

    return place_for_output().world_size > 1


def is_first() -> bool:
    """Tell whether this is the process that speaks for all.

    >>> is_first()
    True
    """
    if _is_surely_alone():
        return True
    from automicro.trainer.processes import place_for_output

    return place_for_output().is_first


def _is_surely_alone() -> bool:
    # Variables, or a process group that the user's code has made.
    is_announced = "WORLD_SIZE" in os.environ or "RANK" in os.environ
    return not is_announced and "torch.distributed" not in sys.modules
