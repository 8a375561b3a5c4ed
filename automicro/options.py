"""Arguments that are refused early, each with what was probably meant."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from automicro.errors import BatchError, LossError, suggestion
from automicro.modules import is_rank_wrapper

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of autocast, by the name of a precision; None for the model's own types."""

GRADIENT_SUMS = ("fp32", "native")
"""The type in which gradients of parameters in bf16 or fp16 add up."""

NON_FINITE_MODES = ("stop", "skip", "ignore")
"""Ways to treat a batch whose loss or gradient is NaN or infinite."""

SYNCS = ("each", "auto")
"""With which microbatch shards of gradients are reduced over ranks."""

ONE_GRAPH_EACH = (
    "compute it inside forward=…, .detach() it, or keep batches whole with microbatch_size=None"
)
"""The choices for a graph that several microbatches would share."""


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """The value, if it is one of the choices.

    Raises:
        ValueError: it is not; the message suggests the nearest.

    Example:
        >>> check_choice("batchnorm", "warn", ["warn", "error"])
        'warn'
    """
    accepted = list(choices)
    if isinstance(value, str) and value in accepted:
        return value
    raise ValueError(
        f"{name}={value!r} is not known{suggestion(value, accepted)}; use one of "
        f"{', '.join(accepted)}"
    )


def check_probe(probe: object) -> bool:
    """Whether to look at a few rows.

    >>> check_probe(False), check_probe("error")
    (False, True)

    Raises:
        ValueError: neither True, False nor ``"error"``.
    """
    if not isinstance(probe, bool) and probe != "error":
        raise ValueError(f"probe={probe!r} is not known; use True, False or 'error'")
    return bool(probe)


def check_precision(precision: object, has_backward: object) -> str:
    """The precision, if it is one of `PRECISIONS` and the loss is scaled where it has to be.

    Raises:
        ValueError: it is not known, or fp16 without a loss scaler.

    Example:
        >>> check_precision("bf16", has_backward=False)
        'bf16'
    """
    if precision == "fp16" and not has_backward:
        raise ValueError(
            "precision='fp16' needs a loss scaler, or small gradients vanish: pass "
            "backward=lambda loss: scaler.scale(loss).backward() with a torch.amp.GradScaler, "
            "call scaler.unscale_(optimizer) before clipping and scaler.step(optimizer) and "
            "scaler.update() in place of optimizer.step(); or use precision='bf16', which "
            "needs no scaler, or the Trainer, which scales by itself"
        )
    return check_choice("precision", precision, PRECISIONS)


