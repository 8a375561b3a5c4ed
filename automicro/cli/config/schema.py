"""Types and defaults of all keys of a config, and checks of their values.

Types and defaults come from the signatures of the classes that take the keys.
"""

import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter, isclass, signature
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, SimpleNamespace, UnionType
from typing import Any

from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config.keys import KEYS, OPTIONS, TO_TRAIN, Option, as_override, mistake
from automicro.cli.config.nodes import (
    FORM,
    CallConfig,
    is_node,
    items_inside,
    leaves,
    read_node,
    show,
)
from automicro.cli.config.sources import read_value
from automicro.data import LengthBatchSampler
from automicro.durations import duration_meant
from automicro.errors import ConfigError, about, suggestion
from automicro.features import INSTEAD, WORDS, class_of
from automicro.options import check_choice
from automicro.policy.policy import Policy
from automicro.trainer.evaluators import INHERITED, Evaluator
from automicro.trainer.trainer import Trainer
from automicro.units import parse_bytes, parse_share

# Keys that commands require, with an example for each.
EXAMPLES = {
    "model": "{call: my_package.MyModel, args: {width: 64}}",
    "train_dataloader": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "eval_dataloader": "{call: my_package.make_loader, args: {batch_size: 512}}",
    "optimizer": "{call: torch.optim.AdamW, args: {lr: 0.001}}",
}
BATCH_SIZES = ("global_batch_size", "eval_global_batch_size")
_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Mapping: "a mapping",
    list: "a list",
    CallConfig: "a node",
    NoneType: "null",
}


class EvaluatorConfig:
    """One evaluation with its own options; ``inherited`` means the option of the run.

    Attributes:
        data: creates the source of whole batches, like ``train_dataloader``.
        metrics: replaces ``metrics``: names and nodes, or None for no metrics.
        microbatch_size: replaces ``eval_microbatch_size``; found separately.
        max_batches: maximum number of batches to evaluate on, or None for all.
        interval: replaces ``eval_interval``; None for no evaluation during training.
    """


class SamplingConfig:
    """Choice of rows for training batches by their lengths. See `LengthBatchSampler`.

    Attributes:
        mode: how rows are grouped into batches: ``fixed``, ``duration``, ``1D-bucketing``,
            ``1D-bucketing-dyn``, ``2D-bucketing``, ``2D-bucketing-fixed`` or
            ``2D-bucketing-singlet``.
        lengths: lengths of rows: the name of a column, a file such as ``train.csv:seconds``, a
            list, or a node that creates a function of a row.
        second_lengths: a second length of each row, for two-dimensional modes.
        batch_size: rows of a batch on one device, or a list with one number for each bucket.
            Defaults to that of the loader if no other limit is given.
        batch_length: maximum sum of the lengths in a batch.
        batch_cost: maximum cost of a batch including its padding: rows × cost of the longest.
        cost: creates a function of lengths and second lengths that replaces their product.
        bucket_edges: ascending lengths between buckets.
        num_buckets: number of buckets for modes that derive them, or two numbers for two
            dimensions.
        shuffle: whether each epoch has a different order.
        seed: seed of the order, or None for the seed of the run.
        unit: unit of lengths: seconds, tokens, or None for another unit.
        second_unit: unit of second lengths.
    """


