"""The search for the fastest candidate, and the reliability of its confidence."""

import dataclasses
import json
import math
import random
from collections.abc import Callable

import pytest

from automicro.policy.race import Arm, Race

SIZES: list[Arm] = [(16,), (8,), (4,)]


def race_of(
    seconds: Callable[[Arm], float], *, rounds: int, arms: int = 3, noise: float = 0.01, seed: int
) -> Race:
    draw = random.Random(seed)
    race = Race(SIZES[:arms], SIZES[0], 0.06)
    for step in range(rounds * arms):
        arm = SIZES[step % arms]
        time = seconds(arm) * math.exp(noise * draw.gauss(0, 1))
        race.measurements.append((arm, time, step + 1, 1.0))
    return race


def test_clear_winner_has_maximum_confidence_of_99() -> None:
    race = race_of(lambda arm: 1.0 if arm == (8,) else 1.5, rounds=4, seed=5)
    found = race.find()
    assert (found.best, found.confidence) == ((8,), 99)
    assert found.speedup == pytest.approx(1.5, rel=0.05)
    assert Race.from_state(json.loads(json.dumps(dataclasses.asdict(race)))).find() == found
    assert Race(SIZES[:1], SIZES[0]).find().confidence == 99  # without a measurement


def test_difference_below_noise_lowers_confidence() -> None:
    def slow(arm: Arm) -> float:
        return 1.0 if arm == (8,) else 1.04

    found = [
        race_of(slow, rounds=2, arms=2, noise=0.1, seed=seed).find().confidence
        for seed in range(20)
    ]
    assert sum(found) / len(found) < 90


def test_machine_slowdown_does_not_bias_choice() -> None:
    """The second candidate is 5 % faster, but always measured later, when steps take longer."""
    race = Race(SIZES[:2], SIZES[0])
    for step in range(24):
        speed = 0.95 if step % 2 else 1.0
        race.measurements.append((SIZES[step % 2], speed * 1.01**step, step, 1.0))
    assert race.find().best == SIZES[1]


def test_varying_work_does_not_bias_choice() -> None:
    """Long rows take longer per element, and one candidate gets them more often."""
    draw, race = random.Random(3), Race(SIZES[:2], SIZES[0])
    for step in range(40):
        is_long = draw.random() < (0.3 if step % 2 else 0.7)
        seconds = (1.1 if step % 2 else 1.0) * (1.4 if is_long else 1.0)
        seconds *= math.exp(0.01 * draw.gauss(0, 1))
        work = 512.0 if is_long else 128.0
        race.measurements.append((SIZES[step % 2], seconds, step, work))
    found = race.find()
    assert found.best == SIZES[0]
    assert found.confidence >= 90
