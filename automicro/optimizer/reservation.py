"""Memory for an optimizer's first step, predicted on stand-ins and reserved until the step.

Most optimizers build their state in the first ``step()``, so a size found for the first batch is
too large for the second. An extra step to build the state would leave AdamW at step 1 and change
training. Instead, the state is predicted, and placeholders of the predicted sizes are held on the
device.
"""

import collections
import contextlib
import logging
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from automicro.errors import describe_error
from automicro.memory.device import active_budget, tensors_in
from automicro.memory.ledger import CountingMode
from automicro.sharding import local
from automicro.state.capture import capture
from automicro.torch_private import FakeTensor
from automicro.torch_private_execution import (
    STEP_HOOKS,
    FakeTensorMode,
    calls_step_hooks,
    is_collective,
    without_global_step_hooks,
)
from automicro.transaction.rng import RandomState
from automicro.values import OBJECT, Kind, kinds_of, walk

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMemory:
    """The memory that an optimizer's first step allocates."""

    state_bytes: list[int] = field(default_factory=list)  # of each state tensor, permanently
    temporary_bytes: int = 0  # peak in addition to the state during the step
    unknown: str | None = None  # why nothing could be predicted, or None


def predict_step_memory(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    *,
    on_accelerator: bool | None = None,
) -> StepMemory:
    """Predict the memory of an optimizer's first step of some parameters, on their device."""
    # A copy of the optimizer without state steps fake parameters, which have shapes but no data. A
    # step that reads values (Adafactor, ASGD), or uses tensors other than parameters and state,
    # cannot be predicted.
    budget = active_budget()
    # The copy shares the objects in its attributes, and a step might count in a closure or a class.
    inside = (each for _, each in walk({"": optimizer}, _kinds))
    optimizers = [each for each in inside if isinstance(each, torch.optim.Optimizer)]
    # By number, because two optimizers inside a wrapper can have the same text.
    captured = capture({str(n): each for n, each in enumerate(optimizers)}, skip=[Tensor])
    try:
        with contextlib.ExitStack() as stack:
            if budget is not None:  # stand-ins are not counted
                stack.enter_context(budget.host())
            # Hooks and schedulers must not take a step of the copy for one of the run.
            stack.enter_context(undisturbed())
            # A shard has its own shape, which cannot be read among tensors without data.
            parts = [local(each) for each in parameters]
            stack.enter_context(FakeTensorMode())
            return _dry_run(optimizer, dict(zip(parameters, parts, strict=True)), on_accelerator)
    except Exception as error:
        is_ours = isinstance(error, _UnpredictableError)
        return StepMemory(unknown=str(error) if is_ours else describe_error(error))
    finally:
        captured.put_back()


