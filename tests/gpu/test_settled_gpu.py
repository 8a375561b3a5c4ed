"""A step that has found its size: how often it waits for the device, and allocates memory."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import Trainer
from automicro.features import with_features
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, accelerator, pinned, to_device
from tests.gpu.subjects import ROWS, batch, microbatcher, model
from tests.gpu.traces import Traced, traced

pytestmark = GPU

# Batches in which sizes are found and checks are due.
WARM_UP = 6


PLACES: dict[str, Callable[..., Any]] = {
    "device": to_device,
    "pinned": pinned,
    "pageable": lambda rows: rows,
}


def note(record: Record, name: str, seen: Traced) -> None:
    record("waits", {name: seen.waits})
    record(
        "traced",
        {
            "calls": seen.calls,
            "segments": seen.segments,
            "µs in copies": seen.copying_us,
            "idle share": seen.idle_share,
        },
    )


@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("place", PLACES)
def test_a_settled_step_takes_no_memory_of_the_device(
    place: str, size: Any, record_property: Record
) -> None:
    net = model()
    step = microbatcher(net, size)
    for seed in range(WARM_UP):
        step.backward(PLACES[place](batch(seed=seed)))
        net.zero_grad()
    rows = PLACES[place](batch(seed=WARM_UP))
    seen = traced(lambda: step.backward(rows))
    note(record_property, f"Microbatcher, {size}, batch {place}", seen)
    assert seen.segments == 0
    if place != "pageable":
        assert seen.waits == 0


def trainer_of(batches: int, **options: Any) -> Trainer:
    inputs, targets = batch(batches * ROWS)
    return Trainer(
        model(),
        DataLoader(TensorDataset(inputs, targets), batch_size=ROWS, pin_memory=True),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        max_duration="1ep",
        device=DEVICE,
        microbatch_size=4,
        progress=False,
        **with_features(options),
    )


TRAINERS: dict[str, dict[str, Any]] = {
    "default": {},
    "fp16": {"precision": "fp16"},
    "bf16, clipped": {"precision": "bf16", "grad_clip_norm": 1.0},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_batches_of_a_trainer_wait_as_often_each(name: str, record_property: Record) -> None:
    """Two runs, one of them longer: the difference is the waits of its additional batches."""
    few, many = (11, 15) if DEVICE.type == "cuda" else (2, 3)
    found = []
    # The first run creates the permanent state of libraries. Its device memory is free at once.
    # Without the collector, which would free objects of other tests at any time.
    gc.disable()
    try:
        for batches in (few, few, many):
            found.append(traced(trainer_of(batches, **TRAINERS[name]).fit))
    finally:
        gc.enable()
    more = found[2].waits - found[1].waits
    record_property("waits", {f"Trainer, {name}, a batch": more / (many - few)})
    record_property("calls", found[2].calls and found[2].calls[-8:])
    assert more <= 3 * (many - few)
    assert found[2].segments <= found[1].segments


def test_a_step_that_reads_a_value_is_seen_to_wait() -> None:
    value = torch.ones((), device=DEVICE)
    accelerator.synchronize(DEVICE)
    assert traced(lambda: value.add(1).item()).waits >= 1
