"""What is known of each key of a config: its group, its type in words, its default."""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import omegaconf

from automicro.cli.config import SECTIONS, CallConfig, RunConfig
from automicro.cli.key_names import KEYS
from automicro.cli.nodes import show
from automicro.errors import ConfigError
from automicro.options import GRADIENT_SUMS, PRECISIONS
from automicro.step.split_guard import BATCHNORM_MODES
from automicro.trainer.optimizer import SCHEDULER_INTERVALS
from automicro.trainer.step import NON_FINITE_MODES

HINTS: Mapping[str, Any] = typing.get_type_hints(RunConfig) | {
    f"{section}.{name}": hint
    for section, owner in SECTIONS.items()
    for name, hint in typing.get_type_hints(owner).items()
}
"""The types of all keys, those inside of others as ``checkpoint.folder``."""

TO_TRAIN = ("model", "train_data", "optimizer")
# Required by a command, with something to copy for each.
EXAMPLES = {
    "model": "{call: my_package.MyModel, args: {width: 64}}",
    "train_data": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "eval_data": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "optimizer": "{call: torch.optim.AdamW, args: {lr: 0.001}}",
}
# Of nodes.
LISTS = ("callbacks", "loggers")
LOSS_AVERAGES = ("auto", "samples", "tokens", "none")


def one_of(choices: Iterable[str]) -> str:
    """Return choices as a sentence has them.

    >>> one_of(["warn", "error", "ignore"])
    'warn, error or ignore'
    """
    *most, last = choices
    return f"{', '.join(most)} or {last}"


# What the types do not say.
_IN_WORDS = {
    "microbatch_size": "a whole number, auto, a node or null",
    "eval_microbatch_size": "a whole number, auto, a node or null",
    "memory_limit": "text such as 24MiB or 80%, a whole number of bytes, or null",
    "max_duration": "text such as 2ep, 500ba, 10000sp or 1e6tok",
    "eval_interval": "text such as 1ep, 100ba, 10000sp or 1e6tok, or null",
    "loss_average": f"{', '.join(LOSS_AVERAGES)}, a node, or a mapping of these by name",
    "batchnorm": one_of(BATCHNORM_MODES),
    "precision": one_of(PRECISIONS),
    "gradient_sums": one_of(GRADIENT_SUMS),
    "non_finite": one_of(NON_FINITE_MODES),
    "scheduler_interval": one_of(SCHEDULER_INTERVALS),
    "parallel": "ddp, fsdp or null",
    "batch_layout": "a whole number or a mapping",
    "compile": "true, false or a mapping",
    "parameter_groups": "a list of mappings",
    "metrics": "a mapping of nodes",
    "eval_data": "a node, a mapping of the keys below, a mapping of these by name, or null",
    "eval_data.data": "a node",
    "eval_data.metrics": "a mapping of nodes, inherited or null",
    "eval_data.microbatch_size": "a whole number, auto, a node, inherited or null",
    "eval_data.interval": "text such as 1ep or 100ba, inherited or null",
    "max_time": "text such as 2h30m, 45m or 90s, or null",
    "callbacks": "a list of nodes",
    "loggers": "a list of nodes",
    "checkpoint": "a mapping of the keys below, or null",
    "checkpoint.interval": "text such as 1ep, 500ba, 10000sp or 1e6tok, or null",
    "checkpoint.best_mode": "min or max",
    "checkpoint.resume": "auto, never or a path",
    **dict.fromkeys(TO_TRAIN, "a node"),
}
_TYPES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path | str: "text",
    bool: "true or false",
    CallConfig: "a node",
    NoneType: "null",
}


def alternatives(key: str) -> tuple[Any, ...]:
    """The types that a key may have.

    >>> alternatives("seed")
    (<class 'int'>, <class 'NoneType'>)
    """
    hint = HINTS[key]
    if hint == Path | str:
        return (hint,)
    return typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)


def is_made(key: str) -> bool:
    """Tell whether a key holds nodes, from which something is made.

    >>> is_made("metrics"), is_made("weights")
    (True, False)
    """
    return key in ("metrics", "eval_data", *LISTS) or CallConfig in alternatives(key)


def type_in_words(key: str) -> str:
    """What a key may hold.

    >>> type_in_words("seed"), type_in_words("model")
    ('a whole number or null', 'a node')
    """
    return _IN_WORDS.get(key) or " or ".join(_TYPES[each] for each in alternatives(key))


def defaults() -> dict[str, Any]:
    """The default of each key as a plain value; missing are those that have none.

    >>> defaults()["max_duration"], "global_batch_size" in defaults()
    ('1ep', False)
    """
    values: dict[str, Any] = {}
    for each in fields(RunConfig):
        if each.default_factory is not NO_DEFAULT:
            values[each.name] = each.default_factory()
        elif each.default != omegaconf.MISSING:
            values[each.name] = list(each.default) if each.default == () else each.default
    return {key: values[key] for key in KEYS if key in values}


def keys_inside(key: str) -> tuple[str, ...]:
    """The keys that a key may hold.

    >>> keys_inside("eval_data")[:2], keys_inside("seed")
    (('data', 'metrics'), ())
    """
    return tuple(each.name for each in fields(SECTIONS[key])) if key in SECTIONS else ()


def defaults_inside(key: str) -> dict[str, Any]:
    """The defaults of the keys that a key may hold; missing are those that have none.

    >>> defaults_inside("checkpoint")["keep_last"]
    3
    """
    unset = (NO_DEFAULT, omegaconf.MISSING)
    return {each.name: each.default for each in fields(SECTIONS[key]) if each.default not in unset}


def wrong_type(key: str, value: object, kind: str | None = None) -> ConfigError:
    """Return the error for a value of a type that the key does not have.

    Args:
        key: where it stands.
        value: what stands there.
        kind: the key whose types it may have; ``key`` unless given.

    >>> print(wrong_type("seed", "many"))
    seed='many' (text): expected a whole number or null
    """
    return ConfigError(f"{key}={show(value)}: expected {type_in_words(kind or key)}")
