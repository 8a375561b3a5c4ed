"""Optimizers that can step once per batch, also inside wrappers."""

from collections.abc import Sequence

import torch
from torch import nn

_INSIDE = ("optimizer", "_optimizer", "base_optimizer", "_base_optimizer", "optim", "_optim")
"""Attributes in which wrappers keep the wrapped optimizer."""


def innermost_optimizer(optimizer: object) -> torch.optim.Optimizer | None:
    """Return the optimizer that builds the state, inside all wrappers, or None if there is none."""
    # accelerate and Lightning wrap the optimizer, as do ZeroRedundancyOptimizer and many
    # implementations of Lookahead or SAM. Wrappers might refer to each other in a cycle.
    found, seen = optimizer, set[int]()
    while id(found) not in seen:
        seen.add(id(found))
        # Read from ``__dict__``, because wrappers forward unknown attributes to the inner
        # optimizer.
        attributes = getattr(found, "__dict__", {})
        inside = (attributes.get(name) for name in _INSIDE)
        found = next((each for each in inside if _is_like_an_optimizer(each)), found)
    return found if isinstance(found, torch.optim.Optimizer) else None


def _is_like_an_optimizer(value: object) -> bool:
    names = ("step", "param_groups")
    return not isinstance(value, nn.Module | type) and all(hasattr(value, name) for name in names)


def check_optimizer(
    optimizer: object, modules: Sequence[nn.Module]
) -> torch.optim.Optimizer | None:
    """Return the innermost optimizer; refuse one of other modules or one that needs a closure."""
    if optimizer is None:
        return None
    innermost = innermost_optimizer(optimizer)
    if innermost is None:
        if isinstance(optimizer, list | tuple):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__} of {len(optimizer)}, but each batch "
                "is one step of one optimizer. Pass one optimizer with several parameter "
                "groups, or write the loop yourself, with a Microbatcher for each optimizer"
            )
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer; pass "
            "an instance such as torch.optim.AdamW(model.parameters())"
        )
    # Refused here, because its first step would fail in the middle of a run.
    if isinstance(innermost, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times per step, so the step cannot be one "
            "transaction. Use another optimizer, or leave optimizer= out and call backward "
            "inside the closure that you pass to LBFGS.step"
        )
    # Compared by id, because tensors compare by value.
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    parameters = [p for group in innermost.param_groups for p in group["params"]]
    # Gradients of foreign parameters would not be rolled back with those of the model.
    foreign = [parameter for parameter in parameters if id(parameter) not in known]
    if foreign:
        shapes = [str(tuple(parameter.shape)) for parameter in foreign[:3]]
        raise ValueError(
            f"{len(foreign)} of the optimizer's {len(parameters)} parameters are not in the "
            f"model (of shape {', '.join(shapes)}{', …' * (len(foreign) > 3)}). Build the "
            "optimizer from this model's parameters (after any .to() that replaces them), or "
            "pass additional modules as modules=(…), with loose tensors in an nn.ParameterList"
        )
    return innermost
