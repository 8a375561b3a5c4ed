"""Running out of memory repeatedly leaves no trace. The last part of `make gpu`."""

import time
from collections import Counter

import torch

from automicro import Fixed, Halving
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, MIB, accelerator, allocated_bytes, room, to_device
from tests.gpu.subjects import ROWS, Hungry, batch, microbatcher, model
from tests.outside import Outside

pytestmark = GPU

FAILURES = 1000 if DEVICE.type == "cuda" else 30


def test_thousand_consecutive_ooms_leak_no_memory(record_property: Record) -> None:
    net = model(Hungry(0, 8))
    step = microbatcher(net)
    rows = to_device(batch())
    now = Outside(phase="outside")
    net.register_forward_pre_hook(lambda *_: setattr(now, "phase", "forward"))
    net.register_forward_hook(lambda *_: setattr(now, "phase", "backward"))

    def call(policy: Fixed | Halving) -> int:
        step._train.policy = policy
        try:
            return step.backward(rows).ooms
        finally:
            net.zero_grad()

    peaks = {}
    for size in (1, ROWS):  # also, libraries create their permanent state
        call(Fixed(size))
        accelerator.reset_peak_memory_stats(DEVICE)
        before_bytes = allocated_bytes()
        call(Fixed(size))
        peaks[size] = accelerator.max_memory_allocated(DEVICE) - before_bytes
    baseline_bytes = allocated_bytes()
    ooms, calls, phases, most_alive_bytes = 0, 0, Counter[str](), 0
    start = time.perf_counter()
    while ooms < FAILURES and calls < 4 * FAILURES:
        is_raised = ooms < FAILURES // 2
        least = 0 if is_raised else peaks[1] + 64 * MIB
        share = calls * 31 % 97 / 97  # a different point of the step each time
        calls += 1
        now.phase = "outside"
        with room(int(least + (0.95 * peaks[ROWS] - least) * share)):
            try:
                ooms += call(Fixed(None) if is_raised else Halving())
            except torch.OutOfMemoryError:
                ooms += 1
                phases[now.phase] += 1
        accelerator.synchronize(DEVICE)
        alive_bytes = accelerator.memory_allocated(DEVICE) - baseline_bytes
        most_alive_bytes = max(most_alive_bytes, alive_bytes)
    record_property("ooms", ooms)
    record_property("calls", calls)
    record_property("phases", dict(phases))
    record_property("ms_per_oom", round((time.perf_counter() - start) / ooms * 1e3, 2))
    record_property("most_bytes_alive", most_alive_bytes)
    assert ooms >= FAILURES
    assert phases["forward"] > 0
    assert phases["backward"] > 0
    assert most_alive_bytes == 0
