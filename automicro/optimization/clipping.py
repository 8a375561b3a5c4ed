"""Clipping the norm of the gradient, once, or reported as half done.

Clipping computes a norm and a factor, which changes nothing and can be tried again, and then
multiplies every gradient in place, which cannot: nobody could tell which ones have been multiplied.
"""

import torch
from torch import Tensor, nn

from automicro.optimization.once import run_once

_REFUSED = (
    "clipping the gradient ran out of memory twice; nothing was scaled and the optimizer did not "
    "step. Leave grad_clip_norm out, or use a smaller model or a larger device."
)
_HALF_APPLIED = (
    "clipping the gradient ran out of memory and may be half applied: some gradients may be scaled "
    "and others not. Parameters and optimizer state are as before: clear the gradients and leave "
    "this batch out, or continue from a checkpoint."
)


def clip_gradients(
    optimizer: torch.optim.Optimizer, max_norm: float, device: torch.device
) -> Tensor:
    """Scale all gradients of an optimizer to a norm of at most this; return the norm before.

    Bit-identical to ``torch.nn.utils.clip_grad_norm_``.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> clip_gradients(optimizer, 1.0, torch.device("cpu")).item()
        5.0

    Raises:
        OptimizerStepError: memory ran out and gradients may be half scaled, or memory ran out
            twice with nothing scaled; the message says which. The optimizer has not stepped.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return run_once(
        lambda: nn.utils.clip_grad_norm_(parameters, max_norm),
        device,
        refused=_REFUSED,
        half_applied=_HALF_APPLIED,
    )
