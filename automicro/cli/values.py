"""Whether the values in a config mean something, told before anything is made."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from automicro.batch.layout import BatchLayout
from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config import EvaluatorConfig, RunConfig
from automicro.cli.keys import LOSS_AVERAGES
from automicro.cli.keys_meant import about
from automicro.cli.nodes import is_node, show
from automicro.cli.wording import as_yaml
from automicro.compilation import check_compile
from automicro.errors import ConfigError
from automicro.options import (
    GRADIENT_SUMS,
    check_choice,
    check_precision_name,
    read_count,
    read_norm,
    read_time,
)
from automicro.policy.choose import make_policy
from automicro.step.split_guard import BATCHNORM_MODES
from automicro.trainer.device import choose_device
from automicro.trainer.evaluators import INHERITED
from automicro.trainer.optimizer import SCHEDULER_INTERVALS
from automicro.trainer.parallel import read_parallel
from automicro.trainer.step import NON_FINITE_MODES
from automicro.units import parse_bytes, parse_share, read_duration


def check_values(config: RunConfig) -> None:
    """Refuse what the Trainer would refuse, without making one.

    Raises:
        ConfigError: names key, value and remedy, as a config has them.

    >>> check_values(RunConfig(max_duration="2ep", microbatch_size=64))
    """
    for key, read in _READERS.items():
        value = getattr(config, key)
        if value is not None:
            _check(key, value, read)
    _check("compile", config, _check_compile)
    _check_evaluations(config.eval_data, "eval_data")


def read_checkpoint(config: RunConfig) -> CheckpointConfig | None:
    """Return what the Trainer is told about checkpoints.

    Raises:
        ConfigError: names key, value and remedy; a folder is needed.

    >>> read_checkpoint(RunConfig()) is None
    True
    """
    values = config.checkpoint
    if values is None:
        return None
    if values["folder"] is None:
        with about("checkpoint"):
            raise ConfigError(
                "checkpoint.folder is missing: give a folder such as checkpoints, or run_dir, "
                "where they lie in checkpoints then"
            )
    if values["interval"] is not None:
        _check("checkpoint.interval", values["interval"], _duration("checkpoint.interval"))
    try:
        return CheckpointConfig(**values)
    except ValueError as error:
        said = f"checkpoint.{as_yaml(str(error))}"
        with about(said.partition("=")[0]):
            raise ConfigError(said) from error


def _check(key: str, value: Any, read: Callable[[Any], object]) -> None:
    with about(key):
        _check_one(key, value, read)


def _check_one(key: str, value: Any, read: Callable[[Any], object]) -> None:
    try:
        read(value)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        if key.rpartition(".")[2] in ("microbatch_size", "eval_microbatch_size"):
            # a policy is a node here
            raise ConfigError(
                f"{key}={show(value)}: give a whole number of at least 1, auto (found by "
                f"halving) or null (the whole batch)"
            ) from error
        text = as_yaml(str(error))
        raise ConfigError(text if text.startswith(key) else f"{key}: {text}") from error


def _check_evaluations(given: Any, key: str) -> None:
    if isinstance(given, Mapping):
        for name, each in given.items():
            _check_evaluations(each, f"{key}.{name}")
    if not isinstance(given, EvaluatorConfig):
        return
    readers: Mapping[str, Callable[[Any], object]] = {
        "microbatch_size": _check_size,
        "max_batches": partial(read_count, f"{key}.max_batches"),
        "interval": _duration(f"{key}.interval"),
    }
    for name, read in readers.items():
        value = getattr(given, name)
        if value not in (None, INHERITED):
            _check(f"{key}.{name}", value, read)


def _duration(key: str) -> Callable[[Any], object]:
    return partial(read_duration, key)


def _check_time(text: str) -> None:
    try:
        read_time("max_time", text)
    except ValueError as error:
        # YAML reads 1:30:00 as a number, counted in sixties.
        quote = "; in YAML, put quotes around colons" if text.isdecimal() else ""
        raise ValueError(f"{error}{quote}") from error


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} is outside of 0 to {2**32 - 1}: give one such as 0")


def _check_loss_average(value: Any) -> None:
    if is_node(value):
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            if not is_node(each):
                _check_average(f"loss_average.{name}", each)
        return
    _check_average("loss_average", value)


def _check_average(name: str, value: Any) -> None:
    try:
        check_choice(name, value, LOSS_AVERAGES)
    except ValueError as error:
        raise ValueError(
            f"{error}, or a function of yours from a microbatch to what its loss was divided by: "
            "{call: pkgutil.resolve_name, args: {name: my_data.count}}"
        ) from None


def _check_size(value: Any) -> None:
    if not is_node(value):
        make_policy(value)


def _check_compile(config: RunConfig) -> None:
    check_compile(
        config.compile,
        sizes_change=any(
            size == "auto" or is_node(size)
            for size in (config.microbatch_size, config.eval_microbatch_size)
        ),
        device=choose_device(config.device),
        memory_limit=config.memory_limit,
    )


def _check_limit(value: Any) -> None:
    if parse_share(value) is None:
        parse_bytes(value)


# Where their own errors do not say which key they mean, the key is put before them.
_READERS: Mapping[str, Callable[[Any], object]] = {
    "max_duration": _duration("max_duration"),
    "max_time": _check_time,
    "eval_interval": _duration("eval_interval"),
    "scheduler_interval": lambda value: check_choice(
        "scheduler_interval", value, SCHEDULER_INTERVALS
    ),
    "accumulate_batches": partial(read_count, "accumulate_batches"),
    "batch_layout": BatchLayout,
    "microbatch_size": _check_size,
    "eval_microbatch_size": _check_size,
    "memory_limit": _check_limit,
    "loss_average": _check_loss_average,
    "batchnorm": lambda value: check_choice("batchnorm", value, BATCHNORM_MODES),
    "precision": check_precision_name,
    "gradient_sums": lambda value: check_choice("gradient_sums", value, GRADIENT_SUMS),
    "grad_clip_norm": partial(read_norm, "grad_clip_norm"),
    "non_finite": lambda value: check_choice("non_finite", value, NON_FINITE_MODES),
    "parallel": read_parallel,
    "device": choose_device,
    "seed": _check_seed,
}
