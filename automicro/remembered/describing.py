"""From a model, a device and a batch to the key under which their size is remembered."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.memory.device import usable_bytes
from automicro.remembered.cache import RunKey, digest_of
from automicro.torch_private import is_compiled, is_uninitialized
from automicro.version import __version__

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def describe_run(
    modules: Sequence[nn.Module],
    shapes: Mapping[str, str],
    *,
    rows: int,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "fp32",
    phase: str = "train",
    world_size: int = 1,
) -> RunKey:
    """Return the key of a run. Call it inside the memory limit: that is part of the key.

    Args:
        modules: all that take part, the model first; lazy ones materialized.
        shapes: of the batch that a size is found for; see `describe_shapes`.
        rows: of that batch.
        device: where the modules compute.
        optimizer: of the training.
        precision: as the `Microbatcher` has it.
        phase: ``"train"`` or ``"eval"``.
        world_size: processes that train together.

    >>> model, batch = nn.Linear(8, 2), (torch.zeros(64, 8), torch.zeros(64))
    >>> cpu = torch.device("cpu")
    >>> key = describe_run([model], describe_shapes(batch), rows=64, device=cpu)
    >>> key.model, key.parameters, dict(key.shapes)
    ('Linear', 18, {'0': 'float32[8]', '1': 'float32[]'})
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return RunKey(
        model=" + ".join(map(_class_name, modules)),
        structure=digest_of(list(map(_structure, modules))),
        parameters=sum(0 if is_uninitialized(p) else p.numel() for p in parameters.values()),
        device=_device_name(device),
        memory_bytes=usable_bytes(device),
        precision=precision,
        phase=phase,
        compiled=any(is_compiled(part) for module in modules for part in module.modules()),
        optimizer=None if optimizer is None else type(optimizer).__name__,
        rows=rows,
        shapes=shapes,
        world_size=world_size,
        automicro=__version__,
        torch=str(torch.__version__),
    )


def describe_shapes(batch: Any, *, layout: BatchLayout | None = None) -> dict[str, str]:
    """Return dtype and shape of each tensor in a batch by its path, without the rows.

    Rows that are not collated, each with tensors of its own, are described together.

    Args:
        batch: the batch.
        layout: where it has its rows; dimension 0 unless given.

    Raises:
        BatchError: the batch cannot be read.

    >>> describe_shapes({"ids": torch.zeros(4, 7), "scale": torch.tensor(2.0)})
    {'*.scale': 'float32[]', 'ids': 'float32[7]'}
    >>> describe_shapes([{"x": torch.zeros(n)} for n in (2, 3, 3)])
    {'*.x': 'float32[2] or float32[3]'}
    """
    layout = BatchLayout() if layout is None else layout
    row_dims = layout.row_dims(batch)
    found: dict[str, set[str]] = {}
    for path, tensor in layout.leaves(batch):
        dim = row_dims.get(path)
        # What is not cut along a dimension may be one row of many: its number is no structure.
        name = path if dim is not None else f"*.{_NUMBER.sub('*', path)}".replace("*.*", "*", 1)
        found.setdefault(name, set()).add(_describe_tensor(tensor, row_dim=dim))
    return {name: " or ".join(sorted(found[name])) for name in sorted(found)}


def _describe_tensor(tensor: Tensor, *, row_dim: int | None) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        return f"nested {dtype} of {tensor.dim()} dimensions"
    return f"{dtype}{[length for dim, length in enumerate(tensor.shape) if dim != row_dim]}"


def _structure(module: nn.Module) -> list[Any]:
    """Classes, for some keep more for backward; tensors, tied ones under each of their names."""
    content: list[Any] = [[name, type(part).__name__] for name, part in module.named_modules()]
    for of in (module.named_parameters, module.named_buffers):
        for name, tensor in of(remove_duplicate=False):
            shape = None if is_uninitialized(tensor) else list(tensor.shape)
            content.append([of.__name__, name, shape, str(tensor.dtype), tensor.requires_grad])
    return content


def _class_name(module: nn.Module) -> str:
    name = type(module).__name__
    # What torch.compile returns.
    return _class_name(next(module.children())) if name == "OptimizedModule" else name


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))
