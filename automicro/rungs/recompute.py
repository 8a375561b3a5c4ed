"""Blocks keep their input alone, and compute again in the backward what they did in the forward.

The second time a block finds all as it was the first time: generators of random numbers, buffers,
parameters that were in place for a while, modes and attributes of its modules, autocast. What the
second time changes is put back. So the gradients are the same to the last bit.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automicro.migration import comes_from
from automicro.nested.slices import Calls
from automicro.ranks.interface import StrayedError
from automicro.reach import OF_EVERY_MODULE
from automicro.torch_private import (
    all_versions,
    buffer_table,
    call_of,
    counter_of,
    is_in_checkpoint,
    is_uninitialized,
    keeping_versions,
    parameter_table,
    refuses_hooks,
    tells_of_writing,
    version_of,
)
from automicro.transaction.rng import RandomState

logger = logging.getLogger(__name__)

_COPIED_BYTES = 1 << 16  # of a buffer that is copied for each call, whether it changes or not
_CACHES = ("transformers.Cache", "transformers.EncoderDecoderCache")

Shows = Callable[[], RandomState]


class LeftOutError(StrayedError):
    """A block did what computing it again cannot repeat.

    It is left out from now on, and the attempt has to be made again. It reaches nobody outside of
    a step.
    """


@dataclass(frozen=True)
class _Hole:
    """Where a tensor stood among the arguments."""

    index: int


@dataclass
class Block:
    """One that is computed again.

    Attributes:
        name: in its model.
        module: itself.
        left_out: why it computes but once; empty for the usual.
        changing: large buffers that its forward has been seen to write to, by their ids.
        is_used: whether any call of it was such that it can be computed again.
        given: for each tensor that it was called with in an attempt what shares its version, and
            holds no memory; and that version.
    """

    name: str
    module: nn.Module
    left_out: str = ""
    changing: dict[int, Tensor] = field(default_factory=dict)
    is_used: bool = False
    given: list[tuple[Tensor, int]] = field(default_factory=list)

    @property
    def is_undone(self) -> bool:
        """Whether anything that it was called with was written to afterwards."""
        return any(version_of(counter) != version for counter, version in self.given)

    def leave_out(self, why: str) -> LeftOutError:
        """Compute it but once from now on."""
        self.left_out = why
        logger.warning("%s is not computed again in the backward: it %s", self.name, why)
        return LeftOutError(f"{self.name} {why}")


class _Surroundings:
    """What a forward of a block finds beside its arguments, and may change.

    Args:
        block: whose.
        modules: of the block.
        random: the generators, as they are now.
    """

    def __init__(self, block: Block, modules: Sequence[nn.Module], random: RandomState) -> None:
        self._random = random
        self._tables = [(buffer_table(module), dict(buffer_table(module))) for module in modules]
        self._modes = [(module, module.training) for module in modules]
        self._parameters: list[tuple[dict[str, Any], dict[str, tuple[Any, bool]]]] = [
            (parameter_table(module), _flagged(parameter_table(module))) for module in modules
        ]
        self._attributes = [(vars(module), _own(module)) for module in modules]
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._uncopied: list[tuple[Tensor, int]] = []
        found = {id(each): each for _, table in self._tables for each in table.values()}
        for _, own in self._attributes:
            found |= {id(each): each for each, _ in own.values() if type(each) is Tensor}
        for number, tensor in found.items():
            if tensor is None or is_uninitialized(tensor) or tensor.is_inference():
                continue
            if tensor.nbytes <= _COPIED_BYTES or number in block.changing:
                self._copies.append((tensor, tensor.detach().clone()))
            else:
                self._uncopied.append((tensor, version_of(tensor)))

    def written(self) -> list[Tensor]:
        """Large tensors that were written to, and were not copied."""
        return [tensor for tensor, version in self._uncopied if version_of(tensor) != version]

    @property
    def tensors(self) -> list[Tensor]:
        """Those that were copied."""
        return [tensor for tensor, _ in self._copies]

    @contextlib.contextmanager
    def parameters(self) -> Iterator[None]:
        """Those that were there, and frozen or not as they were, for a while.

        ``functional_call`` gives others for a forward alone. Wrappers that shard free what they
        gathered, and have put it back in place themselves.
        """
        with contextlib.ExitStack() as stack:
            for table, earlier in self._parameters:
                for name, (value, is_trained) in earlier.items():
                    if name in table and table[name] is not value and not _is_freed(value):
                        stack.callback(table.__setitem__, name, table[name])
                        table[name] = value
                    now = table.get(name)
                    if now is not None and now.is_leaf and now.requires_grad != is_trained:
                        stack.callback(now.requires_grad_, not is_trained)
                        now.requires_grad_(is_trained)
            yield

    def put_back(self) -> None:
        """As they were, but for parameters. It may be called more than once."""
        self._random.put_back()
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode
        for now, before in self._tables:
            _refill(now, before)
        for own, earlier in self._attributes:
            for key in [key for key in own if key not in earlier and key not in OF_EVERY_MODULE]:
                if key != "forward":
                    del own[key]
            for key, (value, content) in earlier.items():
                own[key] = value
                if content is not None:
                    _refill(value, content)
        with torch.no_grad():
            for tensor, content in self._copies:
                tensor.copy_(content)


def _flagged(table: Mapping[str, Tensor | None]) -> dict[str, tuple[Any, bool]]:
    """Parameters by name, each with whether it is trained."""
    return {
        name: (value, value is not None and value.requires_grad) for name, value in table.items()
    }


def _is_freed(tensor: Tensor | None) -> bool:
    if tensor is None or is_uninitialized(tensor) or type(tensor) not in (Tensor, nn.Parameter):
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _own(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, and of containers what they hold."""
    return {
        key: (value, copy.copy(value) if type(value) in (list, dict, set) else None)
        for key, value in vars(module).items()
        if key not in OF_EVERY_MODULE and key != "forward"
    }


