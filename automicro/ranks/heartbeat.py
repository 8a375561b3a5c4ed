"""Heartbeats: every rank sends them, watches a few peers, and reports lost ranks to all.

Each beat is one write and one read of the store in which the processes met, over a separate
connection. A store whose host is gone blocks a request forever, whatever its timeout, so one thread
talks to the store and another one watches the clock.
"""

import contextlib
import datetime
import logging
import math
import multiprocessing.util
import os
import socket
import stat
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from automicro.ranks.exchange import Exchange
from automicro.torch_private_distributed import (
    PrefixStore,
    Store,
    TCPStore,
    default_store,
    default_tcp_store,
)

ENDED = "ended"
"""Beat of a rank that ended in good order."""

NEIGHBOURS = 2
_LATE_BEATS = 3
_BEATS_OF_A_GAP = 2


class Liveness:
    """One rank's record of the beats of others.

    >>> liveness = Liveness(
    ...     rank=0, world_size=3, timeout_seconds=6.0, interval_seconds=1.0, now=0.0
    ... )
    >>> for second in range(8):
    ...     liveness.note(float(second), {1: "1", 2: f"{second}"})
    >>> liveness.lost()
    [1]
    """

    # Each rank watches the next two in a ring of active ranks, so its requests do not grow with the
    # world. If one of them is late, it asks for all ranks, to find everyone lost at the same time.
    # Time counts only while this process runs and the store answers: a process that was itself
    # stopped or disconnected does not accuse others. So a rank whose beats reach the store within
    # the timeout of each other is never accused, and a silent rank is found two intervals later.

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        interval_seconds: float,
        now: float,
    ) -> None:
        self._ring = [(rank + step) % world_size for step in range(1, world_size)]
        self._timeout_seconds = timeout_seconds
        self._late_seconds = _LATE_BEATS * interval_seconds
        self._longest_gap = _BEATS_OF_A_GAP * interval_seconds
        self._beats: dict[int, str] = {}
        # Time during which the store answered, and when each rank was last heard on that clock.
        self._answered_seconds = 0.0
        self._heard_at: dict[int, float] = {}
        self._last_answer = now
        # Time without an answer during which this process ran.
        self._unanswered_seconds = 0.0
        self._last_wake = now

    def wanted(self) -> list[int]:
        """Return the ranks whose beats to request next, nearest first."""
        there = [rank for rank in self._ring if self._beats.get(rank) != ENDED]
        near = there[:NEIGHBOURS]
        return there if any(self._is_silent(rank, self._late_seconds) for rank in near) else near

    def note(self, now: float, beats: Mapping[int, str]) -> None:
        """Record an answer of the store."""
        # In a longer gap this process was stopped or the store was unreachable, which says nothing
        # about other ranks.
        self._answered_seconds += min(now - self._last_answer, self._longest_gap)
        self._last_answer = self._last_wake = now
        self._unanswered_seconds = 0.0
        for rank, beat in beats.items():
            if self._beats.get(rank) != beat:
                self._beats[rank] = beat
                self._heard_at[rank] = self._answered_seconds

    def wake(self, now: float) -> None:
        """Record that this process is running, whether or not the store answers."""
        self._unanswered_seconds += min(now - self._last_wake, self._longest_gap)
        self._last_wake = now

    def lost(self) -> list[int]:
        """Return the lost ranks, including ranks that fell silent at about the same time."""
        if not any(self._is_silent(rank, self._timeout_seconds) for rank in self._heard_at):
            return []
        # More distant ranks are watched only after a neighbor was late, so half the timeout
        # suffices.
        return sorted(
            rank for rank in self._heard_at if self._is_silent(rank, self._timeout_seconds / 2)
        )

    @property
    def has_lost_store(self) -> bool:
        """Whether the store has not answered for the whole timeout."""
        return self._unanswered_seconds >= self._timeout_seconds

    def _is_silent(self, rank: int, seconds: float) -> bool:
        if self._beats.get(rank) == ENDED or rank not in self._heard_at:
            return False
        return self._answered_seconds - self._heard_at[rank] >= seconds


def interval_for(timeout_seconds: float) -> float:
    """Return the number of seconds between heartbeats."""
    return min(timeout_seconds / 12, 5.0)


def _in_words(ranks: Iterable[int], world_size: int) -> str:
    """Return ranks as the subject of a sentence.

    >>> _in_words([2, 3], 4), _in_words([1], 4)
    ('ranks 2, 3 of 4 are', 'rank 1 of 4 is')
    """
    names = list(map(str, ranks))
    several = len(names) > 1
    return f"rank{'s' * several} {', '.join(names)} of {world_size} {'are' if several else 'is'}"


_INTERNET = (socket.AF_INET, socket.AF_INET6)


