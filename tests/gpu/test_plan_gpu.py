"""Planned peaks match those counted by the device's allocator."""

import gc

import pytest
import torch
from torch import Tensor, nn

import automicro
from automicro import Microbatcher
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, accelerator, only_cuda, start_cublas

pytestmark = GPU

# With this many rows, the few MiB that kernels allocate are a small part of the peak.
ROWS = 256
LOSS = nn.CrossEntropyLoss()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 10))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((2, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(nn.Unflatten(1, (2, 16, 16)), *layers, nn.Flatten(), nn.Linear(16384, 10))


def attention() -> nn.Module:
    layers = (
        nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True) for _ in range(2)
    )
    return nn.Sequential(
        nn.Unflatten(1, (128, 4)), nn.Linear(4, 64), *layers, nn.Flatten(), nn.Linear(8192, 10)
    )


SUBJECTS = {"perceptron": perceptron, "convolutions": convolutions, "attention": attention}


def planned(name: str, precision: str) -> tuple[automicro.PlanReport, tuple[Tensor, Tensor]]:
    """Return the plan of a subject, and its batch."""
    data = torch.randn(ROWS * 2, 512), torch.randint(10, (ROWS * 2,))
    report = automicro.plan(
        SUBJECTS[name](),
        data,
        loss_fn=LOSS,
        optimizer=torch.optim.AdamW,
        precision=precision,
        microbatch_size=ROWS,
        device="cuda",
    )
    return report, data


@only_cuda("kernels that a plan knows")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_measured_peak_is_within_plan_and_close_to_it(
    name: str, precision: str, record_property: Record
) -> None:
    report, data = planned(name, precision)
    start_cublas()
    gc.collect()
    before = accelerator.memory_allocated(DEVICE)
    model = SUBJECTS[name]().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    microbatcher = Microbatcher(
        model, loss_fn=LOSS, optimizer=optimizer, microbatch_size=ROWS, precision=precision,
        batchnorm="ignore", probe=False,
    )  # fmt: skip
    for _ in range(2):
        accelerator.reset_peak_memory_stats(DEVICE)
        microbatcher.backward(data)
        optimizer.step()
        optimizer.zero_grad()
    real_bytes = accelerator.max_memory_allocated(DEVICE) - before
    record_property("plan_over_real", report.peak_bytes / real_bytes)
    assert real_bytes <= report.needed_bytes
    assert report.peak_bytes == pytest.approx(real_bytes, rel=0.15)
