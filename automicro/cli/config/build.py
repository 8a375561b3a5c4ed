"""Checks and creates the objects that a config names."""

import os
import pickle
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from automicro.checkpoints.reading import load_checkpoint
from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config.keys import KEYS, LISTS
from automicro.cli.config.load import rows_to_load
from automicro.cli.config.nodes import is_node, items_inside, prepare, prepare_value
from automicro.cli.config.schema import RunConfig, keys_inside
from automicro.data import LengthBatchSampler, with_batch_sampler
from automicro.errors import CheckpointError, ConfigError, about
from automicro.features import WORDS, with_features
from automicro.loggers import Logger
from automicro.options import check_model
from automicro.trainer.device import seed_everything
from automicro.trainer.evaluators import Evaluator
from automicro.trainer.optimizer import ParameterGroups
from automicro.trainer.processes import process_in_environment
from automicro.trainer.trainer import Trainer

_ARGUMENTS = {*signature(Trainer).parameters, *WORDS}
FIRST_ARGUMENTS = {
    "optimizer": ["the model's parameters"],
    "scheduler": ["the optimizer"],
}
SEVERAL = ("metrics", *LISTS)
LOADERS = ("train_dataloader", "eval_dataloader")
_SHORT = 500  # characters
SAVE = "write it with torch.save(model.state_dict(), path)"


class Recipe:
    """The objects that a config names, checked but not created."""

    def __init__(self, config: RunConfig, *, without: Collection[str] = ()) -> None:
        self.config = config
        self._makers: dict[str, Callable[..., Any]] = {}
        self.checkpoint: CheckpointConfig | None = None
        # All import paths and signatures are checked before the first object is created.
        for key in KEYS:
            if key not in (*without, "checkpoint", "sampling_mode"):
                with about(key):
                    self._makers[key] = _prepare(getattr(config, key), key, key)
        if config.sampling_mode is not None and "train_dataloader" in self._makers:
            make_data = self._makers["train_dataloader"]
            self._makers["train_dataloader"] = _prepare_sampling(config, make_data)
        if "checkpoint" not in without:
            self.checkpoint = _make_checkpoint(config)
        if config.weights is not None and "weights" not in without:
            _check_weights_file(config.weights)

    def make_model(self, *, with_weights: bool = True) -> Any:
        """Create the model right after seeding, so that its weights depend only on the config."""
        if self.config.seed is not None:
            seed_everything(self.config.seed)
        model = self.make("model")
        with about("model"):
            check_model(model)
        if with_weights and self.config.weights is not None:
            load_weights(model, self.config.weights)
        return model

    def make(self, key: str) -> Any:
        """Create the object of a key, or return None if the config does not have it."""
        with about(key):
            return self._makers[key]() if key in self._makers else None

    def make_sizes(self) -> dict[str, Any]:
        """Return microbatch sizes or policies of training and evaluation, and their unit."""
        keys = ("microbatch_size", "eval_microbatch_size", "microbatch_unit")
        return {key: self.make(key) for key in keys}

    def grouped_optimizer(self) -> Any:
        """Return the optimizer for the Trainer, including options for some parameters."""
        make, groups = self.optimizer, self.config.parameter_groups
        return ParameterGroups(make, groups) if make and groups else make

    @property
    def optimizer(self) -> Callable[..., Any] | None:
        """Function from parameters to the optimizer, or None if the config has none."""
        return self._later("optimizer")

    def _later(self, key: str) -> Callable[..., Any] | None:
        return None if getattr(self.config, key) is None else self._makers.get(key)

    def make_trainer(self, model: nn.Module, **instead: Any) -> Trainer:
        """Create the Trainer of a model; ``instead`` replaces options of the config."""
        later: dict[str, Any] = {key: self._later(key) for key in FIRST_ARGUMENTS}
        options: dict[str, Any] = {
            key: self.make(key)
            for key in self._makers
            if key in _ARGUMENTS and key not in later and key != "model"
        }
        if "train_dataloader" in options and self.config.sampling_mode is None:
            _check_batch_size(self.config, options["train_dataloader"])
        later["optimizer"] = self.grouped_optimizer()
        options["metrics"] = options.get("metrics") or None
        options["loggers"] = [
            _with_config(each, vars(self.config)) for each in options.get("loggers", ())
        ]
        options |= {"checkpoint": self.checkpoint, **later, **instead}
        return Trainer(model, **with_features(options))


@about("checkpoint")
def _make_checkpoint(config: RunConfig) -> CheckpointConfig | None:
    values = config.checkpoint
    if values is not None and values["folder"] is None:
        raise ConfigError(
            "checkpoint.folder is missing: give a folder such as checkpoints, or give run_dir, "
            "which then holds the folder checkpoints"
        )
    return None if values is None else CheckpointConfig(**values)


