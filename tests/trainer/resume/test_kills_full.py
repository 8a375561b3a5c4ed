"""Two hundred kills and more: `make torture-resume`, a few minutes."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.trainer.resume.lives import warm_up
from tests.trainer.resume.trials import KINDS, Kill, kill_and_resume

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRIALS = 150
FIRST = int(os.environ.get("AUTOMICRO_SEED", "0"))
FEWEST_KILLS = 200
HEAD = f"{'killed at':<26}{'kills':>6}{'repeated: mean':>16}{'most':>6}"


@pytest.fixture(scope="module")
def kills() -> Iterator[list[Kill]]:
    warm_up()
    start = time.monotonic()
    found: list[Kill] = []
    yield found
    print("\n" + render(found, trials=TRIALS, seconds=time.monotonic() - start))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + TRIALS))
def test_a_killed_run_ends_as_the_undisturbed_one(
    tmp_path: Path, kills: list[Kill], seed: int
) -> None:
    kills += kill_and_resume(seed, tmp_path, first_kind=KINDS[seed % len(KINDS)])


def test_there_were_enough_kills_of_every_kind(kills: list[Kill]) -> None:
    assert len(kills) >= FEWEST_KILLS
    assert {kill.kind for kill in kills} == set(KINDS)
    assert any(kill.is_damaged for kill in kills)


def render(kills: Sequence[Kill], *, trials: int, seconds: float) -> str:
    """One line per kind of point, then all together."""
    rows = [
        _row(kind, found)
        for kind in KINDS
        if (found := [kill for kill in kills if kill.kind == kind])
    ]
    damaged = sum(kill.is_damaged for kill in kills)
    anew = sum(kill.resumed_at == 0 for kill in kills)
    return "\n".join(
        [
            HEAD,
            *rows,
            _row("all", kills),
            f"{len(kills)} kills of {trials} runs in {seconds:.0f} s; before {damaged} resumes the "
            f"newest checkpoint was cut short; {anew} began anew, having no checkpoint yet",
        ]
    )


def _row(name: str, kills: Sequence[Kill]) -> str:
    steps = [kill.repeated for kill in kills]
    return f"{name:<26}{len(steps):>6}{sum(steps) / len(steps):>16.1f}{max(steps):>6}"
