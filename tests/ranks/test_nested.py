"""Nested parts on several ranks: each rank has its own slices of a part."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher, split
from automicro.errors import UnsplittableModelError
from automicro.features import Nested
from tests.ranks.world import on_ranks
from tests.ranks.wrapping import furthest, gap, require_alike, whole_gradients, wrapped
from tests.sweeps import mostly_in_sweeps

pytestmark = pytest.mark.sweep


class Part(nn.Module):
    """Runs out of memory above a number of rows, if a graph is kept."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 5))
        self.most = 1000

    def forward(self, hidden: Tensor, targets: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and len(hidden) > self.most:
            raise torch.OutOfMemoryError("too many rows")
        logits: Tensor = self.layers(hidden)
        return logits if targets is None else F.cross_entropy(logits, targets)


class Model(nn.Module):
    """An encoder followed by a part, which may compute the loss."""

    def __init__(self, *, gives_loss: bool, p: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.part, self.gives_loss = Part(p), gives_loss

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self.part(self.encoder(x), targets if self.gives_loss else None)
        return found if self.gives_loss else F.cross_entropy(found, targets)


def _wrapped(model: Any, how: str) -> Any:
    if how.startswith("ddp"):
        options = {"find_unused_parameters": "unused" in how}
        return wrapped("ddp", model, gradient_as_bucket_view="view" in how, **options)
    parts = {"sharded part": [model.part], "inside the part": [model.part.layers[0]]}
    return wrapped("fsdp", model, *parts.get(how, []))


def _microbatcher(model: nn.Module, nested: Any) -> Microbatcher:
    return Microbatcher(
        model,
        forward=lambda model, batch: model(*batch),
        microbatch_size="auto",
        loss_average="samples",
        features=[Nested([nested])],
    )


WAYS = ("ddp", "ddp, unused", "ddp, view", "ddp, unused, view", "root", "sharded part")


def part_of(model: nn.Module) -> Any:
    """Return the part, which runs out of memory on rank 0 only."""
    part: Any = next(each for each in model.modules() if isinstance(each, Part))
    part.most = (3, 100)[dist.get_rank()]
    return part


def require_smaller_on_rank_0(sizes: list[int]) -> None:
    assert max(sizes) <= 3 if dist.get_rank() == 0 else sizes == [8]


@pytest.mark.parametrize(
    ("how", "gives_loss", "in_own_loop"),
    mostly_in_sweeps(WAYS, [True, False], [True, False], few=6),
)
@on_ranks()
def test_gradients_are_exact_with_smaller_slices_on_one_rank(
    how: str, gives_loss: bool, in_own_loop: bool
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Model(gives_loss=gives_loss)
    model = _wrapped(copy.deepcopy(plain), how)
    x, targets = torch.randn(8 * size, 6), torch.randint(5, (8 * size,))
    plain(x, targets).backward()
    rows = slice(8 * rank, 8 * rank + 8)
    nested = split(part_of(model), microbatch_size=(3, 8)[rank] if in_own_loop else "auto")
    microbatcher = None if in_own_loop else _microbatcher(model, nested)
    for _ in range(3 if in_own_loop else 2):
        model.zero_grad()
        if microbatcher is None:
            model(x[rows], targets[rows]).backward()
        else:
            result = microbatcher.backward((x[rows], targets[rows]))
            last = result.microbatch_size, result.attempts
    assert gap(model, plain) < 1e-6
    require_smaller_on_rank_0(nested.sizes)
    assert in_own_loop or last == (8, 1)


@on_ranks()
def test_part_with_sharded_modules_inside_is_refused() -> None:
    model = _wrapped(Model(gives_loss=False), "inside the part")
    split(model.part, microbatch_size=2)
    with pytest.raises(UnsplittableModelError, match="Apply fully_shard to the part itself"):
        model(torch.randn(4, 6), torch.randint(5, (4,)))


@pytest.mark.parametrize("how", ["ddp", "sharded part"])
@on_ranks()
def test_all_ranks_repeat_same_size_after_one_part_shrinks(how: str) -> None:
    """One rank fails while it recomputes slices, and cannot cut slices that drew random numbers."""
    torch.manual_seed(0)
    model = _wrapped(Model(gives_loss=False, p=0.5), how)
    nested = split(part_of(model), microbatch_size="auto")
    microbatcher = _microbatcher(model, nested)
    result = microbatcher.backward((torch.randn(8, 6), torch.randint(5, (8,))))
    assert result.microbatch_size == 8
    require_smaller_on_rank_0(nested.sizes)
    require_alike((result.attempts, whole_gradients(model)))


@on_ranks()
def test_batchnorm_uses_statistics_of_batch_on_its_rank() -> None:
    """Each rank has a different number of slices."""
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
    assert furthest(*found) < 1e-12
