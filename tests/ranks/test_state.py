"""After an attempt fails on one rank, the state of all ranks is as without the failure."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.steps import HalvingOnly
from tests.ranks.world import World
from tests.state.test_programs import (
    CLOCK,
    FAILURES,
    KINDS,
    NAMED,
    ROWS,
    Failure,
    Program,
    Use,
    everything_global,
    fully,
    run,
)
from tests.sweeps import mostly_in_sweeps

pytestmark = pytest.mark.sweep

FAILS = 1  # the rank that fails
WRAPPERS_OWN = {"module_is_added", "hook_of_a_parameter"}  # outside of captured state


def ddp(model: nn.Module) -> Any:
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(model: nn.Module) -> Any:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def compare(wrap: Any, name: str, where: str, phase: str) -> dict[str, Any]:
    """Compare the state on this rank with and without a failure."""
    CLOCK.seed = dist.get_rank()
    fails = CLOCK.seed == FAILS
    faults = (Failure(1, where, 2 if where == "forward" else 1, True),) if fails else ()
    program = Program((Use(name, phase, 0, 0, 0),), (), None, False, False)
    with everything_global():
        failed = run(program, faults, wrap, microbatch_size=HalvingOnly(ROWS))
    with everything_global():
        clean = run(program, (), wrap, microbatch_size=HalvingOnly(ROWS, failed.sizes))
    parts = ((failed.numbers, clean.numbers), (failed.places, clean.places), (failed.left, 0))
    return {"same": [one == other for one, other in parts], "fired": failed.fired}


@pytest.mark.parametrize(
    ("where", "wrap", "name"),
    mostly_in_sweeps(
        FAILURES[1:], [ddp, fsdp], sorted(KINDS.keys() - NAMED - WRAPPERS_OWN)[::4], few=40
    ),
)
def test_state_of_all_ranks_is_as_without_failure(
    world2: World, where: str, wrap: Any, name: str
) -> None:
    phases = fully(name)[-1]
    phase = phases[FAILURES.index(where) % len(phases)]
    results = world2.run(compare, wrap, name, where, phase)
    assert [each["fired"] for each in results] == [False, True]
    assert [each["same"] for each in results] == [[True] * 3] * 2
