"""Gathering and restoring all state that a run needs to continue as if it had never stopped.

The structure of a checkpoint shows whether it fits, before anything is overwritten.

If the number of ranks changes, state that is equal on all ranks is loaded, and sharded state is
read with the current sharding. Random numbers are derived again for each rank. At the end of an
epoch, the data starts its next pass and metrics count from zero. Within an epoch, these parts
convert their states so that every row of the epoch counts once.
"""

import dataclasses
import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.checkpoints.peers import ALONE, Peers
from automicro.checkpoints.reading import FoundCheckpoint
from automicro.checkpoints.rng import derived_rng_state, rng_state
from automicro.checkpoints.state import put_together, take_apart, tensors_of
from automicro.errors import CheckpointError, CheckpointWarning, describe_error, warn
from automicro.events.callback import Callback
from automicro.events.run import LoopState, PhaseState, Sizes
from automicro.memory.device import active_budget
from automicro.microbatcher import Microbatcher
from automicro.options import unwrapped
from automicro.sharding import is_sharded
from automicro.torch_private import is_uninitialized
from automicro.trainer.context import RunContext
from automicro.trainer.resume import optimizer as by_name
from automicro.trainer.resume.model import MODEL_KEYS, ModuleState
from automicro.units import count_of


class Scope(enum.Enum):
    """Whether ranks share the state of a part."""

    RUN = enum.auto()  # equal on all ranks, or sharded over them
    RANK = enum.auto()  # each rank has its own state
    EPOCH = enum.auto()  # each rank has its own state, which counts rows of an epoch


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stateful part of a run."""

    # Has `state_dict` and `load_state_dict`; if each rank has its own state, `between_epochs`,
    # and if that counts rows of an epoch, `reshard`.
    owner: Any
    scope: Scope = Scope.RUN
    is_on_host: bool = False  # whether its tensors (random numbers) stay on the host


class Snapshot:
    """The parts of a run as one state."""

    def __init__(
        self,
        context: RunContext,
        *,
        parts: Mapping[str, Part],
        scheduler_interval: str = "batch",
        peers: Peers = ALONE,
    ) -> None:
        run = context.run
        assert run.optimizer is not None
        self.peers = peers
        owners = {name: part.owner for name, part in parts.items()}
        sizes = owners.get("sizes")
        reach = sizes.reach if isinstance(sizes, Microbatcher) else None
        self._models = ModuleState(run.modules, reach)
        self._modules = [unwrapped(each) for each in run.modules]
        self._optimizer = run.optimizer
        self._parts = parts
        self._callbacks, self._run, self._owners = context.callbacks, run, owners
        schedule = owners.get("scheduler")
        self._given = by_name.given_options(run.optimizer, schedule, scheduler_interval)
        self._saved_given = self._given

    def gather(self) -> dict[str, Any]:
        """Gather the current state without copying its tensors."""
        return {
            **self._models.gather(),
            "optimizer": by_name.optimizer_state(self._optimizer, self._modules),
            "parts": {name: _state_of(name, each) for name, each in self._owners.items()},
            "callbacks": self._callbacks.state_dicts(),
            "given": self._saved_given,
            "progress": dataclasses.asdict(self._run.state),
            "stop_reason": self._run.stop_reason,
            "rng": rng_state(),
        }

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Select the state that can differ between ranks; rank 0's is in the main state."""
        if self.peers.rank == 0:
            return {}
        everything = (self._run.model, *self._run.modules, *self._modules)
        names = {name for module in everything for name, _ in module.named_parameters()}
        return {
            **self._models.own(),
            "parts": {
                name: state["parts"][name]
                for name, part in self._parts.items()
                if part.scope is not Scope.RUN
            },
            "callbacks": _without_parameters(state["callbacks"], names),
            "progress": state["progress"],
            "rng": state["rng"],
        }

    def rehearse(self) -> None:
        """Gather the state without saving it, to find errors before training."""
        state = self.gather()
        for key in ("modules", "buffers"):  # lazy modules will have a shape at the first save
            state[key] = [
                {name: value for name, value in each.items() if not is_uninitialized(value)}
                for each in state[key]
            ]
        take_apart(state)

    def compare(self, opened: FoundCheckpoint) -> None:
        """Raise an error for a checkpoint of another run, and warn of state that is missing."""
        saved = opened.structure
        by_name.refuse_other_classes(saved["given"], self._given)
        self._models.compare(opened)
        by_name.compare_groups(self._optimizer, self._modules, saved["optimizer"])
        # Metrics can change at the end of an epoch; within one, their counts would be wrong.
        if "metrics" in self._owners and saved["progress"]["epoch_batch"] > 0:
            lacks, extra = self._owners["metrics"].differences(saved["parts"]["metrics"])
            if lacks:
                raise CheckpointError(
                    "the checkpoint was saved within an epoch, but has no counts of these metrics: "
                    f"{', '.join(lacks)}. Pass the metrics of the run that saved it, or add others "
                    "when resuming from the end of an epoch"
                )
            if extra:
                warn(
                    f"the checkpoint has counts of the metrics {', '.join(extra)}, but this run "
                    "does not have them, so they are dropped",
                    CheckpointWarning,
                )
        scalers = [
            {name: each for name, each in parts.items() if name == "scaler"}
            for parts in (saved["parts"], self._owners)
        ]
        _warn_of_others("part", *scalers)
        _warn_of_others("callback", saved["callbacks"], self._named_callbacks())
        by_name.warn_of_other_options(saved["given"], self._given)

    def restore(self, opened: FoundCheckpoint) -> dict[str, Any]:
        """Restore all state except random numbers, and return the state without the models."""
        # The models come last, so that they stay unchanged if another part refuses its state.
        is_same_world = opened.world_size == self.peers.world_size
        with on_host():
            others = opened.structure.keys() - set(MODEL_KEYS)
            saved = opened.read(self._sharded_targets(opened), keys=others)
            own = opened.read_own(self.peers.rank) if is_same_world else {}
            if not is_same_world:
                self._adapt_to_world(saved, opened)
            else:
                _overlay(saved, {key: own[key] for key in own if key not in MODEL_KEYS})
        self._restore_others(saved)
        with on_host():
            models = opened.read(self._models.targets(), keys=MODEL_KEYS)
        self._models.restore(models)
        if own:
            self._models.restore_own(own)
        if not is_same_world:
            self._models.reseed_generators(rank=self.peers.rank, world_size=self.peers.world_size)
        _restore_progress(self._run.state, saved["progress"])
        return saved

    def _adapt_to_world(self, saved: dict[str, Any], opened: FoundCheckpoint) -> None:
        """Convert the state of rank 0 if another number of ranks saved it."""
        rank, now, was = self.peers.rank, self.peers.world_size, opened.world_size
        saved["rng"] = derived_rng_state(saved["rng"], rank=rank, world_size=now)
        states, batches = saved["parts"], saved["progress"]["epoch_batch"]
        others = [opened.read_own(each)["parts"] for each in range(1, was) if batches]
        for name, part in self._parts.items():
            if name not in states or part.scope is Scope.RUN:
                continue
            if part.scope is Scope.RANK or not states[name] or not batches:
                states[name] = part.owner.between_epochs(states[name])
                continue
            try:
                of_all = [states[name], *(each[name] for each in others)]
                states[name] = part.owner.reshard(of_all, rank=rank)
            except CheckpointError as error:
                ranks = count_of(was, "rank")
                raise CheckpointError(
                    f"{ranks} saved it after {batches} batches of an epoch, but the rest of the "
                    f"epoch cannot be shared out on {count_of(now, 'rank')}: {error}. Otherwise "
                    f"resume with {ranks}, or from a checkpoint of the end of an epoch"
                ) from error

    def _sharded_targets(self, opened: FoundCheckpoint) -> dict[str, Tensor]:
        """Create the tensors into which state sharded like a parameter is read, by place."""
        parameters = self._models.sharded_parameters()
        if not parameters:
            return {}
        keys = [key for key in opened.structure if key in ("optimizer", "callbacks")]
        state = {key: _like_parameters(opened.structure[key], parameters) for key in keys}
        return {place: each for place, each in tensors_of(state).items() if is_sharded(each)}

    def _restore_others(self, saved: Mapping[str, Any]) -> None:
        by_name.load_optimizer_state(self._optimizer, self._modules, _arriving(saved["optimizer"]))
        for name, part in self._parts.items():
            if name not in saved["parts"]:
                continue
            state = saved["parts"][name]
            _load(name, part.owner, state if part.is_on_host else _arriving(state))
        callbacks = self._named_callbacks()
        for name, state in saved["callbacks"].items():
            if name in callbacks:
                _load(name, callbacks[name], _arriving(state))
        self._saved_given = saved["given"]  # the run continues with the saved options

    def _named_callbacks(self) -> dict[str, Any]:
        return dict(zip(self._callbacks.names, self._callbacks, strict=True))


