"""Memory for an optimizer's first step: predicted by a copy on stand-ins, held back until then.

Copying an optimizer shallowly is not enough: many keep lists of tensors, counters, or another
optimizer in attributes of their own, and a step of the copy would move those of the original. So
everything that is reached from it is copied, with stand-ins in place of tensors. Where something
is reached that cannot be copied, or code that holds state elsewhere, there is no copy.

Most optimizers build their state in the first ``step()``, so a size found for the first batch is
too large for the second. State is never stepped into being: that would leave AdamW at step 1 and
change training. Instead it is predicted, and placeholders of the sizes that it will take are held
on the device.
"""

import collections
import contextlib
import copy
import dis
import enum
import functools
import logging
import operator
import random
import sys
import types
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
from automicro.torch_private import (
    STEP_HOOKS,
    FakeTensorMode,
    OperationMode,
    calls_step_hooks,
    schema_of,
    without_global_step_hooks,
)

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.finfo, types.BuiltinFunctionType,
    types.ModuleType, logging.Logger, types.GenericAlias,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)


class UncopyableError(TypeError):
    """Something is reached from an optimizer that cannot be copied. The message says what."""


class Replica:
    """Copies an optimizer, with stand-ins in place of its tensors.

    Example:
        >>> weight = nn.Parameter(torch.ones(3))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        >>> stand_in = nn.Parameter(torch.zeros(3))
        >>> stand_in.grad = torch.ones(3)
        >>> copied = Replica({id(weight): stand_in}).of(optimizer)
        >>> copied.step()
        >>> stand_in.tolist(), weight.tolist(), len(copied.state), len(optimizer.state)
        ([-0.5, -0.5, -0.5], [1.0, 1.0, 1.0], 1, 0)

    Args:
        stand_ins: of parameters, by their id.
        stands_in: makes one of any other tensor; may raise `UncopyableError`.
    """

    def __init__(
        self,
        stand_ins: Mapping[int, Tensor],
        stands_in: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        self._copies: dict[int, Any] = dict(stand_ins)
        self._stands_in = stands_in
        self._originals: list[Any] = []  # so that no id is given twice

    def of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The copy, without state, without hooks, with the ``step`` of its class.

        Raises:
            UncopyableError: there cannot be one.
        """
        copied: torch.optim.Optimizer = self._copy(optimizer)
        return copied

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, _PLAIN):
            return value
        self._originals.append(value)
        if isinstance(value, Tensor):
            return self._keep(value, self._stands_in(value))
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
            copied = self._keep(value, copy.copy(value))
            items = [(self._copy(key), self._copy(each)) for key, each in value.items()]
            copied.clear()
            copied.update(items)
            return copied
        if type(value) in (list, set, collections.deque):
            copied = self._keep(value, copy.copy(value))
            items = [self._copy(each) for each in value]
            copied.clear()
            (copied.update if isinstance(copied, set) else copied.extend)(items)
            return copied
        if isinstance(value, tuple | frozenset):
            copies = [self._copy(each) for each in value]
            if hasattr(value, "_fields"):
                return self._keep(value, type(value)(*copies))
            return self._keep(value, type(value)(copies))
        if isinstance(value, types.FunctionType):
            require_stateless(value)
            return value
        if isinstance(value, types.MethodType):
            require_stateless(value.__func__)
            return types.MethodType(value.__func__, self._copy(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(
                self._copy(value.func), *self._copy(value.args), **self._copy(value.keywords)
            )
        if isinstance(value, torch.Generator):
            return self._keep(value, value.clone_state())
        if isinstance(value, random.Random) or _is_of_numpy(value):
            return self._keep(value, copy.deepcopy(value))
        return self._instance(value)

    def _keep(self, original: Any, copied: Any) -> Any:
        self._copies[id(original)] = copied
        return copied

    def _optimizer(self, original: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for part in type(original).__mro__:
            for name, value in vars(part).items():
                if _is_torchs(part) and name != "step":
                    continue
                for function in _functions_of(value):
                    require_stateless(function)
        copied: torch.optim.Optimizer = self._keep(original, object.__new__(type(original)))
        table = vars(copied)
        state = vars(original).get("state")
        if state is not None:  # others may share it
            table["state"] = self._keep(state, collections.defaultdict(dict))
            self._originals.append(state)
        for name, value in self._attributes_of(original):
            if name in STEP_HOOKS:
                table[name] = collections.OrderedDict()
            elif name not in ("state", "step"):  # schedulers patch `step` on the instance
                table[name] = self._copy(value)
        return copied

    def _attributes_of(self, original: object) -> Iterator[tuple[str, Any]]:
        """Those of an object, and containers that its class keeps for all."""
        own = vars(original)
        yield from own.items()
        for part in type(original).__mro__:
            for name, value in vars(part).items():
                is_shared = isinstance(value, (*_CONTAINERS, Tensor)) and not name.startswith("__")
                if is_shared and name not in own and not _is_torchs(part):
                    yield name, value

    def _instance(self, original: Any) -> Any:
        kind = type(original)
        is_plain = (
            kind.__module__.partition(".")[0] not in ("torch", *sys.stdlib_module_names)
            and not isinstance(original, nn.Module)
            and getattr(kind, "__reduce_ex__", None) is object.__reduce_ex__
            and not any(hasattr(kind, name) for name in ("__deepcopy__", "__del__", "__slots__"))
            and hasattr(original, "__dict__")
        )
        if not is_plain:
            raise UncopyableError(f"it holds a {kind.__name__}, which cannot be copied")
        for part in kind.__mro__[:-1]:
            for value in vars(part).values():
                for function in _functions_of(value):
                    require_stateless(function)
        copied = self._keep(original, object.__new__(kind))
        for name, value in self._attributes_of(original):
            vars(copied)[name] = self._copy(value)
        return copied


def require_stateless(function: Callable[..., Any]) -> None:
    """Refuse code that keeps something outside of its arguments: in a closure or a global.

    Raises:
        UncopyableError: it does, or may.

    >>> count = 0
    >>> def step():
    ...     global count
    ...     count += 1
    >>> require_stateless(step)
    Traceback (most recent call last):
        ...
    automicro.optimizer.reservation.UncopyableError: step writes the global 'count'
    """
    _require_stateless(function, set())


def _require_stateless(function: Any, seen: set[int]) -> None:
    # Not __module__, which a wrapper takes over from what it wraps.
    home = str(function.__globals__.get("__name__")).partition(".")[0]
    is_trusted = home == "torch" or home in sys.stdlib_module_names
    if id(function) in seen or (is_trusted and not function.__closure__):
        return
    seen.add(id(function))
    name = function.__name__
    free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for step in dis.get_instructions(function.__code__):
        if is_trusted:
            break
        if step.argval == "distributed" and step.opname != "LOAD_CONST":
            raise UncopyableError(f"{name} communicates with other processes")
        if step.opname == "STORE_GLOBAL":
            raise UncopyableError(f"{name} writes the global {step.argval!r}")
        if step.opname == "STORE_DEREF" and step.argval in free:
            raise UncopyableError(f"{name} writes {step.argval!r}, which lies outside of it")
        if step.opname == "LOAD_GLOBAL":
            _require_shareable(function.__globals__.get(step.argval), name, step.argval, seen)
    for each, cell in free.items():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        _require_shareable(value, name, each, seen)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        _require_shareable(value, name, "a default", seen)


def _require_shareable(value: Any, function: str, name: str, seen: set[int]) -> None:
    home = value.__name__ if isinstance(value, types.ModuleType) else value.__class__.__module__
    if isinstance(value, types.FunctionType | type):
        home = value.__module__
    if f"{home}.".startswith("torch.distributed."):
        raise UncopyableError(f"{function} communicates with other processes ({name!r})")
    if isinstance(value, (*_PLAIN, types.BuiltinMethodType)):
        return
    if isinstance(value, types.FunctionType):
        _require_stateless(value, seen)
        return
    if isinstance(value, tuple | frozenset):
        for each in value:
            _require_shareable(each, function, name, seen)
        return
    if isinstance(value, types.MethodType):  # as of a decorator of torch
        _require_stateless(value.__func__, seen)
        _require_shareable(value.__self__, function, name, seen)
        return
    is_module_of_torch = isinstance(value, nn.Module | Tensor | torch.optim.Optimizer)
    home = type(value).__module__.partition(".")[0]
    if home in ("torch", "typing") and not is_module_of_torch:
        return
    raise UncopyableError(
        f"{function} uses {name!r}, a {type(value).__name__} that lies outside of the optimizer"
    )


def _functions_of(value: Any) -> list[types.FunctionType]:
    """The functions of something that stands in a class."""
    if isinstance(value, property):
        each = [value.fget, value.fset]
    else:
        each = [value.__func__ if isinstance(value, staticmethod | classmethod) else value]
    return [function for function in each if isinstance(function, types.FunctionType)]


@contextlib.contextmanager
def classes_kept(optimizer: object) -> Iterator[None]:
    """Put back what the classes of an optimizer hold for all of their objects.

    >>> class Counts(torch.optim.SGD):
    ...     steps = 0
    >>> with classes_kept(Counts([nn.Parameter(torch.ones(2))])):
    ...     Counts.steps += 1
    >>> Counts.steps
    0
    """
    parts = [part for part in type(optimizer).__mro__ if not _is_torchs(part)]
    before = [dict(vars(part)) for part in parts]
    held = [
        (value, copy.copy(value))
        for table in before
        for name, value in table.items()
        if type(value) in (list, dict, set) and not name.startswith("__")
    ]
    try:
        yield
    finally:
        for part, table in zip(parts, before, strict=True):
            for name in [name for name in vars(part) if name not in table]:
                delattr(part, name)
            for name, value in table.items():
                if vars(part).get(name) is not value:
                    setattr(part, name, value)
        for value, kept in held:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(kept)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins")


def _is_of_numpy(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy"


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMemory:
    """What an optimizer's first step allocates.

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
    """What the first step of some parameters of an optimizer will allocate on their device.

    Args:
        optimizer: that is to step; nothing of it moves.
        parameters: that have a gradient in the step.
        on_accelerator: whether they will lie on one, where torch steps all of them at once; None
            to read it off them.

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
    with contextlib.ExitStack() as stack:
        if budget is not None:  # stand-ins do not count
            stack.enter_context(budget.host())
        stack.enter_context(undisturbed())
        stack.enter_context(classes_kept(optimizer))
        return _predict(optimizer, parameters, on_accelerator)


def _predict(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    on_accelerator: bool | None,
) -> StepMemory:
    dry_run = functools.partial(_dry_run, optimizer, on_accelerator=on_accelerator)
    try:
        with FakeTensorMode():
            return dry_run(parameters, others=_zeros, keeps=_zeros)
    except UncopyableError as error:
        return StepMemory(unknown=str(error))
    except Exception as error:
        logger.debug(
            "the optimizer cannot step on fake tensors (%s); using zeros", describe_error(error)
        )
    try:
        each = [dry_run([parameter], others=None, keeps=_only_a_number) for parameter in parameters]
    except UncopyableError as error:
        return StepMemory(unknown=str(error))
    except Exception as error:
        return StepMemory(unknown=describe_error(error))
    return StepMemory(
        [num_bytes for one in each for num_bytes in one.state_bytes],
        max((one.temporary_bytes for one in each), default=0),
    )


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave random numbers and hooks as they are."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
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
    """Let a copy of the optimizer step stand-ins of the parameters, and count.

    Args:
        optimizer: stays as it is.
        parameters: that have a gradient in the step.
        others: stand-ins for the other parameters; None where the copy goes without those.
        keeps: stand-ins for tensors in attributes and options of the optimizer.
        on_accelerator: as `predict_step_memory`.
    """
    wanted = {id(parameter) for parameter in parameters}
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    counter = CountingMode(None)
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
        copied = Replica(stand_ins, keeps).of(optimizer)
        left_out = {id(each) for each in everything}
        for group, given in zip(copied.param_groups, optimizer.param_groups, strict=True):
            group["params"] = [each for each in group["params"] if id(each) not in left_out]
            group.update(_options(given, on_accelerator))
        resident = [each for each in stand_ins.values() if id(each) not in left_out]
        counter.ledger.see([*resident, *(each.grad for each in resident)], [])
        resident_bytes = counter.ledger.allocated_bytes
        with counter:
            copied.step()
    state = [tensor.nbytes for tensor in _tensors_in(list(copied.state.values()), set())]
    kept_bytes = counter.ledger.allocated_bytes - resident_bytes
    return StepMemory(state, max(counter.peak_bytes - resident_bytes - kept_bytes, 0))


class _OwnTensorsOnly(OperationMode):
    """Lets nothing be written that was not made inside: whatever was overlooked cannot move."""

    def __init__(self) -> None:
        super().__init__()
        self._made_inside: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        written = _tensors(_written(func, args, kwargs))
        if not all(self._is_from_inside(each.untyped_storage()) for each in written):
            raise UncopyableError(
                f"its step writes ({func}) to a tensor that it does not hold itself"
            )
        output = func(*args, **kwargs)
        given = set()
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(…): a new tensor, too
            given = {id(each.untyped_storage()) for each in _tensors((args, kwargs))}
        for each in _tensors(output):
            storage = each.untyped_storage()
            if id(storage) not in given:
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
        raise UncopyableError("it keeps tensors in attributes, and reads values while it steps")
    return _zeros(tensor)


def _options(group: Mapping[str, Any], on_accelerator: bool | None) -> dict[str, Any]:
    """What of a group's options is another one for stand-ins, which lie on the host."""
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


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each, seen)