def _kinds(kind: type) -> tuple[Kind, ...]:
    """Return the kinds that a walk uses, with optimizers as objects."""
    return kinds_of(kind) or ((OBJECT,) if issubclass(kind, torch.optim.Optimizer) else ())


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context that leaves random states and hooks unchanged."""
    drawn = RandomState([])  # stand-ins are on the host, so no device generator is used
    drawn.begin()
    try:
        with without_global_step_hooks():
            yield
    finally:
        drawn.roll_back()


def _dry_run(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[nn.Parameter, Tensor],
    on_accelerator: bool | None,
) -> StepMemory:
    """Step a copy of the optimizer on stand-ins of parameters, and measure its memory."""
    stand_ins: dict[int, nn.Parameter] = {}
    for parameter, part in parameters.items():
        value = nn.Parameter(torch.zeros(part.shape, dtype=part.dtype))
        value.requires_grad_(parameter.requires_grad)
        value.grad = torch.zeros_like(value)
        stand_ins[id(parameter)] = value
    groups = []
    for group in optimizer.param_groups:
        own = [stand_ins[id(each)] for each in group["params"] if id(each) in stand_ins]
        groups.append({**group, **_options(group, on_accelerator), "params": own})
    copied = object.__new__(type(optimizer))
    table = vars(copied)
    table.update(vars(optimizer), param_groups=groups, state=collections.defaultdict(dict))
    table.pop("step", None)  # schedulers patch it on the instance
    table.update({name: collections.OrderedDict() for name in STEP_HOOKS if name in table})
    counter = _StepCounter(None)
    counter.ledger.see([*stand_ins.values(), *(each.grad for each in stand_ins.values())], [])
    resident_bytes = counter.ledger.allocated_bytes
    with counter:
        copied.step()
    # By id, because state shared by several parameters is built once.
    held = {id(each): each.nbytes for each in tensors_in(copied.state)}
    kept_bytes = counter.ledger.allocated_bytes - resident_bytes
    return StepMemory(list(held.values()), max(counter.peak_bytes - resident_bytes - kept_bytes, 0))


class _UnpredictableError(Exception):
    """A step of the copy does not represent one of the optimizer; the message has the reason."""


class _StepCounter(CountingMode):
    """Counts tensors created by a step on fake tensors, and refuses the use of any others."""

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if is_collective(func):
            raise _UnpredictableError("its step communicates with other processes")
        # torch.tensor(…) starts with a tensor that has data but is not used elsewhere.
        is_new = func is torch.ops.aten.lift_fresh.default
        if not is_new and not all(
            isinstance(each, FakeTensor) for each in tensors_in((args, kwargs))
        ):
            raise _UnpredictableError(
                f"its step uses ({func}) a tensor that is neither a parameter nor state"
            )
        return super().run(func, types, args, kwargs)


def _options(group: Mapping[str, Any], on_accelerator: bool | None) -> dict[str, Any]:
    """Return options of a group that differ for stand-ins, which are on the host."""
    changes: dict[str, Any] = {}
    is_capturable = bool(group.get("capturable"))
    has_tensor_rate = isinstance(group.get("lr"), Tensor)
    if is_capturable:  # refused on the host; the state is the same
        changes["capturable"] = False
    if has_tensor_rate:  # a tensor with data
        changes["lr"] = 0.0
    if on_accelerator is None:
        on_accelerator = any(parameter.device.type != "cpu" for parameter in group["params"])
    on_accelerator &= is_capturable or not has_tensor_rate  # otherwise torch uses the loop
    if on_accelerator and group.get("foreach", False) is None and not group.get("fused"):
        changes["foreach"] = True  # the default of torch on an accelerator
    return changes


_WANTS = operator.attrgetter("requires_grad")


class OptimizerReservation:
    """Placeholders for the state that an optimizer has yet to build; a part of the transaction."""

    # They are held during attempts and released right before the optimizer's step. A step that a
    # gradient scaler skips releases nothing. The step's temporaries never coexist with activations,
    # so they are not held: `prepare` checks that they fit after the activations are released.
    #
    # Parameters without a gradient at the last step get no state from it, so nothing is held for
    # them until an attempt has given them a gradient.

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.unknown: str | None = None  # why nothing could be reserved, or None
        self._optimizer: torch.optim.Optimizer | None = optimizer
        self._has_said = False
        self._placeholders: list[Tensor] = []
        self._held_for: set[int] = set()
        self._stateless: list[nn.Parameter] = []
        self._idle: dict[int, nn.Parameter] = {}
        self._stepped: set[int] = set()  # parameters stepped with a gradient
        self._needed = StepMemory()
        self._needed_for: list[int] = []
        self._settled: tuple[list[object], list[bool]] | None = None  # set if nothing is needed
        if not calls_step_hooks(optimizer):
            # Without hooks, the time to release the memory is unknown.
            self.unknown, self._optimizer = "its step calls no hooks", None
            _say_unknown(optimizer, self.unknown)
            return
        this = weakref.ref(self)  # the hook must not keep this object alive

        def give_back(*_: Any) -> None:
            if (reservation := this()) is not None:
                reservation.roll_back()
                if reservation._settled is None:
                    # Parameters without a gradient in this step get no state from it.
                    reservation._find_idle()

        handle = optimizer.register_step_pre_hook(give_back)
        # The optimizer might outlive this object, and would collect hooks that do nothing.
        weakref.finalize(self, handle.remove)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the placeholders hold now."""
        return sum(placeholder.nbytes for placeholder in self._placeholders)

    @property
    def upcoming_bytes(self) -> list[int]:
        """Predicted bytes of each state tensor still to be built, as of the last `begin`."""
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
        """Whether nothing was needed, and parameters and states are the same as then."""
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
        # None as a separator, or one parameter less and one state more could look the same.
        return [*parameters, None, *self._optimizer.state], list(map(_WANTS, parameters))

    def prepare(self) -> None:
        """Check that the step's temporaries fit next to parameters, gradients and state."""
        if self._settled is not None:
            return
        gained = [each for each in self._idle.values() if each.grad is not None]
        for parameter in gained:
            del self._idle[id(parameter)]  # expected to have one from now on
        self._hold_for(gained)
        if self._placeholders:
            # Released at once, because only its availability matters.
            _hold(self._needed.temporary_bytes, self._placeholders[0].device)

    def commit(self) -> None:
        """Keep the placeholders until the optimizer steps."""

    def roll_back(self) -> None:
        self._placeholders = []
        self._held_for.clear()

    def _hold_for(self, parameters: Sequence[nn.Parameter]) -> None:
        new = [each for each in parameters if id(each) not in self._held_for]
        if self._optimizer is None or not new:
            return
        # A prediction steps the whole optimizer, so it is made only once for the same parameters.
        if self._needed_for != [id(parameter) for parameter in new]:
            self._needed_for = [id(parameter) for parameter in new]
            self._needed = predict_step_memory(self._optimizer, new)
            self.unknown = self._needed.unknown
            if self._needed.unknown is not None and not self._has_said:
                self._has_said = True
                _say_unknown(self._optimizer, self._needed.unknown)
        # One block per state tensor, because a single block would later leave other gaps.
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
        """Return the parameters whose state the next step is expected to build."""
        return [each for each in self._stateless if id(each) not in self._idle]

    def _find_stateless(self) -> None:
        if self._optimizer is None:
            return
        state = self._optimizer.state
        # Some optimizers use other keys for their state, or have state for some parameters only.
        built = self._stepped if state else set()
        self._stateless = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter not in state and id(parameter) not in built
        ]


def _say_unknown(optimizer: torch.optim.Optimizer, why: str) -> None:
    logger.warning(
        "automicro: cannot predict what %s will allocate in its first step (%s), so no memory is "
        "reserved for it. The second batch may need a smaller microbatch than the first",
        type(optimizer).__name__,
        why,
    )


def _hold(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
