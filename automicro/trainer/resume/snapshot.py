"""Everything that a run needs to go on as if it had never stopped, gathered and put back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from automicro.batch.device import on_host
from automicro.checkpoints.peers import ALONE, Peers
from automicro.checkpoints.reading import FoundCheckpoint
from automicro.checkpoints.rng import rng_state
from automicro.checkpoints.state import put_together, take_apart, tensors_of
from automicro.errors import CheckpointError, describe_error
from automicro.events.run import LoopState, PhaseState, Sizes
from automicro.memory.budget import active_budget
from automicro.microbatcher import Microbatcher
from automicro.options import unwrapped
from automicro.sharding import is_sharded
from automicro.torch_private import is_uninitialized
from automicro.trainer.context import RunContext
from automicro.trainer.metrics import MetricSet
from automicro.trainer.resume.fits import (
    HOST_PART,
    adapt_to_world,
    compare_metrics,
    given_options,
    is_own,
    like_parameters,
    overlay,
    refuse_other_classes,
    sizes_for,
    warn_of_other_options,
    warn_of_others,
    without_parameters,
)
from automicro.trainer.resume.model import MODEL_KEYS, ModuleState
from automicro.trainer.resume.optimizer import (
    compare_groups,
    load_optimizer_state,
    optimizer_state,
)

_REMEDIES = {
    "scheduler": (
        "; a LambdaLR saves what its callable objects hold, so use a function, or an object that "
        "holds numbers"
    )
}


class Snapshot:
    """The parts of a run, as one state.

    Args:
        context: of the run: its models, its optimizer, its callbacks, where it stands.
        parts: whatever else has a state, by name: scheduler, scaler, sizes, metrics, data.
        scheduler_interval: after what the scheduler is stepped.
        peers: all ranks that save together.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        parts: Mapping[str, Any],
        scheduler_interval: str = "batch",
        peers: Peers = ALONE,
    ) -> None:
        run = context.run
        assert run.optimizer is not None
        self.peers = peers
        sizes = parts.get("sizes")
        reach = sizes.reach if isinstance(sizes, Microbatcher) else None
        self._models = ModuleState(run.modules, reach)
        self._modules = [unwrapped(each) for each in run.modules]
        self._optimizer = run.optimizer
        self._parts = parts
        self._callbacks = context.callbacks
        self._state = context.state
        self._run = run
        self._given = given_options(run.optimizer, parts.get("scheduler"), scheduler_interval)
        self._saved_given = self._given

    def gather(self) -> dict[str, Any]:
        """The state as it is now. Its tensors are those of the run, not copies.

        Raises:
            CheckpointError: a part has no state.
        """
        return {
            **self._models.gather(),
            "optimizer": optimizer_state(self._optimizer, self._modules),
            "parts": {name: _state_of(name, part) for name, part in self._parts.items()},
            "callbacks": self._callbacks.state_dicts(),
            "given": self._saved_given,
            "progress": dataclasses.asdict(self._state),
            "stop_reason": self._run.stop_reason,
            "rng": rng_state(),
        }

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """State that may differ between ranks. Rank 0's stands in the state of all.

        Args:
            state: what `gather` gave.
        """
        if self.peers.rank == 0:
            return {}
        return {
            **self._models.own(),
            "parts": {name: each for name, each in state["parts"].items() if is_own(name)},
            "callbacks": without_parameters(state["callbacks"], self._parameter_names()),
            "progress": state["progress"],
            "rng": state["rng"],
        }

    def rehearse(self) -> None:
        """Gather a state that is not saved.

        Raises:
            CheckpointError: no checkpoint can hold it.
        """
        state = self.gather()
        for key in ("modules", "buffers"):  # lazy modules have a shape once it is saved
            state[key] = [_initialized(each) for each in state[key]]
        for name, part in state.pop("parts").items():
            try:
                take_apart({name: part})
            except CheckpointError as error:
                if name not in _REMEDIES:
                    raise
                raise CheckpointError(f"{error}{_REMEDIES[name]}") from error
        take_apart(state)

    def compare(self, opened: FoundCheckpoint) -> None:
        """Refuse the checkpoint of another run, and say what starts fresh. Nothing is changed.

        Raises:
            CheckpointError: a state of something else than is here.
        """
        saved = opened.structure
        refuse_other_classes(saved["given"], self._given)
        self._models.compare(opened)
        compare_groups(self._optimizer, self._modules, saved["optimizer"])
        for name, part in self._parts.items():
            if isinstance(part, MetricSet) and name in saved["parts"]:
                # Between evaluations their metrics have counted nothing.
                is_within = name == "metrics" and saved["progress"]["epoch_batch"] > 0
                compare_metrics(saved["parts"][name], part, is_within_epoch=is_within)
        # Evaluators come and go without a word, and a scheduler is one of the classes above.
        scalers = [
            {k: v for k, v in each.items() if k == "scaler"}
            for each in (saved["parts"], self._parts)
        ]
        warn_of_others("part", *scalers)
        warn_of_others("callback", saved["callbacks"], self._named_callbacks())
        warn_of_other_options(saved["given"], self._given)

    def restore(self, opened: FoundCheckpoint) -> dict[str, Any]:
        """Put everything back but random numbers; what was put back, but the models.

        The models come last, so that they are untouched where anything refuses its own state.

        Args:
            opened: a checkpoint that `compare` let pass.

        Raises:
            CheckpointError: something refuses its own state, or the disk fails.
        """
        is_same_world = opened.world_size == self.peers.world_size
        with on_host():
            others = opened.structure.keys() - set(MODEL_KEYS)
            saved = opened.read(self._sharded_targets(opened), keys=others)
            own = opened.read_own(self.peers.rank) if is_same_world else {}
            if not is_same_world:
                adapt_to_world(saved, self._parts, opened, self.peers)
            else:
                overlay(saved, {key: own[key] for key in own if key not in MODEL_KEYS})
        self._restore_others(saved)
        with on_host():
            models = opened.read(self._models.targets(), keys=MODEL_KEYS)
        self._models.restore(models)
        if own:
            self._models.restore_own(own)
        if not is_same_world:
            self._models.reseed_generators(rank=self.peers.rank, world_size=self.peers.world_size)
        _restore_progress(self._state, saved["progress"])
        return saved

    def _parameter_names(self) -> set[str]:
        return {
            name
            for module in (self._run.model, *self._run.modules, *self._modules)
            for name, _ in module.named_parameters()
        }

    def _sharded_targets(self, opened: FoundCheckpoint) -> dict[str, Tensor]:
        """Where this rank's part of what is sharded like a parameter is read into, by place."""
        parameters = self._models.sharded_parameters()
        if not parameters:
            return {}
        keys = [key for key in opened.structure if key in ("optimizer", "callbacks")]
        state = {key: like_parameters(opened.structure[key], parameters) for key in keys}
        return {place: each for place, each in tensors_of(state).items() if is_sharded(each)}

    def _restore_others(self, saved: Mapping[str, Any]) -> None:
        load_optimizer_state(self._optimizer, self._modules, _arriving(saved["optimizer"]))
        for name, part in self._parts.items():
            if name not in saved["parts"]:
                continue
            state = saved["parts"][name]
            if isinstance(part, Microbatcher):
                state = sizes_for(name, state, part.state_dict())
            _load(name, part, state if name == HOST_PART else _arriving(state))
        callbacks = self._named_callbacks()
        for name, state in saved["callbacks"].items():
            if name in callbacks:
                _load(name, callbacks[name], _arriving(state))
        self._saved_given = saved["given"]  # these go on, whatever was given now

    def _named_callbacks(self) -> dict[str, Any]:
        return dict(zip(self._callbacks.names, self._callbacks, strict=True))


