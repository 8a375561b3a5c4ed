"""The search for the fastest candidate, and what its confidence is worth."""

import dataclasses
import json
import math
import random
from collections.abc import Callable

import pytest

from automicro.policy.race import Arm, Race


def measure(
    race: Race, seconds: Callable[[Arm], float], *, rounds: int, noise: float = 0.01
) -> None:
    draw = random.Random(5)
    step = 0
    for _ in range(rounds):
        for candidate in race.arms:
            step += 1
            time = seconds(candidate) * math.exp(noise * draw.gauss(0, 1))
            race.measurements.append((candidate, time, step, 1.0))


def sizes(*numbers: int) -> list[Arm]:
    return [(number,) for number in numbers]


def test_before_any_measurement_the_base_is_next_and_nothing_is_sure() -> None:
    candidates = sizes(16, 8, 4)
    found = Race(candidates, candidates[0]).find()
    assert (found.best, found.next, found.confidence) == (candidates[0], candidates[0], 0)


def test_a_candidate_without_rivals_needs_no_measurement() -> None:
    candidates = sizes(16)
    assert Race(candidates, candidates[0]).find().confidence == 99


def test_a_clear_winner_is_sure_and_never_quite() -> None:
    candidates = sizes(16, 8, 4)
    race = Race(candidates, candidates[0])
    measure(race, lambda each: 1.0 if each[0] == 8 else 1.5, rounds=4)
    found = race.find()
    assert found.best == candidates[1]
    assert found.confidence == 99
    assert found.speedup == pytest.approx(1.5, rel=0.05)
    assert found.regret < 1e-3


def test_two_that_differ_by_less_than_the_noise_leave_doubt() -> None:
    candidates = sizes(16, 8)
    race = Race(candidates, candidates[0])
    measure(race, lambda each: 1.0 if each[0] == 8 else 1.04, rounds=2, noise=0.1)
    assert race.find().confidence < 90


def test_more_measurements_make_surer() -> None:
    confidences = []
    for rounds in (2, 20):
        candidates = sizes(16, 8)
        race = Race(candidates, candidates[0])
        measure(race, lambda each: 1.0 if each[0] == 8 else 1.04, rounds=rounds, noise=0.03)
        confidences.append(race.find().confidence)
    assert confidences[0] < confidences[1]


def test_a_step_that_somebody_disturbed_decides_nothing() -> None:
    candidates = sizes(16, 8)
    race = Race(candidates, candidates[0])
    measure(race, lambda each: 1.0 if each[0] == 8 else 1.1, rounds=6)
    race.measurements.append((candidates[1], 3.0, 13, 1.0))
    found = race.find()
    assert found.best == candidates[1]
    assert found.speedup == pytest.approx(1.1, rel=0.03)


def test_a_machine_that_slows_down_favours_none() -> None:
    """The second candidate is 5 % faster, and always measured later, when all takes longer."""
    candidates = sizes(16, 8)
    race = Race(candidates, candidates[0])
    for step in range(24):
        candidate = candidates[step % 2]
        speed = 1.0 if candidate[0] == 16 else 0.95
        race.measurements.append((candidate, speed * 1.01**step, step, 1.0))
    assert race.find().best == candidates[1]


def test_what_the_work_is_like_favours_none() -> None:
    """Long rows take longer for each element, and meet one candidate more often."""
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


def test_the_next_candidate_is_one_of_those_that_could_win() -> None:
    candidates = sizes(16, 8, 4)
    race = Race(candidates, candidates[0])
    measure(race, lambda each: {16: 1.0, 8: 1.01, 4: 3.0}[int(each[0])], rounds=3, noise=0.02)
    found = race.find()
    assert found.best in (candidates[0], candidates[1])
    assert found.next in (candidates[0], candidates[1])


def test_a_neighbour_tells_of_its_neighbours() -> None:
    """Where twice as many rows are much slower, four times as many are not expected to win."""
    candidates = sizes(16, 8, 4)
    race = Race(candidates, candidates[0])
    for step in range(6):
        candidate = candidates[step % 2]
        seconds = 1.0 if candidate[0] == 16 else 2.0
        race.measurements.append((candidate, seconds, step, 1.0))
    found = race.find()
    assert found.best == candidates[0]
    assert found.confidence >= 80


def test_coordinates_have_names_and_join_without_another_search() -> None:
    """The part's factor and whether sync is deferred are coordinates like the size."""
    candidates: list[Arm] = [
        (size, factor, deferred)
        for size in (16, 8)
        for factor in (1, 2)
        for deferred in ("no", "yes")
    ]

    def seconds(each: Arm) -> float:
        size, factor, deferred = each
        slow = (1.0 if size == 16 else 1.2) * (1.1 if factor == 2 else 1.0)
        return slow * (0.8 if deferred == "yes" else 1)

    race = Race(candidates, candidates[0])
    measure(race, seconds, rounds=2)
    found = race.find()
    assert found.best == (16, 1, "yes")
    assert found.speedup == pytest.approx(1.25, rel=0.03)


def test_the_next_is_close_to_what_was_measured_or_next_to_it() -> None:
    """Curves are not to be trusted far out, however much would be won there."""
    race = Race(sizes(64, 8, 2), (64,), -0.5)
    for step in range(4):
        race.measurements.append(((64,), 1.0, step, 1.0))
    assert race.find().next == (8,)


def test_what_does_not_fit_is_never_found() -> None:
    candidates = sizes(16, 8, 4)
    race = Race(candidates, candidates[0])
    measure(race, lambda each: float(16 / int(each[0])), rounds=3)
    race.exclude([candidates[0]])
    found = race.find()
    assert found.best == candidates[1]
    assert found.next != candidates[0]
    assert race.base == candidates[1]


def test_one_that_is_told_of_later_joins() -> None:
    candidates = sizes(8, 4)
    race = Race(candidates, candidates[0])
    measure(race, lambda _: 1.0, rounds=3)
    race.arms.append((16,))
    for step in range(20, 26):
        race.measurements.append(((16,), 0.5, step, 1.0))
    found = race.find()
    assert found.best == (16,)
    assert found.speedup == pytest.approx(2.0, rel=0.05)


def test_a_state_goes_through_json_and_finds_the_same() -> None:
    candidates = sizes(16, 8, 4)
    race = Race(candidates, candidates[0], 0.06)
    measure(race, lambda each: 1.0 if each[0] == 8 else 1.05, rounds=3, noise=0.03)
    again = Race.from_state(json.loads(json.dumps(dataclasses.asdict(race))))
    assert again.find() == race.find()
