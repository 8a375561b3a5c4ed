"""Levels: ways to compute microbatches if even the smallest does not fit."""

# Level 0 is plain. Each further level switches on savers, which take less memory and more time, and
# leave all results the same.

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from automicro.nested.parts import LanguageTail, find_language_model
from automicro.options import check_choice
from automicro.savers.offload import OFFLOAD, Offload
from automicro.savers.recompute import (
    NAME_THEM,
    RECOMPUTE,
    Block,
    Recompute,
    find_blocks,
    is_called,
    named_blocks,
    recomputes_already,
    shown_blocks,
)
from automicro.step.feature import Feature
from automicro.step.parts import attached_to
from automicro.step.setup import Setup
from automicro.torch_private_execution import is_compiled
from automicro.transaction.rng import RandomState, devices_of

logger = logging.getLogger(__name__)

PLAIN = "plain"
"""The name of level 0."""

NESTED = "nested"
SAVERS = (RECOMPUTE, OFFLOAD, NESTED)  # a new saver is named here and created in `_made`
# A tail in slices leaves outputs without logits, which metrics might need.
_OF_AUTO = (RECOMPUTE, OFFLOAD)
_ALONE = ("error", "auto")
_CHOICES = ("error", *SAVERS, "auto")
_LISTED = " and ".join(SAVERS)
_EXAMPLE = "as in {'recompute': ['encoder.layers.*'], 'offload': True}"


Savers: TypeAlias = str | Sequence[Any] | Mapping[str, Any]
"""As `WhenTooLarge` has them."""


@dataclass
class NestedTail:
    """Runs head and loss of a language model in slices, so that whole logits never exist."""

    tail: LanguageTail
    name: str = field(default=NESTED, init=False)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        self.tail.attach()
        try:
            yield
        finally:
            self.tail.remove()

    def describe(self) -> str:
        return "the logits and their loss are computed in slices"


Saver: TypeAlias = Recompute | Offload | NestedTail
"""One way to use less memory, by its name in ``when_too_large``."""


@dataclass(frozen=True)
class Level:
    """The way in which the microbatches of an attempt are computed.

    Example:
        >>> levels = make_levels("offload", [nn.Linear(2, 2)], torch.device("cpu"))
        >>> [level.name for level in levels]
        ['plain', 'offload']
        >>> with levels[1].applied():
        ...     pass  # forward and backward
        >>> levels[1].describe()
        'tensors saved for the backward wait in host memory'
    """

    savers: tuple[Saver, ...] = ()

    @property
    def name(self) -> str:
        """The names of all savers, or `PLAIN`."""
        return " + ".join(saver.name for saver in self.savers) or PLAIN

    def describe(self) -> str:
        """Return a description in one sentence."""
        return ", and ".join(saver.describe() for saver in self.savers) or "everything is kept"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Switch the savers on for the forward and backward of all microbatches of an attempt."""
        # The stack restores all modules, also after an error.
        with contextlib.ExitStack() as stack:
            for saver in self.savers:
                stack.enter_context(saver.applied())
            yield


class WhenTooLarge(Feature):
    """Saves memory in training if even the smallest microbatch does not fit.

    Args:
        savers: ``"recompute"`` (repeated blocks keep only their input, and are computed again in
            the backward), ``"offload"`` (tensors saved for the backward wait in host memory),
            ``"nested"`` (logits and loss of a language model are computed in slices), or a list of
            these: each level adds the next one. In a mapping, the value of ``"recompute"`` names
            the blocks, with ``*`` for one part of a name:
            ``{"recompute": ["encoder.layers.*"], "offload": True}``. ``"auto"`` chooses the fastest
            by measured time, even if smaller microbatches would fit; ``"error"`` uses no savers.

    Raises:
        TypeError, ValueError: an unknown value. Creating a Microbatcher raises ValueError if the
            model has no such blocks.

    Example:
        >>> from automicro import Microbatcher
        >>> microbatcher = Microbatcher(
        ...     nn.Linear(8, 2), loss_fn=nn.MSELoss(), features=[WhenTooLarge("offload")]
        ... )
        >>> microbatcher.describe_level("offload")
        'tensors saved for the backward wait in host memory'
    """

    def __init__(self, savers: Savers) -> None:
        self._savers, self._is_auto = savers, _read(savers)[1]

    def attach(self, setup: Setup) -> None:
        setup.levels, setup.levels_by_time = self._made, self._is_auto

    def _made(self, setup: Setup) -> list[Level]:
        levels = make_levels(
            self._savers, setup.modules, setup.device, generators=setup.reach.generators
        )
        for saver in levels[-1].savers:  # the last level has all savers
            if isinstance(saver, NestedTail):
                setup.parts.give(saver.tail.name, saver.tail.split)
        return levels


def make_levels(
    when_too_large: Savers,
    modules: Sequence[nn.Module],
    device: torch.device,
    *,
    generators: Iterable[Any] | Callable[[], Iterable[Any]] = (),
) -> list[Level]:
    """Return the levels for an option, starting with the plain one.

    >>> blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]
    >>> levels = make_levels("auto", [nn.Sequential(*blocks)], torch.device("cpu"))
    >>> [level.name for level in levels]
    ['plain', 'recompute', 'offload', 'recompute + offload']
    """
    wanted, is_auto = _read(when_too_large)
    modules = list(modules)
    devices = functools.cache(lambda: devices_of(modules, device))
    savers: list[Saver] = []
    for name, names in wanted.items():
        try:
            savers.append(_made(name, names, modules, lambda: RandomState(devices(), generators)))
        except ValueError as error:
            # `auto` uses what the model has; blocks that were named must exist.
            if not is_auto or names is not None:
                raise
            logger.info("nothing is recomputed in the backward: %s", error)
    if is_auto:
        further = [Level(tuple(savers))] if len(savers) > 1 else []
        return [Level(), *(Level((saver,)) for saver in savers), *further]
    return [Level(tuple(savers[:number])) for number in range(len(savers) + 1)]


def _read(given: Any) -> tuple[dict[str, list[str] | None], bool]:
    """Return savers in order, with the names of their blocks, and whether it is ``"auto"``."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    named: dict[str, Any] = {}
    for each in given if is_list else [given]:
        if not isinstance(each, str | Mapping):
            raise TypeError(
                f"when_too_large={given!r}: {each!r} is of type {type(each).__name__}. Use one of "
                f"{', '.join(_CHOICES)}, a list of {_LISTED}, or a mapping, {_EXAMPLE}"
            )
        named |= {each: None} if isinstance(each, str) else each
    wanted = {
        check_choice("when_too_large", name, _CHOICES): _read_names(given, name, value)
        for name, value in named.items()
    }
    is_alone = not wanted.keys().isdisjoint(_ALONE)
    if not wanted or (is_alone and (is_list or len(wanted) > 1)):
        raise ValueError(
            f"when_too_large={given!r} is empty, or combines a name that must stand alone "
            f"({', '.join(_ALONE)}). Pass one of these alone, or a list of {_LISTED}"
        )
    if "auto" in wanted:
        return {**dict.fromkeys(_OF_AUTO), RECOMPUTE: wanted["auto"]}, True
    wanted.pop("error", None)
    return wanted, False


