"""One rank looks at a few rows while the others wait, or nobody does and says so."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import LossAverageWarning, Microbatcher
from tests.ranks.steps import whole
from tests.ranks.world import World

KINDS = ("a mean", "a sum", "gathered")


def _loss(kind: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if kind == "a sum":
        return F.mse_loss(outputs, targets, reduction="sum")
    loss = F.mse_loss(outputs, targets)
    if kind == "gathered":
        total = loss.detach().clone()
        dist.all_reduce(total)
    return loss


def train(wrapper: str, kind: str) -> dict[str, Any]:
    """Three steps with looks: what rank by rank is warned of, and the gradient that remains."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain = {name: value.clone() for name, value in inner.state_dict().items()}
    model: Any = DistributedDataParallel(inner) if wrapper == "ddp" else fully_shard(inner)
    microbatcher = Microbatcher(
        model, forward=lambda m, batch: _loss(kind, m(batch[0]), batch[1]), microbatch_size=2
    )
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            result = microbatcher.backward(batch)
    gradient = next(iter(model.parameters())).grad
    gathered = [torch.empty_like(each) for each in batch for _ in range(dist.get_world_size())]
    half = len(gathered) // 2
    dist.all_gather(gathered[:half], batch[0])
    dist.all_gather(gathered[half:], batch[1])
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    alone.load_state_dict(plain)
    F.mse_loss(alone(torch.cat(gathered[:half])), torch.cat(gathered[half:])).backward()
    expected: Any = alone[0].weight.grad
    return {
        "messages": [str(w.message) for w in caught if w.category is LossAverageWarning],
        "is": result.loss_average_is,
        "error": (whole(gradient) - expected).abs().max().item(),
    }


def test_the_first_rank_looks_through_ddp_without_the_others(world2: World) -> None:
    first, second = world2.run(train, "ddp", "a mean")
    assert (first["messages"], first["is"]) == ([], "checked")
    assert (second["messages"], second["is"]) == ([], "unchecked")
    assert max(first["error"], second["error"]) < 1e-12


def test_what_does_not_add_up_is_named_by_the_first_rank(world2: World) -> None:
    first, second = world2.run(train, "ddp", "a sum")
    (message,) = first["messages"]
    assert "splitting changes this batch" in message
    assert first["is"] == "wrong"
    assert second["messages"] == []


def test_a_loss_that_communicates_is_said_to_be_unchecked(world2: World) -> None:
    first, second = world2.run(train, "ddp", "gathered")
    (message,) = first["messages"]
    assert "communicates with other ranks" in message
    assert "automicro.verify" in message
    assert (first["is"], second["messages"]) == ("unchecked", [])
    assert max(first["error"], second["error"]) < 1e-12


def test_a_sharded_model_is_not_looked_at_and_says_so_once(world2: World) -> None:
    first, second = world2.run(train, "fsdp", "a mean")
    (message,) = first["messages"]
    assert "sharded parameters" in message
    assert (first["is"], second["messages"]) == ("unchecked", [])
    assert max(first["error"], second["error"]) < 1e-12
