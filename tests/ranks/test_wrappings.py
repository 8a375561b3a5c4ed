"""However a transformer is wrapped: exact, and bit for bit the same where memory runs out."""

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from automicro import Microbatcher, Observing
from automicro.features import with_features
from automicro.options import SYNCS
from tests.ranks.steps import whole
from tests.ranks.world import World
from tests.sweeps import SEED

pytestmark = pytest.mark.sweep


WORDS, WIDTH = 11, 8
Wrap = Callable[["Transformer"], Any]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, dim=-1)
        mixed: Tensor = self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        return mixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self._run, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


def _blocks(model: Transformer, **options: Any) -> Transformer:
    for layer in model.layers:
        fully_shard(layer, **options)
    return model


def _all_in_children(model: Transformer, **options: Any) -> Any:
    _blocks(model, **options)
    for part in (model.embed, model.norm, model.head):
        fully_shard(part, **options)
    return fully_shard(model, **options)


def _grouped(model: Transformer, **options: Any) -> Any:
    fully_shard(model.embed, **options)
    _blocks(model, **options)
    fully_shard([model.norm, model.head], **{**options, "reshard_after_forward": False})
    return fully_shard(model, **options)


def _without_root(model: Transformer) -> Any:
    _blocks(model)
    for part in (model.embed, model.norm, model.head):
        fully_shard(part)
    return model


def _some_blocks(model: Transformer) -> Any:
    fully_shard(model.layers[1])
    return fully_shard(model)


def _nested(model: Transformer) -> Any:
    for layer in model.layers:
        fully_shard(layer.attention)  # type: ignore[arg-type]
        fully_shard(layer.mlp)  # type: ignore[arg-type]
        fully_shard(layer)
    return fully_shard(model)


def _nested_empty(model: Transformer) -> Any:
    """Blocks, too, have none of their own."""
    for layer in model.layers:
        for part in (layer.attention, layer.mlp, layer.norm):
            fully_shard(part)  # type: ignore[arg-type]
        fully_shard(layer)
    for other in (model.embed, model.norm, model.head):
        fully_shard(other)
    return fully_shard(model)


def _linears(model: Transformer) -> Any:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            fully_shard(module)
    return fully_shard(model)


def _pairs(model: Transformer) -> Any:
    fully_shard([model.embed, model.layers[0]])
    fully_shard([model.layers[1], model.layers[2]])
    fully_shard([model.norm, model.head])
    return fully_shard(model)


def _tied(model: Transformer) -> Any:
    model.head.weight = model.embed.weight
    return fully_shard(_blocks(model))


def _tied_in_children(model: Transformer) -> Any:
    model.head.weight = model.embed.weight
    _blocks(model)
    fully_shard([model.embed, model.norm, model.head])
    return fully_shard(model)


def _recomputing(model: Transformer) -> Any:
    for layer in model.layers:
        layer.recomputes = True  # type: ignore[assignment]
    return _all_in_children(model)


def _recomputing_wrapped(model: Transformer) -> Any:
    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
    return _all_in_children(model)


def _frozen(model: Transformer) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention" in name)
    return _all_in_children(model)


def _replicas(model: Transformer) -> Any:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return _all_in_children(model, mesh=mesh)


def _prefetching(model: Transformer) -> Any:
    _all_in_children(model)
    layers: list[Any] = list(model.layers)
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    layers[2].set_modules_to_backward_prefetch(layers[1::-1])
    return model


