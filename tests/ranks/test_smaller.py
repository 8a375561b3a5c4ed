"""Parts with sizes of their own, and levels, where one rank of two runs out of memory."""

import random
from typing import Any

import pytest

from tests.ranks.family_jobs import compare_levels
from tests.ranks.faulty_models import Fault
from tests.ranks.smaller_jobs import KINDS, compare_cut, options_of, plan_of
from tests.ranks.world import World
from tests.sweeps import SEED, mostly_in_sweeps

WHAT = ("nested tail", "nested middle", "nested tail and levels", "recompute", "offload", "both")
FEW, MANY = 1, 20


def require_survived(world: World, kind: str, what: str, seeds: range) -> None:
    fired = climbed = 0
    for seed in seeds:
        options = options_of(what, random.Random(seed))
        # No more faults than there are smaller sizes, or levels to go up to.
        plan = plan_of(seed, what, kind)[: len(options.get("levels", (2, 1)))]
        case = f"seed {seed}: {kind}, {what} {options} {plan}"
        try:
            results = world.run(compare_cut, kind, plan, options)
        except AssertionError as error:
            raise AssertionError(f"{case}\n{error}") from error
        assert not any(result["differing"] for result in results), (case, results)
        assert all(result["same cuts"] for result in results), (case, results)
        assert results[0]["outer"] == results[1]["outer"], (case, results)
        fired += sum(result["fired"] for result in results)
        climbed += any(level for _, level in results[0]["outer"])
    print(f"{kind}, {what}: {len(seeds)} plans, {fired} faults, {climbed} with levels, all equal")


@pytest.mark.parametrize("kind", mostly_in_sweeps(KINDS, quick=["fsdp"]))
def test_a_part_that_runs_out_of_memory_on_one_rank_is_smaller_there_alone(
    world2: World, kind: str
) -> None:
    plan = [Fault(1, "forward", step=2, layer=3)]  # at the second call rows are checked
    options = {"tail": True, "size": 4, "nested": {"tail": 2}}
    first, second = world2.run(compare_cut, kind, plan, options)
    assert first["differing"] == second["differing"] == []
    assert second["fired"] == 1
    assert first["outer"] == second["outer"] == [(4, 0)] * 3  # the microbatches stayed
    assert first["attempts"] == second["attempts"] == 4
    assert (first["parts"], second["parts"]) == ([(2,)] * 3, [(2,), (2,), (1,)])


@pytest.mark.parametrize("kind", mostly_in_sweeps(KINDS, quick=["ddp"]))
def test_ranks_go_up_a_level_together(world2: World, kind: str) -> None:
    plan = [Fault(1, "forward", step=1, layer=1), Fault(0, "again", step=1, layer=1)]
    results = world2.run(compare_cut, kind, plan, {"size": 1, "levels": ["recompute", "offload"]})
    for result in results:
        assert result["differing"] == []
        assert result["fired"] == 1
        assert [level for _, level in result["outer"]] == [0, 2, 2]


@pytest.mark.parametrize(("kind", "what"), mostly_in_sweeps(KINDS, WHAT, few=6))
def test_a_few_random_plans(world2: World, kind: str, what: str) -> None:
    require_survived(world2, kind, what, range(SEED, SEED + FEW))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", WHAT)
def test_many_random_plans(world2: World, kind: str, what: str) -> None:
    require_survived(world2, kind, what, range(SEED + 1000, SEED + 1000 + MANY))


WRAPPINGS: list[tuple[str, dict[str, Any]]] = [
    ("fsdp", {"reshard": True}),
    ("fsdp", {"reshard": False, "bf16": True}),
    ("fsdp", {"sync": "auto"}),
    ("ddp", {}),
    ("ddp", {"unused": True}),
]
FAMILIES = (
    *("bert", "convnext", "funnel", "gemma3n", "gpt2", "llama", "mamba", "mistral", "mixtral"),
    *("swin", "t5", "vit", "wav2vec2"),
)


@pytest.mark.parametrize(("name", "wrapping"), mostly_in_sweeps(FAMILIES, WRAPPINGS, few=3))
def test_models_of_others_lose_no_bit_at_a_level(world2: World, name: str, wrapping: Any) -> None:
    kind, options = wrapping
    pytest.importorskip("transformers")
    for found in world2.run(compare_levels, kind, name, options):
        assert found == {"recompute": [], "offload": [], "both": []}
