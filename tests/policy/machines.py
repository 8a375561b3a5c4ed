"""Simulated machines: step times by size, with noise as on real hardware."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automicro.policy.auto import cut_size
from automicro.policy.policy import Outcome, Policy, canonical_size
from tests.policy.loop import Plan, fit


class Noise:
    """Step noise of a shared machine: drift, heavy tails, outliers and cold first steps."""

    def __init__(
        self, draw: random.Random, *, least: float, most: float, length: float | None = None
    ) -> None:
        self._draw = draw
        self._size = math.exp(draw.uniform(math.log(least), math.log(most)))
        self._drift_sd = self._size * draw.choice([0.0, 0.5, 1.0])
        self._keep = math.exp(-1 / (length or draw.uniform(8, 40)))
        self._drift = 0.0
        self._warm: set[Any] = set()
        self._cold_cost = draw.uniform(1.1, 4.0)

    def of(self, way: Any) -> float:
        """Return the log of the next step's noise factor for this configuration."""
        draw, keep = self._draw, self._keep
        self._drift = keep * self._drift + self._drift_sd * math.sqrt(1 - keep**2) * draw.gauss(
            0, 1
        )
        tail = draw.gauss(0, 1) / math.sqrt(draw.gammavariate(2, 1) / 2)  # Student's t with 4 df
        noise = self._size * tail + self._drift
        if draw.random() < 0.04:
            noise += draw.expovariate(1 / 0.2)
        if way not in self._warm:
            self._warm.add(way)
            noise += math.log(self._cold_cost)
        return noise


class Machine:
    """A simulated device and model: a throughput curve over sizes, with noise.

    Curves rise until the device is full. They can have steps at multiples, random slow sizes, a
    slowdown near the memory limit, or a decline from cache overflows. The noise resembles steps
    measured on a shared machine: heavy tails, rare outliers, drift, and far slower first steps.
    """

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        self.num_rows = draw.choice([8, 16, 24, 32, 48, 50, 64, 96, 128, 200, 256, 384, 512])
        fits = self.num_rows * 2 ** draw.uniform(-3, 1)
        count = max(1, math.ceil(self.num_rows / fits))
        self.most_rows = canonical_size(self.num_rows, math.ceil(self.num_rows / count))
        # Rows that half fill an otherwise idle device.
        self._half = self.most_rows * 2 ** draw.uniform(-9, 0.5)
        self._multiple = draw.choice([1, 1, 1, 4, 8, 16, 32])
        self._is_padding = draw.uniform(0.2, 1.0)
        self._cliff = self.most_rows * draw.uniform(0.55, 1.0) if draw.random() < 0.3 else math.inf
        self._cliff_cost = draw.choice([1.05, 1.2, 1.5])
        self._cache = self.most_rows * 2 ** draw.uniform(-6, 0) if draw.random() < 0.4 else math.inf
        self._cache_cost = draw.uniform(0.02, 0.4)
        self._own = draw.choice([0.003, 0.01, 0.02])
        self._luck: dict[int, float] = {}
        self._noise = Noise(draw, most=0.04, least=0.005)

    def true_seconds(self, size: int) -> float:
        """Return the seconds per row at a size, without noise."""
        padded = math.ceil(size / self._multiple) * self._multiple / size
        rows = size / (1 + (padded - 1) * self._is_padding)
        seconds = 1 / rows * self._half + 1 / (rows / size)
        if size > self._cliff:
            seconds *= self._cliff_cost
        seconds *= 1 + self._cache_cost / (1 + (self._cache / size) ** 3)
        if size not in self._luck:
            self._luck[size] = self._draw.gauss(0, self._own)
        return seconds * math.exp(self._luck[size])

    def seconds(self, size: int) -> float:
        """Return the measured seconds of a batch, with noise."""
        noise = self._noise.of(size)
        return self.num_rows * self.true_seconds(size) * math.exp(noise)


def step(machine: Machine, policy: Policy) -> Outcome:
    """Run one batch cut by the policy."""
    size = canonical_size(machine.num_rows, policy.propose(machine.num_rows))
    outcome = Outcome(
        num_rows=machine.num_rows,
        microbatch_size=size,
        fits=size <= machine.most_rows,
        peak_bytes=1000 + 100 * size,
        resident_bytes=0,
        capacity_bytes=1050 + 100 * machine.most_rows,
        seconds=machine.seconds(size),
    )
    policy.record(outcome)
    return outcome


LEVELS = ("plain", "recompute", "offload", "recompute + offload")


