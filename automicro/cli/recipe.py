"""Everything that a config names: checked first, made afterwards."""

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

from torch import nn

from automicro.cli.config import CallConfig, RunConfig
from automicro.cli.keys import KEYS
from automicro.cli.nodes import prepare, prepare_value
from automicro.cli.values import check_values
from automicro.cli.weights import check_weights_file, load_weights
from automicro.errors import ConfigError
from automicro.trainer import Trainer
from automicro.trainer.config import TrainerConfig
from automicro.trainer.device import seed_everything

FIRST_ARGUMENTS = {
    "optimizer": ["the model's parameters"],
    "scheduler": ["the optimizer"],
}
# What evaluating has no use for, so what it names need not exist.
ONLY_FOR_TRAINING = frozenset({"train_data", "optimizer", "parameter_groups", "scheduler"})


class Recipe:
    """What a config names, checked, and not made yet.

    Args:
        config: the config.
        without: keys that are left alone.

    Raises:
        ConfigError: a value that means nothing, a path that names nothing, or arguments that do
            not fit.

    >>> from automicro.cli.loading import load_config
    >>> recipe = Recipe(load_config("configs/digits.yaml", ["progress=false"]))
    >>> recipe.make_trainer(recipe.make_model()).state.batch
    0
    """

    def __init__(self, config: RunConfig, *, without: Collection[str] = ()) -> None:
        check_values(config)
        self.config = config
        self._makers = {
            key: _prepare(getattr(config, key), key)
            for key in KEYS
            if key not in without and isinstance(getattr(config, key), CallConfig)
        }
        self._metrics = {
            name: _prepare(each, f"metrics.{name}") for name, each in config.metrics.items()
        }
        self.make_loss_average = prepare_value(config.loss_average, "loss_average")
        if config.weights is not None:
            check_weights_file(config.weights)

    def make_model(self) -> Any:
        """The model, after the seed: its weights depend on the config alone."""
        if self.config.seed is not None:
            seed_everything(self.config.seed)
        model = self.make("model")
        if self.config.weights is not None:
            if not isinstance(model, nn.Module):
                raise ConfigError(
                    f"model.call={self.config.model and self.config.model.call!r} made a "
                    f"{type(model).__name__}, which can hold no weights: name a torch.nn.Module"
                )
            load_weights(model, self.config.weights)
        return model

    def make(self, key: str) -> Any:
        """What a key names, or None where the config leaves it out."""
        return self._makers[key]() if key in self._makers else None

    def make_trainer(self, model: nn.Module) -> Trainer:
        """The Trainer of a model, without what was left out of the recipe."""
        plain = {each.name: getattr(self.config, each.name) for each in fields(TrainerConfig)}
        plain["loss_average"] = self.make_loss_average()
        if "optimizer" not in self._makers:
            plain["parameter_groups"] = ()
        return Trainer(
            model,
            self.make("train_data"),
            eval_dataloader=self.make("eval_data"),
            loss_fn=self.make("loss"),
            forward=self.make("forward"),
            optimizer=self._makers.get("optimizer"),
            scheduler=self._makers.get("scheduler"),
            metrics={name: make() for name, make in self._metrics.items()} or None,
            update_metric=self.make("update_metric"),
            count_tokens=self.make("count_tokens"),
            **plain,
        )


def _prepare(node: CallConfig, key: str) -> Callable[..., Any]:
    return prepare({"call": node.call, "args": node.args}, key, first=FIRST_ARGUMENTS.get(key, ()))
