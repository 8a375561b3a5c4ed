"""Measurements besides trials: a single refusal, and simulated and real peaks."""

import concurrent.futures
import gc
from typing import Any

import torch

from automicro import MemoryBudget
from tests.real_memory.allocator import CappedAllocator
from tests.real_memory.scenes import Scene, prepare


def refuse_once(allocator: CappedAllocator, *, in_thread: bool) -> dict[str, Any]:
    """Run a batch normalization, whose kernel also writes statistics, without free memory."""
    mean, variance, x = torch.zeros(3), torch.ones(3), torch.randn(4, 3)

    def work() -> tuple[str, str]:
        allocator.limit(allocator.used_bytes)
        try:
            torch.nn.functional.batch_norm(x, mean, variance, training=True)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            allocator.relent()
        return "nothing", ""

    if in_thread:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            error, text = pool.submit(work).result()
    else:
        error, text = work()
    changed = bool(mean.any()) or bool((variance != 1).any())
    return {"in_thread": in_thread, "error": error, "text": text, "changed": changed}


def compare_peaks(allocator: CappedAllocator, subject: str, rows: int) -> dict[str, Any]:
    """Return the peaks of a step above its start, by a `MemoryBudget` and by the allocator."""
    run = prepare(Scene(subject=subject, rows=rows), None)
    with MemoryBudget(None) as budget:
        budget.track(run.model, run.optimizer)
        run.microbatcher.backward(run.batches[1])  # allocates everything permanent
        run.zero_grad()
        gc.collect()
        simulated_base, real_base = budget.allocated_bytes, allocator.used_bytes
        budget.reset_peak()
        allocator.reset_peak()
        run.microbatcher.backward(run.batches[1])
        simulated = (budget.peak_bytes or 0) - (simulated_base or 0)
        real = allocator.peak_bytes - real_base
    return {"subject": subject, "rows": rows, "real_bytes": real, "simulated_bytes": simulated}
