"""A checkpoint of so many ranks, and a run of another number of them.

What is equal on all ranks is taken over, and what is sharded is read as it is sharded here. What
each rank had of its own is not: random numbers are derived anew. At the end of an epoch the next
pass over the data begins, and metrics count from zero. Within one, each of these parts is asked for
a state in which every row of the epoch counts once.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from automicro.checkpoints import OpenedCheckpoint, derived_rng_state
from automicro.errors import CheckpointError
from automicro.shards import is_sharded

HOST_PART = "data"
"""The part whose tensors (random numbers) lie on the host; all others are the device's."""

_COUNTED = (HOST_PART, "metrics")
"""What goes on in the middle of an epoch. Metrics of evaluations have counted nothing there."""


@runtime_checkable
class Reshardable(Protocol):
    """A part, other on each rank, that can go on where there are more or fewer ranks."""

    def reshard(self, states: Sequence[Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
        """The state for a rank within an epoch, to be loaded by ``load_state_dict``.

        Args:
            states: of all ranks that saved, in their order.
            rank: the one that goes on.

        Raises:
            CheckpointError: there is none with which every row is trained on exactly once.
        """


def is_own(part: str) -> bool:
    """Whether a part may be another on each rank.

    >>> is_own("data"), is_own("metrics of eval"), is_own("scheduler")
    (True, True, False)
    """
    return part == HOST_PART or _counts(part)


def _counts(part: str) -> bool:
    return part == "metrics" or part.startswith("metrics of ")


def refuse_within_epoch(
    saved: Mapping[str, Any], parts: Mapping[str, Any], *, was: int, now: int
) -> None:
    """Refuse a checkpoint of another number of ranks from which no row can be found again.

    Args:
        saved: its structure.
        parts: of this run, by name.
        was: how many ranks saved it.
        now: how many there are.

    Raises:
        CheckpointError: it is from within an epoch, and a part cannot go on there.
    """
    batches = saved["progress"]["epoch_batch"]
    unable = [
        name
        for name, part in parts.items()
        if name in _COUNTED and name in saved["parts"] and saved["parts"][name]
        if not isinstance(part, Reshardable)
    ]
    if batches and unable:
        raise _refusal(
            f"{_and(unable)} cannot go on there without training on rows twice or leaving some out",
            batches,
            was=was,
            now=now,
        )


def _refusal(reason: str, batches: int, *, was: int, now: int) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint was saved by {_ranks(was)} after {batches} batches of an epoch, and this "
        f"run has {_ranks(now)}, which share the rows in another way: {reason}. Otherwise go on "
        f"with {_ranks(was)}, or from a checkpoint of the end of an epoch"
    )


def adapt_to_world(
    saved: dict[str, Any],
    parts: Mapping[str, Any],
    opened: OpenedCheckpoint,
    *,
    rank: int,
    world_size: int,
) -> None:
    """Change what was loaded to what this rank of another number of ranks goes on with.

    Args:
        saved: what was loaded; it is changed.
        parts: of this run, by name.
        opened: the checkpoint.
        rank: of this process.
        world_size: how many ranks there are.

    Raises:
        CheckpointError: it is from within an epoch, and a part cannot go on there.
    """
    saved["rng"] = derived_rng_state(saved["rng"], rank=rank, world_size=world_size)
    own = {name: state for name, state in saved["parts"].items() if is_own(name)}
    batches = saved["progress"]["epoch_batch"]
    counted = [name for name in _COUNTED if own.get(name) and name in parts] if batches else []
    others = range(1, opened.world_size) if counted else ()
    own_of_others = [opened.load_own(each)["parts"] for each in others]
    for name, state in own.items():
        if name in counted:
            try:
                states = [state, *(each[name] for each in own_of_others)]
                saved["parts"][name] = parts[name].reshard(states, rank=rank)
            except CheckpointError as error:
                was = opened.world_size
                raise _refusal(str(error), batches, was=was, now=world_size) from error
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
    """What is other than it would have been, in a line.

    >>> describe_change(was=2, now=1)
    'saved by 2 ranks and resumed by 1 rank: random numbers are drawn anew from here on'
    """
    return (
        f"saved by {_ranks(was)} and resumed by {_ranks(now)}: random numbers are drawn anew from "
        "here on"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)
