"""Learning rate schedules with warm-up for the Trainer's ``scheduler``, stepped once per batch.

Each schedule is a factor on the base rates of the optimizer's groups, so their ratios stay the
same. The first of ``warmup`` steps uses ``1 / warmup`` of the base rate, the last one all of it.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from automicro.durations import Duration, Unit, read_duration
from automicro.errors import about
from automicro.options import read_count

Steps: TypeAlias = int | str | Duration


class WarmupLR(LambdaLR):
    """Learning rates as a function of the number of optimizer steps taken."""

    scheduler_interval = "batch"
    """Read by the `Trainer`, because torch's schedulers do not declare their unit."""


def constant_with_warmup(optimizer: Optimizer, *, warmup: Steps) -> WarmupLR:
    """Rise to the base rate and stay there.

    Args:
        optimizer: the optimizer to schedule.
        warmup: optimizer steps: an int, or text such as ``"50ba"``.

    Raises:
        TypeError, ValueError: ``warmup`` is not a number of steps.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    >>> constant_with_warmup(optimizer, warmup=4).get_last_lr()
    [0.025]
    """
    rise = _read_steps("warmup", warmup, at_least=0)
    return WarmupLR(optimizer, _after_warmup(rise, lambda step: 1.0))


def linear_with_warmup(
    optimizer: Optimizer, *, warmup: Steps | float, total: Steps, final: float = 0.0
) -> WarmupLR:
    """Rise to the base rate, then fall linearly.

    Args:
        optimizer: the optimizer to schedule.
        warmup: optimizer steps: an int, text such as ``"50ba"``, or a fraction of ``total`` as a
            float.
        total: steps until the end of the fall, warm-up included: an int, or text.
        final: fraction of the base rate reached after ``total`` steps, and kept.

    Raises:
        TypeError, ValueError: an invalid number of steps, a warm-up longer than ``total``, or a
            ``final`` outside [0, 1].

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    >>> scheduler = linear_with_warmup(optimizer, warmup=2, total="6ba")
    >>> rates = []
    >>> for _ in range(7):
    ...     rates.append(round(scheduler.get_last_lr()[0], 6))
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0]
    """
    return _falling(optimizer, warmup, total, final, lambda share: 1 - share)


def cosine_with_warmup(
    optimizer: Optimizer, *, warmup: Steps | float, total: Steps, final: float = 0.0
) -> WarmupLR:
    """Rise to the base rate, then fall along half a cosine wave (Loshchilov and Hutter, 2017).

    Args:
        optimizer: the optimizer to schedule.
        warmup: optimizer steps: an int, text such as ``"50ba"``, or a fraction of ``total`` as a
            float.
        total: steps until the end of the fall, warm-up included: an int, or text.
        final: fraction of the base rate reached after ``total`` steps, and kept.

    Raises:
        TypeError, ValueError: an invalid number of steps, a warm-up longer than ``total``, or a
            ``final`` outside [0, 1].

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> scheduler = cosine_with_warmup(optimizer, warmup=0, total="4ba", final=0.1)
    >>> rates = []
    >>> for _ in range(5):
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [1.0, 0.868, 0.55, 0.232, 0.1]
    """
    return _falling(
        optimizer, warmup, total, final, lambda share: (1 + math.cos(math.pi * share)) / 2
    )


def inverse_sqrt_with_warmup(optimizer: Optimizer, *, warmup: Steps) -> WarmupLR:
    """Rise to the base rate, then fall with the inverse square root of the step.

    The schedule of Vaswani et al. (2017), which needs no total.

    Args:
        optimizer: the optimizer to schedule.
        warmup: optimizer steps, at least 1: an int, or text such as ``"50ba"``.

    Raises:
        TypeError, ValueError: ``warmup`` is not a number of steps.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> inverse_sqrt_with_warmup(optimizer, warmup="50ba").get_last_lr()
    [0.02]
    """
    rise = _read_steps("warmup", warmup, at_least=1)
    return WarmupLR(optimizer, _after_warmup(rise, lambda step: math.sqrt(rise / (step + 1))))


def _read_steps(name: str, value: Steps, *, at_least: int) -> int:
    """Return a number of optimizer steps, given as an int or as a duration in batches."""
    with about(name):
        if not isinstance(value, str | Duration):
            return read_count(name, value, least=at_least)
        duration = read_duration(name, value)
        if duration.unit is not Unit.BATCHES:
            raise ValueError(
                f"{name}={str(value)!r} counts {duration.unit.name.lower()}, which cannot be "
                "converted to optimizer steps here. Give a whole number of at least "
                f"{at_least}, or text such as '50ba' (batches)"
            )
    return duration.value


def _falling(
    optimizer: Optimizer,
    warmup: Steps | float,
    total: Steps,
    final: float,
    shape: Callable[[float], float],
) -> WarmupLR:
    end = _read_steps("total", total, at_least=1)
    if isinstance(warmup, float):
        if not 0 <= warmup < 1:
            raise ValueError(
                f"warmup={warmup} is not a share of the total: give a number from 0 to below 1, or "
                "whole optimizer steps as an int or text such as '50ba'"
            )
        rise = round(warmup * end)
    else:
        rise = _read_steps("warmup", warmup, at_least=0)
    if rise > end:
        raise ValueError(
            f"the warm-up of {rise} steps is longer than the total of {end}: lower warmup, or "
            "raise total"
        )
    is_text = not isinstance(final, int | float)
    if isinstance(final, bool) or is_text or not 0 <= final <= 1:
        raise ValueError(
            f"final={final!r} is not a fraction of the base rate: give a number from 0 to 1"
        )

    def fall(step: int) -> float:
        # This also covers a warm-up of all steps, which would divide by zero below.
        if step >= end:
            return final
        return final + (1 - final) * shape((step - rise) / (end - rise))

    return WarmupLR(optimizer, _after_warmup(rise, fall))


def _after_warmup(rise: int, then: Callable[[int], float]) -> Callable[[int], float]:
    # A function, because LambdaLR would save an object's values, and a resumed run with a different
    # total would silently keep the old one.
    def factor(step: int) -> float:
        # One ahead, because a rate of 0 would waste the first step.
        return (step + 1) / rise if step < rise else then(step)

    return factor
