"""The fastest of what fits: sizes behind "explore", and levels beside sizes that are found.

What fits is found as by "auto", at each level. Then it is measured which is the fastest.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automicro.policy.auto import GROWTH, Halving
from automicro.policy.ladder import Ladder
from automicro.policy.policy import (
    Exploration,
    Outcome,
    Policy,
    cut_size,
    require_cost,
    require_kind,
    require_size,
)
from automicro.policy.search import Candidate, Finding, Measurement, Search, Value

SIZE = "microbatch_size"
LEVEL = "level"
# A doubling of the size is expected to save this share of the time, until it is measured.
EXPECTED = {SIZE: 0.1}
# Steps of a round that count, and as many before them as are cold: the first at a size compiles
# and looks for kernels, the first at a larger size than before asks for memory anew.
ROUND = 2
# Batches that finding what fits may take, before the largest that fitted has to do.
MOST_SETTLING = 16
# Batches that a level is waited for while they all need a higher one.
MOST_AWAY = 4
# Where a batch did not go whole at level 0, those of at most this share of its elements may.
WHOLE = 0.75
# Sizes that differ by more than this are not the same; in doublings.
SAME = 0.2
# It ends there; more steps are worth it as long as they pay within so many.
SURE = 95
HORIZON = 1000
MOST_STEPS = 60

_AVERAGES = (
    "layers average over the rows of a microbatch (BatchNorm), so sizes are no "
    'matter of time alone; batchnorm="ignore" accepts that'
)


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
    # Whether smaller sizes than the largest that fits at a level are tried as well.
    _tries_cuts = True

    def __init__(
        self,
        *,
        max_steps: int = MOST_STEPS,
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
        sizes = Halving(
            initial=initial, max_microbatch_size=max_microbatch_size, multiple_of=multiple_of
        )
        self._search_in(sizes, ("plain",), {})

    def with_levels(
        self, levels: Sequence[str], choices: Mapping[str, Sequence[Value]] | None = None
    ) -> "Explore":
        """Return a policy with the same options that has not begun, for several levels.

        Where the whole batch fits at level 0, no other is tried: each level only takes time. Else
        what fits is found at each level, and then sizes and levels are measured together. A level
        is measured only with sizes that do not fit at one with fewer rungs.

        Args:
            levels: as of `Ladder`. Names of rungs that are used together are joined by " + ".
            choices: further coordinates and their values, those that need the least memory first;
                `settings` tells those of the next attempt.

        Raises:
            ValueError: if levels have no names of their own, or a coordinate has no value.

        >>> policy = Explore().with_levels(["plain", "recompute"], {"sync": ["each", "last"]})
        >>> policy.levels, policy.settings
        (('plain', 'recompute'), {'sync': 'each'})
        """
        other = copy.deepcopy(self)
        other._search_in(other._fitting.at(0), levels, choices or {})
        return other

    def _search_in(
        self, sizes: Policy, levels: Sequence[str], choices: Mapping[str, Sequence[Value]]
    ) -> None:
        for name, values in choices.items():
            if not values:
                raise ValueError(f"{name} has no value to choose: give at least one")
        self.multiple_of = sizes.multiple_of
        self.level = 0
        self._fitting = Ladder(sizes, levels)
        self.levels = self._fitting.levels
        self._choices = {name: tuple(values) for name, values in choices.items()}
        self._progress = _Progress()
        self.exploration: Exploration | None = None

    def __repr__(self) -> str:
        minutes = "" if self._max_minutes is None else f", max_minutes={self._max_minutes}"
        levels = f", {list(self.levels)}" if len(self.levels) > 1 else ""
        return f"{type(self).__name__}(max_steps={self._max_steps}{minutes}{levels})"

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt are compared."""
        fitting = self._fitting.at(self.level)
        return not (self._progress.is_over or self._is_idle) or fitting.compares_seconds

    @property
    def wants_to_measure(self) -> bool:
        """Whether a batch to come might be cut smaller only to measure it, if it may be."""
        return not self._progress.is_over or self._fitting.wants_to_measure

    @property
    def _is_idle(self) -> bool:
        """Whether nothing has to be found yet: every batch has gone whole."""
        progress = self._progress
        return not self._tries_cuts and progress.stage == progress.settling == 0

    @property
    def settings(self) -> Mapping[str, Value]:
        """What else the next attempt is to be run with: by each coordinate's name, its value."""
        progress = self._progress
        if self._is_idle and not (progress.is_over or progress.needs_least):
            return {name: values[-1] for name, values in self._choices.items()}
        current = progress.current if self._is_at_current else None
        return {
            name: (current and current.get(name)) or values[0]
            for name, values in self._choices.items()
        }

    @property
    def _is_at_current(self) -> bool:
        """Whether the next attempt may be what the round, or the choice, is."""
        progress = self._progress
        if progress.current is None or progress.is_recovering:
            return False
        return self._level_of(progress.current) == self.level

    def _level_of(self, candidate: Candidate) -> int:
        name = candidate.get(LEVEL)
        return 0 if name is None else self.levels.index(str(name))

    def level_for(self, num_rows: int, cost: float | None = None) -> int:
        """Return the level of the round, or of the choice, or a higher one that a batch needs.

        A batch that goes whole at level 0 runs there.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        wanted, known = self._wanted_level, self._progress.not_whole
        if wanted > 0 and self._fitting.admitted(cost) == 0:
            elements = num_rows * require_cost(cost)
            may_fit = known is None or elements <= WHOLE * known
            if may_fit and self._fitting.at(0).propose(num_rows, cost) >= num_rows:
                return 0
        return self._fitting.admitted(cost, at_least=wanted)

    @property
    def _wanted_level(self) -> int:
        """The level of the round or of the choice."""
        progress = self._progress
        return progress.stage if progress.current is None else self._level_of(progress.current)

    def climb(self, cost: float | None = None) -> bool:
        """Go one level up, after not even the smallest size fitted; False at the highest.

        Raises:
            ValueError: if the cost is not positive.
        """
        self._fitting.level = self.level
        return self._fitting.climb(cost)

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found.

        Args:
            rows: of a microbatch.
            cost: of one of them.
            level: at which they fitted.

        Raises:
            TypeError: if the rows are not an int.
            ValueError: if the rows are below 1, the cost is not positive, or there is no such
                level.
        """
        return self._fitting.at(level).suggest(rows, cost)

    def take_rehearsal(self) -> None:
        """Try nothing that has not fitted yet: levels are only climbed, unless all are known."""
        self._fitting.take_rehearsal()
        if len(self.levels) > 1 and self._progress.search is None:
            self._progress.is_over, self._progress.stage = True, 0

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the size to try next, of those that should fit.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        fits = self._fits(num_rows, cost)
        most = self._progress.most_rows(require_cost(cost)) if self._is_at_current else None
        if most is None or most >= fits:
            return fits
        return cut_size(num_rows, most, multiple_of=self.multiple_of)

    def _fits(self, num_rows: int, cost: float | None, *, level: int | None = None) -> int:
        """The largest size that should fit at a level, that of the next attempt unless given."""
        fitting = self._fitting.at(self.level if level is None else level)
        fitting.may_measure = self.may_measure
        return fitting.propose(num_rows, cost)

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether what it proposes for a batch may be smaller than fits, and only there to measure.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        progress = self._progress
        if progress.is_over or (progress.search is None and progress.stage == 0):
            return self._fitting.at(self.level).is_measuring(num_rows, cost)
        return not progress.is_recovering

    def record(self, outcome: Outcome) -> None:
        """Learn from an attempt: what fits, and how fast it was."""
        progress, cost = self._progress, require_cost(outcome.cost)
        self.level = outcome.level
        is_smaller = self._fitting.at(self.level).is_measuring(outcome.num_rows, outcome.cost)
        self._tell_fitting(outcome)
        if self._is_idle and not (outcome.fits or self._needs_least(outcome.settings)):
            progress.needs_least = True
            return
        if not outcome.fits and outcome.level == 0 < self._wanted_level:
            elements = outcome.num_rows * cost
            progress.not_whole = min(progress.not_whole or elements, elements)
        if progress.is_over:
            self.exploration = None
            if not outcome.fits and not self._needs_least(outcome.settings):
                progress.current = self._with_least(progress.current)
            return
        if self.exploration is not None:
            self.exploration = dataclasses.replace(self.exploration, is_news=False)
        progress.seconds += outcome.seconds or 0.0
        if not outcome.fits:
            self._take_failure(outcome, cost)
            return
        if outcome.seconds is not None:
            if progress.search is None:
                self._settle(outcome, cost)
            else:
                progress.measured(outcome, cost, of=self._place(outcome), counts=not is_smaller)
                if progress.is_round_over or progress.steps >= self._max_steps:
                    self._end_round()
        progress.is_recovering = False

    def _tell_fitting(self, outcome: Outcome) -> None:
        """What fits is asked with the settings that need the least memory."""
        is_least = self._needs_least(outcome.settings)
        told = outcome
        if not self._progress.is_over:  # while it explores, nothing else compares sizes
            told = dataclasses.replace(told, seconds=None)
        if not is_least:
            told = dataclasses.replace(told, peak_bytes=None)
        if is_least or outcome.fits:
            self._fitting.may_measure = self.may_measure
            self._fitting.record(told)
        self.grown_from = self._fitting.grown_from if self._progress.stage == 0 else None

    def _needs_least(self, chosen: Mapping[str, Value]) -> bool:
        return all(chosen.get(name, each[0]) == each[0] for name, each in self._choices.items())

    def _with_least(self, candidate: Candidate | None) -> Candidate | None:
        """With the settings that need the least memory."""
        least = {name: values[0] for name, values in self._choices.items()}
        return candidate and Candidate.of(**(dict(candidate.coordinates) | least))

    def _take_failure(self, outcome: Outcome, cost: float) -> None:
        """What failed is not tried again, nor what needs more."""
        progress, elements = self._progress, outcome.microbatch_size * cost
        progress.is_recovering = True
        if progress.search is None:
            return
        rungs, is_least = self._rungs(outcome.level), self._needs_least(outcome.settings)
        if is_least:
            progress.failures.append((outcome.level, elements))
        progress.search.exclude(
            [
                each
                for each in progress.search.candidates
                if self._rungs(self._level_of(each)) <= rungs
                and all(
                    values.index(each[name]) >= values.index(outcome.settings.get(name, values[0]))
                    for name, values in self._choices.items()
                )
                and (not is_least if _rows(each) is None else progress.elements(each) >= elements)
            ]
        )
        if not progress.search.candidates:
            self._leave_choosing()

    def _leave_choosing(self) -> None:
        """Nothing is left to compare: go on with what fits."""
        self._progress = _Progress(is_over=True)
        self.exploration = None

    def _place(self, outcome: Outcome) -> dict[str, Value]:
        """The coordinates of an attempt but for its size."""
        place: dict[str, Value] = {}
        if len(self.levels) > 1:
            place[LEVEL] = self.levels[outcome.level]
        for name, values in self._choices.items():
            place[name] = outcome.settings.get(name, values[0])
        return place

    def _rungs(self, level: int) -> frozenset[str]:
        """What a level switches on."""
        return frozenset(self.levels[level].split(" + ")) if level else frozenset()

    def _settle(self, outcome: Outcome, cost: float) -> None:
        """Wait for the largest size that fits at the level in turn, then go on to the next."""
        progress, stage = self._progress, self._progress.stage
        is_whole = outcome.microbatch_size == outcome.num_rows
        is_there = outcome.level == stage
        if is_there and stage == 0 and not self._tries_cuts and (is_whole or not self.adapts):
            return  # the fastest of all, as far as this batch tells
        progress.settling += 1
        if not is_there:
            progress.away += 1
            if progress.away < MOST_AWAY and progress.settling < MOST_SETTLING:
                return
        elif progress.is_recovering:
            return
        else:
            rows, known = outcome.num_rows, outcome.cost
            is_calm = not self._fitting.at(stage).is_measuring(rows, known)
            is_calm = is_calm and self._fits(rows, known) <= outcome.microbatch_size
            if not is_calm and progress.settling < MOST_SETTLING:
                return
            progress.settled.append((stage, outcome.microbatch_size, cost, is_whole))
        if not self.may_measure:
            self._decline(outcome)
            return
        for level in range(stage + 1, len(self.levels)):
            if self._could_pay(level):
                progress.stage, progress.settling = level, 0
                progress.away = 0 if is_there else MOST_AWAY - 1
                self._tell(Exploration(microbatch_size=outcome.microbatch_size, is_news=False))
                return
        self._begin(outcome, cost)

    def _could_pay(self, level: int) -> bool:
        """Whether larger sizes might fit than with some of a level's rungs."""
        return not any(
            (is_whole or not self.adapts) and self._rungs(other) < self._rungs(level)
            for other, _, _, is_whole in self._progress.settled
        )

    def _decline(self, outcome: Outcome) -> None:
        self._progress.is_over, self._progress.stage = True, 0
        self._tell(Exploration(microbatch_size=outcome.microbatch_size, ended=_AVERAGES))

    def _tell(self, exploration: Exploration) -> None:
        if len(self.levels) > 1 and exploration.level is None:
            exploration = dataclasses.replace(exploration, level=self.levels[self.level])
        self.exploration = exploration

    def _begin(self, outcome: Outcome, cost: float) -> None:
        """It is known what fits: measure it."""
        progress, rows = self._progress, outcome.num_rows
        candidates: list[Candidate] = []
        largest: dict[int, int] = {}
        for level, size, at_cost, _ in progress.settled:
            known = min(rows, max(1, int(size * at_cost / cost + 1e-9)))
            less = self._fit_with_less(level, largest)
            largest[level] = known
            if known > less * (1 + GROWTH) or not less:
                candidates += self._candidates(level, rows, known, more_than=less)
        if not candidates:
            progress.is_over = True
            return
        base = candidates[0]
        progress.begin(Search(candidates, base, self._expected), rows=rows, cost=cost)
        progress.has_grown = self._level_of(base) != outcome.level
        progress.seen = [each for each in candidates if _rows(each) in (None, *largest.values())]
        progress.sizes = {self.levels[level]: size for level, size in largest.items()}
        size = _rows(base) or largest[self._level_of(base)]
        if len(candidates) > 1:
            self._tell(self._exploration(base, size, is_news=False))
            return
        progress.is_over, progress.current = True, _without_size(base)
        if self._level_of(base) > 0:
            self._tell(self._exploration(base, size, confidence=99, ended="nothing else fits"))

    @property
    def _expected(self) -> Mapping[str, float]:
        return EXPECTED if self._tries_cuts else {}

    def _fit_with_less(self, level: int, largest: Mapping[int, int]) -> int:
        """The most rows that fit with some of a level's rungs; 0 for none."""
        rungs = self._rungs(level)
        return max((largest[each] for each in largest if self._rungs(each) < rungs), default=0)

    def _candidates(self, level: int, rows: int, most: int, *, more_than: int) -> list[Candidate]:
        """All that can be chosen at a level, the base first."""
        sizes: list[dict[str, Value]] = [{}]
        if self._tries_cuts:
            found = cuts(rows, most, multiple_of=self.multiple_of)
            sizes = [{SIZE: size} for size in found if size > more_than]
        name = {LEVEL: self.levels[level]} if len(self.levels) > 1 else {}
        settings = [
            dict(zip(self._choices, values, strict=True))
            for values in itertools.product(*self._choices.values())
        ]
        return [Candidate.of(**name, **each, **size) for each in settings for size in sizes]

    def _end_round(self) -> None:
        progress = self._progress
        search = progress.search
        assert search is not None
        is_away = not progress.has_run and not progress.is_recovering
        if is_away and len(search.candidates) > 1 and progress.current is not None:
            search.exclude([progress.current])  # every batch needs another level
        if self._tries_cuts:
            self._refit(search)
        if not search.candidates:
            self._leave_choosing()
            return
        found = search.find()
        ended = self._why_over(found)
        progress.is_over = ended is not None
        size = _rows(found.best)
        if progress.is_over:
            level = self._level_of(found.best)
            is_largest = size is None or size >= self._fits(
                progress.rows, progress.cost, level=level
            )
            progress.current = _without_size(found.best) if is_largest else found.best
        else:
            progress.go_on(found.next)
        self._tell(
            self._exploration(
                found.best,
                size or progress.sizes[str(found.best.get(LEVEL) or self.levels[0])],
                speedup=found.speedup,
                confidence=found.confidence,
                ended=ended,
            )
        )

    def _refit(self, search: Search) -> None:
        """Sizes that fit meanwhile join, and those that do not any more are left out."""
        progress = self._progress
        for level in dict.fromkeys(level for level, *_ in progress.settled):
            here = [each for each in search.candidates if self._level_of(each) == level]
            if not here:
                continue
            fits = self._fits(progress.rows, progress.cost, level=level)
            failed = [elements for at, elements in progress.failures if at == level]
            if any(fits * progress.cost >= elements for elements in failed):
                continue
            if fits > max(_rows(each) or 0 for each in here):
                for each in dict.fromkeys(map(_without_size, here)):
                    search.add(Candidate.of(**dict(each.coordinates), **{SIZE: fits}))
            search.exclude([each for each in here if (_rows(each) or 0) > fits])

    def _exploration(self, candidate: Candidate, size: int, **more: Any) -> Exploration:
        name = candidate.get(LEVEL)
        return Exploration(
            microbatch_size=size,
            level=None if name is None else str(name),
            settings={each: candidate[each] for each in self._choices},
            steps=self._progress.steps,
            **more,
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
            "among": self._among(),
            "fitting": self._fitting.state_dict(),
            "progress": self._progress.state_dict(),
        }

    def _among(self) -> list[Any]:
        choices = [[name, list(values)] for name, values in self._choices.items()]
        return [list(self.levels), choices]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run was with exploring, in the middle of a round, too.

        Among other levels or choices it begins anew, with what is known to fit.

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
                f"the state of an {type(self).__name__} policy is damaged ({error!r}): give what "
                "its state_dict() returned, or leave it out"
            ) from error
        is_same = state["among"] == self._among()
        self._progress = progress if is_same else _Progress()
        self.level, self.exploration = self._fitting.level, None


