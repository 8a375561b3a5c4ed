"""The search for the fastest candidate, and the reliability of its confidence."""

import dataclasses
import json
import math
import random
from collections.abc import Callable

import pytest

from automicro.policy.race import Arm, Race


def measure(
    race: Race, seconds: Callable[[Arm], float], *, rounds: int, noise: float = 0.01, seed: int = 5
) -> None:
    draw = random.Random(seed)
    step = 0
    for _ in range(rounds):
        for candidate in race.arms:
            step += 1
            time = seconds(candidate) * math.exp(noise * draw.gauss(0, 1))
            race.measurements.append((candidate, time, step, 1.0))


def sizes(*numbers: int) -> list[Arm]:
    return [(number,) for number in numbers]


def test_single_candidate_needs_no_measurement() -> None:
    candidates = sizes(16)
    assert Race(candidates, candidates[0]).find().confidence == 99


def test_clear_winner_has_maximum_confidence_of_99() -> None:
    candidates = sizes(16, 8, 4)
    race = Race(candidates, candidates[0])
    measure(race, lambda each: 1.0 if each[0] == 8 else 1.5, rounds=4)
    found = race.find()
    assert found.best == candidates[1]
    assert found.confidence == 99
    assert found.speedup == pytest.approx(1.5, rel=0.05)


def test_difference_below_noise_lowers_confidence() -> None:
    confidences = []
    for seed in range(20):
        race = Race(sizes(16, 8), (16,))
        measure(race, lambda each: 1.0 if each[0] == 8 else 1.04, rounds=2, noise=0.1, seed=seed)
        confidences.append(race.find().confidence)
    assert sum(confidences) / len(confidences) < 90


def test_machine_slowdown_does_not_bias_choice() -> None:
    """The second candidate is 5 % faster, but always measured later, when steps take longer."""
    candidates = sizes(16, 8)
    race = Race(candidates, candidates[0])
    for step in range(24):
        candidate = candidates[step % 2]
        speed = 1.0 if candidate[0] == 16 else 0.95
        race.measurements.append((candidate, speed * 1.01**step, step, 1.0))
    assert race.find().best == candidates[1]


def test_varying_work_does_not_bias_choice() -> None:
    """Long rows take longer per element, and one candidate gets them more often."""
    candidates = sizes(16, 8)
    draw = random.Random(3)
    race = Race(candidates, candidates[0])
    for step in range(40):
        is_long = draw.random() < (0.3 if step % 2 else 0.7)
        candidate = candidates[step % 2]
        seconds = (1.0 if candidate[0] == 16 else 1.1) * (1.4 if is_long else 1.0)
        seconds *= math.exp(0.01 * draw.gauss(0, 1))
        work = 512.0 if is_long else 128.0
        race.measurements.append((candidate, seconds, step, work))
    found = race.find()
    assert found.best == candidates[0]
    assert found.confidence >= 90


def test_state_round_trips_through_json() -> None:
    candidates = sizes(16, 8, 4)
    race = Race(candidates, candidates[0], 0.06)
    measure(race, lambda each: 1.0 if each[0] == 8 else 1.05, rounds=3, noise=0.03)
    again = Race.from_state(json.loads(json.dumps(dataclasses.asdict(race))))
    assert again.find() == race.find()
