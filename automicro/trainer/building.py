"""Optimizers and schedulers: given, or built once the model is on its device."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from automicro.checks import check_optimizer

Optimizer: TypeAlias = torch.optim.Optimizer
OptimizerOrFactory: TypeAlias = Optimizer | Callable[[list[nn.Parameter]], Optimizer]
SchedulerOrFactory: TypeAlias = torch.optim.lr_scheduler.LRScheduler | Callable[[Optimizer], Any]


def build_optimizer(
    optimizer: OptimizerOrFactory | None, model: nn.Module, modules: list[nn.Module]
) -> Optimizer | None:
    """The optimizer, built from the model's parameters where a callable was given.

    Raises:
        TypeError: neither an optimizer nor something that makes one.
        ValueError: an optimizer of another model.

    >>> model = nn.Linear(2, 2)
    >>> type(build_optimizer(torch.optim.AdamW, model, [model])).__name__
    'AdamW'
    """
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        made = optimizer(list(model.parameters()))
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"optimizer={optimizer!r} made a {type(made).__name__} of the model's parameters, "
                "not a torch.optim.Optimizer; return the optimizer"
            )
        optimizer = made
    check_optimizer(optimizer, modules)
    return optimizer


def build_scheduler(scheduler: SchedulerOrFactory | None, optimizer: Optimizer | None) -> Any:
    """The scheduler, built from the optimizer where a callable was given.

    Raises:
        TypeError: nothing that can be stepped after each batch.
        ValueError: no optimizer to schedule, or the scheduler of another one.

    >>> optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    >>> build_scheduler(torch.optim.lr_scheduler.ConstantLR, optimizer).get_last_lr()
    [0.000333...]
    """
    if scheduler is None:
        return None
    if optimizer is None:
        raise ValueError("a scheduler was given and no optimizer to schedule; pass optimizer=…")
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, type):
        if not callable(scheduler):
            raise TypeError(
                f"scheduler is a {type(scheduler).__name__}; pass an instance such as "
                "torch.optim.lr_scheduler.StepLR(optimizer, 30), or a callable that makes one of "
                "the optimizer"
            )
        scheduler = scheduler(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau steps on a measured value, and the scheduler is stepped after each "
            "optimizer step without one; use a schedule over steps, such as CosineAnnealingLR"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"the callable given as scheduler made a {type(scheduler).__name__}, which has no "
            "step method; return a scheduler of torch.optim.lr_scheduler"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "the scheduler belongs to another optimizer; build it from the one given as "
            "optimizer=…, or pass a callable that takes the optimizer"
        )
    return scheduler
