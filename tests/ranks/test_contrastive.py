"""Contrastive losses over ranks: rows of all are compared, as in one process with all rows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from automicro import MemoryBudget, Microbatcher
from automicro.contrastive import Contrastive, InfoNCE, gather_rows
from tests.ranks.world import World
from tests.ranks.wrapping import furthest, whole_gradients, wrapped


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


def contrastive_step(kind: str, rows: Sequence[int], size: Any) -> list[Tensor]:
    """Loss and whole gradient; of a "plain" loop on ranks with as many rows each, or not."""
    model = make_model(size)
    batch = share(rows, 0 if kind == "alone" else dist.get_rank())
    encoders = model.encoders.values() if kind == "fsdp, encoders" else ()
    wrapper = None if kind == "alone" else "fsdp" if kind.startswith("fsdp") else "ddp"
    outer = wrapped(wrapper, model, *encoders)
    if kind == "plain":
        loss = outer(**batch)["loss"]
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        total /= dist.get_world_size()
    else:
        loss = microbatcher_of(outer).backward(batch).loss
        total = torch.as_tensor(float(loss), dtype=torch.double)
    return [total, *whole_gradients(model)]


def step_with_shards_inside(rows: Sequence[int]) -> None:
    """Each slice of an encoder would communicate."""
    model = make_model(3)
    wrapped("fsdp", model, *(each.get_submodule("0") for each in model.encoders.values()))
    microbatcher_of(model).backward(share(rows, dist.get_rank()))


def step_with_little_memory_on_one(rows: Sequence[int]) -> tuple[dict[str, list[int]], Tensor]:
    """Sizes of slices, and a gradient, where rank 0 has less memory."""
    model = make_model("auto", width=1024)
    microbatcher = microbatcher_of(wrapped("ddp", model))
    with MemoryBudget("1MiB" if dist.get_rank() == 0 else "1GiB"):
        microbatcher.backward(share(rows, dist.get_rank()))
    gradient = model.encoders["query"].get_parameter("0.weight").grad
    assert gradient is not None
    return model.sizes, gradient


def gathered(rows: Sequence[int]) -> tuple[Tensor, int, Tensor]:
    """What `gather_rows` gives, and the gradient of a loss that counts ranks apart."""
    rank = dist.get_rank()
    mine = (torch.arange(rows[rank] * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
    everything, first = gather_rows(mine)
    (everything * (rank + 1)).sum().backward()
    assert mine.grad is not None
    return everything.detach(), first, mine.grad


@pytest.mark.parametrize(
    ("kind", "rows", "size"),
    [
        ("plain", [7, 7], 3),
        ("microbatcher", [7, 7], 3),
        ("microbatcher", [9, 4], "auto"),
        ("fsdp", [7, 7], 3),
        ("fsdp, encoders", [9, 4], 3),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(
    world2: World, kind: str, rows: Sequence[int], size: Any
) -> None:
    expected = contrastive_step("alone", [sum(rows)], None)
    for found in world2.run(contrastive_step, kind, rows, size):
        assert furthest(found, expected) <= 1e-9


def test_shards_inside_of_an_encoder_are_refused_with_what_helps(world2: World) -> None:
    for kind, said in world2.ends(step_with_shards_inside, [7, 6]):
        assert kind == "UnsplittableModelError"
        assert "apply fully_shard to the part itself" in said


def test_rows_of_all_ranks_come_with_the_gradients_of_all(world2: World) -> None:
    first, second = world2.run(gathered, [3, 2])
    assert torch.equal(first[0], second[0])
    assert first[0][3:].tolist() == [[100, 101], [102, 103]]
    assert (first[1], second[1]) == (0, 3)
    assert torch.equal(first[2], torch.full((3, 2), 3.0))  # one of rank 0, and two of rank 1
    assert torch.equal(second[2], torch.full((2, 2), 3.0))


def test_memory_that_runs_out_on_one_rank_shrinks_its_slices_alone(world2: World) -> None:
    first, second = world2.run(step_with_little_memory_on_one, [128, 128])
    assert max(first[0]["query"]) < 128
    assert second[0]["query"] == [128]
    assert torch.equal(first[1], second[1])
