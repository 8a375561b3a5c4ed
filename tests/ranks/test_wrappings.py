"""However a transformer is wrapped: exact, and bit for bit the same where memory runs out."""

import random

import pytest

from automicro.options import SYNCS
from tests.ranks.world import World
from tests.ranks.wrappings import ON_FOUR, WRAPPINGS, compare, one_after_the_other, plain_error
from tests.sweeps import SEED

pytestmark = pytest.mark.sweep

SMOKE = ("all in children", "nested, nothing of their own", "pairs", "no root", "tied in children")


def require_equal(world: World, name: str, operations: range) -> int:
    faults = [
        (step, rank, k) for step in (0, 2) for rank in (0, world.size - 1) for k in operations
    ]
    fired = 0
    for at in range(0, len(faults), 4):  # a few at a time, so that each makes progress
        for found in world.run(compare, name, faults[at : at + 4]):
            assert found["differing"] == []
            fired += found["fired"]
    return fired


@pytest.mark.parametrize("name", random.Random(SEED).sample(SMOKE, 3))
def test_a_wrapped_model_is_exact(world2: World, name: str) -> None:
    for sync in SYNCS:
        assert max(world2.run(plain_error, name, sync)) < 1e-6
    assert require_equal(world2, name, range(60, 61)) == 4


def test_models_train_one_after_the_other(world2: World) -> None:
    names = ["all in children", "ddp", "nested, nothing of their own"]
    assert world2.run(one_after_the_other, names) == [[[]] * 3] * 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", WRAPPINGS)
def test_every_way_to_wrap_a_model_is_exact(world2: World, name: str) -> None:
    for sync in SYNCS:
        most = 1e-2 if name == "half precision" else 1e-6
        assert max(world2.run(plain_error, name, sync)) < most
    assert require_equal(world2, name, range(0, 300, 60)) > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ON_FOUR)
def test_every_way_to_wrap_a_model_on_four_ranks_is_exact(world4: World, name: str) -> None:
    for sync in SYNCS:
        assert max(world4.run(plain_error, name, sync)) < 1e-6
    assert require_equal(world4, name, range(0, 300, 120)) > 5
