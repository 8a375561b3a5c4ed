"""Seeded memory functions: simulated devices on which batches fit or fail.

Resident memory takes 5 to 95 % of the capacity. Batches have 1 to 4096 rows, and
the best number of microbatches ranges from 1 to the number of rows.
"""

import dataclasses
import functools
import random
from collections.abc import Callable

from automicro.policy.policy import Outcome, Policy
from tests.policy.loop import fit

MIB = 2**20
GIB = 2**30
FAMILIES = ("affine", "lines", "steps", "shapes", "growing")
BATCHES = 240
# Memory grows for this many batches; later batches outlast the patience of the policy.
GROWING_BATCHES = 80
BATCHES_AFTER_GROWTH = 640
# The CUDA allocator takes blocks below 10 MiB from 20 MiB segments, larger ones in 2 MiB units.
SEGMENTS = (2 * MIB, 20 * MIB)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Memory needed by a microbatch, the measured share of it, and the capacity."""

    family: str
    seed: int
    batch: int
    capacity: int
    resident: int
    cost_of: Callable[[int], float]
    allocated: Callable[[int, float, int], float]  # rows, cost, step → bytes above resident
    taken: Callable[[int, float, int], float]  # the same, with allocator waste
    doublings: float = 0.0

    def fits(self, rows: int, cost: float, step: int) -> bool:
        return self.resident + self.taken(rows, cost, step) <= self.capacity

    def best(self, cost: float, step: int) -> int:
        """Return the smallest number of microbatches that fits."""
        return next(
            k for k in range(1, self.batch + 1) if self.fits(-(-self.batch // k), cost, step)
        )

    def attempt(self, size: int, *, cost: float, step: int, measured: bool = True) -> Outcome:
        fits = self.fits(size, cost, step)
        peak = self.resident + int(self.allocated(size, cost, step))
        if not fits:
            # The failing allocation is one of many: report somewhat more than the capacity.
            asked = random.Random(f"{self.seed} {size} {step}").uniform(1.0, 1.1)
            peak = min(peak, int(self.capacity * asked))
        return Outcome(
            num_rows=self.batch,
            microbatch_size=size,
            fits=fits,
            cost=cost,
            peak_bytes=peak if measured else None,
            resident_bytes=self.resident if measured else None,
            capacity_bytes=self.capacity if measured else None,
        )


def make_device(seed: int, family: str | None = None) -> Device:
    """Return the device of a seed; all its numbers are drawn."""
    rng = random.Random(seed)
    family = family or FAMILIES[seed % len(FAMILIES)]
    batch = max(1, min(4096, round(2 ** rng.uniform(0, 12))))
    capacity = int(2 ** rng.uniform(1, 6.4) * GIB)
    resident = int(capacity * rng.uniform(0.05, 0.95))
    room = capacity - resident
    # The largest microbatch that fits: from one row to more than the whole batch.
    rows = 2 ** rng.uniform(0, 12 if batch == 1 else 1.1 * (batch).bit_length())
    rows = max(1.0, min(rows, 2.0 * batch))
    costs = [1.0]
    growth = 0.0
    if family == "shapes":
        costs = [rng.uniform(0.3, 1.0) for _ in range(rng.choice([2, 4, 16]))] + [1.0]
    if family == "growing":
        growth = rng.uniform(0.3, 3)
        rows = max(rows, 2**growth)
    constant = rng.choice([0.0, rng.uniform(0, 0.6)]) * room
    per_row = (room - constant) / (rows * 1.0001)
    # A maximum of lines: flatter lines start higher, as for optimizer state or other layers.
    lines = [(constant, per_row)]
    if family in ("lines", "shapes", "growing"):
        for _ in range(rng.randint(1, 3)):
            slope = per_row * rng.uniform(0, 0.9)
            meets = rng.uniform(0, 1.0) * rows
            lines.append((constant + (per_row - slope) * meets, slope))
    segment = rng.choice(SEGMENTS)
    noise = rng.uniform(0, 0.01) if family == "steps" else 0.0
    sees_steps = rng.random() < 0.5

    def factor(step: int) -> float:
        return float(2 ** (growth * min(1.0, step / GROWING_BATCHES)) / 2**growth)

    def allocated(size: int, cost: float, step: int) -> float:
        scale = factor(step) if growth else 1.0
        need = max(base + slope * size * cost * scale for base, slope in lines)
        if family == "steps" and sees_steps:
            return -(-need // segment) * segment
        return need

    def taken(size: int, cost: float, step: int) -> float:
        need = allocated(size, cost, step)
        if family == "steps" and size > 1:  # a single row always fits
            need += noise * (need - constant) * random.Random(f"{seed} {size}").random()
            need = -(-need // segment) * segment
        return need

    return Device(
        family=family,
        seed=seed,
        batch=batch,
        capacity=capacity,
        resident=resident,
        cost_of=lambda step: (
            costs[random.Random(f"{seed} cost {step}").randrange(len(costs))]
            if len(costs) > 1
            else costs[0]
        ),
        allocated=allocated,
        taken=taken,
        doublings=growth,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The results of a policy on a device."""

    device: Device
    failures: int
    rows_in_vain: int
    gap: int
    best: int
    count: int
    sizes: list[int]

    @property
    def gap_allowed(self) -> float:
        return max(1.0, 0.02 * self.best)


def train(
    device: Device, policy: Policy, *, batches: int | None = None, measured: bool = True
) -> Run:
    """Train batches; the gap is the worst over all costs, measured at the end."""
    if batches is None:
        growing = GROWING_BATCHES + BATCHES_AFTER_GROWTH
        batches = growing if device.doublings else BATCHES
    failures = vain = 0
    sizes = []
    last: dict[float, int] = {}
    for step in range(batches):
        cost = device.cost_of(step)
        attempt = functools.partial(device.attempt, cost=cost, step=step, measured=measured)
        plan, tried = fit(policy, device.batch, lambda plan: attempt(plan.size), cost)  # noqa: B023
        assert plan is not None
        failures += len(tried)
        vain += len(tried) * device.batch
        sizes.append(plan.size)
        last[cost] = plan.size
    gaps = []
    for cost, size in last.items():
        best = device.best(cost, batches)
        count = -(-device.batch // size)
        gaps.append((count - best - max(1.0, 0.02 * best), count - best, best, count))
    _, gap, best, count = max(gaps)
    return Run(
        device=device,
        failures=failures,
        rows_in_vain=vain,
        gap=gap,
        best=best,
        count=count,
        sizes=sizes,
    )
