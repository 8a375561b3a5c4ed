"""What a size was found for: all that decides how many rows fit, as plain values.

Keys are read and shown without importing torch, which `describe_run` alone needs.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from automicro.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from automicro.batch.layout import BatchLayout

_DIMENSION = re.compile(r"(?<=[\[ ])\d+(?=[,\]])")


@dataclass(frozen=True, kw_only=True)
class RunKey:
    """The kind of run that a size was found in. Two runs with the same key share their sizes.

    Some of what decides about memory cannot be seen from outside, such as activation checkpointing
    inside a model. So a size that is found is a first proposal, and never more.

    Attributes:
        model: class names of all modules that take part.
        structure: hash of these modules: classes, parameters, buffers, with name, shape, dtype and
            whether they are trained.
        parameters: how many values all parameters have.
        device: its name.
        memory_bytes: what the run may use of it: the limit or else all; None where nobody says.
        precision: as the `Microbatcher` has it.
        phase: ``"train"`` or ``"eval"``.
        compiled: whether some module is compiled.
        optimizer: its class; None without one.
        rows: of the batch.
        shapes: of the batch's tensors by path, without the rows: ``{"0": "float32[1, 8, 8]"}``.
        world_size: processes that train together.
        automicro: its version.
        torch: its version.

    >>> key = RunKey(
    ...     model="Linear", structure="1f2e", parameters=18, device="CPU", memory_bytes=None,
    ...     precision="fp32", phase="train", compiled=False, optimizer="AdamW", rows=64,
    ...     shapes={"0": "float32[8]"}, world_size=1, automicro="0.1.0", torch="2.13.0",
    ... )
    >>> key.with_any_shape().shapes
    {'0': 'float32[?]'}
    >>> RunKey.from_content(key.content()) == key
    True
    """

    model: str
    structure: str
    parameters: int
    device: str
    memory_bytes: int | None
    precision: str
    phase: str
    compiled: bool
    optimizer: str | None
    rows: int
    shapes: Mapping[str, str] = field(hash=False)
    world_size: int
    automicro: str
    torch: str

    def content(self) -> dict[str, Any]:
        """The same as values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_content(cls, content: Any) -> "RunKey":
        """Read what `content` returned.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(content, dict) or content.keys() != _TYPES.keys():
            raise ValueError("its key has other fields")
        for name, types in _TYPES.items():
            # True is an int to Python, and no number of rows.
            if type(content[name]) not in types:
                raise ValueError(f"{name} of its key is {content[name]!r:.60}")
        if not all(isinstance(shape, str) for shape in content["shapes"].values()):
            raise ValueError("shapes of its key are no texts")
        if content["rows"] < 1:
            raise ValueError(f"rows of its key is {content['rows']}")
        return cls(**content)

    @property
    def digest(self) -> str:
        """SHA-256 of the content in one canonical spelling: the same on every machine."""
        return sha256_of(self.content())

    def with_any_shape(self) -> "RunKey":
        """The key of runs whose batches have other lengths each time: dtypes and dimensions stay.

        What a size is worth there depends on the cost of a row, which is remembered beside it.
        """
        shapes = {path: _DIMENSION.sub("?", shape) for path, shape in self.shapes.items()}
        return dataclasses.replace(self, shapes=shapes)


def sha256_of(content: Any) -> str:
    """Return the SHA-256 of values, whatever the order of their mappings.

    >>> sha256_of({"a": 1, "b": 2}) == sha256_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "structure": (str,),
    "parameters": (int,),
    "device": (str,),
    "memory_bytes": (int, type(None)),
    "precision": (str,),
    "phase": (str,),
    "compiled": (bool,),
    "optimizer": (str, type(None)),
    "rows": (int,),
    "shapes": (dict,),
    "world_size": (int,),
    "automicro": (str,),
    "torch": (str,),
}


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def describe_run(
    modules: Sequence["nn.Module"],
    batch: Any,
    *,
    rows: int,
    device: "torch.device",
    optimizer: "torch.optim.Optimizer | None" = None,
    precision: str = "fp32",
    phase: str = "train",
    layout: "BatchLayout | None" = None,
    world_size: int = 1,
) -> RunKey:
    """Return the key of a run. Call it inside the memory limit: that is part of the key.

    Args:
        modules: all that take part, the model first; lazy ones materialized.
        batch: the batch that a size is found for.
        rows: of that batch.
        device: where the modules compute.
        optimizer: of the training.
        precision: as the `Microbatcher` has it.
        phase: ``"train"`` or ``"eval"``.
        layout: where the batch has its rows; dimension 0 unless given.
        world_size: processes that train together.

    Raises:
        BatchError: the batch cannot be read.

    >>> import torch
    >>> model = torch.nn.Linear(8, 2)
    >>> key = describe_run(
    ...     [model], (torch.zeros(64, 8), torch.zeros(64)), rows=64, device=torch.device("cpu")
    ... )
    >>> key.model, key.parameters, dict(key.shapes)
    ('Linear', 18, {'0': 'float32[8]', '1': 'float32[]'})
    """
    import torch

    from automicro.memory.device import usable_bytes
    from automicro.torch_private import is_uninitialized
    from automicro.torch_private_compiler import is_compiled

    parameters = {id(p): p for module in modules for p in module.parameters()}
    return RunKey(
        model=" + ".join(map(_class_name, modules)),
        structure=_hash_structure(modules),
        parameters=sum(0 if is_uninitialized(p) else p.numel() for p in parameters.values()),
        device=_device_name(device),
        memory_bytes=usable_bytes(device),
        precision=precision,
        phase=phase,
        compiled=any(is_compiled(part) for module in modules for part in module.modules()),
        optimizer=None if optimizer is None else type(optimizer).__name__,
        rows=rows,
        shapes=describe_shapes(batch, layout=layout),
        world_size=world_size,
        automicro=__version__,
        torch=str(torch.__version__),
    )


