"""Optimizers and schedulers: given, or built once the model is on its device."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from automicro.checks import check_modules, check_optimizer, innermost_optimizer
from automicro.origins import comes_from
from automicro.trainer.arguments import read_flag
from automicro.trainer.memory_format import to_channels_last
from automicro.trainer.parameter_groups import (
    ParameterGroups,
    check_group_options,
    group_parameters,
)
from automicro.warn import warn

Optimizer: TypeAlias = torch.optim.Optimizer
OptimizerOrFactory: TypeAlias = Optimizer | Callable[[list[Any]], Optimizer]
SchedulerOrFactory: TypeAlias = torch.optim.lr_scheduler.LRScheduler | Callable[[Optimizer], Any]


def gather_modules(
    model: nn.Module, modules: Iterable[nn.Module], loss_fn: object
) -> list[nn.Module]:
    """The model, then further modules, then the loss where it is a module that holds something.

    >>> len(gather_modules(nn.Linear(2, 2), [], nn.CrossEntropyLoss(weight=torch.ones(2))))
    2
    """
    gathered = [model, *check_modules(modules)]
    if isinstance(loss_fn, nn.Module) and not any(loss_fn is each for each in gathered):
        holds = next(itertools.chain(loss_fn.parameters(), loss_fn.buffers()), None)
        gathered += [] if holds is None else [loss_fn]
    return gathered


def place_modules(
    modules: Sequence[nn.Module], device: torch.device, *, channels_last: bool
) -> None:
    """Move a model and whatever takes part to a device, before an optimizer is built of it.

    Args:
        modules: the model, then further modules.
        device: where to.
        channels_last: whether weights of convolutions get the channels last in memory.

    Raises:
        ValueError: nothing in them has channels.

    >>> place_modules([nn.Linear(2, 2)], torch.device("cpu"), channels_last=False)
    """
    for module in modules:
        module.to(device)
    if read_flag("channels_last", channels_last):
        to_channels_last(*modules)


def build_optimizer(
    optimizer: OptimizerOrFactory | None,
    model: nn.Module,
    modules: list[nn.Module],
    groups: ParameterGroups = (),
    loss_fn: object = None,
) -> Optimizer | None:
    """The optimizer, built from the model's parameters where a callable was given.

    Args:
        optimizer: an optimizer, or what makes one of a list of parameters or parameter groups.
        model: whose parameters they are.
        modules: the model, then further modules that an optimizer may have parameters of.
        groups: see `group_parameters`; none hands over a plain list of parameters.
        loss_fn: may have parameters of its own, which an optimizer of the model leaves out.

    Raises:
        TypeError: neither an optimizer nor something that makes one.
        ValueError: an optimizer of another model, or groups that do not fit.

    Warns:
        UserWarning: the loss has parameters that nobody trains.

    >>> model = nn.Linear(2, 2)
    >>> type(build_optimizer(torch.optim.AdamW, model, [model])).__name__
    'AdamW'
    """
    if groups and (optimizer is None or isinstance(optimizer, Optimizer)):
        raise ValueError(
            "parameter_groups sorts the parameters for an optimizer that is still to be built; "
            "pass optimizer= as a callable such as torch.optim.AdamW, or build the optimizer with "
            "groups of its own"
        )
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        made = optimizer(group_parameters(model, groups) if groups else list(model.parameters()))
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"optimizer={optimizer!r} made a {type(made).__name__} of the model's parameters, "
                "not a torch.optim.Optimizer; return the optimizer"
            )
        optimizer = made
        check_group_options(optimizer, groups)
    innermost = check_optimizer(optimizer, modules)
    if _only_hands_on(optimizer):
        optimizer = innermost
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__} around a {type(innermost).__name__}, and "
            "no torch.optim.Optimizer itself, which the Trainer steps and saves; pass the one "
            "inside of it"
        )
    if optimizer is not None and isinstance(loss_fn, nn.Module):
        _warn_of_untrained(loss_fn, optimizer)
    return optimizer


def _only_hands_on(optimizer: object) -> bool:
    """Whether it is a wrapper for another trainer's loop, whose step adds nothing in this one."""
    return comes_from(
        optimizer,
        "accelerate.AcceleratedOptimizer",
        "lightning.LightningOptimizer",
        "pytorch_lightning.LightningOptimizer",
    )


def _warn_of_untrained(loss_fn: nn.Module, optimizer: Optimizer) -> None:
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    left_out = [
        name
        for name, each in loss_fn.named_parameters()
        if each.requires_grad and id(each) not in trained
    ]
    if left_out:
        warn(
            f"{type(loss_fn).__name__} has parameters that the optimizer does not have: "
            f"{', '.join(left_out[:5])}{', …' * (len(left_out) > 5)}. To train them, build the "
            "optimizer of [*model.parameters(), *loss_fn.parameters()] and pass it; else freeze "
            "them with loss_fn.requires_grad_(False)",
            UserWarning,
        )


def _make_scheduler(make: Callable[[Optimizer], Any], optimizer: Optimizer) -> Any:
    try:
        return make(optimizer)
    except AttributeError as error:
        if error.obj is optimizer and error.name in ("timestamp", "max_duration"):
            raise TypeError(
                f"scheduler={make!r} reads {error.name!r}, as a function of Composer's state does, "
                "and was given the optimizer; let it be a subclass of "
                "composer.optim.ComposerScheduler, or write it as "
                "lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of_step)"
            ) from error
        raise


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
        scheduler = _make_scheduler(scheduler, optimizer)
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
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        scheduled = getattr(scheduler, "optimizer", optimizer)
    else:  # accelerate's wrapper holds the scheduler, and several optimizers
        scheduled = getattr(getattr(scheduler, "scheduler", scheduler), "optimizer", optimizer)
    if innermost_optimizer(scheduled) is not innermost_optimizer(optimizer):
        raise ValueError(
            "the scheduler belongs to another optimizer; build it from the one given as "
            "optimizer=…, or pass a callable that takes the optimizer"
        )
    return scheduler