WRAPPINGS: dict[str, Wrap] = {
    "blocks and root": lambda model: fully_shard(_blocks(model)),
    "root alone": lambda model: fully_shard(model),
    "all in children": _all_in_children,
    "groups of modules": _grouped,
    "no root": _without_root,
    "some blocks": _some_blocks,
    "nested": _nested,
    "nested, nothing of their own": _nested_empty,
    "every layer": _linears,
    "pairs": _pairs,
    "kept after forward": lambda model: _all_in_children(model, reshard_after_forward=False),
    "freed after forward": lambda model: _all_in_children(model, reshard_after_forward=True),
    "to one rank": lambda model: (
        _all_in_children(model, reshard_after_forward=1)
        if dist.get_world_size() == 1
        else _all_in_children(model, reshard_after_forward=dist.get_world_size())
    ),
    "half precision": lambda model: _all_in_children(
        model,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    "offloaded": lambda model: _all_in_children(
        model, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "tied": _tied,
    "tied in children": _tied_in_children,
    "recomputing": _recomputing,
    "recomputing in wrappers": _recomputing_wrapped,
    "mostly frozen": _frozen,
    "prefetching": _prefetching,
    "ddp": DistributedDataParallel,
    "ddp in small buckets": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.001),
    "ddp looking for unused": lambda model: DistributedDataParallel(
        model, find_unused_parameters=True
    ),
}
ON_FOUR: dict[str, Wrap] = {
    "replicas": _replicas,
    "to two of four": lambda model: _all_in_children(model, reshard_after_forward=2),
}


class FailingOperation(TorchDispatchMode):
    """Runs out of memory at one operation of an attempt, counted from 0."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left, self.has_fired, self.is_armed = number, False, False

    def observe(self, event: str, subject: object) -> None:
        self.is_armed = self.is_armed or event == "attempt_start"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.is_armed:
            return func(*args, **(kwargs or {}))
        if self.left == 0:
            self.left, self.has_fired = -1, True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.left -= 1
        return func(*args, **(kwargs or {}))


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())


def train(
    name: str,
    *,
    fault: tuple[int, int, int] | None = None,
    sizes: Sequence[int] = (),
    rows: int = 4,
    sync: str = "each",
) -> tuple[list[Tensor], list[int], bool]:
    """Three steps; all parameters, the size of each step, and whether the fault came.

    Args:
        name: of a wrapping.
        fault: the step, the rank and the operation that fails.
        sizes: to use, else they are found.
        rows: of a batch.
        sync: with which microbatch sharded gradients are reduced.
    """
    torch.manual_seed(0)
    model = {**WRAPPINGS, **ON_FOUR}[name](Transformer())
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    failing = FailingOperation(-1 if fault is None else fault[2])

    def microbatcher(**options: Any) -> Microbatcher:
        return Microbatcher(
            model,
            loss_fn=loss_fn,
            loss_average="samples",
            **with_features({**options, "sync": sync}),
        )

    found = microbatcher(optimizer=optimizer, features=[Observing(failing.observe)])
    used = []
    for step in range(3):
        if sizes:
            found = microbatcher(microbatch_size=sizes[step])
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        words = torch.randint(WORDS, (rows, 5), generator=generator)
        batch = words, words.roll(1, 1)
        fails = fault is not None and fault[:2] == (step, dist.get_rank())
        with failing if fails else contextlib.nullcontext():
            used.append(found.backward(batch).microbatch_size)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(each).clone() for each in model.parameters()], used, failing.has_fired


def compare(name: str, faults: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Whether runs that run out of memory end as those at the same sizes that do not."""
    clean: dict[tuple[int, ...], list[Tensor]] = {}
    differing, fired = [], 0
    for fault in [None, *faults]:
        state, sizes, has_fired = train(name, fault=fault)
        fired += has_fired
        key = tuple(sizes)
        if key not in clean:
            clean[key] = train(name, sizes=sizes)[0]
        if not all(torch.equal(one, other) for one, other in zip(state, clean[key], strict=True)):
            differing.append((fault, sizes))
    return {"differing": differing, "fired": fired}


def plain_error(name: str, sync: str = "each") -> float:
    """How far three steps are from those of one process with all rows, without a wrapper."""
    state, _, _ = train(name, sizes=[2, 3, 1], sync=sync)
    torch.manual_seed(0)
    model = Transformer()
    if "tied" in name:
        model.head.weight = model.embed.weight
    if name == "mostly frozen":
        for each, parameter in model.named_parameters():
            parameter.requires_grad_("attention" in each)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        words = torch.cat(
            [
                torch.randint(
                    WORDS, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank)
                )
                for rank in range(dist.get_world_size())
            ]
        )
        optimizer.zero_grad()
        loss_fn(model(words), words.roll(1, 1)).backward()
        optimizer.step()
    pairs = zip(state, model.parameters(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def one_after_the_other(names: Sequence[str]) -> list[list[Any]]:
    """Several models in one process, each of which runs out of memory once."""
    last = dist.get_world_size() - 1
    return [compare(name, [(1, last, 60)])["differing"] for name in names]


SMOKE = ("all in children", "nested, nothing of their own", "pairs", "no root", "tied in children")


def require_equal(world: World, name: str, operations: range) -> int:
    faults = [
        (step, rank, k) for step in (0, 2) for rank in (0, world.size - 1) for k in operations
    ]
    fired = 0
    for at in range(0, len(faults), 4):  # a few at a time, so that each makes progress
        for found in world.run(compare, name, faults[at : at + 4]):
            assert found["differing"] == []
            fired += found["fired"]
    return fired


@pytest.mark.parametrize("name", random.Random(SEED).sample(SMOKE, 3))
def test_a_wrapped_model_is_exact(world2: World, name: str) -> None:
    for sync in SYNCS:
        assert max(world2.run(plain_error, name, sync)) < 1e-6
    assert require_equal(world2, name, range(60, 61)) == 4


def test_models_train_one_after_the_other(world2: World) -> None:
    names = ["all in children", "ddp", "nested, nothing of their own"]
    assert world2.run(one_after_the_other, names) == [[[]] * 3] * 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", WRAPPINGS)
def test_every_way_to_wrap_a_model_is_exact(world2: World, name: str) -> None:
    for sync in SYNCS:
        most = 1e-2 if name == "half precision" else 1e-6
        assert max(world2.run(plain_error, name, sync)) < most
    assert require_equal(world2, name, range(0, 300, 60)) > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ON_FOUR)
def test_every_way_to_wrap_a_model_on_four_ranks_is_exact(world4: World, name: str) -> None:
    for sync in SYNCS:
        assert max(world4.run(plain_error, name, sync)) < 1e-6
    assert require_equal(world4, name, range(0, 300, 120)) > 5
