"""Global generators: draws between two states, and rollback."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from automicro.checking.bench import foreign_states
from automicro.transaction.rng import _NUMPY, _PYTHON, RandomState

Draw = Callable[[], Any]

NOTHING: dict[str, Draw] = {"nothing": lambda: None}
PYTHONS: dict[str, Draw] = {
    "random": random.random,
    "gauss, which keeps a second number": lambda: random.gauss(0, 1),
    "two of gauss": lambda: [random.gauss(0, 1) for _ in range(2)],
    "normalvariate": lambda: random.normalvariate(0, 1),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "bits": lambda: random.getrandbits(64),
    "no bits": lambda: random.getrandbits(0),
    "a thousand": lambda: [random.random() for _ in range(1000)],
    "exactly all numbers": lambda: [random.getrandbits(32) for _ in range(624)],
    "seed": lambda: random.seed(3),
    "the same seed": lambda: random.seed(1),
}
NUMPYS: dict[str, Draw] = {
    "rand": np.random.rand,
    "randn, which keeps a second number": np.random.randn,
    "two of randn": lambda: np.random.randn(2),
    "shuffle": lambda: np.random.shuffle([1, 2, 3]),
    "standard_gamma": lambda: np.random.standard_gamma(2.0),
    "a thousand": lambda: np.random.rand(1000),
    "exactly all numbers": lambda: np.random.bytes(4 * 624),
    "seed": lambda: np.random.seed(3),
    "the same seed": lambda: np.random.seed(1),
}


@pytest.fixture
def random_numbers_put_back() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def state_of_all() -> tuple[object, ...]:
    numpy: Any = np.random.get_state(legacy=False)
    inner = numpy["state"]
    return (
        random.getstate(),
        numpy["has_gauss"],
        numpy["gauss"],
        inner["pos"],
        inner["key"].tobytes(),
    )


def check(first: Draw, between: Draw, after: Draw) -> None:
    random.seed(1)
    np.random.seed(1)
    first()
    RandomState([]).begin()  # from now on, the state is known
    between()
    expected = state_of_all()
    state = RandomState([])
    state.begin()
    after()
    moved = state_of_all() != expected
    assert state.has_moved == moved
    state.roll_back()
    assert state_of_all() == expected


@pytest.mark.usefixtures("random_numbers_put_back")
@pytest.mark.parametrize("draws", [PYTHONS, NUMPYS], ids=["Python", "NumPy"])
def test_draws_since_last_state_are_rolled_back(draws: dict[str, Draw]) -> None:
    every = {**NOTHING, **draws}
    for first in every.values():
        for between in every.values():
            for after in every.values():
                check(first, between, after)


@pytest.mark.usefixtures("random_numbers_put_back")
def test_rollback_restores_explicitly_set_state() -> None:
    random.seed(5)
    other = random.getstate()
    random.seed(6)
    RandomState([]).begin()
    random.setstate(other)
    state = RandomState([])
    state.begin()
    random.random()
    state.roll_back()
    assert random.getstate() == other


@pytest.mark.usefixtures("random_numbers_put_back")
def test_generator_state_is_cached_until_next_draw() -> None:
    for generator in (_PYTHON, _NUMPY):
        before = generator.state()
        assert generator.state() is before
        random.random()
        np.random.rand()
        assert generator.state() is not before


def test_state_comparison_is_independent_of_numpy_print_options() -> None:
    with np.printoptions(threshold=4):
        state: dict[str, Any] = np.random.get_state(legacy=False)
        before = foreign_states()
        assert foreign_states() == before
        state["state"]["key"][300] += 1
        np.random.set_state(state)
        assert foreign_states() != before
