"""Blocks keep their input alone, and compute again in the backward what they did in the forward.

The second time a block finds all that it reaches as it was the first time: generators of random
numbers, buffers, parameters that were in place for a while, modes and attributes of its modules,
objects and variables that it shares with others, autocast. What the second time changes is put
back. So the gradients are the same to the last bit.

An argument may hold something else by then. So in the first attempts what is saved for the
backward the second time is compared with the first time, and a block that saves something else, or
fails, is left out by name.
"""

import contextlib
import copy
import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from automicro.errors import RollbackError, add_note, describe_error
from automicro.memory.oom import Failure, classify
from automicro.nested.slices import Calls, num_shrunk
from automicro.ranks.interface import StrayedError
from automicro.state.capture import Captured
from automicro.state.part import Replay
from automicro.torch_private import (
    all_versions,
    call_of,
    counter_of,
    ends_checkpoint,
    is_in_checkpoint,
    is_of_checkpoint,
    refuses_hooks,
    showing_saved,
    tells_of_writing,
    version_of,
)
from automicro.transaction.rng import RandomState
from automicro.values import comes_from, is_owned

logger = logging.getLogger(__name__)

_COMPARED = frozenset((0, *(16**power for power in range(1, 9))))  # attempts by their number
_SAMPLES = 64  # elements of a tensor that are compared beside its sum
_ROUNDING = 1e-3  # where operations may round otherwise the second time
_OTHERWISE = (
    "does something else when that is done: it goes by what changed since, such as an object among "
    "its arguments; hand it arguments that stay as they are"
)
_CACHES = ("transformers.Cache", "transformers.EncoderDecoderCache")

Shows = Callable[[], RandomState]

