"""One rank checks a few rows while the others wait, or a warning says that no rank can."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import LossAverageWarning, Microbatcher
from tests.ranks.world import on_ranks
from tests.ranks.wrapping import gap, wrapped


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def loss_of(kind: str, outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.mse_loss(outputs, targets, reduction="sum" if kind == "sum" else "mean")
    if kind in ("gathered", "declared"):
        dist.all_reduce(loss.detach().clone())
    return loss


@pytest.mark.parametrize(
    ("wrapper", "kind", "found", "says"),
    [
        ("ddp", "mean", "checked", []),
        ("ddp", "sum", "wrong", ["splitting changes this batch"]),
        ("ddp", "gathered", "unchecked", ["communicates with other ranks", "automicro.verify"]),
        ("ddp", "declared", "declared", ["communicates with other ranks", "Contrastive"]),
        ("fsdp", "mean", "unchecked", ["sharded parameters"]),
    ],
)
@on_ranks()
def test_first_rank_checks_for_all_or_warns_once(
    wrapper: str, kind: str, found: str, says: list[str]
) -> None:
    model, alone = wrapped(wrapper, net()), net()
    microbatcher = Microbatcher(
        model,
        forward=lambda m, batch: loss_of(kind, m(batch[0]), batch[1]),
        microbatch_size=2,
        loss_average="samples" if kind == "declared" else "auto",
    )
    drawn = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(12, 6, generator=drawn, dtype=torch.float64).split([4, 2], 1)
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            result = microbatcher.backward((inputs.split(6)[rank], targets.split(6)[rank]))
    messages = [str(each.message) for each in caught if each.category is LossAverageWarning]
    assert len(messages) == bool(says and rank == 0)
    assert all(words in message for message in messages for words in says)
    assert rank == 1 or result.loss_average_is == found
    if kind == "mean" and wrapper == "ddp":
        assert rank == 0 or result.loss_average_is == "unchecked"
    F.mse_loss(alone(inputs), targets).backward()
    assert kind == "sum" or gap(model, alone) < 1e-12
