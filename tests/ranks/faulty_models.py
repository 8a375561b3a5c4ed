"""Small models in every wrapper that run out of memory according to a plan, and such plans."""

import dataclasses
import os
import random
import signal
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from automicro.ranks.guards.ddp import VotingHook
from automicro.torch_private_distributed import collectives_of
from tests.outside import Unreached
from tests.ranks.wrapping import mesh_of

WIDTH = 8
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RARE = 1.0  # rows that begin with a larger number: one in six


@dataclasses.dataclass(frozen=True)
class Fault:
    """A point at which one rank fails once."""

    rank: int
    where: str  # before, forward, again, backward, between, end, gather, scatter
    step: int = 1
    microbatch: int = 0
    layer: int = 0
    error: type[BaseException] = torch.OutOfMemoryError  # SystemExit kills the process


class Faults:
    waiting, fired = Unreached(), Unreached()

    def __init__(self, plan: Sequence[Fault] = ()) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.waiting = [fault for fault in plan if fault.rank == rank]
        self.fired = 0
        self.step = self.microbatch = -1
        self.depth = 3

    def reach(self, where: str, layer: int = 0) -> None:
        for fault in self.waiting:
            if (where, self.step, self.microbatch) == (fault.where, fault.step, fault.microbatch):
                if where not in ("before", "between", "end") and layer != fault.layer:
                    continue
                self.waiting.remove(fault)
                self.fired += 1
                if fault.error is SystemExit:
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault.error is torch.OutOfMemoryError:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
                raise fault.error("a mistake of the user's")


class Faulty(nn.Module):
    """A layer whose forward, recomputed forward or backward fails according to the plan."""

    def __init__(self, layer: int, faults: list[Faults]) -> None:
        super().__init__()
        self.layer, self.faults = layer, faults

    def reach_forward(self) -> None:
        is_first = torch._C._current_graph_task_id() == -1
        self.faults[0].reach("forward" if is_first else "again", self.layer)

    def with_backward(self, outputs: Tensor) -> Tensor:
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.faults[0].reach("backward", self.layer))
        return outputs


class Block(Faulty):
    def __init__(self, layer: int, faults: list[Faults], recompute: bool = False) -> None:
        super().__init__(layer, faults)
        self.recompute = recompute
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.reach_forward()
        if self.recompute:
            inner: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        else:
            inner = self.inner(x)
        return x + self.with_backward(inner)


class Tail(Faulty):
    """A head with its loss; the layer after all blocks."""

    def __init__(self, faults: list[Faults]) -> None:
        super().__init__(3, faults)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, 2))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        self.reach_forward()
        return self.with_backward((self.head(hidden) - targets).square().sum(1).mean())


