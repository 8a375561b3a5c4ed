"""Models in torch's distributed wrappers, in a group of one, with all votes."""

import contextlib
import datetime
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Fixed, Halving, Microbatcher
from automicro.ranks.coordinated import CoordinatedRanks
from automicro.ranks.exchange import Exchange, GlooGroup
from automicro.torch_private_distributed import HashStore
from tests.gpu.device import DEVICE, MIB, accelerator, room, snapshot, to_device
from tests.gpu.subjects import ROOM, Blocks, batch, microbatcher, model

WITH_NCCL = pytest.mark.skipif(
    DEVICE.type == "cuda" and not dist.is_nccl_available(),
    reason="this torch is built without NCCL",
)
WITH_FSDP = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="fully_shard needs torch 2.13"
)
KINDS = ["ddp", pytest.param("fsdp", marks=WITH_FSDP)]


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Create the process group of a single rank: NCCL on CUDA, gloo elsewhere."""
    accelerator.set_device(DEVICE)
    is_cuda = DEVICE.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=HashStore(),
        rank=0,
        world_size=1,
        device_id=DEVICE if is_cuda else None,
        timeout=datetime.timedelta(minutes=5),
    )
    if DEVICE.type == "standin":
        accelerator.join(dist.distributed_c10d._get_default_group())
    yield
    dist.destroy_process_group()


def exchange_over_gloo() -> Exchange:
    """Return an exchange that makes every call that several ranks would make."""
    group = GlooGroup([0], timeout_seconds=60)
    return Exchange([group], height=1, rank=0, world_size=1)


def wrapped(kind: str, *hungry: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    net = model(*hungry)
    if kind == "ddp":
        return DistributedDataParallel(net, device_ids=[DEVICE.index])
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def whole(net: nn.Module) -> Blocks:
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    assert isinstance(inner, Blocks)
    return inner


def whole_snapshot(
    net: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    found = snapshot(net, optimizer)
    local = {name: getattr(value, "_local_tensor", value) for name, value in found.items()}
    return {name: value.to("cpu", copy=True) for name, value in local.items()}


def final_snapshots(
    make: Callable[[], nn.Module],
    *,
    failing_step: int,
    num_batches: int,
    rank: int = 0,
    is_short: bool = True,
) -> list[dict[str, torch.Tensor]]:
    """Return the final states with memory short from one batch on, and at the same fixed sizes.

    With ``is_short=False``, another rank is short of memory.
    """
    found = []
    sizes: list[int] = []
    for is_scripted in (False, True):
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        step = microbatcher(net, Halving(refine=False), optimizer=optimizer, probe=False)
        torch.manual_seed(3 + rank)
        failures = []
        for index in range(num_batches):
            fails = is_short and index >= failing_step and not is_scripted
            if is_scripted:
                step._train.policy = Fixed(sizes[index])
            with room(ROOM if fails else 8 * 1024 * MIB):
                result = step.backward(to_device(batch(seed=10 * index + rank)))
            failures.append(result.ooms)
            sizes.append(result.microbatch_size)
            optimizer.step()
            optimizer.zero_grad()
        # Half of the rows may fail, too, if the allocator has split its only large block.
        assert sum(failures) == failures[failing_step]
        assert bool(failures[failing_step]) is not is_scripted
        found.append(whole_snapshot(net, optimizer))
    return found


def votes_of(step: Microbatcher) -> int:
    assert isinstance(step.ranks, CoordinatedRanks)
    return step.ranks.num_votes
