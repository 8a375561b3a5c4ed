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
    found = world.run(train, DEVICE.type, wrapper, *CASES[case])
    for disturbed, expected in found:
        assert differences(disturbed, expected) == []
    if wrapper == "ddp":  # otherwise each rank has its own shards
        first, second = (
            {name: value for name, value in each.items() if name.startswith("parameter")}
            for each, _ in found
        )
        assert first
        assert differences(first, second) == []
