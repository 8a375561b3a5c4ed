"""The interface of policies: the outcome of an attempt in, a size for the next one out.

Policies are pure Python. They hold no tensor and read no device, so the same outcomes lead to
the same sizes on every rank and in every test.
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

    What was not measured is None; a policy then does without.

    Attributes:
        num_rows: rows of the batch.
        microbatch_size: rows of the largest slice that was really used.
        fits: whether every microbatch went through.
        peak_bytes: the most that was allocated during the attempt. Of a failed one: what was held
            when it failed and what was asked for, together, so a lower bound of its need.
        resident_bytes: what was held before the attempt, which every size needs.
        capacity_bytes: what the device could give this process then: the limit of a budget; on
            CUDA what is free and what is reserved, or the limit of the fraction.
        seconds: how long the attempt took.
        cost: of one row (elements, tokens): rows of the same structure that are longer cost more.
        alloc_retries: how often the allocator had to free its cache and ask again.
        level: at which it ran, see `Policy.levels`.
        settings: with which it ran, see `Policy.settings`.

    Raises:
        ValueError: if the size is not between 1 and the rows of the batch, or the cost is not a
            positive, finite number.

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
        # An outcome that cannot be would spoil all later predictions, without an error.
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
        microbatch_size: recommended so far, in rows of the batch that it began with.
        level: at which they are computed, by its name; None where there is one level only.
        settings: that go with it, by their names.
        speedup: its speed in shares of the base's, the largest size that fits at the lowest level.
        confidence: the probability in percent, given the measured spread, that nothing else is
            more than 1 % faster; 0 … 99.
        steps: optimization batches that it took so far.
        is_news: whether this batch ended a round.
        ended: why it is over; None while it goes on.

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

    Derive your own from it and hand it over as ``microbatch_size=``. `propose` is all that it
    needs; the others have defaults. One that keeps more than numbers, texts, lists and mappings
    writes ``state_dict`` and ``load_state_dict``, too. The caller asks before each attempt and
    tells after it; a policy that proposes nothing smaller after an attempt that did not fit makes
    the caller give up.

    Slices are balanced: 48 rows proposed for 64 become 32 and 32, and that is the size that an
    outcome tells; `canonical_size` says what becomes of a proposal. A batch of which not even the
    smallest size fits teaches nothing: the caller puts back what ``state_dict`` gave before it.

    Where microbatches can be computed at several levels (as they come, or with less memory and more
    time), the caller asks `level_for` each batch, sets ``level``, and then asks for sizes. When
    nothing smaller is left it asks to `climb` before it gives up.

    Attributes:
        adapts: whether sizes may change. Where they may not, running out of memory is final.
        multiple_of: what the caller makes slices a multiple of, but for the last one.
        may_measure: set by the caller before each batch: whether it may be.
        levels: the name of each level, the plain one first.
        level: set by the caller before it asks for sizes: the level at which they will be used.
        grown_from: rows that had been known to fit, where the last outcome was the first that
            fitted with more after memory had run out; else None.
        explores: whether it tries sizes that fit for the sake of time, so that a run with it has
            other sizes each time.
        exploration: how far that has come with the last outcome; None where it did not count.

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
        """Whether the seconds of the next attempt are compared, and have to be the device's."""
        return False

    @property
    def settings(self) -> Mapping[str, float | str]:
        """Further settings of the next attempt, by name; asked after the sizes."""
        return {}

    @property
    def wants_to_measure(self) -> bool:
        """Whether a batch to come might be cut smaller only to measure it, if it may be."""
        return False

    @abc.abstractmethod
    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the most rows, 1 … ``num_rows``, that a microbatch of this batch may have.

        Args:
            num_rows: of the batch.
            cost: of one row (elements, tokens); None if unknown.
        """

    def record(self, outcome: Outcome) -> None:  # noqa: B027
        """Learn what became of an attempt."""

    def level_for(self, num_rows: int, cost: float | None = None) -> int:
        """Return the level at which a batch should begin: 0, where there is no other.

        Args:
            num_rows: of the batch.
            cost: of its costliest row; None if unknown.
        """
        return 0

    def climb(self, cost: float | None = None) -> bool:
        """Go one level up, because nothing smaller is left; return whether there is one.

        Args:
            cost: of the costliest row of the batch that did not fit; None if unknown.
        """
        return False

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found, and return whether it does.

        Args:
            rows: of a microbatch.
            cost: of one row; None if unknown.
            level: at which it was found.
        """
        return False

    def take_rehearsal(self) -> None:  # noqa: B027
        """The costliest batches have been tried: from now on nothing is, unless it surely fits."""

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether what it proposes for a batch is smaller than fits, and only there to measure."""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as plain values that JSON can hold: here all its attributes."""
        values = {name: value for name, value in vars(self).items() if _is_plain(value)}
        return {"kind": type(self).__name__, "values": copy.deepcopy(values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned.

        Raises:
            ValueError: another kind of policy wrote it, or it is damaged. Nothing has changed then.
        """
        require_kind(state, self)
        # Half of a damaged state would be a policy that nothing describes.
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
        """Take over a state of this kind."""
        vars(self).update(copy.deepcopy(state.get("values", {})))


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def canonical_size(num_rows: int, microbatch_size: int) -> int:
    """Return the largest slice when ``num_rows`` are cut into balanced slices of at most a size.

    Two sizes with the same largest slice are the same cut.

    >>> [canonical_size(10, size) for size in (4, 5, 9, 10, 99)]
    [4, 5, 5, 10, 10]
    """
    # Sizes with the same number of slices are the same cut, and count as one.
    num_slices = -(-num_rows // microbatch_size)
    return -(-num_rows // num_slices)


def cut_size(num_rows: int, most_rows: int, *, multiple_of: int = 1) -> int:
    """Return the largest slice of the coarsest cut into slices of at most ``most_rows``.

    With ``multiple_of`` all slices but the last are multiples of it, where more rows than that
    are allowed and there; below it a cut is balanced again.

    >>> cut_size(100, 40), cut_size(100, 40, multiple_of=8), cut_size(100, 5, multiple_of=8)
    (34, 40, 5)
    >>> cut_size(6, 40, multiple_of=8)
    6
    """
    most_rows = min(most_rows, num_rows)
    # No whole unit fits: a size that trains is better than one that is rounded to nothing.
    if num_rows <= multiple_of or most_rows < multiple_of:
        return canonical_size(num_rows, most_rows)
    if most_rows == num_rows:
        return num_rows
    size = canonical_size(num_rows, most_rows // multiple_of * multiple_of)
    return min(num_rows, -(-size // multiple_of) * multiple_of)


def require_rows(num_rows: int) -> None:
    """Refuse a batch without rows.

    Raises:
        ValueError: if there is no row.
    """
    if num_rows < 1:
        raise ValueError(f"no size can be proposed for {num_rows} rows: give a batch with rows")


def require_cost(cost: float | None) -> float:
    """Return the cost of a row; if none is given, every row costs the same.

    Raises:
        ValueError: if it is not a positive, finite number.

    >>> require_cost(None), require_cost(128)
    (1.0, 128.0)
    """
    if cost is None:
        return 1.0
    # Sizes are divided by it.
    if not 0 < cost < math.inf:
        raise ValueError(
            f"a row cannot cost {cost}: give a positive number (elements or tokens of one row), "
            f"or None"
        )
    return float(cost)


def require_size(value: Any, *, name: str) -> int:
    """Return a number of rows as an int.

    Raises:
        TypeError: if it is not an integer (True is not one here).
        ValueError: if it is below 1.

    >>> require_size(8, name="initial")
    8
    """
    try:
        if isinstance(value, bool):
            raise TypeError("True and False are ints to Python")
        # Also numbers of numpy, and none that only happen to be whole.
        size = operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{name} is {value!r}, not a number of rows: give an int of at least 1"
        ) from error
    if size < 1:
        raise ValueError(f"{name} is {size}, but a microbatch has rows: give at least 1")
    return size


def require_kind(state: dict[str, Any], policy: object) -> None:
    """Refuse the state of another kind of policy.

    Raises:
        ValueError: if another kind of policy wrote the state, naming both.
    """
    kind = type(policy).__name__
    if state.get("kind") != kind:
        raise ValueError(
            f"a {kind} policy cannot take over the state of {state.get('kind', 'no known')!r}: "
            f"use the policy that wrote it, or leave the policy's state out"
        )


class Fixed(Policy):
    """Propose always the same size; None stands for the whole batch.

    Never adapts, so running out of memory is final.

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
        """Return the fixed size, or ``num_rows`` where the batch is smaller.

        Raises:
            ValueError: if the batch has no rows.
        """
        require_rows(num_rows)
        return num_rows if self._microbatch_size is None else min(self._microbatch_size, num_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the size, for people who read the state.

        It is a setting and nothing learned: a run that is resumed with another one means it.
        """
        return {"kind": "Fixed", "microbatch_size": self._microbatch_size}