def _arriving(state: Any) -> Any:
    """Move a state to a simulated device; for real ones, `load_state_dict` moves the tensors."""
    if (budget := active_budget()) is None:
        return state
    moved = {place: budget.transfer(each) for place, each in tensors_of(state).items()}
    return put_together(state, moved)


def _state_of(name: str, part: Any) -> Any:
    methods = (getattr(part, each, None) for each in ("state_dict", "load_state_dict"))
    if not all(map(callable, methods)):
        raise CheckpointError(
            f"the {name} is a {type(part).__name__} without state_dict and load_state_dict, so no "
            "checkpoint can hold it. Give it both, or train with checkpoint=None"
        )
    return part.state_dict()


def _load(name: str, part: Any, state: Any) -> None:
    try:
        part.load_state_dict(state)
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(part, Microbatcher) and isinstance(error, ValueError):
            warn(
                f"the {name} in the checkpoint are of another policy ({error}). They are dropped "
                "and found again, which changes no result",
                CheckpointWarning,
            )
            return
        raise CheckpointError(
            f"the state of {name} in the checkpoint cannot be loaded ({describe_error(error)}). "
            "Use the options of the run that saved it, or start anew with resume='never'"
        ) from error


def _restore_progress(state: LoopState, saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        if isinstance(getattr(state, name), PhaseState):
            cut = None if value["cut"] is None else Sizes(**value["cut"])
            value = PhaseState(**{**value, "cut": cut})
        setattr(state, name, value)


def _warn_of_others(what: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Warn of parts or callbacks that start fresh, and of those whose state is dropped."""
    for name in sorted(saved.keys() - here.keys()):
        warn(
            f"the checkpoint has the state of the {what} {name}, but this run does not have it, so "
            "it is dropped",
            CheckpointWarning,
        )
    for name in sorted(here.keys() - saved.keys()):
        if type(here[name]).state_dict is not Callback.state_dict:
            warn(
                f"the checkpoint has no state of the {what} {name}, which starts anew",
                CheckpointWarning,
            )


def _like_parameters(tree: Any, parameters: Mapping[str, Tensor]) -> Any:
    """Replace state tensors that have the shape of their sharded parameter by sharded ones.

    >>> _like_parameters({"w": {"exp_avg": torch.ones(2)}}, {"w": torch.ones(2)})["w"].keys()
    dict_keys(['exp_avg'])
    """

    def walk(value: Any, parameter: Tensor | None) -> Any:
        if isinstance(value, Tensor):
            if parameter is None or parameter.shape != value.shape:
                return value
            return torch.empty_like(parameter.detach(), dtype=value.dtype)
        if isinstance(value, dict):
            return {key: walk(each, parameters.get(key, parameter)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(walk(each, parameter) for each in value)
        return value

    return walk(tree, None)


def _without_parameters(tree: Mapping[Any, Any], names: Collection[str]) -> dict[Any, Any]:
    """Drop entries that are named like a parameter: they are sharded or equal on all ranks.

    >>> _without_parameters({"average": {"w": 1.0, "mean": 2.0}, "at": 3}, {"w"})
    {'average': {'mean': 2.0}, 'at': 3}
    """
    return {
        key: _without_parameters(value, names) if type(value) is dict else value
        for key, value in tree.items()
        if key not in names and not is_sharded(value)
    }


def _overlay(saved: dict[Any, Any], own: Mapping[Any, Any]) -> None:
    """Overwrite the saved state of all ranks with a rank's own entries.

    >>> saved = {"average": {"w": 1.0, "mean": 2.0}}
    >>> _overlay(saved, {"average": {"mean": 5.0}})
    >>> saved
    {'average': {'w': 1.0, 'mean': 5.0}}
    """
    for key, value in own.items():
        there = saved.get(key)
        if type(value) is dict and type(there) is dict:
            _overlay(there, value)
        else:
            saved[key] = value
