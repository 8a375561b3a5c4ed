"""Where a rank runs out of memory: the points of the matrix, and random ones."""

import random
from collections.abc import Sequence

from tests.ranks.faulty_models import Fault


def points(world_size: int) -> dict[str, list[Fault]]:
    """Every kind of point, on the last rank or on two."""
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
            Fault(0, "backward", microbatch=1, layer=1),
            Fault(last, "backward", microbatch=1, layer=1),
        ],
        "successive batches": [
            Fault(last, "backward", step=1, microbatch=1, layer=1),
            Fault(0, "forward", step=2, microbatch=2, layer=1),
        ],
        "evaluation": [Fault(last, "forward", step=3, microbatch=1, layer=1)],
    }


def allocations(world_size: int) -> dict[str, list[Fault]]:
    """A collective's own allocation, before and after the collectives are known."""
    last = world_size - 1
    return {
        "gather": [Fault(last, "gather", step=2, microbatch=1, layer=1)],
        "scatter": [Fault(last, "scatter", step=2, microbatch=1, layer=1)],
        "first gather": [Fault(0, "gather", step=0, layer=1)],
        "first scatter": [Fault(0, "scatter", step=0, layer=1)],
    }


def random_plan(seed: int, world_size: int, *, sharded: bool) -> Sequence[Fault]:
    """One to three faults anywhere in three steps."""
    draw = random.Random(seed)
    kinds = ["before", "forward", "backward", "backward", "between", "end"]
    kinds += ["gather", "scatter"] * sharded
    return [
        Fault(
            draw.randrange(world_size),
            draw.choice(kinds),
            step=draw.randrange(3),
            microbatch=draw.choice([0, 0, 1, 1, 2]),
            layer=draw.randrange(3),
        )
        for _ in range(draw.randint(1, 3))
    ]
