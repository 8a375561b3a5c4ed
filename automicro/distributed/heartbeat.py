"""Signs of life: every rank gives them, watches a few others, and tells all whom it misses.

Each beat is one write and one read of the store that the processes met in, over a connection of
its own. A store whose host is gone keeps a request waiting for good, whatever its timeout, so one
thread talks to it and another looks at the clock.
"""

import contextlib
import logging
import multiprocessing.util
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from automicro.distributed.attendance import ENDED, Attendance, in_words, interval_for
from automicro.distributed.connections import shut_connections
from automicro.torch_private_distributed import Store

logger = logging.getLogger(__name__)

EXIT_CODE = 75
"""Of a process that could not be freed from its wait: "try again" by the convention of sysexits."""

FREE_AFTER_SECONDS = 0.5
END_AFTER_SECONDS = 20.0
_ASK_SECONDS = 2.0
_LOST = "lost"


class Watch(Protocol):
    """What a vote asks about the peers' hosts."""

    def loss(self, *, fresh: bool = False) -> str | None:
        """Why no rank can go on, in words that begin a sentence; None where all is well.

        Args:
            fresh: whether to ask now, and not only at the next beat.
        """


class NoWatch:
    """Where nobody watches."""

    def loss(self, *, fresh: bool = False) -> str | None:
        return None


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Where the store is.

    Attributes:
        host: of its server.
        port: of its server.
        outlives_ranks: whether none of the ranks is its server, so that it never ends in order.
    """

    host: str
    port: int
    outlives_ranks: bool


class Heartbeat:
    """The signs of life of one rank.

    Args:
        connect: makes a connection to the store, in a part of it that is this group's alone.
        address: of the store.
        rank: of this process.
        world_size: how many there are.
        timeout_seconds: without a sign of life, after which a rank is lost.
        is_over: whether the process group has ended in order.
        end: the process, where nothing else helps.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        address: StoreAddress,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        is_over: Callable[[], bool] = lambda: False,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._connect = connect
        self._address = address
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._is_over = is_over
        self._end = end
        self._interval_seconds = interval_for(timeout_seconds)
        self._store: Store | None = None
        self._num_beats = 0
        self._num_answers = 0
        self._loss: str | None = None
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._hurry = threading.Event()
        self._news = threading.Event()
        self._was_told = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"automicro-{name}", daemon=True)
            for name, work in (("heartbeat", self._talk), ("watch", self._judge))
        ]

    def sign_in(self) -> None:
        """Give the first sign of life. All ranks have, before any of them calls `start`."""
        self._store = self._connect()
        self._store.set(_host_key(self._rank), socket.gethostname())
        if self._rank == 0:
            self._store.set(_LOST, "")
        self._store.set(_beat_key(self._rank), "0")
        self._store.get(_beat_key(self._rank))  # nothing else waits until they are written

    def start(self) -> None:
        """Begin to watch."""
        self._attendance = Attendance(
            rank=self._rank,
            world_size=self._world_size,
            timeout_seconds=self._timeout_seconds,
            interval_seconds=self._interval_seconds,
            now=time.monotonic(),
        )
        for thread in self._threads:
            thread.start()
        # It runs at the end of child processes too, where atexit does not.
        multiprocessing.util.Finalize(None, self.stop, exitpriority=1)

    def stop(self) -> None:
        """Sign off: this rank ends in order, and its peers may go on for a while."""
        self._ends.set()
        self._hurry.set()
        self._news.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_ASK_SECONDS)

    def loss(self, *, fresh: bool = False) -> str | None:
        if fresh and self._loss is None:
            self._ask_now()
        if self._loss is not None:
            self._was_told.set()
        return self._loss

    def _ask_now(self) -> None:
        # One answer may have been on its way before this.
        enough = self._num_answers + 2
        end = time.monotonic() + _ASK_SECONDS
        while self._loss is None and self._num_answers < enough and time.monotonic() < end:
            self._hurry.set()
            time.sleep(0.02)

    def _talk(self) -> None:
        while not self._ends.is_set():
            try:
                self._beat()
            except Exception as error:
                # What is still on its way would be taken for the answer to something else.
                self._store = None
                logger.debug("no sign of life could be given: %s", error)
            self._hurry.wait(self._interval_seconds)
            self._hurry.clear()
        with contextlib.suppress(Exception):  # nobody is left to read it
            if self._store is not None:
                self._store.set(_beat_key(self._rank), ENDED)
                self._store.get(_beat_key(self._rank))

    def _beat(self) -> None:
        self._store = store = self._store or self._connect()
        self._num_beats += 1
        store.set(_beat_key(self._rank), str(self._num_beats))
        ranks = self._attendance.wanted()
        told, *beats = store.multi_get([_LOST, *map(_beat_key, ranks)])
        with self._lock:
            texts = [beat.decode() for beat in beats]
            self._attendance.note(time.monotonic(), dict(zip(ranks, texts, strict=True)))
            lost = self._attendance.lost()
        self._num_answers += 1
        if self._loss is None and (told or lost):
            self._learn(told.decode() or self._accuse(store, lost))

    def _accuse(self, store: Store, lost: list[int]) -> str:
        """Tell all who is lost, unless somebody was faster; what was told."""
        hosts = dict.fromkeys(host.decode() for host in store.multi_get(list(map(_host_key, lost))))
        numbers = ",".join(map(str, lost))
        said = f"{numbers} {self._rank} {', '.join(hosts)}"
        told: bytes = store.compare_set(_LOST, "", said)
        return told.decode()

    def _learn(self, told: str) -> None:
        numbers, by, hosts = told.split(" ", 2)
        lost = list(map(int, numbers.split(",")))
        seconds = f"{self._timeout_seconds:g} s"
        if self._rank in lost:
            self._conclude(
                f"rank {self._rank} of {self._world_size} ({hosts}) was given up by rank {by} "
                f"after {seconds} without a sign of life: this process stood still or was cut off, "
                "and the others have stopped or begun anew without it"
            )
        else:
            self._conclude(
                f"{in_words(lost, self._world_size)} lost: no sign of life from host {hosts} for "
                f"{seconds}, rank {by} found"
            )

    def _judge(self) -> None:
        while not self._ends.is_set() and self._loss is None:
            self._news.wait(self._interval_seconds)
            if self._is_over():
                self._ends.set()
                self._hurry.set()
                return
            with self._lock:
                self._attendance.wake(time.monotonic())
                has_lost_store = self._attendance.has_lost_store
            if has_lost_store and not self._lose_store():
                return
        if not self._ends.is_set():
            self._end_waiting()

    def _lose_store(self) -> bool:
        """Whether the store's end is a loss."""
        if self._store is None and not self._address.outlives_ranks:
            # A closed connection: rank 0's process has ended, which gloo tells those it concerns.
            logger.debug("the store has ended with rank 0; hosts are no longer watched")
            self._ends.set()
            return False
        self._conclude(
            f"the host of the run's store, {self._address.host}, is gone: port "
            f"{self._address.port} has not answered rank {self._rank} of {self._world_size} for "
            f"{self._timeout_seconds:g} s"
        )
        return True

    def _conclude(self, loss: str) -> None:
        logger.info("%s", loss)
        self._loss = loss
        self._news.set()

    def _end_waiting(self) -> None:
        """Free the threads that wait for a peer; end the process where that does not help."""
        # Time to leave by the next vote.
        self._ends.wait(FREE_AFTER_SECONDS)
        count = shut_connections(except_port=self._address.port)
        logger.debug("shut %d connections, so that nobody waits for lost ranks", count)
        end = time.monotonic() + END_AFTER_SECONDS
        while time.monotonic() < end:
            if self._ends.is_set() or self._was_told.wait(self._interval_seconds):
                return
        line = (
            f"automicro: rank {self._rank} of {self._world_size} ends at once: {self._loss}, and "
            f"it still waits {END_AFTER_SECONDS:g} s later; start again from the last checkpoint\n"
        )
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            os.write(2, line.encode())
        self._end(EXIT_CODE)


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _host_key(rank: int) -> str:
    return f"host/{rank}"
