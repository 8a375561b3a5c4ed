"""Warm-up schedules match learning rates computed by hand."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from automicro.durations import Duration
from automicro.schedules import (
    constant_with_warmup,
    cosine_with_warmup,
    inverse_sqrt_with_warmup,
    linear_with_warmup,
)
from tests.trainer.runs import assert_same, make_loader, make_model, make_trainer, train_by_hand


def rates(schedule: Any, steps: int, **options: Any) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, **options)
    taken = []
    for _ in range(steps):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return taken


HALF = math.sqrt(0.5)
LINEAR = [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]
BY_HAND: list[tuple[Any, dict[str, Any], list[float]]] = [
    (constant_with_warmup, {"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    (constant_with_warmup, {"warmup": 0}, [1, 1]),
    (linear_with_warmup, {"warmup": 2, "total": 6}, LINEAR),
    (linear_with_warmup, {"warmup": "2 ba", "total": Duration.parse("6ba")}, LINEAR),
    (linear_with_warmup, {"warmup": 0.1, "total": 3, "final": 0.1}, [1, 0.7, 0.4, 0.1, 0.1]),
    (
        cosine_with_warmup,
        {"warmup": 1 / 3, "total": 6},
        [0.5, 1, 1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0],
    ),
    (cosine_with_warmup, {"warmup": 1, "total": 3, "final": 0.2}, [1, 1, 0.6, 0.2, 0.2]),
    (cosine_with_warmup, {"warmup": 2, "total": 2}, [0.5, 1, 0]),
    (linear_with_warmup, {"warmup": 0.0, "total": 2, "final": 1}, [1, 1, 1]),
    (
        inverse_sqrt_with_warmup,
        {"warmup": 2},
        [0.5, 1, math.sqrt(2 / 3), HALF, math.sqrt(2 / 5)],
    ),
]


@pytest.mark.parametrize(("schedule", "options", "expected"), BY_HAND)
def test_rates_match_values_computed_by_hand(
    schedule: Any, options: dict[str, Any], expected: list[float]
) -> None:
    assert rates(schedule, len(expected), **options) == pytest.approx(expected, abs=1e-12)


def test_trainer_steps_schedule_once_per_optimizer_step() -> None:
    schedule = functools.partial(cosine_with_warmup, warmup="2ba", total="8ba", final=0.1)
    ours, theirs = make_model(), make_model()
    train_by_hand(theirs, make_loader(), epochs=2, schedule=schedule)
    trainer = make_trainer(ours, scheduler=schedule, max_duration="2ep", microbatch_size=None)
    trainer.fit()
    assert trainer.state.batch == 8
    assert_same(ours, theirs)
