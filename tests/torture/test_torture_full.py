"""Every fault at every operation: `make torture`, some minutes."""

import random
from collections.abc import Iterator

import pytest

from tests.torture.faults import Fault
from tests.torture.subjects import SUBJECTS
from tests.torture.sweep import Row, Scene, double_faults, single_faults, sweep
from tests.torture.table import render

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCENES = [
    *(Scene(subject, "backward", warm) for subject in SUBJECTS for warm in (0, 1)),
    *(Scene(subject, in_budget=True) for subject in SUBJECTS),
    *(Scene(subject, "evaluate") for subject in SUBJECTS),
    *(Scene(subject, "optimizer step", warm) for subject in SUBJECTS for warm in (0, 1)),
]
IN_TRANSACTION = [
    scene for scene in SCENES if scene.call != "optimizer step" and not scene.in_budget
]
MOST_DOUBLES = 300


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    found: list[Row] = []
    yield found
    print("\n" + render(found))


def check(rows: list[Row], scene: Scene, title: str, plans: list[tuple[Fault, ...]]) -> None:
    row = sweep(scene, title, plans)
    rows.append(row)
    assert row.wrong == []
    assert row.bytes_alive <= 0
    assert not any("refused" in outcome for outcome in row.outcomes)


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_out_of_memory_before_and_after_each_operation(rows: list[Row], scene: Scene) -> None:
    check(rows, scene, "one out of memory", single_faults(scene, ["oom"]))


@pytest.mark.parametrize("scene", IN_TRANSACTION, ids=str)
def test_a_foreign_error_before_and_an_interrupt_after_each_operation(
    rows: list[Row], scene: Scene
) -> None:
    plans = single_faults(scene, ["boom", "interrupt"])
    plans = [(each,) for (each,) in plans if each.after == (each.kind == "interrupt")]
    check(rows, scene, "foreign errors", plans)


@pytest.mark.parametrize("scene", IN_TRANSACTION, ids=str)
def test_a_second_fault_anywhere_after_the_first(rows: list[Row], scene: Scene) -> None:
    plans = double_faults(scene, ["oom", "boom", "interrupt"], num_first=2)
    chosen = random.Random(str(scene)).sample(plans, min(MOST_DOUBLES, len(plans)))
    check(rows, scene, "two faults", chosen)
