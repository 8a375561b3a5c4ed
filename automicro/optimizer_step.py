"""One optimizer step, applied once or reported as half applied.

Running out of memory inside ``optimizer.step()`` may leave some parameters stepped and others
not. Trying again would step those twice. So it is tried again only where it is shown that nothing
was applied: a class of `torch.optim`, not fused (fused kernels change parameters without touching
their versions), with every parameter and every existing state at the version it had before.
"""

import torch
from torch import Tensor

from automicro.errors import OptimizerStepError
from automicro.oom import Failure, classify, release


def step_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Step once.

    Raises:
        OptimizerStepError: memory ran out and the step may be half applied, or memory ran out
            twice with nothing applied; the message says which.
    """
    before = _versions(optimizer)
    stateless = {
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter not in optimizer.state
    }
    for is_retry in (False, True):
        failure = _try_step(optimizer)
        if failure is None:
            return
        try:
            release(failure, device)
            unapplied = _is_traceable(optimizer) and _versions(optimizer, stateless) == before
            if is_retry or not unapplied:
                raise OptimizerStepError(_describe(optimizer, failure, unapplied)) from failure
        finally:
            failure = None  # it holds this frame: a cycle
        for parameter in stateless:
            optimizer.state.pop(parameter, None)  # half-built state breaks every later step


def _describe(optimizer: torch.optim.Optimizer, failure: BaseException, unapplied: bool) -> str:
    name = type(optimizer).__name__
    if unapplied:
        return (
            f"{name}.step() ran out of memory twice; nothing was applied. It needs more than "
            "parameters and gradients leave: use foreach=False, an optimizer with less state, or "
            f"a larger device. It said: {failure}"
        )
    return (
        f"{name}.step() ran out of memory and may be half applied: some parameters or states may "
        "have changed. Continue from a checkpoint, with foreach=False or an optimizer with less "
        f"state. It said: {failure}"
    )


def _try_step(optimizer: torch.optim.Optimizer) -> BaseException | None:
    try:
        optimizer.step()
    except Exception as error:
        if classify(error) is not Failure.RETRYABLE:
            raise
        return error
    return None


def _versions(optimizer: torch.optim.Optimizer, leave_out: set[Tensor] | None = None) -> list[int]:
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    states = [
        value
        for parameter, state in optimizer.state.items()
        if leave_out is None or parameter not in leave_out
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return [tensor._version for tensor in [*parameters, *states]]


def _is_traceable(optimizer: torch.optim.Optimizer) -> bool:
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    return of_torch and not any(group.get("fused") for group in optimizer.param_groups)