def _arriving(state: Any) -> Any:
    """A state as it comes to a simulated device; real ones fetch their tensors themselves."""
    if (budget := active_budget()) is None:
        return state
    moved = {place: budget.transfer(each) for place, each in tensors_of(state).items()}
    return put_together(state, moved)


def _state_of(name: str, part: Any) -> Any:
    lacks = [
        method
        for method in ("state_dict", "load_state_dict")
        if not callable(getattr(part, method, None))
    ]
    if lacks:
        raise CheckpointError(
            f"the {name} is a {type(part).__name__}, which has no {' and no '.join(lacks)}, so no "
            "checkpoint can hold it; give it both methods, or train with checkpoint=None"
        )
    return part.state_dict()


def _initialized(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in state.items()
        if not (isinstance(value, Tensor) and is_uninitialized(value))
    }


def _load(name: str, part: Any, state: Any) -> None:
    try:
        part.load_state_dict(state)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the state of {name} in the checkpoint cannot be taken over "
            f"({describe_error(error)}); use the options of the run that saved it, or "
            "start anew with resume='never'"
        ) from error


def _restore_progress(state: LoopState, saved: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(state):
        value = saved[field.name]
        if isinstance(getattr(state, field.name), PhaseState):
            phase = getattr(state, field.name)
            cut = None if value["cut"] is None else Sizes(**value["cut"])
            for name, each in (value | {"cut": cut}).items():
                setattr(phase, name, each)
        else:
            setattr(state, field.name, value)
