"""Nested parts and memory-saving levels when one of two ranks runs out of memory."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from automicro import Halving
from automicro.features import Nested, WhenTooLarge
from automicro.savers import offload
from automicro.savers.recompute import repeated_blocks
from tests.ranks.faulty_models import Fault, Faults, build, random_plan
from tests.ranks.jobs import batch
from tests.ranks.steps import Stepper
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import wrapped
from tests.sweeps import SEED, mostly_in_sweeps
from tests.torture.engine.cuts import Cut, CutRecorder
from tests.torture.engine.subject import begin_at_level
from tests.torture.engine.trials import Scripted

STEPS = 3
ROWS = (4, 3)
KINDS = ("ddp", "fsdp")
LEVELS = ["recompute", "offload"]  # in order; "auto" would choose by measured times


def part(size: int) -> Halving:
    return Halving(initial=size, refine=False)


def options_of(what: str, draw: random.Random) -> dict[str, Any]:
    """Return options for the model and the `Microbatcher`, with the initial microbatch size."""
    if what == "nested tail":
        return {"tail": True, "size": 4, "nested": {"last": 2}}
    if what == "nested middle":
        return {"size": 4, "nested": {"blocks.1": 2}}
    if what == "nested tail and levels":
        return {"tail": True, "size": draw.choice([1, 4]), "nested": {"last": 4}, "levels": LEVELS}
    return {
        "size": draw.choice([1, 1, 2]),
        "levels": LEVELS if what == "both" else [what],
        "fsdp": {"reshard_after_forward": draw.choice([True, False])},
        "bf16": draw.choice([True, False]),
        "prefetch": draw.choice([True, False]),
    }


def plan_of(draw: random.Random, what: str, kind: str) -> list[Fault]:
    """Draw one to three faults within three steps: nested parts fail on only one rank."""
    ranks = [draw.randrange(2)] if "nested" in what else draw.choice([[0], [1], [0, 1]])
    kinds = ["before", "forward", "forward", "again", "backward", "backward", "between", "end"]
    kinds += ["gather", "scatter"] * (kind == "fsdp" and "nested" not in what)
    layers = [3, 3, 3, 0, 1, 2] if "tail" in what else [1, 1, 0, 2]
    return random_plan(draw, ranks, where=kinds, microbatch=[0, 0, 0, 1], layer=layers)


def run_cut(
    kind: str, plan: Sequence[Fault], options: dict[str, Any], cuts: Sequence[Cut] = ()
) -> dict[str, Any]:
    """Run steps with faults or with given cuts; return the cuts and the final state."""
    faults = Faults(plan)
    model = build(kind, [faults], {**options, "norm": False})
    parts = {  # declared, so no fault occurs in a check
        name: {"microbatch_size": part(size), "loss_average": "samples"}
        for name, size in options.get("nested", {}).items()
    }
    own_loss: Any = {"forward": lambda model, microbatch: model(*microbatch)}
    stepper = Stepper(
        model,
        faults,
        policy=Scripted([each.size for each in cuts]) if cuts else part(options["size"]),
        features=[Nested(parts), WhenTooLarge(options.get("levels", "error"))],
        **own_loss if options.get("tail") else {},
    )
    torch.manual_seed(100 + dist.get_rank())
    found: list[Cut] = []
    with mock.patch.object(offload, "SMALL_BYTES", 1):  # otherwise nothing here is offloaded
        for step in range(STEPS):
            cut = cuts[step] if cuts else None
            if cut is not None and cut.level:
                begin_at_level(stepper.microbatcher, cut.level)
            with CutRecorder(None if cut is None else cut.parts)() as recorder:
                stepper.train(step, batch(step, dist.get_rank(), {"rows": ROWS}))
            assert recorder.cut is not None
            found.append(recorder.cut)
    state, attempts = stepper.state(), stepper.attempts
    return {"state": state, "cuts": found, "attempts": attempts, "fired": faults.fired}


def compare_cut(kind: str, plan: Sequence[Fault], options: dict[str, Any]) -> dict[str, Any]:
    """Compare a run with faults to one without, at the same sizes and slices.

    Without nested parts, runs that used a level are also compared to one at the plain level.
    """
    one = run_cut(kind, plan, options)
    clean = run_cut(kind, (), options, one["cuts"])
    expected = [clean["state"]]
    if not options.get("nested") and any(each.level for each in one["cuts"]):
        plain = [dataclasses.replace(each, level=0) for each in one["cuts"]]
        expected.append(run_cut(kind, (), options, plain)["state"])
    return {
        "differing": [
            name
            for each in expected
            for name, value in each.items()
            if not torch.equal(one["state"][name], value)
        ],
        "same cuts": clean["cuts"] == one["cuts"],
        "outer": [(each.size, each.level) for each in one["cuts"]],
        "parts": [each.parts for each in one["cuts"]],
        "fired": one["fired"],
        "attempts": one["attempts"],
    }


WHAT = ("nested tail", "nested middle", "nested tail and levels", "recompute", "offload", "both")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_part_shrinks_only_on_rank_without_memory(world2: World, kind: str) -> None:
    plan = [Fault(1, "forward", step=2, layer=3)]  # the second call checks rows
    options = {"tail": True, "size": 4, "nested": {"last": 2}}
    first, second = world2.run(compare_cut, kind, plan, options)
    assert first["differing"] == second["differing"] == []
    assert second["fired"] == 1
    assert first["outer"] == second["outer"] == [(4, 0)] * 3  # microbatches keep their size
    assert first["attempts"] == second["attempts"] == 4
    assert (first["parts"], second["parts"]) == ([(2,)] * 3, [(2,), (2,), (1,)])


@pytest.mark.parametrize("kind", mostly_in_sweeps(KINDS, quick=["ddp"]))
def test_ranks_raise_level_together(world2: World, kind: str) -> None:
    plan = [Fault(1, "forward", step=1, layer=1), Fault(0, "again", step=1, layer=1)]
    for result in world2.run(compare_cut, kind, plan, {"size": 1, "levels": LEVELS}):
        assert result["differing"] == []
        assert result["fired"] == 1
        assert [level for _, level in result["outer"]] == [0, 2, 2]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "what", "seeds"),
    [
        *mostly_in_sweeps(KINDS, WHAT, [range(SEED, SEED + 1)], few=6),
        *(
            pytest.param(*each, range(SEED + 1000, SEED + 1020), marks=pytest.mark.slow)
            for each in itertools.product(KINDS, WHAT)
        ),
    ],
)
def test_random_plans_recover(world2: World, kind: str, what: str, seeds: range) -> None:
    fired = climbed = 0
    for seed in seeds:
        draw = random.Random(f"{seed} {what}")
        options = options_of(what, draw)
        # A plan has at most as many faults as there are smaller sizes or higher levels.
        plan = plan_of(draw, what, kind)[: len(options.get("levels", (2, 1)))]
        case = f"seed {seed}: {kind}, {what} {options} {plan}"
        try:
            results = world2.run(compare_cut, kind, plan, options)
        except AssertionError as error:
            raise AssertionError(f"{case}\n{error}") from error
        assert not any(result["differing"] for result in results), (case, results)
        assert all(result["same cuts"] for result in results), (case, results)
        assert results[0]["outer"] == results[1]["outer"], (case, results)
        fired += sum(result["fired"] for result in results)
        climbed += any(level for _, level in results[0]["outer"])
    print(f"{kind}, {what}: {len(seeds)} plans, {fired} faults, {climbed} with levels, all equal")


FAMILIES = (
    *("bert", "convnext", "funnel", "gemma3n", "gpt2", "llama", "mamba", "mistral", "mixtral"),
    *("swin", "t5", "vit", "wav2vec2"),
)


@pytest.mark.filterwarnings("ignore")  # from transformers' models
@pytest.mark.parametrize(("name", "kind"), mostly_in_sweeps(FAMILIES, KINDS, few=2))
@on_ranks()
def test_transformers_keep_all_bits_at_each_level(name: str, kind: str) -> None:
    pytest.importorskip("transformers")
    from tests.savers.test_families import EVERY, assert_bit_identical

    def make() -> Any:
        model = EVERY[name].make()
        return wrapped(kind, model, *repeated_blocks(model).values())

    with mock.patch.object(offload, "SMALL_BYTES", 1 << 10):
        family = dataclasses.replace(EVERY[name], make=make)
        assert_bit_identical(family, is_measured=False)
