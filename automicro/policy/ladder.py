"""Several levels at which microbatches can be computed: one policy for each, and when to climb.

Level 0 is plain. Each further one needs less memory and more time (activations are recomputed,
say), so the sizes that fit differ from level to level, and each has a policy of its own.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from automicro.policy.auto import FIRST_RETRY, FIRST_WAIT, Point
from automicro.policy.policy import Exploration, Outcome, Policy, require_cost, require_kind

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

    Args:
        policy: of the sizes. It becomes that of level 0; the others start with a copy of it.
        levels: the name of each level in words, that of level 0 included.

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
            policies = [policy, *(copy.deepcopy(policy) for _ in levels[1:])]
        except Exception as error:
            raise TypeError(
                f"{policy!r} cannot be copied ({error}), and each level needs a copy: give a "
                "policy that holds plain values, or leave when_too_large out"
            ) from error
        self.levels = tuple(levels)
        self.level = 0
        self.adapts, self.explores = policy.adapts, policy.explores
        self.multiple_of = policy.multiple_of
        self._levels = [_Level(each) for each in policies]
        self._lowest = 0  # of the batch that is running: nothing leads down within it
        self._batches = 0
        self._is_rehearsed = False
        self._failure: Outcome | None = None  # the last of the batch that is running

    def __repr__(self) -> str:
        return f"Ladder({self._levels[0].policy!r}, {list(self.levels)})"

    @property
    def plain(self) -> Policy:
        """Of the sizes at level 0."""
        return self._levels[0].policy

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt are compared."""
        return self._policy().compares_seconds

    @property
    def wants_to_measure(self) -> bool:
        """Whether a batch to come might be cut smaller only to measure it, if it may be."""
        return any(each.policy.wants_to_measure for each in self._levels)

    def level_for(self, num_rows: int, cost: float | None = None) -> int:
        """Return the lowest level at which a batch may fit.

        Raises:
            ValueError: if the cost is not positive.
        """
        return self.admitted(cost)

    def admitted(self, cost: float | None = None, *, at_least: int = 0) -> int:
        """Return the lowest level, from one on, at which rows of a cost may fit."""
        cost = require_cost(cost)
        level = max(self._lowest, at_least)
        while level < len(self._levels) - 1:
            if self._levels[level].admits(cost, is_rehearsed=self._is_rehearsed):
                break
            level += 1
        return level

    def at(self, level: int) -> Policy:
        """Return the policy of a level.

        Raises:
            ValueError: if there is no such level.
        """
        if not 0 <= level < len(self._levels):
            raise ValueError(f"level={level}, but there are {len(self._levels)}: {self.levels}")
        return self._levels[level].policy

    def climb(self, cost: float | None = None) -> bool:
        """Go one level up, after not even the smallest size fitted; False at the highest.

        Raises:
            ValueError: if the cost is not positive.
        """
        if self.level == len(self._levels) - 1:
            return False
        here, failure = self._levels[self.level], self._failure
        need = room = None
        if failure is not None and failure.peak_bytes is not None:
            need = failure.peak_bytes - (failure.resident_bytes or 0)
        if failure is not None and failure.capacity_bytes is not None:
            room = failure.capacity_bytes - (failure.resident_bytes or 0)
        here.leave(
            Point(rows=1, cost=require_cost(cost), need=need, room=room), batch=self._batches
        )
        self._lowest = self.level + 1
        return True

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found, and the level at which it did.

        Raises:
            TypeError: if the rows are not an int.
            ValueError: if the rows are below 1, the cost is not positive, or there is no such
                level.
        """
        policy = self.at(level)
        failed = Point(rows=1, cost=require_cost(cost))
        does = policy.suggest(rows, cost)
        if does:
            for lower in self._levels[:level]:
                lower.failed, lower.failed_at = failed, self._batches
        return does

    def take_rehearsal(self) -> None:
        """From now on no level is tried at costs at which it has not fitted yet."""
        self._is_rehearsed = True
        for each in self._levels:
            each.policy.take_rehearsal()

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return what the policy of the current level proposes.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        return self._policy().propose(num_rows, cost)

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether what the current level's policy proposes is only there to measure.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        return self._policy().is_measuring(num_rows, cost)

    def record(self, outcome: Outcome) -> None:
        """Tell the policy of the level at which an attempt ran."""
        here = self._levels[outcome.level]
        if not outcome.fits and here.before is None:
            here.before = here.policy.state_dict()
        self.level = outcome.level
        policy = self._policy()
        policy.record(outcome)
        self.grown_from, self.exploration = policy.grown_from, policy.exploration
        self._failure = None if outcome.fits else outcome
        if not outcome.fits:
            self._lowest = max(self._lowest, outcome.level)
            return
        self._batches += 1
        self._lowest = 0
        here.fitted = max(here.fitted, require_cost(outcome.cost))
        room = None
        if outcome.capacity_bytes is not None:
            room = outcome.capacity_bytes - (outcome.resident_bytes or 0)
        for each in self._levels:
            if each is not here:
                each.forget_batch()
            each.before = None
            if not self._is_rehearsed:
                each.lift(room, batch=self._batches)

    def _policy(self) -> Policy:
        policy = self._levels[self.level].policy
        policy.may_measure = self.may_measure
        return policy

    def state_dict(self) -> dict[str, Any]:
        """Return what each level has learned, by its name, and where the next batch begins."""
        return {
            "kind": "Ladder",
            "levels": {
                name: each.state_dict()
                for name, each in zip(self.levels, self._levels, strict=True)
            },
            "level": self.levels[self.level],
            "lowest": self.levels[self._lowest],
            "batches": self._batches,
            "rehearsed": self._is_rehearsed,
            "failure": None if self._failure is None else dataclasses.asdict(self._failure),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what levels of the same name have learned; the others start anew.

        The state of a policy without levels is that of level 0.

        Raises:
            ValueError: if another kind of policy wrote the state, or it is damaged. Nothing has
                changed then.
        """
        plain = self._levels[0].policy
        if state.get("kind") == type(plain).__name__:
            plain.load_state_dict(state)
            return
        require_kind(state, self)
        try:
            found = {name: state["levels"].get(name) for name in self.levels}
            told = {
                name: _Level.from_state(copy.deepcopy(each.policy), found[name])
                for name, each in zip(self.levels, self._levels, strict=True)
                if found[name] is not None
            }
            level, lowest = self._named(state["level"]), self._named(state["lowest"])
            batches, is_rehearsed = int(state["batches"]), bool(state["rehearsed"])
            failure = None if state["failure"] is None else Outcome(**state["failure"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the state of a Ladder policy is damaged ({error!r}): give what its "
                "state_dict() returned, or leave it out"
            ) from error
        for index, name in enumerate(self.levels):
            if name in told:
                policy = self._levels[index].policy
                policy.load_state_dict(found[name]["policy"])
                self._levels[index] = dataclasses.replace(told[name], policy=policy)
        self.level, self._lowest, self._batches = level, lowest, batches
        self._is_rehearsed, self._failure = is_rehearsed, failure
        self.grown_from = None
        self.exploration: Exploration | None = None

    def _named(self, name: str) -> int:
        return self.levels.index(name) if name in self.levels else 0


@dataclasses.dataclass
class _Level:
    """One level: the policy of its sizes, and the costs of a row at which it is of use.

    Attributes:
        policy: of its sizes.
        fitted: the highest cost at which something fitted; 0.0 before.
        failed: the lowest cost at which nothing did; None before.
        failed_at: the batch of that.
        lifts: how often that was forgotten.
        before: the policy's state, from before the batch that is running ran out of memory; None
            where it did not.
    """

    policy: Policy
    fitted: float = 0.0
    failed: Point | None = None
    failed_at: int = 0
    lifts: int = 0
    before: dict[str, Any] | None = None

    def admits(self, cost: float, *, is_rehearsed: bool) -> bool:
        """Whether it is worth an attempt at a cost."""
        if self.failed is None or cost <= self.fitted:
            return True
        fails = self.failed.cost
        if is_rehearsed or fails - self.fitted <= NARROW * fails:
            return False
        return cost <= (self.fitted + fails) / 2

    def leave(self, failed: Point, *, batch: int) -> None:
        """Not even the smallest size fitted."""
        known = self.failed
        if known is not None and failed.cost >= known.cost:
            # It had been tried at lower costs by what this rank was told: never twice alike.
            failed = dataclasses.replace(failed, cost=known.cost / 2)
        if failed.cost <= self.fitted:
            self.fitted = 0.0  # memory is not what it was
        self.failed, self.failed_at = failed, batch
        self.forget_batch()

    def forget_batch(self) -> None:
        """What a batch that went on at another level taught this one says nothing of others."""
        if self.before is not None:
            self.policy.load_state_dict(self.before)
            self.before = None

    def lift(self, room: int | None, *, batch: int) -> None:
        """Forget a failure that need not repeat."""
        failed = self.failed
        if failed is None:
            return
        wait = FIRST_WAIT if failed.is_explained else FIRST_RETRY
        if batch - self.failed_at < wait * 2**self.lifts:
            return
        if failed.is_explained and not failed.has_room_in(room):
            return
        self.failed = None
        self.lifts += 1

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "policy": self.policy.state_dict(),
            "fitted": self.fitted,
            "failed": None if self.failed is None else dataclasses.asdict(self.failed),
            "failed_at": self.failed_at,
            "lifts": self.lifts,
            "before": self.before,
        }

    @classmethod
    def from_state(cls, policy: Policy, state: dict[str, Any]) -> "_Level":
        """Return what ``state_dict`` described; the policy takes over its part."""
        policy.load_state_dict(state["policy"])
        failed = state["failed"]
        return cls(
            policy,
            fitted=float(state["fitted"]),
            failed=None if failed is None else Point(**failed),
            failed_at=int(state["failed_at"]),
            lifts=int(state["lifts"]),
            before=state["before"],
        )
