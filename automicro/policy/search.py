"""Which candidate is the fastest, from few measurements that are noisy: best-arm search.

A candidate is a point with named coordinates, ``{"microbatch_size": 8}`` for one, and nothing here
knows what they stand for. The logarithm of the seconds per unit of work is taken for the sum of

- a function of the coordinates: a random walk along the logarithm of each number, by which
  neighbours tell of each other, and a part of each candidate's own (steps at multiples, cliffs);
- the machine's drift, which is alike in steps that are near;
- a part of what the work is like, where that differs from step to step;
- noise with heavy tails: a step that somebody disturbed counts less.

All are Gaussian processes, and how large each of them is, is averaged over. The noise is Student's,
by weights that make it Gaussian (a variational bound). That gives the probability of every order of
the candidates, and with it the confidence, and the candidate that is worth the next steps.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Value = float | str

# Doublings between a candidate that was measured and one that may be next.
REACH = 1.1
# A candidate that is faster by no more than this share is as good as the best.
TOLERANCE = 0.01
# Standard deviations, of logarithms: 0.05 is 5 %.
LEVEL = 10.0  # of the level of all
KIND = 0.5  # between values of a coordinate that are text
WORK_SLOPE, WORK_SMOOTH, WORK_LENGTH = 0.5, 0.1, 1.0  # the same of a unit of work
DRIFT_LENGTH = 12.0  # steps over which the machine drifts
TAIL = 4.0  # degrees of freedom of the noise
# What is averaged over, with the probabilities beforehand: of the noise, of the walk over one
# doubling, of each candidate's own part, and of the drift in shares of the noise.
NOISES = np.geomspace(0.002, 0.2, 10)
WALKS = {0.08: 0.5, 0.3: 0.5}
OWN = {0.004: 0.35, 0.03: 0.45, 0.15: 0.2}
DRIFTS = {0.0: 0.5, 1.0: 0.5}
ROUNDS_OF_WEIGHTS = 4
DRAWS = 2048


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of what can be chosen: values by the names of their coordinates.

    Numbers are compared by their logarithms, so they are positive; text has no neighbours.

    >>> Candidate.of(microbatch_size=8, deferred="no")
    Candidate(deferred='no', microbatch_size=8)
    """

    coordinates: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, **coordinates: Value) -> "Candidate":
        """The candidate with these coordinates."""
        return cls(tuple(sorted(coordinates.items())))

    def __getitem__(self, name: str) -> Value:
        return dict(self.coordinates)[name]

    def get(self, name: str) -> Value | None:
        """The value of a coordinate; None where there is no such coordinate."""
        return dict(self.coordinates).get(name)

    @property
    def texts(self) -> tuple[tuple[str, Value], ...]:
        """The coordinates that are text."""
        return tuple(each for each in self.coordinates if isinstance(each[1], str))

    def is_near(self, others: Iterable["Candidate"], among: Iterable["Candidate"] = ()) -> bool:
        """Whether a neighbour of it is among others: curves are not to be trusted far out.

        A neighbour is close, or there is nothing in between.

        Args:
            others: that are known.
            among: all that there are.
        """
        alike = [other for other in others if other.texts == self.texts]
        if any(self._distance(other) <= REACH for other in alike):
            return True
        among = list(among)
        return any(
            bool(among) and not any(each._is_between(self, other) for each in among)
            for other in alike
        )

    def _is_between(self, one: "Candidate", other: "Candidate") -> bool:
        """Whether each number lies between those of two others, and it is neither of them."""
        if self in (one, other) or self.texts != one.texts:
            return False
        numbers = [
            (float(value), float(one[name]), float(other[name]))
            for name, value in self.coordinates
            if not isinstance(value, str)
        ]
        return all(min(a, b) <= value <= max(a, b) for value, a, b in numbers)

    def _distance(self, other: "Candidate") -> float:
        theirs = dict(other.coordinates)
        return max(
            (
                abs(math.log2(value / float(theirs[name])))
                for name, value in self.coordinates
                if not isinstance(value, str)
            ),
            default=0.0,
        )

    def __repr__(self) -> str:
        return f"Candidate({', '.join(f'{name}={value!r}' for name, value in self.coordinates)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One step that was measured.

    Attributes:
        candidate: that it ran.
        seconds: per unit of work.
        step: its number, for drift.
        work: what a unit of it was like, as a positive number such as the length of a row.
    """

    candidate: Candidate
    seconds: float
    step: int
    work: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What the measurements say.

    Attributes:
        best: the candidate to take.
        speedup: its speed in shares of the base's.
        confidence: the probability in percent, given the measured spread, that no candidate is
            more than 1 % faster; 0 … 99.
        regret: the share of time that knowing everything is expected to win.
        challenger: the candidate that would most change the decision; the best where it is alone.
        next: which of the two to measure next.
        next_loss: of the time of one step at ``next``, the share that is expected to be lost.
    """

    best: Candidate
    speedup: float
    confidence: int
    regret: float
    challenger: Candidate
    next: Candidate
    next_loss: float


