"""The job of each of two processes that share a device. Imported before they have a device."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automicro import Fixed, Halving


def train(
    kind: str, wrapper: str, demand: tuple[int, int], failing_step: int, short_rank: int | None
) -> dict[str, Any]:
    """Run three steps. Memory is short on one rank, or all ranks use half of the rows.

    Args:
        kind: the kind of device.
        wrapper: "ddp", or "fsdp" if gloo exchanges tensors of the device.
        demand: MiB per row in forward and in backward.
        failing_step: the first step that fails.
        short_rank: the rank that is short of memory; None for the run without a failure.
    """
    if kind == "standin":
        from tests.standin.device import install, join

        install()
        join(dist.distributed_c10d._get_default_group())
    # Imported late, because these look for a device.
    from tests.gpu.device import MIB, room
    from tests.gpu.subjects import ROWS, Hungry, batch, microbatcher
    from tests.gpu.wrappers import whole_snapshot, wrapped

    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)
    net = wrapped(wrapper, Hungry(*demand))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    policy = Halving(refine=False)
    step = microbatcher(net, policy, optimizer=optimizer, probe=False)
    torch.manual_seed(100 + rank)
    ooms = []
    for index in range(3):
        is_short = index >= failing_step
        if short_rank is None:
            step._train.policy = Fixed(ROWS // 2 if is_short else ROWS)
        with room((900 if is_short and rank == short_rank else 8 * 1024) * MIB):
            ooms.append(step.backward(batch(seed=10 * index + rank)).ooms)
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Tensor] = whole_snapshot(net, optimizer)
    torch.use_deterministic_algorithms(False)
    return {"ooms": ooms, "state": state}
