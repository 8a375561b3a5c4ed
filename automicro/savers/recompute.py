"""Recomputation: blocks keep only their input and run their forward again in the backward."""

# The second run finds all state as it was in the first (`AsItStood`), so gradients are the same to
# the last bit. State that the capture does not reach might have changed. So the first attempts
# compare the tensors that the two runs save, and a block that saves different ones, or fails, is
# left out by name.

import contextlib
import fnmatch
import functools
import itertools
import logging
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from automicro.errors import RollbackError, add_note, describe_error, suggestion
from automicro.memory.oom import Failure, classify
from automicro.nested.slices import AsItStood, changed, computed_again, replaced_forward
from automicro.ranks.interface import StrayedError
from automicro.state.part import Replay
from automicro.torch_private import counter_of, version_of
from automicro.torch_private_execution import (
    call_of,
    ends_checkpoint,
    is_in_checkpoint,
    is_of_checkpoint,
    refuses_hooks,
    saving,
    tells_of_writing,
)
from automicro.transaction.rng import RandomState
from automicro.values import comes_from, is_owned, is_plain

RECOMPUTE = "recompute"
"""Its name in ``when_too_large``."""
NAME_THEM = "name them, as in when_too_large={'recompute': ['encoder.layers.*']}"

# Names that wrappers add to the names of their modules.
_OF_WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_OF_ROOTS = ("module", "_orig_mod")


def repeated_blocks(
    model: nn.Module, *, but: Callable[[nn.Module], bool] = lambda _: False
) -> dict[str, nn.Module]:
    """Return the outermost repeated modules of one class by name, such as layers of a transformer.

    >>> blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)]
    >>> list(repeated_blocks(nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 2))))
    ['0.0', '0.1']
    """
    # The repeated modules are items of an ``nn.ModuleList``, an ``nn.Sequential`` or an
    # ``nn.ModuleDict``. If they have different shapes and hold such containers themselves, they are
    # stages (of a Swin transformer, a DenseNet), and the blocks are inside them. The same is true
    # of modules for which ``but`` returns True.
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        children = {
            f"{prefix}.{name}" if prefix else name: child for name, child in module.named_children()
        }
        row = {name: each for name, each in _row_of(module, children).items() if not but(each)}
        found.update({name: child for name, child in row.items() if id(child) not in seen})
        seen |= set(map(id, row.values()))
        waiting.extend((name, child) for name, child in children.items() if name not in row)
    return found


def _row_of(module: nn.Module, children: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the repeated blocks among a module's children, by name."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return {}
    # Classes of the modules that torch.compile has wrapped.
    kinds = {name: type(getattr(child, "_orig_mod", child)) for name, child in children.items()}
    counts = Counter(kinds.values())
    repeated = {
        name: child
        for name, child in children.items()
        if counts[kinds[name]] > 1 and any(child.children()) and is_called(child)
    }
    return {} if not repeated or _are_stages(list(repeated.values())) else repeated


def is_called(module: nn.Module) -> bool:
    """Whether a module can be called, which a list of layers without a forward cannot.

    >>> is_called(nn.Linear(2, 2)), is_called(nn.ModuleList())
    (True, False)
    """
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or "forward" in vars(module):
        return True
    return type(module).forward is not nn.Module.forward


def _are_stages(modules: Sequence[nn.Module]) -> bool:
    """Whether modules contain the blocks instead of being blocks, as in a Swin transformer."""
    shapes = Counter(_shapes(module) for module in modules)
    if 2 * shapes.most_common(1)[0][1] > len(modules) or len(modules) == 2:
        return False
    inside = [list(repeated_blocks(module).values()) for module in modules]
    return all(blocks and all(map(_has_two_weights, blocks)) for blocks in inside)


def _has_two_weights(module: nn.Module) -> bool:
    """Whether it is more than one layer with its norm and its activation."""
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())