@dataclass
class Search:
    """Finds the fastest of several candidates.

    Args:
        candidates: all that fit, as far as is known.
        base: what speeds are told in shares of.
        expected: by the name of a coordinate, the share of time that a doubling is expected to
            save; nothing where it is not named.

    Raises:
        ValueError: the base is no candidate.

    >>> sizes = [Candidate.of(size=size) for size in (4, 8, 16)]
    >>> search = Search(sizes, base=sizes[2])
    >>> for step in range(12):
    ...     search.tell(Measurement(
    ...         candidate=sizes[step % 3],
    ...         seconds=(2.0, 1.0, 1.2)[step % 3] * (1 + 0.001 * (step % 2)),
    ...         step=step,
    ...     ))
    >>> found = search.find()
    >>> found.best, round(found.speedup, 2), found.confidence
    (Candidate(size=8), 1.2, 99)
    """

    candidates: list[Candidate]
    base: Candidate
    expected: Mapping[str, float] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.candidates = list(dict.fromkeys(self.candidates))
        if self.base not in self.candidates:
            raise ValueError(f"{self.base} is none of the candidates: give one of them as base")

    def tell(self, measurement: Measurement) -> None:
        """Take note of a measured step."""
        self.measurements.append(measurement)

    def add(self, candidate: Candidate) -> None:
        """One more can be chosen."""
        if candidate not in self.candidates:
            self.candidates.append(candidate)

    def exclude(self, candidates: Iterable[Candidate]) -> None:
        """Some do not fit; what they measured still tells of the others."""
        gone = set(candidates)
        self.candidates = [each for each in self.candidates if each not in gone]
        if self.base in gone and self.candidates:
            self.base = self.candidates[0]

    def count(self, candidate: Candidate) -> int:
        """How many steps of a candidate were measured."""
        return sum(each.candidate == candidate for each in self.measurements)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as plain values that JSON can hold."""
        return {
            "candidates": [dict(each.coordinates) for each in self.candidates],
            "base": dict(self.base.coordinates),
            "expected": dict(self.expected),
            "measurements": [
                [dict(each.candidate.coordinates), each.seconds, each.step, each.work]
                for each in self.measurements
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Search":
        """Return the search that ``state_dict`` described."""
        search = cls(
            [Candidate.of(**each) for each in state["candidates"]],
            Candidate.of(**state["base"]),
            dict(state["expected"]),
        )
        for coordinates, seconds, step, work in state["measurements"]:
            candidate = Candidate.of(**coordinates)
            search.tell(
                Measurement(
                    candidate=candidate, seconds=float(seconds), step=int(step), work=float(work)
                )
            )
        return search

    def find(self) -> Finding:
        """What the measurements say; before the first, that the base is as good a guess as any.

        Where nothing was measured with some text, that comes next, and nothing is sure before.
        """
        if len(self.candidates) == 1:
            [only] = self.candidates
            return Finding(
                best=only,
                speedup=1.0,
                confidence=99,
                regret=0.0,
                challenger=only,
                next=only,
                next_loss=0.0,
            )
        if not self.measurements:
            return Finding(
                best=self.base,
                speedup=1.0,
                confidence=0,
                regret=math.inf,
                challenger=self.base,
                next=self.base,
                next_loss=0.0,
            )
        found = _Posterior.of(self).finding(self)
        first = self._first_of_unknown()
        if first is None:
            return found
        return replace(found, confidence=0, regret=math.inf, challenger=first, next=first)

    def _first_of_unknown(self) -> Candidate | None:
        """The first of those of whose text nothing was measured: no neighbour tells of them."""
        known = {each.candidate.texts for each in self.measurements}
        return next((each for each in self.candidates if each.texts not in known), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Posterior:
    """Means and covariances of the candidates, then of the drift now, for each of several models.

    Attributes:
        weights: probabilities of the models.
        means: (models, candidates + 1).
        covariances: (models, candidates + 1, candidates + 1).
        noises: of one step.
    """

    weights: Array
    means: Array
    covariances: Array
    noises: Array

    @classmethod
    def of(cls, search: Search) -> "_Posterior":
        """Given all measurements."""
        told, now = search.measurements, search.measurements[-1].step + 1
        used = list(dict.fromkeys([*search.candidates, *(each.candidate for each in told)]))
        own, walk, noise, drift, prior = _models()
        index = [used.index(each.candidate) for each in told]
        k, n = len(search.candidates), len(told)
        level, walks = _shared_kernels(used)
        steps = np.array([each.step for each in told] + [now], dtype=float)
        work = np.log2([each.work for each in told])
        y = np.log([each.seconds for each in told])
        means = np.median(y) + _expected_means(used, search.expected)
        y -= means[index]

        candidates = level + walk[:, None, None] ** 2 * walks
        candidates += own[:, None, None] ** 2 * np.eye(len(used))
        over_time = np.exp(-np.abs(steps[:, None] - steps) / DRIFT_LENGTH)
        drifts = (drift * noise)[:, None, None] ** 2 * over_time
        signal = candidates[:, index][:, :, index] + drifts[:, :n, :n]
        if np.ptp(work):
            signal += WORK_SLOPE**2 * np.outer(work - work.mean(), work - work.mean())
            signal += WORK_SMOOTH**2 * _bell(work, WORK_LENGTH)
        across = np.concatenate([candidates[:, :k][:, :, index], drifts[:, n:, :n]], axis=1)
        weights = np.ones((len(own), n))
        for _ in range(ROUNDS_OF_WEIGHTS):
            noises = noise[:, None] ** 2 / weights
            inverse, log_determinant = _invert(signal + noises[:, :, None] * np.eye(n))
            solved = np.einsum("gij,j->gi", inverse, y)
            # Of each step, its own noise as it is expected: from the solved system directly.
            residual = noises * solved
            spread = noises - noises**2 * np.einsum("gii->gi", inverse)
            squares = (residual**2 + np.maximum(spread, 0.0)) / noise[:, None] ** 2
            before, weights = weights, (TAIL + 1) / (TAIL + squares)
        evidence = -0.5 * (solved @ y) - 0.5 * log_determinant
        # The bound of Student's density where these weights touch it.
        evidence += np.sum(
            0.5 * before * squares
            - 0.5 * (TAIL + 1) * np.log1p(squares / TAIL)
            - 0.5 * np.log(before),
            axis=1,
        )
        evidence += np.log(prior)
        shares = np.exp(evidence - evidence.max())
        prior_covariance = np.zeros((len(own), k + 1, k + 1))
        prior_covariance[:, :k, :k] = candidates[:, :k, :k]
        prior_covariance[:, k, k] = drifts[:, n, n]
        return cls(
            weights=shares / shares.sum(),
            means=np.einsum("gij,gj->gi", across, solved) + np.append(means[:k], 0.0),
            covariances=prior_covariance - across @ inverse @ across.transpose(0, 2, 1),
            noises=noise,
        )

    def finding(self, search: Search) -> Finding:
        """What it says of the candidates."""
        candidates = search.candidates
        k = len(candidates)
        draws = self._draws(k)
        lowest = draws.min(axis=1)
        margin = math.log1p(TOLERANCE)
        good = (draws <= lowest[:, None] + margin).mean(axis=0)
        means = [float(each) for each in self.weights @ self.means[:, :k]]
        # Of those that are as sure, the one that is faster by the mean, and else the first.
        told = {each.candidate for each in search.measurements}
        best = max(
            (each for each in range(k) if candidates[each] in told)
            if told & {*candidates}
            else [0],
            key=lambda each: (round(good[each], 2), -round(means[each], 3)),
        )
        beats = (draws < draws[:, [best]] - margin).mean(axis=0)
        gains = np.maximum(draws[:, [best]] - draws, 0.0).mean(axis=0)
        others = [each for each in range(k) if each != best]
        near = [each for each in others if candidates[each].is_near(told, candidates)] or others
        # What would change most, by as much as a step resolves of it, for the time that it takes.
        worth = {
            (challenger, measured): (beats[challenger] + gains[challenger])
            * self._resolved(best, challenger, measured)
            / math.exp(means[measured] - min(means))
            for challenger in near
            for measured in (challenger, best)
        }
        challenger, following = max(worth, key=lambda each: worth[each])
        base = candidates.index(search.base)
        return Finding(
            best=candidates[best],
            speedup=float(math.exp(means[base] - means[best])),
            confidence=int(min(99, 100 * good[best])),
            regret=float((draws[:, best] - lowest).mean()),
            challenger=candidates[challenger],
            next=candidates[following],
            next_loss=float(max(0.0, math.exp(means[following] - means[best]) - 1)),
        )

    def _resolved(self, best: int, challenger: int, measured: int) -> float:
        """The share of what is not known of a difference that a step at one of the two resolves."""
        c = self.covariances
        towards = c[:, measured] + c[:, -1]  # with the candidate and the drift of now
        seen = c[:, measured, measured] + 2 * c[:, measured, -1] + c[:, -1, -1] + self.noises**2
        unknown = c[:, best, best] + c[:, challenger, challenger] - 2 * c[:, best, challenger]
        resolved = (towards[:, best] - towards[:, challenger]) ** 2 / seen
        return float(self.weights @ (resolved / np.maximum(unknown, 1e-12)))

    def _draws(self, k: int) -> Array:
        """What the candidates may be: (DRAWS, candidates), from each model as probable as it is."""
        edges = np.rint(np.cumsum(self.weights) * DRAWS).astype(int)
        normal = _normal(k)
        parts = []
        for model in np.flatnonzero(np.diff(edges, prepend=0)):
            start = edges[model - 1] if model else 0
            covariance = self.covariances[model, :k, :k]
            values, vectors = np.linalg.eigh(covariance)
            # The symmetric root: there is one, where signs of eigenvectors are a processor's own.
            root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
            parts.append(self.means[model, :k] + normal[start : edges[model]] @ root)
        return np.concatenate(parts)


@functools.cache
def _models() -> tuple[Array, ...]:
    """Each candidate's own part, the walk, the noise, the drift in shares of it; probabilities."""
    grid = [
        (own, walk, noise, drift, OWN[own] * WALKS[walk] * DRIFTS[drift])
        for own, walk, noise, drift in itertools.product(OWN, WALKS, NOISES, DRIFTS)
    ]
    *parts, prior = np.array(grid).T
    return *parts, prior / prior.sum()


