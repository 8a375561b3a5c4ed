"""The names of all keys of a config, which of them an error is about, and which may be meant.

Nothing here imports torch or OmegaConf.
"""

import contextlib
import difflib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from automicro.errors import ConfigError, facts_of, remember

# In the order in which a reader wants them.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "What is made": (
        "model",
        "weights",
        "loss_fn",
        "forward",
        "optimizer",
        "parameter_groups",
        "scheduler",
        "scheduler_interval",
        "metrics",
        "update_metric",
        "count_tokens",
        "count_seconds",
    ),
    "Data and batches": (
        "train_dataloader",
        "sampling_mode",
        "eval_dataloader",
        "global_batch_size",
        "eval_global_batch_size",
        "accumulate_batches",
        "batch_layout",
    ),
    "How long": ("max_duration", "max_time", "eval_interval"),
    "Memory and microbatches": (
        "microbatch_size",
        "eval_microbatch_size",
        "microbatch_unit",
        "nested",
        "when_too_large",
        "padding",
        "cut_padding",
        "memory_limit",
        "strict_divisible",
        "loss_average",
        "batchnorm",
        "probe",
        "remember_sizes",
        "rehearse",
    ),
    "Precision and numerics": (
        "precision",
        "gradient_sums",
        "grad_clip_norm",
        "non_finite",
        "channels_last",
        "compile",
        "deterministic",
    ),
    "The run": (
        "parallel",
        "sync",
        "device",
        "seed",
        "progress",
        "run_dir",
        "callbacks",
        "loggers",
        "checkpoint",
    ),
}
# Keys that hold a list of nodes.
LISTS = ("callbacks", "loggers")
KEYS = tuple(key for keys in GROUPS.values() for key in keys)


@contextlib.contextmanager
def about(*keys: object) -> Iterator[None]:
    """Remember of each error which keys of the config it is about; what lies inside knows better.

    >>> from automicro.errors import ConfigError
    >>> try:
    ...     with about("model"), about("model.args"):
    ...         raise ConfigError("no such argument")
    ... except ConfigError as error:
    ...     keys_of(error)
    ('model.args',)
    """
    try:
        yield
    except Exception as error:
        if not keys_of(error):
            remember(error, keys=tuple(map(str, keys)))
        raise


def mistake(text: str, *keys: object) -> ConfigError:
    """An error about some keys of the config, to be raised.

    >>> keys_of(mistake("no such argument", "model.args.widht"))
    ('model.args.widht',)
    """
    error = ConfigError(text)
    remember(error, keys=tuple(map(str, keys)))
    return error


def keys_of(error: BaseException) -> tuple[str, ...]:
    """The keys that an error is about, dotted; none where nobody knows.

    >>> keys_of(ValueError())
    ()
    """
    return facts_of(error).keys


def key_in(text: str) -> tuple[str, ...]:
    """The key with which a message begins, as most do.

    >>> key_in("scheduler needs an optimizer"), key_in("Trainer needs a model")
    (('scheduler',), ())
    """
    first = re.match(r"\w+", text)
    return (first[0],) if first and first[0] in KEYS else ()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint to be put behind a wrong name, empty where nothing is near.

    Case is ignored, because it is the most frequent mistake in names of classes.

    >>> did_you_mean("optimzer", ["model", "optimizer"])
    " (did you mean 'optimizer'?)"
    >>> did_you_mean("colour", ["model", "optimizer"])
    ''
    """
    by_lower: dict[str, list[str]] = {}
    for each in known:
        by_lower.setdefault(each.lower(), []).append(each)
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if not near:
        return ""
    # Modules are often called like the class in them.
    meant = difflib.get_close_matches(name, sorted(by_lower[near[0]]), n=1, cutoff=0.0)
    return f" (did you mean {meant[0]!r}?)"


def as_override(key: str, value: object) -> str:
    """Write a value as the command line takes it, to be copied.

    Args:
        key: dotted.
        value: of plain values; ``???`` and what is no plain value becomes ``VALUE``.

    >>> as_override("optimizer.args.lr", 0.1), as_override("seed", None)
    ('optimizer.args.lr=0.1', 'seed=null')
    >>> print(as_override("model.args.sizes", [1, "two"]))
    'model.args.sizes=[1, "two"]'
    """
    if isinstance(value, str) and value not in ("", "???"):
        return shlex.quote(f"{key}={value}")
    try:
        # JSON is YAML.
        text = "VALUE" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = "VALUE"
    return shlex.quote(f"{key}={text}")
