"""A transformer in many wrappings: exact, and bit-identical after running out of memory."""

import contextlib
import functools
import itertools
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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from automicro import Observing
from automicro.features import SYNCS
from tests.ranks.faulty_models import Faults
from tests.ranks.steps import Stepper
from tests.ranks.world import World
from tests.ranks.wrapping import furthest, mesh_of, whole_parameters
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

    @property
    def blocks(self) -> list[Any]:
        return list(self.layers)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found


def sharded(model: Transformer, *groups: Any, root: bool = True, **options: Any) -> Any:
    """Shard modules or lists of modules, then the root."""
    for group in (*groups, *[model] * root):
        fully_shard(group, **options)
    return model


def ends(model: Transformer) -> list[nn.Module]:
    return [model.embed, model.norm, model.head]


def all_in_children(model: Transformer, **options: Any) -> Any:
    return sharded(model, *model.layers, *ends(model), **options)


def grouped(model: Transformer) -> Any:
    fully_shard(model.embed)
    sharded(model, *model.layers, root=False)
    fully_shard([model.norm, model.head], reshard_after_forward=False)
    return fully_shard(model)


def nested(model: Transformer) -> Any:
    parts = [[block.attention, block.mlp, block] for block in model.blocks]
    return sharded(model, *itertools.chain(*parts))


def nested_empty(model: Transformer) -> Any:
    """Blocks have no parameters outside of their nested modules either."""
    parts = [[block.attention, block.mlp, block.norm, block] for block in model.blocks]
    return sharded(model, *itertools.chain(*parts), *ends(model))


def every_layer(model: Transformer) -> Any:
    kinds = nn.Linear | nn.Embedding | nn.LayerNorm
    return sharded(model, *[each for each in model.modules() if isinstance(each, kinds)])


def pairs(model: Transformer) -> Any:
    first, second, third = model.layers
    return sharded(model, [model.embed, first], [second, third], [model.norm, model.head])


def tied(model: Transformer) -> Transformer:
    model.head.weight = model.embed.weight
    return model


def recomputing(model: Transformer) -> Any:
    for block in model.blocks:
        block.recomputes = True
    return all_in_children(model)


def recomputing_wrapped(model: Transformer) -> Any:
    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
    return all_in_children(model)


def mostly_frozen(model: Transformer) -> Transformer:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention" in name)
    return model


