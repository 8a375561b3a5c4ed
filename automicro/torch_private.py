"""Every name that this package takes from torch without torch promising to keep it.

Private classes, attributes and functions of torch stand here and nowhere else, each behind a
name of ours, so that a new version of torch can break one file only; those of several ranks have a
file beside this one.
"""

import contextlib
import functools
import itertools
import operator
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

__all__ = [
    "BACKENDS",
    "BUFFERS",
    "DIRICHLET_DRAW",
    "EFFICIENT_ATTENTION",
    "EFFICIENT_ATTENTION_BACKWARD",
    "FLASH_ATTENTION",
    "FLASH_ATTENTION_BACKWARD",
    "GAMMA_DRAW",
    "GLOBAL_HOOKS",
    "REGISTERED",
    "STEP_HOOKS",
    "WHOLE_ATTENTION",
    "AnyBatchNorm",
    "FakeTensor",
    "FakeTensorMode",
    "Hooks",
    "OperationMode",
    "Reduction",
    "all_hooks",
    "all_versions",
    "are_tables_of",
    "buffer_table",
    "call_hooks",
    "call_of",
    "calls_step_hooks",
    "can_record_memory",
    "children_of",
    "compile_in_place",
    "compile_modes",
    "compile_options",
    "compiler_config",
    "compiler_is_loaded",
    "compiler_is_used",
    "computing",
    "copy_into",
    "dump_memory_snapshot",
    "ends_checkpoint",
    "forget_workers",
    "forward_of_class",
    "function_modes",
    "gradient_hooks",
    "in_backward",
    "inductor_is_deterministic",
    "is_accumulation",
    "is_collective",
    "is_compiled",
    "is_in_checkpoint",
    "is_of_checkpoint",
    "is_older",
    "is_traced",
    "is_transformed",
    "is_uninitialized",
    "is_wrapper",
    "keeping_versions",
    "mark_dynamic",
    "module_tables",
    "node_hooks",
    "node_in_backward",
    "num_nodes_made",
    "overflows",
    "parameter_table",
    "pop_function_modes",
    "record_memory_history",
    "reduction_of",
    "run_backward",
    "saving",
    "schema_of",
    "scripted_attributes",
    "set_gradient_hooks",
    "set_inductor_deterministic",
    "set_scripted",
    "sparse_parts",
    "tell_no_more",
    "tell_of_shortage",
    "uncheckpointed",
    "uncompiled",
    "unmark",
    "version_of",
    "versions_of",
    "with_hooks",
    "without_global_step_hooks",
    "without_modes",
    "writes_own_state",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# Attention by one kernel, and with the whole matrix of scores.
_ATEN = torch.ops.aten
FLASH_ATTENTION = _ATEN._scaled_dot_product_flash_attention.default
EFFICIENT_ATTENTION = _ATEN._scaled_dot_product_efficient_attention.default
WHOLE_ATTENTION = _ATEN._scaled_dot_product_attention_math.default
FLASH_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward.default
EFFICIENT_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_efficient_attention_backward.default
# Operations under which distributions of torch draw.
GAMMA_DRAW, DIRICHLET_DRAW = "_standard_gamma", "_sample_dirichlet"


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every operation that torch dispatches comes by `run`, one at a time.

    Not those on wrappers (jagged, distributed, quantized tensors): a wrapper unpacks itself, and
    the operations on its parts come by.
    """

    # Otherwise torch refuses flex attention and its like outright.
    supports_higher_order_operators = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Hand an operation on to `run`."""
        if types and any(map(is_wrapper, types)):
            return NotImplemented
        return self.run(func, types, args, kwargs or {})

    def run(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one operation."""
        return func(*args, **kwargs)


_COLLECTIVES_IN = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
)
_ALSO_COLLECTIVE = frozenset({"_dtensor::shard_dim_alltoall"})
# These look at what is here, or wait for what was begun.
_NOT_COLLECTIVE = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})


def is_collective(func: Any) -> bool:
    """Tell whether an operation that torch dispatches needs other ranks to take part.

    >>> is_collective(torch.ops.aten.add.Tensor)
    False
    """
    namespace = getattr(func, "namespace", None)
    if namespace in _COLLECTIVES_IN:
        return func._schema.name.partition("::")[2] not in _NOT_COLLECTIVE
    return namespace == "_dtensor" and func._schema.name in _ALSO_COLLECTIVE


# Through map(), these read thousands of parameters without a step of Python's.
_VERSION = operator.attrgetter("_version")
_HOOKS_BEFORE = operator.attrgetter("_backward_hooks")
_HOOKS_AFTER = operator.attrgetter("_post_accumulate_grad_hooks")
BUFFERS = "_buffers"
REGISTERED = ("_parameters", BUFFERS, "_modules")
"""Names of the tables in which a module has its parameters, buffers and children."""
_EACH_TABLE = operator.itemgetter(*REGISTERED)
_WALKS = ("named_modules", "modules", "named_parameters", "parameters", "_named_members")


def module_tables(module: nn.Module) -> tuple[dict[str, Any], ...] | None:
    """Where a module has its parameters, buffers and children; None where it walks in its own way.

    >>> [list(table) for table in module_tables(nn.Linear(2, 2))]
    [['weight', 'bias'], [], []]
    """
    kind, space = type(module), vars(module)
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _WALKS):
        return None
    found = map(space.get, REGISTERED)  # a traced module has none of its own
    tables = tuple(table for table in found if isinstance(table, dict))
    return tables if len(tables) == len(REGISTERED) else None


def are_tables_of(spaces: Sequence[dict[str, Any]], tables: Sequence[dict[str, Any]]) -> bool:
    """Whether modules still have these tables, given what ``vars`` says of each module.

    >>> linear, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> tables = [*module_tables(linear), *module_tables(other)]
    >>> are_tables_of([vars(linear), vars(other)], tables)
    True
    """
    now = itertools.chain.from_iterable(map(_EACH_TABLE, spaces))
    return all(map(operator.is_, now, tables))


def is_uninitialized(tensor: Tensor) -> bool:
    """Tell whether a lazy module's tensor still waits for its shape.

    >>> is_uninitialized(nn.LazyLinear(2).weight), is_uninitialized(nn.Linear(2, 2).weight)
    (True, False)
    """
    return isinstance(tensor, UninitializedTensorMixin)


def is_wrapper(tensor_type: type) -> bool:
    """Tell whether tensors of a type hold other tensors: jagged, distributed, quantized ones.

    >>> is_wrapper(torch.Tensor)
    False
    """
    return hasattr(tensor_type, "__tensor_flatten__")


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to in place, as far as autograd was told.

    >>> version_of(torch.zeros(2).add_(1))
    1
    """
    return tensor._version


def counter_of(tensor: Tensor) -> Tensor:
    """An empty tensor that shares the version of a plain one, and holds no memory.

    >>> tensor = torch.ones(3)
    >>> counter = counter_of(tensor)
    >>> _ = tensor.add_(1)
    >>> counter.shape, version_of(counter) == version_of(tensor)
    (torch.Size([0]), True)
    """
    counter = tensor.detach()
    with torch.no_grad():
        # Other memory under the same version: detach() shares it, and .data leaves it alone.
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def all_versions(tensors: Iterable[Tensor]) -> list[int]:
    """The versions of many tensors, quickly.

    >>> all_versions([torch.zeros(2).add_(1)])
    [1]
    """
    return list(map(_VERSION, tensors))


def keeping_versions(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Let in-place writes to tensors go unnoticed by autograd.

    >>> tensor = torch.zeros(2)
    >>> with keeping_versions([tensor]):
    ...     _ = tensor.add_(1)
    >>> tensor._version
    0
    """
    preserve = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    return preserve(tuple(tensors))


Hooks = dict[int, Any]


def call_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """A module's hooks of its own that run when it is called, or in its backward.

    >>> call_hooks(nn.Linear(2, 2))
    []
    """
    tables = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    return [hook for each in (*tables, module._backward_pre_hooks) for hook in each.values()]


def writes_own_state(module: nn.Module) -> bool:
    """Whether a module puts more into its ``state_dict`` than parameters and buffers.

    >>> writes_own_state(nn.Linear(2, 2))
    False
    """
    names = ("get_extra_state", "state_dict", "_save_to_state_dict")
    is_own = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)
    return is_own or bool(module._state_dict_hooks)


def gradient_hooks(leaf: Tensor) -> tuple[Hooks | None, Hooks | None]:
    """The hooks of a tensor that run before its gradient is added, and after; None: never any.

    >>> gradient_hooks(nn.Parameter(torch.ones(2)))
    (None, None)
    """
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks


def all_hooks(leaves: Sequence[Tensor]) -> list[Hooks | None]:
    """The hooks of many tensors that run before their gradients are added, then those after.

    >>> all_hooks([nn.Parameter(torch.ones(2))])
    [None, None]
    """
    return [*map(_HOOKS_BEFORE, leaves), *map(_HOOKS_AFTER, leaves)]


def with_hooks(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Those of many tensors that have a hook on their gradient.

    >>> with_hooks([nn.Parameter(torch.ones(2))])
    []
    """
    return [leaf for leaf in leaves if leaf._backward_hooks or leaf._post_accumulate_grad_hooks]


def set_gradient_hooks(leaf: Tensor, before: Hooks | None, after: Hooks | None) -> None:
    """Let a tensor have other hooks. None leaves those of its kind as they are."""
    # Set to None, the hooks after accumulation would go on running.
    if before is not None:
        leaf._backward_hooks = before
    if after is not None:
        leaf._post_accumulate_grad_hooks = after


def node_hooks(leaf: Tensor) -> int:
    """How many hooks in Python hang on the node of autograd that adds up a leaf's gradient.

    >>> node_hooks(nn.Parameter(torch.ones(2)))
    0
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    found = 0
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)  # it shares the list of all others
        hooks = handle.hooks_dict_ref()
        found += 0 if hooks is None else len(hooks) - 1
        handle.remove()
    return found


def is_accumulation(node: Any) -> bool:
    """Tell whether a node of autograd adds to the ``.grad`` of a leaf, its ``variable``.

    >>> is_accumulation(nn.Parameter(torch.ones(2)).sum().grad_fn.next_functions[0][0])
    True
    """
    return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]


_REDUCTIONS = {1: "mean", 2: "sum"}  # as operations of torch save them


class Reduction(NamedTuple):
    """How the last operation of a loss made one number of many.

    Attributes:
        kind: ``"mean"`` or ``"sum"``.
        shape: of what was reduced; of the input of a loss that reduces.
        targets: classes that the mean is over, where it is that of `F.nll_loss`.
        ignore_index: of these.
        class_weight: of these.
    """

    kind: str
    shape: tuple[int, ...]
    targets: Tensor | None = None
    ignore_index: int = 0
    class_weight: Tensor | None = None


def reduction_of(loss: Tensor) -> Reduction | None:
    """The reduction of torch's last operation in a loss; None where it is none.

    >>> loss = torch.ones(3, 2, requires_grad=True).mean()
    >>> reduction_of(loss)[:2], reduction_of(loss / 2)
    (('mean', (3, 2)), None)
    """
    node: Any = loss.grad_fn
    # A loss may be cast behind its reduction.
    while node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    name = "" if node is None else node.name()
    kind = next((each for each in ("Mean", "Sum") if name.startswith(f"{each}Backward")), None)
    if kind is not None:
        return Reduction(kind.lower(), tuple(node._saved_self_sym_sizes))
    found = _REDUCTIONS.get(getattr(node, "_saved_reduction", 0))
    if found is None or not hasattr(node, "_saved_self"):
        return None
    shape = tuple(node._saved_self.shape)
    if not name.startswith("NllLoss"):
        return Reduction(found, shape)
    ignored = node._saved_ignore_index
    ignored -= 2**64 * (ignored >= 2**63)  # it is told as if it had no sign
    return Reduction(found, shape, node._saved_target, ignored, node._saved_weight)


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """The same of many tensors; 0 for None.

    >>> versions_of([torch.zeros(2).add_(1), None])
    [1, 0]
    """
    return [0 if tensor is None else tensor._version for tensor in tensors]


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse COO tensor, coalesced or not.

    >>> len(sparse_parts(torch.eye(2).to_sparse()))
    2
    """
    return [tensor._indices(), tensor._values()]


def buffer_table(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """The buffers that a module itself holds, by name; writing to it registers and removes them.

    >>> list(buffer_table(nn.BatchNorm1d(2)))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return _writable(module._buffers)


def parameter_table(module: nn.Module) -> MutableMapping[str, nn.Parameter | None]:
    """The parameters that a module itself holds, by name; writing to it puts others in their place.

    >>> list(parameter_table(nn.Linear(2, 2)))
    ['weight', 'bias']
    """
    return _writable(module._parameters)


def _writable(table: Any) -> MutableMapping[str, Any]:
    return table if isinstance(table, dict) else _ScriptedTable(table)


class _ScriptedTable(MutableMapping[str, Any]):
    """The entries of a scripted or traced module: none can come or go, only change."""

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
        """Nothing: what is written next takes the place of each."""


def scripted_attributes(module: Any) -> dict[str, Any]:
    """The attributes of a scripted module beside its children, by name."""
    names = map(sys.intern, module._concrete_type.get_attributes())
    return {name: module._c.getattr(name) for name in names}


def set_scripted(module: Any, name: str, value: Any) -> None:
    """Let a scripted module keep something else by this name."""
    module._c.setattr(name, value)


def children_of(module: nn.Module) -> list[nn.Module]:
    """The modules right inside a module, without hashing them: metrics hash all that they hold.

    >>> children_of(nn.Sequential(nn.Identity()))
    [Identity()]
    """
    return [each for each in module._modules.values() if each is not None]


def schema_of(operation: Any) -> Any:
    """The schema of an operation; None for a higher-order operator.

    >>> schema_of(torch.ops.aten.add_.Tensor).is_mutable
    True
    """
    return getattr(operation, "_schema", None)


def in_backward() -> bool:
    """Tell whether this thread runs a node of a backward.

    >>> in_backward()
    False
    """
    return torch._C._current_autograd_node() is not None


def is_in_checkpoint() -> bool:
    """Tell whether what is saved for a backward now is to be computed again there.

    >>> is_in_checkpoint()
    False
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


@contextlib.contextmanager
def saving(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let another tensor be saved for the backward in the place of each, for all hooks.

    >>> seen = []
    >>> with saving(lambda tensor: seen.append(tensor) or tensor):
    ...     _ = torch.ones(2, requires_grad=True).exp()
    >>> seen == []  # no hooks take it
    True
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    # is_in_checkpoint() knows hooks by their module.
    @functools.wraps(pack)
    def changed(tensor: Tensor) -> Any:
        return pack(change(tensor))

    with torch.autograd.graph.saved_tensors_hooks(changed, unpack):
        yield


def ends_checkpoint(error: BaseException) -> bool:
    """Tell whether a checkpoint has computed again all that it needs, and stops by this.

    >>> ends_checkpoint(RuntimeError("out of luck"))
    False
    """
    return isinstance(error, _StopRecomputationError)


def refuses_hooks(error: RuntimeError) -> bool:
    """Tell whether a transform of ``torch.func`` met hooks for what is saved for the backward.

    >>> refuses_hooks(RuntimeError("out of luck"))
    False
    """
    return "support saved tensor hooks" in str(error)


def tells_of_writing(error: RuntimeError) -> bool:
    """Tell whether a backward found that something it needs was written to.

    >>> tells_of_writing(RuntimeError("out of luck"))
    False
    """
    return "modified by an inplace operation" in str(error)


def is_traced() -> bool:
    """Tell whether ``torch.jit.trace`` records operations now.

    >>> is_traced()
    False
    """
    return bool(torch._C._get_tracing_state())


def is_transformed() -> bool:
    """Tell whether a transform of ``torch.func`` runs now.

    >>> is_transformed()
    False
    """
    return bool(torch._C._are_functorch_transforms_active())


def is_of_checkpoint(error: BaseException) -> bool:
    """Tell whether torch's checkpoint itself has raised an error.

    >>> is_of_checkpoint(RuntimeError("out of luck"))
    False
    """
    raised = error.__traceback__
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    return raised is not None and raised.tb_frame.f_globals["__name__"] == checkpoint.__module__


@contextlib.contextmanager
def without_parametrization_cache() -> Iterator[None]:
    """Let parametrized weights be computed anew, in spite of ``parametrize.cached()`` around it.

    >>> with without_parametrization_cache():
    ...     torch.nn.utils.parametrize._cache_enabled
    0
    """
    before = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


@contextlib.contextmanager
def uncheckpointed() -> Iterator[None]:
    """Let checkpointing see nothing of a graph that is used up before its forward ends.

    >>> with uncheckpointed():
    ...     torch.ones(2, requires_grad=True).exp().sum().backward()
    """
    if not is_in_checkpoint():
        yield
        return
    # Torch asks no hooks about what is saved while it takes itself to be tracing.
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def can_record_memory(device: torch.device) -> bool:
    """Tell whether the device's allocator can say what it holds, and what it did.

    >>> can_record_memory(torch.device("cpu"))
    False
    """
    memory = torch.cuda.memory
    names = ("_record_memory_history", "_dump_snapshot")
    if device.type != "cuda" or not all(hasattr(memory, name) for name in names):
        return False
    # cudaMallocAsync and allocators that are plugged in raise where they are asked.
    return memory.get_allocator_backend() == "native"


def record_memory_history(max_entries: int | None) -> None:
    """Have CUDA's allocator take down what it does, so many entries at most; None ends that."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(None)
    else:
        # Frames of C++ take much longer to read, and name nothing of the user's.
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)


def dump_memory_snapshot(path: str) -> None:
    """Write what CUDA's allocator holds, and its history if that was taken down, to a file."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


# Weakly, because torch keeps its observer for good, and with it whatever this list holds.
_told_of_shortage: list[weakref.WeakMethod[Callable[[], None]]] = []
_observes_shortage = False


def tell_of_shortage(tell: Callable[[], None]) -> None:
    """From now on, call a method when CUDA's allocator cannot serve a request, before its error.

    Everything lies on the device then that will be given back when the error is handled. Torch
    keeps an observer for good, so one of ours is put there once, and asks who wants to know. What
    it calls is held weakly, may run on a thread of autograd's, and must not raise. Nothing happens
    where torch has no such observer.
    """
    global _observes_shortage
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return
    if not _observes_shortage:
        attach(_on_shortage)
        _observes_shortage = True
    tell_no_more(tell)
    _told_of_shortage.append(weakref.WeakMethod(tell))


def tell_no_more(tell: Callable[[], None]) -> None:
    """Undo `tell_of_shortage`."""
    _told_of_shortage[:] = [each for each in _told_of_shortage if each() not in (None, tell)]


def _on_shortage(*_: int) -> None:
    # A copy, because what is told may take itself off the list.
    for each in list(_told_of_shortage):
        tell = each()
        if tell is not None:
            tell()


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The attributes in which an optimizer keeps the hooks of its step."""


@contextlib.contextmanager
def without_global_step_hooks() -> Iterator[None]:
    """Let no hook that stands for all optimizers see the steps inside.

    >>> with without_global_step_hooks():
    ...     torch.optim.SGD([nn.Parameter(torch.ones(2))]).step()
    """
    home = sys.modules[torch.optim.Optimizer.__module__]
    # Other tables take their place, because handles by which hooks are removed refer to these.
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooks = {name: getattr(home, name) for name in names}
    try:
        for name in names:
            setattr(home, name, OrderedDict())
        yield
    finally:
        for name, each in hooks.items():
            setattr(home, name, each)


def calls_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks on the step of an optimizer are called: not of one that was half built.

    >>> calls_step_hooks(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    True
    """
    # Optimizer.__init__ puts the calls of hooks around its class's step, and marks it so.
    is_patched = getattr(type(optimizer).step, "hooked", False)
    tables = [vars(optimizer).get(name) for name in STEP_HOOKS]
    return bool(is_patched) and all(isinstance(table, OrderedDict) for table in tables)


def forget_workers(loader: object) -> None:
    """Let a data loader with persistent workers start new ones with its next pass.

    >>> forget_workers([1, 2])
    """
    # Persistent workers keep the data set as it was when they began.
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # type: ignore[attr-defined]


@contextlib.contextmanager
def computing(operations: Mapping[str, Callable[..., Tensor | None]]) -> Iterator[None]:
    """Let functions compute some of torch's composite operations in this thread.

    The operations may be called from Python or from torch itself. Not under ``inference_mode``.

    >>> x = torch.ones(1, 1, 2, 8)
    >>> with computing({"scaled_dot_product_attention": lambda query, *_, **__: 2 * query}):
    ...     nn.functional.scaled_dot_product_attention(x, x, x).unique()
    tensor([2.])
    """
    thread = threading.get_ident()

    def instead(name: str, compute: Callable[..., Tensor | None]) -> Callable[..., Any]:
        plain = getattr(_ATEN, name).default

        def run(*args: Any, **options: Any) -> Any:
            found = compute(*args, **options) if threading.get_ident() == thread else None
            # Torch's own computation in parts: to call the operation by its name would come here
            # again.
            return plain.decompose(*args, **options) if found is None else found

        return run

    # There is one table of operations for all threads.
    with _OPERATIONS_LOCK, torch.library._scoped_library("aten", "IMPL") as library:
        for name, compute in operations.items():
            # At the level of autograd, which differentiates what the function does, and not the
            # operation.
            library.impl(name, instead(name, compute), "AutogradCPU")
        yield


_OPERATIONS_LOCK = threading.RLock()


def run_backward(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor] = (),
) -> None:
    """Run autograd's engine past ``torch.autograd.backward``, which asks function modes.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> run_backward(
    ...     [weight.sum()], [torch.tensor(3.0)], retain_graph=False, create_graph=False
    ... )
    >>> weight.grad.tolist()
    [3.0, 3.0]
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(tensors),
        tuple(gradients),
        retain_graph,
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def overflows(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A number for each device that an optimizer has gradients on, 0 if none overflowed.

    They were unscaled before.

    torch's own `GradScaler.step` reads them one by one, and for a fused optimizer not at all.
    """
    return list(scaler._found_inf_per_device(optimizer).values())


def copy_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of one type on one device into others, with few launches.

    >>> target = torch.zeros(1)
    >>> copy_into([target], [torch.ones(1)])
    >>> target
    tensor([1.])
    """
    torch._foreach_copy_(list(targets), list(sources))


function_modes = torch._C._len_torch_function_stack  # how many are entered


def pop_function_modes(num_left: int) -> None:
    """Leave the innermost modes that see each call of torch's functions until so many are left."""
    while function_modes() > num_left:
        torch._C._pop_torch_function_stack()


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """The value of an older function, which torch refuses once a newer one has set it."""
    try:
        return read()
    except RuntimeError:
        return None


_BACKENDS = [(e, of) for e in ("cuda", "mkldnn") for of in ("all", "matmul", "conv", "rnn")]
_GET, _SET = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
_OLDER: list[tuple[Any, Any]] = [
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
]
# How exactly backends multiply in float32, and which kernels they use: how each choice is read, and
# set. The older functions come first, because they set some of the others.
BACKENDS = [(functools.partial(_unless_mixed, read), write) for read, write in _OLDER]
BACKENDS += [
    (functools.partial(_GET, *each), functools.partial(_SET, *each))
    for each in [("generic", "all"), *_BACKENDS]
]
# The modules of `torch.backends` read the same, in Python.
for _name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled"):
    BACKENDS.append((getattr(torch._C, f"_get_{_name}"), getattr(torch._C, f"_set_{_name}")))


# The tables of hooks that hold for all modules, by name.
GLOBAL_HOOKS: dict[str, OrderedDict[int, Any]] = {
    name: table
    for name, table in vars(nn.modules.module).items()
    if type(table) is OrderedDict and "hook" in name
}


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` was applied to this module itself, in any of its three ways.

    >>> is_compiled(nn.Linear(2, 2))
    False
    """
    # Importing dynamo takes seconds, and without it nothing can have been compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    return (
        isinstance(module, dynamo.OptimizedModule)  # torch.compile(module)
        or getattr(module, "_compiled_call_impl", None) is not None  # module.compile()
        # module.forward = torch.compile(module.forward)
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def call_of(module: nn.Module) -> str:
    """The attribute that runs a module's call: where ``module.compile()`` was, all of it.

    >>> call_of(nn.Linear(2, 2))
    'forward'
    """
    is_in_place = vars(module).get("_compiled_call_impl") is not None
    return "_compiled_call_impl" if is_in_place else "forward"


def compiler_is_loaded() -> bool:
    """Tell whether something in this process could have been compiled by now.

    Code that compiles has loaded torch's compiler; so have others, an optimizer for one.

    >>> isinstance(compiler_is_loaded(), bool)
    True
    """
    return "torch._dynamo.eval_frame" in sys.modules


def uncompiled(reason: str) -> Callable[[_F], _F]:
    """Let the compiler, should it be used around a function, skip it with all that it calls.

    Not what that calls and was compiled by itself. Unlike ``torch.compiler.disable`` it loads no
    compiler, which takes seconds.

    >>> uncompiled("an example")(lambda: 1)()
    1
    """

    def mark(function: _F) -> _F:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        marked: Any = function
        frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = reason
        return function

    return mark


def compiler_is_used() -> bool:
    """Tell whether anything was given to ``torch.compile`` in this process, called or not yet.

    Narrower than `compiler_is_loaded`, and forgetful: not since the compiler was last reset.

    >>> isinstance(compiler_is_used(), bool)
    True
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    # One backend for each way of compiling; what is only kept from being compiled has none.
    backends = getattr(dynamo, "cached_backends", None)
    return backends is None or any(map(callable, backends.values()))


def mark_dynamic(tensor: Tensor, dim: int) -> list[str]:
    """Ask the compiler, who is loaded, not to build one size of a dimension into its code.

    A wish: code that needs the one size is compiled for it without an error. Returns what
    `unmark` takes the mark away by.
    """
    table = vars(tensor)
    before = set(table)
    # It keeps its marks as attributes of the tensor.
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return [name for name in table if name not in before]


def unmark(tensor: Tensor, names: Iterable[str]) -> None:
    """Take a mark away again."""
    table = vars(tensor)
    for name in names:
        table.pop(name, None)


def forward_of_class(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that a module's class has; None where it is scripted or traced.

    >>> forward_of_class(nn.Linear(2, 2)) is nn.Linear.forward
    True
    """
    return getattr(type(module), "forward", None)


def compile_in_place(module: nn.Module, **keywords: Any) -> None:
    """Compile a module as ``module.compile`` does, also one whose ``forward`` is torch's own.

    The compiler skips functions that stand in torch's files until a function elsewhere calls
    them, so that ``nn.Sequential(…).compile()`` runs uncompiled for ever, without a word.
    """
    if getattr(forward_of_class(module), "__module__", "").split(".")[0] != "torch":
        module.compile(**keywords)
        return
    call: Callable[..., Any] = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    run.__code__ = run.__code__.replace()  # compiled code is kept, and limited in number, per code
    module._compiled_call_impl = torch.compile(run, **keywords)


def compile_modes() -> dict[str, dict[str, Any]]:
    """The options of each mode of ``torch.compile``.

    >>> compile_modes()["reduce-overhead"]
    {'triton.cudagraphs': True}
    """
    import torch._inductor as inductor

    modes: dict[str, dict[str, Any]] = inductor.list_mode_options()
    return modes


def compile_options() -> list[str]:
    """Every option of ``torch.compile`` with its own backend.

    >>> "triton.cudagraphs" in compile_options()
    True
    """
    import torch._inductor as inductor

    return [*inductor.list_options(), "guard_filter_fn", "use_aoti"]  # the last two go elsewhere


def compiler_config(module: nn.Module) -> Mapping[str, Any] | None:
    """The config of torch's own backend where a module itself was compiled; else None.

    >>> compiler_config(nn.Linear(2, 2)) is None
    True
    """
    if not is_compiled(module):
        return None
    for where in (
        getattr(module, "_compiled_call_impl", None),
        module,
        vars(module).get("forward"),
    ):
        read = getattr(where, "get_compiler_config", None)
        if read is not None:
            config: Mapping[str, Any] | None = read()
            return config
    return None


def inductor_is_deterministic() -> bool:
    """Tell whether compiled code is to be deterministic, beside what is not compiled.

    >>> inductor_is_deterministic()
    False
    """
    import torch._inductor.config as config

    return bool(getattr(config, "deterministic", False))


def set_inductor_deterministic(value: bool) -> None:
    """Say whether compiled code is to be deterministic."""
    import torch._inductor.config as config

    if hasattr(config, "deterministic"):
        config.deterministic = value


_NO_NUMBER = (1 << 64) - 1  # of nodes that gather gradients


def node_in_backward() -> int | None:
    """The number of the node whose backward this thread runs; None outside, and where it has none.

    >>> node_in_backward() is None
    True
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number: int = node._sequence_nr()
    return None if number == _NO_NUMBER else number


def is_older(node: Any, first: int) -> bool:
    """Whether this thread made a node of a backward before the one with this number.

    >>> square = torch.ones(1, requires_grad=True) ** 2
    >>> is_older(square.grad_fn, num_nodes_made())
    True
    """
    return bool(node._sequence_nr() < first)  # nodes that gather gradients have the last number


def num_nodes_made() -> int:
    """How many nodes of a backward this thread has made: the number of the next one.

    >>> before = num_nodes_made()
    >>> product = torch.ones(1, requires_grad=True) * 2
    >>> num_nodes_made() - before
    1
    """
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number
