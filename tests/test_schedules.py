"""Warm-up schedules match learning rates computed by hand."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from automicro.durations import Duration
from automicro.schedules import (
    constant_with_warmup,
    cosine_with_warmup,
    inverse_sqrt_with_warmup,
    linear_with_warmup,
)
from tests.trainer.runs import assert_same, make_loader, make_model, make_trainer, train_by_hand

Schedule = Callable[[Optimizer], LambdaLR]


def make_optimizer(*rates: float) -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)]
    return SGD(groups)


def rates(schedule: Schedule, steps: int, *, of: Optimizer | None = None) -> list[list[float]]:
    """Return the learning rates of all groups at each step."""
    optimizer = of or make_optimizer()
    scheduler = schedule(optimizer)
    taken = []
    for _ in range(steps):
        taken.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return taken


def of_one(schedule: Any, steps: int, **options: Any) -> list[float]:
    return [rate for (rate,) in rates(functools.partial(schedule, **options), steps)]


HALF = math.sqrt(0.5)
BY_HAND: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "constant": (constant_with_warmup, {"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    "constant without warm-up": (constant_with_warmup, {"warmup": 0}, [1, 1]),
    "linear": (
        linear_with_warmup,
        {"warmup": 2, "total": 6},
        [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0],
    ),
    "linear to a tenth": (
        linear_with_warmup,
        {"warmup": 0, "total": 3, "final": 0.1},
        [1, 0.7, 0.4, 0.1, 0.1],
    ),
    "cosine": (
        cosine_with_warmup,
        {"warmup": 2, "total": 6},
        [0.5, 1, 1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0],
    ),
    "cosine to a fifth": (
        cosine_with_warmup,
        {"warmup": 1, "total": 3, "final": 0.2},
        [1, 1, 0.6, 0.2, 0.2],
    ),
    "warm-up only": (cosine_with_warmup, {"warmup": 2, "total": 2}, [0.5, 1, 0]),
    "constant final rate": (linear_with_warmup, {"warmup": 0, "total": 2, "final": 1}, [1, 1, 1]),
    "inverse square root": (
        inverse_sqrt_with_warmup,
        {"warmup": 2},
        [0.5, 1, math.sqrt(2 / 3), HALF, math.sqrt(2 / 5)],
    ),
}


@pytest.mark.parametrize(("schedule", "options", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_rates_match_values_computed_by_hand(
    schedule: Any, options: dict[str, Any], expected: list[float]
) -> None:
    assert of_one(schedule, len(expected), **options) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        functools.partial(constant_with_warmup, warmup=10),
        functools.partial(linear_with_warmup, warmup=10, total=30),
        functools.partial(cosine_with_warmup, warmup=10, total=30),
        functools.partial(inverse_sqrt_with_warmup, warmup=10),
    ],
)
def test_rates_stay_positive_and_peak_at_base_rate(
    schedule: Schedule,
) -> None:
    taken = [rate for (rate,) in rates(schedule, 30)]
    assert min(taken) > 0
    assert taken[0] == pytest.approx(0.1)
    assert max(taken) == taken[9] == 1


@pytest.mark.parametrize("steps", ["4ba", "4 ba", Duration.parse("4ba")])
def test_steps_may_be_duration_in_batches(steps: Any) -> None:
    as_int = of_one(linear_with_warmup, 8, warmup=4, total=8)
    assert of_one(linear_with_warmup, 8, warmup=steps, total="8ba") == as_int


@pytest.mark.parametrize(("share", "total", "steps"), [(0.1, 30, 3), (0.1, 3, 0), (0.0, 5, 0)])
def test_warmup_may_be_share_of_total(share: float, total: int, steps: int) -> None:
    by_share = of_one(cosine_with_warmup, total, warmup=share, total=total)
    assert by_share == of_one(cosine_with_warmup, total, warmup=steps, total=total)


def test_trainer_steps_schedule_once_per_optimizer_step() -> None:
    schedule = functools.partial(cosine_with_warmup, warmup="2ba", total="8ba", final=0.1)
    ours, theirs = make_model(), make_model()
    train_by_hand(theirs, make_loader(), epochs=2, schedule=schedule)
    trainer = make_trainer(ours, scheduler=schedule, max_duration="2ep", microbatch_size=None)
    trainer.fit()
    assert trainer.state.batch == 8
    assert_same(ours, theirs)
