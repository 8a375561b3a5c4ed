"""Measurements over several calls: consecutive failures, and simulated and real peaks."""

import concurrent.futures
import gc
from collections import Counter
from dataclasses import dataclass, field

import torch

from automicro import Fixed, Halving, MemoryBudget
from tests.outside import Outside
from tests.real_memory.allocator import CappedAllocator
from tests.real_memory.scenes import Scene, prepare


@dataclass
class Series:
    """Consecutive failures.

    ``phases`` names the phase of each; ``bytes_alive`` is the largest number of bytes in use
    after a failure, above those before all failures.
    """

    ooms: int = 0
    raised: int = 0
    recovered: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    bytes_alive: int = 0


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The peak memory of a step above its start, as counted in two ways."""

    subject: str
    rows: int
    real_bytes: int
    simulated_bytes: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An operation without enough memory, and its effects on its arguments."""

    in_thread: bool
    error: str
    text: str
    changed_its_arguments: bool


def refuse_once(allocator: CappedAllocator, *, in_thread: bool) -> Refused:
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
    return Refused(in_thread=in_thread, error=error, text=text, changed_its_arguments=changed)


def fail_in_a_row(allocator: CappedAllocator, scene: Scene, num_ooms: int) -> Series:
    """Run out of memory in every call, at changing points of forward and backward.

    Half of the failures are raised to the caller, the others recovered in smaller slices.
    """
    series = Series()
    run = prepare(scene, None)
    batch = run.batches[0]
    phase = Outside(name="outside")
    run.model.register_forward_pre_hook(lambda *_: setattr(phase, "name", "forward"))
    run.model.register_forward_hook(lambda *_: setattr(phase, "name", "backward"))
    gc.collect()
    base_bytes = allocator.used_bytes
    allocator.reset_peak()
    run.microbatcher.backward(batch)
    whole_bytes = allocator.peak_bytes - base_bytes
    run.zero_grad()
    run.microbatcher._train.policy = Fixed(1)
    run.microbatcher.backward(batch)  # includes the probe of the loss
    run.zero_grad()
    allocator.reset_peak()
    run.microbatcher.backward(batch)
    floor_bytes = allocator.peak_bytes - base_bytes
    run.zero_grad()
    gc.collect()
    gc.freeze()
    base_bytes = allocator.used_bytes
    while series.ooms < num_ooms:
        is_raised = series.ooms < num_ooms // 2
        lowest = 0 if is_raised else floor_bytes
        step = (whole_bytes - lowest) // 97  # prime, so that all points are equally likely
        room = lowest + step * (series.ooms * 31 % 97)
        run.microbatcher._train.policy = Fixed(None) if is_raised else Halving()
        refusals = allocator.refusals
        allocator.limit(base_bytes + room)
        phase.name = "outside"
        try:
            run.microbatcher.backward(batch)
        except torch.OutOfMemoryError:
            series.raised += 1
            series.phases[phase.name] += 1
        else:
            series.recovered += 1
        allocator.relent()
        series.ooms += allocator.refusals - refusals
        run.zero_grad()
        series.bytes_alive = max(series.bytes_alive, allocator.used_bytes - base_bytes)
    return series


def compare_peaks(allocator: CappedAllocator, subject: str, rows: int) -> Peaks:
    """Run one step of the whole batch, counted by a `MemoryBudget` and by the allocator."""
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
        return Peaks(
            subject=subject,
            rows=rows,
            real_bytes=allocator.peak_bytes - real_base,
            simulated_bytes=budget.peak_bytes - simulated_base,
        )
