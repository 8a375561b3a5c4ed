"""Global generators: draws between two states, and rollback."""

import random
from typing import Any

import numpy as np
import pytest

from automicro.checking.bench import foreign_states
from automicro.transaction.rng import _NUMPY, _PYTHON, RandomState

PYTHONS: list[Any] = [
    lambda: None,
    random.random,
    lambda: random.gauss(0, 1),  # keeps a second number
    lambda: [random.gauss(0, 1) for _ in range(2)],
    lambda: random.getrandbits(0),
    lambda: [random.random() for _ in range(1000)],
    lambda: [random.getrandbits(32) for _ in range(624)],  # exactly all numbers
    lambda: random.seed(3),
    lambda: random.seed(1),  # as before
]
NUMPYS: list[Any] = [
    lambda: None,
    np.random.rand,
    np.random.randn,
    lambda: np.random.randn(2),
    lambda: np.random.rand(1000),
    lambda: np.random.bytes(4 * 624),
    lambda: np.random.seed(3),
    lambda: np.random.seed(1),
]


@pytest.fixture(autouse=True)
def random_numbers_put_back():
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def state_of_all():
    numpy: Any = np.random.get_state(legacy=False)
    inner = numpy.pop("state")
    return random.getstate(), numpy, inner["pos"], inner["key"].tobytes()


@pytest.mark.parametrize("draws", [PYTHONS, NUMPYS], ids=["Python", "NumPy"])
def test_draws_since_last_state_are_rolled_back(draws):
    for first in draws:
        for between in draws:
            for after in draws:
                random.seed(1)
                np.random.seed(1)
                first()
                RandomState([]).begin()  # from now on, the state is known
                between()
                expected = state_of_all()
                state = RandomState([])
                state.begin()
                after()
                assert state.has_moved == (state_of_all() != expected)
                state.roll_back()
                assert state_of_all() == expected


def test_rollback_restores_explicitly_set_state():
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


def test_generator_state_is_cached_until_next_draw():
    for generator in (_PYTHON, _NUMPY):
        before = generator.state()
        assert generator.state() is before
        random.random()
        np.random.rand()
        assert generator.state() is not before


def test_state_comparison_is_independent_of_numpy_print_options():
    with np.printoptions(threshold=4):
        state: dict[str, Any] = np.random.get_state(legacy=False)
        before = foreign_states()
        assert foreign_states() == before
        state["state"]["key"][300] += 1
        np.random.set_state(state)
        assert foreign_states() != before
