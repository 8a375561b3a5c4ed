"""One rank runs out of memory: all ranks recover, bit for bit as without the failure."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.ranks.faulty_models import Fault, allocations, points, random_plan
from tests.ranks.jobs import (
    compare,
    compare_without,
    count_custom_collectives,
    expected_gradients,
    gradients,
    guard_model,
    replica_reductions,
)
from tests.ranks.world import World
from tests.ranks.wrapping import furthest
from tests.sweeps import SEED, mostly_in_sweeps

pytestmark = pytest.mark.sweep

POINTS = list(points(2))
ALLOCATIONS = list(allocations(2))
CASES = [("ddp", point) for point in POINTS]
CASES += [("fsdp", point) for point in POINTS + ALLOCATIONS]


def require_equal(
    world: World, kind: str, plan: Sequence[Fault], options: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    results = world.run(compare, kind, plan, options or {})
    assert [result["differing"] for result in results] == [[]] * world.size
    assert len({tuple(result["sizes"]) for result in results}) == 1
    return results


def require_recovered(
    world: World, kind: str, plan: Sequence[Fault], **options: Any
) -> list[dict[str, Any]]:
    results = require_equal(world, kind, plan, options)
    assert sum(result["fired"] for result in results) == len(plan)
    assert results[0]["attempts"] > len(results[0]["sizes"])
    return results


@pytest.mark.parametrize("case", mostly_in_sweeps(CASES, few=18), ids=", ".join)
def test_two_ranks_recover_in_each_wrapper(world2: World, case: tuple[str, str]) -> None:
    kind, point = case
    require_recovered(world2, kind, {**points(2), **allocations(2)}[point])


def test_failed_rank_may_fail_again_while_assisting_peers(
    world2: World,
) -> None:
    plan = [
        Fault(1, "between", step=2, microbatch=1, layer=2),
        Fault(1, "scatter", step=2, microbatch=1, layer=2),  # during the replay
    ]
    require_recovered(world2, "fsdp", plan)


WORLDS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "ddp", {}),
    (1, "fsdp", {}),
    (2, "ddp", {"ddp": {"gradient_as_bucket_view": True}}),
    (2, "ddp", {"ddp": {"find_unused_parameters": True}}),
    (2, "ddp", {"rare": True}),
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


def points_of(size: int, kind: str) -> list[str]:
    if size == 1:
        return ["last backward"]
    return POINTS + ALLOCATIONS * (kind in ("fsdp", "hsdp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "kind", "options", "point"),
    [(*case, point) for case in WORLDS for point in points_of(*case[:2])],
    ids=str,
)
def test_every_wrapper_recovers_in_every_world(
    worlds: Callable[[int], World], size: int, kind: str, options: dict[str, Any], point: str
) -> None:
    plan = {**points(size), **allocations(size)}[point]
    require_recovered(worlds(size), kind, plan, **options)


@pytest.mark.slow
def test_failed_rank_reduces_with_operation_of_its_peers(world4: World) -> None:
    found = world4.run(replica_reductions, points(4)["successive batches"])
    assert [operations for operations, _ in found] == [{"AVG"}] * 4
    assert sum(fired for _, fired in found) == 2


def test_failed_rank_repeats_custom_collectives_of_its_peers(
    world2: World,
) -> None:
    plan = [Fault(1, "backward", step=2, microbatch=1, layer=1)]
    (one, _), (other, fired) = world2.run(count_custom_collectives, plan)
    assert fired == 1
    assert one == other
    assert min(one.values()) > 0


def test_tensor_parallel_modules_recover(world2: World) -> None:
    require_recovered(world2, "tensor", points(2)["last backward"])


def test_settled_steps_need_few_votes(world2: World) -> None:
    ddp = require_equal(world2, "ddp", [], {"steps": 5})[0]
    fsdp = require_equal(world2, "fsdp", [], {"steps": 5})[0]
    assert ddp["votes"][2:5] == [2, 2, 2], "an agreement and the commit"
    # Two microbatches need an agreement, the end of the first one, and the commit.
    assert fsdp["votes"][1:5] == [3, 3, 3, 3]


def test_ranks_with_few_rows_run_fillers(world2: World) -> None:
    for kind in ("ddp", "fsdp"):
        plan = [Fault(0, "backward", step=2, microbatch=2, layer=1)]
        require_recovered(world2, kind, plan, rows=[48, 2], norm=False)


def test_model_with_varying_collectives_stays_guarded(world2: World) -> None:
    options = {"steps": 5, "depths": [3, 3, 2, 3, 3]}
    plan = [Fault(1, "backward", step=4, microbatch=1, layer=1)]
    votes = require_equal(world2, "fsdp", plan, options)[0]["votes"]
    assert votes[1] == 3, "known by then"
    assert min(votes[3:]) > 10


def test_user_communication_hook_is_kept(world2: World) -> None:
    require_recovered(world2, "ddp", points(2)["last backward"], hook="voting")


@pytest.mark.parametrize(
    ("repair", "kind", "point"),
    [("drop_unsharded", "fsdp", "first batch"), ("reset_reducer", "ddp", "first batch")],
)
def test_wrapper_without_repair_gives_wrong_results(
    world2: World, repair: str, kind: str, point: str
) -> None:
    results = world2.run(compare_without, repair, kind, points(2)[point])
    assert any(result["differing"] for result in results)


@pytest.mark.parametrize(
    ("kind", "sync", "rows"),
    [
        ("ddp", "each", [8, 3]),
        ("fsdp", "each", [11, 1]),
        ("fsdp", "auto", [8, 3]),
        ("hsdp", "each", [1, 9, 4, 4]),
    ],
    ids=str,
)
def test_gradients_match_one_process_with_all_rows(
    worlds: Callable[[int], World], kind: str, sync: str, rows: list[int]
) -> None:
    expected = expected_gradients(sum(rows))
    for found in worlds(len(rows)).run(gradients, kind, rows, sync=sync):
        assert furthest(found, expected) <= 1e-12


@pytest.mark.slow
def test_compiled_code_with_collectives_is_refused(world2: World) -> None:
    for kind, text in world2.ends(guard_model, "tensor", {"compiled": True}):
        assert kind == "ValueError"
        assert "leave out torch.compile" in text


@pytest.mark.parametrize(
    ("kind", "options", "remedy"),
    [
        ("ddp", {"ddp": {"static_graph": True}}, "leave it out"),
        ("ddp", {"hook": "bare"}, "VotingHook"),
        ("fsdp", {"symmetric": True}, "leave out set_symm_mem_for_comm"),
    ],
    ids=["static graph", "hook", "symmetric memory"],
)
def test_unguardable_option_is_refused_with_remedy(
    world2: World, kind: str, options: dict[str, Any], remedy: str
) -> None:
    for error, text in world2.ends(guard_model, kind, options):
        assert error == "ValueError"
        assert remedy in text


# Random plans: any rank and any point, up to three faults, in every wrapper


# Kind, ranks and plans: 320 plans in all.
RUNS = [("ddp", 2, 80), ("fsdp", 2, 80), ("ddp", 3, 60), ("fsdp", 3, 60), ("hsdp", 4, 40)]


def options_of(seed: int, kind: str) -> dict[str, Any]:
    draw = random.Random(-seed - 1)
    if kind == "ddp":
        names = ["gradient_as_bucket_view", "find_unused_parameters"]
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


def require_survived(world: World, kind: str, seeds: range) -> None:
    fired, size = 0, world.size
    for seed in seeds:
        plan, options = random_plan(seed, size, sharded=kind != "ddp"), options_of(seed, kind)
        case = f"seed {seed} on {size} ranks: {kind} {options} {plan}"
        try:
            results = world.run(compare, kind, plan, options)
        except AssertionError as error:
            raise AssertionError(f"{case}\n{error}") from error
        assert not any(result["differing"] for result in results), case
        assert len({tuple(result["sizes"]) for result in results}) == 1, case
        fired += sum(result["fired"] for result in results)
    assert fired > len(seeds) / 2
    print(f"{kind} on {size} ranks: {len(seeds)} plans, {fired} times out of memory, all equal")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_few_random_plans_recover(world2: World, kind: str) -> None:
    require_survived(world2, kind, range(SEED, SEED + 2))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "size", "count"), RUNS)
def test_many_random_plans_recover(
    worlds: Callable[[int], World], kind: str, size: int, count: int
) -> None:
    require_survived(worlds(size), kind, range(SEED + 1000 * size, SEED + 1000 * size + count))
