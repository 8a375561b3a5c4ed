"""The policy behind "explore": what fits is found as by "auto", then which size is the fastest."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from automicro.policy.halving import Halving
from automicro.policy.policy import (
    Exploration,
    Outcome,
    Policy,
    cut_size,
    require_cost,
    require_kind,
    require_size,
)
from automicro.policy.search import Candidate, Finding, Measurement, Search

SIZE = "microbatch_size"
# A doubling of the size is expected to save this share of the time, until it is measured.
EXPECTED = {SIZE: 0.1}
# Steps of a round that count, and as many before them as are cold: the first at a size compiles
# and looks for kernels, the first at a larger size than before asks for memory anew.
ROUND = 2
# Batches that finding what fits may take, before the largest that fitted has to do.
MOST_SETTLING = 16
# Sizes that differ by more than this are not the same; in doublings.
SAME = 0.2
# It ends there; more steps are worth it as long as they pay within so many.
SURE = 95
HORIZON = 1000


class Explore(Policy):
    """Finds the fastest size in the run: every trial is a real training step.

    The gradient of a batch does not depend on the size, so nothing is lost but the time that a
    slower size takes. What fits is found as by `Halving`, which "auto" stands for. Then sizes of
    as many rows or fewer are measured in turns, each time the one that would most change the
    decision, until the fastest is known well enough. From there on it is "auto" with microbatches
    of at most that many rows: a size that fails later is halved, and none of them is tried again.

    After each round it tells how far it has come, see `Exploration`. The confidence is the
    probability that no size is more than 1 % faster, given the spread of what was measured. It
    ends at a confidence of 95, where more steps would take more time than they can win, or at a
    budget; the size is then the best so far.

    Batches of other rows and costs are compared by seconds per row × cost. Batches of less than
    half the rows do not count.

    Args:
        max_steps: optimization batches that exploring may take.
        max_minutes: that the batches of exploring may take together; None for any time.
        initial: rows to start from instead of the whole batch.
        max_microbatch_size: never propose more rows than these.
        multiple_of: propose multiples of it, where the batch has more rows.

    Attributes:
        exploration: how far it has come with the last outcome; None before it begins, and after
            it was over.

    Raises:
        TypeError: if a number of rows or steps is not an int.
        ValueError: if a number is below 1, or the minutes are not positive.

    >>> policy = Explore(max_steps=40)
    >>> for _ in range(40):
    ...     size = policy.propose(32)
    ...     policy.record(Outcome(
    ...         num_rows=32, microbatch_size=size, fits=True, seconds=1 + 0.2 * abs(size - 8)
    ...     ))
    >>> policy.propose(32)
    8
    """

    explores = True

    def __init__(
        self,
        *,
        max_steps: int = 60,
        max_minutes: float | None = None,
        initial: int | None = None,
        max_microbatch_size: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        self._max_steps = require_size(max_steps, name="max_steps")
        if max_minutes is not None and not 0 < max_minutes < math.inf:
            raise ValueError(
                f"max_minutes is {max_minutes}, but exploring takes time: give a positive number, "
                "or None to bound it by max_steps alone"
            )
        self._max_minutes = max_minutes
        self.multiple_of = multiple_of
        self._fitting = Halving(
            initial=initial, max_microbatch_size=max_microbatch_size, multiple_of=multiple_of
        )
        self._progress = _Progress()
        self.exploration: Exploration | None = None

    def __repr__(self) -> str:
        minutes = "" if self._max_minutes is None else f", max_minutes={self._max_minutes}"
        return f"Explore(max_steps={self._max_steps}{minutes})"

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt are compared."""
        return not self._progress.is_over or self._fitting.compares_seconds

    @property
    def wants_to_measure(self) -> bool:
        """Whether a batch to come might be cut smaller only to measure it, if it may be."""
        return not self._progress.is_over or self._fitting.wants_to_measure

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found.

        Raises:
            TypeError: if the rows are not an int.
            ValueError: if the rows are below 1, or the cost is not positive.
        """
        return self._fitting.suggest(rows, cost)

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the size to try next, of those that should fit.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        self._fitting.may_measure = self.may_measure
        fits = self._fitting.propose(num_rows, cost)
        most = self._progress.most_rows(require_cost(cost))
        if most is None or most >= fits:
            return fits
        return cut_size(num_rows, most, multiple_of=self.multiple_of)

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether what it proposes for a batch may be smaller than fits, and only there to measure.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        if self._progress.search is not None and not self._progress.is_over:
            return not self._progress.is_recovering
        return self._fitting.is_measuring(num_rows, cost)

    def record(self, outcome: Outcome) -> None:
        """Learn from an attempt: what fits, and how fast it was."""
        progress, cost = self._progress, require_cost(outcome.cost)
        # While it explores, nothing else compares sizes.
        seconds = outcome.seconds if progress.is_over else None
        self._fitting.record(dataclasses.replace(outcome, seconds=seconds))
        self.grown_from = self._fitting.grown_from
        if progress.is_over:
            self.exploration = None
            return
        if self.exploration is not None:
            self.exploration = dataclasses.replace(self.exploration, is_news=False)
        progress.seconds += outcome.seconds or 0.0
        if not outcome.fits:
            progress.failed(outcome.microbatch_size * cost)
            return
        if outcome.seconds is None:
            return
        if progress.search is None:
            if self._has_settled(outcome):
                self._begin(outcome, cost)
        else:
            progress.measured(outcome, cost)
            if progress.is_round_over or progress.steps >= self._max_steps:
                self._end_round()
        progress.is_recovering = False

    def _has_settled(self, outcome: Outcome) -> bool:
        """Whether the largest size that fits is found."""
        progress = self._progress
        progress.settling += 1
        if progress.is_recovering:
            return False
        if progress.settling >= MOST_SETTLING:
            return True
        rows, cost = outcome.num_rows, outcome.cost
        is_calm = not self._fitting.is_measuring(rows, cost)
        return is_calm and self._fitting.propose(rows, cost) <= outcome.microbatch_size

    def _begin(self, outcome: Outcome, cost: float) -> None:
        progress = self._progress
        if not self.may_measure:
            progress.is_over = True
            self.exploration = Exploration(
                microbatch_size=outcome.microbatch_size,
                speedup=1.0,
                confidence=0,
                steps=0,
                ended="layers average over the rows of a microbatch (BatchNorm), so sizes are no "
                'matter of time alone; batchnorm="ignore" accepts that',
            )
            return
        sizes = cuts(outcome.num_rows, outcome.microbatch_size, multiple_of=self.multiple_of)
        base = Candidate.of(**{SIZE: sizes[0]})
        progress.begin(
            Search([Candidate.of(**{SIZE: size}) for size in sizes], base, EXPECTED),
            rows=outcome.num_rows,
            cost=cost,
        )
        progress.is_over = len(sizes) == 1
        if not progress.is_over:
            self.exploration = Exploration(microbatch_size=sizes[0], is_news=False)

    def _end_round(self) -> None:
        progress = self._progress
        search = progress.search
        assert search is not None
        fits = self._fitting.propose(progress.rows, progress.cost)
        if all(fits * progress.cost < failed for failed in progress.failures):
            if fits > max(map(_rows, search.candidates)):
                search.add(Candidate.of(**{SIZE: fits}))
            search.exclude([each for each in search.candidates if _rows(each) > fits])
        found = search.find()
        ended = self._why_over(found)
        progress.is_over = ended is not None
        if progress.is_over:
            is_largest = _rows(found.best) >= fits
            progress.current = None if is_largest else _rows(found.best)
        else:
            progress.go_on(_rows(found.next))
        self.exploration = Exploration(
            microbatch_size=_rows(found.best),
            speedup=found.speedup,
            confidence=found.confidence,
            steps=progress.steps,
            ended=ended,
        )

    def _why_over(self, found: Finding) -> str | None:
        progress = self._progress
        if found.confidence >= SURE:
            return "sure enough"
        if progress.steps >= self._max_steps:
            return f"max_steps={self._max_steps}"
        if self._max_minutes is not None and progress.seconds >= 60 * self._max_minutes:
            return f"max_minutes={self._max_minutes}"
        if found.regret * HORIZON < found.next_loss * ROUND:
            return "more steps would not pay"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned and measured."""
        return {
            "kind": type(self).__name__,
            "fitting": self._fitting.state_dict(),
            "progress": self._progress.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run was with exploring, in the middle of a round, too.

        Raises:
            ValueError: if another kind of policy wrote the state, or it is damaged. Nothing has
                changed then.
        """
        require_kind(state, self)
        fitting = self._fitting.state_dict()
        try:
            progress = _Progress.from_state(state["progress"])
            self._fitting.load_state_dict(state["fitting"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            self._fitting.load_state_dict(fitting)
            raise ValueError(
                f"the state of an Explore policy is damaged ({error!r}): give what its "
                "state_dict() returned, or leave it out"
            ) from error
        self._progress, self.exploration = progress, None


def cuts(num_rows: int, most_rows: int, *, multiple_of: int = 1) -> list[int]:
    """Return the sizes worth measuring, the largest first: of 1, 2, 3, 4, 6, 8, 12 … microbatches.

    >>> cuts(32, 32), cuts(30, 12, multiple_of=4)
    ([32, 16, 11, 8, 6, 4, 3, 2, 1], [12, 8, 4])
    """
    sizes = [most_rows]
    for doubling in range(num_rows.bit_length() + 1):
        for count in (2**doubling, 3 * 2**doubling // 2):
            most = -(-num_rows // max(1, count))
            if most >= multiple_of:
                sizes.append(cut_size(num_rows, most, multiple_of=multiple_of))
    return sorted({size for size in sizes if size <= most_rows}, reverse=True)


def _rows(candidate: Candidate) -> int:
    return int(candidate[SIZE])


@dataclass
class _Progress:
    """Where exploring stands.

    Attributes:
        rows: of the batch that it began with.
        cost: of a row of it; sizes are told in rows of this cost.
        search: what was measured; None until it is known what fits.
        current: rows of the round that is running, and then those that were chosen; None for as
            many as fit.
        left: measured steps that the round still takes.
        steps: it took.
        seconds: it took.
        settling: batches that finding what fits took.
        has_grown: whether the round that begins is of more rows than the one before.
        most_rows_seen: of a batch.
        seen: sizes that had their first step.
        failures: rows × cost of microbatches that ran out of memory meanwhile.
        is_recovering: whether the batch that is running ran out of memory.
        is_over: whether the size is chosen.
    """

    rows: int = 0
    cost: float = 1.0
    search: Search | None = None
    current: int | None = None
    left: int = 0
    steps: int = 0
    seconds: float = 0.0
    settling: int = 0
    has_grown: bool = False
    most_rows_seen: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)
    failures: list[float] = dataclasses.field(default_factory=list)
    is_recovering: bool = False
    is_over: bool = False

    @property
    def is_round_over(self) -> bool:
        """Whether it is time to decide what comes next."""
        return self.left <= 0 or self.is_recovering

    def begin(self, search: Search, *, rows: int, cost: float) -> None:
        """It is known what fits; the step that showed it was the first at the base."""
        self.search, self.rows, self.cost = search, rows, cost
        self.current, self.left = _rows(search.base), ROUND
        self.seen, self.most_rows_seen = [_rows(search.base)], rows

    def go_on(self, rows: int) -> None:
        """Begin a round."""
        self.has_grown = self.current is not None and rows > self.current
        self.current, self.left = rows, ROUND

    def most_rows(self, cost: float) -> int | None:
        """Return the most rows of a microbatch where one of them costs so much; None for any."""
        if self.current is None or self.is_recovering:
            return None
        return max(1, int(self.current * self.cost / cost + 1e-9))

    def failed(self, elements: float) -> None:
        """A microbatch ran out of memory: none of as many elements is tried again."""
        self.is_recovering = True
        if self.search is None:
            return
        self.failures.append(elements)
        self.search.exclude(
            [each for each in self.search.candidates if _rows(each) * self.cost >= elements]
        )

    def measured(self, outcome: Outcome, cost: float) -> None:
        """Take note of a step of a round."""
        assert self.search is not None
        assert outcome.seconds is not None
        self.steps += 1
        elements = outcome.microbatch_size * cost
        self.most_rows_seen = max(self.most_rows_seen, outcome.num_rows)
        candidates = self.search.candidates
        if not candidates:
            return

        def distance(candidate: Candidate) -> float:
            return abs(math.log2(elements / (_rows(candidate) * self.cost)))

        nearest = min(candidates, key=distance)
        is_cold = _rows(nearest) not in self.seen
        if is_cold:
            self.seen.append(_rows(nearest))
        has_grown, self.has_grown = self.has_grown, False
        if is_cold or has_grown or self.is_recovering:
            return
        self.left -= 1
        # A batch of few rows says nothing of others, and is no reason to wait for ever.
        if distance(nearest) > SAME or 2 * outcome.num_rows < self.most_rows_seen:
            return
        self.search.tell(
            Measurement(
                candidate=nearest,
                seconds=outcome.seconds / (outcome.num_rows * cost),
                step=self.steps,
                work=cost,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        state = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in ("search", "seen", "failures")
        }
        state |= {"seen": list(self.seen), "failures": list(self.failures)}
        search = self.search
        state["search"] = None if search is None else search.state_dict()
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "_Progress":
        """Return what ``state_dict`` described."""
        progress = cls(**{each.name: state[each.name] for each in dataclasses.fields(cls)})
        if progress.search is not None:
            progress.search = Search.from_state(state["search"])
        progress.seen, progress.failures = list(progress.seen), list(progress.failures)
        return progress
