"""Contrastive losses compare the rows of all ranks, as in one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from automicro import MemoryBudget, Microbatcher
from automicro.contrastive import Contrastive, InfoNCE, gather_rows
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import furthest, require_alike, whole_gradients, wrapped


def make_model(size: Any, width: int = 8) -> Contrastive:
    torch.manual_seed(0)
    towers = {
        "query": nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 4)),
        "document": nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 4)),
    }
    return Contrastive(towers, InfoNCE(microbatch_size=size), microbatch_size=size).double()


def share(rows: Sequence[int], rank: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    data = {
        name: torch.randn(sum(rows), wide, dtype=torch.double, generator=drawn)
        for name, wide in (("query", 5), ("document", 3))
    }
    return {name: each.split(list(rows))[rank] for name, each in data.items()}


def microbatcher_of(model: nn.Module) -> Microbatcher:
    return Microbatcher(
        model, microbatch_size=None, eval_microbatch_size=None, loss_average="samples"
    )


def contrastive_step(kind: str | None, rows: Sequence[int], size: Any) -> list[Tensor]:
    """Return loss and whole gradient; kind "plain" is a plain loop over ranks with equal rows."""
    model = make_model(size)
    batch = share(rows, dist.get_rank() if kind else 0)
    encoders = model.encoders.values() if kind == "encoders" else ()
    wrapper = {"plain": "ddp", "encoders": "fsdp"}.get(str(kind), kind)
    outer = wrapped(wrapper, model, *encoders)
    if kind == "plain":
        loss = outer(**batch)["loss"]
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return [total / dist.get_world_size(), *whole_gradients(model)]
    loss = microbatcher_of(outer).backward(batch).loss
    return [loss.double(), *whole_gradients(model)]


@pytest.mark.parametrize(
    ("kind", "rows", "size"),
    [("plain", [7, 7], 3), ("ddp", [9, 4], "auto"), ("fsdp", [7, 7], 3), ("encoders", [9, 4], 3)],
)
def test_loss_and_gradients_match_one_process(
    world2: World, kind: str, rows: Sequence[int], size: Any
) -> None:
    expected = contrastive_step(None, [sum(rows)], None)
    for found in world2.run(contrastive_step, kind, rows, size):
        assert furthest(found, expected) <= 1e-9


@on_ranks()
def test_gathered_rows_receive_gradients_of_all_ranks() -> None:
    """Each rank weights its loss differently."""
    rank = dist.get_rank()
    mine = (torch.arange([3, 2][rank] * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
    everything, first = gather_rows(mine)
    (everything * (rank + 1)).sum().backward()
    assert mine.grad is not None
    require_alike(everything.detach())
    assert everything[3:].tolist() == [[100, 101], [102, 103]]
    assert first == [0, 3][rank]
    assert bool((mine.grad == 3).all())  # 1 from rank 0, and 2 from rank 1


@on_ranks()
@pytest.mark.sweep
def test_out_of_memory_on_one_rank_shrinks_only_its_slices() -> None:
    model, rank = make_model("auto", width=1024), dist.get_rank()
    microbatcher = microbatcher_of(wrapped("ddp", model))
    with MemoryBudget("1MiB" if rank == 0 else "1GiB"):
        microbatcher.backward(share([128, 128], rank))
    assert (max(model.sizes["query"]) < 128) is (rank == 0)
    require_alike(model.encoders["query"].get_parameter("0.weight").grad)