class FastestLevel(Explore):
    """Finds the level that is the fastest with the largest size that fits there.

    While whole batches fit at level 0 nothing is tried: each level only takes time. From the first
    batch on that does not, what fits is found at each level as the given policy finds it, and the
    levels are measured in turns, with real steps, until it is known well enough which is the
    fastest. From there on batches run at that level, but for those that go whole at level 0. A
    size that fails later becomes smaller, and a row that does not fit runs at a higher level.

    Without a clock, or where layers average over the rows of a microbatch (BatchNorm), it only
    climbs, as `Ladder` does.

    Args:
        policy: of the sizes.
        levels: as of `Ladder`.
        choices: as of `Explore.with_levels`.
        max_steps: optimization batches that are measured, what fits being known.

    Raises:
        ValueError: as `Explore.with_levels`.

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

    _tries_cuts = False

    def __init__(
        self,
        policy: Policy,
        levels: Sequence[str],
        choices: Mapping[str, Sequence[Value]] | None = None,
        *,
        max_steps: int = MOST_STEPS,
    ) -> None:
        super().__init__(max_steps=max_steps)
        self.adapts = policy.adapts
        self._search_in(policy, levels, choices or {})

    def __repr__(self) -> str:
        return f"FastestLevel({self.plain!r}, {list(self.levels)})"

    @property
    def plain(self) -> Policy:
        """Of the sizes at level 0."""
        return self._fitting.plain

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found; a level above 0 is the choice.

        Raises:
            TypeError: if the rows are not an int.
            ValueError: if the rows are below 1, the cost is not positive, or there is no such
                level.
        """
        does = super().suggest(rows, cost, level=level)
        if does and level > 0:
            self._progress.is_over = True
            self._progress.current = Candidate.of(**{LEVEL: self.levels[level]})
            # At level 0 as many rows did not go whole.
            self._progress.not_whole = rows * require_cost(cost)
        return does

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run was.

        The state of the sizes' policy alone, or of a `Ladder` over it, is what is known to fit.

        Raises:
            ValueError: if another kind of policy wrote the state, or it is damaged. Nothing has
                changed then.
        """
        if state.get("kind") in ("Ladder", type(self.plain).__name__):
            self._fitting.load_state_dict(state)
            self._progress, self.exploration = _Progress(), None
            return
        super().load_state_dict(state)


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


def _rows(candidate: Candidate) -> int | None:
    """Its size; None where it is the largest that fits."""
    size = candidate.get(SIZE)
    return None if size is None else int(size)


def _without_size(candidate: Candidate) -> Candidate:
    return Candidate.of(**{name: each for name, each in candidate.coordinates if name != SIZE})


@dataclass
class _Progress:
    """Where exploring stands.

    Attributes:
        stage: the level at which it is found what fits.
        settling: batches that this took.
        away: of these, those that ran at another level; more where the last level was away, too.
        settled: levels where it is known, with the largest size, the cost of a row then, and
            whether that was the whole batch.
        not_whole: rows × cost of the smallest batch that was to go whole at level 0 and did not,
            while another level was wanted; None for none.
        rows: of the batch that measuring began with.
        cost: of a row of it; sizes are told in rows of this cost.
        search: what was measured; None until it is known what fits.
        sizes: the last size at each level, by its name.
        current: the candidate of the round that is running, and then the one that was chosen;
            without a size, as many rows as fit; None for level 0.
        left: measured steps that the round still takes.
        has_run: whether a step of the round was the candidate's.
        steps: it took.
        seconds: it took.
        has_grown: whether the round that begins asks for more memory than the one before.
        most_rows_seen: of a batch.
        seen: candidates that had their first step.
        failures: levels and rows × cost of microbatches that ran out of memory meanwhile.
        is_recovering: whether the batch that is running ran out of memory.
        is_over: whether all is chosen.
        needs_least: whether a whole batch ran out of memory with other settings than those that
            need the least.
    """

    stage: int = 0
    settling: int = 0
    away: int = 0
    settled: list[tuple[int, int, float, bool]] = dataclasses.field(default_factory=list)
    not_whole: float | None = None
    rows: int = 0
    cost: float = 1.0
    search: Search | None = None
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    current: Candidate | None = None
    left: int = 0
    has_run: bool = False
    steps: int = 0
    seconds: float = 0.0
    has_grown: bool = False
    most_rows_seen: int = 0
    seen: list[Candidate] = dataclasses.field(default_factory=list)
    failures: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    is_recovering: bool = False
    is_over: bool = False
    needs_least: bool = False

    @property
    def is_round_over(self) -> bool:
        """Whether it is time to decide what comes next."""
        return self.left <= 0 or self.is_recovering

    def begin(self, search: Search, *, rows: int, cost: float) -> None:
        """It is known what fits; the steps that showed it were the first at the largest sizes."""
        self.search, self.rows, self.cost = search, rows, cost
        self.current, self.left, self.has_run = search.base, ROUND, False
        self.most_rows_seen = rows

    def go_on(self, following: Candidate) -> None:
        """Begin a round."""
        before = self.current
        assert before is not None
        is_alike = _without_size(before) == _without_size(following)
        self.has_grown = not is_alike or (_rows(following) or 0) > (_rows(before) or 0)
        self.current, self.left, self.has_run = following, ROUND, False

    def most_rows(self, cost: float) -> int | None:
        """Return the most rows of a microbatch where one of them costs so much; None for any."""
        rows = None if self.current is None else _rows(self.current)
        return None if rows is None else max(1, int(rows * self.cost / cost + 1e-9))

    def elements(self, candidate: Candidate) -> float:
        """Rows × cost of a candidate."""
        return (_rows(candidate) or 0) * self.cost

    def measured(
        self, outcome: Outcome, cost: float, *, of: Mapping[str, Value], counts: bool
    ) -> None:
        """Take note of a step of a round.

        Args:
            outcome: of it.
            cost: of a row.
            of: its coordinates but for the size.
            counts: whether it was not cut smaller than fits only to measure its peak.
        """
        assert self.search is not None
        assert outcome.seconds is not None
        self.steps += 1
        elements = outcome.microbatch_size * cost
        self.most_rows_seen = max(self.most_rows_seen, outcome.num_rows)
        place = Candidate.of(**of)
        if LEVEL in of and counts:
            self.sizes[str(of[LEVEL])] = outcome.microbatch_size
        candidates = [each for each in self.search.candidates if _without_size(each) == place]
        is_current = self.current is not None and _without_size(self.current) == place
        self.has_run |= is_current
        if not candidates or not is_current:
            self.left -= 1
            return

        def distance(candidate: Candidate) -> float:
            if _rows(candidate) is None:
                return 0.0
            return abs(math.log2(elements / self.elements(candidate)))

        nearest = min(candidates, key=distance)
        is_cold = nearest not in self.seen
        if is_cold:
            self.seen.append(nearest)
        has_grown, self.has_grown = self.has_grown, False
        if is_cold or has_grown or self.is_recovering:
            return
        self.left -= 1
        # A batch of few rows says nothing of others, and is no reason to wait for ever.
        if not counts or distance(nearest) > SAME or 2 * outcome.num_rows < self.most_rows_seen:
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
        state = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return state | {
            "settled": [list(each) for each in self.settled],
            "search": None if self.search is None else self.search.state_dict(),
            "sizes": dict(self.sizes),
            "current": None if self.current is None else dict(self.current.coordinates),
            "seen": [dict(each.coordinates) for each in self.seen],
            "failures": [list(each) for each in self.failures],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "_Progress":
        """Return what ``state_dict`` described."""
        known = {each.name for each in dataclasses.fields(cls)}
        progress = cls(**{name: value for name, value in state.items() if name in known})
        if state["search"] is not None:
            progress.search = Search.from_state(state["search"])
        progress.settled = [
            (int(level), int(rows), float(cost), bool(is_whole))
            for level, rows, cost, is_whole in state["settled"]
        ]
        progress.sizes = dict(state["sizes"])
        progress.current = _candidate_of(state["current"])
        progress.seen = [_candidate_of(each) or Candidate(()) for each in state["seen"]]
        progress.failures = [(int(level), float(cost)) for level, cost in state["failures"]]
        return progress


def _candidate_of(state: Any) -> Candidate | None:
    return None if state is None else Candidate.of(**state)
