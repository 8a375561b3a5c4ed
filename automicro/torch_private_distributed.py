"""All private names of `torch.distributed` and its wrappers, as in `torch_private`."""

import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:  # importing takes seconds, and a single process does not need it
    from torch.distributed.fsdp import FSDPModule

__all__ = ["GradBucket", "HashStore", "PrefixStore", "Store", "TCPStore"]  # of torch itself


def default_store() -> Store:
    """Return the key-value store in which the processes met."""
    return dist.distributed_c10d._get_default_store()


def default_tcp_store() -> TCPStore | None:
    """Return the TCPStore under the default store, or None if it is of another kind."""
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def parts_of_tables() -> list[Any]:
    """Return the types and functions in the table of contents of a distributed checkpoint."""
    # Imported here because the import takes half a second, which only checkpoints should cost.
    from torch.distributed.checkpoint import filesystem, metadata

    # Without entries that are no tensors, which the reader of torch would unpickle.
    return [
        *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, filesystem._StorageInfo),
        *(metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata.TensorProperties),
        *(metadata._MEM_FORMAT_ENCODING, torch.serialization._get_layout),
    ]


def before_collectives(ask: Callable[[str, Mapping[str, Any]], None]) -> None:
    """Call a function before each collective of this process, from now on."""
    # All calls from Python, C++ and compiled code are operations of c10d, and this kernel runs
    # before torch chooses a device. Only symmetric memory bypasses it.
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)  # its registrations live as long as the library
    chosen = torch._C.DispatchKey.BackendSelect
    rest = torch._C._dispatch_keyset_full_after(chosen)
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "c10d":
            continue
        names = [argument.name for argument in schema.arguments]
        if "process_group" in names:
            func = getattr(getattr(torch.ops.c10d, name), schema.overload_name or "default")
            asking = functools.partial(_ask_before, ask, func, name, names, rest)
            library.impl(name, asking, chosen.name, with_keyset=True)


_libraries: list[Any] = []


def _ask_before(
    ask: Callable[[str, Mapping[str, Any]], None],
    func: Any,
    name: str,
    names: Sequence[str],
    rest: Any,
    keys: Any,
    *args: Any,
) -> Any:
    ask(name, dict(zip(names, args, strict=False)))
    # Continue behind this kernel; a plain call would run it again.
    return func.redispatch(keys & rest, *args)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of a group for a device's tensors, such as ``"nccl"`` or ``"gloo"``."""
    name: str = group._get_backend(device).name()
    return name.lower()


# Before torch 2.13 these had names that are now deprecated.
all_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""Gathers one tensor per rank into a single tensor."""
reduce_scatter_flat: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Reduces a tensor over ranks and gives each rank its part."""


def group_of(process_group: Any) -> dist.ProcessGroup:
    """Return the process group from an operation's argument."""
    group: dist.ProcessGroup = dist.ProcessGroup.unbox(process_group)
    return group


def is_in_backward() -> bool:
    """Return whether this thread runs a backward; torch uses its own threads for these."""
    return int(torch._C._current_graph_task_id()) != -1


def gather_on_host(group: dist.ProcessGroup, message: Tensor) -> Tensor:
    """Return the messages of all members of a gloo group, one per row."""
    gathered = message.new_empty(group.size() * message.numel())
    # Through the backend itself: before_collectives() would intercept an operation of c10d.
    backend: Any = group._get_backend(message.device)
    backend._allgather_base(gathered, message).wait()
    return gathered.view(group.size(), -1)


def broadcast_on_host(group: dist.ProcessGroup, message: Tensor) -> Tensor:
    """Overwrite the message with that of a gloo group's first member and return it."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    backend: Any = group._get_backend(message.device)
    backend.broadcast([message], options).wait()
    return message


# DistributedDataParallel


def comm_hooks(model: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the registered communication hooks, each with its state."""
    return list(model._comm_hooks)


def buffer_comm_hook(model: DistributedDataParallel) -> Any:
    """Return the hook that synchronizes buffers instead of the wrapper, or None."""
    return getattr(model, "buffer_hook", None)


def joins_uneven_inputs(model: DistributedDataParallel) -> bool:
    """Return whether ranks without data shadow the others' collectives (``model.join()``)."""
    return bool(model._join_config.enable)


def rebuild_buckets(model: DistributedDataParallel) -> bool:
    """Rebuild buckets in the order of gradients, as the next forward would; return success."""
    # All ranks must do so, because the order comes from rank 0.
    return bool(model.reducer._rebuild_buckets())


def reset_reducer(model: DistributedDataParallel) -> None:
    """Make the reducer forget an unfinished backward. All ranks must call this."""
    model.reducer._reset_state()


def local_used_map(model: DistributedDataParallel) -> Tensor | None:
    """Return the map that the reducer reduces last if it looks for unused parameters."""
    if not model.find_unused_parameters:
        return None
    return model.reducer._get_local_used_map()


