"""Every key of a config with its type and its default, from the signature of what takes it."""

import functools
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, get_annotations, isclass, signature
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar

from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config.keys import KEYS, OPTIONS, TO_TRAIN, Option, mistake
from automicro.cli.config.nodes import CallConfig, show
from automicro.data import LengthBatchSampler
from automicro.errors import ConfigError
from automicro.policy.policy import Policy
from automicro.trainer.evaluators import INHERITED, Evaluator
from automicro.trainer.trainer import Trainer

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


class _Filled:
    """Has a field for each argument of something else."""

    if TYPE_CHECKING:
        # For type checkers alone: the fields are filled in when this module is imported.
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


def _with_options_of(
    owner: type, *, without: Collection[str] = (), needs: bool = True, **renamed: str
) -> Callable[[type], Any]:
    """Give a class a field for each argument of another, with type and default, but for its own.

    Without ``needs`` all fields have a default: each command asks for keys of its own.
    """
    hints = typing.get_type_hints(vars(owner)["__init__"])

    def fill(target: type) -> type:
        own, found = get_annotations(target), {}
        for argument, parameter in signature(owner).parameters.items():
            name = renamed.get(argument, argument)
            if argument in without:
                continue
            found[name] = own.get(name, hints[argument])
            if name in own:
                continue
            if parameter.default is not Parameter.empty or not needs:
                is_empty = parameter.default is Parameter.empty
                setattr(target, name, None if is_empty else parameter.default)
        target.__annotations__ = {**found, **own}
        return dataclass(frozen=True, kw_only=True)(target)

    return fill


@_with_options_of(Evaluator, dataloader="data")
class EvaluatorConfig(_Filled):
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


@_with_options_of(LengthBatchSampler, without=("dataset", "rank", "world_size"))
class SamplingConfig(_Filled):
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

    seed: int | None = None


# Further modules would have to be shared with the forward: nodes make things of their own.
@_with_options_of(Trainer, without=("modules",), needs=False)
class RunConfig(_Filled):
    """The config of a command: the options of the `Trainer`, and those of a run.

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

    weights: str | None = None
    sampling_mode: Any = None
    metrics: dict[str, CallConfig] = field(default_factory=dict)
    global_batch_size: int | None = None
    eval_global_batch_size: int | None = None
    callbacks: list[CallConfig] = field(default_factory=list)
    loggers: list[CallConfig] = field(default_factory=list)
    checkpoint: Any = None
    run_dir: str | None = None


SECTIONS: Mapping[str, type] = {
    "eval_dataloader": EvaluatorConfig,
    "checkpoint": CheckpointConfig,
    "sampling_mode": SamplingConfig,
}
"""Keys that hold further keys, and what says which."""


@functools.cache
def alternatives(key: str) -> tuple[Any, ...]:
    """The types that a key may have; in messages null comes last.

    >>> alternatives("seed")
    (<class 'int'>, <class 'NoneType'>)
    """
    section, _, name = key.rpartition(".")
    owner = SECTIONS[section] if section else RunConfig
    found = _read_hint(typing.get_type_hints(owner)[name])
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
    return tuple(each.name for each in fields(SECTIONS[key])) if key in SECTIONS else ()


def defaults(section: str = "") -> dict[str, Any]:
    """The default of each key as a plain value; missing are those that have none.

    Args:
        section: a key whose keys are meant; unless given, those of the top level.

    >>> defaults()["max_duration"], "global_batch_size" in defaults()
    ('1ep', False)
    >>> defaults("checkpoint")["keep_last"]
    3
    """
    values: dict[str, Any] = {}
    for each in fields(SECTIONS[section] if section else RunConfig):
        if each.default_factory is not MISSING:
            values[each.name] = each.default_factory()
        # YAML has no tuples. An unset batch size is no null: nothing can refer to it.
        elif each.default is not MISSING and each.name not in BATCH_SIZES:
            values[each.name] = list(each.default) if each.default == () else each.default
    return values if section else {key: values[key] for key in KEYS if key in values}


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