def check_model(model: object) -> None:
    """Refuse what cannot be trained by microbatches.

    Raises:
        TypeError: not a module.
        ValueError: a wrapper that holds several devices in one process.
    """
    if isinstance(model, type):
        raise TypeError(
            f"model is the class {model.__name__}; make an instance: {model.__name__}(…)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is of type {type(model).__name__}, not a torch.nn.Module; pass the module "
            "itself"
        )
    for name, module in model.named_modules():
        # Inside as well: a part that splits again would see microbatches as batches.
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"{name or 'the model'} is wrapped in DataParallel, which splits each batch once "
                "more, over devices of one process; pass the unwrapped module on one device, or "
                "wrap it in DistributedDataParallel with one process per device (torchrun)"
            )


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model of several ranks, where one process looks at it alone.

    Raises:
        ValueError: it is wrapped.
    """
    for name, module in model.named_modules():
        if is_rank_wrapper(module):
            raise ValueError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, and this "
                "looks at it in one process alone; pass the unwrapped module"
            )


def unwrapped(model: Any) -> Any:
    """The module inside of DDP's wrapper, which shows none of its attributes.

    >>> unwrapped(nn.Linear(2, 2))
    Linear(in_features=2, out_features=2, bias=True)
    """
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


_INSIDE = ("optimizer", "_optimizer", "base_optimizer", "_base_optimizer", "optim", "_optim")
"""Attributes by which wrappers hold the optimizer inside of them."""


def innermost_optimizer(optimizer: object) -> torch.optim.Optimizer | None:
    """The optimizer inside of all wrappers, itself where it has none; None where there is none.

    accelerate and Lightning wrap the optimizer, as do ``ZeroRedundancyOptimizer`` and many a
    Lookahead or SAM. It is the one inside that builds the state.

    >>> adam = torch.optim.Adam(nn.Linear(2, 2).parameters())
    >>> innermost_optimizer(adam) is adam
    True
    """
    # A wrapper may lead back to itself.
    found, seen = optimizer, set[int]()
    while id(found) not in seen:
        seen.add(id(found))
        # From the table itself, because wrappers hand unknown attributes on to the optimizer
        # inside.
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
    """Refuse an optimizer of another model, or one that evaluates the loss itself.

    Returns the optimizer that builds the state, inside of any wrapper.

    Raises:
        TypeError: not an optimizer.
        ValueError: parameters that are in none of the modules, or a step that needs a closure.
    """
    if optimizer is None:
        return None
    innermost = innermost_optimizer(optimizer)
    if innermost is None:
        if isinstance(optimizer, list | tuple):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__} of {len(optimizer)}, and one optimizer "
                "steps with the gradient of a batch; pass one with several parameter groups, or "
                "write the loop yourself, with a Microbatcher for each"
            )
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer; pass "
            "an instance such as torch.optim.AdamW(model.parameters())"
        )
    # Refused before the first batch and not in the middle of a run.
    if isinstance(innermost, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times in one step, which cannot be one transaction; "
            "use another optimizer, or leave optimizer= out and call backward inside the closure "
            "that you hand to its step"
        )
    # By identity: to compare tensors would compare their numbers.
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    parameters = [p for group in innermost.param_groups for p in group["params"]]
    # Their gradients would not be rolled back with the model's.
    foreign = [parameter for parameter in parameters if id(parameter) not in known]
    if foreign:
        shapes = [str(tuple(parameter.shape)) for parameter in foreign[:3]]
        raise ValueError(
            f"{len(foreign)} of the optimizer's {len(parameters)} parameters are not in the model "
            f"(of shape {', '.join(shapes)}{', …' * (len(foreign) > 3)}); build the optimizer from "
            "this model's parameters (after any .to() that replaces them), or name further modules "
            "with modules=(…): tensors that are in no module go into an nn.ParameterList"
        )
    return innermost


def check_modules(modules: object) -> list[nn.Module]:
    """The further modules that take part.

    Raises:
        TypeError: something else, such as a bare parameter.

    >>> check_modules([nn.Linear(2, 2)])
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    if isinstance(modules, Tensor) or not isinstance(modules, Iterable):
        raise TypeError(
            f"modules is a {type(modules).__name__} and not a list of modules; pass "
            f"{_as_modules(modules)}"
        )
    listed = list(modules)
    for module in listed:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"modules holds a {type(module).__name__}, which is not a torch.nn.Module; pass "
                f"{_as_modules(module)}"
            )
    return listed


def _as_modules(given: object) -> str:
    if isinstance(given, Tensor):
        return "modules=[torch.nn.ParameterList([…])], with the parameter in it"
    return "modules=[…] with instances of torch.nn.Module"


def check_step(batches: Iterable[Any], *, may_be_none: bool = False) -> list[Any]:
    """The batches of a training step; refuses one without gradients, or without a batch.

    Raises:
        RuntimeError: gradients are switched off.
        ValueError: there is no batch.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "backward was called where gradients are switched off; leave the no_grad or "
            "inference_mode block, or call evaluate"
        )
    listed = list(batches)
    if not listed and not may_be_none:
        raise ValueError("there is no batch to accumulate; pass at least one")
    return listed


def check_state(state: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse the state of something else.

    Raises:
        ValueError: keys are missing.
    """
    missing = sorted(own.keys() - state.keys())
    if missing:
        raise ValueError(f"the state lacks {missing}; pass what Microbatcher.state_dict() returned")


