"""Two processes on one device, over gloo: recovery of several ranks, as far as one GPU allows.

In the first failure of a world, ranks vote before each bucket; they replay later ones.
"""

from collections.abc import Iterator

import pytest

from tests.gpu.device import DEVICE, GPU, differences
from tests.gpu.rank_jobs import train
from tests.ranks.world import World, world_of

pytestmark = GPU


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as world:
        yield world


only_standin = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="gloo reduces and scatters no tensors of CUDA"
)
FORWARD, BACKWARD = (64, 0), (0, 64)
CASES = {
    "guarded forward": (FORWARD, 0),
    "guarded backward": (BACKWARD, 0),
    "replayed forward": (FORWARD, 2),
    "replayed backward": (BACKWARD, 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp", marks=only_standin)])
def test_both_ranks_recover_bit_identically_from_oom(wrapper: str, case: str, world: World) -> None:
    demand, failing_step = CASES[case]
    arguments = DEVICE.type, wrapper, demand, failing_step
    expected = world.run(train, *arguments, None)
    found = world.run(train, *arguments, 1)
    for one, other in zip(expected, found, strict=True):
        assert one["ooms"] == [0, 0, 0]
        assert sum(other["ooms"]) == other["ooms"][failing_step] == 1
        assert differences(one["state"], other["state"]) == []
    if wrapper == "fsdp":
        return  # each rank has its own shards
    first, second = (each["state"] for each in found)
    both = [name for name in first if name.startswith("parameter")]
    assert both
    assert differences({n: first[n] for n in both}, {n: second[n] for n in both}) == []
