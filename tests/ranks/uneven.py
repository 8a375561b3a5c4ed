"""Jobs on uneven batches: gradients, losses and metrics of all rows, whoever has them."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher
from automicro.errors import BufferWarning
from automicro.features import RankReduction
from tests.ranks.steps import whole

WORDS, LENGTH = 7, 5


class Tagger(nn.Module):
    """Predicts a word at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.inner(self.embedding(words)))
        return scores.transpose(1, 2)


def tagger(kind: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = Tagger().double()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind is not None:
        world = dist.get_world_size()
        shape = (2, world // 2) if kind == "hsdp" else (world,)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def words(num_rows: int) -> tuple[Tensor, Tensor]:
    """Sequences whose targets are ignored more and more: those of the last two rows all."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(WORDS, (num_rows, LENGTH), generator=generator)
    targets = torch.randint(WORDS, (num_rows, LENGTH), generator=generator)
    for row in range(num_rows):
        targets[row, LENGTH - row % LENGTH :] = -100
    targets[-2:] = -100
    return inputs, targets


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def two_losses(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
    outputs = model(batch[0])
    return {"words": F.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


LOSSES: dict[str, dict[str, Any]] = {
    "tokens": {"loss_fn": cross_entropy, "loss_average": "tokens"},
    "samples": {
        "forward": lambda model, batch: model(batch[0]).square().mean(),
        "loss_average": "samples",
    },
    "two": {"forward": two_losses, "loss_average": {"words": "tokens", "size": "samples"}},
    "sum": {"forward": summed, "loss_average": "none"},
    "counted": {
        "forward": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "loss_average": lambda batch: int((batch[1] != -100).sum()),
    },
}


def train_on_words(
    kind: str | None,
    loss: str,
    rows: Sequence[int],
    parts: int,
    earlier: bool = False,
    sync: str = "each",
) -> list[Tensor]:
    """Loss and whole gradient of a step, of batches of so many rows, each given in parts."""
    model = tagger(kind)
    microbatcher = Microbatcher(
        model, microbatch_size=3, probe=False, features=[RankReduction(sync)], **LOSSES[loss]
    )
    inputs, targets = words(sum(rows))
    rank = dist.get_rank() if kind else 0
    if 0 in rows:
        microbatcher.accumulate([(inputs[:4], targets[:4])])
        model.zero_grad()
    start, end = sum(rows[:rank]), sum(rows[: rank + 1])
    mine = (inputs[start:end], targets[start:end])
    batches = list(zip(*(each.tensor_split(parts) for each in mine), strict=True))
    batches = [batch for batch in batches if len(batch[0])]
    if earlier:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    result = microbatcher.accumulate(batches)
    assert result.num_samples == rows[rank]
    assert result.num_global_samples == sum(rows)
    gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return [result.loss, *result.losses.values(), *gradients]


class Sum:
    """A metric of one's own."""

    def __init__(self) -> None:
        self.rows = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.rows += len(targets)


class Noisy(nn.Module):
    """Draws numbers and counts its forwards, also of fillers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        output: Tensor = F.dropout(self.norm(self.linear(x)), 0.3, self.training)
        return output


def count_through_fillers(rows: Sequence[int]) -> dict[str, Any]:
    """What fillers leave behind: nothing."""
    torch.manual_seed(0)
    inner = Noisy()
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    rank, metric = dist.get_rank(), Sum()
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), microbatch_size=4, batchnorm="ignore", probe=False
    )
    x, y = torch.randn(rows[rank], 4), torch.randn(rows[rank], 2)
    microbatcher.backward((x, y), metric)
    before = torch.get_rng_state()
    microbatcher.evaluate((x, y), metric)
    ended = microbatcher.backward(None if rank else (x, y), metric)
    return {
        "seen": inner.seen.item(),
        "counted": metric.rows,
        "drew": not torch.equal(before, torch.get_rng_state()),
        "samples": (ended.num_samples, ended.num_global_samples),
        "gradient": [p.grad.sum().item() for p in model.parameters() if p.grad is not None],
    }


class Scaled(nn.Linear):
    """Has a buffer that is read, and is written to from the second batch on if told so."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__(4, 2)
        self.register_buffer("scale", torch.ones(()))
        self.changes, self.calls = changes, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.changes and self.calls > 3:
            self.get_buffer("scale").mul_(0.9)
        outputs: Tensor = super().forward(x) * self.get_buffer("scale")
        return outputs


def warnings_of_buffers(changes: bool) -> list[str]:
    """What is said in three batches, in the later of which the first rank runs fillers."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Scaled(changes=changes))
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=4, probe=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in ([12, 12], [2, 12], [2, 12]):
            own = rows[dist.get_rank()]
            microbatcher.backward((torch.randn(own, 4), torch.randn(own, 2)))
    return [str(each.message) for each in caught if issubclass(each.category, BufferWarning)]


def run_until_all_have_ended(rows: int) -> list[tuple[int, int, bool]]:
    """Ranks whose data run out at different times; who asks for the end is heard by all."""
    model = tagger("fsdp")
    microbatcher = Microbatcher(model, probe=False, **LOSSES["tokens"])
    told = []
    batches = 3 if dist.get_rank() == 0 else 1
    for index in range(9):
        microbatcher.wants_to_stop = dist.get_rank() == 1 and index == 1
        result = microbatcher.accumulate([words(rows)] if index < batches else [])
        told.append((result.num_samples, result.num_global_samples, result.stops))
        model.zero_grad()
        if not result.num_global_samples:
            break
    evaluated = microbatcher.evaluate(words(4) if dist.get_rank() == 0 else None)
    told.append((evaluated.num_samples, evaluated.num_global_samples, evaluated.loss is None))
    return told
