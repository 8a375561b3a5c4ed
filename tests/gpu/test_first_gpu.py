"""Facts about a new device: its answers and the costs of calls. Recorded, with few assertions."""

import contextlib
import ctypes
import gc
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from automicro.memory.device import capacity_bytes, read_counts
from automicro.memory.oom import classify, first_line
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, MIB, accelerator, only_cuda, room, share_of_device
from tests.gpu.subjects import batch, microbatcher, model
from tests.gpu.wrappers import WITH_NCCL, exchange_over_gloo, group_of_one, wrapped

pytestmark = GPU

ROOT = Path(__file__).resolve().parents[2]


def held_outside_bytes() -> int:
    """Return the memory of the device that is not in torch's allocator, for any owner."""
    accelerator.synchronize(DEVICE)
    free, total = accelerator.mem_get_info(DEVICE)
    return int(total - free - accelerator.memory_reserved(DEVICE))


def test_a_context_takes_memory_of_its_own(record_property: Record) -> None:
    """The first test of the process, when the device holds nothing else."""
    found = {"outside of torch, before the first tensor": held_outside_bytes()}
    a = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    found["outside of torch, with a tensor"] = held_outside_bytes()
    before = accelerator.memory_allocated(DEVICE)
    b = a @ a
    found["in torch, by the first product"] = accelerator.memory_allocated(DEVICE) - before
    before = accelerator.memory_allocated(DEVICE)
    b.sum().backward()
    found["in torch, by the first on a thread of autograd"] = (
        accelerator.memory_allocated(DEVICE) - before
    )
    found["outside of torch, after both"] = held_outside_bytes()
    record_property("held_bytes", found)