def named_blocks(modules: Sequence[nn.Module], patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the outermost modules that match patterns; ``*`` stands for one part of a name.

    >>> model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    >>> list(named_blocks([model], ["encoder.*"]))
    ['encoder.0', 'encoder.1']
    """
    names = _by_name(modules, nn.Module.named_modules)
    matched: dict[str, nn.Module] = {}
    for pattern in patterns:
        fitting = {name: module for name, module in names.items() if _matches(name, pattern)}
        if not fitting:
            rows = {re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names}
            raise ValueError(
                f"no module of the model is named {pattern!r}"
                f"{suggestion(pattern, sorted(rows | set(names)))}. Name blocks as named_modules() "
                f"does, with * for one part of a name. The first are {', '.join([*names][:5])}"
            )
        matched.update(fitting)
    inner = {
        id(part) for module in matched.values() for part in module.modules() if part is not module
    }
    return {name: module for name, module in matched.items() if id(module) not in inner}


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _by_name(
    modules: Sequence[nn.Module],
    find: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]],
) -> dict[str, nn.Module]:
    """Return modules found in several roots, by names without those of wrappers."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for index, root in enumerate(modules):
        start = f"modules[{index - 1}]." if index else ""
        for name, module in find(root):
            shown = _OF_WRAPPERS.sub("", name)
            if shown and shown not in _OF_ROOTS:
                found.setdefault(id(module), (start + shown, module))  # by its first name
    return dict(found.values())


def find_blocks(
    modules: Sequence[nn.Module], *, but: Callable[[nn.Module], bool] = lambda _: False
) -> dict[str, nn.Module]:
    """Return the repeated blocks of several modules by name; see `repeated_blocks`."""
    return _by_name(modules, lambda root: repeated_blocks(root, but=but).items())


def shown_blocks(names: Iterable[str]) -> str:
    """Return a short name for repeated blocks.

    >>> shown_blocks(["h.0", "h.1", "h.2"])
    'h.* (3)'
    """
    names = list(names)
    rows = dict.fromkeys(name.rpartition(".")[0] for name in names)
    shown = ", ".join(f"{row}.*" if row else "*" for row in rows)
    return f"{shown} ({len(names)})"


logger = logging.getLogger(__name__)

_COMPARED = frozenset((0, *(16**power for power in range(1, 9))))  # numbers of attempts
_SAMPLES = 64  # elements of a tensor that are compared in addition to its sum
_ROUNDING = 1e-3  # for devices on which the second run might round differently
_OTHERWISE = (
    "computes something else the second time, because it depends on something that changed since, "
    "such as an object among its arguments. Pass arguments that do not change"
)
_CACHES = ("transformers.Cache", "transformers.EncoderDecoderCache")

_turns = itertools.count(1)


class LeftOutError(StrayedError):
    """Raised inside a step if a block cannot be recomputed; the attempt is repeated."""


@dataclass
class Block:
    """A module that is computed again in the backward."""

    name: str  # its name in the model
    module: nn.Module
    left_out: str = ""  # the reason why it is no longer recomputed; empty if it is
    # By id, large buffers that its forward has written to.
    changing: dict[int, Tensor] = field(default_factory=dict)
    # For each tensor argument in an attempt: an empty tensor with the same version counter, and the
    # version.
    given: list[tuple[Tensor, int]] = field(default_factory=list)
    turn: int = 0  # order of its last recomputation among those of all blocks; 0 before the first
    num_done: int = 0  # number of successful attempts in which it was recomputed

    @functools.cached_property
    def replay(self) -> Replay:
        """The state that its forward reads in addition to its arguments, and might change."""
        return Replay({self.name: self.module}, large=self.changing)

    @property
    def is_undone(self) -> bool:
        """Whether any of its arguments was changed after the call."""
        return any(version_of(counter) != version for counter, version in self.given)

    def leave_out(self, why: str) -> LeftOutError:
        """Stop recomputing it, and return the error to raise."""
        self.left_out = why
        logger.warning("automicro: %s is not recomputed in the backward: it %s", self.name, why)
        return LeftOutError(f"{self.name} {why}")


class _Saved:
    """Samples of each tensor that a forward saves, which show whether a second run saves the same.

    >>> one, other, third = _Saved(), _Saved(), _Saved()
    >>> _ = one.add(torch.ones(3)), other.add(torch.ones(3)), third.add(torch.ones(3) * 2)
    >>> one.is_like(other), one.is_like(third)
    (True, False)
    """

    def __init__(self) -> None:
        self._samples: list[Tensor] = []  # on their devices, to avoid waiting for them

    @torch.no_grad()
    def add(self, tensor: Tensor) -> Tensor:
        """Record a saved tensor."""
        is_strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        # Byte tensors are workspaces of kernels, which are only partly written.
        if not is_strided or tensor.is_quantized or tensor.dtype is torch.uint8:
            return tensor
        if tensor.numel() and tensor.device.type != "meta":
            step = -(-tensor.numel() // _SAMPLES)
            found = tensor.take(torch.arange(0, tensor.numel(), step, device=tensor.device))
            found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
            found = found.double().flatten()
            if tensor.device.type == "cpu" and tensor.is_floating_point():
                found = torch.cat([found, tensor.sum().double().reshape(1)])
            self._samples.append(found)
        return tensor

    def is_like(self, other: "_Saved") -> bool:
        """Whether two runs saved the same: to the bit on a CPU, up to rounding elsewhere."""
        if len(self._samples) != len(other._samples):
            return False
        return all(
            mine.shape == its.shape
            and torch.allclose(mine, its, rtol=0, atol=_rounding(mine), equal_nan=True)
            for mine, its in zip(self._samples, other._samples, strict=True)
        )


def _rounding(sample: Tensor) -> float:
    return 0.0 if sample.device.type == "cpu" else _ROUNDING * float(sample.abs().nansum())


class _Plain:
    """The replaced call of a block. Copying or pickling it yields the original call."""

    def __init__(self, run: Callable[..., Any], block: nn.Module, own: Any) -> None:
        functools.update_wrapper(self, getattr(block, call_of(block)))
        self._run, self._block, self._own = run, block, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    # A model that is copied or saved during an attempt must not contain the replacement.
    def __reduce__(self) -> Any:
        plain = types.MethodType, (type(self._block).forward, self._block)
        return plain if self._own is None else (_same, (self._own,))


def _same(value: Any) -> Any:
    return value


class _Run(AsItStood):
    """One call of a block: first in the forward, then each time that a backward needs it."""

    def __init__(self, block: Block, random: RandomState, arguments: Sequence[Any]) -> None:
        self._block = block
        self._saved = _Saved() if block.num_done in _COMPARED else None
        keeps = not getattr(block.module, "_can_checkpoint_with_cache", False)
        caches = {id(each): each for each in arguments if keeps and comes_from(each, *_CACHES)}
        objects = {id(each): each for each in arguments if id(each) not in caches}
        self._has_caches = bool(caches)
        found = [{str(n): each for n, each in enumerate(e.values())} for e in (objects, caches)]
        replays = [Replay(each, large=block.changing) for each in found if each]
        super().__init__([block.replay, *replays], random)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        block = self._block
        with super().first(), _showing(self._saved):
            yield
        written = self.written()
        if any(map(is_owned, written)):
            raise block.leave_out("writes into a frozen parameter")
        if written:
            # The next attempt copies these buffers, so it can restore them.
            block.changing.update({id(tensor): tensor for tensor in written})
            first = written[0]
            size = f"{first.nbytes} bytes" if first.layout is torch.strided else list(first.shape)
            raise LeftOutError(f"{block.name} writes into a buffer of {size}")
        if self._has_caches:
            # In training, entries of caches are never read, and would be kept until the backward.
            self.before[-1].put_back()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        self._block.turn = next(_turns)
        saved = None if self._saved is None else _Saved()
        try:
            with super().again(), _showing(saved):
                yield
        except Exception as error:
            # Torch ends the second run with an error once it has all that the backward needs.
            if not ends_checkpoint(error):
                self._explain(error)
                raise
            self._compare(saved)
            raise
        self._compare(saved)

    def _compare(self, saved: _Saved | None) -> None:
        if saved is not None and self._saved is not None and not saved.is_like(self._saved):
            raise self._block.leave_out(_OTHERWISE) from None

    def _explain(self, error: Exception) -> None:
        """Explain why a forward that succeeded failed when it was repeated."""
        block = self._block
        if isinstance(error, RollbackError):
            raise block.leave_out(f"changes what cannot be put back ({error})") from error
        if isinstance(error, StrayedError) or classify(error) is not Failure.UNRELATED:
            return
        if is_of_checkpoint(error):  # the block has caught the error that ends the second run
            raise block.leave_out(f"{_OTHERWISE} ({describe_error(error)})") from error
        add_note(
            error,
            f"automicro: {block.name} was recomputed in the backward. If it depends on something "
            "that changed, name the other blocks: when_too_large={'recompute': ['layers.*']}",
        )


def _showing(saved: _Saved | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if saved is None else saving(saved.add)


def _computed(
    block: Block,
    forward: Callable[..., Any],
    random: RandomState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return the output of a block, which is computed again in the backward."""
    given: list[Any] = []
    changed((args, kwargs), given.append)
    block.given += [
        (counter_of(each), version_of(each))
        for each in given
        if type(each) is Tensor and not each.is_inference()
    ]
    objects = [each for each in given if not (isinstance(each, Tensor) or is_plain(each))]
    # Otherwise this frame keeps inputs that the block itself would release.
    del given
    try:
        return computed_again(forward, args, kwargs, _Run(block, random, objects))
    except RuntimeError as error:
        if not refuses_hooks(error):
            raise
        why = "runs transforms of torch.func, which do not support checkpointing"
        raise block.leave_out(why) from error


def recomputes_already(module: nn.Module) -> bool:
    """Whether gradient checkpointing is already switched on for a module."""
    flags = ("gradient_checkpointing", "grad_checkpointing")  # flags of transformers and of timm
    return type(module).__name__ == "CheckpointWrapper" or any(
        getattr(module, flag, False) is True for flag in flags
    )


@dataclass
class Recompute:
    """Makes blocks keep only their input and compute the rest again in the backward.

    Hooks of a block itself run once; those of modules inside it run again.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> with Recompute([Block("all", model)], lambda: RandomState([])).applied():
    ...     model(torch.ones(3, 2)).sum().backward()
    >>> "forward" in vars(model)
    False
    """

    blocks: Sequence[Block]
    random: Callable[[], RandomState]
    name: str = field(default=RECOMPUTE, init=False)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the calls of the blocks during forward and backward."""
        begun, blocks = next(_turns), self.blocks
        with contextlib.ExitStack() as stack:
            for block in blocks:
                if not block.left_out:
                    stack.enter_context(_replaced(block, self.random))
            try:
                yield
                # A failed attempt does not reach this, because it has not compared everything.
                for block in blocks:
                    block.num_done += block.turn > begun
            except CheckpointError as error:
                # Torch raises this after the second forward, without a name: it was the last block.
                repeated = [block for block in blocks if block.turn > begun and not block.left_out]
                if not repeated:
                    raise
                raise _leave_out_last(repeated, error) from error
            except RuntimeError as error:
                undone = [block for block in blocks if block.is_undone and not block.left_out]
                if not undone or not tells_of_writing(error):
                    raise
                why = "is called with a tensor that is changed in place, by the block or after it"
                errors = [block.leave_out(why) for block in undone]
                raise errors[0] from error
            finally:
                for block in blocks:
                    block.given.clear()

    def describe(self) -> str:
        """Return a description in half a sentence."""
        names = [block.name for block in self.blocks if not block.left_out]
        if not names:
            return "no block can be recomputed in the backward"
        return f"{shown_blocks(names)} keep only their inputs and are recomputed in the backward"


def _leave_out_last(repeated: Sequence[Block], error: CheckpointError) -> LeftOutError:
    last = max(repeated, key=lambda block: block.turn)
    if "already unpacked" not in str(error):
        return last.leave_out(_OTHERWISE)
    why = (
        "has an autograd.Function that asks for ctx.saved_tensors more than once in a backward; "
        "take all of them at once, as in x, y = ctx.saved_tensors"
    )
    # Blocks of one class share that Function, and each would cost one more attempt.
    alike = [block for block in repeated if type(block.module) is type(last.module)]
    return next(iter([block.leave_out(why) for block in alike]))


def _replaced(
    block: Block, random: Callable[[], RandomState]
) -> contextlib.AbstractContextManager[None]:
    name = call_of(block.module)  # a compiled block is recomputed as a whole
    forward = getattr(block.module, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        is_done = block.left_out or recomputes_already(block.module)
        if is_done or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Results stay the same to the bit, so the attempt need not be repeated.
        if is_in_checkpoint():
            block.leave_out("already runs in a checkpoint of the model")
            return forward(*args, **kwargs)
        return _computed(block, forward, random(), args, kwargs)

    plain = _Plain(run, block.module, vars(block.module).get(name))
    return replaced_forward(block.module, plain, name)
