"""An attempt that fails on one rank: all ranks are as with its last sizes at once, to the bit."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher
from tests.ranks.steps import HalvingOnly
from tests.ranks.world import World, world_of
from tests.state.test_failed_attempts import (
    KINDS,
    PHASES,
    SIZE,
    WHEN,
    Net,
    Run,
    Trace,
    Watch,
    modes_put_back,
    same,
)

pytestmark = pytest.mark.sweep

FAILS = 1  # the rank
WRAPPERS = ("ddp", "fsdp")


def wrap(wrapper: str, net: Net) -> Any:
    if wrapper == "ddp":
        return DistributedDataParallel(net, find_unused_parameters=True)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def train(
    wrapper: str, name: str, watch: Watch, at: int, *, probe: bool, sizes: Sequence[int] = ()
) -> tuple[Trace, list[int]]:
    with modes_put_back():
        run = Run((name,), watch, lambda net: wrap(wrapper, net))
        microbatcher = Microbatcher(
            run.model,
            forward=run.forward,
            loss_average="samples",
            microbatch_size=HalvingOnly(SIZE, sizes),
            probe=probe,
        )
        used = []
        for index in range(at + 2):
            result = microbatcher.backward(run.begin(index, seed=dist.get_rank()))
            used.append(result.microbatch_size)
            run.end(index, result.loss)
        return run.trace, used


def compare(wrapper: str, name: str, phase: str, probe: bool, at: int) -> dict[str, Any]:
    """What is otherwise on this rank than without a failure."""
    fails = dist.get_rank() == FAILS
    watch = Watch(phase, at) if fails else Watch()
    trace, sizes = train(wrapper, name, watch, at, probe=probe)
    expected, _ = train(wrapper, name, Watch(), at, probe=probe, sizes=sizes)
    different = [key for key in expected if not same(trace[key], expected[key])]
    if watch.left_at_the_retry:
        different.append(f"{watch.left_at_the_retry} tensors are held when it is tried again")
    return {"different": different, "sizes": sizes, "fired": bool(watch.fired)}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_all_ranks_are_as_without_the_failure_of_one(world: World, wrapper: str, name: str) -> None:
    for number, phase in enumerate(PHASES):
        results = world.run(compare, wrapper, name, phase, *WHEN[number])
        assert [each["fired"] for each in results] == [False, True]
        assert [each["different"] for each in results] == [[], []], phase