class RunConfig(SimpleNamespace):
    """The config of a command: options of the `Trainer`, words of features, options of the run.

    Attributes:
        model: creates the ``torch.nn.Module``.
        weights: a file with a state dict (``torch.save(model.state_dict(), path)``), or a folder of
            checkpoints, whose newest intact one provides the model. Loaded into the new model; all
            names and shapes have to fit. A run that resumes from a checkpoint uses the weights
            there instead.
        train_dataloader: creates the source of full optimization batches: a ``DataLoader``, or an
            iterable that can be iterated over once per epoch.
        sampling_mode: how rows are grouped into batches of ``train_dataloader`` by their lengths:
            the name of a mode, or a mapping of the keys below. Everything else of the loader is
            kept. Null leaves its batches unchanged.
        eval_dataloader: creates the source of evaluation batches, like ``train_dataloader``. Or a
            mapping of the keys below, or a mapping from names to either:
            ``{seen: {call: …}, new: {data: {call: …}, max_batches: 10}}``. Values are then called
            ``seen/loss``, and logged as ``eval/seen/loss``. A name with null is dropped.
        loss_fn: creates the loss, called as ``loss_fn(model(inputs), targets)`` on batches of
            ``(inputs, targets)``. Without ``loss_fn`` and ``forward``, the model computes its own
            loss.
        forward: creates a function ``(model, microbatch) -> loss`` that replaces ``loss_fn``.
        optimizer: creates the optimizer, with the model's parameters as first argument.
        scheduler: creates the learning rate scheduler, with the optimizer as first argument. For a
            scheduler of torch, ``scheduler_interval`` determines when it is stepped.
        metrics: a mapping from names to nodes that each create a torchmetrics metric. Training and
            evaluation are counted separately. A name with null is dropped.
        parameter_groups: optimizer options for some parameters, selected by name: mappings such as
            ``{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}``, with ``*``, ``?`` and
            ``[…]``. The first match applies.
        update_metric: creates a function ``(metric, outputs, microbatch) -> None`` that replaces
            ``metric.update(outputs, targets)``.
        count_tokens: creates a function ``batch -> number of tokens``, for tokens per second and
            durations in tokens, if batches do not show it. Pass a function of your own as
            ``{call: pkgutil.resolve_name, args: {name: my_data.count_tokens}}``.
        count_seconds: creates a function ``batch -> seconds of data``, for durations in hours, if
            ``sampling_mode`` does not give the lengths of rows.
        global_batch_size: total rows of an optimization batch. In ``train_dataloader``,
            ``${global_batch_size}`` is the number of rows that one device loads at a time: this
            number divided by devices and by ``accumulate_batches``, without a remainder. In
            ``eval_dataloader`` it is divided by devices only.
        eval_global_batch_size: rows of an evaluation batch over all devices. In
            ``eval_dataloader``, ``${eval_global_batch_size}`` is the number that one device loads.
        max_time: maximum time of one call of the command, such as ``"2h30m"``. When it is over, the
            run ends after the current batch, and saves.
        remember_sizes: whether ``"auto"`` starts from the size that an earlier run found, as listed
            by ``automicro cache``, so that a second run might use other microbatches than the
            first. None means True unless a ``seed`` is given. Never with ``deterministic``.
        callbacks: nodes that each create a callback, called for every event in this order; included
            callbacks are in ``automicro.callbacks``.
        loggers: nodes that each create a logger, such as
            ``{call: automicro.loggers.JSONLinesLogger, args: {path: "${run_dir}/log.jsonl"}}``.
        checkpoint: where and how often to save the run, so that the same command resumes it after
            an interruption: a mapping of the keys below; ``{}`` uses their defaults, null saves
            nothing.
        run_dir: a folder for ``config.yaml``, ``summary.json``, ``weights.pt`` and checkpoints;
            with null, nothing is written. Such as ``runs/${now:%Y-%m-%d_%H-%M-%S}``. Files of
            another run are never overwritten.
    """


SECTIONS: Mapping[str, tuple[type, type]] = {
    "eval_dataloader": (Evaluator, EvaluatorConfig),
    "checkpoint": (CheckpointConfig, CheckpointConfig),
    "sampling_mode": (LengthBatchSampler, SamplingConfig),
}
"""Keys with nested keys: the class that they are passed to, and the class that documents them."""

# Additional modules would have to be shared with the forward, and words stand for features. The run
# provides the dataset and rank of a sampler.
_ONLY_IN_PYTHON = ("modules", "features", "dataset", "rank", "world_size")
_OF_A_RUN: Mapping[str, tuple[Any, Any]] = {
    "weights": (str | None, None),
    "parameter_groups": (Sequence[Any], ()),
    "max_time": (str | None, None),
    "sampling_mode": (Any, None),
    "metrics": (Mapping[str, Any], {}),
    "global_batch_size": (int | None, None),
    "eval_global_batch_size": (int | None, None),
    "callbacks": (Sequence[Any], ()),
    "loggers": (Sequence[Any], ()),
    "checkpoint": (Any, None),
    "run_dir": (str | None, None),
}


@functools.cache
def _arguments(section: str = "") -> Mapping[str, tuple[Any, Any]]:
    """Return the type and default of each key, from the signature of the class that takes it."""
    owner = SECTIONS[section][0] if section else Trainer
    hints = typing.get_type_hints(vars(owner)["__init__"])
    found: dict[str, tuple[Any, Any]] = {
        "data" if section and name == "dataloader" else name: (hints[name], each.default)
        for name, each in signature(owner).parameters.items()
        if name not in _ONLY_IN_PYTHON
    }
    if section == "sampling_mode":
        found["seed"] = (int | None, None)  # defaults to the seed of the run
    if section:
        return found
    for name, word in WORDS.items():
        if name in KEYS and name not in found:
            kind: Any = bool
            if word.argument is not None:
                kind = typing.get_type_hints(vars(class_of(word.feature))["__init__"])[
                    word.argument
                ]
            found[name] = (kind if word.default is not None else kind | None, word.default)
    return {**found, **_OF_A_RUN}


@functools.cache
def alternatives(key: str) -> tuple[Any, ...]:
    """Return the types that a key can have, null last because messages list it last."""
    section, _, name = key.rpartition(".")
    found = _read_hint(_arguments(section)[name][0])
    if OPTIONS.get(key, Option()).made == "node":
        found = (CallConfig,) if section else (CallConfig, NoneType)
    return tuple(sorted(dict.fromkeys(found), key=lambda kind: kind is NoneType))


