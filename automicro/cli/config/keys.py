"""All keys of a config.

Nothing here imports torch or OmegaConf: readers and choices are import paths, resolved on use.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from automicro.errors import ConfigError, remember


@dataclass(frozen=True, kw_only=True)
class Option:
    """Facts about a key that its signature and docstring do not state."""

    words: str = ""  # accepted values in words, without null, if the type does not state them
    choices: str = ""  # import path of the accepted words
    read: str = ""  # import path of a check, called with the value, or name= and the value
    made: str = ""  # "node", "function" (called later), or "list" or "mapping" of nodes


_SCHEMA = "automicro.cli.config.schema"
_PLAIN = Option()
_NODE = Option(made="node", words="a node")
_FUNCTION = Option(made="function")
_NODES = Option(made="list", words="a list of nodes")
_METRICS = Option(made="mapping", words="a mapping of nodes")
_SIZE = Option(
    read="automicro.policy.policy.make_policy", words="a whole number, auto, explore, a node"
)
_DURATION = Option(
    words="text such as 2ep, 500ba, 10000sp, 1e6tok, 100h", read="automicro.durations.read_duration"
)
_LENGTHS = Option(words="text, a list, a node")
_UNIT = Option(choices="automicro.data.sampler.UNITS")

# Ordered for readers. Keys inside others have a row if their type does not say enough.
GROUPS: Mapping[str, Mapping[str, Option]] = {
    "What is made": {
        "model": _NODE,
        "weights": _PLAIN,
        "loss_fn": _FUNCTION,
        "forward": _FUNCTION,
        "optimizer": Option(words="a node"),
        "parameter_groups": Option(
            words="a list of mappings", read="automicro.trainer.optimizer.read_patterns"
        ),
        "scheduler": _PLAIN,
        "scheduler_interval": Option(choices="automicro.options.SCHEDULER_INTERVALS"),
        "metrics": _METRICS,
        "update_metric": _FUNCTION,
        "count_tokens": _FUNCTION,
        "count_seconds": _FUNCTION,
    },
    "Data and batches": {
        "train_dataloader": _NODE,
        "sampling_mode": Option(words="a mode, a mapping of the keys below"),
        "sampling_mode.mode": Option(words="a mode", choices="automicro.data.sampler.MODES"),
        "sampling_mode.lengths": _LENGTHS,
        "sampling_mode.second_lengths": _LENGTHS,
        "sampling_mode.batch_size": Option(words="a whole number, a list of these"),
        "sampling_mode.bucket_edges": Option(words="a list of numbers"),
        "sampling_mode.num_buckets": Option(words="a whole number, two of these in a list"),
        "sampling_mode.unit": _UNIT,
        "sampling_mode.second_unit": _UNIT,
        "eval_dataloader": Option(words="a node, the keys below, a mapping of these by name"),
        "eval_dataloader.data": _NODE,
        "eval_dataloader.metrics": _METRICS,
        "eval_dataloader.microbatch_size": _SIZE,
        "eval_dataloader.max_batches": Option(read="automicro.options.read_count"),
        "eval_dataloader.interval": _DURATION,
        "global_batch_size": _PLAIN,
        "eval_global_batch_size": _PLAIN,
        "accumulate_batches": Option(
            words="a whole number, or text such as 1024sp, 1e6tok or 5h",
            read="automicro.trainer.data.loading.read_accumulation",
        ),
        "batch_layout": Option(read="automicro.batch.layout.BatchLayout"),
    },
    "How long": {
        "max_duration": _DURATION,
        "max_time": Option(
            words="text such as 2h30m, 45m or 90s", read="automicro.durations.parse_time"
        ),
        "eval_interval": _DURATION,
    },
    "Memory and microbatches": {
        "microbatch_size": _SIZE,
        "eval_microbatch_size": _SIZE,
        "microbatch_unit": Option(
            words="rows, tokens, seconds, or a node that gives a function",
            made="function",
            read="automicro.lengths.unit.check_unit",
        ),
        "nested": Option(read="automicro.nested.parts.Nested"),
        "when_too_large": Option(
            words="error, recompute, offload, nested, a list of these, or auto",
            read="automicro.savers.levels.WhenTooLarge",
        ),
        "padding": Option(read="automicro.lengths.padding.Padding"),
        "cut_padding": Option(
            words="auto, true or false", read="automicro.lengths.sorting.check_cut_padding"
        ),
        "memory_limit": Option(
            words="text such as 24MiB or 80%, a whole number of bytes",
            read=f"{_SCHEMA}._read_limit",
        ),
        "strict_divisible": _PLAIN,
        "loss_average": Option(
            words="auto, samples, tokens, none, a node, or a mapping of these by name",
            made="function",
            read=f"{_SCHEMA}._read_loss_average",
        ),
        "batchnorm": Option(choices="automicro.step.split_guard.BATCHNORM_MODES"),
        "probe": _PLAIN,
        "remember_sizes": _PLAIN,
        "rehearse": Option(choices="automicro.options.REHEARSALS"),
    },
    "Precision and numerics": {
        "precision": Option(choices="automicro.options.PRECISIONS"),
        "gradient_sums": Option(choices="automicro.options.GRADIENT_SUMS"),
        "grad_clip_norm": Option(read="automicro.options.read_amount"),
        "non_finite": Option(choices="automicro.options.NON_FINITE_MODES"),
        "compile": _PLAIN,
        "deterministic": _PLAIN,
    },
    "The run": {
        "parallel": Option(choices="automicro.trainer.parallel.PARALLEL_MODES"),
        "sync": Option(choices="automicro.options.SYNCS"),
        "device": Option(read="automicro.trainer.device.choose_device"),
        "seed": Option(read="automicro.trainer.device.check_seed"),
        "progress": _PLAIN,
        "run_dir": _PLAIN,
        "callbacks": _NODES,
        "loggers": _NODES,
        "checkpoint": Option(words="a mapping of the keys below"),
        "checkpoint.interval": _DURATION,
        "checkpoint.best_mode": Option(choices="automicro.checkpoints.store.MODES"),
        "checkpoint.resume": Option(words="auto, never or a path"),
    },
}
OPTIONS = {key: option for group in GROUPS.values() for key, option in group.items()}
KEYS = tuple(key for key in OPTIONS if "." not in key)
# Keys without which nothing is trained.
TO_TRAIN = ("model", "train_dataloader", "optimizer")
# Keys that hold a list of nodes.
LISTS = tuple(key for key, option in OPTIONS.items() if option.made == "list")


def mistake(text: str, *keys: object) -> ConfigError:
    """Return an error about keys of the config."""
    error = ConfigError(text)
    remember(error, keys=tuple(map(str, keys)))
    return error


def as_override(key: str, value: object) -> str:
    """Return a value in the notation of the command line, for copying.

    >>> as_override("optimizer.args.lr", 0.1), as_override("seed", None)
    ('optimizer.args.lr=0.1', 'seed=null')
    >>> print(as_override("model.args.sizes", [1, "two"]))
    'model.args.sizes=[1, "two"]'
    """
    if isinstance(value, str) and value not in ("", "???"):
        return shlex.quote(f"{key}={value}")
    try:
        # JSON is valid YAML.
        text = "VALUE" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = "VALUE"
    return shlex.quote(f"{key}={text}")
