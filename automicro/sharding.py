"""The number of ranks, and parameters and gradients that are sharded over ranks."""

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def num_ranks() -> int:
    """Return the number of processes in torch's process group, or 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is distributed over ranks on a device mesh, as shards or replicas."""
    # Without the import there is no DTensor, and importing takes half a second.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, detached; a plain tensor is returned unchanged."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def is_pending(tensor: Tensor) -> bool:
    """Return whether the value of a sharded tensor has yet to be summed over ranks."""
    placements: Any = getattr(tensor, "placements", ())
    return any(each.is_partial() for each in placements)


def has_shards(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor is distributed over ranks."""
    return any(is_sharded(tensor) for tensor in tensors)