def reduced_parameters(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that the reducer reduces, by name, in its order."""
    every: dict[int, tuple[str, nn.Parameter]] = {}
    for place, module in model.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if f"{place}.{name}" not in model.parameters_to_ignore:
                every.setdefault(id(parameter), (f"{place}.{name}".lstrip("."), parameter))
    trained = [(name, each) for name, each in every.values() if each.requires_grad]
    # The reducer reports only how many parameters it has; the list of that length is the right one.
    data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    for candidates in (trained, list(every.values())):
        if len(candidates) == int(data["num_parameter_tensors"]):
            return dict(candidates)
    if model.find_unused_parameters:
        return dict(trained)
    raise ValueError(
        f"{len(trained)} parameters require a gradient, but {data['num_parameter_tensors']} did so "
        "when the model was wrapped in DistributedDataParallel, which still waits for theirs; "
        "freeze or unfreeze parameters before wrapping the model, or wrap it again"
    )


_INDICES = re.compile(r"indices which did not receive grad for rank \d+: ([\d ,]*\d)")


def missing_gradients(
    model: DistributedDataParallel, parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    """Return the parameters that the reducer still waits for after a partial backward."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError as error:
        found = _INDICES.search(str(error))  # only this message names them
        if found is None:
            raise
        names = list(parameters)
        return [names[int(index)] for index in found[1].replace(",", " ").split()]
    return []


def expect_gradients(model: DistributedDataParallel, root: Tensor) -> None:
    """Prepare the reducer for the next backward, which starts at ``root``."""
    model.reducer.prepare_for_backward([root] if model.find_unused_parameters else [])


def arrive(parameters: Sequence[Tensor]) -> Tensor:
    """Return a zero whose backward reaches all parameters without changing their gradients.

    A reducer's hooks are called and ``.grad`` is unchanged. Parameters with user hooks, which need
    a tensor, get zeros.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> arrive([weight]).backward()
    >>> weight.grad is None
    True
    """
    # The reducer also waits for parameters frozen after wrapping, and a backward reaches only those
    # that require a gradient.
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            return cast(Tensor, _Arrival.apply(*parameters))  # type: ignore[no-untyped-call]
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.hooked = [each if each._backward_hooks else None for each in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(None if each is None else torch.zeros_like(each) for each in ctx.hooked)


# FSDP


def is_fsdp_module(module: object) -> bool:
    """Return whether a module is sharded by ``fully_shard`` (FSDP2)."""
    return _is_of_fsdp(module, "FSDPModule")


def is_in_fsdp1(module: object) -> bool:
    """Return whether a module is a ``FullyShardedDataParallel``."""
    return _is_of_fsdp(module, "FullyShardedDataParallel")


def _is_of_fsdp(module: object, name: str) -> bool:
    # Without the import there is none, and importing takes seconds.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, name))


def _groups(module: "FSDPModule") -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there was at most one
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def has_many_groups(module: "FSDPModule") -> bool:
    """Return whether a module's parameters lie on several meshes."""
    return len(_groups(module)) > 1


def collectives_of(module: "FSDPModule") -> tuple[Any, Any] | None:
    """Return a module's all-gather and reduce-scatter, or None if it shards nothing."""
    groups = _groups(module)
    return (groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm) if groups else None


def uses_symmetric_memory(comm: object) -> bool:
    """Return whether a module communicates through memory that all ranks register together."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    kind = getattr(_fsdp_collectives, "SymmMemAllocMixin", None)  # since torch 2.12
    return kind is not None and isinstance(comm, kind)


def groups_of_shards(
    module: "FSDPModule",
) -> tuple[torch.device, list[dist.ProcessGroup], list[dist.ProcessGroup]] | None:
    """Return a module's device, gather groups and scatter groups, or None without shards."""
    groups = _groups(module)
    if not groups:
        return None
    group = groups[0]
    # With reshard_after_forward=N the backward gathers over fewer ranks than the forward.
    meshes = [group.mesh_info, group.post_forward_mesh_info]
    gathered = [each.shard_process_group for each in meshes if each is not None]
    return group.device, list(dict.fromkeys(gathered)), [group._reduce_scatter_process_group]


def withholds_gradients(module: "FSDPModule") -> bool:
    """Return whether ``set_requires_gradient_sync(False)`` makes it keep whole gradients."""
    return any(not (each.reduce_grads and each.all_reduce_grads) for each in _groups(module))


def has_reduction_hook(module: "FSDPModule") -> bool:
    """Return whether a user hook runs in each reduction (``set_all_reduce_hook``)."""
    return any(group._all_reduce_hook is not None for group in _groups(module))


def can_hold_back(module: "FSDPModule") -> bool:
    """Return whether gradients can be added before the reduction without loss of precision."""
    # With one rank per shard nothing reveals the contents, and a coarse dtype would round sums.
    return all(
        group._reduce_scatter_process_group.size() > 1
        and all(map(_is_reduced_finely, group.fsdp_params))
        for group in _groups(module)
    )


def _is_reduced_finely(parameter: Any) -> bool:
    shard = parameter.sharded_param
    if not shard.requires_grad:
        return True
    policy = getattr(parameter, "mp_policy", None)
    if policy is None:  # an unknown torch, which stores it elsewhere
        return False
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or shard.dtype
    return torch.finfo(dtype).eps <= torch.finfo(shard.dtype).eps


def whole_numel(module: "FSDPModule") -> int:
    """Return the size of a reduce-scatter of all parameters that a module trains."""
    num_ranks = _groups(module)[0]._reduce_scatter_process_group.size()
    total = 0
    for each in _groups(module)[0].fsdp_params:
        if each.sharded_param.requires_grad:
            size = list(each._orig_size)
            dim = each.fsdp_placement.dim
            # Shards are padded to the same size on all ranks.
            size[dim] = -(-size[dim] // num_ranks) * num_ranks
            total += math.prod(size)
    return total


def holds_back(module: "FSDPModule") -> bool:
    """Return whether a module has gradients that are not reduced over all ranks."""
    return any(
        # With HSDP: reduced over the shards of one replica, but not over replicas.
        group._partial_reduce_output is not None
        or any(gradient is not None for gradient in map(_whole_gradient, group.fsdp_params))
        for group in _groups(module)
    )


def holds_two_types(module: "FSDPModule") -> bool:
    """Return whether gradients held back might differ in dtype from those still to come."""
    # Torch cannot reduce them together if only some parameters have a gradient yet.
    for group in _groups(module):
        trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
        held = {_whole_gradient(each) is not None for each in trained}
        if len(held) > 1 and any(each.reduce_dtype is not None for each in trained):
            return True
    return False


def whole_parameters(module: "FSDPModule") -> list[Tensor]:
    """Return the parameters that a module gathers; empty before the first gather."""
    every = [each for group in _groups(module) for each in group.fsdp_params]
    return [each._unsharded_param for each in every if hasattr(each, "_unsharded_param")]


def clear_whole_gradients(module: "FSDPModule") -> None:
    """Zero the gradients of whole parameters that were not reduced."""
    for group in _groups(module):
        for gradient in map(_whole_gradient, group.fsdp_params):
            if gradient is not None:
                gradient.zero_()


def _whole_gradient(parameter: Any) -> Tensor | None:
    gradient: Tensor | None = parameter.unsharded_accumulated_grad
    whole = getattr(parameter, "_unsharded_param", None)
    return gradient if gradient is not None or whole is None else whole.grad


def replicate_group(module: "FSDPModule") -> dist.ProcessGroup | None:
    """Return the group of ranks with replicas of a module's shards, or None."""
    group = _groups(module)[0]
    found: dist.ProcessGroup | None = group._all_reduce_process_group if group._is_hsdp else None
    return found


def replicas_average(module: "FSDPModule", op: Any) -> bool:
    """Return whether replicas average scattered gradients instead of summing them."""
    # A communicator might choose its algorithm by the operation, so all ranks must use the same.
    return op == dist.ReduceOp.AVG and _groups(module)[0].gradient_divide_factor is None


def reset_sharded(root: "FSDPModule") -> None:
    """Call ``reset_iter_state``, even if memory ran out before the first forward."""
    # The first forward creates the context's attributes; before it there is nothing to reset.
    if hasattr(root._get_fsdp_state()._comm_ctx, "all_gather_state"):
        root.reset_iter_state()


def drop_unsharded(modules: Iterable[nn.Module]) -> None:
    """Free whole parameters and their gradients, which ``reset_iter_state`` leaves."""
    # Otherwise the next backward would add to the gradients of a failed one.
    for module in modules:
        for group in _groups(cast("FSDPModule", module)) if is_fsdp_module(module) else []:
            for parameter in group.fsdp_params:
                # Before torch 2.15 it is stored next to the gradient, and since then derived from
                # it.
                if "unsharded_accumulated_grad" in vars(parameter):
                    parameter.unsharded_accumulated_grad = None
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    whole.grad = None
                if group.is_sharded:
                    parameter.free_unsharded_param()


def mesh_dims(module: "FSDPModule") -> int:
    """Return the number of mesh dimensions of a module: 2 for HSDP, otherwise 1."""
    return 2 if any(group._is_hsdp for group in _groups(module)) else 1


def num_data_parallel(module: "FSDPModule") -> int:
    """Return the number of ranks over which gradients are averaged; 1 if it shards nothing."""
    infos = [group.mesh_info for group in _groups(module)]
    return max(
        (
            getattr(info, "shard_mesh_size", 1) * getattr(info, "replicate_mesh_size", 1)
            for info in infos
        ),
        default=1,
    )
