"""From a config to a `Trainer`."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from automicro.cli.config import CallConfig, TrainConfig
from automicro.cli.nodes import is_node, prepare
from automicro.duration import Duration
from automicro.errors import ConfigError
from automicro.memory import parse_bytes
from automicro.policy import make_policy
from automicro.trainer import Trainer
from automicro.trainer.device import seed_everything

# Handed to the Trainer under their own names and as they are.
PLAIN = (
    "max_duration",
    "eval_interval",
    "microbatch_size",
    "eval_microbatch_size",
    "memory_limit",
    "batchnorm",
    "strict_divisible",
    "batch_layout",
    "precision",
    "grad_clip_norm",
    "device",
    "seed",
    "progress",
)
# Their own errors do not know which key they stand under.
READERS: Mapping[str, Callable[[Any], object]] = {
    "max_duration": Duration.parse,
    "eval_interval": Duration.parse,
    "memory_limit": parse_bytes,
    "microbatch_size": make_policy,
    "eval_microbatch_size": make_policy,
}
FIRST_ARGUMENTS = {
    "optimizer": ["the model's parameters"],
    "scheduler": ["the optimizer"],
}


def build_trainer(config: TrainConfig) -> Trainer:
    """Make everything that a config describes, and the trainer of it.

    All paths and arguments are checked before anything is made. Then the seed is applied, and the
    model comes first: its initial weights depend on the config alone.

    Raises:
        ConfigError: a path that names nothing, or arguments that do not fit.
        Exception: what a class or function of the config raises, with a note that says which.

    >>> from automicro.cli.loading import load_config
    >>> trainer = build_trainer(load_config("configs/digits.yaml", ["progress=false"]))
    >>> trainer.state.batch
    0
    """
    for name, read in READERS.items():
        _check_value(name, getattr(config, name), read)
    make = {
        each.name: _prepare(getattr(config, each.name), each.name)
        for each in fields(config)
        if isinstance(getattr(config, each.name), CallConfig)
    }
    make_metrics = {
        name: _prepare(each, f"metrics.{name}") for name, each in config.metrics.items()
    }
    make_average = (
        prepare(config.loss_average, "loss_average") if is_node(config.loss_average) else None
    )
    if config.seed is not None:
        seed_everything(config.seed)
    model = make["model"]()
    return Trainer(
        model,
        make["train_data"](),
        eval_dataloader=_call(make, "eval_data"),
        loss_fn=_call(make, "loss"),
        forward=_call(make, "forward"),
        optimizer=make["optimizer"],
        scheduler=make.get("scheduler"),
        metrics={name: each() for name, each in make_metrics.items()} or None,
        update_metric=_call(make, "update_metric"),
        loss_average=config.loss_average if make_average is None else make_average(),
        **{name: getattr(config, name) for name in PLAIN},
    )


def _check_value(key: str, value: Any, read: Callable[[Any], object]) -> None:
    if value is None:
        return
    try:
        read(value)
    except (TypeError, ValueError) as error:
        named = str(error).startswith(f"{key}=")
        raise ConfigError(str(error) if named else f"{key}: {error}") from error


def _prepare(node: CallConfig, key: str) -> Callable[..., Any]:
    return prepare({"call": node.call, "args": node.args}, key, first=FIRST_ARGUMENTS.get(key, ()))


def _call(make: Mapping[str, Callable[..., Any]], key: str) -> Any:
    return make[key]() if key in make else None
