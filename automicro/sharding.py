"""The number of ranks, and parameters and gradients that are sharded over ranks."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
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


def added_up(tensor: Any, part: Tensor) -> Tensor:
    """Return a pending tensor with its value, summed in ``part``. All ranks must call this."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = tensor.device_mesh, list(tensor.placements)
    for dim, each in enumerate(placements):
        if each.is_partial():
            op = getattr(dist.ReduceOp, each.reduce_op.upper())
            dist.all_reduce(part, op=op, group=mesh.get_group(dim))
            placements[dim] = Replicate()
    form = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(part, mesh, placements, run_check=False, **form)


def has_shards(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor is distributed over ranks."""
    return any(is_sharded(tensor) for tensor in tensors)


def squares_by_layout(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Any]]]:
    """Return sums of squares of this rank's parts, each with the groups that hold the rest.

    >>> squares_by_layout([torch.tensor([3.0, 4.0])])
    [(tensor(25., dtype=torch.float64), [])]
    """
    found: dict[Any, tuple[list[Tensor], list[Any]]] = {}
    for tensor in tensors:
        key, groups = None, []
        if is_sharded(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
            key = (mesh, placements)
            # Replicas hold the same numbers, which must count once.
            dims = [dim for dim, each in enumerate(placements) if not each.is_replicate()]
            groups = [mesh.get_group(dim) for dim in dims]
        norms = found.setdefault(key, ([], groups))[0]
        # The square of a norm above 1.8e19 overflows float32.
        norms.append(torch.linalg.vector_norm(local(tensor)).to(torch.float64))
    return [(torch.stack(norms).square().sum(), groups) for norms, groups in found.values()]


def norm_of_all(squares: Sequence[tuple[Tensor, list[Any]]]) -> Tensor:
    """Return the norm over all ranks. All ranks must call this.

    >>> norm_of_all(squares_by_layout([torch.tensor([3.0, 4.0])])).item()
    5.0
    """
    # In the order of the tensors, which is the same on all ranks; otherwise they would deadlock.
    for square, groups in squares:
        for group in groups:
            dist.all_reduce(square, group=group)
    return torch.stack([square for square, _ in squares]).sum().sqrt()