def _read_hint(hint: Any) -> tuple[Any, ...]:
    """Return the types of values in a config for an argument's annotation."""
    if isinstance(hint, UnionType):
        return tuple(kind for each in typing.get_args(hint) for kind in _read_hint(each))
    kind = typing.get_origin(hint) or hint
    if kind is Callable or (isclass(kind) and issubclass(kind, Policy)):
        return (CallConfig,)
    same = {Path: str, Sequence: list, dict: Mapping}.get(kind, kind)
    # Types not listed, such as Duration, are for Python; a config has text instead.
    return (same,) if same is Any or same in _WORDS else ()


def choices(key: str) -> tuple[str, ...]:
    """Return the words that a key accepts, or nothing if it accepts any value of its type."""
    path = OPTIONS.get(key, Option()).choices
    return tuple(resolve_name(path)) if path else ()


def one_of(choices: Iterable[str]) -> str:
    """Return choices as part of a sentence.

    >>> one_of(["warn", "error", "ignore"])
    'warn, error or ignore'
    """
    *most, last = choices
    comma = "," * any("," in each or " or " in each for each in most)
    return f"{', '.join(most)}{comma} or {last}" if most else last


def type_in_words(key: str) -> str:
    """Return the values that a key accepts, in words.

    >>> type_in_words("seed"), type_in_words("model"), type_in_words("rehearse")
    ('a whole number or null', 'a node', 'worst or null')
    """
    option, found = OPTIONS.get(key, Option()), {*alternatives(key)}
    section, _, name = key.rpartition(".")
    default = defaults(section).get(name, ...)
    plain = [_WORDS[each] for each in alternatives(key) if each in {*_WORDS} - {NoneType}]
    words = [option.words] if option.words else [*choices(key)] or plain
    words += ["inherited"] * (default == INHERITED)
    # A key of any type can also be null if its default is.
    if NoneType in found or (Any in found and default in (None, INHERITED)):
        words += ["null"] * (key not in TO_TRAIN)
    return one_of(words)


def keys_inside(key: str) -> tuple[str, ...]:
    """Return the keys that a key can contain."""
    return tuple(_arguments(key)) if key in SECTIONS else ()


def defaults(section: str = "") -> dict[str, Any]:
    """Return the defaults of the keys of a section (by default the top level) as plain values.

    >>> defaults()["max_duration"], "global_batch_size" in defaults()
    ('1ep', False)
    >>> defaults("checkpoint")["keep_last"]
    3
    """
    # YAML has no tuples. An unset batch size has no default, because nothing can refer to it.
    values = {
        name: [] if default == () else default
        for name, (_, default) in _arguments(section).items()
        if default is not Parameter.empty and name not in BATCH_SIZES
    }
    return values if section else {key: values.get(key) for key in KEYS if key not in BATCH_SIZES}


def wrong_type(key: str, value: object, kind: str) -> ConfigError:
    """Return the error for a value of the wrong type; ``kind`` is the key whose types apply."""
    hint = "; YAML reads yes, no, on and off as true or false" if isinstance(value, bool) else ""
    return mistake(f"{key}={show(value)}: expected {type_in_words(kind)}{hint}", key)


LOSS_AVERAGES = ("auto", "samples", "tokens", "none")
NO_KEYS_OF_ITS_OWN = (
    "a config cannot define new keys; automicro config --keys lists all keys. Refer to a value "
    "where it is set, as in ${model.args.width}, or read it from the environment with "
    "${oc.env:NAME}"
)
FORMS = {
    "checkpoint": "{interval: 500ba, keep_last: 2}, {} for the defaults, or null for none",
    "sampling_mode": "{mode: duration, lengths: seconds, batch_length: 600.0}, or fixed",
}


def read(value: Any, key: str, kind: str = "") -> Any:
    """Return a value in the type of its key; ``kind`` is the key whose types apply."""
    kind = kind or key
    found, option = alternatives(kind), OPTIONS.get(kind, Option())
    # Messages for Python have None, which users copy.
    value = None if value == "None" else value
    if _is_default(value, kind) or (value is None and {NoneType, Any} & {*found}):
        return value
    if kind == "eval_dataloader":
        return _evaluations(value, key)
    if kind in SECTIONS:
        return _section(value, key, kind)
    if value is None and option.made in ("list", "mapping"):
        return defaults()[kind]
    # A mapping is a node. If the key also accepts plain mappings, it is one only if it has
    # call.
    is_plain = isinstance(value, Mapping) and Mapping in found and not is_node(value)
    only_nodes = {*found} <= {CallConfig, NoneType}
    if CallConfig in found and (only_nodes or isinstance(value, Mapping)) and not is_plain:
        return read_node(value, key)
    typed = _typed(value, key, kind)
    try:
        if option.choices:
            check_choice(key, typed, choices(kind))
        elif option.read and not is_node(typed):
            check = resolve_name(option.read)
            names = [*signature(check).parameters]
            given = {"name": key} if "name" in names else {}
            check(**{next(each for each in names if each != "name"): typed}, **given)
    except (TypeError, ValueError) as error:
        said = str(error) if str(error).startswith(key) else f"{key}: {error}"
        raise mistake(said, key) from error
    return typed


