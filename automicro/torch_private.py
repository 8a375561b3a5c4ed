"""Private names of torch about modules, tensors and settings, each behind a public name.

A new version of torch can break only the three files of this name.
"""

import contextlib
import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _disable_current_modes as without_modes

# Names of torch itself that other modules import from here.
__all__ = ["AnyBatchNorm", "FakeTensor", "without_modes"]


# With map(), these read thousands of parameters without Python-level steps.
_VERSION = operator.attrgetter("_version")
_HOOKS_BEFORE = operator.attrgetter("_backward_hooks")
_HOOKS_AFTER = operator.attrgetter("_post_accumulate_grad_hooks")
BUFFERS = "_buffers"
REGISTERED = ("_parameters", BUFFERS, "_modules")
"""Names of the tables that hold a module's parameters, buffers and children."""
_WALKS = ("named_modules", "modules", "named_parameters", "parameters", "_named_members")


def module_tables(module: nn.Module) -> tuple[dict[str, Any], ...] | None:
    """Return a module's parameter, buffer and child tables, or None if it overrides the walk."""
    kind, space = type(module), vars(module)
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _WALKS):
        return None
    found = map(space.get, REGISTERED)  # a traced module has none of its own
    tables = tuple(table for table in found if isinstance(table, dict))
    return tables if len(tables) == len(REGISTERED) else None


def is_uninitialized(tensor: Tensor) -> bool:
    """Return whether a lazy module's tensor has no shape yet.

    >>> is_uninitialized(nn.LazyLinear(2).weight), is_uninitialized(nn.Linear(2, 2).weight)
    (True, False)
    """
    return isinstance(tensor, UninitializedTensorMixin)


def is_wrapper(tensor_type: type) -> bool:
    """Return whether tensors of a type hold other tensors (jagged, distributed, quantized)."""
    return hasattr(tensor_type, "__tensor_flatten__")


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor that autograd counted."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor was made as a view of another one."""
    return tensor._is_view()


def all_versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the versions of many tensors, quickly."""
    return list(map(_VERSION, tensors))


def keeping_versions(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Return a context whose in-place writes to these tensors are hidden from autograd.

    >>> tensor = torch.zeros(2)
    >>> with keeping_versions([tensor]):
    ...     _ = tensor.add_(1)
    >>> tensor._version
    0
    """
    preserve = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    return preserve(tuple(tensors))


Hooks = dict[int, Any]


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks that receive its output."""
    return bool(module._forward_hooks)


def call_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return a module's own hooks that run in its call or its backward."""
    tables = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    return [hook for each in (*tables, module._backward_pre_hooks) for hook in each.values()]


def writes_own_state(module: nn.Module) -> bool:
    """Return whether a module's ``state_dict`` can hold more than parameters and buffers."""
    names = ("get_extra_state", "state_dict", "_save_to_state_dict")
    is_own = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)
    return is_own or bool(module._state_dict_hooks)


def gradient_hooks(leaf: Tensor) -> tuple[Hooks | None, Hooks | None]:
    """Return the tables of hooks that run before and after a gradient is added; None if unused."""
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks


def all_hooks(leaves: Sequence[Tensor]) -> list[Hooks | None]:
    """Return `gradient_hooks` of many tensors: all tables before, then all tables after."""
    return [*map(_HOOKS_BEFORE, leaves), *map(_HOOKS_AFTER, leaves)]


