"""Every key of a config, with its type, its default, and both in words."""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import omegaconf
from omegaconf import MISSING

from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config.keys import KEYS, LISTS, mistake
from automicro.cli.config.nodes import show
from automicro.data.sampler import UNITS
from automicro.errors import ConfigError
from automicro.options import GRADIENT_SUMS, PRECISIONS, SYNCS
from automicro.step.split_guard import BATCHNORM_MODES
from automicro.trainer.evaluators import INHERITED
from automicro.trainer.optimizer import SCHEDULER_INTERVALS
from automicro.trainer.step import NON_FINITE_MODES

TO_TRAIN = ("model", "train_dataloader", "optimizer")
# Required by a command, with something to copy for each.
EXAMPLES = {
    "model": "{call: my_package.MyModel, args: {width: 64}}",
    "train_dataloader": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "eval_dataloader": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "optimizer": "{call: torch.optim.AdamW, args: {lr: 0.001}}",
}
LOSS_AVERAGES = ("auto", "samples", "tokens", "none")


@dataclass(frozen=True, kw_only=True)
class CallConfig:
    """Something to be made: a class or a function by its dotted path, and its arguments.

    Attributes:
        call: the dotted path, such as ``torch.optim.AdamW``.
        args: arguments by name. A mapping with ``call`` inside is made first.

    >>> CallConfig(call="torch.nn.Linear", args={"in_features": 4, "out_features": 2}).call
    'torch.nn.Linear'
    """

    call: str = MISSING
    args: dict[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    """One evaluation with options of its own. What is ``inherited`` is what the run has.

    Attributes:
        data: makes what gives whole batches, as ``train_dataloader`` does.
        metrics: in place of ``metrics``: names and nodes, or None for none.
        microbatch_size: in place of ``eval_microbatch_size``; found on its own.
        max_batches: how many batches to evaluate on; None for all.
        interval: in place of ``eval_interval``; None for never while training.

    >>> EvaluatorConfig(data=CallConfig(call="my_data.loader"), max_batches=2).interval
    'inherited'
    """

    data: CallConfig = MISSING
    metrics: Any = INHERITED
    microbatch_size: Any = INHERITED
    max_batches: int | None = None
    interval: str | None = INHERITED


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Which rows make up a batch of training, by how long they are. See `LengthBatchSampler`.

    Attributes:
        mode: how rows are put into batches: ``fixed``, ``duration``, ``1D-bucketing``,
            ``1D-bucketing-dyn``, ``2D-bucketing``, ``2D-bucketing-fixed`` or
            ``2D-bucketing-singlet``.
        lengths: how long rows are: the name of a column, a file such as ``train.csv:seconds``, a
            list, or a node that makes a function of a row.
        second_lengths: the same of something else about rows, for modes of two dimensions.
        batch_size: rows of a batch on one device; that of the loader where nothing else says how
            much a batch holds. A list has one for each bucket.
        batch_length: the sum of the lengths in a batch, at most.
        batch_cost: what a batch takes with its padding, at most: rows × cost of the longest.
        cost: makes a function of lengths and second lengths, in place of their product.
        bucket_edges: ascending lengths between buckets.
        num_buckets: of modes that derive them, or two numbers for two dimensions.
        shuffle: whether each epoch has another order.
        seed: of the order; None for that of the run.
        unit: what lengths count: seconds, tokens, or None for something else.
        second_unit: the same of second lengths.

    >>> SamplingConfig(mode="fixed").shuffle
    True
    """

    mode: str = MISSING
    lengths: Any = None
    second_lengths: Any = None
    batch_size: Any = None
    batch_length: float | None = None
    batch_cost: float | None = None
    cost: CallConfig | None = None
    bucket_edges: list[float] | None = None
    num_buckets: Any = None
    shuffle: bool = True
    seed: int | None = None
    unit: str | None = None
    second_unit: str | None = None


SECTIONS: Mapping[str, type] = {
    "eval_dataloader": EvaluatorConfig,
    "checkpoint": CheckpointConfig,
    "sampling_mode": SamplingConfig,
}
"""Keys that hold further keys, and what says which."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Every option of the `Trainer` that text can say, with the same default.

    The `Trainer` explains them. What has to be made (a model, a loader, an optimizer) is left to
    whoever makes it.

    >>> TrainerConfig(max_duration="2ep").microbatch_size
    'auto'
    """

    max_duration: str = "1ep"
    max_time: str | None = None
    eval_interval: str | None = "1ep"
    scheduler_interval: str | None = None
    accumulate_batches: int | str = 1
    batch_layout: Any = 0
    microbatch_size: Any = "auto"
    eval_microbatch_size: Any = "auto"
    microbatch_unit: Any = "rows"
    nested: Any = None
    when_too_large: Any = "error"
    padding: Any = None
    cut_padding: Any = "auto"
    strict_divisible: bool = False
    memory_limit: int | float | str | None = None
    loss_average: Any = "auto"
    batchnorm: str = "warn"
    probe: bool = True
    remember_sizes: bool | None = None
    rehearse: str | None = None
    precision: str = "fp32"
    gradient_sums: str = "fp32"
    sync: str = "each"
    grad_clip_norm: float | None = None
    parameter_groups: Any = ()
    non_finite: str = "stop"
    channels_last: bool = False
    compile: Any = False
    deterministic: bool = False
    parallel: str | None = None
    device: str = "auto"
    seed: int | None = None
    progress: bool = True


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainerConfig):
    """What the commands read: the Trainer's options, and what is made for it.

    Attributes:
        model: makes the ``torch.nn.Module``.
        weights: a file with a state dict (``torch.save(model.state_dict(), path)``), or a folder
            of checkpoints, of which the model of the newest good one is taken. Loaded into the
            model after it is made; all names and shapes have to fit. A run that goes on from a
            checkpoint has the weights from there.
        train_dataloader: makes what gives full optimization batches: a ``DataLoader``, or any
            iterable that can be passed over once per epoch.
        sampling_mode: which rows make up a batch of ``train_dataloader``, by how long they are: the
            name of a mode, or a mapping of the keys below; the loader keeps all else. Null leaves
            its batches as they are.
        eval_dataloader: the same for evaluation, or a mapping of the keys below, or a mapping from
            names to either: ``{seen: {call: …}, new: {data: {call: …}, max_batches: 10}}``. Values
            are then called ``seen/loss``, and logged as ``eval/seen/loss``. A name with null is
            dropped.
        loss_fn: makes the loss, called as ``loss_fn(model(inputs), targets)`` on batches of
            ``(inputs, targets)``. Without it and without ``forward``, the model computes its own
            loss.
        forward: makes a function ``(model, microbatch) -> loss``, in place of ``loss_fn``.
        optimizer: makes the optimizer; is handed the model's parameters first.
        scheduler: makes the learning rate scheduler; is handed the optimizer first. With one of
            torch's, ``scheduler_interval`` says after what it is stepped.
        metrics: names, and nodes that each make a torchmetrics metric. Training and evaluation
            count apart. A name with null is dropped.
        update_metric: makes a function ``(metric, outputs, microbatch) -> None``, in place of
            ``metric.update(outputs, targets)``. With a fourth parameter called ``name`` it is told
            the metric's name.
        count_tokens: makes a function ``batch -> number of tokens``, for tokens per second and
            durations in tokens, where a batch does not tell. One of your own is handed over as
            ``{call: pkgutil.resolve_name, args: {name: my_data.count_tokens}}``.
        count_seconds: makes a function ``batch -> seconds of data``, for durations in hours, where
            ``sampling_mode`` does not say how long rows are.
        global_batch_size: rows of an optimization batch in all. In ``train_dataloader``,
            ``${global_batch_size}`` is what one device loads at a time: this number divided by
            devices and by ``accumulate_batches``, without a rest. In ``eval_dataloader`` it is this
            number divided by devices alone.
        eval_global_batch_size: rows of an evaluation batch over all devices. In
            ``eval_dataloader``, ``${eval_global_batch_size}`` is what one device loads.
        callbacks: nodes that each make a callback, told of every event in this order; shipped ones
            are in ``automicro.callbacks``.
        loggers: nodes that each make a logger, such as
            ``{call: automicro.loggers.JSONLinesLogger, args: {path: "${run_dir}/log.jsonl"}}``.
        checkpoint: where and how often to save the run, so that the same command goes on where it
            was interrupted: a mapping of the keys below; ``{}`` takes their defaults, null saves
            nothing.
        run_dir: a folder for ``config.yaml``, ``summary.json``, ``weights.pt`` and checkpoints;
            with null, nothing is written. Such as ``runs/${now:%Y-%m-%d_%H-%M-%S}``. Nothing of
            another run is overwritten.

    >>> RunConfig(max_duration="2ep").run_dir is None
    True
    """

    model: CallConfig | None = None
    weights: str | None = None
    train_dataloader: CallConfig | None = None
    sampling_mode: Any = None
    eval_dataloader: Any = None
    loss_fn: CallConfig | None = None
    forward: CallConfig | None = None
    optimizer: CallConfig | None = None
    scheduler: CallConfig | None = None
    metrics: dict[str, CallConfig] = field(default_factory=dict)
    update_metric: CallConfig | None = None
    count_tokens: CallConfig | None = None
    count_seconds: CallConfig | None = None
    global_batch_size: int | None = MISSING
    eval_global_batch_size: int | None = MISSING
    callbacks: list[CallConfig] = field(default_factory=list)
    loggers: list[CallConfig] = field(default_factory=list)
    checkpoint: Any = None
    run_dir: str | None = None


HINTS: Mapping[str, Any] = typing.get_type_hints(RunConfig) | {
    f"{section}.{name}": hint
    for section, owner in SECTIONS.items()
    for name, hint in typing.get_type_hints(owner).items()
}
"""The types of all keys, those inside of others as ``checkpoint.folder``."""


def one_of(choices: Iterable[str]) -> str:
    """Return choices as a sentence has them.

    >>> one_of(["warn", "error", "ignore"])
    'warn, error or ignore'
    """
    *most, last = choices
    return f"{', '.join(most)} or {last}"


# What the types do not say.
_IN_WORDS = {
    "microbatch_size": "a whole number, auto, explore, a node or null",
    "eval_microbatch_size": "a whole number, auto, explore, a node or null",
    "microbatch_unit": "rows, tokens, seconds, or a node that gives a function",
    "nested": "a mapping, or null",
    "when_too_large": "error, recompute, offload, nested, a list of these, or auto",
    "padding": "a mapping, or null",
    "cut_padding": "auto, true or false",
    "memory_limit": "text such as 24MiB or 80%, a whole number of bytes, or null",
    "max_duration": "text such as 2ep, 500ba, 10000sp, 1e6tok or 100h",
    "accumulate_batches": "a whole number, or text such as 1024sp, 1e6tok or 5h",
    "eval_interval": "text such as 1ep, 100ba, 10000sp or 1e6tok, or null",
    "loss_average": f"{', '.join(LOSS_AVERAGES)}, a node, or a mapping of these by name",
    "batchnorm": one_of(BATCHNORM_MODES),
    "precision": one_of(PRECISIONS),
    "gradient_sums": one_of(GRADIENT_SUMS),
    "sync": one_of(SYNCS),
    "non_finite": one_of(NON_FINITE_MODES),
    "scheduler_interval": f"{one_of(SCHEDULER_INTERVALS)}, or null",
    "parallel": "ddp, fsdp or null",
    "batch_layout": "a whole number or a mapping",
    "compile": "true, false or a mapping",
    "parameter_groups": "a list of mappings",
    "metrics": "a mapping of nodes",
    "eval_dataloader": "a node, the keys below, a mapping of these by name, or null",
    "eval_dataloader.data": "a node",
    "eval_dataloader.metrics": "a mapping of nodes, inherited or null",
    "eval_dataloader.microbatch_size": "an int, auto, explore, a node, inherited or null",
    "eval_dataloader.interval": "text such as 1ep or 100ba, inherited or null",
    "rehearse": "worst or null",
    "max_time": "text such as 2h30m, 45m or 90s, or null",
    "callbacks": "a list of nodes",
    "loggers": "a list of nodes",
    "checkpoint": "a mapping of the keys below, or null",
    "sampling_mode": "a mode, a mapping of the keys below, or null",
    "sampling_mode.mode": "a mode",
    "sampling_mode.lengths": "text, a list, a node or null",
    "sampling_mode.second_lengths": "text, a list, a node or null",
    "sampling_mode.batch_size": "a whole number, a list of these, or null",
    "sampling_mode.bucket_edges": "a list of numbers, or null",
    "sampling_mode.num_buckets": "a whole number, two of these in a list, or null",
    "sampling_mode.unit": f"{', '.join(UNITS)} or null",
    "sampling_mode.second_unit": f"{', '.join(UNITS)} or null",
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
    return key in ("metrics", "eval_dataloader", *LISTS) or CallConfig in alternatives(key)


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

    >>> keys_inside("eval_dataloader")[:2], keys_inside("seed")
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
    return mistake(f"{key}={show(value)}: expected {type_in_words(kind or key)}", key)
