"""``memory_limit`` on a device limits the share that the process may use."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import Trainer
from automicro.features import Optimization
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, MIB, accelerator, allocated_bytes, share_of_device
from tests.gpu.subjects import ROWS, SHAPE, batch, microbatcher, model

pytestmark = GPU

LIMIT = 320 * MIB * SHAPE[0] // 512
# A few segments of 20 MiB fit in addition to a model with its optimizer.
TRAINER_LIMIT = max(LIMIT, 80 * MIB)


def test_step_stays_within_memory_limit_then_limit_is_lifted() -> None:
    before = share_of_device()
    held_bytes = allocated_bytes()  # by earlier tests in this process
    net = model()
    limit = LIMIT + held_bytes
    step = microbatcher(net, memory_limit=limit)
    accelerator.empty_cache()
    result = step.backward(batch())
    assert result.ooms >= 1
    assert result.microbatch_size < ROWS
    assert accelerator.max_memory_allocated(DEVICE) <= limit
    assert share_of_device() == pytest.approx(before)


def test_trainer_recovers_from_oom_in_training_and_evaluation(record_property: Record) -> None:
    limit = TRAINER_LIMIT + allocated_bytes()
    inputs, targets = batch(16 * ROWS)
    rows = TensorDataset(inputs, targets)
    trainer = Trainer(
        model(),
        DataLoader(rows, batch_size=4 * ROWS, pin_memory=True),
        eval_dataloader=DataLoader(rows, batch_size=16 * ROWS),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        max_duration="2ep",
        device=DEVICE,
        memory_limit=limit,
        precision="bf16",
        features=[Optimization(grad_clip_norm=1.0)],
        seed=0,
        progress=False,
    )
    summary = trainer.fit()
    record_property("summary", str(summary))
    assert summary.steps == 8
    assert summary.train_ooms >= 1
    assert summary.eval_ooms >= 1
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= limit
