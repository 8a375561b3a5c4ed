"""Random numbers go on after loading where they were at saving, bit for bit."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.checkpoints.store import CheckpointStore
from automicro.errors import CheckpointError, CheckpointWarning


def draw() -> list:
    return [
        [random.random() for _ in range(700)],
        [random.gauss(0, 1) for _ in range(3)],
        np.random.rand(700).tolist(),
        np.random.randn(3).tolist(),
        torch.rand(700).tolist(),
        torch.randn(3).tolist(),
    ]


@pytest.mark.parametrize("before", range(4))
def test_all_generators_go_on_where_they_were(tmp_path: Path, before: int) -> None:
    for _ in range(before):
        # An odd number of normal ones leaves one in reserve, which is part of the state.
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    store = CheckpointStore(tmp_path)
    store.save({"rng": rng_state()}, step=before)
    expected = draw()
    assert draw() != expected

    restore_rng_state(store.load().state["rng"])
    assert draw() == expected


def test_reading_the_state_draws_nothing() -> None:
    rng_state()
    drawn = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert draw() == drawn


def test_a_generator_of_numpy_with_large_numbers_in_its_state_comes_back(tmp_path: Path) -> None:
    original = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(5))
        store = CheckpointStore(tmp_path)
        store.save(rng_state(), step=1)
        expected = np.random.rand(10).tolist()
        restore_rng_state(store.load().state)
        assert np.random.rand(10).tolist() == expected
    finally:
        np.random.mtrand.set_bit_generator(original)


def test_a_state_of_more_accelerators_than_there_are_warns() -> None:
    state = rng_state()
    state["accelerators"] = [*state["accelerators"], torch.zeros(16, dtype=torch.uint8)]
    with pytest.warns(CheckpointWarning, match="will draw other numbers"):
        restore_rng_state(state)


@pytest.mark.parametrize("broken", [{}, {"python": {}}, {"python": 3}])
def test_what_is_no_state_is_refused(broken: dict) -> None:
    with pytest.raises(CheckpointError, match="pass the result of rng_state"):
        restore_rng_state(broken)
