"""Memory for an optimizer's first step: predicted by a copy on stand-ins, held back until then.

Many optimizers keep lists of tensors, counters, or another optimizer in attributes of their own. So
all of it is copied, with stand-ins in place of tensors, and what a step changes elsewhere (in a
closure, a global, a class) is put back.

Most optimizers build their state in the first ``step()``, so a size found for the first batch is
too large for the second. State is never stepped into being: that would leave AdamW at step 1 and
change training. Instead it is predicted, and placeholders of the sizes that it will take are held
on the device.
"""

import collections
import contextlib
import copy
import functools
import logging
import operator
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from automicro.errors import describe_error
from automicro.memory.budget import active_budget
from automicro.memory.ledger import CountingMode
from automicro.sharding import local
from automicro.state.capture import capture
from automicro.torch_private import (
    STEP_HOOKS,
    FakeTensorMode,
    OperationMode,
    calls_step_hooks,
    is_collective,
    schema_of,
    without_global_step_hooks,
)
from automicro.values import OBJECT, Kind, kinds_of, walk


class _UncopyableError(TypeError):
    """A step of a copy cannot stand for one of the optimizer. The message says why."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMemory:
    """The memory that an optimizer's first step allocates.

    Attributes:
        state_bytes: bytes of each state tensor that stays.
        temporary_bytes: the most that lives beside the state during the step.
        unknown: why nothing could be predicted; None where it was.
    """

    state_bytes: list[int] = field(default_factory=list)
    temporary_bytes: int = 0
    unknown: str | None = None


def predict_step_memory(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    *,
    on_accelerator: bool | None = None,
) -> StepMemory:
    """Predict the memory of an optimizer's first step of some parameters, on their device.

    A real copy of the optimizer steps, on fake tensors, which have shapes but no data. Optimizers
    that read values back (Adafactor, ASGD) are run on zeros on the host instead, one parameter at
    a time. Nothing of the original moves, and no hook or scheduler hears of it: where that cannot
    be had, nothing is run, and `StepMemory.unknown` says why.

    Example:
        >>> model = nn.Linear(256, 128, bias=False)
        >>> adam = torch.optim.Adam(model.parameters())
        >>> needed = predict_step_memory(adam, list(model.parameters()))
        >>> sorted(needed.state_bytes)[1:]
        [131072, 131072]
    """
    budget = active_budget()
    optimizers = {str(number): each for number, each in enumerate(_optimizers_in(optimizer))}
    captured = capture(optimizers, skip=[Tensor])
    try:
        with contextlib.ExitStack() as stack:
            if budget is not None:  # stand-ins do not count
                stack.enter_context(budget.host())
            # A step of the copy is no step of the run, to whatever watches steps.
            stack.enter_context(undisturbed())
            return _predict(optimizer, parameters, on_accelerator)
    finally:
        captured.put_back()


def _predict(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    on_accelerator: bool | None,
) -> StepMemory:
    dry_run = functools.partial(_dry_run, optimizer, on_accelerator=on_accelerator)
    try:
        # Without memory and in no time, where the optimizer does nothing with values.
        with FakeTensorMode():
            return dry_run(parameters, others=_zeros, keeps=_zeros)
    except _UncopyableError as error:
        return StepMemory(unknown=str(error))
    except Exception as error:
        logger.debug(
            "the optimizer cannot step on fake tensors (%s); using zeros", describe_error(error)
        )
    try:
        # One at a time: zeros of all of them would take as much host memory as the model does.
        each = [dry_run([parameter], others=None, keeps=_only_a_number) for parameter in parameters]
    except Exception as error:
        is_ours = isinstance(error, _UncopyableError)
        return StepMemory(unknown=str(error) if is_ours else describe_error(error))
    return StepMemory(
        [num_bytes for one in each for num_bytes in one.state_bytes],
        max((one.temporary_bytes for one in each), default=0),
    )


def _kinds(kind: type) -> tuple[Kind, ...]:
    """As a walk has them, into optimizers too."""
    return kinds_of(kind) or ((OBJECT,) if issubclass(kind, torch.optim.Optimizer) else ())


def _optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Itself, and those inside of it."""
    found = (each for _, each in walk({"": optimizer}, _kinds))
    return [each for each in found if isinstance(each, torch.optim.Optimizer)]


