"""The vote: at agreed points all ranks learn whether all are well.

A healthy rank votes at points that all ranks come by. A rank that failed votes once, wherever it
is, and meets its peers' next vote. One exchange is one vote, whatever it is about, so that any two
can meet. What a rank knows changes only after an exchange succeeded.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

from automicro.distributed.ballot import SLOTS, Ballot, failed, healthy, padded_highs
from automicro.distributed.exchange import Exchange
from automicro.distributed.heartbeat import NoWatch, Watch
from automicro.distributed.roll_call import NoRollCall
from automicro.errors import DesyncError, PeerLostError, PeerStoppedError, RankError
from automicro.ranks import Agreement, Proposal, Report, Status


class _RollCall(Protocol):
    def missing(self) -> list[int] | None: ...


class Votes:
    """All votes of one rank.

    Args:
        exchange: reaches all ranks.
        roll_call: finds out who is missing when it does not.
        watch: knows of hosts that are gone.

    Attributes:
        count: how many exchanges there were.
        told: the highs of the exchange that ended the last attempt.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        roll_call: _RollCall | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.rank = exchange.rank
        self.world_size = exchange.world_size
        self.count = 0
        self._exchange = exchange
        self._roll_call = roll_call or NoRollCall()
        self._watch = watch or NoWatch()
        self._agreements = 0
        self._stopped: Status | None = None
        self.told: tuple[float, ...] = ()
        self._broken: RankError | None = None

    @property
    def stopped(self) -> Status | None:
        """What a vote told since the last agreement, if not all were well."""
        return self._stopped

    def cast(self, point: str, *, flag: bool = False) -> Ballot:
        """Say at a point of the program that this rank is well.

        Raises:
            PeerStoppedError: a peer is not. Raised again at every further vote of the attempt.
            PeerLostError: a peer is gone.
            DesyncError: a peer is at another point.
        """
        self._raise_stopped()
        return self._require_well(self._send(healthy(point, self._agreements, flag=flag), point))

    def agree(self, proposal: Proposal) -> Agreement:
        """Put together what all ranks bring to an attempt.

        Raises:
            RankError: as `cast`.
        """
        self.clear()
        names = list(proposal.denominators)
        point = f"agree on {names} for {'training' if proposal.training else 'evaluation'}"
        values = [float(proposal.denominators[name]) for name in names]
        own = healthy(point, self._agreements, flag=proposal.wants_to_stop)._replace(
            max_rows=float(proposal.largest),
            min_rows=float(proposal.num_rows),
            num_rows=float(proposal.num_rows),
            size=_proposed_size(proposal),
            highs=padded_highs(_highs(proposal, self.rank)),
        )
        together, sums = self._add_up(own, values, point)
        self._agreements += 1
        max_rows = int(together.max_rows)
        return Agreement(
            microbatch_size=max(1, int(min(together.size, max_rows))),
            max_rows=max_rows,
            min_rows=int(together.min_rows),
            num_rows=int(together.num_rows),
            denominators=dict(zip(names, sums, strict=False)),
            num_batches=int(together.highs[0]),
            cost=together.highs[1] if together.highs[1] > -math.inf else None,
            stops=together.flag > 0,
            lender=_lender(together.highs),
        )

    def commit(self, report: Report, *, flag: bool) -> tuple[bool, Report]:
        """Say that this rank is ready to commit; whether any flag was raised, what all told.

        Raises:
            RankError: as `cast`.
        """
        self._raise_stopped()
        own = healthy("commit", self._agreements, flag=flag)._replace(
            highs=padded_highs(report.highs)
        )
        together, sums = self._add_up(own, list(report.sums), "commit")
        return together.flag > 0, Report(sums=sums, highs=together.highs)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """As many values of every rank, added up over ranks.

        Raises:
            RankError: as `cast`.
        """
        point = f"{len(values)} values to add up"
        return self._add_up(healthy(point, self._agreements), list(values), point)[1]

    def most(self, value: float) -> float:
        """The highest value of any rank.

        Raises:
            RankError: as `cast`.
        """
        point = "the highest of a value"
        own = healthy(point, self._agreements)._replace(highs=padded_highs([value]))
        return self._require_well(self._send(own, point)).highs[0]

    def _add_up(self, own: Ballot, values: list[float], point: str) -> tuple[Ballot, list[float]]:
        together = self._require_well(self._send(own._replace(sums=_slots(values)), point))
        sums = list(together.sums)
        for start in range(SLOTS, len(values), SLOTS):
            more = self._send(own._replace(sums=_slots(values[start:])), point)
            sums += self._require_well(more).sums
        return together, sums[: len(values)]

    def from_first(self, values: Iterable[float]) -> list[float]:
        """Rank 0's values on every rank, at most as many as one ballot carries.

        Raises:
            RankError: as `cast`.
        """
        own = [float(value) for value in values]
        if len(own) > SLOTS:
            raise ValueError(f"from_first takes at most {SLOTS} values, got {len(own)}; send fewer")
        point = f"{len(own)} values of rank 0"
        ballot = healthy(point, self._agreements)
        if self.rank == 0:
            ballot = ballot._replace(sums=_slots(own))
        return list(self._require_well(self._send(ballot, point)).sums[: len(own)])

    def clear(self) -> None:
        """Forget what a vote told: the attempt that it ended is dealt with."""
        self._stopped = None

    def report(self, status: Status, highs: Sequence[float] = ()) -> Status:
        """Tell, once per failure, that this rank is not well; what all found together.

        Raises:
            PeerLostError: a peer is gone.
        """
        if self._stopped is None:
            together = self._send(failed(status, self.rank, highs=highs), "a failure")
            self._stopped, self.told = together.means, together.highs
        return self._stopped

    def explain(self, reason: str | None) -> str:
        """The reasons of all ranks that failed, after a vote told that some did. All call it.

        Raises:
            PeerLostError: a peer is gone.
        """
        text = "" if reason is None else f"rank {self.rank}: {reason}"
        try:
            return self._exchange.texts(text)
        except RuntimeError as error:
            self.give_up(error, "the reasons of a failure")

    def _send(self, ballot: Ballot, point: str) -> Ballot:
        if self._broken is not None:
            raise self._broken
        if (loss := self._watch.loss()) is not None:
            self._lose(loss)
        try:
            together = self._exchange.ballots(ballot)
        except RuntimeError as error:
            self.give_up(error, point)
        self.count += 1
        if not together.is_in_step:
            self._report_desync(point)
        return together

    def _require_well(self, together: Ballot) -> Ballot:
        if together.means is not Status.OK:
            self._stopped, self.told = together.means, together.highs
            self._raise_stopped()
        return together

    def _raise_stopped(self) -> None:
        if self._stopped is not None:
            raise PeerStoppedError(
                f"rank {self.rank} stops this attempt because another rank voted "
                f"{self._stopped.name}; all ranks roll back together"
            )

    def _report_desync(self, point: str) -> None:
        where = self.explain(f"{point}, after {self._agreements} agreements")
        self._broken = DesyncError(
            "ranks are at different points of the program, so their collectives do not match:\n"
            f"{where}\nGive every rank the same model, the same options and the same number of "
            "batches, and let no rank leave a step out."
        )
        raise self._broken

    def require_hosts(self, error: Exception) -> None:
        """After an error that several ranks have: raise one that names who is lost, if any is.

        Raises:
            PeerLostError: a host is gone.
        """
        if self._broken is None and (loss := self._watch.loss(fresh=True)) is not None:
            self._lose(loss, error)

    def _lose(self, loss: str, error: Exception | None = None) -> NoReturn:
        self._broken = PeerLostError(
            f"{loss}; rank {self.rank} stops, because nothing can be retried without all ranks: "
            "start again from the last checkpoint"
        )
        raise self._broken from error

    def give_up(self, error: Exception, point: str) -> NoReturn:
        """Say which peers are missing, after an exchange or a collective broke off.

        Raises:
            PeerLostError: always.
        """
        if (loss := self._watch.loss(fresh=True)) is not None:
            self._lose(loss, error)
        missing = self._roll_call.missing()
        if missing:
            names = ", ".join(map(str, missing))
            who = f"rank{'s' * (len(missing) > 1)} {names} of {self.world_size} gone or stuck"
        elif missing is None:
            who = "a peer is gone, and so is the store in which the others could have signed"
        else:
            who = "all ranks are still there, so one was too late or the network failed"
        self._broken = PeerLostError(
            f"rank {self.rank} could not go on at {point!r}: {who} ({error}). Nothing can be "
            "retried without all ranks: start again from the last checkpoint; the log of the "
            "missing rank, or the kernel's (out of memory on the host), has the cause."
        )
        raise self._broken from error


def _proposed_size(proposal: Proposal) -> float:
    # Whose whole batch fits says nothing about larger ones.
    fits = proposal.microbatch_size >= proposal.largest
    return math.inf if fits else float(proposal.microbatch_size)


def _highs(proposal: Proposal, rank: int) -> list[float]:
    cost = -math.inf if proposal.cost is None else proposal.cost
    has_rows_as = float(-rank) if proposal.num_rows else -math.inf
    return [proposal.num_batches, cost, float(proposal.lacks_rows), has_rows_as]


def _lender(highs: Sequence[float]) -> int | None:
    _, _, lacks_rows, lowest_with_rows, *_ = highs
    return int(-lowest_with_rows) if lacks_rows > 0 and lowest_with_rows > -math.inf else None


def _slots(values: list[float]) -> tuple[float, ...]:
    return tuple((values + [0.0] * SLOTS)[:SLOTS])
