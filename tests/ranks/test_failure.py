"""What no retry helps: all ranks stop within seconds and know why."""

import operator
import re
import signal

import pytest

from tests.ranks.faulty_models import Fault
from tests.ranks.jobs import fail, fail_beside_one
from tests.ranks.world import PROGRESS_SECONDS, World, world_of
from tests.sweeps import mostly_in_sweeps

KINDS = ["ddp", "fsdp"]


@pytest.mark.parametrize(
    ("kind", "where"),
    mostly_in_sweeps(
        KINDS,
        [("forward", 0, 0), ("backward", 2, 1), ("between", 1, 1)],
        quick=[("ddp", ("between", 1, 1)), ("fsdp", ("backward", 2, 1))],
    ),
    ids=str,
)
def test_all_ranks_name_the_one_with_an_error_of_its_own(
    world2: World, kind: str, where: tuple[str, int, int]
) -> None:
    name, step, microbatch = where
    plan = [Fault(1, name, step=step, microbatch=microbatch, layer=1, error=ValueError)]
    healthy, culprit = world2.run(fail, kind, plan, {})
    assert healthy["kind"] == "PeerFailedError"
    assert "rank 1: ValueError: a mistake of the user's" in healthy["text"]
    assert culprit["kind"] == "ValueError"
    assert "on rank 1 of 2" in culprit["text"]


def test_a_case_that_fails_takes_no_later_one_of_its_world_along(world2: World) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        world2.run(operator.truediv, 1, 0)
    assert world2.run(operator.truediv, 1, 2) == [0.5, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_stop_and_name_a_rank_that_was_killed(kind: str, step: int, victim: int) -> None:
    plan = [Fault(victim, "backward", step=step, microbatch=1, layer=1, error=SystemExit)]
    with world_of(3) as world:
        world.start(fail, kind, plan, {})
        results = world.results(within_seconds=PROGRESS_SECONDS)
    assert isinstance(results[victim], EOFError)
    for rank in {0, 1, 2} - {victim}:
        assert results[rank]["kind"] == "PeerLostError", results[rank]
        named = re.search(r"ranks? ([\d, ]+) of 3 gone or stuck", results[rank]["text"])
        assert named is not None, results[rank]["text"]
        assert str(victim) in named[1].split(", ")


def test_a_peer_that_was_killed_is_named() -> None:
    plan = [Fault(1, "forward", step=1, layer=1, error=SystemExit)]
    with world_of(2) as world:
        world.start(fail_beside_one, "fsdp", plan, {})
        survivor, killed = world.results()
        assert world.processes[1].exitcode in (None, -signal.SIGKILL)
    assert isinstance(killed, EOFError)
    assert survivor["kind"] == "PeerLostError"
    assert "rank 1 of 2 gone or stuck" in survivor["text"]
