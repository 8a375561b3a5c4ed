"""Exploration of the fastest sizes ("explore"), and of the fastest levels.

The largest size that fits at each level is found as with "auto". A race then finds the fastest.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automicro.errors import removed
from automicro.policy.auto import GROWTH, Halving, cut_size
from automicro.policy.ladder import Ladder
from automicro.policy.policy import Exploration, Outcome, Policy, require_cost, require_size
from automicro.policy.race import Arm, Measurement, Race, Value

# Until measurements exist, doubling the size is expected to save this share of the time.
EXPECTED = 0.1
# Steps of a round that count. The first step at an arm is cold because it compiles and selects
# kernels, and so is the first step that needs more memory than the previous round.
ROUND = 2
# Limit on the batches used to find sizes that fit; after it, the largest that fitted is used.
MOST_SETTLING = 16
# Limit on the batches to wait for a level, while all of them need a higher one.
MOST_AWAY = 4
# If a batch did not go whole at level 0, batches of at most this share of its elements might.
WHOLE = 0.75
# Sizes that differ by at most this many doublings are the same.
SAME = 0.2
# Exploring ends at this confidence.
SURE = 95
MOST_STEPS = 60

_AVERAGES = (
    "BatchNorm averages over the rows of a microbatch, so its size changes results as well as "
    'speed; batchnorm="ignore" accepts that'
)


@removed(max_minutes="Limit exploring by max_steps")
class Explore(Ladder):
    """Finds the fastest size during the run: every trial is a real training step.

    The gradient of a batch does not depend on the size, so slow trials cost only time. The sizes
    that fit are found as with `Halving` ("auto"). Then sizes up to the largest that fits are
    measured in turn, each time the one that could change the decision most. When
    the fastest is known well enough, the policy works like "auto" with at most that many rows per
    microbatch: a size that fails later is halved, and no other size is tried again.

    `exploration` reports the progress after each round. The confidence is the probability that no
    size is more than 1 % faster, given the measured spread. Exploring ends at a confidence of 95,
    or at a budget. The best size so far is then used.

    Batches with different rows or costs are compared by seconds per row × cost. Batches with less
    than half the rows do not count.

    Args:
        max_steps: maximum number of optimization batches for exploring.
        initial: rows to start from instead of the whole batch.
        max_microbatch_size: upper limit on the rows of a microbatch.
        multiple_of: propose multiples of this number if the batch has more rows.

    Attributes:
        exploration: progress after the last outcome; None before exploring starts and after it has
            ended.

    Raises:
        TypeError: if a number of rows or steps is not an int.
        ValueError: if a number is below 1.

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
    # Whether sizes smaller than the largest that fits at a level are tried as well.
    _tries_cuts = True

    def __init__(
        self,
        *,
        max_steps: int = MOST_STEPS,
        initial: int | None = None,
        max_microbatch_size: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        self._max_steps = require_size(max_steps, name="max_steps")
        sizes = Halving(
            initial=initial, max_microbatch_size=max_microbatch_size, multiple_of=multiple_of
        )
        self._explore(sizes, ("plain",), {})

    def with_levels(
        self, levels: Sequence[str], choices: Mapping[str, Sequence[Value]] | None = None
    ) -> "Explore":
        """Return a copy with the same options for several levels, which starts from the beginning.

        If the whole batch fits at level 0, no other level is tried, because each only costs time.
        Otherwise the sizes that fit are found at each level, and then sizes and levels are measured
        together. A level is measured only with sizes that do not fit at a level with fewer savers.

        Args:
            levels: names of the levels, the plain one first. Names of memory savers that are used
                together are joined by " + ".
            choices: additional coordinates with their values, those with the least memory first;
                `settings` has the values for the next attempt.

        Raises:
            ValueError: if level names are not unique, or a coordinate has no value.
        >>> policy = Explore().with_levels(["plain", "recompute"], {"sync": ["each", "last"]})
        >>> policy.levels, policy.settings
        (('plain', 'recompute'), {'sync': 'each'})
        """
        other = copy.deepcopy(self)
        other._explore(other.plain, levels, choices or {})
        return other

    def _explore(
        self, sizes: Policy, levels: Sequence[str], choices: Mapping[str, Sequence[Value]]
    ) -> None:
        super().__init__(sizes, levels)
        for name, values in choices.items():
            if not values:
                raise ValueError(f"{name} has no value to choose: give at least one")
        self._choices = {name: tuple(values) for name, values in choices.items()}
        self._least: dict[str, Value] = {name: values[0] for name, values in self._choices.items()}
        self._progress = _Progress()
        self.exploration: Exploration | None = None

    def __repr__(self) -> str:
        levels = f", {list(self.levels)}" if len(self.levels) > 1 else ""
        return f"Explore(max_steps={self._max_steps}{levels})"

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt will be compared."""
        progress = self._progress
        # If only levels are explored, nothing is compared while every batch goes whole.
        is_idle = not self._tries_cuts and progress.stage == progress.settling == 0
        return not (progress.is_over or is_idle) or super().compares_seconds

    @property
    def wants_to_measure(self) -> bool:
        """Whether a future batch might be cut smaller only to measure it, if allowed."""
        return not self._progress.is_over or super().wants_to_measure

    @property
    def settings(self) -> Mapping[str, Value]:
        """Other settings of the next attempt: the value of each coordinate, by name."""
        current = self._progress.current if self._is_at_current else None
        return (
            self._least if current is None else dict(zip(self._choices, current[2:], strict=True))
        )

    @property
    def _is_at_current(self) -> bool:
        """Whether the next attempt can run at the arm of the round, or at the chosen arm."""
        current = self._progress.current
        if current is None or self._progress.is_recovering:
            return False
        return current[0] == self.levels[self.level]

    @property
    def measurements(self) -> Sequence[Measurement]:
        """The measured steps of arms that still fit."""
        race = self._progress.race
        return [] if race is None else [each for each in race.measurements if each[0] in race.arms]

    def level_for(self, num_rows: int, cost: float | None = None) -> int:
        """Return the level of the round or of the choice, or a higher one if a batch needs it.

        A batch that goes whole at level 0 runs there.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        wanted, known = self._wanted_level, self._progress.not_whole
        if wanted > 0 and self._admitted(cost) == 0:
            may_fit = known is None or num_rows * require_cost(cost) <= WHOLE * known
            if may_fit and self.at(0).propose(num_rows, cost) >= num_rows:
                return 0
        return self._admitted(cost, at_least=wanted)

    @property
    def _wanted_level(self) -> int:
        """The level of the round or of the choice."""
        current = self._progress.current
        return self._progress.stage if current is None else self.levels.index(str(current[0]))

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found; if only levels are explored, it is chosen.

        Raises:
            TypeError: if the rows are not an int.
            ValueError: if the rows are below 1, the cost is not positive, or there is no such
                level.
        """
        does = self.at(level).suggest(rows, cost)
        if does and level > 0 and not self._tries_cuts:
            self._progress.is_over = True
            self._progress.current = (self.levels[level], rows, *self._least.values())
            # At level 0 this many rows did not go whole.
            self._progress.not_whole = rows * require_cost(cost)
        return does

    def take_rehearsal(self) -> None:
        """Try nothing that has not fitted yet: levels only rise unless all have been measured."""
        super().take_rehearsal()
        if len(self.levels) > 1 and self._progress.race is None:
            self._progress.is_over, self._progress.stage = True, 0

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the size to try next, among those that should fit.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        fits, most = super().propose(num_rows, cost), self._progress.most
        if most is None or not self._is_at_current:
            return fits
        rows = max(1, int(most / require_cost(cost) + 1e-9))
        return min(fits, cut_size(num_rows, rows, multiple_of=self.multiple_of))

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether the proposal for a batch may be smaller than necessary, only to measure.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        progress = self._progress
        if progress.is_over or (progress.race is None and progress.stage == 0):
            return super().is_measuring(num_rows, cost)
        return not progress.is_recovering

    def record(self, outcome: Outcome) -> None:
        """Learn from an attempt what fits and how fast it is."""
        progress, cost = self._progress, require_cost(outcome.cost)
        self.level = outcome.level
        is_smaller = super().is_measuring(outcome.num_rows, outcome.cost)
        is_least = dict(self._least) | dict(outcome.settings) == self._least
        # What fits is learned with the settings that need the least memory. During exploration no
        # other part compares times.
        if is_least or outcome.fits:
            seconds = outcome.seconds if progress.is_over else None
            peak = outcome.peak_bytes if is_least else None
            super().record(dataclasses.replace(outcome, seconds=seconds, peak_bytes=peak))
        self.grown_from = self.grown_from if progress.stage == 0 else None
        if not outcome.fits and outcome.level == 0 < self._wanted_level:
            elements = outcome.num_rows * cost
            progress.not_whole = min(progress.not_whole or elements, elements)
        if progress.is_over:
            self.exploration = None
            if not outcome.fits and not is_least and progress.current is not None:
                progress.current = (*progress.current[:2], *self._least.values())
            return
        if self.exploration is not None:
            self.exploration = dataclasses.replace(self.exploration, is_news=False)
        if not outcome.fits:
            progress.is_recovering = True
            # If only levels are explored, a smaller size is used at this level.
            if progress.race is not None and self._tries_cuts:
                self._exclude(outcome, cost)
            return
        if outcome.seconds is not None:
            if progress.race is None:
                self._settle(outcome, cost)
            else:
                self._measure(outcome, cost, counts=not is_smaller)
                is_round_over = progress.left <= 0 or progress.is_recovering
                if is_round_over or progress.steps >= self._max_steps:
                    self._end_round(progress.race)
        progress.is_recovering = False

    def _exclude(self, outcome: Outcome, cost: float) -> None:
        """Exclude the arm that failed and all arms that need at least as much memory."""
        progress, race = self._progress, self._progress.race
        assert race is not None
        savers, elements = self._savers(self.levels[outcome.level]), outcome.microbatch_size * cost
        choices = self._choices.values()
        asked = [
            values.index(outcome.settings.get(name, values[0]))
            for name, values in self._choices.items()
        ]

        def needs_as_much(arm: Arm) -> bool:
            level, rows, *settings = arm
            needs = [values.index(each) for each, values in zip(settings, choices, strict=True)]
            # It might fit with savers that the failed level lacks, or settings that need less.
            if not self._savers(str(level)) <= savers or any(map(int.__lt__, needs, asked)):
                return False
            return float(rows) * progress.cost >= elements

        race.exclude([each for each in race.arms if needs_as_much(each)])
        if not race.arms:  # continue with sizes that fit
            self._progress, self.exploration = _Progress(is_over=True), None

    def _savers(self, level: str) -> frozenset[str]:
        """Return the memory savers of a level."""
        return frozenset(level.split(" + ")) if level != self.levels[0] else frozenset()

    def _settle(self, outcome: Outcome, cost: float) -> None:
        """Find the largest size that fits at the current level, then move to the next level."""
        progress, stage, rows = self._progress, self._progress.stage, outcome.microbatch_size
        is_whole = rows == outcome.num_rows
        is_there = outcome.level == stage
        if is_there and stage == 0 and not self._tries_cuts and (is_whole or not self.adapts):
            return  # this batch runs at the fastest level already
        progress.settling += 1
        if not is_there:
            progress.away += 1
            if progress.away < MOST_AWAY and progress.settling < MOST_SETTLING:
                return
        elif progress.is_recovering:
            return
        else:
            asked = outcome.num_rows, outcome.cost
            is_calm = not super().is_measuring(*asked) and super().propose(*asked) <= rows
            if not is_calm and progress.settling < MOST_SETTLING:
                return
            progress.settled.append([self.levels[stage], rows, cost, is_whole])
        if not self.may_measure:
            progress.is_over, progress.stage = True, 0
            self._tell(self.levels[self.level], rows, ended=_AVERAGES)
            return
        for level in range(stage + 1, len(self.levels)):
            if self._could_pay(self.levels[level]):
                progress.stage, progress.settling = level, 0
                progress.away = 0 if is_there else MOST_AWAY - 1
                self._tell(self.levels[self.level], rows, is_news=False)
                return
        self._begin(outcome, cost)

    def _could_pay(self, level: str) -> bool:
        """Whether larger sizes might fit than with a subset of a level's savers."""
        return not any(
            (is_whole or not self.adapts) and self._savers(other) < self._savers(level)
            for other, _, _, is_whole in self._progress.settled
        )

    def _tell(self, level: Value, rows: int, **more: Any) -> None:
        name = str(level) if len(self.levels) > 1 else None
        self.exploration = Exploration(microbatch_size=rows, level=name, **more)

    def _tell_of(self, arm: Arm, **more: Any) -> None:
        level, rows, *settings = arm
        if not self._tries_cuts:
            rows = self._progress.largest[str(level)]
        more["settings"] = dict(zip(self._choices, settings, strict=True))
        self._tell(level, int(rows), steps=self._progress.steps, **more)

    def _begin(self, outcome: Outcome, cost: float) -> None:
        """Start measuring, now that the sizes that fit are known."""
        progress, rows = self._progress, outcome.num_rows
        arms: list[Arm] = []
        largest: dict[str, int] = {}
        for level, size, at_cost, _ in progress.settled:
            known = min(rows, max(1, int(size * at_cost / cost + 1e-9)))
            # A level with more savers takes more time, so it is useful only with sizes that do not
            # fit with fewer.
            fewer = [largest[each] for each in largest if self._savers(each) < self._savers(level)]
            less = max(fewer, default=0)
            largest[level] = known
            if not less or known > less * (1 + GROWTH):
                arms += self._arms(level, rows, known, more_than=less)
        progress.largest = largest
        progress.cost, progress.most_rows_seen = cost, rows
        if not arms:
            progress.is_over = True
            return
        progress.race = Race(arms, arms[0], EXPECTED if self._tries_cuts else 0.0)
        self._go_on(arms[0], is_cold=arms[0][0] != self.levels[outcome.level])
        if len(arms) > 1:
            self._tell_of(arms[0], is_news=False)
            return
        progress.is_over = True
        if arms[0][0] != self.levels[0]:
            self._tell_of(arms[0], confidence=99, ended="nothing else fits")

    def _arms(self, level: str, rows: int, most: int, *, more_than: int) -> list[Arm]:
        """Return all arms of a level, the base first."""
        sizes = cuts(rows, most, multiple_of=self.multiple_of) if self._tries_cuts else [most]
        sizes = [each for each in sizes if each > more_than]
        settings = itertools.product(*self._choices.values())
        return [(level, size, *values) for values in settings for size in sizes]

    def _go_on(self, arm: Arm, *, is_cold: bool) -> None:
        """Start a round or continue with the choice; the largest size at a level has no limit."""
        progress, rows = self._progress, int(arm[1])
        is_largest = rows >= progress.largest[str(arm[0])]
        progress.most = None if is_largest or not self._tries_cuts else rows * progress.cost
        progress.current, progress.is_cold = arm, is_cold
        progress.left, progress.has_run = ROUND, False

    def _measure(self, outcome: Outcome, cost: float, *, counts: bool) -> None:
        """Record a step of a round; it counts unless its only purpose was to measure a peak."""
        progress, arm = self._progress, self._progress.current
        assert progress.race is not None
        assert arm is not None
        assert outcome.seconds is not None
        progress.steps += 1
        progress.most_rows_seen = max(progress.most_rows_seen, outcome.num_rows)
        level = self.levels[outcome.level]
        if counts and not self._tries_cuts:
            progress.largest[level] = outcome.microbatch_size
        settings = self._least | dict(outcome.settings)
        if (level, arm[1], *settings.values()) != arm:
            progress.left -= 1
            return
        progress.has_run = True
        # A cold step compiles, selects kernels or grows the allocator, so its time does not predict
        # later steps.
        is_cold, progress.is_cold = progress.is_cold, False
        if is_cold or progress.is_recovering:
            return
        progress.left -= 1
        elements = outcome.microbatch_size * cost
        is_alike = abs(math.log2(elements / (float(arm[1]) * progress.cost))) <= SAME
        # A batch with few rows is not representative, but waiting for larger ones could take
        # forever, so the round goes on.
        is_usual = 2 * outcome.num_rows >= progress.most_rows_seen
        if counts and is_usual and (is_alike or not self._tries_cuts):
            seconds = outcome.seconds / (outcome.num_rows * cost)
            progress.race.measurements.append((arm, seconds, progress.steps, cost))

    def _end_round(self, race: Race) -> None:
        progress, before = self._progress, self._progress.current
        assert before is not None
        if not (progress.has_run or progress.is_recovering) and len(race.arms) > 1:
            race.exclude([before])  # every batch needs a different level
        if not race.arms:
            self._progress, self.exploration = _Progress(is_over=True), None
            return
        found = race.find()
        ended = "sure enough" if found.confidence >= SURE else None
        if ended is None and progress.steps >= self._max_steps:
            ended = f"max_steps={self._max_steps}"
        progress.is_over = ended is not None
        arm = found.best if progress.is_over else found.next
        is_alike = (arm[0], arm[2:]) == (before[0], before[2:])
        has_grown = not is_alike or float(arm[1]) > float(before[1])
        self._go_on(arm, is_cold=has_grown or not race.count(arm))
        self._tell_of(found.best, speedup=found.speedup, confidence=found.confidence, ended=ended)

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned and measured."""
        return super().state_dict() | {
            "among": self._among(),
            "progress": dataclasses.asdict(self._progress),
        }

    def _among(self) -> list[Any]:
        choices = [[name, list(values)] for name, values in self._choices.items()]
        return [list(self.levels), choices]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume exploring where an earlier run stopped, even within a round.

        With different levels or choices, exploring starts over with the sizes known to fit. The
        same applies to the state of a policy of sizes, or of a `Ladder` over one.

        Raises:
            ValueError: if another kind of policy wrote the state, or it is damaged. Nothing has
                changed then.
        """
        if state.get("kind") == Ladder.__name__:
            state = state | {"kind": type(self).__name__, "among": None, "progress": {}}
        super().load_state_dict(state)
        if state["kind"] != type(self).__name__:
            self._progress = _Progress()
        self.exploration = None

    def _load(self, state: dict[str, Any]) -> None:
        is_same = state["among"] == self._among()
        progress = _Progress.from_state(state["progress"]) if is_same else _Progress()
        # Read first, because a damaged state must raise before anything changes.
        super()._load(state)
        self._progress = progress


class FastestLevel(Explore):
    """Finds the level that is fastest with the largest size that fits there.

    >>> policy = FastestLevel(Halving(), ["plain", "recompute"])
    >>> for _ in range(40):
    ...     policy.level = policy.level_for(32)
    ...     size = policy.propose(32)
    ...     policy.record(Outcome(
    ...         num_rows=32,
    ...         microbatch_size=size,
    ...         fits=size <= (2, 16)[policy.level],
    ...         seconds=32 / size + (1, 1.3)[policy.level],
    ...         level=policy.level,
    ...     ))
    >>> policy.levels[policy.level_for(32)], policy.propose(32)
    ('recompute', 16)
    """

    # Nothing is tried while whole batches fit at level 0, because each level only costs time. After
    # the first batch that does not fit, the given policy finds sizes at each level. Levels are then
    # measured in turn with real steps, until the fastest is known well enough. Batches run at that
    # level from then on, except those that go whole at level 0. A size that fails later is reduced,
    # and if one row does not fit, a higher level is used.
    #
    # Without a clock, or if layers average over the rows of a microbatch (BatchNorm), levels only
    # rise as with `Ladder`.
    _tries_cuts = False

    def __init__(
        self,
        policy: Policy,
        levels: Sequence[str],
        *,
        max_steps: int = MOST_STEPS,
    ) -> None:
        self._max_steps = require_size(max_steps, name="max_steps")
        self._explore(policy, levels, {})

    __repr__ = Ladder.__repr__


def cuts(num_rows: int, most_rows: int, *, multiple_of: int = 1) -> list[int]:
    """Return the sizes worth measuring, largest first: of 1, 2, 3, 4, 6, 8, 12 … microbatches.

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


@dataclass
class _Progress:
    """The state of exploring."""

    stage: int = 0  # the level at which sizes that fit are being found
    settling: int = 0  # batches used for that
    away: int = 0  # batches among them at another level; starts higher if the last level was away
    # Levels with known sizes: name, largest size, cost of a row then, whether it was a whole batch.
    settled: list[list[Any]] = field(default_factory=list)
    not_whole: float | None = None  # elements of the smallest batch that failed to go whole
    # Of a row of the batch that measuring started with; sizes are reported in rows of this cost.
    cost: float = 1.0
    race: Race | None = None  # None until the sizes that fit are known
    largest: dict[str, int] = field(default_factory=dict)  # size at each level, by its name
    current: Arm | None = None  # of the current round, and later the choice
    most: float | None = None  # limit on the elements of a microbatch; None if none
    left: int = 0  # measured steps left in the round
    has_run: bool = False  # whether a step of the round ran at its arm
    is_cold: bool = False  # whether the next step of the round does not count
    steps: int = 0
    most_rows_seen: int = 0  # of a batch
    is_recovering: bool = False  # whether the current batch ran out of memory
    is_over: bool = False  # whether exploring has ended

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "_Progress":
        """Restore the state from `dataclasses.asdict`, after a round trip through JSON."""
        progress = cls(**copy.deepcopy(state))
        progress.race = None if state["race"] is None else Race.from_state(state["race"])
        progress.current = None if state["current"] is None else tuple(state["current"])
        return progress