_turns = itertools.count(1)


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
        turn: grows with each time that any block is computed again; 0 before the first.
        num_done: attempts that went through in which it was computed again.
    """

    name: str
    module: nn.Module
    left_out: str = ""
    changing: dict[int, Tensor] = field(default_factory=dict)
    is_used: bool = False
    given: list[tuple[Tensor, int]] = field(default_factory=list)
    turn: int = 0
    num_done: int = 0

    @property
    def is_compared(self) -> bool:
        """Whether the second time is compared with the first: in the first attempt, and rarely."""
        return self.num_done in _COMPARED

    @functools.cached_property
    def replay(self) -> Replay:
        """Of all that its forward finds beside its arguments, and may change."""
        return Replay({self.name: self.module}, large=self.changing)

    @property
    def is_undone(self) -> bool:
        """Whether anything that it was called with was written to afterwards."""
        return any(version_of(counter) != version for counter, version in self.given)

    def leave_out(self, why: str) -> LeftOutError:
        """Compute it but once from now on."""
        self.left_out = why
        logger.warning("%s is not computed again in the backward: it %s", self.name, why)
        return LeftOutError(f"{self.name} {why}")


def _size(tensor: Tensor) -> str:
    return f"{tensor.nbytes} bytes" if tensor.layout is torch.strided else str(list(tensor.shape))


class _Saved:
    """What a forward saves for the backward, as few numbers as show whether it is the same again.

    >>> one, other, third = _Saved(), _Saved(), _Saved()
    >>> one.add(torch.ones(3)), other.add(torch.ones(3)), third.add(torch.ones(3) * 2)
    (None, None, None)
    >>> one.is_like(other), one.is_like(third)
    (True, False)
    """

    def __init__(self) -> None:
        self._count = 0
        # By device, so that nobody waits for one: a weighted sum, and that of absolute values.
        self._sums: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        """Count one that is saved."""
        # Bytes are workspaces of kernels, of which not all is written.
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or not tensor.numel() or tensor.dtype is torch.uint8:
            return
        if tensor.is_quantized or tensor.device.type == "meta":
            return
        self._count += 1
        with torch.no_grad():
            step = -(-tensor.numel() // _SAMPLES)
            places = torch.arange(0, tensor.numel(), step, device=tensor.device)
            found = _real(tensor.take(places)).nan_to_num(1.0, 2.0, 3.0)
            shares = torch.linspace(1, 2, found.numel(), device=tensor.device, dtype=torch.double)
            weight = 1 + self._count * 0.6180339887 % 1
            signed = (found.flatten() * shares).sum() * weight
            if tensor.device.type == "cpu" and tensor.is_floating_point():
                signed = signed + tensor.sum().double().nan_to_num(1.0, 2.0, 3.0) * weight
            sums = signed, found.abs().sum()
            earlier = self._sums.get(tensor.device)
            self._sums[tensor.device] = (
                sums if earlier is None else (earlier[0] + sums[0], earlier[1] + sums[1])
            )

    def is_like(self, other: "_Saved") -> bool:
        """Whether it is the same: to the bit on a CPU, elsewhere but for rounding."""
        return self._sums.keys() == other._sums.keys() and all(
            abs(float(signed) - float(other._sums[device][0]))
            <= (0 if device.type == "cpu" else _ROUNDING * float(size))
            for device, (signed, size) in self._sums.items()
        )


def _real(tensor: Tensor) -> Tensor:
    return (
        torch.view_as_real(tensor.resolve_conj()).double()
        if tensor.is_complex()
        else tensor.double()
    )


class _Plain:
    """A block's call while it is computed again; copied or saved it is the plain one.

    Args:
        run: what is called.
        block: whose.
        own: what stood there before.
    """

    def __init__(self, run: Callable[..., Any], block: nn.Module, own: Any) -> None:
        functools.update_wrapper(self, getattr(block, call_of(block)))
        self._run, self._block, self._own = run, block, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        return (_forward_of, (self._block,)) if self._own is None else (_same, (self._own,))


def _forward_of(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def _same(value: Any) -> Any:
    return value


class _Call:
    """One call of a block: first in the forward, then as often as a backward asks for it.

    Args:
        block: that is called.
        forward: its own.
        random: takes the generators as they are.
    """

    def __init__(
        self,
        block: Block,
        forward: Callable[..., Any],
        random: Callable[[], RandomState],
    ) -> None:
        self._block, self._forward, self._random = block, forward, random
        self._before: tuple[Captured, RandomState] | None = None
        self._given: tuple[Any, Any] | None = None  # the first time alone
        self._structure: Any = None
        self._parts = Calls()
        self._saved: _Saved | None = None  # where the second time is compared

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
        before = self._before
        if before is None:
            return self._first(tensors)
        block, earlier = self._block, self._saved
        block.turn = next(_turns)
        if earlier is None:
            with self._naming_failures():
                return self._again(before, tensors)
        saved, shrunk = _Saved(), num_shrunk()
        try:
            with self._naming_failures(), showing_saved(saved.add):
                output = self._again(before, tensors)
        except Exception as error:
            if ends_checkpoint(error):
                self._compare(saved, earlier, is_cut_alike=num_shrunk() == shrunk)
            raise
        self._compare(saved, earlier, is_cut_alike=num_shrunk() == shrunk)
        return output

    def _compare(self, saved: _Saved, earlier: _Saved, *, is_cut_alike: bool) -> None:
        # Where memory ran out in a slice of a part, smaller ones round otherwise.
        if is_cut_alike and not saved.is_like(earlier):
            raise self._block.leave_out(_OTHERWISE) from None

    def _again(self, before: tuple[Captured, RandomState], tensors: Sequence[Tensor]) -> Any:
        state, random = before
        now = self._random()
        try:
            with self._block.replay.as_it_stood(state), self._parts.repeating():
                random.put_back()
                args, kwargs = _filled(self._structure, tensors)
                return _with_copies(self._block.module, self._forward, args, kwargs)
        except RollbackError as error:
            raise self._block.leave_out(f"changes what cannot be put back ({error})") from error
        finally:
            now.put_back()

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """What went through the first time, and not the second, may go by what changed since."""
        try:
            yield
        except StrayedError:
            raise
        except Exception as error:
            if ends_checkpoint(error) or classify(error) is not Failure.UNRELATED:
                raise
            if is_of_checkpoint(error):  # the block has caught what ends it
                raise self._block.leave_out(f"{_OTHERWISE} ({describe_error(error)})") from error
            add_note(
                error,
                f"automicro: {self._block.name} was computed again in the backward "
                "(when_too_large), and its first forward went through; where it goes by something "
                "that changed since, leave it out, by naming those that are to be computed again: "
                'when_too_large={"recompute": ["encoder.layers.*"]}',
            )
            raise

    def _first(self, tensors: Sequence[Tensor]) -> Any:
        block, random = self._block, self._random()
        before = block.replay.take(self)
        assert self._given is not None
        (args, kwargs), self._given = self._given, None
        watched = [tensor for tensor in tensors if not tensor.is_inference()]
        versions = all_versions(watched)
        attributes = _attributes_of(args, kwargs)
        saved = _Saved() if block.is_compared else None
        comparing = contextlib.nullcontext() if saved is None else showing_saved(saved.add)
        with self._parts.noting(), comparing:
            output = _with_copies(block.module, self._forward, args, kwargs)
        written = before.written()
        if any(map(is_owned, written)):
            raise block.leave_out("writes into a frozen parameter")
        if written:
            block.changing.update({id(tensor): tensor for tensor in written})
            raise LeftOutError(f"{block.name} writes into a buffer of {_size(written[0])}")
        if all_versions(watched) != versions:
            raise block.leave_out("writes into what it is called with")
        if not _is_same(_taken_out((args, kwargs), []), self._structure):
            raise block.leave_out("changes a list or a dictionary that it is called with")
        for name, (value, known) in attributes.items():
            if not _is_same(vars(value), known):
                raise block.leave_out(f"changes an object that it is called with: {name}")
        self._before, self._saved = (before, random), saved
        return output


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
    begun = next(_turns)
    with contextlib.ExitStack() as stack:
        for block in blocks:
            if not block.left_out:
                stack.enter_context(_replaced(block, random))
        try:
            yield
            for block in blocks:
                block.num_done += block.turn > begun
        except CheckpointError as error:
            # Raised behind the second forward, and so without a name: that was the last one.
            repeated = [block for block in blocks if block.turn > begun and not block.left_out]
            if not repeated:
                raise
            raise _leave_out_last(repeated, error) from error
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


def _leave_out_last(repeated: Sequence[Block], error: CheckpointError) -> LeftOutError:
    last = max(repeated, key=lambda block: block.turn)
    if "already unpacked" not in str(error):
        return last.leave_out(_OTHERWISE)
    why = (
        "has an autograd.Function that asks for ctx.saved_tensors more than once in a backward; "
        "take all of them at once, as in x, y = ctx.saved_tensors"
    )
    alike = [block for block in repeated if type(block.module) is type(last.module)]
    return next(iter([block.leave_out(why) for block in alike]))


@contextlib.contextmanager
def _replaced(block: Block, random: Callable[[], RandomState]) -> Iterator[None]:
    table = vars(block.module)
    name = call_of(block.module)  # what is compiled runs twice as a whole
    before: Mapping[str, Any] = {name: table[name]} if name in table else {}
    forward = getattr(block.module, name)

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
        return _Call(block, forward, random).run(args, kwargs)

    table[name] = _Plain(run, block.module, table.get(name))
    try:
        yield
    finally:
        del table[name]
        table.update(before)
