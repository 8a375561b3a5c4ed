"""Which collectives a step runs, and that gradients are the same however late they are reduced."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import automicro.ranks.guards.fsdp
from automicro import Microbatcher
from tests.ranks.faulty_models import Faults, build
from tests.ranks.jobs import compare, expected_gradients, gradients
from tests.ranks.plans import points
from tests.ranks.steps import Stepper
from tests.ranks.world import World

pytestmark = pytest.mark.sweep

MICROBATCHES = 4
MODULES = 4  # three blocks and the root

_KINDS = {
    "all_gather_single": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "all_reduce": "all-reduce",
}


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the collectives of wrappers by kind; votes go past `torch.distributed`."""
    found: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in _KINDS}

    def noting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[_KINDS[name]] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in _KINDS:
        setattr(dist, name, noting(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def collectives_of_steps(kind: str, **options: Any) -> list[dict[str, int]]:
    """Of three steps of four microbatches, by kind: guarded first, then replayed."""
    faults = Faults()
    stepper = Stepper(build(kind, [faults], {"norm": False}), faults, size=2, **options)
    counts = []
    for step in range(3):
        batch = torch.randn(2 * MICROBATCHES, 4), torch.randn(2 * MICROBATCHES, 2)
        with counting() as found:
            result = stepper.train(step, batch)
        assert result.num_microbatches == MICROBATCHES
        counts.append(dict(found))
    return counts


def test_ddp_reduces_once_a_step(world2: World) -> None:
    for counts in world2.run(collectives_of_steps, "ddp"):
        # One bucket before torch has ordered them, as many as modules afterwards.
        assert counts == [{"all-reduce": 1}, {"all-reduce": MODULES}, {"all-reduce": MODULES}]


def test_sharded_gradients_are_reduced_with_each_microbatch(world2: World) -> None:
    for counts in world2.run(collectives_of_steps, "fsdp"):
        assert counts == [{"all-gather": 28, "reduce-scatter": MICROBATCHES * MODULES}] * 3


def test_replicas_add_up_with_the_last_microbatch_alone(world4: World) -> None:
    for counts in world4.run(collectives_of_steps, "hsdp"):
        expected = {"all-gather": 28, "reduce-scatter": MICROBATCHES * MODULES}
        assert counts == [{**expected, "all-reduce": MODULES}] * 3


@pytest.mark.parametrize("rows", [[6, 6, 6, 6], [8, 3, 1, 7], [1, 9, 4, 4]], ids=str)
def test_gradients_of_replicas_are_those_of_one_process(world4: World, rows: list[int]) -> None:
    expected = expected_gradients(sum(rows))
    for found in world4.run(gradients, "hsdp", rows):
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize("point", ["backward", "last backward", "two ranks", "first batch"])
def test_replicas_recover_bit_for_bit(world4: World, point: str) -> None:
    plan = points(4)[point]
    results = world4.run(compare, "hsdp", plan, {})
    assert [result["differing"] for result in results] == [[]] * 4
    assert sum(result["fired"] for result in results) == len(plan)


class Choosing(nn.Module):
    """Each row uses one of two layers of the same size: those of a microbatch the same one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.layers[int(x[0, 0] > 0)](x).tanh())
        return output


def choosing_batch(ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of so many ranks: two microbatches of two rows each, which use one layer each."""
    generator = torch.Generator().manual_seed(7)
    rows = 4 * (max(ranks) + 1)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0]).repeat(rows // 4)
    return x, y


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def train_choosing(sharded: Sequence[str], *, looks: bool = True) -> dict[str, Any]:
    """How far gradients of two steps are from those of one process; the all-reduces of each.

    Args:
        sharded: what `fully_shard` is applied to before the root.
        looks: whether it is found out what gradients are of.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model, plain = Choosing(), Choosing()
    for name in sharded:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, y = choosing_batch(range(world))
    for each in range(world):
        (mean_square(plain(x[4 * each : 4 * each + 2]), y[4 * each : 4 * each + 2]) / 8).backward()
        (mean_square(plain(x[4 * each + 2 :][:2]), y[4 * each + 2 :][:2]) / 8).backward()
    step = Microbatcher(
        model, loss_fn=mean_square, loss_average="samples", microbatch_size=2, probe=False
    )
    guard: Any = automicro.ranks.guards.fsdp
    kept = guard.whole_numel, guard.holds_back
    if not looks:
        guard.whole_numel = lambda module: mock.ANY
        guard.holds_back = lambda module: False
    errors, counts = [], []
    try:
        for _ in range(2):
            model.zero_grad()
            with counting() as found:
                step.backward((x[4 * rank :][:4], y[4 * rank :][:4]))
            counts.append(found["all-reduce"])
            errors.append(difference(model, plain))
    finally:
        guard.whole_numel, guard.holds_back = kept
    return {"errors": errors, "counts": counts}


def difference(model: nn.Module, plain: nn.Module) -> float:
    """How far whole gradients are from those of a model without a wrapper."""
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    found = [(whole(one.grad), other.grad) for one, other in pairs]
    return max(
        float((torch.zeros_like(other) if one is None else one).sub(other).abs().max())
        for one, other in found
        if other is not None
    )


def whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize(
    "sharded", [[], ["layers.0", "layers.1"]], ids=["in one module", "each by itself"]
)
def test_microbatches_that_train_other_parameters_add_up_each(
    world4: World, sharded: list[str]
) -> None:
    for found in world4.run(train_choosing, sharded):
        assert max(found["errors"]) <= 1e-12
        assert found["counts"][1] > 1 + len(sharded), "with each microbatch"
    for found in world4.run(train_choosing, sharded, looks=False):
        assert max(found["errors"]) > 1e-3, "torch adds up what has the same place"


def reductions_of(option: str) -> int:
    """All-reduces of a second step of two microbatches, of a model of one wrapped module."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if option == "coarse sums" else None)
    model: Any = nn.Linear(4, 2)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if option == "a hook":
        model.set_all_reduce_hook(lambda gradient: None)
    step = Microbatcher(
        model, loss_fn=mean_square, loss_average="samples", microbatch_size=2, probe=False
    )
    for _ in range(2):
        with counting() as found:
            step.backward((torch.randn(4, 4), torch.randn(4, 2)))
    return found["all-reduce"]


@pytest.mark.parametrize(("option", "count"), [("", 1), ("coarse sums", 2), ("a hook", 2)])
def test_replicas_add_up_each_microbatch_where_somebody_would_notice(
    world4: World, option: str, count: int
) -> None:
    assert world4.run(reductions_of, option) == [count] * 4
