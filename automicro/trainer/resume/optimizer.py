"""An optimizer's state by the names of its parameters, for checkpoints.

torch numbers parameters in the order of the groups. With names, the checkpoint of another model or
of other groups is recognized and never loaded into the wrong parameters.

A checkpoint restores options with the state and so overrides options given at a resume. A warning
names these, comparing the options as given, before schedules changed them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.errors import CheckpointError, CheckpointWarning, describe_error, warn
from automicro.sharding import is_sharded
from automicro.trainer.data.sharing import changed


def optimizer_state(
    optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]
) -> dict[str, Any]:
    """Return the state of each parameter by name, and the options of each group.

    >>> model = nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> optimizer_state(sgd, [model])["groups"][0]["names"]
    ['weight', 'bias']
    """
    names = _names(optimizer, modules)
    try:
        saved = optimizer.state_dict()
    except RuntimeError as error:  # of ZeroRedundancyOptimizer, unless ranks have exchanged states
        raise CheckpointError(
            f"the state of {type(optimizer).__name__} cannot be saved ({describe_error(error)}). "
            "Use another, such as torch.optim.AdamW with parallel='fsdp', or leave out checkpoint="
        ) from error
    _refuse_unsharded(optimizer, names)
    state = saved["state"]
    return {
        "state": {names[key]: each for key, each in state.items() if isinstance(key, int)},
        "own": {key: each for key, each in state.items() if not isinstance(key, int)},
        "groups": [
            {
                **{name: value for name, value in group.items() if name != "params"},
                "names": [names[index] for index in group["params"]],
            }
            for group in saved["param_groups"]
        ],
    }


def named_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a run with the names under which their state is saved.

    >>> [name for name, _ in named_parameters([nn.Linear(2, 1), nn.Linear(1, 1)])]
    ['weight', 'bias', 'modules[0].weight', 'modules[0].bias']
    """
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            yield f"modules[{index - 1}].{name}" if index else name, parameter


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module], state: Mapping[str, Any]
) -> None:
    """Load the state and the options from `optimizer_state`."""
    compare_groups(optimizer, modules, state)
    indices = {name: index for index, name in enumerate(_names(optimizer, modules))}
    optimizer.load_state_dict(
        {
            "state": {
                **{indices[name]: values for name, values in state["state"].items()},
                **state["own"],
            },
            "param_groups": [
                {
                    **{name: value for name, value in group.items() if name != "names"},
                    "params": [indices[name] for name in group["names"]],
                }
                for group in state["groups"]
            ],
        }
    )


def compare_groups(
    optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module], state: Mapping[str, Any]
) -> None:
    """Raise an error if a state belongs to other parameters or groups."""
    names = _names(optimizer, modules)
    here = [len(group["params"]) for group in optimizer.param_groups]
    listed = [name for group in state["groups"] for name in group["names"]]
    there = [len(group["names"]) for group in state["groups"]]
    if listed != names or there != here:
        pairs = [each for each in zip(listed, names, strict=False) if each[0] != each[1]]
        other = f", with {pairs[0][0]!r} where this one has {pairs[0][1]!r}" if pairs else ""
        raise CheckpointError(
            f"the optimizer of the checkpoint has groups of {there} parameters, but this one has "
            f"{here}{other}. Use the optimizer and the parameter groups of the run that saved it, "
            "or start anew with resume='never'. Groups that a callback adds later are missing at a "
            "resume, so give the optimizer all groups from the start"
        )


def _names(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> list[str]:
    """Names of the optimizer's parameters, in torch's order."""
    named = {id(parameter): name for name, parameter in named_parameters(modules)}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    strangers = [each for each in parameters if id(each) not in named]
    if strangers:
        raise CheckpointError(
            f"the optimizer has {len(strangers)} parameters that no module of the run has (the "
            f"first has the shape {tuple(strangers[0].shape)}), so a checkpoint has no names for "
            "them. Pass their module in modules="
        )
    return [named[id(each)] for each in parameters]


def _refuse_unsharded(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Raise an error for state of a sharded parameter that is not sharded or a single number."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if not is_sharded(parameter):
            continue
        for slot, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or value.numel() == 1:
                continue
            if not is_sharded(value) or value.shape != parameter.shape:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {slot!r} of the shape {tuple(value.shape)} "
                    f"for the sharded parameter {name} of the shape {tuple(parameter.shape)}, "
                    "which cannot be restored on another number of ranks. Use an optimizer whose "
                    "state has the shape of its parameter, such as AdamW"
                )


# Counters of a schedule, and copies of the optimizer's own options.
_NOT_GIVEN = ("params", "initial_lr", "last_epoch", "base_lrs")
INNER = "_schedulers"
"""Attributes in which torch's schedulers keep their parts."""


def given_options(
    optimizer: torch.optim.Optimizer, scheduler: object, interval: str = "batch"
) -> dict[str, dict[str, Any]]:
    """Describe the classes and plain options of an unstepped optimizer and scheduler.

    >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> given = given_options(sgd, torch.optim.lr_scheduler.StepLR(sgd, 3))
    >>> given["classes"], given["options"]["lr"], given["options"]["scheduler.step_size"]
    ({'optimizer': 'SGD', 'scheduler': 'StepLR'}, 0.5, 3)
    """
    stepped = "" if interval == "batch" else f", stepped after every {interval}"
    # A scheduler has already set the first rate, and stores the given one as `initial_lr`.
    groups = [
        group | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})
        for group in optimizer.param_groups
    ]
    state = getattr(scheduler, "state_dict", dict)
    return {
        "classes": {
            "optimizer": type(optimizer).__qualname__,
            "scheduler": None if scheduler is None else _name_of(scheduler) + stepped,
        },
        "options": dict(
            [
                *_plain("", groups[0] if len(groups) == 1 else {"groups": groups}),
                *_plain("scheduler", state()),
            ]
        ),
    }


def _name_of(scheduler: object) -> str:
    """Name a scheduler with its parts: ``SequentialLR(LinearLR, CosineAnnealingLR)``."""
    inner = vars(scheduler).get(INNER, ()) if hasattr(scheduler, "__dict__") else ()
    made_of = f"({', '.join(map(_name_of, inner))})" if inner else ""
    return type(scheduler).__qualname__ + made_of


def _plain(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a state with their places."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    numbers = (bool, int, float, str, type(None))
    if isinstance(value, Mapping):
        for key, each in value.items():
            is_inner = str(key).startswith("_") and key != INNER
            if not is_inner and key not in _NOT_GIVEN:
                yield from _plain(place if key == INNER else f"{place}.{key}".lstrip("."), each)
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for index, each in enumerate(value):
            yield from _plain(f"{place}.{index}", each)
    elif isinstance(value, list | tuple) and all(isinstance(each, numbers) for each in value):
        yield place, list(value)
    elif isinstance(value, numbers):
        yield place, value


def refuse_other_classes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise an error if the saved run had another optimizer or scheduler class."""
    if differing := changed(saved["classes"], given["classes"]):
        raise CheckpointError(
            f"the checkpoint is of a run with {'; '.join(differing)}. Use the options of the run "
            "that saved it, or start anew with resume='never'"
        )


def warn_of_other_options(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Warn of the options that a checkpoint overrides."""
    # Options that only one version of torch has are not compared.
    differing = changed(saved["options"], given["options"])
    if differing:
        warn(
            f"the checkpoint was saved with {'; '.join(differing)}, and the run continues with the "
            "saved values. For others, load only its weights, or set them in a callback's "
            "fit_start",
            CheckpointWarning,
        )