def _read_names(given: Any, saver: str, value: Any) -> list[str] | None:
    if value is None or value is True:
        return None
    names = [value] if isinstance(value, str) else value
    is_list = isinstance(names, Sequence) and all(isinstance(each, str) for each in names)
    if saver in (OFFLOAD, NESTED) or not is_list or not names:
        raise TypeError(
            f"when_too_large={given!r}: {value!r} of type {type(value).__name__} names no blocks "
            f"for {saver!r}. Name blocks, {_EXAMPLE}"
        )
    return list(names)


def _made(
    name: str, names: list[str] | None, modules: list[nn.Module], random: Callable[[], RandomState]
) -> Saver:
    if name == OFFLOAD:
        return Offload(modules)
    if name == RECOMPUTE:
        return Recompute(_blocks(modules, names), random)
    model = find_language_model(modules[0])
    if model is None:
        raise ValueError(
            f"{type(modules[0]).__name__} is not a language model of transformers. Leave out "
            "'nested', and give the part that computes its loss a size with nested={…}"
        )
    return NestedTail(LanguageTail(model, {"microbatch_unit": "tokens"}))


def _blocks(modules: list[nn.Module], names: list[str] | None) -> list[Block]:
    """Return the blocks to recompute."""
    if names is None:
        # A part with a size of its own recomputes already, unless it runs in one piece.
        found = find_blocks(modules, but=lambda each: attached_to(each) is not None)
        found = found or find_blocks(modules)
        if not found:
            raise ValueError(
                f"{type(modules[0]).__name__} has no repeated blocks that the backward could "
                "recompute (modules of one class in an nn.ModuleList or nn.Sequential); "
                f"{NAME_THEM}"
            )
    else:
        found = named_blocks(modules, names)
        for name, block in found.items():
            if not is_called(block):
                raise ValueError(
                    f"{name} is of type {type(block).__name__}, which holds modules and is never "
                    f"called itself. Name the modules in it, as in {name + '.*'!r}"
                )
    every = [module for root in modules for module in root.modules()]
    done = [module for module in every if recomputes_already(module)]
    # Inside a module that recomputes already, a block would run three times.
    inside = {id(part) for outer in done for part in outer.modules()}
    left = {
        name: block
        for name, block in found.items()
        if id(block) not in inside and not any(map(recomputes_already, block.modules()))
    }
    if not left:
        raise ValueError(
            f"{shown_blocks(found)} already recompute in the backward (gradient checkpointing is "
            "on), so 'recompute' has no effect. Leave it out, or turn gradient checkpointing off, "
            "so that 'recompute' runs only when it is needed"
        )
    _refuse_compiled(every, set(map(id, left.values())))
    # The forward of a scripted module cannot be replaced.
    is_scripted = torch.jit.ScriptModule
    return [Block(name, each) for name, each in left.items() if not isinstance(each, is_scripted)]


def _refuse_compiled(modules: Iterable[nn.Module], blocks: set[int]) -> None:
    for module in modules:
        is_block = not blocks.isdisjoint((id(module), id(getattr(module, "_orig_mod", None))))
        if is_compiled(module) and not is_block:
            if blocks.isdisjoint(map(id, module.modules())):
                continue
            raise ValueError(
                f"the model is compiled as a whole ({type(module).__name__}), so its blocks "
                "cannot be recomputed one by one. Compile each block instead (block.compile()), "
                "or use when_too_large='offload'"
            )
