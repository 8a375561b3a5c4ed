"""After an attempt fails on one rank, the state of all ranks is as without the failure."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher
from tests.ranks.steps import HalvingOnly
from tests.ranks.world import on_ranks
from tests.ranks.wrapping import gap, wrapped
from tests.state import test_programs as programs
from tests.sweeps import mostly_in_sweeps
from tests.transaction.test_parameters import Changing, batches, quantized

pytestmark = pytest.mark.sweep

WRAPPERS_OWN = {"module_is_added", "hook_of_a_parameter"}  # outside of captured state
PLACES = sorted(programs.KINDS.keys() - programs.NAMED - WRAPPERS_OWN)[::4]


def ddp(model: nn.Module) -> Any:
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(model: nn.Module) -> Any:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


@pytest.mark.parametrize(
    ("where", "wrap", "place"),
    mostly_in_sweeps(programs.FAILURES[1:], [ddp, fsdp], PLACES, few=12),
)
@on_ranks()
def test_state_of_all_ranks_is_as_without_failure(where: str, wrap: Any, place: str) -> None:
    programs.CLOCK.seed = rank = dist.get_rank()
    phases = programs.fully(place)[-1]
    phase = phases[programs.FAILURES.index(where) % len(phases)]
    program = programs.Program((programs.Use(place, phase, 0, 0, 0),), (), None, False, False)
    fault = programs.Failure(1, where, 2 if where == "forward" else 1, True)
    found: list[Any] = []
    for faults in ((fault,) if rank == 1 else (), ()):
        sizes = found[0].sizes if found else ()
        with programs.everything_global():
            policy = HalvingOnly(programs.ROWS, sizes)
            found.append(programs.run(program, faults, wrap, microbatch_size=policy))
    failed, clean = found
    assert failed.fired is (rank == 1)
    assert (failed.numbers, failed.places, failed.left) == (clean.numbers, clean.places, 0)


@on_ranks()
def test_each_rank_restores_parameters_written_in_forward() -> None:
    first = 4 * dist.get_rank()
    model = wrapped("ddp", Changing(quantized, most_rows=2 if first else 4))
    alone = Changing(quantized, most_rows=8)
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size="auto")
    for inputs, targets in batches():
        microbatcher.backward((inputs[first : first + 4], targets[first : first + 4]))
        nn.MSELoss()(alone(inputs), targets).backward()
        assert gap(model, alone) < 1e-12
