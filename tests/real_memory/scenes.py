"""The calls of a subject, with the steps before and after them."""

import concurrent.futures
import gc
from dataclasses import dataclass
from typing import Any

import torch

from automicro import Fixed
from automicro.optimizer.step import step_optimizer
from tests.real_memory.subjects import PLANTED, ROWS, build
from tests.torture.engine.subject import TortureRun, values


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One call of one subject, after some clean steps."""

    subject: str
    call: str = "backward"  # or "evaluate", "optimizer step"
    warm_steps: int = 1
    optimizer: str = "AdamW"
    rows: int = ROWS
    in_thread: bool = False

    def __str__(self) -> str:
        words = [self.subject, self.call]
        words += [self.optimizer] if self.call == "optimizer step" else []
        words += [] if self.warm_steps else ["first batch"]
        words += ["in a thread"] if self.in_thread else []
        return ", ".join(words)


def prepare(scene: Scene, size: int | None) -> TortureRun:
    """Prepare a run for the disturbed call; a size of None means the whole batch."""
    gc.collect()
    # Checks of a few rows would dominate the allocations of the first steps.
    probe = not scene.warm_steps and scene.subject != PLANTED  # it would reveal the planted error
    run = build(scene.subject, scene.optimizer, scene.rows, probe=probe)
    run.microbatcher._train.policy = Fixed(size)
    for _ in range(scene.warm_steps):
        run.microbatcher.backward(run.batches[0], metrics=run.metrics)
        run.optimizer.step()
        run.zero_grad()
    if scene.call == "optimizer step":
        run.microbatcher.backward(run.batches[1], metrics=run.metrics)
    return run


def call(scene: Scene, run: TortureRun) -> Any:
    """Make the disturbed call, in this thread or in a new one."""
    if not scene.in_thread:
        return _call_here(scene, run)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_call_here, scene, run).result()


def _call_here(scene: Scene, run: TortureRun) -> Any:
    if scene.call == "backward":
        return run.microbatcher.backward(run.batches[1], metrics=run.metrics)
    if scene.call == "evaluate":
        return run.microbatcher.evaluate(run.batches[1], metrics=run.metrics)
    step_optimizer(run.optimizer, torch.device("cpu"))
    return None


def go_on(scene: Scene, run: TortureRun) -> dict[str, Any]:
    """Run more steps, which would reveal any wrong state."""
    run.microbatcher._train.policy = Fixed(None)
    if scene.call == "backward":
        run.optimizer.step()
    for batch in run.batches[2:]:
        run.zero_grad()
        run.microbatcher.backward(batch, metrics=run.metrics)
        run.optimizer.step()
    return values(run)
