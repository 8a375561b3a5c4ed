"""Find the fastest of several choices from few, noisy measurements.

The logarithm of the seconds per unit of work is modeled as a sum. Along the logarithm of each
number it is a random walk, so neighbors inform each other. Each arm adds an offset (multiples,
cliffs). The other terms are the drift of the machine, the kind of work in a step, and noise with
heavy tails, so that disturbed steps count less. Draws from the posterior give the confidence and
the arm to measure next.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Value = float | str
Arm = tuple[Value, ...]
"""A choice: a word, which has no neighbours, or a positive number, which has neighbours."""
Measurement = tuple[Arm, float, int, float]
"""A step: its arm, its seconds per unit of work, its number, the length of a row in it."""

# An arm within this share of the best is as good as the best.
TOLERANCE = 0.01
# Standard deviations of logarithms: 0.05 is 5 %.
LEVEL, KIND = 10.0, 0.5  # common to all arms; between kinds
WORK_SLOPE = 0.5  # per doubling of the size of a unit of work
DRIFT_LENGTH = 12.0  # steps over which the machine drifts
WALK, OWN = 0.25, 0.04  # per doubling of a number; per arm
DRIFT = 0.7  # of the machine, as a share of the noise
TAIL = 4.0  # degrees of freedom of the noise, which follows Student's distribution
# The expected noise, weighted as this many steps.
NOISE, STEPS_OF_NOISE = 0.02, 4
ROUNDS_OF_WEIGHTS = 4
TINY = 1e-12  # avoids division by a zero weight
DRAWS = 2048


def _kind(arm: Arm) -> Arm:
    """Return the words of an arm."""
    return tuple(each for each in arm if isinstance(each, str))


def _place(arm: Arm) -> tuple[float, ...]:
    """Return the logarithms of the numbers of an arm."""
    return tuple(math.log2(each) for each in arm if not isinstance(each, str))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The conclusion from the measurements."""

    best: Arm
    speedup: float = 1.0  # speed of the best arm relative to the base
    # Probability in percent (0 … 99), given the measured spread, that no arm is over 1 % faster.
    confidence: int = 0
    next: Arm  # the arm to measure next


@dataclass
class Race:
    """Finds the fastest of several arms.

    >>> sizes = [(size,) for size in (4, 8, 16)]
    >>> race = Race(sizes, base=sizes[2])
    >>> for step in range(12):
    ...     seconds = (2.0, 1.0, 1.2)[step % 3] * (1 + 0.001 * (step % 2))
    ...     race.measurements.append((sizes[step % 3], seconds, step, 1.0))
    >>> found = race.find()
    >>> found.best, round(found.speedup, 2), found.confidence
    ((8,), 1.2, 99)
    """

    arms: list[Arm]
    base: Arm  # speeds are relative to this arm
    expected: float = 0.0  # share of the time that doubling the first number is expected to save
    measurements: list[Measurement] = field(default_factory=list)

    def exclude(self, arms: Iterable[Arm]) -> None:
        """Remove arms that do not fit; their measurements still inform about the others."""
        gone = set(arms)
        self.arms = [each for each in self.arms if each not in gone]
        if self.base in gone and self.arms:
            self.base = self.arms[0]

    def count(self, arm: Arm) -> int:
        """Return the number of measured steps of an arm."""
        return sum(each == arm for each, *_ in self.measurements)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Race":
        """Restore a race from `dataclasses.asdict`, after a round trip through JSON."""
        told = [(tuple(arm), *more) for arm, *more in state["measurements"]]
        arms = [tuple(each) for each in state["arms"]]
        return cls(arms, tuple(state["base"]), state["expected"], told)

    def find(self) -> Finding:
        """Return the conclusion from the measurements, or the base if there are none."""
        arms = self.arms
        if len(arms) == 1:
            return Finding(best=arms[0], confidence=99, next=arms[0])
        if not self.measurements:
            return Finding(best=self.base, next=self.base)
        draws = _draws(arms, self.measurements, self.expected)
        lowest, margin = draws.min(axis=1), math.log1p(TOLERANCE)
        good = (draws <= lowest[:, None] + margin).mean(axis=0)
        means = draws.mean(axis=0)
        # Among equally sure arms, the one with the faster mean, otherwise the first.
        told = {arm for arm, *_ in self.measurements}
        best = max(
            [number for number, each in enumerate(arms) if each in told] or [0],
            key=lambda each: (round(good[each], 2), -round(means[each], 3)),
        )
        beats = (draws < draws[:, [best]] - margin).mean(axis=0)
        gains = np.maximum(draws[:, [best]] - draws, 0.0).mean(axis=0)
        # Measure the arm that would change the conclusion most per unit of time, or the best arm,
        # whichever has fewer measurements.
        worth = (beats + gains) / np.exp(means - means.min())
        others = [each for each in range(len(arms)) if each != best]
        challenger = max(others, key=lambda each: worth[each])
        following = min((challenger, best), key=lambda each: self.count(arms[each]))
        # Only the prior describes a kind without measurements, so nothing is sure yet.
        unknown = [each for each in arms if _kind(each) not in set(map(_kind, told))]
        return Finding(
            best=arms[best],
            speedup=float(math.exp(means[arms.index(self.base)] - means[best])),
            confidence=0 if unknown else int(min(99, 100 * good[best])),
            next=unknown[0] if unknown else arms[following],
        )