def _evaluations(value: Any, key: str) -> Any:
    """Return a node, an evaluation with options, or a mapping from names to these."""
    if not isinstance(value, Mapping) or is_node(value):
        return value
    if not {*keys_inside("eval_dataloader")}.isdisjoint(value):
        return _section(value, key, "eval_dataloader")
    found = {}
    for name, each in value.items():
        with about(f"{key}.{name}"):
            if not isinstance(name, str) or not name or "/" in name:
                raise ConfigError(
                    f"{key} has the name {show(name)}: names are text without '/', because "
                    f"values are logged as eval/name/loss"
                )
            if each not in (None, "None"):
                found[name] = _evaluations(each, f"{key}.{name}")
    return found or None


def _section(values: Any, key: str, section: str) -> Any:
    """Return the keys inside another, including defaults."""
    known, given = keys_inside(section), defaults(section)
    if section == "sampling_mode" and isinstance(values, str):
        values = {"mode": values}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={show(values)} is not a mapping: write {FORMS[section]}")
    for name, value in values.items():
        where = f"{key}.{name}"
        with about(where):
            if name not in known:
                raise ConfigError(
                    f"{key} has an unknown key {name!r}{suggestion(name, known)}: use some of "
                    f"{', '.join(known)}"
                )
            # The folder's default depends on run_dir, which is known later.
            if (section, name, value) != ("checkpoint", "folder", None):
                given[name] = read(value, where, f"{section}.{name}")
    missing = [name for name in known if name not in {"folder", *given, *values}]
    if missing:
        words = choices(f"{section}.{missing[0]}")
        remedy = one_of(words) if words else FORM.removeprefix("write ")
        raise ConfigError(f"{key}.{missing[0]} is missing: write {missing[0]}: {remedy}")
    return given


def _typed(value: Any, key: str, kind: str) -> Any:
    """Convert a value to the type of its key: numbers and words given as text, and the reverse."""
    found = {*alternatives(kind)} - {NoneType}
    if Any in found or type(value) in found or (Mapping in found and isinstance(value, Mapping)):
        return value
    if found == {str} and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if found == {bool} and type(value) is int and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and len(found) == 1:
        with suppress(ValueError):
            value = read_value(value)
    if float in found and type(value) is int:
        return float(value)
    if type(value) in found:
        return value
    raise wrong_type(key, value, kind)


def _is_default(value: object, kind: str) -> bool:
    section, _, name = kind.rpartition(".")
    default = defaults(section).get(name, ...)
    # Types are compared, too, because True == 1 and False == 0.
    return type(value) is type(default) and value == default


def unknown_key(key: str, tree: Mapping[str, Any]) -> ConfigError:
    """Return the error for an unknown key, with a suggestion."""
    if key in INSTEAD:
        return mistake(f"unknown key {key!r}: {INSTEAD[key]}", key)
    value = tree[key]
    duration = duration_meant(value, str(key))
    meant = ["max_duration"] if duration else []
    # Users write width for model.args.width.
    meant += [leaf for leaf in leaves(tree) if leaf.endswith(f".args.{key}")]
    meant += [f"{each}.{key}" for each in SECTIONS if key in keys_inside(each)]
    if meant:
        hint = f" (did you mean {meant[0]!r}?)"
        remedy = f"write {as_override(meant[0], duration or value)}"
    else:
        hint = suggestion(str(key), KEYS)
        remedy = "correct it" if hint else NO_KEYS_OF_ITS_OWN
    return mistake(f"unknown key {key!r}{hint}: {remedy}", key)


def _read_limit(limit: Any) -> None:
    """Refuse a value that is neither an amount of memory nor a share of a device."""
    _ = parse_share(limit) or parse_bytes(limit)


def _read_loss_average(name: str, value: Any) -> None:
    """Refuse an invalid way to average a loss, or one of several losses by name."""
    inside = {f"{name}.{each}": inner for each, inner in items_inside(value)} or {name: value}
    for key, each in inside.items():
        if not is_node(each) and each not in LOSS_AVERAGES:
            raise mistake(
                f"{key}={show(each)} is not known{suggestion(each, LOSS_AVERAGES)}: write "
                f"{type_in_words('loss_average')}",
                key,
            )
