"""Parameter groups: which options of the optimizer hold for which parameters, by their names."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

ParameterGroups: TypeAlias = Sequence[Mapping[str, Any]]

FORM = "write mappings such as {'params': ['*.bias'], 'weight_decay': 0.0}"


def group_parameters(model: nn.Module, groups: ParameterGroups) -> list[dict[str, Any]]:
    """Sort a model's parameters into groups, in the form that optimizers of torch take.

    Each parameter is in one group: the first that names it. Those that none names make a group of
    their own, without options, in front of the others. A parameter that a model has under several
    names (tied weights) goes by any of them.

    Args:
        model: whose parameters.
        groups: mappings from ``"params"`` to a name or a list of names, in which ``*``, ``?`` and
            ``[…]`` match as in `fnmatch.fnmatchcase`, and from options of the optimizer to their
            values for these parameters.

    Raises:
        TypeError: groups that are not such mappings.
        ValueError: a name that no parameter has, or a group whose parameters are all in earlier
            ones.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> rest, undecayed = group_parameters(model, [{"params": "1.*", "weight_decay": 0.0}])
    >>> len(rest["params"]), len(undecayed["params"]), undecayed["weight_decay"]
    (2, 2, 0.0)
    """
    patterns = _read_patterns(groups)
    named = list(model.named_parameters(remove_duplicate=False))
    left = {id(parameter): parameter for _, parameter in named}
    grouped = []
    for index, group in enumerate(groups):
        found: dict[int, nn.Parameter] = {}
        for pattern in patterns[index]:
            matching = [each for each in named if fnmatch.fnmatchcase(each[0], pattern)]
            if not matching:
                raise ValueError(_nothing_named(index, pattern, [name for name, _ in named]))
            found.update({id(parameter): parameter for _, parameter in matching})
        if not found.keys() & left.keys():
            raise ValueError(
                f"parameter_groups[{index}]: all that {patterns[index]} match is in earlier "
                "groups, and the first that matches counts: put this group further up, or leave "
                "it out"
            )
        members = [left.pop(key) for key in list(left) if key in found]
        options = {name: value for name, value in group.items() if name != "params"}
        grouped.append({"params": members, **options})
    rest = [{"params": list(left.values())}] if left else []
    return [*rest, *grouped]


def check_group_options(optimizer: Optimizer, groups: ParameterGroups) -> None:
    """Refuse options that the optimizer does not have: torch keeps them and never looks at them.

    Args:
        optimizer: made of groups with these options.
        groups: as for `group_parameters`.

    Raises:
        ValueError: an option that the optimizer does not have.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> groups = [{"params": "bias", "weight_decay": 0.0}]
    >>> check_group_options(torch.optim.AdamW(group_parameters(model, groups)), groups)
    """
    known = [name for name in optimizer.defaults if name != "params"]
    for index, group in enumerate(groups):
        for name in group:
            if name != "params" and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(
                    f"parameter_groups[{index}] has the option {name!r}{hint}, which "
                    f"{type(optimizer).__name__} does not know and would ignore: use options of "
                    f"{', '.join(known)}"
                )


def _read_patterns(groups: object) -> list[list[str]]:
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise TypeError(f"parameter_groups is of type {type(groups).__name__}, not a list: {FORM}")
    return [_read_group(f"parameter_groups[{i}]", group) for i, group in enumerate(groups)]


def _read_group(where: str, group: object) -> list[str]:
    if not isinstance(group, Mapping):
        raise TypeError(f"{where} is of type {type(group).__name__}, not a mapping: {FORM}")
    if "params" not in group:
        near = difflib.get_close_matches("params", map(str, group), n=1)
        instead = f" and has {near[0]!r}" if near else ""
        raise ValueError(
            f"{where} lacks 'params'{instead}, so nothing says whose options these are: {FORM}"
        )
    for name, value in group.items():
        if not isinstance(name, str):
            raise TypeError(f"{where} has the option {name!r}, which is not text: {FORM}")
        if name != "params" and isinstance(value, nn.Module | Tensor):
            raise TypeError(
                f"{where}: the option {name!r} is a {type(value).__name__}, not a plain value, and "
                f"parameters are named under 'params': {FORM}"
            )
    params = group["params"]
    patterns = [params] if isinstance(params, str) else params
    if isinstance(patterns, Tensor | nn.Module) or not isinstance(patterns, Iterable):
        patterns = [patterns]
    patterns = list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{where}: 'params' holds a value of type {type(pattern).__name__}, and "
                f"parameters are named: {FORM}, or give the Trainer an optimizer with groups of "
                "its own"
            )
    if not patterns:
        raise ValueError(f"{where} names no parameters: {FORM}, or leave the group out")
    return patterns


def _nothing_named(index: int, pattern: str, names: Sequence[str]) -> str:
    start = f"parameter_groups[{index}]: {pattern!r} matches no parameter of the model"
    if not names:
        return f"{start}, which has none: leave parameter_groups out"
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
    if not near:  # the letters between a pattern's wildcards may be those of a part of a name
        parts = {part: name for name in reversed(names) for part in name.split(".")}
        letters = pattern.strip("*?.").rpartition(".")[2]
        near = [parts[part] for part in difflib.get_close_matches(letters, parts, n=1)]
    if near:
        return f"{start} (did you mean {near[0]!r}?): correct it"
    shown = ", ".join(map(repr, names[:3]))
    return f"{start}: use names such as {shown}, with * for any letters"