def _refill(container: Any, content: Any) -> None:
    if type(container) is list:
        container[:] = content
    else:
        container.clear()
        container.update(content)


class _Call:
    """One call of a block: first in the forward, then as often as a backward asks for it.

    Args:
        block: that is called.
        modules: of it.
        forward: its own.
        random: takes the generators as they are.
    """

    def __init__(
        self,
        block: Block,
        modules: Sequence[nn.Module],
        forward: Callable[..., Any],
        random: Callable[[], RandomState],
    ) -> None:
        self._block, self._modules = block, modules
        self._forward, self._random = forward, random
        self._before: _Surroundings | None = None
        self._given: tuple[Any, Any] | None = None  # the first time alone
        self._structure: Any = None
        self._parts = Calls()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first time."""
        tensors: list[Tensor] = []
        self._given = args, kwargs
        self._structure = _taken_out(self._given, tensors)
        self._block.given += [
            (counter_of(each), version_of(each))
            for each in tensors
            if type(each) is Tensor and not each.is_inference()
        ]
        try:
            return checkpoint(self, *tensors, use_reentrant=False, preserve_rng_state=False)
        except RuntimeError as error:
            if not refuses_hooks(error):
                raise
            why = "runs transforms of torch.func, which know no checkpoints"
            raise self._block.leave_out(why) from error

    def __call__(self, *tensors: Tensor) -> Any:
        if self._before is None:
            return self._first(tensors)
        now = self._surroundings()
        # What is put back is as it was, so nobody who saved it need be told.
        with keeping_versions(
            list({id(t): t for t in [*now.tensors, *self._before.tensors]}.values())
        ):
            try:
                self._before.put_back()
                args, kwargs = _filled(self._structure, tensors)
                with self._before.parameters(), self._parts.repeating():
                    return _with_copies(self._block.module, self._forward, args, kwargs)
            finally:
                now.put_back()

    def _first(self, tensors: Sequence[Tensor]) -> Any:
        before = self._surroundings()
        assert self._given is not None
        (args, kwargs), self._given = self._given, None
        watched = [tensor for tensor in tensors if not tensor.is_inference()]
        versions = all_versions(watched)
        attributes = _attributes_of(args, kwargs)
        block = self._block
        with self._parts.noting():
            output = _with_copies(block.module, self._forward, args, kwargs)
        written = before.written()
        if written:
            block.changing.update({id(tensor): tensor for tensor in written})
            raise LeftOutError(f"{block.name} writes into a buffer of {written[0].nbytes} bytes")
        if all_versions(watched) != versions:
            raise block.leave_out("writes into what it is called with")
        if not _is_same(_taken_out((args, kwargs), []), self._structure):
            raise block.leave_out("changes a list or a dictionary that it is called with")
        for name, (value, known) in attributes.items():
            if not _is_same(vars(value), known):
                raise block.leave_out(f"changes an object that it is called with: {name}")
        self._before = before
        return output

    def _surroundings(self) -> _Surroundings:
        return _Surroundings(self._block, self._modules, self._random())


def _taken_out(value: Any, tensors: list[Tensor]) -> Any:
    """The same with holes for tensors, which are added to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Hole(len(tensors) - 1)
    if type(value) is tuple or type(value) is list:
        return type(value)(_taken_out(each, tensors) for each in value)
    if type(value) is dict:
        return {key: _taken_out(each, tensors) for key, each in value.items()}
    return value


