"""What the processes of a world run whose models do not use every layer in every microbatch."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from automicro import Microbatcher
from automicro.trainer.parallel import find_blocks
from tests.ranks.steps import squared_error

ROWS = 12


class Choosing(nn.Module):
    """Has a layer for the rows that begin with a positive number, and one that nothing uses."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rare, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.reentrant = reentrant
        self.most_rows = 10**9
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x).tanh()
        is_rare = x[:, :1] > 0
        if is_rare.any():
            if self.reentrant:
                hidden = hidden + is_rare * checkpoint(self.rare, hidden, use_reentrant=True)
            else:
                hidden = hidden + is_rare * self.rare(hidden)
        if self.training and len(x) > self.most_rows:
            hidden.register_hook(run_out_of_memory)
        output: Tensor = self.last(hidden)
        return output


def run_out_of_memory(_: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def rows_of(rank: int, order: str) -> tuple[Tensor, Tensor]:
    """A batch of a rank, where the layer is for every third row: sorted, or all, or none."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() + 0.1
    if order == "last":
        x[: ROWS * 2 // 3, 0] *= -1
    elif order == "first":
        x[ROWS // 3 :, 0] *= -1
    elif order == "none":
        x[:, 0] *= -1
    return x, y


def options_for(kind: str) -> dict[str, Any]:
    return {
        "find unused": {"find_unused_parameters": True},
        "bucket views": {"gradient_as_bucket_view": True},
    }.get(kind, {})


def expected(orders: Sequence[str]) -> dict[str, Tensor | None]:
    """The gradients of one process that has the rows of all."""
    model = Choosing()
    parts = [rows_of(rank, order) for rank, order in enumerate(orders)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    squared_error(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def train_where_a_layer_is_left_out(
    kind: str,
    orders: Sequence[str],
    *,
    halves: bool = False,
    fails_in: Sequence[int] = (),
    steps: int = 3,
) -> dict[str, Any]:
    """How far gradients are from those of one process, of steps where rank 0 may fail."""
    net = Choosing(reentrant=kind == "reentrant")
    if kind == "hooked":
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient * 1)
    model: Any
    if kind == "sharded":
        fully_shard(net.first)
        model = fully_shard(net)
        model.set_reduce_scatter_unused_params(True)
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.0001, **options_for(kind))
    microbatcher = choosing_microbatcher(model, size="auto" if halves else 4)
    if kind == "frozen later":
        net.never.requires_grad_(False)
    rank, wanted = dist.get_rank(), expected(orders)
    worst, nones, votes, attempts = 0.0, set(), [], []
    for step in range(steps):
        net.most_rows = 4 if step in fails_in and rank == 0 else 10**9
        before = microbatcher.ranks.num_votes  # type: ignore[attr-defined]
        attempts.append(microbatcher.backward(rows_of(rank, orders[rank])).attempts)
        votes.append(microbatcher.ranks.num_votes - before)  # type: ignore[attr-defined]
        for name, parameter in net.named_parameters():
            if parameter.grad is None:
                nones.add(name)
                continue
            want = wanted[name]
            found = whole(parameter.grad)
            worst = max(worst, float((found - (0 if want is None else want)).abs().max()))
        model.zero_grad()
    return {"worst": worst, "nones": sorted(nones), "votes": votes, "attempts": attempts}


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert isinstance(found, Tensor)
    return found


def choosing_microbatcher(
    model: nn.Module, *, size: int | str | None = 4, **options: Any
) -> Microbatcher:
    defaults: dict[str, Any] = {"probe": False, "loss_average": "samples"}
    if "forward" not in options:
        defaults["loss_fn"] = squared_error
    policy: Any = size
    return Microbatcher(model, microbatch_size=policy, **defaults, **options)


def keep_an_earlier_gradient() -> list[bool]:
    """Whether a gradient from before outlives steps that do not use its parameter."""
    net = Choosing()
    model = DistributedDataParallel(net)
    microbatcher = choosing_microbatcher(model)
    earlier = net.never.weight.grad = torch.ones(4, 4, dtype=torch.float64)
    for _ in range(2):
        microbatcher.backward(rows_of(dist.get_rank(), "last"))
    return [
        net.never.weight.grad is earlier,
        bool((earlier == 1).all()),
        net.never.bias.grad is None,
    ]


def said(work: Callable[[], Any]) -> str:
    """What an error of the work says."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def go_past_the_wrapper() -> list[str]:
    def forward(model: Any, microbatch: Any) -> Tensor:
        return squared_error(model.module(microbatch[0]), microbatch[1])

    model = DistributedDataParallel(Choosing())
    microbatcher = choosing_microbatcher(model, forward=forward)
    text = said(lambda: microbatcher.backward(rows_of(dist.get_rank(), "first")))
    return [text, *(name for name, p in model.named_parameters() if p.grad is not None)]


def use_a_second_model(kind: str, *, known: bool, frozen: bool, fails: bool = False) -> str:
    """Train a model through a second one, which also has its own wrapper."""
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    models: list[Any] = []
    for each in (first, second):
        wrapped: Any = DistributedDataParallel(each) if kind == "ddp" else fully_shard(each)
        models.append(wrapped)

    def forward(model: Any, microbatch: Any) -> Tensor:
        x, y = microbatch
        hidden = model(x)
        if fails and dist.get_rank() == 1 and len(x) > 2:
            hidden.register_hook(run_out_of_memory)
        with torch.no_grad() if frozen else contextlib.nullcontext():
            output = models[1](hidden)
        return squared_error(output + hidden[:, :2], y)

    modules = [models[1]] if known else []
    microbatcher = choosing_microbatcher(models[0], size="auto", forward=forward, modules=modules)

    def work() -> None:
        for _ in range(2):
            microbatcher.backward(rows_of(dist.get_rank(), "first"))

    return said(work)


def leave_a_shard_out(ranks: Sequence[int]) -> dict[str, Any]:
    """Three steps with a sharded layer; in the last some ranks' second microbatch lacks it."""
    net = Choosing()
    fully_shard(net.rare)
    fully_shard(net)
    microbatcher = choosing_microbatcher(net, size=ROWS // 2)
    rank = dist.get_rank()
    results = []

    def work() -> None:
        for step in range(4):
            leaves_out = step >= 2 and rank in ranks
            x, y = rows_of(rank, "first" if leaves_out else "all")
            results.append(microbatcher.backward((x, y)))
            net.zero_grad()

    text = said(work)
    return {
        "text": text,
        "attempts": [each.attempts for each in results],
        "failed_sizes": [each.failed_sizes for each in results],
        "sizes": [each.microbatch_size for each in results],
    }


def shard_tied_blocks() -> list[float]:
    """Differences from the gradients of one process, of a model two blocks of which share one."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
        layers[2][0].weight = layers[0][0].weight
        return nn.Sequential(nn.ModuleList(layers), nn.Linear(4, 2)).double()

    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = build()

        def forward(self, x: Tensor) -> Tensor:
            layers: Any = self.parts[0]
            for layer in layers:
                x = layer(x)
            output: Tensor = self.parts[1](x)
            return output

    plain, model = Run(), Run()
    blocks = find_blocks(model)
    layers: Any = model.parts[0]
    assert blocks == [layers[1], layers[3]]
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    choosing_microbatcher(model).backward(rows_of(dist.get_rank(), "all"))
    parts = [rows_of(rank, "all") for rank in range(dist.get_world_size())]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    squared_error(plain(x), y).backward()
    return [
        float((whole(one.grad) - other.grad).abs().max())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True)
        if one.grad is not None and other.grad is not None
    ]
