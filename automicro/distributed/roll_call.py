"""Who is missing after a vote broke off: all that are left sign in the processes' store."""

import logging
import threading
import time

from automicro.torch_private_distributed import Store

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 2.0


class RollCall:
    """Names the ranks that do not answer.

    Args:
        store: where the processes met.
        rank: this process's number.
        world_size: how many there are.
        wait_seconds: for the others to notice too.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, wait_seconds: float = 3.0
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._wait_seconds = wait_seconds
        self._known: list[int] | None = None

    def missing(self) -> list[int] | None:
        """The ranks that have not signed in time; None if the store itself is gone."""
        # A store whose host is gone keeps a request waiting for good, whatever its timeout.
        asking = threading.Thread(target=self._ask, name="automicro-roll-call", daemon=True)
        asking.start()
        asking.join(self._wait_seconds + _ANSWER_SECONDS)
        return self._known

    def _ask(self) -> None:
        waiting = {rank for rank in range(self._world_size) if rank != self._rank}
        end = time.monotonic() + self._wait_seconds
        try:
            self._store.set(self._key(self._rank), "here")
            while waiting and time.monotonic() < end:
                waiting = {rank for rank in waiting if not self._store.check([self._key(rank)])}
                self._known = sorted(waiting)
                time.sleep(0.05)
        except Exception as error:
            logger.debug("the store is gone: %s", error)

    @staticmethod
    def _key(rank: int) -> str:
        return f"automicro/still_here/{rank}"


class NoRollCall:
    """Where there is no store to sign in."""

    def missing(self) -> list[int] | None:
        return None
