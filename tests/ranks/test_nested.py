"""Parts with sizes of their own on several ranks: each has its own slices."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher, split
from automicro.features import Nested
from tests.ranks.world import World
from tests.ranks.wrapping import furthest, whole_gradients, wrapped
from tests.sweeps import mostly_in_sweeps

pytestmark = pytest.mark.sweep


class Part(nn.Module):
    """Runs out of memory for more rows than these, where a graph is kept."""

    def __init__(self, *, gives_loss: bool, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 5))
        self.gives_loss = gives_loss
        self.most = 1000

    def forward(self, hidden: Tensor, targets: Tensor) -> Any:
        if torch.is_grad_enabled() and len(hidden) > self.most:
            raise torch.OutOfMemoryError("too many rows")
        logits = self.layers(hidden)
        return F.cross_entropy(logits, targets) if self.gives_loss else logits


class Model(nn.Module):
    """An encoder, then a part."""

    def __init__(self, *, gives_loss: bool, p: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.part = Part(gives_loss=gives_loss, p=p)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        found = self.part(self.encoder(x), targets)
        return {"loss": found if found.dim() == 0 else F.cross_entropy(found, targets)}


def _wrapped(model: Any, how: str) -> Any:
    if how.startswith("ddp"):
        options = {"find_unused_parameters": "unused" in how}
        return wrapped("ddp", model, gradient_as_bucket_view="view" in how, **options)
    parts = {"part of its own": [model.part], "inside the part": [model.part.layers[0]]}
    return wrapped("fsdp", model, *parts.get(how, []))


def differences(how: str, gives_loss: bool, in_own_loop: bool) -> dict[str, Any]:
    """The largest difference to the same without a size, where slices of ranks differ."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(gives_loss=gives_loss)
    x, targets = torch.randn(8 * size, 6), torch.randint(5, (8 * size,))
    plain = copy.deepcopy(model)
    plain(x, targets)["loss"].backward()
    model = _wrapped(model, how)
    part: Any = next(each for each in model.modules() if isinstance(each, Part))
    rows = slice(8 * rank, 8 * rank + 8)
    nested = split(part, microbatch_size=(3, 8)[rank] if in_own_loop else "auto")
    part.most = (3, 100)[rank]  # only one rank runs short
    result: Any = None
    if in_own_loop:
        for _ in range(3):
            model.zero_grad()
            model(x[rows], targets[rows])["loss"].backward()
    else:
        microbatcher = _microbatcher(model, nested)
        for _ in range(2):
            model.zero_grad()
            result = microbatcher.backward({"x": x[rows], "targets": targets[rows]})
    return {
        "error": furthest(whole_gradients(model), whole_gradients(plain)),
        "sizes": nested.sizes,
        "outer": None if result is None else (result.microbatch_size, result.attempts),
    }


def _microbatcher(model: nn.Module, nested: Any) -> Microbatcher:
    return Microbatcher(
        model,
        forward=_forward,
        microbatch_size="auto",
        loss_average="samples",
        features=[Nested([nested])],
    )


def _forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch["x"], batch["targets"])["loss"]


def cut_a_part_with_shards_inside() -> None:
    model = _wrapped(Model(gives_loss=False), "inside the part")
    split(model.part, microbatch_size=2)
    model(torch.randn(4, 6), torch.randint(5, (4,)))


def shortage_in_backward(how: str) -> dict[str, Any]:
    """One rank runs short where slices are computed again, and cannot cut what drew numbers."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = _wrapped(Model(gives_loss=False, p=0.5), how)
    part: Any = next(each for each in model.modules() if isinstance(each, Part))
    nested = split(part, microbatch_size="auto")
    part.most = (3, 100)[rank]
    microbatcher = _microbatcher(model, nested)
    batch = {"x": torch.randn(8, 6), "targets": torch.randint(5, (8,))}
    result = microbatcher.backward(batch)
    return {
        "outer": result.microbatch_size,
        "attempts": result.attempts,
        "sizes": nested.sizes,
        "gradients": [each.tolist() for each in whole_gradients(model)],
    }


def exact_batchnorm() -> float:
    """How far gradients are from those of whole batches, with slices of other numbers per rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)).double()
    torch.manual_seed(1 + dist.get_rank())
    num_rows = 6 + dist.get_rank()
    batch = torch.randn(num_rows, 6, dtype=torch.double), torch.randint(5, (num_rows,))
    found = []
    for options in ({"batchnorm": "disable"}, {"batchnorm": "exact", "microbatch_size": 2}):
        model = copy.deepcopy(net)
        loss_fn: Any = nn.CrossEntropyLoss()
        Microbatcher(wrapped("ddp", model), loss_fn=loss_fn, **options).backward(batch)
        found.append(whole_gradients(model))
    assert len(found[0]) == 6
    return furthest(*found)


WAYS = ("ddp", "ddp, unused", "ddp, view", "ddp, unused, view", "root", "part of its own")


@pytest.mark.parametrize(
    ("how", "gives_loss", "in_own_loop"),
    mostly_in_sweeps(WAYS, [True, False], [True, False], few=8),
)
def test_gradients_are_exact_where_one_rank_alone_has_smaller_slices(
    world2: World, how: str, gives_loss: bool, in_own_loop: bool
) -> None:
    first, second = world2.run(differences, how, gives_loss, in_own_loop)
    assert max(first["error"], second["error"]) < 1e-6
    assert max(first["sizes"]) <= 3
    assert second["sizes"] == [8]
    if not in_own_loop:
        assert first["outer"] == second["outer"] == (8, 1)


def test_a_part_with_sharded_modules_inside_is_refused_by_name(world2: World) -> None:
    for kind, said in world2.ends(cut_a_part_with_shards_inside):
        assert kind == "UnsplittableModelError"
        assert "apply fully_shard to the part itself" in said


@pytest.mark.parametrize("how", ["ddp", "root", "part of its own"])
def test_all_ranks_repeat_the_same_size_where_one_part_has_a_smaller_one(
    world2: World, how: str
) -> None:
    first, second = world2.run(shortage_in_backward, how)
    assert first["outer"] == second["outer"] == 8
    assert first["attempts"] == second["attempts"]
    assert max(first["sizes"]) <= 3
    assert second["sizes"] == [8]
    assert first["gradients"] == second["gradients"]


def test_batchnorm_has_the_statistics_of_the_batch_of_its_rank(world2: World) -> None:
    assert max(world2.run(exact_batchnorm)) < 1e-12
