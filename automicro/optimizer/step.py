"""One optimizer step, applied once or reported as half applied.

Memory runs out most in the first step, because the state is built then. That one is tried again
where it is of a class of `torch.optim`, whose state can be dropped and built anew, and only before
its first write to anything that existed.
"""

import functools

import torch

from automicro.optimizer.once import run_once
from automicro.optimizer.scaling import GradientScaler


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
        OptimizerStepError: memory ran out and the step may be half applied, or memory ran out
            twice with nothing applied; the message says which.
    """
    if scaler is not None:
        scaler.unscale(optimizer)
    name = type(optimizer).__name__
    has_stepped = run_once(
        functools.partial(_step, optimizer, scaler),
        device,
        refused=(
            f"{name}.step() ran out of memory twice; nothing was applied. It needs more than "
            "parameters and gradients leave: use foreach=False, an optimizer with less state, or "
            "a larger device."
        ),
        half_applied=(
            f"{name}.step() ran out of memory and may be half applied: some parameters or states "
            "may have changed. Continue from a checkpoint, with foreach=False or an optimizer "
            "with less state."
        ),
        undo=optimizer.state.clear,  # half-built state breaks every later step
        # Later steps write from their first operation on, so there is nothing to watch for.
        watched=not optimizer.state and type(optimizer).__module__.startswith("torch.optim."),
    )
    if scaler is not None:
        scaler.update()
    return has_stepped


def _step(optimizer: torch.optim.Optimizer, scaler: GradientScaler | None) -> bool:
    if scaler is not None:
        return scaler.step(optimizer)
    optimizer.step()
    return True
