"""Wrappers for models, access to unsharded tensors, and errors as text."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automicro.values import same_values


def mesh_of(kind: str) -> DeviceMesh:
    world = dist.get_world_size()
    shape = (2, world // 2) if kind == "hsdp" else (world,)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def wrapped(kind: str | None, model: nn.Module, *parts: nn.Module, **options: Any) -> Any:
    """Wrap a model in DDP, or shard the parts and then the whole; "plain" leaves it unwrapped."""
    if kind in (None, "plain"):
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, **options)
    mesh = mesh_of(str(kind))
    for module in (*parts, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Any) -> Tensor:
    """Return the unsharded tensor without history. All ranks must call this."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def whole_gradients(model: nn.Module) -> list[Tensor]:
    return [whole(each.grad).clone() for each in model.parameters() if each.grad is not None]


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(each).clone() for name, each in model.named_parameters()}


def gap(model: nn.Module, plain: nn.Module) -> float:
    """Return the largest difference from gradients of one process; missing gradients are zero."""
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
    found = [p.grad if p.grad is None else whole(p.grad) for p in model.parameters()]
    pairs = zip(found, expected, strict=True)
    return furthest([torch.zeros_like(e) if f is None else f for f, e in pairs], expected)


def furthest(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference between tensors; NaN if any difference is NaN."""
    pairs = zip(found, expected, strict=True)
    return float(torch.stack([(one - other).abs().max().double() for one, other in pairs]).max())


def raised(work: Callable[[], object]) -> tuple[str, str]:
    """Return the class of the error and its text with notes, or empty strings."""
    try:
        work()
    except Exception as error:
        try:
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        except Exception:
            text = "?"
        # A lone surrogate cannot be sent through a pipe.
        return type(error).__name__, text.encode(errors="backslashreplace").decode()
    return "", ""


def require_alike(value: Any) -> None:
    """Require that a value is identical on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(same_values(each, found[0]) for each in found), found


def require_told(
    work: Callable[[], object], kind: str, *, rank: int = 1, told: str, own: str = ""
) -> None:
    """Require an error on one rank, and errors on the other ranks that report it."""
    found, text = raised(work)
    is_culprit = dist.get_rank() == rank
    assert found == (kind if is_culprit else "PeerFailedError"), text
    assert (own if is_culprit else told) in text, text
