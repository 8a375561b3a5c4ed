"""The job of each of two processes that share a device. Imported before they have a device."""

from typing import Any

import torch
import torch.distributed as dist


def train(kind: str, wrapper: str, demand: tuple[int, int], failing_step: int) -> Any:
    """Run out of memory on rank 1; return the final states with this failure and without it.

    Args:
        kind: the kind of device.
        wrapper: "ddp", or "fsdp" if gloo exchanges tensors of the device.
        demand: MiB per row in forward and in backward.
        failing_step: the first step that fails.
    """
    if kind == "standin":
        from tests.standin.device import install, join

        install()
        join(dist.distributed_c10d._get_default_group())
    # Imported late, because these look for a device.
    from tests.gpu.subjects import Hungry
    from tests.gpu.wrappers import final_snapshots, wrapped

    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)
    try:
        return final_snapshots(
            lambda: wrapped(wrapper, Hungry(*demand)),
            failing_step=failing_step,
            num_batches=3,
            rank=rank,
            is_short=rank == 1,
        )
    finally:
        torch.use_deterministic_algorithms(False)