def _copied(
    optimizer: torch.optim.Optimizer,
    stand_ins: Mapping[int, Tensor],
    keeps: Callable[[Tensor], Tensor],
) -> torch.optim.Optimizer:
    """A copy without state, without hooks, with the ``step`` of its class."""
    # `deepcopy` takes what `memo` has, and so puts stand-ins in the place of all tensors.
    optimizers, memo = _optimizers_in(optimizer), dict[int, Any](stand_ins)
    parts = {
        id(each): {
            name: value
            for name, value in vars(each).items()  # schedulers patch `step` on the instance
            if name not in ("state", "step", *STEP_HOOKS)
        }
        for each in optimizers
    }
    for each in optimizers:
        memo[id(each)] = object.__new__(type(each))
        if "state" in vars(each):  # others may share it
            memo[id(each.state)] = collections.defaultdict(dict)
    held = [
        each for _, each in walk({str(key): part for key, part in parts.items()}, _kinds)
    ]  # so that no id is given twice
    for value in held:
        if isinstance(value, Tensor) and id(value) not in memo:
            memo[id(value)] = keeps(value)
        elif isinstance(value, torch.Generator):
            memo[id(value)] = value.clone_state()
    for each in optimizers:
        table = vars(memo[id(each)])
        table.update(copy.deepcopy(parts[id(each)], memo))
        table.update({name: collections.OrderedDict() for name in STEP_HOOKS if name in vars(each)})
        if "state" in vars(each):
            table["state"] = memo[id(each.state)]
    copied: torch.optim.Optimizer = memo[id(optimizer)]
    return copied


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave random numbers and hooks as they are."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        # Stand-ins lie on the host, so that no generator of a device is drawn from.
        with torch.random.fork_rng(devices=[]), without_global_step_hooks():
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _dry_run(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    *,
    others: Callable[[Tensor], Tensor] | None,
    keeps: Callable[[Tensor], Tensor],
    on_accelerator: bool | None,
) -> StepMemory:
    """Let a copy of the optimizer step stand-ins of the parameters, and count."""
    wanted = {id(parameter) for parameter in parameters}
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    counter = CountingMode(None)
    # Around the stand-ins as well: what is made inside is what a step may write to.
    with _OwnTensorsOnly():
        stand_ins: dict[int, Tensor] = {}
        for parameter in everything:
            if id(parameter) in wanted:
                value = nn.Parameter(_zeros(parameter), requires_grad=parameter.requires_grad)
                value.grad = torch.zeros_like(value)
                stand_ins[id(parameter)] = value
            elif others is not None:
                value = nn.Parameter(others(parameter), requires_grad=parameter.requires_grad)
                stand_ins[id(parameter)] = value
            else:
                stand_ins[id(parameter)] = parameter  # only to be left out
        copied = _copied(optimizer, stand_ins, keeps)
        left_out = {id(each) for each in everything}
        for group, given in zip(copied.param_groups, optimizer.param_groups, strict=True):
            group["params"] = [each for each in group["params"] if id(each) not in left_out]
            group.update(_options(given, on_accelerator))
        resident = [each for each in stand_ins.values() if id(each) not in left_out]
        counter.ledger.see([*resident, *(each.grad for each in resident)], [])
        resident_bytes = counter.ledger.allocated_bytes
        with counter:
            copied.step()
    # By id: what several parameters share is built once.
    held = {id(each): each.nbytes for each in _tensors(list(copied.state.values()))}
    kept_bytes = counter.ledger.allocated_bytes - resident_bytes
    return StepMemory(list(held.values()), max(counter.peak_bytes - resident_bytes - kept_bytes, 0))


