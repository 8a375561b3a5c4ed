"""Random plans: any rank, any point, several times, on every kind of wrapper."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks.jobs import compare
from tests.ranks.plans import random_plan
from tests.ranks.world import World
from tests.sweeps import SEED

pytestmark = pytest.mark.sweep

# Kind, ranks, plans: 320 in all.
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
def test_a_few_random_plans(world2: World, kind: str) -> None:
    require_survived(world2, kind, range(SEED, SEED + 2))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "size", "count"), RUNS)
def test_many_random_plans(
    worlds: Callable[[int], World], kind: str, size: int, count: int
) -> None:
    require_survived(worlds(size), kind, range(SEED + 1000 * size, SEED + 1000 * size + count))
