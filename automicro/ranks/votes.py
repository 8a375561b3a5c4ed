"""Votes: at agreed points all ranks learn whether every rank is healthy.

A healthy rank votes at points that all ranks reach. A failed rank votes once, wherever it is, which
is paired with its peers' next vote. One exchange is one vote, whatever its subject, so any two can
be paired. State of a rank changes only after an exchange succeeded.

Sums detect whether all members of a group reached a collective: each member contributes numbers
derived from the collective it is about to run. The first member contributes them negated, times the
number of other members, so they sum to zero if all arrived, for any number of groups. A message
may be received in a later vote than it was sent in, so every rank counts the messages of all.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from automicro.errors import DesyncError, PeerLostError, PeerStoppedError, RankError
from automicro.ranks.exchange import SLOTS, Ballot, Exchange, failed, healthy, padded_highs
from automicro.ranks.guards.collectives import Call
from automicro.ranks.heartbeat import Watch
from automicro.ranks.interface import Agreement, Proposal, Report, Status, Sync

_LARGEST = 1 << 24  # exact in float64 when multiplied by the ranks of any world


def brought(call: Call, rank: int) -> tuple[float, ...]:
    """Return the numbers that one rank contributes for a collective.

    >>> both = [Call(name="all_reduce", members=(0, 1), shape="3 float32")] * 2
    >>> {sum(each) for each in zip(*(brought(call, rank) for rank, call in enumerate(both)))}
    {0.0}
    """
    # A digest, because hash() of a string differs between processes.
    factor = -(len(call.members) - 1) if rank == call.members[0] else 1
    numbers = struct.unpack("4I", hashlib.sha256(str(call).encode()).digest()[:16])
    # Never 0, which would look as if no member had arrived.
    return tuple(float(factor * (1 + each % (_LARGEST - 1))) for each in numbers)


_SAME_CALLS = (
    "Let every rank train, evaluate and save at the same places, with the same model and options, "
    "and without leaving any of these out. A rank without further data passes None in place of a "
    "batch."
)

_ALL_COME = (
    "All ranks vote before every collective, because any of them can run out of memory, so each "
    "rank must reach it: run it at the same place on every rank, with as many numbers, and one per "
    "rank for subgroups, or leave it out."
)


class Votes:
    """All votes of one rank."""

    def __init__(self, exchange: Exchange, watch: Watch | None = None) -> None:
        self.rank = exchange.rank
        self.world_size = exchange.world_size
        self.count = 0  # number of exchanges
        self.is_over = False  # whether all ranks know of an error since their last joint call
        self._exchange = exchange
        self._watch = watch or Watch()
        self._agreements = 0
        self._trained = 0  # training agreements
        self._point = "at the beginning"
        self._stopped: Status | None = None
        self._culprit: int | None = None
        # Whether a rank reported in that exchange that its collectives differed.
        self.any_strayed = False
        # Whether an attempt has begun and was not voted on; set by the caller.
        self.is_in_attempt = False
        self.told: tuple[float, ...] = ()  # highs of the exchange that ended the last attempt
        # How often each message of this attempt was sent and not received, by sender, receiver and
        # shape. Messages under way when it fails would be taken for those of the next one.
        self._under_way: Counter[tuple[int, int, float]] = Counter()
        self._broken: RankError | None = None

    @property
    def has_messages_under_way(self) -> bool:
        """Whether ranks have sent messages in this attempt that were not received yet."""
        return any(self._under_way.values())

    @property
    def stopped(self) -> Status | None:
        """Worst status of a vote since the last agreement, or None if all ranks were healthy."""
        return self._stopped

    def cast(self, point: str, *, remedy: str = "") -> None:
        """Vote at a point of the program that this rank is healthy; raise unless all are."""
        self._raise_stopped()
        self._require_well(self._send(healthy(point, self._agreements), point, remedy))

    def collective(self, call: Call, *, where: str) -> None:
        """Vote before a collective of other code."""
        self._raise_stopped()
        is_message = call.peer is not None
        point = f"{'sending or receiving' if is_message else call.name} {where}"
        numbers = [] if is_message else list(brought(call, self.rank))
        own = healthy(point, self._agreements)._replace(sums=_slots(numbers))
        together = self._require_well(self._send(own, point, _ALL_COME, said=f"{call} {where}"))
        is_met = self._are_sent(call, point) if is_message else not any(together.sums)
        if not is_met:
            self._report_desync(f"{call} {where}", _ALL_COME)

    def _are_sent(self, call: Call, point: str) -> bool:
        """Count one message of each rank; return whether all received messages had been sent."""
        digest = hashlib.sha256(call.shape.encode()).digest()[:6]  # exact in a float64
        own = [float(call.sends), float(call.peer or 0), float(int.from_bytes(digest))]
        everywhere = [0.0] * len(own) * self.world_size
        everywhere[self.rank * len(own) : (self.rank + 1) * len(own)] = own
        told = iter(self._sum(everywhere, point))
        for rank, (sends, peer, shape) in enumerate(zip(told, told, told, strict=True)):
            pair = (rank, int(peer)) if sends else (int(peer), rank)
            self._under_way[*pair, shape] += 1 if sends else -1
        # Judged last, because a message can be received in the vote that sends it.
        return min(self._under_way.values()) >= 0

    def agree(self, proposal: Proposal, *, asker: str = "") -> Agreement:
        """Combine the proposals of all ranks for an attempt."""
        self.clear()
        self._under_way.clear()
        names = list(proposal.denominators)
        point = f"beginning to {'train on' if proposal.training else 'evaluate'} a batch"
        if names != [""]:
            point += f" with the losses {', '.join(names) or '(none)'}"
        point = f"{asker}: {point}" if asker else point
        values = [float(proposal.num_rows), *(proposal.denominators[name] for name in names)]
        own = healthy(point, self._agreements, flag=proposal.wants_to_stop)
        own = own._replace(highs=padded_highs(_highs(proposal, self.rank)))
        together, (num_rows, *sums) = self._add_up(own, values, point)
        self._agreements += 1
        self._trained += proposal.training
        # As in `_highs`.
        num_batches, cost, lacks_rows, holder, sync, extent, rows, lowest = together.highs
        level, size = _level_and_size(-lowest)
        return Agreement(
            microbatch_size=max(1, int(min(size, extent))),
            max_extent=int(extent),
            min_rows=int(-rows),
            num_rows=int(num_rows),
            denominators=dict(zip(names, sums, strict=True)),
            num_batches=int(num_batches),
            cost=cost if cost > -math.inf else None,
            stops=together.flag > 0,
            donor=int(-holder) if lacks_rows > 0 and holder > -math.inf else None,
            level=level,
            sync=Sync(int(-sync)),
        )

    def commit(
        self, report: Report, *, flag: bool, unused: Sequence[bool] = ()
    ) -> tuple[bool, Report, Sequence[bool]]:
        """Vote to commit; return whether any flag was raised, the sums, and ``unused``."""
        self._raise_stopped()
        point = "being done with a batch"
        fewest = -float(sum(unused))  # negated, so that the fewest of any rank counts
        # The number of answers is part of the point, because they might be summed next.
        own = healthy(f"{point}, {len(unused)} answers", self._agreements, flag=flag)
        own = own._replace(highs=(*padded_highs(report.highs)[:-1], fewest))
        together, sums = self._add_up(own, list(report.sums), point)
        everywhere = [False] * len(unused)
        if together.highs[-1] < 0:
            counts = self._sum(list(map(float, unused)), point)
            everywhere = [count == self.world_size for count in counts]
        return together.flag > 0, Report(sums=sums, highs=together.highs), everywhere

    def _sum(self, numbers: list[float], point: str) -> list[float]:
        """Sum any number of values over ranks, which voted to exchange equally many of them."""
        self.count += 1
        try:
            return self._exchange.sums(numbers)
        except RuntimeError as error:
            self.give_up(error, point)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Return the sums over ranks of equally many values."""
        point = f"summing {len(values)} numbers over ranks between batches"
        return self._add_up(healthy(point, self._agreements), list(values), point)[1]

    def most(self, value: float) -> float:
        """Return the highest value of any rank."""
        point = "finding the highest number of all ranks between batches"
        own = healthy(point, self._agreements)._replace(highs=padded_highs([value]))
        return self._require_well(self._send(own, point)).highs[0]

    def _add_up(self, own: Ballot, values: list[float], point: str) -> tuple[Ballot, list[float]]:
        together = self._require_well(self._send(own._replace(sums=_slots(values)), point))
        sums = list(together.sums)
        for start in range(SLOTS, len(values), SLOTS):
            more = self._send(own._replace(sums=_slots(values[start:])), point)
            sums += self._require_well(more).sums
        return together, sums[: len(values)]

    def clear(self) -> None:
        """Forget the result of the vote that ended an attempt."""
        self._stopped = None

    def report(
        self, status: Status, highs: Sequence[float] = (), *, strayed: bool = False
    ) -> Status:
        """Report, once per failure, that this rank failed; return the worst status of all ranks."""
        # A rank that learned of the failure by a vote must not vote on it again, because its peers
        # would not.
        if self._stopped is None:
            ballot = failed(status, self.rank, highs=highs)._replace(flag=float(strayed))
            self._hear(self._send(ballot, "reporting a failure"))
        assert self._stopped is not None
        return self._stopped

    def state_here(self, *, rolls_back: bool) -> str:
        """Return a description of this rank's state after another rank failed."""
        if rolls_back:
            return "The current batch was rolled back on this rank: the state is as before it."
        return (
            f"This rank was between attempts ({self._point}) and rolled nothing back, so ranks "
            "may be one step apart."
        )

    def explain(self, reason: str | None) -> str:
        """Exchange the reasons of failed ranks after a vote reported one. All must call it."""
        text = "" if reason is None else f"rank {self.rank}: {reason}"
        try:
            return self._exchange.texts(text)
        except RuntimeError as error:
            self.give_up(error, "exchanging reasons")

    def _send(self, ballot: Ballot, point: str, remedy: str = "", *, said: str = "") -> Ballot:
        # Nothing is sent after a loss or a desync, because peers that stopped would not answer.
        if self._broken is not None:
            raise self._broken
        # Asked first, because an exchange with a lost host fails only after its own, longer
        # timeout.
        if (loss := self._watch.loss()) is not None:
            self._lose(loss)
        self._point = point
        try:
            together = self._exchange.ballots(ballot)
        except RuntimeError as error:
            self.give_up(error, point)
        self.count += 1
        if not together.is_in_step:
            self._report_desync(said or point, remedy or _SAME_CALLS)
        return together

    def _require_well(self, together: Ballot) -> Ballot:
        if together.means is not Status.OK:
            self._hear(together)
            self._raise_stopped()
        return together

    def _hear(self, together: Ballot) -> None:
        self._stopped, self.told = together.means, together.highs
        self._culprit = int(together.culprit) if together.culprit < math.inf else None
        self.any_strayed = together.flag > 0

    def _raise_stopped(self) -> None:
        if self._stopped is not None:
            who = "another rank" if self._culprit is None else f"rank {self._culprit}"
            stopped = PeerStoppedError(
                f"rank {self.rank} stops this attempt because {who} voted {self._stopped.name}; "
                "all ranks roll back together"
            )
            stopped.culprit = self._culprit
            raise stopped

    def _report_desync(self, point: str, remedy: str) -> None:
        # All ranks read the same result, so all of them join this exchange.
        where = self.explain(f"{point}, after {self._attempts_so_far()}")
        self._broken = DesyncError(
            "ranks are at different points of the program, so they would wait for each other:\n"
            f"{where}\n{remedy}"
        )
        raise self._broken

    def _attempts_so_far(self) -> str:
        trained, evaluated = self._trained, self._agreements - self._trained
        tries = "1 attempt" if trained == 1 else f"{trained} attempts"
        return f"{tries} to train on a batch and {evaluated} to evaluate one"

    def require_hosts(self, error: Exception) -> None:
        """Raise an error that names the lost host, if any, after an error of several ranks."""
        if self._broken is None and (loss := self._watch.loss(fresh=True)) is not None:
            self._lose(loss, error)

    def _lose(self, loss: str, error: Exception | None = None) -> NoReturn:
        self._broken = PeerLostError(
            f"{loss}; rank {self.rank} stops, because a retry needs all ranks: start again from "
            "the last checkpoint"
        )
        raise self._broken from error

    def give_up(self, error: Exception, point: str) -> NoReturn:
        """Raise an error that names the missing peers, after an exchange was interrupted."""
        if (loss := self._watch.loss(fresh=True)) is not None:
            self._lose(loss, error)
        # The watch knows of no lost host, so processes have ended or hang.
        missing = self._watch.missing()
        if missing:
            names = ", ".join(map(str, missing))
            who = f"rank{'s' * (len(missing) > 1)} {names} of {self.world_size} gone or stuck"
        elif missing is None:
            who = "a peer is gone, and so is the store for a roll call of the others"
        else:
            who = f"all ranks are still there, so one was too late or the network failed ({error})"
        self._broken = PeerLostError(
            f"rank {self.rank} of {self.world_size} could not go on at {point!r}: {who}. A retry "
            "needs all ranks: start again from the last checkpoint; the log of the missing rank, "
            "or the kernel's (out of memory on the host), has the cause"
        )
        raise self._broken from error