def describe_shapes(batch: Any, *, layout: "BatchLayout | None" = None) -> dict[str, str]:
    """Return dtype and shape of each tensor in a batch by its path, without the rows.

    Rows that are not collated, each with tensors of its own, are described together.

    Args:
        batch: the batch.
        layout: where it has its rows; dimension 0 unless given.

    Raises:
        BatchError: the batch cannot be read.

    >>> import torch
    >>> describe_shapes({"ids": torch.zeros(4, 7), "scale": torch.tensor(2.0)})
    {'*.scale': 'float32[]', 'ids': 'float32[7]'}
    >>> describe_shapes([{"x": torch.zeros(n)} for n in (2, 3, 3)])
    {'*.x': 'float32[2] or float32[3]'}
    """
    from automicro.batch.layout import BatchLayout

    layout = BatchLayout() if layout is None else layout
    row_dims = layout.row_dims(batch)
    found: dict[str, set[str]] = {}
    for path, tensor in layout.leaves(batch):
        dim = row_dims.get(path)
        # What is not cut along a dimension may be one row of many: its number is no structure.
        name = path if dim is not None else f"*.{_NUMBER.sub('*', path)}".replace("*.*", "*", 1)
        found.setdefault(name, set()).add(_describe_tensor(tensor, row_dim=dim))
    return {name: " or ".join(sorted(found[name])) for name in sorted(found)}


def _describe_tensor(tensor: "Tensor", *, row_dim: int | None) -> str:
    dtype = _dtype_name(tensor.dtype)
    if tensor.is_nested:
        return f"nested {dtype} of {tensor.dim()} dimensions"
    shape = list(tensor.shape)
    if row_dim is not None:
        del shape[row_dim]
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _hash_structure(modules: Sequence["nn.Module"]) -> str:
    """One hash of what all modules are made of, submodules by class: some keep more for backward.

    Tied tensors count under each of their names.
    """
    from torch import nn

    from automicro.torch_private import is_uninitialized

    content: list[Any] = []
    for module in modules:
        content.append([[name, type(part).__name__] for name, part in module.named_modules()])
        tensors = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in tensors:
            shape = None if is_uninitialized(tensor) else list(tensor.shape)
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            content.append([kind, name, shape, _dtype_name(tensor.dtype), tensor.requires_grad])
    return sha256_of(content)


def _class_name(module: "nn.Module") -> str:
    name = type(module).__name__
    if name == "OptimizedModule":  # what torch.compile returns
        return _class_name(next(module.children()))
    return name


def _dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: "torch.device") -> str:
    if device.type == "cpu":
        return "CPU"
    import torch

    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))
