"""Training that runs out of memory and continues."""

import gc
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from automicro import CheckpointConfig, MemoryBudget, OptimizerStepError, Trainer
from automicro.callbacks import EarlyStopping, ExponentialMovingAverage
from automicro.features import RememberSizes
from tests.trainer.runs import (
    CLASSES,
    assert_same,
    losses_of,
    make_loader,
    make_model,
    make_trainer,
)


def under_limit(limit: str | None, **options: Any) -> tuple[Trainer, nn.Module, list[float]]:
    model = make_model(dropout=0.2)
    loader = make_loader(rows=300, batch_size=256)
    trainer = make_trainer(
        model,
        loader,
        eval_dataloader=make_loader(rows=600, batch_size=600),
        metrics={"accuracy": MulticlassAccuracy(CLASSES, average="micro")},
        max_duration="2ep",
        seed=3,
        memory_limit=limit,
        **options,
    )
    return trainer, model, losses_of(trainer)


def test_run_recovers_from_out_of_memory_in_train_and_eval() -> None:
    small, model, losses = under_limit("256KiB")
    summary = small.fit()
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.microbatch_size < 256
    assert summary.eval_microbatch_size is not None
    assert summary.microbatch_size < summary.eval_microbatch_size < 600
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= 256 * 1024
    # Without a limit, a run at the same sizes must be bit-identical.
    large, expected, expected_losses = under_limit(
        None,
        microbatch_size=summary.microbatch_size,
        eval_microbatch_size=summary.eval_microbatch_size,
    )
    unlimited = large.fit()
    assert losses == expected_losses
    assert_same(model, expected)
    assert summary.train_metrics == unlimited.train_metrics
    assert summary.eval_metrics == unlimited.eval_metrics
    assert (unlimited.train_ooms, unlimited.eval_ooms) == (0, 0)


def test_memory_limit_includes_optimizer_step() -> None:
    class Hungry(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.zeros(2**16)
            return super().step(closure)

    model, untrained = make_model(), make_model()
    with pytest.raises(OptimizerStepError, match="half applied") as raised:
        make_trainer(model, optimizer=Hungry, memory_limit="128KiB").fit()
    assert_same(model, untrained)
    assert "in training, epoch 1, batch 1 of the epoch" in raised.value.__notes__[-1]


def test_active_memory_budget_is_used() -> None:
    with MemoryBudget("200KiB") as budget:
        loader = make_loader(rows=512, batch_size=512)
        summary = make_trainer(make_model(), loader, probe=False).fit()  # checks run out, too
    assert summary.train_ooms == budget.num_ooms > 0


def test_model_larger_than_limit_is_named_as_reason() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        make_trainer(make_model(), memory_limit="4KiB").fit()
    assert "the model and the optimizer's state alone exceed" in raised.value.__notes__[0]


RELEASED: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16, clipped": {"precision": "bf16", "grad_clip_norm": 1.0},
    "progress": {"progress": True},
    "saved": {"checkpoint": CheckpointConfig(folder="checkpoints")},
    "callbacks": {"callbacks": [ExponentialMovingAverage(decay=0.9), EarlyStopping()]},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("saved", "callbacks") else pytest.mark.sweep)
        for name in RELEASED
    ],
)
def test_trainer_memory_is_freed_when_unreferenced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory must be free at once: the next trainer of a search cannot wait for the collector."""
    monkeypatch.chdir(tmp_path)

    def run() -> tuple[weakref.ref[nn.Module], int]:
        model = make_model()
        trainer = make_trainer(
            model,
            make_loader(rows=300, batch_size=256),
            eval_dataloader=make_loader(rows=600, batch_size=600),
            metrics={"accuracy": MulticlassAccuracy(CLASSES)},
            memory_limit="192KiB",
            features=[RememberSizes(False)],  # so the second run also fails
            **deepcopy(RELEASED[name]),
        )
        return weakref.ref(model), trainer.fit().train_ooms

    run()  # lazy imports in torch keep references to the frames of the first run
    gc.collect()
    gc.disable()
    try:
        model, num_ooms = run()
        assert num_ooms
        assert model() is None
    finally:
        gc.enable()
