"""What models are wrapped in, told without importing wrappers that nobody used."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from automicro.shards import is_sharded
from automicro.torch_private_distributed import is_fsdp_module, is_in_fsdp1, mesh_dims


def is_parallel(modules: Sequence[nn.Module]) -> bool:
    """Whether modules communicate with other ranks.

    >>> is_parallel([nn.Linear(2, 2)])
    False
    """
    return runs_collectives(modules) or any(
        _is_wrapper(module) for root in modules for module in root.modules()
    )


def _is_wrapper(module: nn.Module) -> bool:
    is_ddp = isinstance(module, DistributedDataParallel)
    return is_ddp or is_fsdp_module(module) or is_in_fsdp1(module)


def runs_collectives(modules: Iterable[nn.Module]) -> bool:
    """Whether modules are known to communicate in forward or backward, beside DDP and FSDP2.

    >>> runs_collectives([nn.Linear(2, 2)])
    False
    """
    for root in modules:
        sharded: set[int] = set()
        for module in root.modules():
            if isinstance(module, nn.SyncBatchNorm):
                return True
            if is_fsdp_module(module):
                dims = mesh_dims(cast(Any, module))
                own: list[Any] = [p for p in module.parameters() if is_sharded(p)]
                sharded |= {id(p) for p in own if p.device_mesh.ndim <= dims}
        if any(is_sharded(p) and id(p) not in sharded for p in root.parameters()):
            return True
    return False
