"""Machines that are none: how long a step takes at each size, with noise as real ones have."""

import math
import random

from automicro.policy.policy import Outcome, Policy, canonical_size


class Machine:
    """A device and a model: a curve of throughput against size, and the noise around it.

    Curves rise until the device is full, have steps at multiples, sizes that are unlucky by
    themselves, cliffs near the limit of memory, or fall again where caches overflow. The noise is
    as that of steps measured on a shared machine: a narrow middle with wide tails, now and then a
    step that somebody disturbed, and drift; a size's first step is slower by far.
    """

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        self.num_rows = draw.choice([8, 16, 24, 32, 48, 50, 64, 96, 128, 200, 256, 384, 512])
        fits = self.num_rows * 2 ** draw.uniform(-3, 1)
        count = max(1, math.ceil(self.num_rows / fits))
        self.most_rows = canonical_size(self.num_rows, math.ceil(self.num_rows / count))
        # Rows at which an otherwise idle device is half full.
        self._half = self.most_rows * 2 ** draw.uniform(-9, 0.5)
        self._multiple = draw.choice([1, 1, 1, 4, 8, 16, 32])
        self._is_padding = draw.uniform(0.2, 1.0)
        self._cliff = self.most_rows * draw.uniform(0.55, 1.0) if draw.random() < 0.3 else math.inf
        self._cliff_cost = draw.choice([1.05, 1.2, 1.5])
        self._cache = self.most_rows * 2 ** draw.uniform(-6, 0) if draw.random() < 0.4 else math.inf
        self._cache_cost = draw.uniform(0.02, 0.4)
        self._own = draw.choice([0.003, 0.01, 0.02])
        self._luck: dict[int, float] = {}
        self._noise = math.exp(draw.uniform(math.log(0.005), math.log(0.04)))
        self._drift_sd = self._noise * draw.choice([0.0, 0.5, 1.0])
        self._drift_length = draw.uniform(8, 40)
        self._drift = 0.0
        self._warm: set[int] = set()
        self._cold_cost = draw.uniform(1.1, 4.0)

    def true_seconds(self, size: int) -> float:
        """Of a row, at a size, without noise."""
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
        """Of a batch, as a clock would tell it."""
        draw = self._draw
        keep = math.exp(-1 / self._drift_length)
        self._drift = keep * self._drift + self._drift_sd * math.sqrt(1 - keep**2) * draw.gauss(
            0, 1
        )
        tail = draw.gauss(0, 1) / math.sqrt(draw.gammavariate(2, 1) / 2)  # Student's, of four
        noise = self._noise * tail + self._drift
        if draw.random() < 0.04:
            noise += draw.expovariate(1 / 0.2)
        if size not in self._warm:
            self._warm.add(size)
            noise += math.log(self._cold_cost)
        return self.num_rows * self.true_seconds(size) * math.exp(noise)


def step(machine: Machine, policy: Policy) -> Outcome:
    """One batch that the policy cuts."""
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
