"""Private names of torch about what runs: operations, graphs, the compiler, and the allocator."""

import contextlib
import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from automicro.torch_private import forward_of_class, is_wrapper

__all__ = ["FakeTensorMode"]  # of torch itself

_F = TypeVar("_F", bound=Callable[..., Any])

# Fused attention kernels, and attention with the whole score matrix.
_ATEN = torch.ops.aten
FLASH_ATTENTION = _ATEN._scaled_dot_product_flash_attention.default
EFFICIENT_ATTENTION = _ATEN._scaled_dot_product_efficient_attention.default
WHOLE_ATTENTION = _ATEN._scaled_dot_product_attention_math.default
FLASH_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward.default
EFFICIENT_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_efficient_attention_backward.default
# Operations with which torch's distributions draw.
GAMMA_DRAW, DIRICHLET_DRAW = "_standard_gamma", "_sample_dirichlet"


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which each operation that torch dispatches goes through `run`."""

    # Otherwise torch refuses flex attention and similar operators.
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
        """Pass an operation to `run`."""
        # A wrapper (a jagged, distributed or quantized tensor) unpacks itself, and `run` gets the
        # operations on its parts.
        if types and any(map(is_wrapper, types)):
            return NotImplemented
        return self.run(func, types, args, kwargs or {})

    def run(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run one operation."""
        return func(*args, **kwargs)


_COLLECTIVES_IN = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
)
_ALSO_COLLECTIVE = frozenset({"_dtensor::shard_dim_alltoall"})
# These only inspect local data, or wait for a running operation.
_NOT_COLLECTIVE = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})


def is_collective(func: Any) -> bool:
    """Return whether a dispatched operation needs other ranks."""
    namespace = getattr(func, "namespace", None)
    if namespace in _COLLECTIVES_IN:
        return func._schema.name.partition("::")[2] not in _NOT_COLLECTIVE
    return namespace == "_dtensor" and func._schema.name in _ALSO_COLLECTIVE


_REDUCTIONS = {1: "mean", 2: "sum"}  # as torch's operations save them


class Reduction(NamedTuple):
    """Reduction of many numbers to one by the last operation of a loss."""

    kind: str  # "mean" or "sum"
    shape: tuple[int, ...]  # shape of the reduced tensor, or of the input of a reducing loss
    targets: Tensor | None = None  # classes, if the operation is `F.nll_loss`
    ignore_index: int = 0  # class that `F.nll_loss` ignores
    class_weight: Tensor | None = None  # class weights of `F.nll_loss`


def reduction_of(loss: Tensor) -> Reduction | None:
    """Return the reduction in the last operation of a loss, or None.

    >>> loss = torch.ones(3, 2, requires_grad=True).mean()
    >>> reduction_of(loss)[:2], reduction_of(loss / 2)
    (('mean', (3, 2)), None)
    """
    node: Any = loss.grad_fn
    # A loss might be cast after its reduction.
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
    ignored -= 2**64 * (ignored >= 2**63)  # it is reported as an unsigned number
    return Reduction(found, shape, node._saved_target, ignored, node._saved_weight)


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation, or None for a higher-order operator."""
    return getattr(operation, "_schema", None)


def in_backward() -> bool:
    """Return whether this thread runs a node of a backward."""
    return torch._C._current_autograd_node() is not None


def is_in_checkpoint() -> bool:
    """Return whether tensors saved for the backward now will be recomputed."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