class Net(nn.Module):
    """A model made of blocks, with a tail that computes the loss if it gets targets."""

    def __init__(
        self,
        faults: list[Faults],
        *,
        norm: bool = True,
        recompute: bool = False,
        rare: bool = False,
        tail: bool = False,
    ) -> None:
        super().__init__()
        self.faults = faults
        self.first = nn.Linear(4, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.blocks = nn.ModuleList([Block(index, faults, recompute) for index in range(3)])
        self.last = Tail(faults) if tail else nn.Linear(WIDTH, 2)
        self.rare = nn.Linear(WIDTH, WIDTH) if rare else None
        self.never = nn.Linear(WIDTH, WIDTH) if rare else None

    def forward(self, x: Tensor, *targets: Tensor) -> Tensor:
        is_rare = x[:, :1] > RARE
        x = self.norm(self.first(x))
        if self.rare is not None and is_rare.any():
            x = x + is_rare * self.rare(x)
        for block in self.blocks[: self.faults[0].depth]:
            x = block(x)
        output: Tensor = self.last(x, *targets)
        return output


class FaultyCollective:
    """A custom collective whose allocation fails according to the plan."""

    def __init__(self, kind: str, layer: int, faults: list[Faults], inner: Any) -> None:
        self.kind, self.layer, self.faults, self.inner = kind, layer, faults, inner
        self.calls = 0

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        self.faults[0].reach(self.kind, self.layer)
        allocated: Tensor = self.inner.allocate(*args, **kwargs)
        return allocated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


def shard(net: Net, *groups: Any, root: bool = True, **options: Any) -> Any:
    """Shard modules or lists of modules, then the root."""
    for group in (*groups, *[net] * root):
        fully_shard(group, **options)
    return net


def shard_all(net: Net, **options: Any) -> Any:
    """Shard all modules, so that the root has no parameters of its own."""
    return shard(net, net.first, *net.blocks, net.last, **options)


def shard_nested(net: Net, *, part: str) -> Any:
    """Shard a part of each block, then the block."""
    parts = [block.get_submodule(part) for block in net.blocks]
    return shard(net, *parts, *net.blocks)


def tied(net: Net) -> Net:
    one, other = (net.get_submodule(f"blocks.{index}.inner.0") for index in (0, 2))
    other.weight = one.weight
    return net


def mostly_frozen(net: Net) -> Net:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("inner" in name)
    return net


def checkpointed(net: Net) -> Any:
    apply_activation_checkpointing(net, check_fn=lambda part: isinstance(part, Block))
    return shard_all(net)


WRAPPINGS: dict[str, Callable[[Net], Any]] = {
    "only root": shard,
    "all in children": shard_all,
    "no root": lambda net: shard_all(net, root=False),
    "some blocks": lambda net: shard(net, net.blocks[1]),
    "nested": lambda net: shard_nested(net, part="inner.0"),
    "nested, no own parameters": lambda net: shard_nested(net, part="inner"),
    "pairs": lambda net: shard(net, [net.first, net.blocks[0]], [*net.blocks[1:]]),
    "to one rank": lambda net: shard_all(net, reshard_after_forward=dist.get_world_size()),
    "half precision": lambda net: shard_all(net, mp_policy=HALF),
    "offloaded": lambda net: shard_all(net, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "tied": lambda net: shard(tied(net), net.blocks[1]),
    "tied in children": lambda net: shard(tied(net), [net.blocks[0], net.blocks[2]], net.blocks[1]),
    "checkpointed": checkpointed,
    "mostly frozen": lambda net: shard_all(mostly_frozen(net)),
    "ddp, large buckets": DistributedDataParallel,
}


def build(kind: str, faults: list[Faults], options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    names = ("norm", "recompute", "rare", "tail")
    net = Net(faults, **{name: options[name] for name in names if name in options})
    net = net.to(options.get("dtype", torch.float32))
    if kind in WRAPPINGS:
        return WRAPPINGS[kind](net)  # type: ignore[no-any-return]
    if kind == "ddp":
        keywords = {"bucket_cap_mb": 0.001, **options.get("ddp", {})}
        model = DistributedDataParallel(net, **keywords)
        model.broadcast_buffers = options.get("sends_buffers", True)
        if "hook" in options:
            hook = allreduce_hook if options["hook"] == "bare" else VotingHook(allreduce_hook)
            model.register_comm_hook(None, hook)
        return model
    mesh = mesh_of(kind)
    if kind == "tensor":
        for block in net.blocks:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(cast(Block, block).inner, mesh, plan)
        return net
    keywords = {"mesh": mesh} | ({"mp_policy": HALF} if options.get("bf16") else {})
    for layer, block in enumerate(net.blocks):
        sharded: Any = fully_shard(block, **keywords, **options.get("fsdp", {}))
        inner = collectives_of(sharded)
        assert inner is not None
        sharded.set_custom_all_gather(FaultyCollective("gather", layer, faults, inner[0]))
        sharded.set_custom_reduce_scatter(FaultyCollective("scatter", layer, faults, inner[1]))
    if options.get("tail"):
        fully_shard(net.last, **keywords)
    root: Any = fully_shard(net, **keywords)
    if options.get("symmetric"):  # without its setup, which needs NCCL
        symmetric = _fsdp_collectives.SymmMemReduceScatter
        root.set_custom_reduce_scatter(symmetric.__new__(symmetric))
    if options.get("rare"):
        root.set_reduce_scatter_unused_params(True)
    if options.get("prefetch"):
        blocks: list[Any] = list(net.blocks)
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    return net


def points(world_size: int) -> dict[str, list[Fault]]:
    """Return plans for every kind of point, on the last rank or on two ranks."""
    last = world_size - 1
    return {
        "before the first microbatch": [Fault(last, "before")],
        "forward": [Fault(last, "forward", layer=1)],
        "backward": [Fault(last, "backward", layer=1)],
        "last backward": [Fault(last, "backward", microbatch=1, layer=1)],
        "end of the last backward": [Fault(last, "backward", microbatch=1, layer=0, step=2)],
        "first batch": [Fault(last, "backward", step=0, microbatch=1, layer=1)],
        "before the first forward": [Fault(last, "before", step=0)],
        "first forward": [Fault(0, "forward", step=0, layer=2)],
        "between microbatches": [Fault(last, "between", microbatch=1)],
        "after the last microbatch": [Fault(last, "end", microbatch=1, step=2)],
        "two ranks": [
            Fault(0, "forward", microbatch=1, layer=2),
            Fault(last, "backward", microbatch=1, layer=0),
        ],
        "two ranks at one point": [
            Fault(rank, "backward", microbatch=1, layer=1) for rank in (0, last)
        ],
        "successive batches": [
            Fault(last, "backward", step=1, microbatch=1, layer=1),
            Fault(0, "forward", step=2, microbatch=2, layer=1),
        ],
        "evaluation": [Fault(last, "forward", step=3, microbatch=1, layer=1)],
    }


def allocations(world_size: int) -> dict[str, list[Fault]]:
    """Return faults in the allocation of a collective, before and after collectives are known."""
    last = world_size - 1
    return {
        "gather": [Fault(last, "gather", step=2, microbatch=1, layer=1)],
        "scatter": [Fault(last, "scatter", step=2, microbatch=1, layer=1)],
        "first gather": [Fault(0, "gather", step=0, layer=1)],
        "first scatter": [Fault(0, "scatter", step=0, layer=1)],
    }


def random_plan(draw: random.Random, ranks: Sequence[int], **places: Sequence[Any]) -> list[Fault]:
    """Draw one to three faults at any points of three steps."""
    places = {"step": range(3), "microbatch": (0, 0, 1, 1, 2), "layer": range(3), **places}
    return [
        Fault(draw.choice(ranks), **{name: draw.choice(each) for name, each in places.items()})
        for _ in range(draw.randint(1, 3))
    ]