# The minimum over ranks must be the smallest size at the highest level, so each level subtracts
# this much. Sizes are less than half of it, and float64 holds all values exactly.
_LEVEL = 2.0**40


def _proposed_size(proposal: Proposal) -> float:
    # A rank whose whole batch fits says nothing about larger batches.
    fits = proposal.microbatch_size >= proposal.largest
    size = _LEVEL / 2 if fits else float(proposal.microbatch_size)
    return size - proposal.level * _LEVEL


def _level_and_size(lowest: float) -> tuple[int, float]:
    """Return the highest level, and the smallest size proposed at that level.

    >>> sizes = [Proposal(num_rows=9, microbatch_size=2), Proposal(num_rows=9, microbatch_size=4)]
    >>> above = Proposal(num_rows=9, microbatch_size=8, level=1)
    >>> _level_and_size(min(map(_proposed_size, sizes)))
    (0, 2.0)
    >>> _level_and_size(min(map(_proposed_size, [*sizes, above])))
    (1, 8.0)
    """
    level = math.ceil(-lowest / _LEVEL)
    return level, lowest + level * _LEVEL


def _highs(proposal: Proposal, rank: int) -> list[float]:
    return [
        proposal.num_batches,
        -math.inf if proposal.cost is None else proposal.cost,
        proposal.lacks_rows,
        -rank if proposal.num_rows else -math.inf,  # the lowest rank with rows
        -proposal.sync,
        proposal.largest,
        -proposal.num_rows,
        -_proposed_size(proposal),
    ]


def _slots(values: list[float]) -> tuple[float, ...]:
    return tuple((values + [0.0] * SLOTS)[:SLOTS])