@functools.cache
def _normal(k: int) -> Array:
    """The same draws each time, so that every rank decides alike."""
    return np.random.Generator(np.random.PCG64(17)).standard_normal((DRAWS, k))


def _shared_kernels(candidates: Sequence[Candidate]) -> tuple[Array, Array]:
    """What candidates have in common with each other: the level, and walks of unit size."""
    level = np.full((len(candidates), len(candidates)), LEVEL**2)
    walks = np.zeros_like(level)
    for name in dict.fromkeys(name for each in candidates for name, _ in each.coordinates):
        values = [dict(each.coordinates)[name] for each in candidates]
        if any(isinstance(value, str) for value in values):
            level += KIND**2 * np.array([[a == b for b in values] for a in values])
            continue
        x = np.log2(np.array(values, dtype=float))
        below = x.max() - x
        walks += np.minimum(below[:, None], below)
    return level, walks


def _expected_means(candidates: Sequence[Candidate], expected: Mapping[str, float]) -> Array:
    means = np.zeros(len(candidates))
    for name, saved in expected.items():
        means -= saved * np.log2([float(each[name]) for each in candidates])
    return means


def _bell(x: Array, length: float) -> Array:
    return np.asarray(np.exp(-0.5 * ((x[:, None] - x) / length) ** 2))


def _invert(matrices: Array) -> tuple[Array, Array]:
    """Inverses of positive definite matrices, and the logarithms of their determinants."""
    roots = np.linalg.cholesky(matrices)
    log_determinants = 2 * np.log(np.einsum("gii->gi", roots)).sum(axis=1)
    return np.asarray(np.linalg.inv(matrices), dtype=float), log_determinants