_WANTS = operator.attrgetter("requires_grad")


class OptimizerReservation:
    """Placeholders for the state that an optimizer has yet to build. A part of the transaction.

    They are held through the attempts and given back right before the optimizer's step; a step
    that a gradient scaler leaves out gives nothing back. The step's temporaries never live beside
    activations, so they are not held: `prepare` shows that there is room for them once the
    activations are gone.

    Parameters that had no gradient at the last step get no state from it. Nothing is held for them
    until an attempt has given them a gradient.

    Args:
        optimizer: the one that builds the state, inside of any wrapper; None where there is
            nothing to reserve for.

    Attributes:
        unknown: why nothing could be reserved; None where it was, or nothing is needed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.unknown: str | None = None
        if optimizer is not None and not calls_step_hooks(optimizer):
            # Nobody would say when to give the memory back.
            self.unknown = "its step calls no hooks"
            _say_unknown(optimizer, self.unknown)
            optimizer = None
        self._optimizer = optimizer
        self._has_said = False
        self._placeholders: list[Tensor] = []
        self._held_for: set[int] = set()
        self._stateless: list[nn.Parameter] = []
        self._idle: dict[int, nn.Parameter] = {}
        self._stepped: set[int] = set()  # with a gradient
        self._needed = StepMemory()
        self._needed_for: list[int] = []
        self._settled: tuple[list[object], list[bool]] | None = None  # while nothing is needed
        if optimizer is not None:
            this = weakref.ref(self)  # the hook must not keep the placeholders' owner alive

            def give_back(*_: Any) -> None:
                if (reservation := this()) is not None:
                    reservation.roll_back()
                    if reservation._settled is None:
                        reservation._find_idle()

            handle = optimizer.register_step_pre_hook(give_back)
            weakref.finalize(self, handle.remove)

    @property
    def is_used(self) -> bool:
        """Whether there is an optimizer to hold memory for."""
        return self._optimizer is not None

    @property
    def reserved_bytes(self) -> int:
        """What the placeholders hold now."""
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
        if self._needed_for != [id(parameter) for parameter in new]:
            self._needed_for = [id(parameter) for parameter in new]
            self._needed = predict_step_memory(self._optimizer, new)
            self.unknown = self._needed.unknown
            if self._needed.unknown is not None and not self._has_said:
                self._has_said = True
                _say_unknown(self._optimizer, self._needed.unknown)
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
        "cannot predict what %s will allocate in its first step (%s), so no memory is reserved for "
        "it; the second batch may need a smaller microbatch than the first",
        type(optimizer).__name__,
        why,
    )


def _hold(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
