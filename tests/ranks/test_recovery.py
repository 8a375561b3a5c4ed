"""One rank runs out of memory: all ranks recover, bit for bit as without the failure."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from automicro.options import SYNCS
from automicro.ranks.coordinated import coordinate
from automicro.torch_private_distributed import collectives_of
from tests.ranks.faulty_models import (
    WRAPPINGS,
    Fault,
    Faults,
    Net,
    allocations,
    build,
    mostly_frozen,
    points,
    random_plan,
    tied,
)
from tests.ranks.jobs import compare, run_steps
from tests.ranks.steps import another, squared_error
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import gap, raised, require_alike
from tests.sweeps import SEED, mostly_in_sweeps

pytestmark = pytest.mark.sweep

POINTS = [*points(2), *allocations(2)]
WORLDS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "ddp", {}),
    (2, "ddp", {"ddp": {"gradient_as_bucket_view": True}}),
    (2, "ddp", {"ddp": {"find_unused_parameters": True}}),
    (2, "ddp", {"rare": True}),
    (2, "ddp", {"hook": "voting"}),
    (2, "fsdp", {}),
    (2, "fsdp", {"fsdp": {"reshard_after_forward": False}}),
    (2, "fsdp", {"bf16": True, "norm": False}),
    (2, "fsdp", {"recompute": True}),
    (2, "fsdp", {"prefetch": True}),
    (2, "fsdp", {"rare": True}),
    (2, "tensor", {}),
    (3, "ddp", {}),
    (3, "fsdp", {}),
    (4, "hsdp", {}),
]


def require_equal(world: World, kind: str, plan: Sequence[Fault], **options: Any) -> list[Any]:
    results = world.run(compare, kind, plan, options)
    assert [result["differing"] for result in results] == [[]] * world.size
    assert len({tuple(result["sizes"]) for result in results}) == 1
    return results


def require_recovered(world: World, kind: str, plan: Sequence[Fault], **options: Any) -> list[Any]:
    results = require_equal(world, kind, plan, **options)
    assert sum(result["fired"] for result in results) == len(plan)
    assert results[0]["attempts"] > len(results[0]["sizes"])
    return results


ALONE = [(1, kind, dict[str, Any]()) for kind in ("ddp", "fsdp")]
WRAPPED = [(2, name, {"norm": False}) for name in WRAPPINGS]


@pytest.mark.parametrize(
    ("world", "point"),
    [
        *mostly_in_sweeps(WORLDS, POINTS, few=20),
        *mostly_in_sweeps(ALONE, ["last backward"]),
        *mostly_in_sweeps(WRAPPED, ["first forward", "last backward", "two ranks"], few=6),
    ],
    ids=str,
)
def test_every_wrapper_recovers_at_every_point(
    worlds: Callable[[int], World], world: tuple[int, str, dict[str, Any]], point: str
) -> None:
    size, kind, options = world
    plan = {**points(size), **allocations(size)}[point]
    if kind in ("ddp", "tensor"):  # no allocation of a collective can fail
        instead = {"gather": "forward", "scatter": "backward"}
        plan = [dataclasses.replace(e, where=instead.get(e.where, e.where)) for e in plan]
    require_recovered(worlds(size), kind, plan, **options)


@pytest.mark.parametrize("name", mostly_in_sweeps(WRAPPINGS, few=6))
@on_ranks()
def test_every_wrapping_has_gradient_of_one_process(name: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(1)
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    for sync in SYNCS:
        torch.manual_seed(0)
        plain = Net([Faults()], norm=False).eval()  # no dropout
        for part, change in (("tied", tied), ("mostly frozen", mostly_frozen)):
            if part in name:
                change(plain)
        squared_error(plain(x), y).backward()
        model = build(name, [Faults()], {"norm": False}).eval()
        step = another(model, microbatch_size=3, sync=sync)
        for _ in range(3):
            model.zero_grad()
            step.backward((x[4 * rank :][:4], y[4 * rank :][:4]))
        error = gap(model, plain)
        assert error < (3e-2 if name == "half precision" else 1e-6), error


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_with_few_rows_run_fillers(world2: World, kind: str) -> None:
    plan = [Fault(0, "backward", step=2, microbatch=2, layer=1)]
    require_recovered(world2, kind, plan, rows=[48, 2], norm=False)


def test_failed_rank_may_fail_again_while_assisting_peers(world2: World) -> None:
    plan = [
        Fault(1, "between", step=2, microbatch=1, layer=2),
        Fault(1, "scatter", step=2, microbatch=1, layer=2),  # during the replay
    ]
    require_recovered(world2, "fsdp", plan)


@on_ranks(4)
def test_failed_rank_reduces_with_operation_of_its_peers() -> None:
    """The operation can determine the algorithm of a communicator."""
    found: set[str] = set()
    all_reduce = dist.all_reduce

    def noting(tensor: Any, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and kwargs.get("group") is not None:
            found.add(str(op).rpartition(".")[2])
        return all_reduce(tensor, op, *args, **kwargs)

    plan = points(4)["successive batches"]
    with mock.patch.object(dist, "all_reduce", noting):
        stepper, _ = run_steps("hsdp", plan, {})
    assert found == {"AVG"}
    assert stepper.faults.fired == sum(each.rank == dist.get_rank() for each in plan)


@on_ranks()
def test_failed_rank_repeats_custom_collectives_of_its_peers() -> None:
    stepper, _ = run_steps("fsdp", [Fault(1, "backward", step=2, microbatch=1, layer=1)], {})
    blocks: Any = stepper.model.blocks
    calls = [guarded.inner.calls for block in blocks for guarded in collectives_of(block) or ()]
    assert stepper.faults.fired == dist.get_rank()
    assert min(calls) > 0
    require_alike(calls)


def test_settled_steps_need_few_votes(world2: World) -> None:
    ddp = require_equal(world2, "ddp", [], steps=5)[0]
    fsdp = require_equal(world2, "fsdp", [], steps=5)[0]
    assert ddp["votes"][2:5] == [2, 2, 2], "an agreement and the commit"
    # Two microbatches need an agreement, the end of the first one, and the commit.
    assert fsdp["votes"][1:5] == [3, 3, 3, 3]


def test_model_with_varying_collectives_stays_guarded(world2: World) -> None:
    plan = [Fault(1, "backward", step=4, microbatch=1, layer=1)]
    [found, _] = require_equal(world2, "fsdp", plan, steps=5, depths=[3, 3, 2, 3, 3])
    assert found["votes"][1] == 3, "known by then"
    assert min(found["votes"][3:]) > 10


@pytest.mark.parametrize(
    ("kind", "options", "remedy"),
    [
        ("ddp", {"ddp": {"static_graph": True}}, "leave it out"),
        ("ddp", {"hook": "bare"}, "VotingHook"),
        ("fsdp", {"symmetric": True}, "leave out set_symm_mem_for_comm"),
        ("tensor", {"compiled": True}, "leave out torch.compile"),
    ],
    ids=["static graph", "hook", "symmetric memory", "compiled collectives"],
)
@on_ranks()
def test_unguardable_option_is_refused_with_remedy(
    kind: str, options: dict[str, Any], remedy: str
) -> None:
    model = build(kind, [Faults()], options)
    if options.get("compiled"):
        model.compile()
    error, text = raised(lambda: coordinate([model]))
    assert error == "ValueError"
    assert remedy in text


# Random plans: any rank and any point, up to three faults, in every wrapper


def options_of(draw: random.Random, kind: str) -> dict[str, Any]:
    if kind == "ddp":
        names = ("gradient_as_bucket_view", "find_unused_parameters")
        switches = {name: draw.random() < 0.5 for name in names}
        sends_buffers = draw.random() < 0.7
        return {"ddp": switches, "sends_buffers": sends_buffers, "rare": draw.random() < 0.5}
    return {
        "bf16": (bf16 := draw.random() < 0.3),
        "norm": not bf16,
        "recompute": draw.random() < 0.3,
        "fsdp": {"reshard_after_forward": draw.random() < 0.6},
        "rare": draw.random() < 0.5,
        "sync": draw.choice(["each", "auto"]),
    }


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "size", "count"),
    [
        *(("ddp", 2, 2), ("fsdp", 2, 2)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("ddp", 2, 80), ("fsdp", 2, 80), ("ddp", 3, 60), ("fsdp", 3, 60))
        ),
        pytest.param("hsdp", 4, 40, marks=pytest.mark.slow),
    ],
)
def test_random_plans_recover(
    worlds: Callable[[int], World], kind: str, size: int, count: int
) -> None:
    fired = 0
    kinds = ["before", "forward", "backward", "backward", "between", "end"]
    kinds += ["gather", "scatter"] * (kind != "ddp")
    for seed in range(SEED + 1000 * size, SEED + 1000 * size + count):
        draw = random.Random(seed)
        plan, options = random_plan(draw, range(size), where=kinds), options_of(draw, kind)
        try:
            results = require_equal(worlds(size), kind, plan, **options)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {kind} {options} {plan}\n{error}") from error
        fired += sum(result["fired"] for result in results)
    assert fired > count / 2
    print(f"{kind} on {size} ranks: {count} plans, {fired} times out of memory, all equal")
