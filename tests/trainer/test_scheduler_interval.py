"""The interval at which a scheduler is stepped: after batches or epochs."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from automicro import CheckpointError
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.schedules import cosine_with_warmup
from tests.trainer.resume.runs import linear, trainer
from tests.trainer.runs import make_loader, make_model, make_trainer

BATCHES = 4


class Rates(Callback):
    """Records the learning rate of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def batch_start(self, run: Run, batch: Any) -> None:
        assert run.optimizer is not None
        self.seen.append(run.optimizer.param_groups[0]["lr"])


def rates_of(duration: str, **options: Any) -> list[float]:
    rates = Rates()
    make_trainer(
        make_model(),
        make_loader(rows=16 * BATCHES),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        max_duration=duration,
        callbacks=[rates],
        **options,
    ).fit()
    return rates.seen


halving = partial(torch_schedules.StepLR, step_size=1, gamma=0.5)


@pytest.mark.parametrize("kind", [halving, lambda optimizer: SimpleNamespace(step=print)])
def test_scheduler_without_interval_error_names_both_options(kind: Any) -> None:
    message = r"Pass scheduler_interval='batch' to step it after each .* or 'epoch' to"
    with pytest.raises(ValueError, match=message):
        rates_of("1ep", scheduler=kind, scheduler_interval=None)


def test_builtin_schedules_know_their_interval() -> None:
    ours = partial(cosine_with_warmup, warmup=2, total=4)
    assert rates_of("1ep", scheduler=ours, scheduler_interval=None)[:2] == [0.05, 0.1]
    with pytest.raises(ValueError, match=r"WarmupLR, which is stepped after every batch\. Leave"):
        rates_of("1ep", scheduler=ours, scheduler_interval="epoch")


@pytest.mark.parametrize("saved", ["batch", "epoch"])
def test_checkpoint_with_different_interval_is_refused(tmp_path: Path, saved: str) -> None:
    other = {"batch": "epoch", "epoch": "batch"}[saved]
    trainer(linear(), tmp_path, scheduler=halving, scheduler_interval=saved).fit()
    with pytest.raises(CheckpointError, match="StepLR, stepped after every epoch"):
        trainer(linear(), tmp_path, scheduler=halving, scheduler_interval=other).fit()
