"""Random steps in the trainers of others; five hundred of each by ``told.main``."""

import pytest

from automicro.integrations.host import Recorded
from automicro.loss.passes import extra_pass
from tests.integrations.told import Program, host_of, quietly, with_and_without

pytest.importorskip("transformers")
pytest.importorskip("lightning")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_what_a_step_tells_is_the_hosts_own_or_named(name: str, seed: int) -> None:
    host = host_of(name)
    with quietly():
        verdict = with_and_without(host, Program.drawn(host, seed))
    assert verdict.kind != "silent", verdict.about


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut", ["size", "oom"])
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_each_way_to_tell_something_is_the_hosts_own_or_named(name: str, cut: str) -> None:
    host = host_of(name)
    for program in Program.of_every_way(host, cut):
        with quietly():
            verdict = with_and_without(host, program)
        assert verdict.kind != "silent", verdict.about


def test_parts_of_one_check_are_not_those_of_another() -> None:
    recorded, told = Recorded(), list[float]()

    def step(rows: int, number: float) -> None:
        with recorded.step(rows):
            recorded.note("right", number, tell=lambda value, _: told.append(value))
            recorded.came_to(None)

    with extra_pass():
        for rows, number in (
            (32, 0.25),
            (16, 0.2),
            (16, 0.3),
            (16, 0.375),
            (4, 0.25),
            (12, 5 / 12),
        ):
            step(rows, number)
    recorded.begin()
    step(8, 0.25)
    step(8, 0.75)
    recorded.prepare()
    recorded.tell(None)
    assert told == [0.5]
