"""From a config to a `Trainer`."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from automicro.cli.config import CallConfig, TrainConfig
from automicro.cli.nodes import as_yaml, is_node, prepare, show
from automicro.errors import ConfigError
from automicro.memory import parse_bytes
from automicro.policy import make_policy
from automicro.trainer import Trainer
from automicro.trainer.arguments import read_duration, read_norm
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
    "max_duration": partial(read_duration, "max_duration"),
    "eval_interval": partial(read_duration, "eval_interval"),
    "memory_limit": parse_bytes,
    "microbatch_size": make_policy,
    "eval_microbatch_size": make_policy,
    "grad_clip_norm": partial(read_norm, "grad_clip_norm"),
}
SIZES = ("microbatch_size", "eval_microbatch_size")
FIRST_ARGUMENTS = {
    "optimizer": ["the model's parameters"],
    "scheduler": ["the optimizer"],
}


class Recipe:
    """Everything that a config names, checked, and not made yet.

    Raises:
        ConfigError: a path that names nothing, or arguments that do not fit.
    """

    def __init__(self, config: TrainConfig) -> None:
        for name, read in READERS.items():
            _check_value(name, getattr(config, name), read)
        self.config = config
        self._makers = {
            each.name: _prepare(getattr(config, each.name), each.name)
            for each in fields(config)
            if isinstance(getattr(config, each.name), CallConfig)
        }
        self._metrics = {
            name: _prepare(each, f"metrics.{name}") for name, each in config.metrics.items()
        }
        self._loss_average = (
            prepare(config.loss_average, "loss_average") if is_node(config.loss_average) else None
        )

    def make_model(self) -> Any:
        """The model, after the seed: its initial weights depend on the config alone."""
        if self.config.seed is not None:
            seed_everything(self.config.seed)
        return self.make("model")

    def make(self, key: str) -> Any:
        """What a key names, or None where the config leaves it out."""
        return self._makers[key]() if key in self._makers else None

    def maker(self, key: str) -> Callable[..., Any] | None:
        """What makes it, where a first argument is still to come."""
        return self._makers.get(key)

    def make_metrics(self) -> dict[str, Any] | None:
        """The metrics by name."""
        return {name: each() for name, each in self._metrics.items()} or None

    def make_loss_average(self) -> Any:
        """What the loss averages over."""
        return self.config.loss_average if self._loss_average is None else self._loss_average()


def build_trainer(config: TrainConfig) -> Trainer:
    """Make everything that a config describes, and the trainer of it.

    All paths and arguments are checked before anything is made.

    Raises:
        ConfigError: a path that names nothing, or arguments that do not fit.
        Exception: what a class or function of the config raises, with a note that says which.

    >>> from automicro.cli.loading import load_config
    >>> trainer = build_trainer(load_config("configs/digits.yaml", ["progress=false"]))
    >>> trainer.state.batch
    0
    """
    recipe = Recipe(config)
    return Trainer(
        recipe.make_model(),
        recipe.make("train_data"),
        eval_dataloader=recipe.make("eval_data"),
        loss_fn=recipe.make("loss"),
        forward=recipe.make("forward"),
        optimizer=recipe.maker("optimizer"),
        scheduler=recipe.maker("scheduler"),
        metrics=recipe.make_metrics(),
        update_metric=recipe.make("update_metric"),
        loss_average=recipe.make_loss_average(),
        **{name: getattr(config, name) for name in PLAIN},
    )


def _check_value(key: str, value: Any, read: Callable[[Any], object]) -> None:
    if value is None:
        return
    try:
        read(value)
    except (TypeError, ValueError) as error:
        if key in SIZES:  # policies have no place in a config
            raise ConfigError(
                f"{key}={show(value)}: give a whole number of at least 1, auto (found by "
                f"halving) or null (the whole batch)"
            ) from error
        text = as_yaml(str(error))
        raise ConfigError(text if text.startswith(f"{key}=") else f"{key}: {text}") from error


def _prepare(node: CallConfig, key: str) -> Callable[..., Any]:
    return prepare({"call": node.call, "args": node.args}, key, first=FIRST_ARGUMENTS.get(key, ()))