@only_cuda("such a driver")
def test_the_driver_and_its_library_answer(record_property: Record) -> None:
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = "--query-gpu=name,driver_version,memory.total,memory.used,mig.mode.current"
        command = [program, query, "--format=csv,noheader"]
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        record_property("nvidia_smi", (finished.stdout + finished.stderr).strip())
    else:
        record_property("nvidia_smi", "there is none")
    try:
        # If it does not answer, torch has no text for running out of memory.
        record_property("nvml_init", ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2())
    except OSError as error:
        record_property("nvml_init", first_line(error))
    found = {"archs": torch.cuda.get_arch_list(), "nccl": None}
    with contextlib.suppress(Exception):
        found["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call, unused-ignore]
    record_property("built_for", found)


def test_what_a_device_says_that_is_full(record_property: Record) -> None:
    total = accelerator.get_device_properties(DEVICE).total_memory
    texts = []

    def ask(where: str, num_bytes: int) -> None:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
        error = caught.value
        texts.append(
            {
                "where": where,
                "type": type(error).__name__,
                "text": str(error)[:1500],
                "means": classify(error).name,
            }
        )

    ask("without a limit, more than the device has", total + 2 * MIB)
    ask("without a limit, a PiB", 2**50)
    with room(64 * MIB):
        ask("within a share of the device", 1024 * MIB)
    record_property("texts", texts)
    assert len(texts) == 3


def microseconds(call: Callable[[], Any], times: int = 50) -> float:
    """Return the median of a number of calls."""
    call()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return round(sorted(taken)[times // 2] * 1e6, 2)


def empty_a_cache() -> None:
    torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    accelerator.empty_cache()


def test_what_calls_cost(record_property: Record) -> None:
    x = torch.ones(1024, device=DEVICE)
    fraction = share_of_device()
    state = accelerator.get_rng_state(DEVICE)
    calls: dict[str, Callable[[], Any]] = {
        "memory_stats": lambda: accelerator.memory_stats(DEVICE),
        "our reading of the counters": lambda: read_counts(DEVICE),
        "reset_peak_memory_stats": lambda: accelerator.reset_peak_memory_stats(DEVICE),
        "mem_get_info": lambda: accelerator.mem_get_info(DEVICE),
        "our reading of the capacity": lambda: capacity_bytes(DEVICE),
        "set the share of the device": lambda: accelerator.set_per_process_memory_fraction(
            fraction, DEVICE
        ),
        "get the device's generator": lambda: accelerator.get_rng_state(DEVICE),
        "set the device's generator": lambda: accelerator.set_rng_state(state, DEVICE),
        "get the host's generators": lambda: (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        ),
        "an operation, on the host": lambda: x.add_(1),
        "an operation, and wait": lambda: (x.add_(1), accelerator.synchronize(DEVICE)),
        "read a value": lambda: x[0].item(),
        "synchronize, idle": lambda: accelerator.synchronize(DEVICE),
        "empty an empty cache": accelerator.empty_cache,
    }
    found = {name: microseconds(call) for name, call in calls.items()}
    accelerator.synchronize(DEVICE)
    found["take 64 MiB, and give them back to the device"] = microseconds(empty_a_cache, 10)
    found["gc.collect"] = microseconds(gc.collect, 5)
    record_property("costs_us", found)
    assert min(found.values()) > 0


def test_how_fast_copies_are(record_property: Record) -> None:
    num_bytes = 256 * MIB if DEVICE.type == "cuda" else 16 * MIB
    target = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    pageable = torch.empty(num_bytes, dtype=torch.uint8)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    other = torch.empty_like(target)
    copies: dict[str, Callable[[], Any]] = {
        "pinned, to the device": lambda: target.copy_(pinned, non_blocking=True),
        "pageable, to the device": lambda: target.copy_(pageable, non_blocking=True),
        "to pinned": lambda: pinned.copy_(target, non_blocking=True),
        "to pageable": lambda: pageable.copy_(target),
        "on the device": lambda: other.copy_(target),
    }
    found = {}
    for name, copy in copies.items():
        taken = microseconds(lambda copy=copy: (copy(), accelerator.synchronize(DEVICE)), 5)  # type: ignore[misc]
        found[name] = round(num_bytes / taken / 1e3, 3)
    record_property("gb_per_s", found)


def test_whether_a_copy_holds_the_host_while_the_device_works(record_property: Record) -> None:
    """From pageable memory it may: then a step waits at each microbatch."""
    side = 4096 if DEVICE.type == "cuda" else 64
    a = torch.ones(side, side, device=DEVICE)
    found: dict[str, float] = {}

    def work() -> None:
        for _ in range(10):
            torch.mm(a, a)

    def work_and_wait() -> None:
        work()
        accelerator.synchronize(DEVICE)

    found["the work that is under way"] = microseconds(work_and_wait, 3)
    for kib in (32, 4096):
        for kind in ("pinned", "pageable"):
            source = torch.empty(kib * 1024, dtype=torch.uint8, pin_memory=kind == "pinned")
            source.to(DEVICE, non_blocking=True)
            accelerator.synchronize(DEVICE)
            work()
            start = time.perf_counter()
            source.to(DEVICE, non_blocking=True)
            name = f"the host in a {kind} copy of {kib} KiB behind it"
            found[name] = round((time.perf_counter() - start) * 1e6, 1)
            accelerator.synchronize(DEVICE)
    record_property("costs_us", found)


@only_cuda("such traces")
def test_whether_the_profiler_sees_the_device(record_property: Record) -> None:
    x = torch.ones(1024, device=DEVICE)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        x.add_(1)
        accelerator.synchronize(DEVICE)
    events = trace.events() or []
    on_device = [each.name for each in events if str(each.device_type).endswith("CUDA")]
    record_property("traced_kernels", on_device[:3])
    record_property("traced_calls", sorted({e.name for e in events if e.name.startswith("cuda")}))


@WITH_NCCL
def test_what_the_first_step_of_ranks_takes_beside_torch(
    record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("automicro.ranks.coordinated.open_exchange", exchange_over_gloo)
    before = held_outside_bytes()
    found = {}
    with group_of_one():
        found["by the group"] = held_outside_bytes() - before
        net = wrapped("ddp")
        found["by wrapping the model"] = held_outside_bytes() - before
        step = microbatcher(net, 4, probe=False)
        step.backward(batch())
        found["by the first step"] = held_outside_bytes() - before
        step.backward(batch())
        found["by the second"] = held_outside_bytes() - before
    record_property("held_bytes", {f"outside of torch, {k}": v for k, v in found.items()})


def test_a_small_step_works_at_all(record_property: Record) -> None:
    net: nn.Module = model()
    result = microbatcher(net, 4).backward(batch())
    record_property("result", str(result))
    assert bool(result.loss.isfinite())


VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
SETTINGS = ("expandable_segments:True", "backend:cudaMallocAsync")
READ_ALLOCATOR = """
import torch
torch.ones(1, device="cuda")
settings = getattr(torch._C, "_accelerator_getAllocatorSettings", str)  # torch 2.11 has none
print(torch.cuda.get_allocator_backend(), settings())
"""


@only_cuda("these settings of the allocator")
def test_which_variable_chooses_the_allocator(record_property: Record) -> None:
    others = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    processes = {
        f"{variable}={setting}": subprocess.Popen(
            [sys.executable, "-c", READ_ALLOCATOR],
            env={**others, variable: setting},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variable in VARIABLES
        for setting in SETTINGS
    }
    for name, process in processes.items():
        said, _ = process.communicate(timeout=60)
        record_property(name, said.strip()[-500:])