def with_hooks(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that have a hook on their gradient."""
    return [leaf for leaf in leaves if leaf._backward_hooks or leaf._post_accumulate_grad_hooks]


def set_gradient_hooks(leaf: Tensor, before: Hooks | None, after: Hooks | None) -> None:
    """Replace a tensor's hook tables. None leaves the table of that kind unchanged."""
    # If set to None, hooks after accumulation would continue to run.
    if before is not None:
        leaf._backward_hooks = before
    if after is not None:
        leaf._post_accumulate_grad_hooks = after


def node_hooks(leaf: Tensor) -> int:
    """Return the number of Python hooks on the autograd node that accumulates a leaf's gradient."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    found = 0
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)  # it shares the list of all others
        hooks = handle.hooks_dict_ref()
        found += 0 if hooks is None else len(hooks) - 1
        handle.remove()
    return found


def is_accumulation(node: Any) -> bool:
    """Return whether an autograd node adds to the ``.grad`` of a leaf, its ``variable``.

    >>> is_accumulation(nn.Parameter(torch.ones(2)).sum().grad_fn.next_functions[0][0])
    True
    """
    return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return the versions of many tensors; 0 for None."""
    return [0 if tensor is None else tensor._version for tensor in tensors]


def plain_parts(tensor: Any) -> list[Tensor]:
    """Return the tensors with a tensor's data: itself, unless it is sparse, sharded or a wrapper.

    >>> len(plain_parts(torch.eye(2).to_sparse()))
    2
    """
    if is_uninitialized(tensor):
        return []
    if is_wrapper(type(tensor)):
        # A DTensor also lists its mesh.
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [part for each in inner if isinstance(each, Tensor) for part in plain_parts(each)]
    if tensor.layout is torch.sparse_coo:  # coalesced or not
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def buffer_table(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return a module's own buffers by name; writing to the table registers and removes buffers."""
    return _writable(module._buffers)


def parameter_table(module: nn.Module) -> MutableMapping[str, nn.Parameter | None]:
    """Return a module's own parameters by name; writing to the table replaces them."""
    return _writable(module._parameters)


def _writable(table: Any) -> MutableMapping[str, Any]:
    return table if isinstance(table, dict) else _ScriptedTable(table)


class _ScriptedTable(MutableMapping[str, Any]):
    """Entries of a scripted or traced module, which can change but not come or go."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._table[name] = value

    def __delitem__(self, name: str) -> None:
        del self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.keys())

    def __len__(self) -> int:
        return len(self._table)

    def clear(self) -> None:
        """Do nothing: the entries written next replace the old ones."""


def scripted_attributes(module: Any) -> dict[str, Any]:
    """Return the attributes of a scripted module, except its children, by name."""
    names = map(sys.intern, module._concrete_type.get_attributes())
    return {name: module._c.getattr(name) for name in names}


def set_scripted(module: Any, name: str, value: Any) -> None:
    """Set an attribute of a scripted module."""
    module._c.setattr(name, value)


def children_of(module: nn.Module) -> list[nn.Module]:
    """Return a module's direct children without hashing them: metrics hash all that they hold."""
    return [each for each in module._modules.values() if each is not None]


def copy_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of one dtype and device into others, with few launches."""
    torch._foreach_copy_(list(targets), list(sources))


function_modes = torch._C._len_torch_function_stack  # the number of active modes


def pop_function_modes(num_left: int) -> None:
    """Leave the innermost torch function modes until ``num_left`` remain."""
    while function_modes() > num_left:
        torch._C._pop_torch_function_stack()


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """Return the value of an older getter, or None if a newer setter made torch refuse it."""
    try:
        return read()
    except RuntimeError:
        return None


_BACKENDS = [(e, of) for e in ("cuda", "mkldnn") for of in ("all", "matmul", "conv", "rnn")]
_GET, _SET = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
_OLDER: list[tuple[Any, Any]] = [
    (torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
]
# Getters and setters of float32 precision and kernel choice. Older functions come first, because
# they set some of the others.
BACKENDS = [(functools.partial(_unless_mixed, read), write) for read, write in _OLDER]
BACKENDS += [
    (functools.partial(_GET, *each), functools.partial(_SET, *each))
    for each in [("generic", "all"), *_BACKENDS]
]
# The modules of `torch.backends` wrap these in Python, which takes longer.
for _name in ("flash", "mem_efficient", "math", "cudnn"):
    _get_sdp = getattr(torch._C, f"_get_{_name}_sdp_enabled")
    BACKENDS.append((_get_sdp, getattr(torch._C, f"_set_sdp_use_{_name}")))
for _name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled"):
    BACKENDS.append((getattr(torch._C, f"_get_{_name}"), getattr(torch._C, f"_set_{_name}")))


# Tables of hooks that apply to all modules, by name.
GLOBAL_HOOKS: dict[str, OrderedDict[int, Any]] = {
    name: table
    for name, table in vars(nn.modules.module).items()
    if type(table) is OrderedDict and "hook" in name
}


def compiler_is_loaded() -> bool:
    """Return whether torch's compiler is loaded, so that code might be compiled."""
    # Other code loads it too, such as an optimizer.
    return "torch._dynamo.eval_frame" in sys.modules


def forward_of_class(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a module's class, or None if it is scripted or traced."""
    return getattr(type(module), "forward", None)


def counter_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of a plain one, but no memory.

    >>> tensor = torch.ones(3)
    >>> counter = counter_of(tensor)
    >>> _ = tensor.add_(1)
    >>> counter.shape, version_of(counter) == version_of(tensor)
    (torch.Size([0]), True)
    """
    counter = tensor.detach()
    with torch.no_grad():
        # detach() shares the version counter, and assigning .data replaces only the memory.
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def drop_empty_hooks(leaves: Iterable[Tensor]) -> None:
    """Remove empty tables of hooks after accumulation, which captures would walk and compare."""
    for leaf in leaves:
        if not leaf._post_accumulate_grad_hooks:
            leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]