def _shut_connections(*, except_port: int) -> int:
    """Shut down the TCP connections of this process and return their number.

    >>> server = socket.create_server(("127.0.0.1", 0))
    >>> _shut_connections(except_port=server.getsockname()[1])
    0
    >>> server.close()
    """
    count = 0
    for each in _connections():
        with each, contextlib.suppress(OSError):  # closed since, or never connected
            if except_port in (each.getpeername()[1], each.getsockname()[1]):
                continue
            each.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def _connections() -> Iterator[socket.socket]:
    """Yield a duplicate handle of every TCP socket of this process, if they can be listed."""
    folder = next((each for each in map(Path, ("/proc/self/fd", "/dev/fd")) if each.is_dir()), None)
    for name in [] if folder is None else [path.name for path in folder.iterdir()]:
        with contextlib.suppress(OSError):  # the folder's own handle is listed, too
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # Closing a duplicate leaves the original open for its owner; shutting it down ends the
            # connection for both.
            found = socket.socket(fileno=os.dup(int(name)))
            if found.family in _INTERNET and found.type == socket.SOCK_STREAM:
                yield found
            else:
                found.close()


logger = logging.getLogger(__name__)

ROLL_CALL_SECONDS = 3.0
_ANSWER_SECONDS = 2.0


class Watch:
    """Watch over the peers of a rank. Without heartbeats it knows only who answers a roll call."""

    def __init__(self, store: Store | None = None, *, rank: int = 0, world_size: int = 1) -> None:
        self._meeting = store
        self._rank = rank
        self._world_size = world_size
        self._missing: list[int] | None = None

    def loss(self, *, fresh: bool = False) -> str | None:
        """Return why no rank can continue, as the start of a sentence, or None if all is well."""
        return None

    def missing(self) -> list[int] | None:
        """Return the ranks that did not answer in time, or None if the store is gone."""
        # A store whose host is gone blocks a request forever, whatever its timeout.
        calling = threading.Thread(target=self._call_roll, name="automicro-roll-call", daemon=True)
        calling.start()
        calling.join(ROLL_CALL_SECONDS + _ANSWER_SECONDS)
        return self._missing

    def _call_roll(self) -> None:
        if self._meeting is None:
            return
        waiting = {rank for rank in range(self._world_size) if rank != self._rank}
        end = time.monotonic() + ROLL_CALL_SECONDS
        try:
            self._meeting.set(_here_key(self._rank), "here")
            while waiting and time.monotonic() < end:
                waiting = {each for each in waiting if not self._meeting.check([_here_key(each)])}
                self._missing = sorted(waiting)
                time.sleep(0.05)
        except Exception as error:
            logger.debug("the store is gone: %s", error)


def _here_key(rank: int) -> str:
    return f"automicro/still_here/{rank}"


EXIT_CODE = 75
"""Exit code of a process that could not be freed from its wait ("try again" in sysexits)."""

FREE_AFTER_SECONDS = 0.5
END_AFTER_SECONDS = 20.0
_ASK_SECONDS = 2.0
_LOST = "lost"


