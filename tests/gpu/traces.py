"""The demands of code on the device: how often it waits, allocates memory, and lets it idle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.gpu.device import DEVICE, accelerator


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The observations; None if they cannot be made.

    Attributes:
        waits: how often the host waited for the device.
        calls: names of the driver's calls that waited.
        segments: how many segments the allocator took from the device.
        copying_us: time of the host in the driver's copy calls.
        idle_share: the share of the time between the first and the last kernel without a kernel.
    """

    waits: int
    calls: list[str] | None
    segments: int
    copying_us: float | None
    idle_share: float | None


def traced(run: Callable[[], Any]) -> Traced:
    """Run a function, and observe the device."""
    accelerator.synchronize(DEVICE)
    before = num_segments()
    if DEVICE.type == "standin":
        number = torch.ops.standin.num_waits()
        run()
        return Traced(
            waits=torch.ops.standin.num_waits() - number,
            calls=None,
            segments=num_segments() - before,
            copying_us=None,
            idle_share=None,
        )
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("measured"):
            run()
        # The profiler would wait, too; this is outside the range.
        accelerator.synchronize(DEVICE)
    events = trace.events()
    assert events is not None
    [measured] = [each for each in events if each.name == "measured" and not is_kernel(each)]
    span = measured.time_range
    kernels = sorted(
        (each.time_range.start, each.time_range.end)
        for each in events
        if is_kernel(each) and each.name != "measured"
    )
    driver = [
        each
        for each in events
        if each.name.startswith("cuda") and span.start <= each.time_range.start <= span.end
    ]
    calls = [each.name for each in driver if each.name.endswith("Synchronize")]
    copies = [each.time_range.elapsed_us() for each in driver if "Memcpy" in each.name]
    return Traced(
        waits=len(calls),
        calls=calls,
        segments=num_segments() - before,
        copying_us=round(sum(copies), 1),
        idle_share=idle_share(kernels),
    )


def is_kernel(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def idle_share(kernels: list[tuple[float, float]]) -> float | None:
    """Return the share of the whole time that no span covers, for spans sorted by start."""
    if not kernels:
        return None
    idle, until = 0.0, kernels[0][0]
    for start, end in kernels:
        idle += max(0.0, start - until)
        until = max(until, end)
    whole = until - kernels[0][0]
    return round(idle / whole, 4) if whole else 0.0


def num_segments() -> int:
    """Return how many segments the allocator has taken so far; some do not count them."""
    return int(accelerator.memory_stats(DEVICE).get("segment.all.allocated", 0))
