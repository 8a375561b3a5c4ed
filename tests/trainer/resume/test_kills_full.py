"""More than two hundred kills: `make torture-resume`, which takes a few minutes."""

import os
from pathlib import Path

import pytest

from tests.trainer.resume.lives import warm_up
from tests.trainer.resume.trials import KINDS, Kill, kill_and_resume

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRIALS = 150
FIRST = int(os.environ.get("AUTOMICRO_SEED", "0"))
FEWEST_KILLS = 200


@pytest.fixture(scope="module")
def kills() -> list[Kill]:
    warm_up()
    return []


@pytest.mark.parametrize("seed", range(FIRST, FIRST + TRIALS))
def test_killed_run_ends_like_undisturbed_run(tmp_path: Path, kills: list[Kill], seed: int) -> None:
    kills += kill_and_resume(seed, tmp_path, first_kind=KINDS[seed % len(KINDS)])


def test_enough_kills_of_every_kind_occurred(kills: list[Kill]) -> None:
    assert len(kills) >= FEWEST_KILLS
    assert {kill.kind for kill in kills} == set(KINDS)
    assert any(kill.is_damaged for kill in kills)
    repeated = sum(kill.repeated for kill in kills) / len(kills)
    print(f"\n{len(kills)} kills of {TRIALS} runs; {repeated:.1f} batches repeated by each")
