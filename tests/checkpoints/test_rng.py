"""Random number generators continue from their saved state, bit for bit."""

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
def test_all_generators_resume_from_saved_state(tmp_path: Path, before: int) -> None:
    for _ in range(before):
        # After an odd number of normal draws, the state includes a cached value.
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    store = CheckpointStore(tmp_path)
    store.save({"rng": rng_state()}, step=before)
    expected = draw()
    assert draw() != expected

    restore_rng_state(store.load().state["rng"])
    assert draw() == expected


def test_reading_state_draws_no_numbers() -> None:
    rng_state()
    drawn = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert draw() == drawn


def test_numpy_generator_with_large_state_is_restored(tmp_path: Path) -> None:
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


def test_state_with_more_accelerators_warns() -> None:
    state = rng_state()
    state["accelerators"] = [*state["accelerators"], torch.zeros(16, dtype=torch.uint8)]
    with pytest.warns(CheckpointWarning, match="will draw other numbers"):
        restore_rng_state(state)


@pytest.mark.parametrize("broken", [{}, {"python": {}}, {"python": 3}])
def test_invalid_state_is_refused(broken: dict) -> None:
    with pytest.raises(CheckpointError, match="pass the result of rng_state"):
        restore_rng_state(broken)
