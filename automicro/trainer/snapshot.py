"""Everything that a run needs to go on as if it had never stopped, gathered and put back."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from automicro.checkpoints import restore_rng_state, rng_state
from automicro.errors import CheckpointError
from automicro.events import Callbacks, Cut, LoopState, PhaseState, Run
from automicro.memory import active_budget
from automicro.trainer.optimizer_state import load_optimizer_state, optimizer_state

HOST_PART = "data"
"""The part whose tensors (random numbers) lie on the host; all others are the device's."""


_KEYS = ("modules", "optimizer", "parts", "callbacks", "progress", "stop_reason", "rng")


class Part(Protocol):
    """One thing with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Go on from it."""


class Snapshot:
    """The parts of a run, as one state.

    Args:
        run: its models and its optimizer.
        parts: whatever else has a state, by name: scheduler, scaler, sizes, metrics, data.
        callbacks: by their names.
        state: where training stands.
    """

    def __init__(
        self,
        run: Run,
        *,
        parts: Mapping[str, Part],
        callbacks: Callbacks,
        state: LoopState,
    ) -> None:
        assert run.optimizer is not None
        self._modules = run.modules
        self._optimizer = run.optimizer
        self._parts = parts
        self._callbacks = callbacks
        self._state = state
        self._run = run

    def gather(self) -> dict[str, Any]:
        """The state as it is now. Its tensors are those of the run, not copies."""
        return {
            **self.in_place(),
            "optimizer": optimizer_state(self._optimizer, self._modules),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "callbacks": {
                name: state
                for name, callback in self._named_callbacks().items()
                if (state := callback.state_dict())
            },
            "progress": dataclasses.asdict(self._state),
            "stop_reason": self._run.stop_reason,
            "rng": rng_state(),
        }

    def in_place(self) -> dict[str, Any]:
        """The part whose tensors are loaded into those that are there: the models."""
        return {"modules": [module.state_dict() for module in self._modules]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put everything back but the models, which were loaded in place, and random numbers.

        Raises:
            CheckpointError: a state of something else than is here.
        """
        self._refuse_another_version(saved)
        callbacks = self._named_callbacks()
        with_state = [name for name, each in callbacks.items() if each.state_dict()]
        _compare("parts of the run", saved["parts"], here=self._parts, needed=self._parts)
        _compare("callbacks", saved["callbacks"], here=callbacks, needed=with_state)
        load_optimizer_state(self._optimizer, self._modules, _arriving(saved["optimizer"]))
        for name, part in self._parts.items():
            state = saved["parts"][name]
            _load(name, part, state if name == HOST_PART else _arriving(state))
        for name, state in saved["callbacks"].items():
            _load(name, callbacks[name], _arriving(state))
        _restore_progress(self._state, saved["progress"])
        if saved["stop_reason"] is not None:
            self._run.stop(saved["stop_reason"])

    def _refuse_another_version(self, saved: Mapping[str, Any]) -> None:
        progress = saved.get("progress", {})
        here = dataclasses.asdict(self._state)
        expected = [*_KEYS, *(f"progress.{name}" for name in here)]
        found = [*saved, *(f"progress.{name}" for name in progress)]
        for phase in ("train", "eval"):
            expected += [f"progress.{phase}.{name}" for name in here[phase]]
            found += [f"progress.{phase}.{name}" for name in progress.get(phase, {})]
        lacks, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        if lacks or extra:
            differing = [f"it lacks {', '.join(lacks)}"] if lacks else []
            differing += [f"only it has {', '.join(extra)}"] if extra else []
            raise CheckpointError(
                f"the checkpoint is of another version of automicro: {'; '.join(differing)}. Go "
                "on with the version that saved it, or start anew with resume='never'"
            )

    def _named_callbacks(self) -> dict[str, Any]:
        return dict(zip(self._callbacks.names, self._callbacks, strict=True))


def restore_random_numbers(saved: Mapping[str, Any]) -> None:
    """Put back the random numbers of a state, once nothing else draws any."""
    restore_rng_state(saved["rng"])


def _arriving(state: Any) -> Any:
    """A state as it comes to a simulated device; real ones fetch their tensors themselves."""
    budget = active_budget()
    return state if budget is None else _map(state, budget.transfer)


def _map(state: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(state, Tensor):
        return move(state)
    if isinstance(state, dict):
        return {name: _map(value, move) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_map(each, move) for each in state)
    return state


def _compare(
    what: str, saved: Iterable[str], *, here: Iterable[str], needed: Iterable[str]
) -> None:
    missing, extra = sorted(set(needed) - set(saved)), sorted(set(saved) - set(here))
    if missing or extra:
        lacks = f"it lacks {', '.join(missing)}" if missing else ""
        only = f"only it has {', '.join(extra)}" if extra else ""
        raise CheckpointError(
            f"the checkpoint is of other {what}: {'; '.join(filter(None, (lacks, only)))}. Use "
            "the options of the run that saved it, or start anew with resume='never'"
        )


def _load(name: str, part: Any, state: Any) -> None:
    try:
        part.load_state_dict(state)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the state of {name} in the checkpoint cannot be taken over "
            f"({type(error).__name__}: {error}); use the options of the run that saved it, or "
            "start anew with resume='never'"
        ) from error


def _restore_progress(state: LoopState, saved: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(state):
        value = saved[field.name]
        if isinstance(getattr(state, field.name), PhaseState):
            phase = getattr(state, field.name)
            cut = None if value["cut"] is None else Cut(**value["cut"])
            for name, each in (value | {"cut": cut}).items():
                setattr(phase, name, each)
        else:
            setattr(state, field.name, value)