def _draws(arms: Sequence[Arm], told: Sequence[Measurement], expected: float) -> Array:
    """Return draws of the arms' values, of shape (DRAWS, arms)."""
    told_arms, seconds, numbers, works = zip(*told, strict=True)
    used = list(dict.fromkeys([*arms, *told_arms]))
    index, k = [used.index(each) for each in told_arms], len(arms)
    # Logarithms, because disturbances and speeds are relative: a step is 5 % slower at any size.
    y = np.log(seconds)
    # The prior has mean zero, so the expected values are subtracted here and added back in the
    # centers.
    means = np.median(y) - expected * np.array([_place(each)[0] for each in used])
    y -= means[index]
    covariance = _covariance(used)
    steps, work = np.array(numbers, dtype=float), np.log2(works)
    drift = np.exp(-np.abs(steps[:, None] - steps) / DRIFT_LENGTH)
    signal = covariance[index][:, index]
    if np.ptp(work):
        signal = signal + WORK_SLOPE**2 * np.outer(work - work.mean(), work - work.mean())
    # Steps that inform about the noise: one step per arm is spent on its mean.
    known, weights = STEPS_OF_NOISE + len(told) - len(set(index)), np.ones(len(told))
    for _ in range(ROUNDS_OF_WEIGHTS):
        own = np.bincount(index, weights * y) / np.maximum(np.bincount(index, weights), TINY)
        squares = (y - own[index]) ** 2
        variance = (STEPS_OF_NOISE * NOISE**2 + (weights * squares).sum()) / known
        weights = (TAIL + 1) / (TAIL + squares / variance)
    inverse = np.linalg.inv(signal + variance * (DRIFT**2 * drift + np.diag(1 / weights)))
    across = covariance[:k][:, index]
    centers = means[:k] + across @ inverse @ y
    values, vectors = np.linalg.eigh(covariance[:k, :k] - across @ inverse @ across.T)
    # The symmetric root is unique, but the signs of eigenvectors depend on the processor.
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    draws: Array = centers + _normal(k) @ root
    return draws


@functools.cache
def _normal(k: int) -> Array:
    """Return the same draws each time, so that all ranks decide alike."""
    return np.random.Generator(np.random.PCG64(17)).standard_normal((DRAWS, k))


def _covariance(arms: Sequence[Arm]) -> Array:
    """Return the covariance of the arms: level, kind, walks along numbers, and own offsets."""
    found = np.full((len(arms), len(arms)), LEVEL**2) + OWN**2 * np.eye(len(arms))
    for words in zip(*map(_kind, arms), strict=True):
        found += KIND**2 * np.array([[a == b for b in words] for a in words])
    for places in zip(*map(_place, arms), strict=True):
        below = max(places) - np.array(places)
        found += WALK**2 * np.minimum(below[:, None], below)
    return found
