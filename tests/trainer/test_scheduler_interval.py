"""After what a scheduler is stepped, and a warning where its numbers were made for epochs."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

from automicro import CheckpointError, SchedulerWarning, Trainer
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.schedules import cosine_with_warmup
from automicro.trainer.optimizer import Pace, describe_haste
from automicro.units import Duration
from tests.trainer.resume.runs import check_resumes, linear, trainer
from tests.trainer.runs import make_loader, make_model, make_trainer

BATCHES = 4


class Rates(Callback):
    """The learning rate of every step."""

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


def test_a_scheduler_may_be_stepped_after_every_epoch() -> None:
    seen = rates_of("3ep", scheduler=halving, scheduler_interval="epoch")
    assert seen == [0.1] * BATCHES + [0.05] * BATCHES + [0.025] * BATCHES


@pytest.mark.parametrize(("duration", "rate"), [("3ba", 0.1), ("4ba", 0.05), ("6ba", 0.05)])
def test_only_a_complete_epoch_steps_it(duration: str, rate: float) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_trainer(
        model,
        make_loader(rows=16 * BATCHES),
        optimizer=optimizer,
        scheduler=halving,
        scheduler_interval="epoch",
        max_duration=duration,
    ).fit()
    assert optimizer.param_groups[0]["lr"] == rate


def test_batches_are_the_default() -> None:
    assert rates_of("1ep", scheduler=halving) == [0.1, 0.05, 0.025, 0.0125]
    assert rates_of("1ep", scheduler=halving, scheduler_interval="batch")[-1] == 0.0125


def test_another_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler_interval='epochs'.*did you mean 'epoch'"):
        rates_of("1ep", scheduler_interval="epochs")


def test_a_run_resumes_between_any_two_batches(tmp_path: Path) -> None:
    def read(trainer: Trainer) -> float:
        assert trainer._run.optimizer is not None
        return float(trainer._run.optimizer.param_groups[0]["lr"])

    def options() -> dict[str, Any]:
        return {"scheduler": halving, "scheduler_interval": "epoch"}

    check_resumes(linear, tmp_path, options=options, read=read)


@pytest.mark.parametrize("saved", ["batch", "epoch"])
def test_a_checkpoint_of_the_other_interval_is_refused(tmp_path: Path, saved: str) -> None:
    other = {"batch": "epoch", "epoch": "batch"}[saved]
    trainer(linear(), tmp_path, scheduler=halving, scheduler_interval=saved).fit()
    with pytest.raises(CheckpointError, match="StepLR, stepped after every epoch"):
        trainer(linear(), tmp_path, scheduler=halving, scheduler_interval=other).fit()


Make = Callable[[torch.optim.Optimizer], Any]


def sequence(optimizer: torch.optim.Optimizer, warmup: int, total: int) -> Any:
    parts = [
        torch_schedules.LinearLR(optimizer, 0.1, total_iters=warmup),
        torch_schedules.CosineAnnealingLR(optimizer, total - warmup),
    ]
    return torch_schedules.SequentialLR(optimizer, parts, milestones=[warmup])


def of(name: str, **options: Any) -> Make:
    return partial(getattr(torch_schedules, name), **options)


# Schedules as public recipes have them, for epochs: with the batches of an epoch and the duration.
FOR_EPOCHS: dict[str, tuple[Make, int, str, str]] = {
    "a step an epoch": (of("StepLR", step_size=1), 8, "3ep", "falls from 0.1 to 1e-09 in 8 batc"),
    "in one epoch": (of("StepLR", step_size=1), 8, "1ep", r"StepLR\(step_size=1, gamma=0.1\)"),
    "in some batches": (of("StepLR", step_size=1), 100, "8ba", "1e-09 in 8 batches"),
    "gently": (of("StepLR", step_size=1, gamma=0.7), 938, "14ep", "in 938 batches"),
    "every 7 of 25": (of("StepLR", step_size=7), 61, "25ep", "1e-09 in 61 batches"),
    "every 30 of 90, large batches": (of("StepLR", step_size=30), 10, "90ep", "in 900 batches"),
    "milestones": (
        of("MultiStepLR", milestones=[30, 60, 80]),
        390,
        "90ep",
        "lowered for the last time after 80 of the 390 batches of the first epoch",
    ),
    "exponential": (of("ExponentialLR", gamma=0.95), 50, "20ep", "in 1000 batches"),
    "cosine over the epochs": (of("CosineAnnealingLR", T_max=10), 50, "10ep", "rises again"),
    "cosine, few batches": (of("CosineAnnealingLR", T_max=100), 4, "100ep", "after 100 batches"),
    "restarts": (
        of("CosineAnnealingWarmRestarts", T_0=10),
        50,
        "100ep",
        "starts over every 10 of the 50 batches of an epoch",
    ),
    "a line": (
        of("LinearLR", start_factor=1.0, end_factor=0.01, total_iters=20),
        50,
        "20ep",
        "from 0.1 to 0.001 in 20 batches, and stays there",
    ),
    "a power": (of("PolynomialLR"), 50, "5ep", "from 0.1 to 0 in 5 batches, and stays there"),
    "warm-up, then cosine": (
        partial(sequence, warmup=5, total=90),
        100,
        "90ep",
        r"CosineAnnealingLR\(T_max=85\)",
    ),
}

FOR_BATCHES: dict[str, tuple[Make, int, str]] = {
    "steps": (of("StepLR", step_size=100), 100, "3ep"),
    "many small steps": (of("StepLR", step_size=500, gamma=0.9), 100, "100ep"),
    "milestones": (of("MultiStepLR", milestones=[100, 300]), 100, "5ep"),
    "milestones in one epoch": (of("MultiStepLR", milestones=[300, 600]), 1000, "1ep"),
    "milestones of a part of an epoch": (of("MultiStepLR", milestones=[3, 6]), 1000, "8ba"),
    "one early milestone": (of("MultiStepLR", milestones=[2]), 100, "5ep"),
    "slow exponential": (of("ExponentialLR", gamma=0.9999), 1000, "50ep"),
    "fast enough": (of("ExponentialLR", gamma=0.99), 100, "5ep"),
    "growing": (of("ExponentialLR", gamma=1.1), 100, "5ep"),
    "cosine": (of("CosineAnnealingLR", T_max=500), 100, "5ep"),
    "cosine in batches": (of("CosineAnnealingLR", T_max=50), 1000, "50ba"),
    "cosine in one epoch": (of("CosineAnnealingLR", T_max=100), 100, "1ep"),
    "cosine over a whole batch": (of("CosineAnnealingLR", T_max=20), 1, "100ep"),
    "cosine, an epoch long": (of("CosineAnnealingLR", T_max=100), 100, "5ep"),
    "one cycle": (of("OneCycleLR", max_lr=0.1, total_steps=500), 100, "5ep"),
    "cyclic": (of("CyclicLR", base_lr=0.01, max_lr=0.1, step_size_up=20), 100, "5ep"),
    "restarts": (of("CosineAnnealingWarmRestarts", T_0=100), 100, "5ep"),
    "longer restarts": (of("CosineAnnealingWarmRestarts", T_0=2, T_mult=2), 100, "5ep"),
    "warm-up": (of("LinearLR", start_factor=0.1, total_iters=5), 100, "5ep"),
    "constant warm-up": (of("ConstantLR", factor=0.1, total_iters=5), 100, "5ep"),
    "a line": (of("LinearLR", start_factor=1, end_factor=0, total_iters=500), 100, "5ep"),
    "a power": (of("PolynomialLR", total_iters=500), 100, "5ep"),
    "warm-up, then cosine": (partial(sequence, warmup=20, total=500), 100, "5ep"),
    "a function": (of("LambdaLR", lr_lambda=lambda step: 0.95**step), 100, "5ep"),
    "warm-up of ours": (partial(cosine_with_warmup, warmup=10, total="500ba"), 100, "5ep"),
    "samples": (of("CosineAnnealingLR", T_max=5), 8, "100sp"),
}


def look(make: Make, per_epoch: int, duration: str) -> str | None:
    scheduler = make(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9))
    return describe_haste(scheduler, Pace.of(per_epoch, Duration.parse(duration)))


@pytest.mark.parametrize("name", FOR_EPOCHS)
def test_schedules_that_count_epochs_are_known(name: str) -> None:
    make, per_epoch, duration, told = FOR_EPOCHS[name]
    found = look(make, per_epoch, duration)
    assert found is not None
    assert re.search(told, found), found


@pytest.mark.parametrize("name", FOR_BATCHES)
def test_schedules_that_count_batches_are_left_alone(name: str) -> None:
    assert look(*FOR_BATCHES[name]) is None


def test_the_warning_comes_before_the_first_step_and_once() -> None:
    trainer = make_trainer(
        make_model(),
        make_loader(rows=16 * 9),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        scheduler=partial(torch_schedules.StepLR, step_size=1),
        max_duration="3ep",
    )
    message = r"stepped after every batch, and with StepLR\(step_size=1, gamma=0.1\) .*1e-10 in 9 "
    with pytest.warns(SchedulerWarning, match=message + ".*scheduler_interval='epoch'") as caught:
        trainer.fit()
    assert len(caught) == 1


def test_none_comes_where_epochs_step_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates_of(
            "5ep",
            scheduler=partial(torch_schedules.StepLR, step_size=1),
            scheduler_interval="epoch",
        )


@pytest.mark.parametrize(
    ("duration", "interval", "total_steps", "needed"),
    [("3ep", "batch", 8, 12), ("9ba", "batch", 8, 9), ("3ep", "epoch", 2, 3)],
)
def test_a_schedule_that_ends_before_the_run_is_named_before_the_first_batch(
    duration: str, interval: str, total_steps: int, needed: int
) -> None:
    trainer = make_trainer(
        make_model(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        scheduler=partial(torch_schedules.OneCycleLR, max_lr=0.1, total_steps=total_steps),
        scheduler_interval=interval,
        max_duration=duration,
    )
    with pytest.raises(
        SchedulerWarning,
        match=f"OneCycleLR ends after total_steps={total_steps}.* steps it {needed} times, .* give "
        f"it total_steps={needed}",
    ):
        trainer.fit()  # warnings are errors here
    assert trainer.state.batch == 0


def test_a_schedule_that_is_long_enough_is_left_alone_in_a_run_that_goes_on() -> None:
    trainer = make_trainer(
        make_model(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        scheduler=partial(torch_schedules.OneCycleLR, max_lr=0.1, total_steps=12),
        max_duration="2ep",
    )
    trainer.fit()
    trainer.fit("1ep")
    with pytest.raises(SchedulerWarning, match="total_steps=12, and the run steps it 13 times"):
        trainer.fit("1ba")
