"""From a gradient that is complete to one optimizer step: clipped once, applied once.

Both write in place. Where memory runs out in between, no one can tell what was written, so neither
is tried again: an `OptimizerStepError` says so.
"""

import functools

import torch
from torch import Tensor, nn

from automicro.optimizer.scaling import GradientScaler, write_in_place
from automicro.ranks.interface import OneRank, Ranks
from automicro.sharding import has_shards, local, norm_of_all, squares_by_layout

_HALF_APPLIED = (
    "clipping the gradient ran out of memory and may be half applied: some gradients may be scaled "
    "and others not. Parameters and optimizer state are as before: clear the gradients and leave "
    "this batch out, or continue from a checkpoint."
)


def clip_gradients(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    device: torch.device,
    *,
    ranks: Ranks | None = None,
) -> Tensor:
    """Scale all gradients of an optimizer to a norm of at most this; return the norm before.

    Bit-identical to ``torch.nn.utils.clip_grad_norm_``. Of gradients that are sharded over ranks
    the norm is that of the whole: all ranks call it, and one that fails has to tell the others
    with ``ranks.fail``, who wait for it before they communicate.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> clip_gradients(optimizer, 1.0, torch.device("cpu")).item()
        5.0

    Raises:
        OptimizerStepError: memory ran out and gradients may be half scaled. The optimizer has not
            stepped.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if has_shards(parameters):
        return _clip_shards(parameters, max_norm, device, ranks or OneRank())
    return write_in_place(
        lambda: nn.utils.clip_grad_norm_(parameters, max_norm), device, _HALF_APPLIED
    )


def _clip_shards(
    parameters: list[nn.Parameter], max_norm: float, device: torch.device, ranks: Ranks
) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]

    def clip() -> Tensor:
        own = squares_by_layout(gradients)
        ranks.ready("clipping the gradient")
        with ranks.voted():
            norm = norm_of_all(own)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch has it
        for gradient in gradients:
            part = local(gradient)
            part.mul_(factor.to(part.dtype))
        return norm

    return write_in_place(clip, device, _HALF_APPLIED)


def step_optimizer(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    scaler: GradientScaler | None = None,
) -> bool:
    """Step once; with a scaler also unscale, if that is still to be done, and update the scale.

    Returns whether the optimizer stepped: a scaler leaves out gradients that overflowed.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> step_optimizer(torch.optim.SGD([weight], lr=0.5), torch.device("cpu"))
        True
        >>> weight.tolist()
        [0.5, 0.5]

    Raises:
        OptimizerStepError: memory ran out and the step may be half applied.
    """
    if scaler is not None:
        scaler.unscale(optimizer)
    has_stepped = write_in_place(
        functools.partial(_step, optimizer, scaler),
        device,
        f"{type(optimizer).__name__}.step() ran out of memory and may be half applied: some "
        "parameters or states may have changed. Continue from a checkpoint, with foreach=False or "
        "an optimizer with less state.",
    )
    if scaler is not None:
        scaler.update()
    return has_stepped


def _step(optimizer: torch.optim.Optimizer, scaler: GradientScaler | None) -> bool:
    if scaler is not None:
        return scaler.step(optimizer)
    optimizer.step()
    return True
