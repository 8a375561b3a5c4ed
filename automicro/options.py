"""Early checks of arguments, with errors that suggest a remedy."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from automicro.errors import BatchError, LossError, suggestion

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of autocast, by the name of a precision; None for the model's own types."""

GRADIENT_SUMS = ("fp32", "native")
"""The dtype in which gradients of parameters in bf16 or fp16 accumulate."""

NON_FINITE_MODES = ("stop", "skip", "ignore")
"""Ways to treat a batch whose loss or gradient is NaN or infinite."""

REHEARSALS = ("worst",)
"""Ways to run batches before the first step."""

SCHEDULER_INTERVALS = ("batch", "epoch")
"""When a scheduler is stepped: after each optimizer step, or after each epoch."""

SYNCS = ("each", "auto")
"""The choices for the microbatches after which shards of gradients are reduced over ranks."""

ONE_GRAPH_EACH = (
    "compute it inside forward=…, .detach() it, or keep batches whole with microbatch_size=None"
)
"""The remedies for a graph that several microbatches would share."""


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return the value if it is one of the choices; the error suggests the nearest."""
    accepted = list(choices)
    if isinstance(value, str) and value in accepted:
        return value
    raise ValueError(
        f"{name}={value!r} is not known{suggestion(value, accepted)}; use one of "
        f"{', '.join(accepted)}"
    )


def check_probe(probe: object) -> bool:
    """Return whether to check a few rows."""
    if not isinstance(probe, bool) and probe != "error":
        raise ValueError(f"probe={probe!r} is not known; use True, False or 'error'")
    return bool(probe)


def check_precision(precision: object, has_backward: object) -> str:
    """Return the precision if it is one of `PRECISIONS`; fp16 also needs a loss scaler."""
    if precision == "fp16" and not has_backward:
        raise ValueError(
            "precision='fp16' needs a loss scaler, or small gradients vanish. Pass "
            "backward=lambda loss: scaler.scale(loss).backward() with a torch.amp.GradScaler, "
            "call scaler.unscale_(optimizer) before clipping, and replace optimizer.step() by "
            "scaler.step(optimizer) and scaler.update(). Or use precision='bf16', or the "
            "Trainer, which scales the loss itself"
        )
    return check_choice("precision", precision, PRECISIONS)


def check_model(model: object) -> None:
    """Refuse a model that cannot be trained in microbatches."""
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
        # Submodules too, because one that splits again would take microbatches for batches.
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"{name or 'the model'} is wrapped in DataParallel, which would split each "
                "microbatch again over the devices of one process. Pass the unwrapped module, "
                "or wrap it in DistributedDataParallel with one process per device (torchrun)"
            )


def unwrapped(model: Any) -> Any:
    """Return the module inside DDP's wrapper, which hides its attributes."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def check_modules(modules: Any) -> list[nn.Module]:
    """Return the additional modules as a list; refuse anything else, such as a bare parameter."""
    is_list = isinstance(modules, Iterable) and not isinstance(modules, Tensor)
    listed = list(modules) if is_list else [modules]
    for each in listed:
        if not is_list or not isinstance(each, nn.Module):
            raise TypeError(
                f"modules must be a list of torch.nn.Module, but a {type(each).__name__} was "
                "given. Pass modules=[…], with your own parameters in a torch.nn.ParameterList"
            )
    return listed


def check_step(batches: Iterable[Any], *, may_be_none: bool = False) -> list[Any]:
    """Return the batches of a training step; refuse a step without gradients or batches."""
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "backward was called while gradients are disabled. Leave the no_grad or "
            "inference_mode block, or call evaluate"
        )
    listed = list(batches)
    if not listed and not may_be_none:
        raise ValueError("there is no batch to accumulate; pass at least one")
    return listed


def check_state(state: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse a state that lacks keys, because it belongs to something else."""
    missing = sorted(own.keys() - state.keys())
    if missing:
        raise ValueError(f"the state lacks {missing}; pass what Microbatcher.state_dict() returned")


def check_loss(loss: object, *, may_be_zero: bool = False) -> Tensor:
    """Return the loss if it is a scalar that can be differentiated."""
    if type(loss) is Tensor and loss.requires_grad and not loss.ndim and loss.is_floating_point():
        return loss  # fast path
    if not isinstance(loss, Tensor):
        raise LossError(
            f"the loss is of type {type(loss).__name__}, not a tensor; return the tensor itself, "
            "not .item()"
        )
    if loss.dim() != 0:
        raise LossError(
            f"the loss has the shape {tuple(loss.shape)}, but must be a single number. Average "
            "it (loss.mean(), reduction='mean'), or sum it and pass loss_average='none'; if it "
            "is the model's output, compute the loss from it"
        )
    if not loss.is_floating_point():
        raise LossError(
            f"the loss is of dtype {loss.dtype} and cannot be differentiated; return a floating "
            "point loss, not a count or an index"
        )
    # Reading the number waits for the device, so it is read only if there is no graph.
    if not loss.requires_grad and not (may_be_zero and float(loss) == 0.0):
        refuse_constant()
    return loss


def refuse_constant() -> NoReturn:
    """Raise the error of a loss that depends on no parameter."""
    raise LossError(
        "the loss does not depend on any parameter that requires a gradient: all parameters are "
        "frozen, or the forward detaches (no_grad, .detach(), .item()). Unfreeze some with "
        "requires_grad_(True), or remove the detaching call"
    )


def check_history(leaves: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse to split a batch with a graph, which the first backward would free."""
    for path, leaf in leaves:
        if leaf.grad_fn is not None and leaf.requires_grad:
            raise BatchError(
                f"the batch's tensor {path!r} is the result of a graph ({leaf.grad_fn.name()}), "
                f"through which each microbatch would go backward again; {ONE_GRAPH_EACH}"
            )


def resolve_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """Return the given device, or the device of the model's parameters."""
    found = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    # Checked here, because the first batch would fail with an obscure error of a kernel.
    if any(each.type == "meta" for each in found):
        raise ValueError(
            "the model has parameters on the meta device, without data. Materialize them first "
            "(model.to_empty(device=…) and initialize, or load a state dict with assign=True)"
        )
    if device is None:
        return next(iter(p.device for p in model.parameters()), torch.device("cpu"))
    wanted = torch.device(device)
    if found and not any(_agrees(each, wanted) for each in found):
        raise ValueError(
            f"device={str(wanted)!r}, but the model is on {', '.join(map(str, found))}. Move it "
            "first with model.to(device), before you build the optimizer"
        )
    return next((each for each in found if _agrees(each, wanted)), wanted)


def _agrees(one: torch.device, other: torch.device) -> bool:
    # "cuda" without an index matches any device of that type.
    return one.type == other.type and other.index in (None, one.index)


def read_count(name: str, value: object, *, least: int = 1) -> int:
    """Return a whole number that is not below ``least``.

    >>> read_count("accumulate_batches", torch.tensor(4))
    4
    """
    # NumPy's integers are not ints, but True is one.
    count = getattr(value, "__index__", None)
    if isinstance(value, bool) or count is None:
        raise TypeError(f"{name} is {value!r}, not a whole number; pass an int such as {least}")
    number: int = count()
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}; pass an int such as {least}")
    return number


def read_flag(name: str, value: object) -> bool:
    """Return True or False; refuse other values, even if they compare equal to these."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; pass True or False")
    return value


def read_amount(name: str, value: float | None) -> float | None:
    """Return a positive number as a float, or None for None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}, not a number; pass one such as 1.0, or None")
    # Written so that NaN is refused, too.
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; pass a number such as 1.0, or None")
    return float(value)
