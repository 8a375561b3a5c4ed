"""Whether a checkpoint fits a run: what it was given, of how many ranks it is.

A checkpoint restores options with the state, so other ones given at a resume would be overridden
without a word. They are compared as they were given, before schedules changed any.

Whether a checkpoint fits is decided from its structure, before anything is overwritten.

A run of another number of ranks: what is equal on all is taken over, and what is sharded is read as
it is sharded here. What each rank had of its own is not: random numbers are derived anew. At the
end of an epoch the next pass over the data begins, and metrics count from zero. Within one, each of
these parts is asked for a state in which every row of the epoch counts once.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from automicro.checkpoints.peers import Peers
from automicro.checkpoints.reading import FoundCheckpoint
from automicro.checkpoints.rng import derived_rng_state
from automicro.errors import CheckpointError, CheckpointWarning, warn
from automicro.sharding import is_sharded
from automicro.trainer.data.described import changed
from automicro.trainer.metrics import MetricSet

# Counters of a schedule, and what repeats the optimizer's own options.
_NOT_GIVEN = ("last_epoch", "base_lrs")
INNER = "_schedulers"
"""Attributes by which torch's schedules hold their parts."""


def given_options(
    optimizer: torch.optim.Optimizer, scheduler: object, interval: str = "batch"
) -> dict[str, dict[str, Any]]:
    """The classes and plain options of an optimizer and a scheduler that have not stepped yet.

    Args:
        optimizer: the one.
        scheduler: the other; None for none.
        interval: after what the scheduler is stepped.

    >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> given = given_options(sgd, torch.optim.lr_scheduler.StepLR(sgd, 3))
    >>> given["classes"], given["options"]["lr"], given["options"]["scheduler.step_size"]
    ({'optimizer': 'SGD', 'scheduler': 'StepLR'}, 0.5, 3)
    """
    stepped = "" if interval == "batch" else f", stepped after every {interval}"
    return {
        "classes": {
            "optimizer": type(optimizer).__qualname__,
            "scheduler": None if scheduler is None else _name_of(scheduler) + stepped,
        },
        "options": dict(_options_of(optimizer)) | dict(_schedule_of(scheduler)),
    }


def _name_of(scheduler: object) -> str:
    """With what it is made of: ``SequentialLR(LinearLR, CosineAnnealingLR)``."""
    inner = vars(scheduler).get(INNER, ()) if hasattr(scheduler, "__dict__") else ()
    made_of = f"({', '.join(map(_name_of, inner))})" if inner else ""
    return type(scheduler).__qualname__ + made_of


def _options_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        of_group = f" of group {index}" if len(groups) > 1 else ""
        # A scheduler has set the first rate by now, and keeps the one that was given.
        rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
        for name, value in (group | rate).items():
            if name not in ("params", "initial_lr"):
                yield from _plain(f"{name}{of_group}", value)


def _schedule_of(scheduler: object) -> Iterator[tuple[str, Any]]:
    if callable(getattr(scheduler, "state_dict", None)):
        yield from _nested("scheduler", scheduler.state_dict())  # type: ignore[attr-defined]


