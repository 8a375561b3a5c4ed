"""Ranks that are left to whoever calls: each has its own mean, and DDP averages them."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher
from automicro.errors import PeerFailedError
from automicro.features import RankReduction
from tests.ranks.steps import local
from tests.ranks.world import World

pytestmark = pytest.mark.sweep


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """As many rows on each rank, and not as many targets that count."""
    drawn = torch.Generator().manual_seed(rank)
    inputs = torch.randn(6, 5, generator=drawn, dtype=torch.float64)
    targets = torch.randint(3, (6,), generator=drawn)
    targets[: 4 - 3 * rank] = -100
    return inputs, targets


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


def compare(kind: str, scales: bool, fails: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    model = wrapped(kind)
    plain = wrapped(kind) if kind == "fsdp" else copy.deepcopy(model)
    inputs, targets = batch(rank)
    calls = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(outputs))
        if fails and rank == 1 and len(outputs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(outputs, targets)

    step = Microbatcher(
        model,
        loss_fn=loss_fn,
        loss_average="tokens",
        microbatch_size="auto",
        features=[RankReduction(scales=scales)],
        probe=False,
    )
    result = step.backward((inputs, targets))
    own = F.cross_entropy(plain(inputs), targets)
    own.backward()
    mean = own.detach().clone()
    dist.all_reduce(mean)
    ours, its = (
        [local(each.grad) for each in net.parameters() if each.grad is not None]
        for net in (model, plain)
    )
    return {
        "ooms": result.ooms,
        "differs": max(float((a - b).abs().max()) for a, b in zip(ours, its, strict=True)),
        "loss": float(result.loss),
        "mean of losses": float(mean) / 2,
        "rank loss": float(result.rank_loss),
        "own loss": float(own.detach()),
    }


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_gradient_is_the_one_of_the_wrapper_alone(
    world2: World, kind: str, fails: bool
) -> None:
    for found in world2.run(compare, kind, False, fails):
        assert found["ooms"] == int(fails)
        assert found["differs"] < 1e-15
        assert found["loss"] == pytest.approx(found["mean of losses"], rel=1e-14)
        assert found["rank loss"] == pytest.approx(found["own loss"], rel=1e-14)


def test_the_gradient_of_one_batch_is_another_where_targets_are_uneven(world2: World) -> None:
    for found in world2.run(compare, "ddp", True, False):
        assert found["differs"] > 1e-3
        assert found["loss"] != pytest.approx(found["mean of losses"], rel=1e-3)
        assert found["rank loss"] == pytest.approx(found["own loss"], rel=1e-14)


def withhold() -> str:
    model = wrapped("fsdp")
    assert isinstance(model, FSDPModule)
    step = Microbatcher(model, loss_fn=F.cross_entropy, loss_average="tokens", probe=False)
    model.set_requires_gradient_sync(False)
    with pytest.raises((ValueError, PeerFailedError)) as caught:
        step.backward(batch(dist.get_rank()))
    return str(caught.value)


def test_a_sharded_model_that_keeps_whole_gradients_back_is_refused(world2: World) -> None:
    for message in world2.run(withhold):
        assert "set_requires_gradient_sync(False)" in message
