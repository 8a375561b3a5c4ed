"""From a gradient that is complete to one optimizer step: clipped once, applied once.

Clipping computes a norm and a factor, which changes nothing and can be tried again, and then
multiplies every gradient in place, which cannot: nobody could tell which ones have been multiplied.

Memory runs out most in the first step, because the state is built then. That one is tried again
where it is of a class of `torch.optim`, whose state can be dropped and built anew, and only before
its first write to anything that existed.
"""

import functools

import torch
from torch import Tensor, nn

from automicro.errors import OptimizerStepError, text_of
from automicro.memory.oom import Failure, classify, release
from automicro.optimizer.once import run_once
from automicro.optimizer.scaling import GradientScaler
from automicro.ranks.interface import OneRank, Ranks
from automicro.sharding import has_shards, local, norm_of_all, squares_by_layout

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
        OptimizerStepError: memory ran out and gradients may be half scaled, or memory ran out
            twice with nothing scaled; the message says which. The optimizer has not stepped.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if has_shards(parameters):
        return _clip_shards(parameters, max_norm, device, ranks or OneRank())
    return run_once(
        lambda: nn.utils.clip_grad_norm_(parameters, max_norm),
        device,
        refused=_REFUSED,
        half_applied=_HALF_APPLIED,
    )


def _clip_shards(
    parameters: list[nn.Parameter], max_norm: float, device: torch.device, ranks: Ranks
) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    # Tried again by one rank alone, a collective would find no peer: only what precedes it is.
    own = run_once(
        lambda: squares_by_layout(gradients),
        device,
        refused=_REFUSED,
        half_applied=_HALF_APPLIED,
    )
    ranks.ready("clipping the gradient")
    failure: BaseException | None = None
    try:
        with ranks.voted():
            norm = norm_of_all(own)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch has it
        for gradient in gradients:
            part = local(gradient)
            part.mul_(factor.to(part.dtype))
        return norm
    except Exception as error:
        if classify(error) is not Failure.RETRYABLE:
            raise
        failure = error
    try:
        release(failure, device)
        raise OptimizerStepError(f"{_HALF_APPLIED} It said: {text_of(failure)}") from failure
    finally:
        failure = None  # it holds this frame: a cycle


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