def _nested(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            is_inner = str(key).startswith("_") and key != INNER
            if not is_inner and key not in _NOT_GIVEN:
                yield from _nested(place if key == INNER else f"{place}.{key}", each)
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for index, each in enumerate(value):
            yield from _nested(f"{place}.{index}", each)
    else:
        yield from _plain(place, value)


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    numbers = (bool, int, float, str, type(None))
    if isinstance(value, list | tuple):
        if all(isinstance(each, numbers) for each in value):
            yield name, list(value)
    elif isinstance(value, numbers):
        yield name, value


_REMEDY = "Use the options of the run that saved it, or start anew with resume='never'"


def refuse_other_classes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of a run with another optimizer or scheduler.

    Raises:
        CheckpointError: names both classes.
    """
    for what, name in given["classes"].items():
        was = saved["classes"].get(what)
        if was != name:
            raise CheckpointError(
                f"the checkpoint is of a run with {_class(what, was)}, and this one has "
                f"{_class(what, name)}. {_REMEDY}"
            )


def warn_of_other_options(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Say which options a checkpoint overrides."""
    # What a newer torch has more is no other option.
    differing = changed(saved["options"], given["options"])
    if differing:
        warn(
            f"the checkpoint was saved with {'; '.join(differing)}: the run goes on with the "
            "values of the checkpoint. For others, load only its weights, or set them in a "
            "callback's fit_start",
            CheckpointWarning,
        )


def warn_of_others(what: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Say which callbacks, say, start fresh, and whose state is dropped."""
    for name in sorted(saved.keys() - here.keys()):
        warn(
            f"the checkpoint has the state of the {what} {name}, which this run has not: it is "
            "dropped",
            CheckpointWarning,
        )
    for name in sorted(here.keys() - saved.keys()):
        if _may_keep_state(here[name]):
            warn(
                f"the checkpoint has no state of the {what} {name}, which starts fresh",
                CheckpointWarning,
            )


def _may_keep_state(owner: Any) -> bool:
    try:
        return bool(owner.state_dict())
    except Exception:  # it makes its state in fit_start, which comes later
        return True


def compare_metrics(saved: Mapping[str, Any], metrics: MetricSet, *, is_within_epoch: bool) -> None:
    """At the end of an epoch metrics may come and go; within one their counts would be wrong.

    Raises:
        CheckpointError: the checkpoint lacks what a metric has counted in this epoch.
    """
    lacks, extra = metrics.differences(saved)
    if not is_within_epoch:
        return
    if lacks:
        raise CheckpointError(
            f"the checkpoint is from within an epoch and lacks what these metrics have counted in "
            f"it: {', '.join(lacks)}. Pass the metrics of the run that saved it, or add others "
            "when going on from the end of an epoch"
        )
    if extra:
        warn(
            f"the checkpoint has the counts of the metrics {', '.join(extra)}, which this run has "
            "not: they are dropped",
            CheckpointWarning,
        )


def sizes_for(name: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Found sizes to load: of a policy of another kind none are. They change no result.

    Args:
        name: of the part, for the warning.
        saved: what `Microbatcher.state_dict` gave.
        here: what it gives now.
    """
    others: list[str] = []
    taken = _of_same_policies(saved, here, others)
    if others:
        warn(
            f"the {name} in the checkpoint are of another policy ({'; '.join(others)}): they are "
            "dropped, and start fresh, which changes no result",
            CheckpointWarning,
        )
    return taken


def _of_same_policies(
    saved: Mapping[str, Any], here: Mapping[str, Any], others: list[str]
) -> dict[str, Any]:
    """The saved state, with that of here wherever the kind of a policy differs."""
    taken = dict(saved)
    for key, now in here.items():
        was = saved.get(key)
        if not isinstance(was, Mapping) or not isinstance(now, Mapping):
            continue
        if was.get("kind") != now.get("kind"):
            others.append(f"{was.get('kind')}, here {now.get('kind')}")
            taken[key] = now
        elif "kind" not in now:
            taken[key] = _of_same_policies(was, now, others)
    return taken


def _class(what: str, name: str | None) -> str:
    return f"no {what}" if name is None else f"the {what} {name}"


HOST_PART = "data"
"""The part whose tensors (random numbers) lie on the host; all others are the device's."""
_OF_EPOCH = (HOST_PART, "metrics")
"""Parts that count rows of an epoch, of which each rank has its own."""


def is_own(part: str) -> bool:
    """Whether each rank has its own state of a part.

    >>> is_own("data"), is_own("metrics of eval"), is_own("sizes")
    (True, True, False)
    """
    return part in _OF_EPOCH or part.startswith("metrics of ")


def adapt_to_world(
    saved: dict[str, Any],
    parts: Mapping[str, Any],
    opened: FoundCheckpoint,
    peers: Peers,
) -> None:
    """Change a state that another number of ranks saved, so that this one can go on with it.

    Args:
        saved: rank 0's, of the checkpoint.
        parts: of the run, by name.
        opened: the checkpoint, with what was other ranks' own.
        peers: the ranks that go on.

    Raises:
        CheckpointError: it is from within an epoch, and a part of it cannot go on there.
    """
    rank, now, was = peers.rank, peers.world_size, opened.world_size
    saved["rng"] = derived_rng_state(saved["rng"], rank=rank, world_size=now)
    own = {name: state for name, state in saved["parts"].items() if is_own(name)}
    batches = saved["progress"]["epoch_batch"]
    counted = [name for name in _OF_EPOCH if own.get(name) and name in parts] if batches else []
    others = [opened.read_own(each)["parts"] for each in range(1, was) if counted]
    for name, state in own.items():
        if name in counted:
            try:
                states = [state, *(each[name] for each in others)]
                saved["parts"][name] = parts[name].reshard(states, rank=rank)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the checkpoint was saved by {_ranks(was)} after {batches} batches of an "
                    f"epoch, and this run has {_ranks(now)}, which share the rows in "
                    f"another way: {error}. Otherwise go on with {_ranks(was)}, or from a "
                    "checkpoint of the end of an epoch"
                ) from error
        elif name == HOST_PART:
            # The next pass begins anew, in the order that the loader's generators give.
            saved["parts"][name] = {**state, "passes": [], "loader": None}
        else:
            del saved["parts"][name]


def like_parameters(tree: Any, parameters: Mapping[str, Tensor]) -> Any:
    """A state in which tensors of the shape of the sharded parameter that they are for are such.

    Args:
        tree: the structure of a state in which keys are names of parameters.
        parameters: the sharded ones, by name.

    >>> like_parameters({"w": {"exp_avg": torch.ones(2)}}, {"w": torch.ones(2)})["w"].keys()
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


def without_parameters(tree: Mapping[Any, Any], names: Collection[str]) -> dict[Any, Any]:
    """The rest of a state from which all is taken that is kept by the name of a parameter.

    Parameters are equal on all ranks, or sharded; what is kept of them is, too.

    Args:
        tree: a state.
        names: of parameters.

    >>> without_parameters({"average": {"w": 1.0, "mean": 2.0}, "at": 3}, {"w"})
    {'average': {'mean': 2.0}, 'at': 3}
    """
    return {
        key: without_parameters(value, names) if type(value) is dict else value
        for key, value in tree.items()
        if key not in names and not is_sharded(value)
    }


def overlay(saved: dict[Any, Any], own: Mapping[Any, Any]) -> None:
    """Put a rank's own over what was saved for all.

    Args:
        saved: is changed.
        own: nested dicts, of which each other value replaces the one that is there.

    >>> saved = {"average": {"w": 1.0, "mean": 2.0}}
    >>> overlay(saved, {"average": {"mean": 5.0}})
    >>> saved
    {'average': {'w': 1.0, 'mean': 5.0}}
    """
    for key, value in own.items():
        there = saved.get(key)
        if type(value) is dict and type(there) is dict:
            overlay(there, value)
        else:
            saved[key] = value


def describe_change(*, was: int, now: int) -> str:
    """The change to the result, in a line.

    >>> describe_change(was=2, now=1)
    'saved by 2 ranks and resumed by 1 rank: random numbers are drawn anew from here on'
    """
    return (
        f"saved by {_ranks(was)} and resumed by {_ranks(now)}: random numbers are drawn anew from "
        "here on"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"