class _OwnTensorsOnly(OperationMode):
    """Lets nothing be written that was not made inside: whatever was overlooked cannot move."""

    def __init__(self) -> None:
        super().__init__()
        self._made_inside: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if is_collective(func):
            raise _UncopyableError("its step communicates with other processes")
        written = _tensors(_written(func, args, kwargs))
        if not all(self._is_from_inside(each.untyped_storage()) for each in written):
            raise _UncopyableError(
                f"its step writes ({func}) to a tensor that it does not hold itself"
            )
        output = func(*args, **kwargs)
        given = set()
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(…): a new tensor, too
            given = {id(each.untyped_storage()) for each in _tensors((args, kwargs))}
        for each in _tensors(output):
            storage = each.untyped_storage()
            if id(storage) not in given:
                # Weakly, and compared with `is`: the id of a storage that is gone may be another's.
                self._made_inside[id(storage)] = weakref.ref(storage)
        return output

    def _is_from_inside(self, storage: torch.UntypedStorage) -> bool:
        known = self._made_inside.get(id(storage))
        return known is not None and known() is storage


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes into."""
    schema = schema_of(func)
    if schema is None:  # a higher-order operator: any of them
        yield from (args, kwargs)
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)


def _zeros(tensor: Tensor) -> Tensor:
    part = local(tensor)
    return torch.zeros(part.shape, dtype=part.dtype)


def _only_a_number(tensor: Tensor) -> Tensor:
    if tensor.numel() > 1:
        raise _UncopyableError("it keeps tensors in attributes, and reads values while it steps")
    return _zeros(tensor)


def _options(group: Mapping[str, Any], on_accelerator: bool | None) -> dict[str, Any]:
    """Options of a group that differ for stand-ins, which lie on the host."""
    changes: dict[str, Any] = {}
    is_capturable = bool(group.get("capturable"))
    has_tensor_rate = isinstance(group.get("lr"), Tensor)
    if is_capturable:  # refused there; the state is the same
        changes["capturable"] = False
        if has_tensor_rate:  # as well; reading it would wait for the device
            changes["lr"] = 0.0
    if on_accelerator is None:
        on_accelerator = any(parameter.device.type != "cpu" for parameter in group["params"])
    on_accelerator &= is_capturable or not has_tensor_rate  # torch takes the loop then
    if on_accelerator and group.get("foreach", False) is None and not group.get("fused"):
        changes["foreach"] = True  # what torch takes by default on an accelerator
    return changes


_WANTS = operator.attrgetter("requires_grad")


class OptimizerReservation:
    """Placeholders for the state that an optimizer has yet to build. A part of the transaction.

    They are held through the attempts and given back right before the optimizer's step; a step
    that a gradient scaler leaves out gives nothing back. The step's temporaries never live beside
    activations, so they are not held: `prepare` shows that there is room for them once the
    activations are gone.

    Parameters that had no gradient at the last step get no state from it. Nothing is held for them
    until an attempt has given them a gradient.

    Attributes:
        unknown: why nothing could be reserved; None where it was, or nothing is needed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.unknown: str | None = None
        self._optimizer: torch.optim.Optimizer | None = optimizer
        self._has_said = False
        self._placeholders: list[Tensor] = []
        self._held_for: set[int] = set()
        self._stateless: list[nn.Parameter] = []
        self._idle: dict[int, nn.Parameter] = {}
        self._stepped: set[int] = set()  # with a gradient
        self._needed = StepMemory()
        self._needed_for: list[int] = []
        self._settled: tuple[list[object], list[bool]] | None = None  # while nothing is needed
        if not calls_step_hooks(optimizer):
            # No event says when to give the memory back.
            self.unknown, self._optimizer = "its step calls no hooks", None
            _say_unknown(optimizer, self.unknown)
            return
        this = weakref.ref(self)  # the hook must not keep the placeholders' owner alive

        def give_back(*_: Any) -> None:
            if (reservation := this()) is not None:
                reservation.roll_back()
                if reservation._settled is None:
                    # What has no gradient in this step gets no state from it.
                    reservation._find_idle()

        handle = optimizer.register_step_pre_hook(give_back)
        # The optimizer may outlive this, and would gather hooks that do nothing.
        weakref.finalize(self, handle.remove)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the placeholders hold now."""
        return sum(placeholder.nbytes for placeholder in self._placeholders)

    @property
    def upcoming_bytes(self) -> list[int]:
        """Of each tensor of state that is still to be built, as predicted by the last `begin`."""
        self._find_stateless()
        is_current = self._needed_for == [id(parameter) for parameter in self._waiting()]
        return self._needed.state_bytes if is_current else []

    def begin(self) -> None:
        if self._optimizer is None or self._is_settled():
            return
        self._find_stateless()
        self._hold_for(self._waiting())
        if not self._idle and not self._placeholders:
            self._settled = self._parameters_and_state()

    def _is_settled(self) -> bool:
        """Whether nothing was needed, and the optimizer has the parameters and states of then."""
        if self._settled is None:
            return False
        (known, wanting), (now, wants) = self._settled, self._parameters_and_state()
        is_same = len(known) == len(now) and all(map(operator.is_, known, now)) and wanting == wants
        if not is_same:
            self._settled = None
        return is_same

    def _parameters_and_state(self) -> tuple[list[object], list[bool]]:
        assert self._optimizer is not None
        groups = [group["params"] for group in self._optimizer.param_groups]
        parameters = list(chain.from_iterable(groups))
        # None between the two: else a parameter less and a state more could look the same.
        return [*parameters, None, *self._optimizer.state], list(map(_WANTS, parameters))

    def prepare(self) -> None:
        """Show that the step's temporaries fit beside parameters, gradients and state."""
        if self._settled is not None:
            return
        gained = [each for each in self._idle.values() if each.grad is not None]
        for parameter in gained:
            del self._idle[id(parameter)]  # from now on it is expected to gain one
        self._hold_for(gained)
        if self._placeholders:
            # Let go of at once: all that counts is that it can be had.
            _hold(self._needed.temporary_bytes, self._placeholders[0].device)

    def commit(self) -> None:
        """Hold on until the optimizer steps."""

    def roll_back(self) -> None:
        self._placeholders = []
        self._held_for.clear()

    def _hold_for(self, parameters: Sequence[nn.Parameter]) -> None:
        new = [each for each in parameters if id(each) not in self._held_for]
        if self._optimizer is None or not new:
            return
        # A prediction lets the whole optimizer step: once is enough for the same parameters.
        if self._needed_for != [id(parameter) for parameter in new]:
            self._needed_for = [id(parameter) for parameter in new]
            self._needed = predict_step_memory(self._optimizer, new)
            self.unknown = self._needed.unknown
            if self._needed.unknown is not None and not self._has_said:
                self._has_said = True
                _say_unknown(self._optimizer, self._needed.unknown)
        # One for each tensor of state: one block for all would later leave other gaps.
        for num_bytes in self._needed.state_bytes:
            self._placeholders.append(_hold(num_bytes, new[0].device))
        self._held_for.update(map(id, new))

    def _find_idle(self) -> None:
        assert self._optimizer is not None
        self._idle = {
            id(parameter): parameter
            for parameter in self._stateless
            if parameter.grad is None and parameter not in self._optimizer.state
        }
        self._stepped.update(id(each) for each in self._stateless if each.grad is not None)

    def _waiting(self) -> list[nn.Parameter]:
        """The parameters whose state the next step is expected to build."""
        return [each for each in self._stateless if id(each) not in self._idle]

    def _find_stateless(self) -> None:
        if self._optimizer is None:
            return
        state = self._optimizer.state
        # Some keep their state by other keys, or for some parameters only.
        built = self._stepped if state else set()
        self._stateless = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter not in state and id(parameter) not in built
        ]


def _say_unknown(optimizer: torch.optim.Optimizer, why: str) -> None:
    logger.warning(
        "automicro: cannot predict what %s will allocate in its first step (%s), so no memory "
        "is reserved for it; the second batch may need a smaller microbatch than the first",
        type(optimizer).__name__,
        why,
    )


def _hold(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
