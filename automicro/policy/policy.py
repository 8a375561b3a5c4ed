"""The interface of policies, which turn the outcomes of attempts into the size of the next one.

Policies are pure Python. They hold no tensors and query no device, so equal outcomes lead to equal
sizes on every rank and in every test.
"""

import abc
import copy
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one attempt at an optimization batch.

    Values that were not measured are None.

    Attributes:
        num_rows: rows of the batch.
        microbatch_size: rows of the largest slice that was used.
        fits: whether every microbatch succeeded.
        peak_bytes: peak memory of the attempt. For a failed attempt, the bytes in use plus the
            bytes requested when it failed, which is a lower bound.
        resident_bytes: bytes in use before the attempt, which every size needs.
        capacity_bytes: bytes available to this process: the limit of a budget, or on CUDA the free
            and reserved bytes or the limit of the memory fraction.
        seconds: duration of the attempt.
        cost: cost of one row (elements or tokens). Longer rows of the same structure cost more.
        alloc_retries: how often the allocator had to free its cache and retry.
        level: level of the attempt, see `Policy.levels`.
        settings: settings of the attempt, see `Policy.settings`.

    Raises:
        ValueError: if the size is not between 1 and the rows of the batch, or the cost is not
            positive and finite.

    >>> Outcome(num_rows=10, microbatch_size=5, fits=False).fits
    False
    """

    num_rows: int
    microbatch_size: int
    fits: bool
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    capacity_bytes: int | None = None
    seconds: float | None = None
    cost: float | None = None
    alloc_retries: int | None = None
    level: int = 0
    settings: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # An impossible outcome would silently spoil all later predictions.
        if not 1 <= self.microbatch_size <= self.num_rows:
            raise ValueError(
                f"an outcome of {self.num_rows} rows cannot have slices of "
                f"{self.microbatch_size}: give the rows of the largest slice that was used"
            )
        require_cost(self.cost)


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """How far the search for the fastest size has come.

    Attributes:
        microbatch_size: the best size so far, in rows of the batch that exploring started with.
        level: name of the best level, or None if there is only one level.
        settings: the best settings, by name.
        speedup: speed relative to the base, the largest size that fits at the lowest level.
        confidence: probability in percent, given the measured spread, that no alternative is more
            than 1 % faster; 0 … 99.
        steps: optimization batches used so far.
        is_news: whether this batch ended a round.
        ended: why exploring ended, or None while it continues.

    >>> print(Exploration(microbatch_size=16, speedup=1.2, confidence=83, steps=21))
    exploring: 16 rows, 1.20x base, confidence 83
    >>> print(Exploration(microbatch_size=1, level="recompute", settings={"sync": "last"}))
    exploring: 1 row, recompute, sync last, 1.00x base, confidence 0
    """

    microbatch_size: int
    speedup: float = 1.0
    confidence: int = 0
    steps: int = 0
    is_news: bool = True
    ended: str | None = None
    level: str | None = None
    settings: Mapping[str, float | str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = f"{self.microbatch_size} {'row' if self.microbatch_size == 1 else 'rows'}"
        parts = [rows, *([] if self.level is None else [self.level])]
        parts += [
            f"{name} {value if isinstance(value, str) else f'{value:g}'}"
            for name, value in self.settings.items()
        ]
        parts += [f"{self.speedup:.2f}x base", f"confidence {self.confidence}"]
        text = ", ".join(parts)
        if self.ended is None:
            return f"exploring: {text}"
        return f"explored for {self.steps} steps, {self.ended}: {text}"


class Policy(abc.ABC):
    """Decides how many rows a microbatch may have.

    Derive your own policy from this class and pass it as ``microbatch_size=``. Only `propose` is
    required; the other methods have defaults. If your policy keeps more than numbers, strings,
    lists and mappings, also write ``state_dict`` and ``load_state_dict``. The caller asks for a
    size before each attempt and records the outcome after it. If an attempt did not fit and the
    policy proposes nothing smaller, the caller gives up.

    Slices are balanced: if 48 rows are proposed for 64, the slices have 32 and 32 rows, and the
    outcome reports 32. If not even the smallest size of a batch fits, the caller restores the
    ``state_dict`` from before that batch.

    If microbatches can be computed at several levels (plain, or with less memory and more time),
    the caller asks `level_for` for each batch, sets ``level``, and then asks for sizes. When no
    smaller size is left, it calls `climb` before it gives up.

    Attributes:
        adapts: whether sizes can change. If not, running out of memory is final.
        multiple_of: the caller makes all slices but the last a multiple of this number.
        may_measure: set by the caller before each batch: whether it may be cut smaller than
            necessary only to measure its peak. It may not if layers average over rows.
        levels: names of the levels, the plain one first.
        level: set by the caller before it asks for sizes: the level at which they will be used.
        grown_from: rows previously known to fit, if the last outcome was the first to fit with more
            rows after memory had run out; otherwise None.
        explores: whether the policy compares the speed of sizes that fit, so that sizes can differ
            between runs.
        exploration: progress of exploring after the last outcome, or None if that did not count.

    Example:
        >>> class Quarters(Policy):
        ...     def __init__(self):
        ...         self.parts = 1
        ...
        ...     def propose(self, num_rows, cost=None):
        ...         return -(-num_rows // self.parts)
        ...
        ...     def record(self, outcome):
        ...         self.parts = self.parts if outcome.fits else self.parts * 4
        >>> policy = Quarters()
        >>> policy.record(Outcome(num_rows=64, microbatch_size=64, fits=False))
        >>> policy.propose(64), policy.adapts
        (16, True)
    """

    adapts: bool = True
    multiple_of: int = 1
    may_measure: bool = True
    levels: Sequence[str] = ("plain",)
    level: int = 0
    grown_from: int | None = None
    explores: bool = False
    exploration: Exploration | None = None

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt will be compared, so they must be accurate."""
        return False

    @property
    def settings(self) -> Mapping[str, float | str]:
        """Other settings of the next attempt, by name; read after the sizes."""
        return {}

    @property
    def wants_to_measure(self) -> bool:
        """Whether a future batch might be cut smaller only to measure it, if allowed."""
        return False

    @abc.abstractmethod
    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the largest number of rows, 1 … ``num_rows``, for a microbatch of this batch.

        Args:
            num_rows: rows of the batch.
            cost: cost of one row (elements or tokens), or None if unknown.
        """

    def record(self, outcome: Outcome) -> None:  # noqa: B027
        """Learn from the outcome of an attempt."""

    def level_for(self, num_rows: int, cost: float | None = None) -> int:
        """Return the level at which a batch should start: 0 if there is only one.

        Args:
            num_rows: rows of the batch.
            cost: cost of its costliest row, or None if unknown.
        """
        return 0

    def climb(self, cost: float | None = None) -> bool:
        """Go one level up when no smaller size is left, and return whether there was one.

        Args:
            cost: cost of the costliest row of the batch that did not fit, or None if unknown.
        """
        return False

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found, and return whether it is used.

        Args:
            rows: rows of a microbatch.
            cost: cost of one row, or None if unknown.
            level: level at which the size was found.
        """
        return False

    def take_rehearsal(self) -> None:  # noqa: B027
        """Try only sizes that surely fit from now on: the costliest batches have been rehearsed."""

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether the proposal for a batch is smaller than necessary, only to measure its peak."""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as JSON values; by default, all attributes."""
        values = {name: value for name, value in vars(self).items() if _is_plain(value)}
        return {"kind": type(self).__name__, "values": copy.deepcopy(values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned.

        Raises:
            ValueError: if another kind of policy wrote it, or it is damaged. Nothing has changed
                then.
        """
        if state.get("kind") != type(self).__name__:
            raise ValueError(
                f"a {type(self).__name__} policy cannot load the state of "
                f"{state.get('kind', 'no known')!r}: use the policy that wrote it, or leave the "
                "policy's state out"
            )
        # A partly loaded state would be inconsistent.
        before = self.state_dict()
        try:
            self._load(state)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            self._load(before)
            raise ValueError(
                f"the state of a {type(self).__name__} policy is damaged ({error!r}): give what "
                "its state_dict() returned, or leave it out"
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        """Load a state of this kind."""
        vars(self).update(copy.deepcopy(state.get("values", {})))


def _is_plain(value: Any) -> bool:
    """Whether JSON can represent a value."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def canonical_size(num_rows: int, microbatch_size: int) -> int:
    """Return the largest slice of ``num_rows`` rows in balanced slices of at most a given size.

    >>> [canonical_size(10, size) for size in (4, 5, 9, 10, 99)]
    [4, 5, 5, 10, 10]
    """
    # Sizes that give the same number of slices are the same cut.
    num_slices = -(-num_rows // microbatch_size)
    return -(-num_rows // num_slices)


def require_rows(num_rows: int) -> None:
    """Refuse a batch without rows."""
    if num_rows < 1:
        raise ValueError(f"no size can be proposed for {num_rows} rows: give a batch with rows")


def require_cost(cost: float | None) -> float:
    """Return the cost of a row as a float, 1.0 for None, or refuse one that is not positive.

    >>> require_cost(None), require_cost(128)
    (1.0, 128.0)
    """
    if cost is None:
        return 1.0
    # Zero and infinity are refused, because sizes are divided by costs.
    if not 0 < cost < math.inf:
        raise ValueError(
            f"a row cannot cost {cost}: give a positive number (elements or tokens of one row), "
            f"or None"
        )
    return float(cost)


def require_size(value: Any, *, name: str) -> int:
    """Return a number of rows as an int, or refuse it; booleans are not numbers here.

    >>> require_size(8, name="initial")
    8
    """
    try:
        if isinstance(value, bool):
            raise TypeError("True and False are ints to Python")
        # Accepts integers of numpy, but no floats with integer values.
        size = operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{name} is {value!r}, not a number of rows: give an int of at least 1"
        ) from error
    if size < 1:
        raise ValueError(f"{name} is {size}, but a microbatch has rows: give at least 1")
    return size


class Fixed(Policy):
    """Always propose the same size; None stands for the whole batch.

    The size never adapts, so running out of memory is final.

    Raises:
        TypeError: if the size is not an int or None.
        ValueError: if the size is below 1.

    >>> Fixed(4).propose(10), Fixed(4).propose(3), Fixed(None).propose(10)
    (4, 3, 10)
    """

    adapts = False

    def __init__(self, microbatch_size: int | None) -> None:
        self._microbatch_size = microbatch_size
        if microbatch_size is not None:
            self._microbatch_size = require_size(microbatch_size, name="microbatch_size")

    def __repr__(self) -> str:
        return f"Fixed({self._microbatch_size})"

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the fixed size, or ``num_rows`` if the batch is smaller.

        Raises:
            ValueError: if the batch has no rows.
        """
        require_rows(num_rows)
        return num_rows if self._microbatch_size is None else min(self._microbatch_size, num_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the size for readers of the state; loading it changes nothing."""
        # The size is a setting, not learned: a resumed run with another size should use that one.
        return {"kind": type(self).__name__, "microbatch_size": self._microbatch_size}


def make_policy(
    microbatch_size: int | str | Policy | None,
    *,
    name: str = "microbatch_size",
    unit: str = "rows",
    may_explore: bool = True,
    repeatable: bool = False,
) -> Policy:
    """Return the policy that a ``microbatch_size`` stands for, or refuse the value."""
    # Errors call the option `name`, count it in `unit`, and offer to explore if `may_explore`.
    explore = '"explore" (the fastest of those that fit), ' * (may_explore and unit == "rows")
    counted = "" if unit == "rows" else f" (of {unit}, with padding)"
    accepted = (
        f'give an int of at least 1{counted}, "auto" (found by halving), {explore}None (the whole '
        "batch), or a policy such as Halving(initial=64)"
    )
    if microbatch_size is None:
        return Fixed(None)
    policy: Policy
    if isinstance(microbatch_size, str):
        if microbatch_size == "auto":
            from automicro.policy.auto import Halving

            return Halving()
        if microbatch_size != "explore":
            raise ValueError(f"{name}={microbatch_size!r} is not a size: {accepted}")
        from automicro.policy.explore import Explore

        policy = Explore()
    # A class has all the methods of a policy, but there is no instance to call them on.
    elif isinstance(microbatch_size, type):
        raise TypeError(
            f"{name} is the class {microbatch_size.__name__}, not an instance: pass "
            f"{microbatch_size.__name__}(...)"
        )
    elif isinstance(microbatch_size, Policy):
        policy = microbatch_size
    elif hasattr(microbatch_size, "propose"):
        raise TypeError(
            f"{name} is a {type(microbatch_size).__name__}, which proposes sizes but is not a "
            "Policy. Derive its class from automicro.Policy, which has defaults for the rest"
        )
    else:
        try:
            return Fixed(require_size(microbatch_size, name=name))
        except (TypeError, ValueError) as error:
            # This lists all accepted values, which the function that checks rows does not know.
            raise type(error)(f"{name}={microbatch_size!r} is not a size: {accepted}") from None
    # Results would not repeat if the clock decided sizes.
    if policy.explores and repeatable:
        raise ValueError(
            f"{name}={microbatch_size!r} chooses sizes by measured time, so they differ from "
            "run to run, but repeatable=True was given. Leave repeatable out, or give the size "
            f"that was found, as in {name}=16"
        )
    return policy


def with_levels(
    policy: Policy,
    levels: Sequence[str],
    *,
    by_time: bool,
    choices: Mapping[str, Sequence[float | str]] | None = None,
) -> Policy:
    """Return a policy that finds the level together with the size."""
    from automicro.policy.explore import Explore, FastestLevel
    from automicro.policy.ladder import Ladder

    # A policy that explores sizes explores levels with them. Otherwise the clock chooses the level
    # that is fastest at its largest size, or levels are climbed when the smallest size fails.
    if isinstance(policy, Explore):
        return policy.with_levels(levels, choices)
    if by_time:
        return FastestLevel(policy, levels)
    return Ladder(policy, levels)
