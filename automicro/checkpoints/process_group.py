"""All ranks of `torch.distributed`, on a group that nothing but checkpoints uses."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from automicro.checkpoints.peers import ALONE, Peers
from automicro.errors import PeerLostError, add_note
from automicro.torch_private import without_modes

TIMEOUT_SECONDS = 600.0


def open_peers(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Peers:
    """All ranks, as checkpoints need them. All ranks call it; one process is alone.

    Args:
        timeout_seconds: how long one waits for the slowest rank to write its part.

    >>> open_peers().world_size
    1
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ALONE
    return GroupPeers(timeout_seconds=timeout_seconds)


class GroupPeers:
    """All ranks, over gloo. The group is its own, so a save may run beside the training.

    Args:
        timeout_seconds: how long one waits for the slowest rank.
    """

    def __init__(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._broken: PeerLostError | None = None

    def gather(self, value: Any) -> list[Any] | None:
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._run(lambda: dist.gather_object(value, values, dst=0, group=self._group))
        return values

    def scatter(self, values: Sequence[Any] | None) -> Any:
        found: list[Any] = [None]
        given = None if values is None else list(values)
        self._run(lambda: dist.scatter_object_list(found, given, src=0, group=self._group))
        return found[0]

    def _run(self, exchange: Callable[[], Any]) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            with without_modes():
                exchange()
        except PeerLostError as error:  # it says who and why
            self._broken = error
            add_note(error, "no checkpoint was written here; the older ones are as they were")
            raise
        except RuntimeError as error:
            self._broken = PeerLostError(
                f"rank {self.rank} of {self.world_size} could not go on with a checkpoint: a peer "
                f"is gone, or took too long ({error}). The older checkpoints are as they were: "
                "start again; the log of the missing rank has the cause"
            )
            raise self._broken from error
