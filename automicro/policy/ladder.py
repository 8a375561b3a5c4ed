"""Several levels at which microbatches can be computed: one policy for each, and when to climb.

Level 0 is plain. Each further one needs less memory and more time (activations are recomputed,
say), so the sizes that fit differ from level to level, and each has a policy of its own.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automicro.policy.auto import FIRST_RETRY, FIRST_WAIT, Point
from automicro.policy.policy import Outcome, Policy, require_cost

# Between a cost at which a level fits and one at which it does not, it is tried in the lower half
# only, until less than this share of the latter is left. So trials fail a few times in all.
NARROW = 0.02


class Ladder(Policy):
    """Goes one level up where not even the smallest microbatch fits, and asks that level's policy.

    - Each level has its own copy of the given policy, for memory differs from level to level. An
      outcome is told to the policy of the level at which it ran.
    - A level is left, by `climb`, only when its policy has nothing smaller to propose. What the
      batch had taught that policy is forgotten then, as that of an impossible batch is.
    - That is remembered for the cost of a row. Batches whose rows cost as much begin one level up.
      Those of cheaper rows begin at the lowest level again if it fitted at their cost or more;
      in between, they try it where it has the better odds: in the lower half of what is not
      known, so that each failure halves it.
    - A level that was left is tried again when the device reports what it lacked, and where nothing
      explains the failure, after many batches. With each disappointment the wait doubles.

    With ``Fixed(8)`` the size stays, and only the level changes.

    Attributes:
        levels: as given.
        level: at which sizes are proposed.

    Raises:
        ValueError: if there is no level, or two have the same name.
        TypeError: if the policy cannot be copied.

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

    def __init__(self, policy: Policy, levels: Sequence[str]) -> None:
        if not levels or len(set(levels)) < len(levels):
            raise ValueError(
                f"levels are {list(levels)}, but each of them needs a name of its own: give that "
                'of level 0 first, as in ["plain", "recompute"]'
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
        self._lowest = 0  # of the batch that is running: nothing leads down within it
        self._batches = 0
        self._is_rehearsed = False
        # Of the batch that is running: its last failure, and what policies knew before its first.
        self._failure: Point | None = None
        self._before: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plain!r}, {list(self.levels)})"

    @property
    def plain(self) -> Policy:
        """Of the sizes at level 0."""
        return self._policies[0]

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt are compared."""
        return self.at(self.level).compares_seconds

    @property
    def wants_to_measure(self) -> bool:
        """Whether a batch to come might be cut smaller only to measure it, if it may be."""
        return any(each.wants_to_measure for each in self._policies)

    def level_for(self, num_rows: int, cost: float | None = None) -> int:
        """Return the lowest level at which a batch may fit.

        Raises:
            ValueError: if the cost is not positive.
        """
        return self._admitted(cost)

    def _admitted(self, cost: float | None, *, at_least: int = 0) -> int:
        """Return the lowest level, from one on, at which rows of a cost may fit."""
        cost, last = require_cost(cost), len(self.levels) - 1
        for level in range(max(self._lowest, at_least), last):
            if self._known[level].admits(cost, is_rehearsed=self._is_rehearsed):
                return level
        return last

    def at(self, level: int) -> Policy:
        """Return the policy of a level.

        Raises:
            ValueError: if there is no such level.
        """
        if not 0 <= level < len(self._policies):
            raise ValueError(f"level={level}, but there are {len(self.levels)}: {self.levels}")
        self._policies[level].may_measure = self.may_measure
        return self._policies[level]

    def climb(self, cost: float | None = None) -> bool:
        """Go one level up, after not even the smallest size fitted; False at the highest.

        Raises:
            ValueError: if the cost is not positive.
        """
        if self.level == len(self.levels) - 1:
            return False
        failed = dataclasses.replace(self._failure or Point(rows=1, cost=1.0))
        failed.cost = require_cost(cost)
        self._known[self.level].leave(failed, batch=self._batches)
        self._forget_batch(self.level)
        # Within one batch it only goes up, or it might go round for ever.
        self._lowest = self.level + 1
        return True

    def _forget_batch(self, level: int) -> None:
        """Forget outcomes of a batch that went on at another level: they say nothing of others."""
        before = self._before.pop(self.levels[level], None)
        if before is not None:
            self._policies[level].load_state_dict(before)

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found, and the level at which it did.

        Raises:
            TypeError: if the rows are not an int.
            ValueError: if the rows are below 1, the cost is not positive, or there is no such
                level.
        """
        does = self.at(level).suggest(rows, cost)
        for lower in self._known[:level] if does else []:
            lower.leave(Point(rows=1, cost=require_cost(cost)), batch=self._batches)
        return does

    def take_rehearsal(self) -> None:
        """From now on no level is tried at costs at which it has not fitted yet."""
        self._is_rehearsed = True
        for each in self._policies:
            each.take_rehearsal()

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return what the policy of the current level proposes.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        return self.at(self.level).propose(num_rows, cost)

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether what the current level's policy proposes is only there to measure.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        return self.at(self.level).is_measuring(num_rows, cost)

    def record(self, outcome: Outcome) -> None:
        """Tell the policy of the level at which an attempt ran."""
        self.level = outcome.level
        here, name = self.at(self.level), self.levels[self.level]
        # As it was before the batch's first failure: what follows may be forgotten by
        # `_forget_batch`.
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
        """Return what each level has learned, by its name, and where the next batch begins."""
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
        """Take over what levels of the same name have learned; the others start anew.

        The state of a policy without levels is that of level 0.

        Raises:
            ValueError: if another kind of policy wrote the state, or it is damaged. Nothing has
                changed then.
        """
        # A run may have had no levels before.
        if state.get("kind") == type(self.plain).__name__:
            self.plain.load_state_dict(state)
            return
        super().load_state_dict(state)

    def _load(self, state: dict[str, Any]) -> None:
        fresh = {"policy": self._fresh, "known": dataclasses.asdict(_Known())}
        for level, (name, policy) in enumerate(zip(self.levels, self._policies, strict=True)):
            # By name: levels may have been added or left out since.
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
    """The costs of a row at which a level is of use.

    Attributes:
        fitted: the highest cost at which something fitted; 0.0 before.
        failed: the lowest cost at which nothing did; None before.
        lifts: how often that was forgotten.
    """

    fitted: float = 0.0
    failed: Point | None = None
    lifts: int = 0

    def admits(self, cost: float, *, is_rehearsed: bool) -> bool:
        """Whether the level is worth an attempt at a cost."""
        if self.failed is None or cost <= self.fitted:
            return True
        fails = self.failed.cost
        if is_rehearsed or fails - self.fitted <= NARROW * fails:
            return False
        return cost <= (self.fitted + fails) / 2

    def leave(self, failed: Point, *, batch: int) -> None:
        """Not even the smallest size fitted."""
        if self.failed is not None and failed.cost >= self.failed.cost:
            # It had been tried at lower costs by what this rank was told: never twice alike.
            failed.cost = self.failed.cost / 2
        if failed.cost <= self.fitted:
            self.fitted = 0.0  # memory is not what it was
        failed.until = batch + (FIRST_WAIT if failed.is_explained else FIRST_RETRY) * 2**self.lifts
        self.failed = failed

    def lift(self, room: int | None, *, batch: int) -> None:
        """Forget a failure that need not repeat."""
        failed = self.failed
        if failed is None or failed.until is None or batch < failed.until:
            return
        if failed.has_room_in(room) or not failed.is_explained:
            self.failed = None
            self.lifts += 1