@contextlib.contextmanager
def saving(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass each tensor saved for the backward through ``change``, before any hooks.

    >>> seen = []
    >>> with saving(lambda tensor: seen.append(tensor) or tensor):
    ...     _ = torch.ones(2, requires_grad=True).exp()
    >>> seen == []  # no hooks are set
    True
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    # is_in_checkpoint() recognizes hooks by their module.
    @functools.wraps(pack)
    def changed(tensor: Tensor) -> Any:
        return pack(change(tensor))

    with torch.autograd.graph.saved_tensors_hooks(changed, unpack):
        yield


def ends_checkpoint(error: BaseException) -> bool:
    """Return whether this error ends the recomputation of a checkpoint."""
    return isinstance(error, _StopRecomputationError)


def refuses_hooks(error: RuntimeError) -> bool:
    """Return whether a ``torch.func`` transform refused saved-tensor hooks."""
    return "support saved tensor hooks" in str(error)


def tells_of_writing(error: RuntimeError) -> bool:
    """Return whether a backward found an in-place write to a tensor that it needs."""
    return "modified by an inplace operation" in str(error)


def is_traced() -> bool:
    """Return whether ``torch.jit.trace`` is recording operations."""
    return bool(torch._C._get_tracing_state())


def is_transformed() -> bool:
    """Return whether a ``torch.func`` transform is running."""
    return bool(torch._C._are_functorch_transforms_active())


def is_of_checkpoint(error: BaseException) -> bool:
    """Return whether torch's checkpoint itself raised an error."""
    raised = error.__traceback__
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    return raised is not None and raised.tb_frame.f_globals["__name__"] == checkpoint.__module__


@contextlib.contextmanager
def without_parametrization_cache() -> Iterator[None]:
    """Recompute parametrized weights, even inside ``parametrize.cached()``."""
    before = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


@contextlib.contextmanager
def uncheckpointed() -> Iterator[None]:
    """Hide a graph that is used up within a forward from a checkpoint around it.

    >>> with uncheckpointed():
    ...     torch.ones(2, requires_grad=True).exp().sum().backward()
    """
    if not is_in_checkpoint():
        yield
        return
    # Torch calls no saved-tensor hooks while this flag says that it is tracing.
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def can_record_memory(device: torch.device) -> bool:
    """Return whether the device's allocator can record its contents."""
    memory = torch.cuda.memory
    if device.type != "cuda" or not hasattr(memory, "_dump_snapshot"):
        return False
    # cudaMallocAsync and pluggable allocators raise when asked.
    return memory.get_allocator_backend() == "native"


def dump_memory_snapshot(path: str) -> None:
    """Write the contents of CUDA's allocator, and any recorded history, to a file."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


# Weak references, because torch keeps its observer forever, with everything that it holds.
_told_of_shortage: list[weakref.WeakMethod[Callable[[], None]]] = []
_observes_shortage = False


def tell_of_shortage(tell: Callable[[], None]) -> None:
    """Call a method whenever CUDA's allocator cannot serve a request, before the error."""
    # Memory that error handling will free is still allocated then. The method might run on an
    # autograd thread, and must not raise.
    global _observes_shortage
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return
    # Torch keeps an observer forever, so only one is attached, which calls registered methods.
    if not _observes_shortage:
        attach(_on_shortage)
        _observes_shortage = True
    tell_no_more(tell)
    _told_of_shortage.append(weakref.WeakMethod(tell))


def tell_no_more(tell: Callable[[], None]) -> None:
    """Undo `tell_of_shortage`."""
    _told_of_shortage[:] = [each for each in _told_of_shortage if each() not in (None, tell)]


def _on_shortage(*_: int) -> None:
    # A copy, because a method might remove itself from the list.
    for each in list(_told_of_shortage):
        tell = each()
        if tell is not None:
            tell()


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes in which an optimizer keeps the hooks of its step."""


@contextlib.contextmanager
def without_global_step_hooks() -> Iterator[None]:
    """Hide the optimizer steps inside from hooks registered for all optimizers.

    >>> with without_global_step_hooks():
    ...     torch.optim.SGD([nn.Parameter(torch.ones(2))]).step()
    """
    home = sys.modules[torch.optim.Optimizer.__module__]
    # Replaced by empty tables, because handles that remove hooks refer to the original ones.
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
    """Return whether an optimizer calls its step hooks, which a partly built one does not."""
    # Optimizer.__init__ wraps the class's step in the hook calls, and marks it as wrapped.
    is_patched = getattr(type(optimizer).step, "hooked", False)
    tables = [vars(optimizer).get(name) for name in STEP_HOOKS]
    return bool(is_patched) and all(isinstance(table, OrderedDict) for table in tables)


def forget_workers(loader: object) -> None:
    """Make a data loader with persistent workers start new ones in its next pass."""
    # Persistent workers keep the data set as it was when they started.
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # type: ignore[attr-defined]


@contextlib.contextmanager
def computing(operations: Mapping[str, Callable[..., Tensor | None]]) -> Iterator[None]:
    """Replace composite torch operations by functions in this thread.

    Replaces calls from Python and from torch itself. It does not work under ``inference_mode``.

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
            # Torch's own decomposition: a call of the operation by name would return here.
            return plain.decompose(*args, **options) if found is None else found

        return run

    # All threads share one table of operations.
    with _OPERATIONS_LOCK, torch.library._scoped_library("aten", "IMPL") as library:
        for name, compute in operations.items():
            # At autograd's level, so that it differentiates the function and not the operation.
            library.impl(name, instead(name, compute), "AutogradCPU")
        yield


_OPERATIONS_LOCK = threading.RLock()


def overflows(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return, for each device of an optimizer's unscaled gradients, 0 if none overflowed."""
    # torch's own `GradScaler.step` reads them one by one, and not at all for a fused optimizer.
    return list(scaler._found_inf_per_device(optimizer).values())


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` was applied to this module itself, in any of three ways."""
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
    """Return the attribute that runs a module's call, which ``module.compile()`` replaces."""
    is_in_place = vars(module).get("_compiled_call_impl") is not None
    return "_compiled_call_impl" if is_in_place else "forward"


def uncompiled(reason: str) -> Callable[[_F], _F]:
    """Decorate a function so that the compiler skips it and everything it calls."""

    # Unlike this, ``torch.compiler.disable`` loads the compiler, which takes seconds.
    def mark(function: _F) -> _F:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        marked: Any = function
        frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = reason
        return function

    return mark


def compile_in_place(module: nn.Module, **keywords: Any) -> None:
    """Compile a module as ``module.compile`` does, even if its ``forward`` belongs to torch."""
    # The compiler skips functions in torch's files until a function elsewhere calls them, so
    # ``nn.Sequential(…).compile()`` would silently run uncompiled.
    if getattr(forward_of_class(module), "__module__", "").split(".")[0] != "torch":
        module.compile(**keywords)
        return
    call: Callable[..., Any] = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # Compiled code is cached, and limited in number, per code object.
    run.__code__ = run.__code__.replace()
    module._compiled_call_impl = torch.compile(run, **keywords)


def compile_modes() -> dict[str, dict[str, Any]]:
    """Return the options of each mode of ``torch.compile``."""
    import torch._inductor as inductor

    modes: dict[str, dict[str, Any]] = inductor.list_mode_options()
    return modes


def compiler_config(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the config of torch's default backend if a module itself was compiled, else None."""
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
    """Return whether compiled code is set to be deterministic."""
    import torch._inductor.config as config

    return bool(getattr(config, "deterministic", False))


def set_inductor_deterministic(value: bool) -> None:
    """Set whether compiled code is deterministic."""
    import torch._inductor.config as config

    if hasattr(config, "deterministic"):
        config.deterministic = value


_NO_NUMBER = (1 << 64) - 1  # of nodes that accumulate gradients


def node_in_backward() -> int | None:
    """Return the number of the node whose backward this thread runs, or None."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number: int = node._sequence_nr()
    return None if number == _NO_NUMBER else number


def num_nodes_made() -> int:
    """Return the number of autograd nodes created by this thread, which numbers the next one.

    >>> before = num_nodes_made()
    >>> product = torch.ones(1, requires_grad=True) * 2
    >>> num_nodes_made() - before
    1
    """
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def is_older(node: Any, first: int) -> bool:
    """Return whether this thread created a node before the node with this number.

    >>> square = torch.ones(1, requires_grad=True) ** 2
    >>> is_older(square.grad_fn, num_nodes_made())
    True
    """
    return bool(node._sequence_nr() < first)  # nodes that accumulate gradients have the last number
