"""Ranks that are left to whoever calls: each has its own mean, and DDP averages them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.errors import PeerFailedError
from automicro.features import RankReduction
from tests.ranks.world import World
from tests.ranks.wrapping import furthest, whole_gradients, wrapped

pytestmark = pytest.mark.sweep


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """As many rows on each rank, and not as many targets that count."""
    drawn = torch.Generator().manual_seed(rank)
    inputs = torch.randn(6, 5, generator=drawn, dtype=torch.float64)
    targets = torch.randint(3, (6,), generator=drawn)
    targets[: 4 - 3 * rank] = -100
    return inputs, targets


def net(kind: str | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return wrapped(kind, model)


def compare(kind: str, scales: bool, fails: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    model, plain = net(kind), net(kind)
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
    return {
        "ooms": result.ooms,
        "differs": furthest(whole_gradients(model), whole_gradients(plain)),
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
    model = net("fsdp")
    step = Microbatcher(model, loss_fn=F.cross_entropy, loss_average="tokens", probe=False)
    model.set_requires_gradient_sync(False)
    with pytest.raises((ValueError, PeerFailedError)) as caught:
        step.backward(batch(dist.get_rank()))
    return str(caught.value)


def test_a_sharded_model_that_keeps_whole_gradients_back_is_refused(world2: World) -> None:
    for message in world2.run(withhold):
        assert "set_requires_gradient_sync(False)" in message
