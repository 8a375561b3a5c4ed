"""What ranks run to explore sizes together."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Explore, Microbatcher


def train(wrapper: str, rows: tuple[int, ...]) -> dict[str, Any]:
    """Thirty steps: the sizes, what was told, and the parameters' sum in the end.

    Args:
        wrapper: ``"ddp"`` or ``"fsdp"``.
        rows: of each rank's batches.
    """
    torch.manual_seed(0)
    rank = dist.get_rank()
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model: Any = DistributedDataParallel(inner) if wrapper == "ddp" else fully_shard(inner)
    policy = Explore(max_steps=16)

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.002 * rank)  # clocks of ranks differ
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    microbatcher = Microbatcher(
        model, forward=forward, loss_average="samples", microbatch_size=policy, probe=False
    )
    torch.manual_seed(1 + rank)
    batch = torch.randn(rows[rank], 4), torch.randn(rows[rank], 2)
    sizes, told = [], []
    for _ in range(30):
        result = microbatcher.backward(batch)
        sizes.append(result.microbatch_size)
        if result.exploration is not None:
            told.append(str(result.exploration))
        model.zero_grad()
    return {"sizes": sizes, "told": told, "state": str(policy.state_dict())}
