"""From a YAML file and overrides to a `TrainConfig`, or one clear error."""

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    ValidationError,
)

from automicro.cli.batch_size import batch_size_per_device
from automicro.cli.config import CallConfig, TrainConfig
from automicro.cli.nodes import check_node, items_inside, show
from automicro.cli.overrides import apply_override
from automicro.cli.reading import read_yaml
from automicro.cli.suggestions import did_you_mean
from automicro.errors import ConfigError

HINTS = typing.get_type_hints(TrainConfig)
DATA_KEYS = ("train_data", "eval_data")
# Required, with something to copy for each.
REQUIRED = {
    "model": "{call: my_package.MyModel, args: {width: 64}}",
    "train_data": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "optimizer": "{call: torch.optim.AdamW, args: {lr: 0.001}}",
}
# What the types do not say.
EXPECTED = {
    "microbatch_size": "a whole number, auto or null",
    "eval_microbatch_size": "a whole number, auto or null",
    "memory_limit": "text such as 24MiB, a whole number of bytes, or null",
    "max_duration": "text such as 2ep or 500ba",
    "eval_interval": "text such as 1ep or 100ba, or null",
}


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, num_devices: int = 1
) -> TrainConfig:
    """Read a config, apply overrides, check it and resolve its interpolations.

    Nothing is imported or made. In the arguments of the data, ``${global_batch_size}`` is what one
    device loads.

    Args:
        path: a YAML file.
        overrides: ``key=value`` each, applied in order.
        num_devices: by how many devices an optimization batch is shared.

    Raises:
        ConfigError: anything wrong, with file, key, value and remedy.

    >>> config = load_config("configs/digits.yaml", ["max_duration=2ba"])
    >>> config.max_duration, config.train_data.args["batch_size"]
    ('2ba', 512)
    """
    tree = read_yaml(Path(path))
    try:
        _merge(tree)
        for override in overrides:
            apply_override(tree, override)
            _merge(tree)
        if tree.get("global_batch_size", "") is None:
            del tree["global_batch_size"]  # as if unset: no data can be made with it
        _require(_merge(tree))
        _require_filled_in(tree, "")
        values = _resolve(tree)
        rows = values["global_batch_size"]
        if rows is not None:
            shared = {**tree, "global_batch_size": batch_size_per_device(rows, num_devices)}
            per_device = _resolve(shared)
            values.update({key: per_device[key] for key in DATA_KEYS})
        # Again: what stood behind an interpolation is known only now.
        config = _merge(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return typing.cast(TrainConfig, OmegaConf.to_object(config))


def _merge(tree: dict[str, Any]) -> DictConfig:
    _check_shapes(tree)
    schema = OmegaConf.structured(TrainConfig)
    try:
        return typing.cast(DictConfig, OmegaConf.merge(schema, tree))
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "")
        if isinstance(error, ValidationError) and key in HINTS:
            expected = EXPECTED.get(key) or _expected(HINTS[key])
            raise ConfigError(f"{key}={show(tree.get(key))}: expected {expected}") from error
        raise ConfigError(
            f"{key}{': ' if key else ''}{_first_line(error)}: correct it; an interpolation is "
            f"written ${{name}}"
        ) from error


def _check_shapes(tree: Any) -> None:
    for key, value in tree.items():
        if key not in HINTS:
            hint = did_you_mean(str(key), HINTS)
            raise ConfigError(
                f"unknown key {key!r}{hint}: "
                f"{'correct it' if hint else 'use one of ' + ', '.join(HINTS)}"
            )
        if value is None and NoneType in _alternatives(HINTS[key]):
            continue
        if CallConfig in _alternatives(HINTS[key]):
            check_node(value, key)
        elif key == "metrics":
            _check_metrics(value)


def _check_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={show(metrics)} is not a mapping: write {{name: {{call: dotted.path, args: "
            f"{{…}}}}}}, or {{}} for none"
        )
    for name, node in metrics.items():
        check_node(node, f"metrics.{name}")


def _require(config: DictConfig) -> None:
    for key, example in REQUIRED.items():
        if OmegaConf.is_missing(config, key):
            raise ConfigError(f"{key} is missing: write at the top level {key}: {example}")


def _require_filled_in(value: Any, key: str) -> None:
    if value == "???":
        raise ConfigError(f"{key} is '???', to be filled in: write it there, or add {key}=VALUE")
    for name, each in items_inside(value):
        _require_filled_in(each, f"{key}.{name}" if key else str(name))


def _resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """The whole config as plain values, interpolations replaced by what they stand for."""
    # Without types: what an interpolation brings is checked afterwards, as if it had been written.
    config = OmegaConf.create(OmegaConf.to_container(_merge(tree)))
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except InterpolationToMissingValueError as error:
        wanted = _first_line(error).rpartition(": ")[2]
        raise ConfigError(
            f"{error.full_key} refers to ${{{wanted}}}, which is not set: write {wanted}: … at "
            f"the top level"
        ) from error
    except InterpolationKeyError as error:
        wanted = _first_line(error).split("'")[1]
        raise ConfigError(
            f"{error.full_key} refers to ${{{wanted}}}, which does not exist"
            f"{did_you_mean(wanted, HINTS)}: use a key of the config, from its top level"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}: correct it") from error
    values = typing.cast(dict[str, Any], values)
    if OmegaConf.is_missing(config, "global_batch_size"):
        values["global_batch_size"] = None
    return values


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _expected(hint: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        NoneType: "null",
    }
    return " or ".join(words[each] for each in _alternatives(hint))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