class _Heartbeat(Watch):
    """Heartbeat threads of one rank."""

    def __init__(
        self, server: TCPStore, name: str, *, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        super().__init__(default_store(), rank=rank, world_size=world_size)
        self._host, self._port = server.host, server.port
        self._name = name
        self._group = dist.group.WORLD
        self._timeout_seconds = timeout_seconds
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

    def _connect(self) -> Store:
        store = TCPStore(self._host, self._port, None, False, _ANSWER, wait_for_workers=False)
        return PrefixStore(f"automicro/watch {self._name}", store)

    def sign_in(self) -> None:
        """Send the first beat. All ranks must do so before any of them calls `start`."""
        self._store = self._connect()
        self._store.set(_host_key(self._rank), socket.gethostname())
        if self._rank == 0:
            # Written first, because a read of several keys blocks until all exist.
            self._store.set(_LOST, "")
        self._store.set(_beat_key(self._rank), "0")
        self._store.get(_beat_key(self._rank))  # wait until the writes are done

    def start(self) -> None:
        """Start watching."""
        self._attendance = Liveness(
            rank=self._rank,
            world_size=self._world_size,
            timeout_seconds=self._timeout_seconds,
            interval_seconds=self._interval_seconds,
            now=time.monotonic(),
        )
        for thread in self._threads:
            thread.start()
        # Unlike atexit, this also runs at the end of child processes.
        multiprocessing.util.Finalize(None, self.stop, exitpriority=1)

    def stop(self) -> None:
        """Sign off: this rank ends in good order, and its peers might continue for a while."""
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
        # One answer might have been on its way already.
        enough = self._num_answers + 2
        end = time.monotonic() + _ASK_SECONDS
        # With a deadline, because the asking thread might itself wait for a store that is gone.
        while self._loss is None and self._num_answers < enough and time.monotonic() < end:
            self._hurry.set()
            time.sleep(0.02)

    def _talk(self) -> None:
        while not self._ends.is_set():
            try:
                self._beat()
            except Exception as error:
                # A late reply would be taken for the answer to another request.
                self._store = None
                logger.debug("no sign of life could be given: %s", error)
            self._hurry.wait(self._interval_seconds)
            self._hurry.clear()
        with contextlib.suppress(Exception):  # no reader is left
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
        """Report lost ranks to all, unless another rank was faster; return the one that counts."""
        hosts = dict.fromkeys(host.decode() for host in store.multi_get(list(map(_host_key, lost))))
        numbers = ",".join(map(str, lost))
        said = f"{numbers} {self._rank} {', '.join(hosts)}"
        # The first accusation counts for all ranks, so that they report the same.
        told: bytes = store.compare_set(_LOST, "", said)
        return told.decode()

    def _learn(self, told: str) -> None:
        numbers, by, hosts = told.split(" ", 2)
        lost = list(map(int, numbers.split(",")))
        seconds = f"{self._timeout_seconds:g} s"
        if self._rank in lost:
            self._conclude(
                f"rank {self._rank} of {self._world_size} ({hosts}) was given up by rank {by} "
                f"after {seconds} without a sign of life: this process was stopped or "
                "disconnected, and the others have stopped or restarted without it"
            )
        else:
            self._conclude(
                f"{_in_words(lost, self._world_size)} lost: no sign of life from host {hosts} for "
                f"{seconds}, rank {by} found"
            )

    def _judge(self) -> None:
        while not self._ends.is_set() and self._loss is None:
            self._news.wait(self._interval_seconds)
            if not dist.is_initialized() or dist.group.WORLD is not self._group:
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
        """Return whether the end of the store is a loss."""
        outlives_ranks = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if self._store is None and not outlives_ranks:
            # The connection is closed, so rank 0 has ended, which gloo reports to affected ranks.
            logger.debug("the store has ended with rank 0; hosts are no longer watched")
            self._ends.set()
            return False
        self._conclude(
            f"the host of the run's store, {self._host}, is gone: port {self._port} has not "
            f"answered rank {self._rank} of {self._world_size} for {self._timeout_seconds:g} s"
        )
        return True

    def _conclude(self, loss: str) -> None:
        logger.info("%s", loss)
        self._loss = loss
        self._news.set()

    def _end_waiting(self) -> None:
        """Free threads that wait for a peer, or end the process if that fails."""
        # Give the next vote time to raise.
        self._ends.wait(FREE_AFTER_SECONDS)
        count = _shut_connections(except_port=self._port)
        logger.debug("shut %d connections, so that no rank waits for lost ones", count)
        end = time.monotonic() + END_AFTER_SECONDS
        while time.monotonic() < end:
            if self._ends.is_set() or self._was_told.wait(self._interval_seconds):
                return
        line = (
            f"automicro: rank {self._rank} of {self._world_size} exits now: {self._loss}, and it "
            f"still waits {END_AFTER_SECONDS:g} s later; start again from the last checkpoint\n"
        )
        # An immediate exit flushes nothing.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            os.write(2, line.encode())
        os._exit(EXIT_CODE)


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _host_key(rank: int) -> str:
    return f"host/{rank}"


VARIABLE = "AUTOMICRO_PEER_TIMEOUT"
DEFAULT_SECONDS = 60.0
_ANSWER = datetime.timedelta(seconds=5)


_begun: tuple[object, Watch] | None = None


def watch_peers(exchange: Exchange) -> Watch:
    """Return the watch of this process group, started by the first call. All ranks must call this.

    >>> type(watch_peers(Exchange([], height=0, rank=0, world_size=1))).__name__
    'Watch'
    """
    # Rank 0's AUTOMICRO_PEER_TIMEOUT applies to all. A single process is not watched, nor are
    # processes that met in a store other than a TCPStore.
    global _begun
    if exchange.world_size == 1:
        return Watch()
    group = dist.group.WORLD
    if _begun is None or _begun[0] is not group:
        _begun = group, _begin(exchange)
    return _begun[1]


def _timeout_from_environment() -> float:
    """Return seconds without a beat until a rank is lost; 0 disables the watch."""
    text = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"the environment has {VARIABLE}={text!r}, which is not a number of seconds; set it to "
            f"how long a host may be silent, such as {DEFAULT_SECONDS:g}, to 0 for no limit, or "
            "unset it"
        )
    return seconds


def _begin(exchange: Exchange) -> Watch:
    rank, world_size = exchange.rank, exchange.world_size
    own_timeout = _timeout_from_environment()
    server = default_tcp_store()
    if server is not None:
        # A unique name: the store might outlive this group and contain beats of an earlier one.
        told = exchange.texts(f"{uuid.uuid4().hex} {own_timeout}" if rank == 0 else "")
        name, timeout = told.split()
        if float(timeout) > 0:
            heartbeat = _Heartbeat(
                server, name, rank=rank, world_size=world_size, timeout_seconds=float(timeout)
            )
            heartbeat.sign_in()
            exchange.texts("")  # all have signed in
            heartbeat.start()
            return heartbeat
    return Watch(default_store(), rank=rank, world_size=world_size)
