"""Weights of a model from a file, or from a folder of checkpoints."""

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from automicro.checkpoints.reading import load_checkpoint
from automicro.errors import CheckpointError, ConfigError
from automicro.memory.oom import first_line

SHOWN = 3
SAVE = "write it with torch.save(model.state_dict(), path)"
# What wrappers put before each name.
WRAPPERS = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}


def check_weights_file(path: str | os.PathLike[str]) -> None:
    """Refuse a path where neither a file nor a folder is.

    Raises:
        ConfigError: there is neither.

    >>> check_weights_file("no_such.pt")
    Traceback (most recent call last):
        ...
    automicro.errors.ConfigError: weights='no_such.pt': there is no such file or folder: ...
    """
    if not Path(path).exists():
        raise ConfigError(
            f"weights={str(path)!r}: there is no such file or folder: give a path from the folder "
            f"where the command is started, such as runs/first/weights.pt or runs/first/checkpoints"
        )


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load weights from a file or a checkpoint into a model. Every name and shape has to fit.

    Code in the file is never run.

    Args:
        model: takes the weights.
        path: what ``torch.save(model.state_dict(), path)`` wrote, or the folder of a checkpoint,
            or a folder of several, of which the newest good one is taken.

    Raises:
        ConfigError: no state dict, no checkpoint, or not one of this model.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save(torch.nn.Linear(2, 2).state_dict(), file.name)
    ...     load_weights(torch.nn.Linear(2, 2), file.name)
    """
    check_weights_file(path)
    state = _read_checkpoint(Path(path)) if Path(path).is_dir() else _read(path)
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # shapes
        wrong = [line.strip().rstrip(".") for line in str(error).splitlines()[1:]]
        raise ConfigError(
            f"weights={str(path)!r} {_do_not_fit(model)}: {_first(wrong, '; ')}: give weights of "
            f"this very model, or change model.args to those that it was saved with"
        ) from error
    missing, unexpected = result.missing_keys, result.unexpected_keys
    if missing or unexpected:
        said = [
            f"{len(names)} {what} ({_first(names)})"
            for names, what in ((missing, "missing"), (unexpected, "unexpected"))
            if names
        ]
        raise ConfigError(
            f"weights={str(path)!r} {_do_not_fit(model)}: {', '.join(said)}: "
            f"{_remedy(missing, unexpected)}"
        )


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"weights={str(path)!r} is no file of tensors alone (it is damaged, or holds objects "
            f"that would run code when they are read): {SAVE}"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"weights={str(path)!r} cannot be read ({first_line(error)}): {SAVE}"
        ) from error
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"weights={str(path)!r} holds a {type(state).__name__} and no state dict: {SAVE}"
        )
    inner = [name for name, value in state.items() if isinstance(value, Mapping)]
    if inner and not any(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(
            f"weights={str(path)!r} holds a checkpoint with {_first(list(map(str, state)))} and "
            f"not a state dict itself: save the model's part alone, such as "
            f"torch.save(checkpoint[{inner[0]!r}], path)"
        )
    return state


def _read_checkpoint(path: Path) -> Mapping[str, Any]:
    try:
        modules = load_checkpoint(path).state.get("modules")
    except CheckpointError as error:
        beside = [str(path / name) for name in ("checkpoints", "weights.pt")]
        there = [each for each in beside if Path(each).exists()]
        hint = f"; did you mean {there[0]!r}?" if there else ""
        raise ConfigError(f"weights={str(path)!r}: {error}{hint}") from error
    if not isinstance(modules, list) or not modules:
        raise ConfigError(
            f"weights={str(path)!r} is a checkpoint of something else than a Trainer: give one "
            f"that train wrote, such as runs/first/checkpoints"
        )
    model: Mapping[str, Any] = modules[0]
    return model


def _remedy(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    for prefix, wrapper in WRAPPERS.items():
        if unexpected and {name.removeprefix(prefix) for name in unexpected} == set(missing):
            return f"they were saved from inside {wrapper}: save the state dict of the model in it"
    return "give weights of this very model, or change model to the one that they were saved from"


def _do_not_fit(model: nn.Module) -> str:
    return f"does not fit the {type(model).__name__}"


def _first(names: Sequence[str], separator: str = ", ") -> str:
    more = len(names) - SHOWN
    shown = separator.join(names[:SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown
