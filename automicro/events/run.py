"""What a callback sees of a run, and what it may ask of it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from automicro.duration import Duration
from automicro.events.expected import ExpectedValues
from automicro.events.state import LoopState
from automicro.microbatcher import Microbatcher

T = TypeVar("T")


class Run:
    """A run as callbacks see it: to be read, with a few requests.

    Models and optimizers are the real ones, and changing their weights or options is a callback's
    own responsibility.
    """

    def __init__(
        self,
        *,
        state: LoopState,
        model: nn.Module,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        max_duration: Duration,
        evaluations: Sequence[str],
        make_microbatcher: Callable[..., Microbatcher],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._state = read_only(state)
        self._model = model
        self._modules = tuple(modules)
        self._optimizer = optimizer
        self._device = device
        self._max_duration = max_duration
        self._evaluations = tuple(evaluations)
        self._make_microbatcher = make_microbatcher
        self._rank = rank
        self._world_size = world_size
        self._logged: dict[str, float] = {}
        self._unlogged: dict[str, float] = {}
        self._stop_reason: str | None = None
        self._wants_checkpoint = False
        self._expected = ExpectedValues()

    @property
    def state(self) -> LoopState:
        """Where training stands. Setting anything in it is an error."""
        return self._state

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._model

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The model, then further modules that take part."""
        return self._modules

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What steps; None in an evaluation outside of training."""
        return self._optimizer

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._device

    @property
    def rank(self) -> int:
        """This process's number, from 0. Callbacks run on all ranks, loggers on rank 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many processes train the model."""
        return self._world_size

    @property
    def max_duration(self) -> Duration:
        """When training ends."""
        return self._max_duration

    @property
    def evaluations(self) -> tuple[str, ...]:
        """The names of what is evaluated on; an empty one where there is only one."""
        return self._evaluations

    @property
    def values(self) -> Mapping[str, float]:
        """The latest of every value that was logged, by name."""
        return MappingProxyType(self._logged)

    @property
    def expected(self) -> ExpectedValues:
        """The names of values that will be logged, as far as they are known."""
        return self._expected

    @property
    def stop_reason(self) -> str | None:
        """Why training ends after this batch; None while nobody asked for it."""
        return self._stop_reason

    def microbatcher(self, **options: Any) -> Microbatcher:
        """A `Microbatcher` of this run's model, loss and options, for passes of one's own.

        With ``precision="fp16"`` its gradients are not scaled, like those at ``gradients_ready``;
        ``backward=`` may scale them.

        Args:
            options: of `Microbatcher`, in place of the run's: ``forward=…``, say.
        """
        return self._make_microbatcher(**options)

    def log(self, values: Mapping[str, float]) -> None:
        """Hand values to the loggers, with the batch that is running."""
        self._logged.update(values)
        self._unlogged.update(values)

    def stop(self, reason: str) -> None:
        """Ask to end training after this batch, or after this evaluation.

        Args:
            reason: in words that complete "training stopped: …".
        """
        self._stop_reason = self._stop_reason or reason

    def save_checkpoint(self) -> None:
        """Ask for a checkpoint after this batch, where the run makes any."""
        self._wants_checkpoint = True

    def expect(self, values: ExpectedValues) -> None:
        """For the trainer: say which values there will be."""
        self._expected = values

    def take_unlogged(self) -> dict[str, float]:
        """For the trainer: the values since this was last called."""
        values, self._unlogged = self._unlogged, {}
        return values

    def take_checkpoint_request(self) -> bool:
        """For the trainer: whether a checkpoint was asked for since this was last called."""
        wanted, self._wants_checkpoint = self._wants_checkpoint, False
        return wanted

    def train_until(self, duration: Duration) -> None:
        """For the trainer: training ends there from now on."""
        self._max_duration = duration

    def resume(self) -> None:
        """For the trainer: an earlier request to stop is over."""
        self._stop_reason = None


def read_only(value: T) -> T:
    """A view of an object, and of the state objects in it, that refuses changes.

    >>> state = LoopState(batch=3)
    >>> view = read_only(state)
    >>> state.batch = 4
    >>> view.batch
    4
    >>> view.batch = 5
    Traceback (most recent call last):
        ...
    AttributeError: LoopState.batch is read-only here; a callback keeps what it needs in itself
    """
    return cast(T, _View(value))


class _View:
    __slots__ = ("_target",)

    def __init__(self, target: object) -> None:
        object.__setattr__(self, "_target", target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if isinstance(value, dict):
            return MappingProxyType(value)
        return _View(value) if type(value).__module__ == type(self._target).__module__ else value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of what is seen, which its owner may change."""
        return copy.deepcopy(self._target, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """A view of the same, wherever it is loaded."""
        return _View, (self._target,)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{type(self._target).__name__}.{name} is read-only here; a callback keeps what it "
            "needs in itself"
        )

    def __repr__(self) -> str:
        return repr(self._target)

    def __eq__(self, other: object) -> bool:
        other = other._target if isinstance(other, _View) else other
        return bool(self._target == other)

    __hash__ = None  # type: ignore[assignment]
