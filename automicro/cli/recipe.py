"""Everything that a config names: checked first, made afterwards."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from torch import nn

from automicro.cli.config import CallConfig, EvaluatorConfig, RunConfig
from automicro.cli.configured_logger import ConfiguredLogger
from automicro.cli.data import checking_data
from automicro.cli.key_names import KEYS
from automicro.cli.keys import LISTS
from automicro.cli.keys_meant import about
from automicro.cli.nodes import is_node, prepare, prepare_value
from automicro.cli.shapes import SIZES
from automicro.cli.values import check_values, read_checkpoint
from automicro.cli.weights import check_weights_file, load_weights
from automicro.errors import ConfigError
from automicro.events.callback import Callback
from automicro.loggers import Logger
from automicro.policy.policy import Policy
from automicro.trainer.config import TrainerConfig
from automicro.trainer.device import seed_everything
from automicro.trainer.evaluators import Evaluator
from automicro.trainer.trainer import Trainer

FIRST_ARGUMENTS = {
    "optimizer": ["the model's parameters"],
    "scheduler": ["the optimizer"],
}
# What stands in lists, and what to name there.
PROTOCOLS: Mapping[str, tuple[type, str]] = {
    "callbacks": (Callback, "name a subclass of automicro.Callback"),
    "loggers": (Logger, "name a class with start, log and close, such as one of automicro.loggers"),
}
# What evaluating has no use for, so what it names need not exist.
ONLY_FOR_TRAINING = frozenset(
    {"train_data", "optimizer", "parameter_groups", "scheduler", "checkpoint", *LISTS}
)


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
            key: (_prepare_data if key == "train_data" else _prepare)(getattr(config, key), key)
            for key in KEYS
            if key not in without and isinstance(getattr(config, key), CallConfig)
        }
        self._metrics = _prepare_all(config.metrics, "metrics")
        if "eval_data" not in without and config.eval_data is not None:
            self._makers["eval_data"] = _prepare_eval_data(config.eval_data, "eval_data")
        for key in LISTS:
            named = {} if key in without else dict(enumerate(getattr(config, key)))
            self._makers[key] = partial(_make_list, key, _prepare_all(named, key), config)
        self.checkpoint = None if "checkpoint" in without else read_checkpoint(config)
        self.make_loss_average = prepare_value(config.loss_average, "loss_average")
        self._sizes = {key: _prepare_size(getattr(config, key), key) for key in SIZES}
        if config.weights is not None:
            with about("weights"):
                check_weights_file(config.weights)

    def make_model(self, *, with_weights: bool = True) -> Any:
        """The model, after the seed: its weights depend on the config alone.

        Args:
            with_weights: whether to load the weights that the config names.
        """
        if self.config.seed is not None:
            seed_everything(self.config.seed)
        model = self.make("model")
        if with_weights and self.config.weights is not None:
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
        plain |= {key: make() for key, make in self._sizes.items()}
        config = asdict(self.config)
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
            metrics=_make_metrics(self._metrics),
            update_metric=self.make("update_metric"),
            count_tokens=self.make("count_tokens"),
            callbacks=self.make("callbacks"),
            loggers=[ConfiguredLogger(each, config) for each in self.make("loggers")],
            checkpoint=self.checkpoint,
            **plain,
        )


def _prepare(node: CallConfig, key: str) -> Callable[..., Any]:
    return prepare({"call": node.call, "args": node.args}, key, first=FIRST_ARGUMENTS.get(key, ()))


def _prepare_data(node: CallConfig, key: str) -> Callable[..., Any]:
    return checking_data(_prepare(node, key), node.call, key)


def _prepare_size(size: Any, key: str) -> Callable[[], Any]:
    make = prepare_value(size, key)
    if not is_node(size):
        return make

    def make_checked() -> Policy:
        policy = make()
        if isinstance(policy, type) or not isinstance(policy, Policy):
            raise ConfigError(
                f"{key}.call={size['call']!r} made a {type(policy).__name__}, which is no policy: "
                f"name one, such as automicro.Halving, or give a whole number, auto or null"
            )
        return policy

    return make_checked


def _prepare_all(nodes: Mapping[Any, CallConfig], key: str) -> Mapping[Any, Callable[..., Any]]:
    return {name: _prepare(each, f"{key}.{name}") for name, each in nodes.items()}


def _prepare_eval_data(given: Any, key: str) -> Callable[[], Any]:
    """What makes a loader, an `Evaluator`, or several by name."""
    if isinstance(given, CallConfig):
        return _prepare_data(given, key)
    if isinstance(given, EvaluatorConfig):
        make_data = _prepare_data(given.data, f"{key}.data")
        metrics = given.metrics
        if isinstance(metrics, Mapping):
            metrics = _prepare_all(metrics, f"{key}.metrics")
        make_size = _prepare_size(given.microbatch_size, f"{key}.microbatch_size")
        return lambda: Evaluator(
            dataloader=make_data(),
            metrics=_make_metrics(metrics) if isinstance(metrics, Mapping) else metrics,
            microbatch_size=make_size(),
            max_batches=given.max_batches,
            interval=given.interval,
        )
    makers = {name: _prepare_eval_data(each, f"{key}.{name}") for name, each in given.items()}
    return lambda: {name: make() for name, make in makers.items()}


def _make_metrics(makers: Mapping[Any, Callable[..., Any]]) -> dict[str, Any] | None:
    return {name: make() for name, make in makers.items()} or None


def _make_list(key: str, makers: Mapping[Any, Callable[..., Any]], config: RunConfig) -> list[Any]:
    made = [make() for make in makers.values()]
    wanted, remedy = PROTOCOLS[key]
    for place, each in enumerate(made):
        if isinstance(each, type) or not isinstance(each, wanted):
            call = getattr(config, key)[place].call
            raise ConfigError(
                f"{key}.{place}.call={call!r} made a {type(each).__name__}, which is no "
                f"{wanted.__name__}: {remedy}"
            )
    return made
