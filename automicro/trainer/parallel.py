"""Models on several devices, wrapped in DDP or FSDP2 here or by the user."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from automicro.modules import is_parallel, refuse_lazy, runs_collectives
from automicro.options import check_choice, unwrapped
from automicro.savers.recompute import repeated_blocks
from automicro.torch_private_distributed import is_fsdp_module
from automicro.torch_private_execution import is_compiled
from automicro.trainer.processes import Process, copy_from_first

PARALLEL_MODES = ("ddp", "fsdp")


def check_parallel(
    parallel: str | None,
    modules: Sequence[nn.Module],
    place: Process,
    *,
    compiles: bool = False,
    loss_fn: object = None,
    optimizer: object = None,
) -> None:
    """Raise an error for options with which several processes cannot train one model."""
    if parallel is not None:
        check_choice("parallel", parallel, PARALLEL_MODES)
    else:
        if place.world_size > 1 and not is_parallel(modules):
            raise ValueError(
                f"there are {place.world_size} processes (this is rank {place.rank}), but the "
                "model is not wrapped, so each process would train its own model. Pass "
                "parallel='ddp' (a whole model on each device) or 'fsdp' (shards), wrap the model "
                "in DistributedDataParallel or with fully_shard, or start one process"
            )
        return
    if is_parallel(modules):
        raise ValueError(
            f"parallel={parallel!r} would wrap a model that is already wrapped or runs its own "
            "collectives. Leave parallel out, or pass the model without its wrapper"
        )
    refuse_lazy(modules)
    for module in modules[1:]:
        if any(each.requires_grad for each in module.parameters()):
            what = "loss_fn" if module is loss_fn else "modules"
            raise ValueError(
                f"parallel={parallel!r} would not average the gradients of {what} "
                f"({type(module).__name__}), which is outside of the model. Make it a part of the "
                "model, or freeze it with requires_grad_(False)"
            )
    if parallel == "fsdp" and isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            "parallel='fsdp' replaces the parameters by shards, but this "
            f"{type(optimizer).__name__} was built from the original ones. Pass a callable, such "
            "as optimizer=torch.optim.AdamW or functools.partial(torch.optim.AdamW, lr=0.01)"
        )
    if parallel == "fsdp" and (compiles or is_compiled(modules[0])):
        raise ValueError(
            "parallel='fsdp' cannot be combined with compile. Use parallel='ddp', or compile each "
            "block, wrap it with fully_shard yourself, and leave both out"
        )


def wrap(
    parallel: str, modules: Sequence[nn.Module], device: torch.device, place: Process
) -> nn.Module:
    """Wrap the model in DDP or shard it, with the values of rank 0; all ranks must call this."""
    # FSDP replaces the parameters, so the optimizer must be built after this.
    model = modules[0]
    # DDP copies the values of the model itself.
    copied = modules[1:] if parallel == "ddp" else modules
    for module in copied:
        copy_from_first([*module.parameters(), *module.buffers()])
    if parallel == "ddp":
        return DistributedDataParallel(model)
    # Imported here because the import is slow.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (place.world_size,))
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the repeated blocks of a model, such as the layers of a transformer.

    >>> layers = [nn.TransformerEncoderLayer(4, 2, 8) for _ in range(3)]
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList(layers))
    >>> find_blocks(model) == layers
    True
    """
    # A block is gathered and freed as a whole, so blocks inside a block are not sought. One that
    # shares parameters (tied weights) is left to the whole model: it has fewer of their owners.
    blocks, owners = repeated_blocks(model).values(), _owners(model)
    return [each for each in blocks if _owners(each) and _owners(each).items() <= owners.items()]


def _owners(module: nn.Module) -> dict[int, int]:
    """Count the modules that own each parameter, by its id."""
    each = (one for owner in module.modules() for one in owner.parameters(recurse=False))
    return dict(Counter(map(id, each)))


def splits_layers(modules: Sequence[nn.Module]) -> bool:
    """Whether ranks hold parts of one layer, as in tensor parallelism."""
    if any(isinstance(each, nn.SyncBatchNorm) for root in modules for each in root.modules()):
        return False
    return runs_collectives(modules)


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Gather a model's state dict without shards or wrapper names; all ranks must call this."""
    model = unwrapped(model)
    if not any(map(is_fsdp_module, model.modules())):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)
