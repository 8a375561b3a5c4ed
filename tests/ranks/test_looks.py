"""One rank looks at a few rows while the others wait, or nobody does and says so."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import LossAverageWarning, Microbatcher
from tests.ranks.world import World
from tests.ranks.wrapping import furthest, whole_gradients, wrapped

KINDS = ("a mean", "a sum", "gathered")


def _loss(kind: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if kind == "a sum":
        return F.mse_loss(outputs, targets, reduction="sum")
    loss = F.mse_loss(outputs, targets)
    if kind == "gathered":
        total = loss.detach().clone()
        dist.all_reduce(total)
    return loss


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1 + rank)
    rows = torch.randn(6, 6, generator=drawn, dtype=torch.float64)
    return rows[:, :4], rows[:, 4:]


def train(wrapper: str, kind: str) -> dict[str, Any]:
    """Three steps with looks: what rank by rank is warned of, and the gradient that remains."""
    model, alone = wrapped(wrapper, net()), net()
    microbatcher = Microbatcher(
        model, forward=lambda m, batch: _loss(kind, m(batch[0]), batch[1]), microbatch_size=2
    )
    batches = [batch_of(rank) for rank in range(dist.get_world_size())]
    batch = batches[dist.get_rank()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            result = microbatcher.backward(batch)
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    F.mse_loss(alone(inputs), targets).backward()
    return {
        "messages": [str(w.message) for w in caught if w.category is LossAverageWarning],
        "is": result.loss_average_is,
        "error": furthest(whole_gradients(model), whole_gradients(alone)),
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
