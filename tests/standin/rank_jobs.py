"""What each of several ranks runs, on a device of its own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Fixed, Halving, Microbatcher
from tests.standin import device as standin
from tests.standin.hungry import MIB, ROWS, Hungry, leave


def train(
    kind: str, demand: tuple[int, int], short_rank: int | None, size: int | None
) -> dict[str, Any]:
    """Three steps; on one rank, if any, memory is short from the second one on."""
    standin.install()
    standin.join(dist.distributed_c10d._get_default_group())
    rank = dist.get_rank()
    standin.set_device(rank)
    torch.ops.standin.set_late(True, True)
    torch.manual_seed(1)
    net = Hungry(*demand, batchnorm=False).to(f"standin:{rank}")
    wrapped: nn.Module = net
    if kind == "ddp":
        wrapped = DistributedDataParallel(net)
    else:
        fully_shard(net, mesh=init_device_mesh("standin", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(wrapped.parameters())
    policy = Halving(refine=False) if size is None else Fixed(ROWS)
    step = Microbatcher(
        wrapped, loss_fn=nn.CrossEntropyLoss(), microbatch_size=policy, optimizer=optimizer
    )
    torch.manual_seed(100 + rank)
    ooms, losses = [], []
    for number in range(3):
        if number == 1 and rank == short_rank:
            leave(100 * MIB, rank)  # 8 rows ask for 128 MiB
        if number == 1 and size is not None:
            step._train.policy = Fixed(size)
        result = step.backward((torch.randn(ROWS, 6), torch.arange(ROWS) % 3))
        ooms.append(result.ooms)
        losses.append(float(result.loss))
        optimizer.step()
        optimizer.zero_grad()
    torch.ops.standin.set_capacity(rank, 2**34)
    standin.empty_cache()
    state = {name: _local(each).cpu() for name, each in wrapped.state_dict().items()}
    state["device generator"] = standin.get_rng_state()
    state["losses"] = torch.tensor(losses)
    return {"ooms": ooms, "size": result.microbatch_size, "state": state}


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
