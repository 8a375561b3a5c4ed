"""Every key of a config with its type and its default, and whether a value belongs under it.

Types and defaults come from the signature of what takes them.
"""

import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from inspect import Parameter, isclass, signature
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, SimpleNamespace, UnionType
from typing import Any

from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config.keys import KEYS, OPTIONS, TO_TRAIN, Option, as_override, mistake
from automicro.cli.config.nodes import (
    FORM,
    NODE_KEYS,
    CallConfig,
    is_node,
    items_inside,
    leaves,
    read_node,
    show,
)
from automicro.cli.config.sources import read_value
from automicro.data import LengthBatchSampler
from automicro.errors import ConfigError, about, nearest, suggestion
from automicro.features import INSTEAD, WORDS, class_of
from automicro.options import check_choice
from automicro.policy.policy import Policy
from automicro.trainer.evaluators import INHERITED, Evaluator
from automicro.trainer.trainer import Trainer
from automicro.units import duration_meant, parse_bytes, parse_share

# Required by a command, with something to copy for each.
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
    """One evaluation with options of its own. What is ``inherited`` is what the run has.

    Attributes:
        data: makes what gives whole batches, as ``train_dataloader`` does.
        metrics: in place of ``metrics``: names and nodes, or None for none.
        microbatch_size: in place of ``eval_microbatch_size``; found on its own.
        max_batches: how many batches to evaluate on; None for all.
        interval: in place of ``eval_interval``; None for never while training.
    """


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
    """


class RunConfig(SimpleNamespace):
    """The config of a command: options of the `Trainer`, words for its features, those of a run.

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
        parameter_groups: options of the optimizer for some parameters, by their names: mappings
            such as ``{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}``, with ``*``, ``?``
            and ``[…]``. The first that matches counts.
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
        max_time: how long one call of the command may take, such as ``"2h30m"``: it ends after the
            batch that runs then, and saves.
        remember_sizes: whether ``"auto"`` starts from the size that an earlier run found, which
            ``automicro cache`` lists, so that the second run may cut other microbatches than the
            first. None for where no ``seed`` is given. Never with ``deterministic``.
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

    >>> RunConfig(max_duration="2ep").max_duration
    '2ep'
    """


SECTIONS: Mapping[str, tuple[type, type]] = {
    "eval_dataloader": (Evaluator, EvaluatorConfig),
    "checkpoint": (CheckpointConfig, CheckpointConfig),
    "sampling_mode": (LengthBatchSampler, SamplingConfig),
}
"""Keys that hold further keys: what takes these, and what documents them."""

# Further modules would have to be shared with the forward, and words stand for features. What a
# sampler is for, and which rank it is on, the run knows.
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
    """The type and the default of each key, as what takes it has them."""
    owner = SECTIONS[section][0] if section else Trainer
    hints = typing.get_type_hints(vars(owner)["__init__"])
    found: dict[str, tuple[Any, Any]] = {
        "data" if section and name == "dataloader" else name: (hints[name], each.default)
        for name, each in signature(owner).parameters.items()
        if name not in _ONLY_IN_PYTHON
    }
    if section == "sampling_mode":
        found["seed"] = (int | None, None)  # that of the run
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
    """The types that a key may have; in messages null comes last.

    >>> alternatives("seed")
    (<class 'int'>, <class 'NoneType'>)
    """
    section, _, name = key.rpartition(".")
    found = _read_hint(_arguments(section)[name][0])
    if OPTIONS.get(key, Option()).made == "node":
        found = (CallConfig,) if section else (CallConfig, NoneType)
    return tuple(sorted(dict.fromkeys(found), key=lambda kind: kind is NoneType))


def _read_hint(hint: Any) -> tuple[Any, ...]:
    """The values a config may have for an argument: plain ones, mappings, lists, nodes, or any."""
    if isinstance(hint, UnionType):
        return tuple(kind for each in typing.get_args(hint) for kind in _read_hint(each))
    kind = typing.get_origin(hint) or hint
    if kind is Callable or (isclass(kind) and issubclass(kind, Policy)):
        return (CallConfig,)
    same = {Path: str, Sequence: list, dict: Mapping}.get(kind, kind)
    # What is left out, such as a Duration, is for Python: a config has text for it.
    return (same,) if same is Any or same in _WORDS else ()


def choices(key: str) -> tuple[str, ...]:
    """The words that a key may be; none where it may be anything of its type.

    >>> choices("precision")
    ('fp32', 'bf16', 'fp16')
    """
    path = OPTIONS.get(key, Option()).choices
    return tuple(resolve_name(path)) if path else ()


def one_of(choices: Iterable[str]) -> str:
    """Return choices as a sentence has them.

    >>> one_of(["warn", "error", "ignore"])
    'warn, error or ignore'
    """
    *most, last = choices
    comma = "," * any("," in each or " or " in each for each in most)
    return f"{', '.join(most)}{comma} or {last}" if most else last


def type_in_words(key: str) -> str:
    """The values that a key may have, in words.

    >>> type_in_words("seed"), type_in_words("model"), type_in_words("rehearse")
    ('a whole number or null', 'a node', 'worst or null')
    """
    option, found = OPTIONS.get(key, Option()), {*alternatives(key)}
    section, _, name = key.rpartition(".")
    default = defaults(section).get(name, ...)
    plain = [_WORDS[each] for each in alternatives(key) if each in {*_WORDS} - {NoneType}]
    words = [option.words] if option.words else [*choices(key)] or plain
    words += ["inherited"] * (default == INHERITED)
    # What may be anything may be null where that means something.
    if NoneType in found or (Any in found and default in (None, INHERITED)):
        words += ["null"] * (key not in TO_TRAIN)
    return one_of(words)


def is_made(key: str) -> bool:
    """Tell whether a key holds nodes, from which something is made.

    >>> is_made("metrics"), is_made("weights")
    (True, False)
    """
    is_node = {CallConfig, NoneType} == {*alternatives(key)}
    return is_node or key == "eval_dataloader" or bool(OPTIONS[key].made)


def keys_inside(key: str) -> tuple[str, ...]:
    """The keys that a key may hold.

    >>> keys_inside("eval_dataloader")[:2], keys_inside("seed")
    (('data', 'metrics'), ())
    """
    return tuple(_arguments(key)) if key in SECTIONS else ()


def defaults(section: str = "") -> dict[str, Any]:
    """The default of each key as a plain value; missing are those that have none.

    Args:
        section: a key whose keys are meant; unless given, those of the top level.

    >>> defaults()["max_duration"], "global_batch_size" in defaults()
    ('1ep', False)
    >>> defaults("checkpoint")["keep_last"]
    3
    """
    # YAML has no tuples. An unset batch size is no null: nothing can refer to it.
    values = {
        name: [] if default == () else default
        for name, (_, default) in _arguments(section).items()
        if default is not Parameter.empty and name not in BATCH_SIZES
    }
    return values if section else {key: values.get(key) for key in KEYS if key not in BATCH_SIZES}


def wrong_type(key: str, value: object, kind: str) -> ConfigError:
    """The error for a value of a type that the key does not have.

    Args:
        key: where it stands.
        value: what stands there.
        kind: the key whose types it may have.

    >>> print(wrong_type("seed", "many", "seed"))
    seed='many' (text): expected a whole number or null
    """
    hint = "; YAML reads yes, no, on and off as true or false" if isinstance(value, bool) else ""
    return mistake(f"{key}={show(value)}: expected {type_in_words(kind)}{hint}", key)


At = Callable[..., AbstractContextManager[None]]
"""Entered around what is about some keys: `about` lets the first mistake out, others collect."""

LOSS_AVERAGES = ("auto", "samples", "tokens", "none")
NO_KEYS_OF_ITS_OWN = (
    "a config has no keys of its own, and automicro config --keys lists all that there are; refer "
    "to a value where it stands, as ${model.args.width}, or take it from the environment with "
    "${oc.env:NAME}"
)
FORMS = {
    "checkpoint": "{interval: 500ba, keep_last: 2}, {} for the defaults, or null for none",
    "sampling_mode": "{mode: duration, lengths: seconds, batch_length: 600.0}, or fixed",
    "list": "[{call: dotted.path, args: {name: value}}], or [] for none",
    "mapping": "{name: {call: dotted.path, args: {…}}}, or {} for none",
}


class Reader:
    """Reads values, interpolations resolved, in the types of their keys. Nothing is made.

    Args:
        at: entered around each key inside of another.

    >>> Reader().read("3", "seed")
    3
    """

    def __init__(self, at: At = about) -> None:
        self._at = at

    def read(self, value: Any, key: str, kind: str = "") -> Any:
        """A value as the key may have it; ``kind`` is the key whose values are meant."""
        kind = kind or key
        found, option = alternatives(kind), OPTIONS.get(kind, Option())
        # Messages for Python have None, which people copy.
        value = None if value == "None" else value
        if _is_default(value, kind) or (value is None and {NoneType, Any} & {*found}):
            return value
        if kind == "eval_dataloader":
            return self._evaluations(value, key)
        if kind in SECTIONS:
            return self._section(value, key, kind)
        if option.made in FORMS:
            return self._nodes(value, key, option.made)
        # A mapping is a node, unless the key may hold a plain one: there it is one if it has call.
        is_plain = isinstance(value, Mapping) and Mapping in found and not is_node(value)
        only_nodes = {*found} <= {CallConfig, NoneType}
        if CallConfig in found and (only_nodes or isinstance(value, Mapping)) and not is_plain:
            return read_node(value, key)
        typed = _typed(value, key, kind)
        try:
            if option.choices:
                check_choice(key, typed, choices(kind))
            elif option.read and not is_node(typed):
                read = resolve_name(option.read)
                names = [*signature(read).parameters]
                given = {"name": key} if "name" in names else {}
                read(**{next(each for each in names if each != "name"): typed}, **given)
        except (TypeError, ValueError) as error:
            said = str(error) if str(error).startswith(key) else f"{key}: {error}"
            raise mistake(said, key) from error
        return typed

    def _nodes(self, value: Any, key: str, made: str) -> Any:
        """A list of nodes, or a mapping from names to these."""
        if value is None:
            return [] if made == "list" else {}
        if not isinstance(value, list if made == "list" else Mapping):
            raise ConfigError(f"{key}={show(value)} is not a {made}: write {FORMS[made]}")
        nodes = {}
        for name, node in items_inside(value):
            with self._at(f"{key}.{name}"):
                if made == "list" or node not in (None, "None"):
                    nodes[name] = read_node(node, f"{key}.{name}")
        return [*nodes.values()] if made == "list" else nodes

    def _evaluations(self, value: Any, key: str) -> Any:
        """A node, an evaluation with options, or a mapping from names to these."""
        known = keys_inside("eval_dataloader")
        is_mapping = isinstance(value, Mapping) and not is_node(value)
        if is_mapping and not {*known}.isdisjoint(value):
            return self._section(value, key, "eval_dataloader")
        # {clal: torch.nn.Linear} is a mistyped node, and no evaluation that is called clal.
        if not is_mapping or not value or any(_is_mistyped(*each) for each in value.items()):
            return read_node(value, key)
        found = {}
        for name, each in value.items():
            with self._at(f"{key}.{name}"):
                if not isinstance(name, str) or not name or "/" in name:
                    raise ConfigError(
                        f"{key} has the name {show(name)}: names are text without '/', because "
                        f"values are logged as eval/name/loss"
                    )
                if each not in (None, "None"):
                    found[name] = self._evaluations(each, f"{key}.{name}")
        return found or None

    def _section(self, values: Any, key: str, section: str) -> Any:
        """The keys inside of another, with the defaults of those that are not written."""
        known, given = keys_inside(section), defaults(section)
        if section == "sampling_mode" and isinstance(values, str):
            values = {"mode": values}
        if not isinstance(values, Mapping):
            raise ConfigError(f"{key}={show(values)} is not a mapping: write {FORMS[section]}")
        for name, value in values.items():
            where = f"{key}.{name}"
            with self._at(where):
                if name not in known:
                    raise ConfigError(
                        f"{key} has an unknown key {name!r}{suggestion(name, known)}: use some of "
                        f"{', '.join(known)}"
                    )
                # The folder has a place of its own only with a run_dir, which is known later.
                if (section, name, value) != ("checkpoint", "folder", None):
                    given[name] = self.read(value, where, f"{section}.{name}")
                    if section == "checkpoint":
                        check_checkpoint(name, given[name])
        missing = [name for name in known if name not in {"folder", *given, *values}]
        if missing:
            words = choices(f"{section}.{missing[0]}")
            remedy = one_of(words) if words else FORM.removeprefix("write ")
            raise ConfigError(f"{key}.{missing[0]} is missing: write {missing[0]}: {remedy}")
        return given


def _typed(value: Any, key: str, kind: str) -> Any:
    """A value in a type of its key: numbers and words may be written as text, and the reverse."""
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
    # By type, too: for Python True is 1, and False is 0.
    return type(value) is type(default) and value == default


def _is_mistyped(name: object, value: object) -> bool:
    """Whether this is meant for a key of a node, and not for an evaluation by its name."""
    return not isinstance(value, Mapping) and nearest(name, NODE_KEYS) is not None


def check_checkpoint(name: str, value: Any) -> None:
    """Refuse a value that `CheckpointConfig` would refuse, alone."""
    try:
        CheckpointConfig(**{"folder": "checkpoints", name: value})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checkpoint.{error}") from error


def unknown_key(key: str, tree: Mapping[str, Any]) -> ConfigError:
    """The error for a key that there is not, with the one that was meant."""
    if key in INSTEAD:
        return ConfigError(f"unknown key {key!r}: {INSTEAD[key]}")
    value = tree[key]
    duration = duration_meant(value, str(key))
    meant = ["max_duration"] if duration else []
    # People write width for model.args.width.
    meant += [leaf for leaf in leaves(tree) if leaf.endswith(f".args.{key}")]
    meant += [f"{each}.{key}" for each in SECTIONS if key in keys_inside(each)]
    if meant:
        said = f"unknown key {key!r} (did you mean {meant[0]!r}?)"
        return ConfigError(f"{said}: write {as_override(meant[0], duration or value)}")
    hint = suggestion(str(key), KEYS)
    remedy = "correct it" if hint else NO_KEYS_OF_ITS_OWN
    return ConfigError(f"unknown key {key!r}{hint}: {remedy}")


def _read_limit(limit: Any) -> None:
    """Refuse what is no amount of memory, and no share of a device."""
    if parse_share(limit) is None:
        parse_bytes(limit)


def _read_loss_average(name: str, value: Any) -> None:
    """Refuse what says nothing of the loss, by the names of losses perhaps."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            if not is_node(each):
                _read_loss_average(f"{name}.{inner}", each)
        return
    try:
        check_choice(name, value, LOSS_AVERAGES)
    except ValueError as error:
        raise ConfigError(
            f"{error}, or a function of yours from a microbatch to what its loss was divided by: "
            "{call: pkgutil.resolve_name, args: {name: my_data.count}}"
        ) from None
