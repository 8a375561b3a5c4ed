"""Several levels at which microbatches can be computed: a policy for each, and when to climb.

Level 0 is plain. Each higher level needs less memory and more time (by recomputing activations, for
example), so each level has its own sizes and its own policy.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automicro.policy.auto import FIRST_RETRY, FIRST_WAIT, Point
from automicro.policy.policy import Outcome, Policy, require_cost

# Between a cost that fits at a level and one that does not, only the lower half is tried, until
# the gap is at most this share of the higher cost. That bounds the number of failed trials.
NARROW = 0.02


class Ladder(Policy):
    """Climbs one level if not even the smallest microbatch fits, and asks that level's policy.

    >>> from automicro.policy.auto import Halving
    >>> ladder = Ladder(Halving(), ["plain", "recompute"])
    >>> for size in (2, 1):
    ...     ladder.record(Outcome(num_rows=2, microbatch_size=size, fits=False))
    >>> ladder.propose(2), ladder.climb()
    (1, True)
    >>> ladder.level = ladder.level_for(2)
    >>> ladder.levels[ladder.level], ladder.propose(2)
    ('recompute', 2)
    """

    # Each level has its own copy of the given policy, because memory differs between levels.
    # Outcomes go to the policy of the level at which they ran.
    #
    # A level is left only when its policy has nothing smaller to propose. The failure is remembered
    # with the cost of a row. Batches whose rows cost as much start one level higher. Batches of
    # cheaper rows start at the lowest level again if that cost or a higher one has fitted there. In
    # between, only the lower half of the unknown range is tried, so each failure halves it.
    #
    # A level is tried again when the device reports the memory that was missing, or, if nothing
    # explains the failure, after many batches. The wait doubles with each new failure.

    def __init__(self, policy: Policy, levels: Sequence[str]) -> None:
        if not levels or len(set(levels)) < len(levels):
            raise ValueError(
                f"levels are {list(levels)}, but each level needs a unique name: start with the "
                'name of level 0, as in ["plain", "recompute"]'
            )
        try:
            self._policies = [policy, *(copy.deepcopy(policy) for _ in levels[1:])]
        except Exception as error:
            raise TypeError(
                f"{policy!r} cannot be copied ({error}), and each level needs a copy: give a "
                "policy that holds plain values, or leave when_too_large out"
            ) from error
        self.levels, self.level = tuple(levels), 0
        self.adapts, self.multiple_of = policy.adapts, policy.multiple_of
        self._fresh = policy.state_dict()
        self._known = [_Known() for _ in levels]
        self._lowest = 0  # within the current batch, levels are never descended
        self._batches = 0
        self._is_rehearsed = False
        # The current batch: its last failure, and the states of policies before its first failure.
        self._failure: Point | None = None
        self._before: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plain!r}, {list(self.levels)})"

    @property
    def plain(self) -> Policy:
        """The policy of level 0."""
        return self._policies[0]

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt will be compared."""
        return self.at(self.level).compares_seconds

    @property
    def wants_to_measure(self) -> bool:
        """Whether a future batch might be cut smaller only to measure it, if allowed."""
        return any(each.wants_to_measure for each in self._policies)

    def level_for(self, num_rows: int, cost: float | None = None) -> int:
        """Return the lowest level at which a batch might fit."""
        return self._admitted(cost)

    def _admitted(self, cost: float | None, *, at_least: int = 0) -> int:
        """Return the lowest level, from ``at_least`` up, at which rows of a cost might fit."""
        cost, last = require_cost(cost), len(self.levels) - 1
        for level in range(max(self._lowest, at_least), last):
            if self._known[level].admits(cost, is_rehearsed=self._is_rehearsed):
                return level
        return last

    def at(self, level: int) -> Policy:
        """Return the policy of a level."""
        if not 0 <= level < len(self._policies):
            raise ValueError(f"level={level}, but there are {len(self.levels)}: {self.levels}")
        self._policies[level].may_measure = self.may_measure
        return self._policies[level]

    def climb(self, cost: float | None = None) -> bool:
        """Go one level up after the smallest size failed; return False at the highest level."""
        if self.level == len(self.levels) - 1:
            return False
        failed = dataclasses.replace(self._failure or Point(rows=1, cost=1.0))
        failed.cost = require_cost(cost)
        self._known[self.level].leave(failed, batch=self._batches)
        self._forget_batch(self.level)
        # Within one batch the level only rises; otherwise the search might never end.
        self._lowest = self.level + 1
        return True

    def _forget_batch(self, level: int) -> None:
        """Forget the outcomes of a batch that moved on to another level."""
        before = self._before.pop(self.levels[level], None)
        if before is not None:
            self._policies[level].load_state_dict(before)

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size and level that an earlier run found."""
        does = self.at(level).suggest(rows, cost)
        for lower in self._known[:level] if does else []:
            lower.leave(Point(rows=1, cost=require_cost(cost)), batch=self._batches)
        return does

    def take_rehearsal(self) -> None:
        """Stop trying levels at costs that have not fitted there yet."""
        self._is_rehearsed = True
        for each in self._policies:
            each.take_rehearsal()

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the proposal of the current level's policy."""
        return self.at(self.level).propose(num_rows, cost)

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether the current level's policy proposes a size only to measure its peak."""
        return self.at(self.level).is_measuring(num_rows, cost)

    def record(self, outcome: Outcome) -> None:
        """Pass an outcome to the policy of its level."""
        self.level = outcome.level
        here, name = self.at(self.level), self.levels[self.level]
        # The state before the first failure, because `_forget_batch` might restore it.
        if not outcome.fits and name not in self._before:
            self._before[name] = here.state_dict()
        here.record(outcome)
        self.grown_from = here.grown_from
        held, peak, capacity = outcome.resident_bytes, outcome.peak_bytes, outcome.capacity_bytes
        room = None if capacity is None else capacity - (held or 0)
        if not outcome.fits:
            need = None if peak is None else peak - (held or 0)
            self._failure = Point(rows=1, cost=require_cost(outcome.cost), need=need, room=room)
            self._lowest = max(self._lowest, self.level)
            return
        self._batches += 1
        self._lowest, self._failure = 0, None
        self._known[self.level].fitted = max(
            self._known[self.level].fitted, require_cost(outcome.cost)
        )
        self._before.pop(name, None)
        for level, known in enumerate(self._known):
            self._forget_batch(level)
            if not self._is_rehearsed:
                known.lift(room, batch=self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each level, by name, and the level at which the next batch starts."""
        learned = zip(self.levels, self._policies, self._known, strict=True)
        return {
            "kind": type(self).__name__,
            "levels": {
                name: {"policy": policy.state_dict(), "known": dataclasses.asdict(known)}
                for name, policy, known in learned
            },
            "level": self.levels[self.level],
            "lowest": self.levels[self._lowest],
            "batches": self._batches,
            "rehearsed": self._is_rehearsed,
            "failure": None if self._failure is None else dataclasses.asdict(self._failure),
            "before": dict(self._before),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore levels by name; levels without a saved state start fresh."""
        # An earlier run might have had no levels. Its state is that of level 0.
        if state.get("kind") == type(self.plain).__name__:
            self.plain.load_state_dict(state)
            return
        super().load_state_dict(state)

    def _load(self, state: dict[str, Any]) -> None:
        fresh = {"policy": self._fresh, "known": dataclasses.asdict(_Known())}
        for level, (name, policy) in enumerate(zip(self.levels, self._policies, strict=True)):
            # By name, because levels might have been added or removed since.
            learned = state["levels"].get(name, fresh)
            policy.load_state_dict(learned["policy"])
            self._known[level] = _Known(**learned["known"])
            self._known[level].failed = _point(learned["known"]["failed"])
        self.level, self._lowest = self._named(state["level"]), self._named(state["lowest"])
        self._batches, self._is_rehearsed = int(state["batches"]), bool(state["rehearsed"])
        self._failure, self._before = _point(state["failure"]), dict(state["before"])
        self.grown_from = None

    def _named(self, name: str) -> int:
        return self.levels.index(name) if name in self.levels else 0


def _point(state: dict[str, Any] | None) -> Point | None:
    return None if state is None else Point(**state)


@dataclass
class _Known:
    """Costs of a row at which a level fits or fails."""

    fitted: float = 0.0  # the highest cost at which a size fitted; 0.0 if none
    failed: Point | None = None  # the lowest cost at which no size fitted
    lifts: int = 0  # how often a failure was forgotten

    def admits(self, cost: float, *, is_rehearsed: bool) -> bool:
        """Whether the level should be tried at a cost."""
        if self.failed is None or cost <= self.fitted:
            return True
        fails = self.failed.cost
        if is_rehearsed or fails - self.fitted <= NARROW * fails:
            return False
        return cost <= (self.fitted + fails) / 2

    def leave(self, failed: Point, *, batch: int) -> None:
        """Record that not even the smallest size fitted."""
        if self.failed is not None and failed.cost >= self.failed.cost:
            # It was tried because another rank decided so. Lowering the cost avoids a repetition.
            failed.cost = self.failed.cost / 2
        if failed.cost <= self.fitted:
            self.fitted = 0.0  # there is less memory than before
        failed.until = batch + (FIRST_WAIT if failed.is_explained else FIRST_RETRY) * 2**self.lifts
        self.failed = failed

    def lift(self, room: int | None, *, batch: int) -> None:
        """Forget a failure that might not repeat."""
        failed = self.failed
        if failed is None or failed.until is None or batch < failed.until:
            return
        if failed.has_room_in(room) or not failed.is_explained:
            self.failed = None
            self.lifts += 1