def check_loss(loss: object, *, may_be_zero: bool = False) -> Tensor:
    """The loss, if it can be differentiated.

    Raises:
        LossError: not one scalar, not floating point, or cut off from every parameter.
    """
    if type(loss) is Tensor and loss.requires_grad and not loss.ndim and loss.is_floating_point():
        return loss  # the usual case, quickly
    if not isinstance(loss, Tensor):
        raise LossError(
            f"the loss is of type {type(loss).__name__}, not a tensor; return the tensor itself, "
            "not .item()"
        )
    if loss.dim() != 0:
        raise LossError(
            f"the loss has the shape {tuple(loss.shape)} and must be one number; average it "
            "(loss.mean(), reduction='mean') or sum it and pass loss_average='none'; if it is the "
            "model's output, compute the loss from it"
        )
    if not loss.is_floating_point():
        raise LossError(
            f"the loss is of dtype {loss.dtype} and cannot be differentiated; return a floating "
            "point loss, not a count or an index"
        )
    # Reading the number waits for the device, and only where there is no graph.
    if not loss.requires_grad and not (may_be_zero and float(loss) == 0.0):
        refuse_constant()
    return loss


def refuse_constant() -> NoReturn:
    """Say that a loss has nothing to go backward through.

    Raises:
        LossError: always.
    """
    raise LossError(
        "the loss does not depend on any parameter that requires a gradient: all parameters "
        "are frozen, or the forward detaches (no_grad, .detach(), .item()); unfreeze some "
        "with requires_grad_(True), or remove the detaching call"
    )


def check_history(leaves: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse to split a batch that was computed from something that requires a gradient.

    Raises:
        BatchError: one microbatch's backward would free the graph that the next one needs.
    """
    for path, leaf in leaves:
        if leaf.grad_fn is not None and leaf.requires_grad:
            raise BatchError(
                f"the batch's tensor {path!r} hangs on a graph ({leaf.grad_fn.name()}), through "
                f"which every microbatch would have to go backward again; {ONE_GRAPH_EACH}"
            )


def resolve_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """The device given, or the one where the model's parameters lie.

    Raises:
        ValueError: the parameters lie elsewhere, or nowhere.
    """
    found = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    # Said here in words: the first batch would fail inside of some kernel.
    if any(each.type == "meta" for each in found):
        raise ValueError(
            "the model has parameters on the meta device, without data; materialise it first "
            "(model.to_empty(device=…) and initialise, or load a state dict with assign=True)"
        )
    if device is None:
        return next(iter(p.device for p in model.parameters()), torch.device("cpu"))
    wanted = torch.device(device)
    if found and not any(_agrees(each, wanted) for each in found):
        raise ValueError(
            f"device={str(wanted)!r}, but the model lies on {', '.join(map(str, found))}; move "
            "it first with model.to(device), before the optimizer is built"
        )
    return next((each for each in found if _agrees(each, wanted)), wanted)


def _agrees(one: torch.device, other: torch.device) -> bool:
    # "cuda" without a number is whichever device of that type the model lies on.
    return one.type == other.type and other.index in (None, one.index)


def read_amount(name: str, value: float | None) -> float | None:
    """A positive number, or None.

    Raises:
        TypeError: not a number.
        ValueError: not above zero.

    >>> read_amount("grad_clip_norm", 1)
    1.0
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}, not a number; pass one such as 1.0, or None")
    # So written, it refuses NaN, too.
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; pass a number such as 1.0, or None")
    return float(value)


def read_count(name: str, value: object, *, least: int = 1) -> int:
    """A whole number, not below the least.

    Raises:
        TypeError: not a whole number.
        ValueError: too small.

    >>> read_count("accumulate_batches", torch.tensor(4))
    4
    """
    # NumPy's whole numbers are no ints, and for Python, True is one.
    count = getattr(value, "__index__", None)
    if isinstance(value, bool) or count is None:
        raise TypeError(f"{name} is {value!r}, not a whole number; pass an int such as {least}")
    number: int = count()
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}; pass an int such as {least}")
    return number


def read_flag(name: str, value: object) -> bool:
    """True or False, and nothing that only counts as one.

    Raises:
        TypeError: anything else.

    >>> read_flag("deterministic", True)
    True
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; pass True or False")
    return value