def _prepare(value: Any, key: str, kind: str) -> Callable[..., Any]:
    """Return a function that creates the value of a key; ``kind`` determines allowed values."""
    if kind == "eval_dataloader" and isinstance(value, Mapping) and "data" in value:
        kinds = {name: kind if name == "data" else f"{kind}.{name}" for name in keys_inside(kind)}
        makers = {
            name: _prepare(value[name], f"{key}.{name}", inner) for name, inner in kinds.items()
        }
        return lambda: _make_evaluator({name: make() for name, make in makers.items()})
    # Nodes in a list or by name; evaluations can hold others.
    several = list if kind in LISTS else Mapping
    is_several = isinstance(value, several) and not is_node(value)
    if is_several and (kind == "eval_dataloader" or key == kind in SEVERAL):
        inside: dict[str, Callable[..., Any]] = {}
        for name, each in items_inside(value):
            if each in (None, "None") and kind == "metrics":
                continue
            with about(f"{key}.{name}"):
                inside[name] = _prepare(each, f"{key}.{name}", kind)
        if kind in LISTS:
            return lambda: [make() for make in inside.values()]
        # If no name is left, there is no evaluation.
        return lambda: {name: make() for name, make in inside.items()} or None
    # A null evaluation is none, and any other value that is not a node is refused there.
    if is_node(value) or (value is not None and kind in ("eval_dataloader", *SEVERAL)):
        make = prepare(value, key, first=FIRST_ARGUMENTS.get(key, ()))
    else:
        make = prepare_value(value, key)
    return _checking(make, value["call"], key) if is_node(value) and kind in LOADERS else make


def _make_evaluator(options: dict[str, Any]) -> Evaluator:
    metrics = options.pop("metrics") or None
    return Evaluator(dataloader=options.pop("data"), metrics=metrics, **options)


def _checking(make: Callable[[], Any], call: str, key: str) -> Callable[..., Any]:
    """Return a function that creates the same loader, and refuses an object that is no loader."""

    def made() -> Any:
        found = make()
        # An iterable dataset can give whole batches; a map-style dataset gives rows.
        is_rows = isinstance(found, Dataset) and not isinstance(found, IterableDataset)
        if found is None or is_rows:
            raise ConfigError(
                f"{key}: {call} returned {'None' if found is None else 'a dataset'}, which "
                "yields no batches: return a torch.utils.data.DataLoader"
            )
        return found

    return made


@about("sampling_mode")
def _prepare_sampling(config: RunConfig, make_data: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that creates the loader with batches by the length of rows."""
    makers = {
        name: prepare_value(config.sampling_mode[name], f"sampling_mode.{name}")
        for name in keys_inside("sampling_mode")
    }

    def make() -> Any:
        loader = make_data()
        with about("sampling_mode"):
            options = {name: each() for name, each in makers.items()}
            budgets = {"batch_size", "batch_length", "batch_cost"}
            if all(options[name] is None for name in budgets):
                options["batch_size"] = getattr(loader, "batch_size", None)
            if options["seed"] is None:
                options["seed"] = config.seed or 0
            sampler = LengthBatchSampler(getattr(loader, "dataset", None), **options)
            return with_batch_sampler(loader, sampler)

    return make


@about("global_batch_size", "train_dataloader.args.batch_size")
def _check_batch_size(config: RunConfig, loader: Any) -> None:
    """Refuse a loader whose batch size contradicts global_batch_size."""
    rows, loaded = config.global_batch_size, getattr(loader, "batch_size", None)
    if not isinstance(rows, int) or not isinstance(loaded, int):
        return
    wanted = rows_to_load(
        rows,
        num_devices=process_in_environment().world_size,
        accumulate_batches=config.accumulate_batches,
    )
    if loaded != wanted:
        raise ConfigError(
            f"global_batch_size={rows} needs batches of {wanted} rows on each device, but "
            f"train_dataloader loads {loaded}. Write batch_size: ${{global_batch_size}} among "
            "its args, or leave global_batch_size out"
        )


def _with_config(logger: Logger, config: Mapping[str, Any]) -> Logger:
    """Add the config to the description of the run that a logger gets."""
    start = getattr(logger, "start", None)
    if start is None or isinstance(logger, type):
        return logger  # the Trainer will refuse it

    def start_with_config(run: Mapping[str, Any], *, resume_step: int | None) -> None:
        start({**run, "config": config}, resume_step=resume_step)

    logger.start = start_with_config  # type: ignore[method-assign]
    return logger


@about("weights")
def _check_weights_file(path: str | os.PathLike[str]) -> None:
    """Refuse a path that does not exist."""
    if not Path(path).exists():
        raise ConfigError(
            f"weights={str(path)!r} does not exist. Give a path that starts from the current "
            "folder, such as runs/first/weights.pt or runs/first/checkpoints"
        )


@about("weights")
def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load weights into a model, from a file or checkpoint in which all names and shapes fit.

    Code in the file is never run.
    """
    _check_weights_file(path)
    said = f"weights={str(path)!r}"
    try:
        if Path(path).is_dir():
            state = load_checkpoint(Path(path)).state["modules"][0]
        else:
            # To the host, because the device that they were saved from might not exist here.
            state = torch.load(path, weights_only=True, map_location="cpu")
        model.load_state_dict(state)
    except CheckpointError as error:
        raise ConfigError(f"{said}: {error}") from error
    # Torch's message recommends running the code in the file.
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{said} is damaged, or holds objects that could run code when they are loaded: {SAVE}"
        ) from error
    except (LookupError, OSError, EOFError, RuntimeError, TypeError, ValueError) as error:
        # The first of several lines of torch's message has only the name of the class.
        lines = str(error).splitlines()
        why = shorten(" ".join(lines[1:] or lines), _SHORT, placeholder=" …")
        raise ConfigError(
            f"{said} does not fit the {type(model).__name__} ({why}): give weights of the same "
            f"model; {SAVE}"
        ) from error