def prefetching(model: Transformer) -> Any:
    all_in_children(model)
    layers: list[Any] = list(model.layers)
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    layers[2].set_modules_to_backward_prefetch(layers[1::-1])
    return model


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPPINGS: dict[str, Wrap] = {
    "blocks and root": lambda model: sharded(model, *model.layers),
    "only root": sharded,
    "all in children": all_in_children,
    "groups of modules": grouped,
    "no root": lambda model: sharded(model, *model.layers, *ends(model), root=False),
    "some blocks": lambda model: sharded(model, model.layers[1]),
    "nested": nested,
    "nested, no own parameters": nested_empty,
    "every layer": every_layer,
    "pairs": pairs,
    "kept after forward": lambda model: all_in_children(model, reshard_after_forward=False),
    "freed after forward": lambda model: all_in_children(model, reshard_after_forward=True),
    "to one rank": lambda model: all_in_children(
        model, reshard_after_forward=dist.get_world_size()
    ),
    "half precision": lambda model: all_in_children(model, mp_policy=HALF),
    "offloaded": lambda model: all_in_children(
        model, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "tied": lambda model: sharded(tied(model), *model.layers),
    "tied in children": lambda model: sharded(tied(model), *model.layers, ends(model)),
    "recomputing": recomputing,
    "recomputing in wrappers": recomputing_wrapped,
    "mostly frozen": lambda model: all_in_children(mostly_frozen(model)),
    "prefetching": prefetching,
    "ddp": DistributedDataParallel,
    "ddp in small buckets": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.001),
    "ddp with unused parameters": lambda model: DistributedDataParallel(
        model, find_unused_parameters=True
    ),
}
ON_FOUR: dict[str, Wrap] = {
    "replicas": lambda model: all_in_children(model, mesh=mesh_of("hsdp")),
    "to two of four": lambda model: all_in_children(model, reshard_after_forward=2),
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


SGD = functools.partial(torch.optim.SGD, lr=0.1)


def words(step: int, *ranks: int) -> tuple[Tensor, Tensor]:
    """Return a batch with the rows of these ranks, and the next words as targets."""
    found = torch.cat(
        [
            torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in ranks
        ]
    )
    return found, found.roll(1, 1)


def train(
    name: str,
    *,
    fault: tuple[int, int, int] | None = None,
    sizes: Sequence[int] = (),
    sync: str = "each",
) -> tuple[list[Tensor], list[int], bool]:
    """Train three steps; return all parameters, the sizes, and whether the fault occurred."""
    torch.manual_seed(0)
    model = {**WRAPPINGS, **ON_FOUR}[name](Transformer())
    failing = FailingOperation(-1 if fault is None else fault[2])
    stepper = Stepper(
        model,
        Faults(),
        size=4,
        sizes=sizes,
        optimizer=SGD,
        loss_fn=loss_fn,
        sync=sync,
        features=[Observing(failing.observe)],
    )
    for step in range(3):
        fails = fault is not None and fault[:2] == (step, dist.get_rank())
        within = (lambda: failing) if fails else contextlib.nullcontext
        stepper.train(step, words(step, dist.get_rank()), within=within)
    return [*whole_parameters(model).values()], stepper.sizes, failing.has_fired


def compare(name: str, faults: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Compare runs that run out of memory with runs at the same sizes that do not."""
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
    """Return the difference from one unwrapped process with all rows, after three steps."""
    state, _, _ = train(name, sizes=[2, 3, 1], sync=sync)
    torch.manual_seed(0)
    model = Transformer()
    for part, change in (("tied", tied), ("mostly frozen", mostly_frozen)):
        if part in name:
            change(model)
    optimizer = SGD(model.parameters())
    for step in range(3):
        inputs, targets = words(step, *range(dist.get_world_size()))
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
    return furthest(state, [each.detach() for each in model.parameters()])


def compare_in_sequence(names: Sequence[str]) -> list[list[Any]]:
    """Compare several models in one process, each of which runs out of memory once."""
    last = dist.get_world_size() - 1
    return [compare(name, [(1, last, 60)])["differing"] for name in names]


SMOKE = ("all in children", "nested, no own parameters", "pairs", "no root", "tied in children")


def require_equal(world: World, name: str, operations: range) -> int:
    faults = [
        (step, rank, k) for step in (0, 2) for rank in (0, world.size - 1) for k in operations
    ]
    fired = 0
    for at in range(0, len(faults), 4):  # a few per job, to stay within its time limit
        for found in world.run(compare, name, faults[at : at + 4]):
            assert found["differing"] == []
            fired += found["fired"]
    return fired


@pytest.mark.parametrize("name", random.Random(SEED).sample(SMOKE, 3))
def test_wrapped_model_trains_exactly(world2: World, name: str) -> None:
    for sync in SYNCS:
        assert max(world2.run(plain_error, name, sync)) < 1e-6
    assert require_equal(world2, name, range(60, 61)) == 4


def test_models_train_in_sequence(world2: World) -> None:
    names = ["all in children", "ddp", "nested, no own parameters"]
    assert world2.run(compare_in_sequence, names) == [[[]] * 3] * 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", WRAPPINGS)
def test_every_wrapping_trains_exactly(world2: World, name: str) -> None:
    for sync in SYNCS:
        most = 1e-2 if name == "half precision" else 1e-6
        assert max(world2.run(plain_error, name, sync)) < most
    assert require_equal(world2, name, range(0, 300, 60)) > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ON_FOUR)
def test_every_wrapping_on_four_ranks_trains_exactly(world4: World, name: str) -> None:
    for sync in SYNCS:
        assert max(world4.run(plain_error, name, sync)) < 1e-6
    assert require_equal(world4, name, range(0, 300, 120)) > 5
