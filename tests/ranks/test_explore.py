"""Ranks with clocks of their own explore sizes as one."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Explore, Microbatcher
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps


def train(wrapper: str, rows: tuple[int, ...]) -> dict[str, Any]:
    """Thirty steps: the sizes, what was told, and the parameters' sum in the end."""
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


@pytest.mark.parametrize(
    ("wrapper", "rows"),
    mostly_in_sweeps(["ddp", "fsdp"], [(12, 12), (12, 7)], quick=[("fsdp", (12, 7))]),
)
def test_all_ranks_try_the_same_sizes_and_end_with_the_same(
    world2: World, wrapper: str, rows: tuple[int, int]
) -> None:
    first, second = world2.run(train, wrapper, rows)
    assert first == second
    assert len(set(first["sizes"])) > 1
    assert first["told"][-1].startswith("explored for ")
    assert len(set(first["sizes"][-8:])) == 1
