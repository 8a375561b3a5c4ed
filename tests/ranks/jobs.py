"""Jobs for the processes of a world."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automicro.ranks import heartbeat
from tests.ranks.faulty_models import Fault, Faults, build
from tests.ranks.steps import ROWS, Stepper, another
from tests.ranks.wrapping import raised


def batch(step: int, rank: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    rows = options.get("rows", range(ROWS, 0, -1))[rank]  # each rank has a different number of rows
    x = torch.randn(rows, 4, generator=generator)
    return x, torch.randn(rows, 2, generator=generator)


def run_steps(
    kind: str, plan: Sequence[Fault], options: dict[str, Any], like: Stepper | None = None
) -> tuple[Stepper, dict[str, Tensor]]:
    """Run three steps and an evaluation; return the stepper and the final state."""
    faults = Faults(plan)
    model = build(kind, [faults], options)
    sync: Any = {"sync": options["sync"]} if "sync" in options else {}
    forced: Any = {} if like is None else {"sizes": like.sizes, "syncs": like.syncs}
    stepper = Stepper(model, faults, **forced, **sync)
    rank = dist.get_rank() if kind != "tensor" else 0  # tensor parallelism does not shard the batch
    beside = another(model) if options.get("beside") else None
    torch.manual_seed(100 + rank)
    for step in range(options.get("steps", 3)):
        faults.depth = options.get("depths", [3] * 9)[step]
        stepper.train(step, batch(step, rank, options))
        if beside is not None:
            result = beside.evaluate(batch(50 + step, rank, options), return_outputs=True)
            stepper.outputs.append(result.outputs)
    if beside is None:
        stepper.evaluate(options.get("steps", 3), batch(99, rank, options))
    return stepper, stepper.state()


def compare(kind: str, plan: Sequence[Fault], options: dict[str, Any]) -> dict[str, Any]:
    """Compare a run with faults to a run without faults at the same sizes."""
    stepper, state = run_steps(kind, plan, options)
    clean, expected = run_steps(kind, (), options, like=stepper)
    assert clean.attempts == len(clean.sizes), "the run to compare with failed itself"
    return {
        "differing": [name for name in expected if not torch.equal(state[name], expected[name])],
        "fired": stepper.faults.fired,
        "sizes": stepper.sizes,
        "attempts": stepper.attempts,
        "syncs": stepper.syncs,
        "votes": stepper.votes,
        "buffers": {name: value for name, value in state.items() if "running" in name},
    }


def fail(
    kind: str, plan: Sequence[Fault], *, roll_call_seconds: float | None = None
) -> dict[str, Any]:
    """Return the error of a run; a process that loses a peer also ends."""
    if roll_call_seconds is not None:  # only the missing rank could sign in
        heartbeat.ROLL_CALL_SECONDS = roll_call_seconds
    error, text = raised(lambda: run_steps(kind, plan, {}))
    return {"kind": error, "text": text}
