"""What is known of each key of a config: its group, its type in words, its default."""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any

import omegaconf

from automicro.checks import PRECISIONS
from automicro.cli.config import CallConfig, RunConfig
from automicro.splitting import BATCHNORM_MODES
from automicro.trainer.finiteness import NON_FINITE_MODES

# In the order in which a reader wants them.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "What is made": (
        "model",
        "weights",
        "loss",
        "forward",
        "optimizer",
        "parameter_groups",
        "scheduler",
        "metrics",
        "update_metric",
        "count_tokens",
    ),
    "Data and batches": (
        "train_data",
        "eval_data",
        "global_batch_size",
        "eval_global_batch_size",
        "accumulate_batches",
        "batch_layout",
    ),
    "How long": ("max_duration", "eval_interval"),
    "Memory and microbatches": (
        "microbatch_size",
        "eval_microbatch_size",
        "memory_limit",
        "strict_divisible",
        "loss_average",
        "batchnorm",
        "probe",
    ),
    "Precision and numerics": (
        "precision",
        "grad_clip_norm",
        "non_finite",
        "channels_last",
        "compile",
        "deterministic",
    ),
    "The run": ("device", "seed", "progress", "run_dir"),
}
KEYS = tuple(key for keys in GROUPS.values() for key in keys)
HINTS: Mapping[str, Any] = typing.get_type_hints(RunConfig)

TO_TRAIN = ("model", "train_data", "optimizer")
# Required by a command, with something to copy for each.
EXAMPLES = {
    "model": "{call: my_package.MyModel, args: {width: 64}}",
    "train_data": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "eval_data": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "optimizer": "{call: torch.optim.AdamW, args: {lr: 0.001}}",
}
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
    "microbatch_size": "a whole number, auto or null",
    "eval_microbatch_size": "a whole number, auto or null",
    "memory_limit": "text such as 24MiB, a whole number of bytes, or null",
    "max_duration": "text such as 2ep, 500ba, 10000sp or 1e6tok",
    "eval_interval": "text such as 1ep, 100ba, 10000sp or 1e6tok, or null",
    "loss_average": f"{', '.join(LOSS_AVERAGES)}, a node, or a mapping of these by name",
    "batchnorm": one_of(BATCHNORM_MODES),
    "precision": one_of(PRECISIONS),
    "non_finite": one_of(NON_FINITE_MODES),
    "batch_layout": "a whole number or a mapping",
    "compile": "true, false or a mapping",
    "parameter_groups": "a list of mappings",
    "metrics": "a mapping of nodes",
    **dict.fromkeys(TO_TRAIN, "a node"),
}
_TYPES = {
    int: "a whole number",
    float: "a number",
    str: "text",
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
    return typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)


def is_made(key: str) -> bool:
    """Tell whether a key holds nodes, from which something is made.

    >>> is_made("metrics"), is_made("weights")
    (True, False)
    """
    return key == "metrics" or CallConfig in alternatives(key)


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