@dataclass(frozen=True)
class Kind:
    """Ranges that the figures of a job are drawn from, relative to the plain level.

    Attributes:
        rows: plain rows that fit, as shares of the batch; below one row, none does.
        bytes: of a row at each level.
        seconds: of a row at each level.
        overhead: of a microbatch, in plain rows' seconds, as a share of the batch's rows.
    """

    rows: tuple[float, float]
    bytes: Sequence[tuple[float, float]] = ((1, 1), (0.1, 0.4), (0.2, 0.5), (0.03, 0.1))
    seconds: Sequence[tuple[float, float]] = ((1, 1), (1.2, 1.4), (1.05, 1.5), (1.3, 1.9))
    overhead: tuple[float, float] = (0.005, 0.2)


KINDS = {
    "recompute wins by larger microbatches": Kind((0.02, 0.1), overhead=(0.03, 0.3)),
    "recompute loses": Kind((0.1, 0.7), overhead=(0.0005, 0.004)),
    "plain does not fit one row": Kind((-1, -0.3)),
    "only recompute + offload fits": Kind(
        (-2, -1.2), bytes=((1, 1), (0.6, 0.9), (0.6, 0.9), (0.02, 0.05))
    ),
    "plain fits whole": Kind((1.0, 3.0)),
    "slow link": Kind((0.02, 0.3), seconds=((1, 1), (1.2, 1.4), (2, 6), (2.2, 7))),
    "fast link": Kind(
        (0.02, 0.3), seconds=((1, 1), (1.2, 1.4), (1.0, 1.05), (1.25, 1.4)), overhead=(0.02, 0.2)
    ),
    "anything": Kind((-0.5, 1.2), seconds=((1, 1), (1.1, 1.5), (1.0, 4), (1.2, 5))),
}


class LeveledMachine:
    """A simulated device, link and model: bytes and seconds per row at each level, with noise.

    Attributes:
        num_rows: rows of a batch.
        attempts: level, size and success of each attempt.
        seconds: total time of all attempts.
    """

    def __init__(self, kind: str, seed: int) -> None:
        draw = self._draw = random.Random(f"{kind} {seed}")
        drawn = KINDS[kind]
        self.num_rows = draw.choice([8, 16, 24, 32, 48, 64, 128, 256])
        rows = draw.uniform(*drawn.rows)
        # Negative values are powers of two below one row.
        self._capacity = max(1.0, rows * self.num_rows) if rows >= 0 else 2**rows
        self._capacity *= 1000
        self._bytes = [1000 * draw.uniform(*each) for each in drawn.bytes]
        # The combination needs less memory and more time than each of its parts.
        self._bytes[3] = min(self._bytes[3], 0.9 * min(self._bytes[1:3]))
        self._per_row = [draw.uniform(*each) for each in drawn.seconds]
        self._per_row[3] = max(self._per_row[3], *self._per_row[1:3])
        self._overhead = self.num_rows * draw.uniform(*drawn.overhead)
        self._cliff = draw.choice([math.inf, math.inf, 0.9]) * self._capacity
        self._noise = Noise(draw, most=0.03, least=0.003, length=20)
        self.attempts: list[tuple[int, int, bool]] = []
        self.seconds = 0.0

    def needs(self, level: int, size: int, cost: float = 1.0) -> float:
        return size * cost * self._bytes[level]

    def fits(self, level: int, size: int, cost: float = 1.0) -> bool:
        return self.needs(level, size, cost) <= self._capacity

    def true_seconds(self, level: int, size: int) -> float:
        """Return the seconds of a batch, without noise."""
        count = -(-self.num_rows // size)
        seconds = self.num_rows * self._per_row[level] + count * self._overhead
        return seconds * (1.1 if self.needs(level, size) > self._cliff else 1.0)

    def largest(self, level: int) -> int | None:
        """Return the largest cut that fits at a level."""
        sizes = {cut_size(self.num_rows, most) for most in range(1, self.num_rows + 1)}
        return max((size for size in sizes if self.fits(level, size)), default=None)

    def batch(self, policy: Policy) -> tuple[int, int]:
        """Return the level and size that fitted."""
        found, _ = fit(policy, self.num_rows, self._attempt)
        assert found is not None, "nothing fits"
        assert len(self.attempts) < 2000
        return found[:2]

    def _attempt(self, plan: Plan) -> Outcome:
        level, size = plan[:2]
        fits = self.fits(level, size)
        self.attempts.append((level, size, fits))
        noise = self._noise.of(plan[:2])
        # A failed attempt runs out of memory somewhere in its first microbatch.
        seconds = self.true_seconds(level, size) * math.exp(noise)
        seconds *= 1.0 if fits else 0.5 * size / self.num_rows
        self.seconds += seconds
        need = int(self.needs(level, size))
        return Outcome(
            num_rows=self.num_rows,
            microbatch_size=size,
            fits=fits,
            peak_bytes=10_000 + (need if fits else min(need, int(1.2 * self._capacity) + 1)),
            resident_bytes=10_000,
            capacity_bytes=10_000 + int(self._capacity),
            seconds=seconds,
            level=level,
        )
