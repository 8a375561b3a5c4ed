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
from tests.ranks.wrapping import furthest, gap, whole_gradients, wrapped
from tests.sweeps import mostly_in_sweeps

pytestmark = pytest.mark.sweep


class Part(nn.Module):
    """Runs out of memory above a number of rows, if a graph is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.most = 1000

    def forward(self, hidden: Tensor, targets: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and len(hidden) > self.most:
            raise torch.OutOfMemoryError("too many rows")
        logits: Tensor = self.layers(hidden)
        return logits if targets is None else F.cross_entropy(logits, targets)


class Model(nn.Module):
    """An encoder followed by a part, which may compute the loss."""

    def __init__(self, *, gives_loss: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.part, self.gives_loss = Part(), gives_loss

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self.part(self.encoder(x), targets if self.gives_loss else None)
        return found if self.gives_loss else F.cross_entropy(found, targets)


def _wrapped(model: Any, how: str) -> Any:
    if how.startswith("ddp"):
        options = {"find_unused_parameters": "unused" in how}
        return wrapped("ddp", model, gradient_as_bucket_view="view" in how, **options)
    parts = {"sharded part": [model.part], "inside the part": [model.part.layers[0]]}
    return wrapped("fsdp", model, *parts.get(how, []))


WAYS = ("ddp", "ddp, unused", "ddp, view", "root", "sharded part")


@pytest.mark.parametrize(
    ("how", "gives_loss", "in_own_loop"),
    mostly_in_sweeps(WAYS, [True, False], [True, False], few=6),
)
@on_ranks()
def test_gradients_are_exact_with_smaller_slices_on_one_rank(
    how: str, gives_loss: bool, in_own_loop: bool
) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Model(gives_loss=gives_loss)
    model = _wrapped(copy.deepcopy(plain), how)
    x, targets = torch.randn(16, 6), torch.randint(5, (16,))
    plain(x, targets).backward()
    mine = x[8 * rank :][:8], targets[8 * rank :][:8]
    part: Any = next(each for each in model.modules() if isinstance(each, Part))
    part.most = (3, 100)[rank]
    nested = split(part, microbatch_size=(3, 8)[rank] if in_own_loop else "auto")
    options: Any = {"microbatch_size": "auto", "features": [Nested([nested])]}
    options |= {"forward": lambda model, batch: model(*batch), "loss_average": "samples"}
    step = None if in_own_loop else Microbatcher(model, **options)
    for _ in range(3):
        model.zero_grad()
        if step is None:
            model(*mine).backward()
        else:
            result = step.backward(mine)
    assert gap(model, plain) < 1e-6
    assert max(nested.sizes) <= 3 if rank == 0 else nested.sizes == [8]
    assert step is None or (result.microbatch_size, result.attempts) == (8, 1)


@on_ranks()
def test_part_with_sharded_modules_inside_is_refused() -> None:
    model = _wrapped(Model(gives_loss=False), "inside the part")
    split(model.part, microbatch_size=2)
    with pytest.raises(UnsplittableModelError, match="Apply fully_shard to the part itself"):
        model(torch.randn(4, 6), torch.randint(5, (4,)))


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