def _filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Hole):
        return tensors[value.index]
    if type(value) is tuple or type(value) is list:
        return type(value)(_filled(each, tensors) for each in value)
    if type(value) is dict:
        return {key: _filled(each, tensors) for key, each in value.items()}
    return value


def _is_same(one: Any, other: Any) -> bool:
    """Whether containers hold the same objects in the same places."""
    if isinstance(one, _Hole):
        found: bool = one == other
        return found
    if type(one) is not type(other):
        return False
    if type(one) is tuple or type(one) is list:
        return len(one) == len(other) and all(map(_is_same, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return one is other


def _attributes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Objects among the arguments that have attributes, and these."""
    named = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
    return {
        f"{name} ({type(value).__name__})": (value, dict(vars(value)))
        for name, value in named.items()
        if hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type)
    }


def _caches_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Caches of transformers, which a layer fills when it is called."""
    return [each for each in [*args, *kwargs.values()] if comes_from(each, *_CACHES)]


def _with_copies(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a layer with copies of the empty caches among its arguments.

    It runs twice, and would fill them twice. In training nobody reads what they would hold. Without
    any cache its tensors would lie otherwise in memory, and be multiplied with other rounding.
    """
    caches = _caches_in(args, kwargs)
    if not caches or getattr(module, "_can_checkpoint_with_cache", False):
        return forward(*args, **kwargs)
    layer = _layer_index(module)
    copies = {id(each): _copy_of(each, layer) for each in caches}
    originals = {id(copies[id(each)]): each for each in caches}
    output = forward(
        *(copies.get(id(each), each) for each in args),
        **{key: copies.get(id(each), each) for key, each in kwargs.items()},
    )
    if type(output) is tuple:
        return tuple(originals.get(id(each), each) for each in output)
    return originals.get(id(output), output)


def _copy_of(cache: Any, layer: int | None) -> Any:
    """A cache that a layer may fill, or any layer where it is not known which, beside another."""
    twin = _shallow_copy(cache)
    own = vars(twin)
    for name, value in own.items():
        if comes_from(value, *_CACHES):
            own[name] = _copy_of(value, layer)
    layers = own.get("layers")
    if isinstance(layers, list):
        wanted = range(len(layers)) if layer is None else [layer] if layer < len(layers) else []
        for index in wanted:
            layers[index] = _shallow_copy(layers[index])
    return twin


def _shallow_copy(value: Any) -> Any:
    twin = copy.copy(value)
    own = vars(twin)
    own.update({key: copy.copy(e) for key, e in own.items() if type(e) in (list, dict, set)})
    return twin


def _fills_what_is_in_use(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer is called with a cache that something of this layer was in before."""
    if getattr(module, "_can_checkpoint_with_cache", False):
        return False
    layer = _layer_index(module)
    return any(_is_in_use(cache, layer) for cache in _caches_in(args, kwargs))


def _layer_index(module: nn.Module) -> int | None:
    """Which layer of its model a module says that it is."""
    found = [getattr(part, "layer_idx", None) for part in module.modules()]
    return next((index for index in found if type(index) is int), None)


def _is_in_use(cache: Any, layer: int | None) -> bool:
    """Whether a cache holds something of a layer, or of any where that is not known."""
    caches = [
        getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    if any(each is not None for each in caches):
        return any(_is_in_use(each, layer) for each in caches if each is not None)
    layers = getattr(cache, "layers", None)
    if layer is None or not isinstance(layers, list):
        return _holds_tensors(cache)
    return layer < len(layers) and _holds_tensors(layers[layer])


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    """Whether there are any but single numbers, such as the width of a window."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and value.numel() > 0
    if depth == 0:
        return False
    if isinstance(value, list | tuple):
        return any(_holds_tensors(each, depth - 1) for each in value)
    if isinstance(value, dict):
        return any(_holds_tensors(each, depth - 1) for each in value.values())
    if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        return any(_holds_tensors(each, depth - 1) for each in vars(value).values())
    return False


def recomputes_already(module: nn.Module) -> bool:
    """Whether a module, or what is inside, was told by somebody else to compute again.

    >>> recomputes_already(nn.Linear(2, 2))
    False
    """
    flags = ("gradient_checkpointing", "grad_checkpointing")  # of transformers, of timm
    return type(module).__name__ == "CheckpointWrapper" or any(
        getattr(module, flag, False) is True for flag in flags
    )


@contextlib.contextmanager
def recomputing(blocks: Sequence[Block], random: Callable[[], RandomState]) -> Iterator[None]:
    """Let blocks compute again in the backward what their forward saved.

    Hooks of a block itself run once; those of modules inside of it run again with it.

    Args:
        blocks: by what they are called with; those that are left out compute as ever.
        random: takes every generator that a forward may draw from, as it is.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> def take():
    ...     state = RandomState([])
    ...     state.begin()
    ...     return state
    >>> with recomputing([Block("all", model)], take):
    ...     model(torch.ones(3, 2)).sum().backward()
    >>> "forward" in vars(model)
    False
    """
    with contextlib.ExitStack() as stack:
        for block in blocks:
            if not block.left_out:
                stack.enter_context(_replaced(block, random))
        try:
            yield
        except RuntimeError as error:
            undone = [block for block in blocks if block.is_undone and not block.left_out]
            if not undone or not tells_of_writing(error):
                raise
            why = "is called with a tensor that is written to afterwards"
            errors = [block.leave_out(why) for block in undone]
            raise errors[0] from error
        finally:
            for block in blocks:
                block.given.clear()


@contextlib.contextmanager
def _replaced(block: Block, random: Callable[[], RandomState]) -> Iterator[None]:
    table = vars(block.module)
    name = call_of(block.module)  # what is compiled runs twice as a whole
    before: Mapping[str, Any] = {name: table[name]} if name in table else {}
    forward = getattr(block.module, name)
    modules = list(block.module.modules())

    def run(*args: Any, **kwargs: Any) -> Any:
        is_done = block.left_out or recomputes_already(block.module)
        if is_done or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # No bit is other for what follows, so nothing has to be made again.
        if is_in_checkpoint():
            block.leave_out("runs in a checkpoint of the model's own already")
            return forward(*args, **kwargs)
        if _fills_what_is_in_use(block.module, args, kwargs):
            block.leave_out(
                "is called with a cache that holds something, and would add to it twice"
            )
            return forward(*args, **kwargs)
        block.is_used = True
        return _Call(block, modules, forward, random).run(args, kwargs)

    table[name] = run
    try:
        yield
    finally:
        del table[name]
        table.update(before)
