"""For users of Composer: the metrics of its models, and where its Trainer's arguments went."""

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from automicro.events.run import LoopState, Run
from automicro.migration import comes_from, synonym_of
from automicro.trainer.evaluators import INHERITED, Evaluator
from automicro.units import Duration, Unit, read_duration

T = TypeVar("T")
R = TypeVar("R")
Arguments = ParamSpec("Arguments")


def model_metrics(model: Any, *, is_train: bool) -> dict[str, Any] | None:
    """The metrics by name that a model with Composer's interface has.

    Args:
        model: any; one with ``loss``, ``eval_forward`` and ``get_metrics`` is asked.
        is_train: whether those of training are wanted, or those of evaluation.

    Returns:
        None where it is another model, or has no metrics.

    Raises:
        TypeError: ``get_metrics`` gave something else than metrics.

    Example:
        >>> model_metrics(nn.Linear(2, 1), is_train=True) is None
        True
    """
    interface = ("loss", "eval_forward", "get_metrics")
    if not all(callable(getattr(model, name, None)) for name in interface):
        return None
    metrics = model.get_metrics(is_train=is_train)
    if metrics is None:
        return None
    if isinstance(metrics, Mapping | nn.ModuleDict):  # a MetricCollection is one, too
        return dict(metrics.items()) or None
    if isinstance(metrics, list | tuple):
        return {type(metric).__name__: metric for metric in metrics} or None
    if hasattr(metrics, "update"):
        return {type(metrics).__name__: metrics}
    raise TypeError(
        f"{type(model).__name__}.get_metrics(is_train={is_train}) returned {metrics!r}; return a "
        "mapping from names to metrics"
    )


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """What stands here for an argument of Composer's Trainer.

    Attributes:
        ours: the argument of our `Trainer`; None where there is none.
        hint: how to say it here, or why there is nothing.
    """

    ours: str | None = None
    hint: str


def _ours(name: str, hint: str) -> Counterpart:
    return Counterpart(ours=name, hint=hint)


def _none(hint: str) -> Counterpart:
    return Counterpart(hint=hint)


def _of_trainer(counterpart: Counterpart) -> Counterpart:
    name = "" if counterpart.ours is None else f"`{counterpart.ours}`, "
    return _none(f"what concerns a whole run is given to the `Trainer`: {name}{counterpart.hint}")


_LOAD_YOURSELF = _none(
    'load the weights into the model before: `load_checkpoint(path, into={"modules": '
    "[model.state_dict()]})`"
)

COUNTERPARTS: Mapping[str, Counterpart] = {
    "model": _ours("model", "the same; any other module works, too"),
    "train_dataloader": _ours(
        "train_dataloader", "any iterable of whole batches, or a DataSpec without functions"
    ),
    "train_dataloader_label": _none("values of training are called `train/…`"),
    "train_subset_num_batches": _none("give a loader that has fewer batches"),
    "spin_dataloaders": _none("a loader is always brought to where it stood"),
    "max_duration": _ours("max_duration", 'text with a unit: `"2ep"`, `"500ba"`, `"1e6tok"`'),
    "algorithms": _ours(
        "callbacks", "freezing, averages of weights and growing inputs are callbacks here"
    ),
    "algorithm_passes": _ours("callbacks", "they are called in the order in which they are given"),
    "optimizers": _ours(
        "optimizer", "one optimizer, or a callable that makes it: `torch.optim.AdamW`"
    ),
    "schedulers": _ours(
        "scheduler",
        "one of torch's or of Composer's; several as a `SequentialLR` or a `ChainedScheduler`",
    ),
    "scale_schedule_ratio": _none("scale `max_duration` and the scheduler's own numbers"),
    "step_schedulers_every_batch": _ours(
        "scheduler_interval",
        '`"epoch"`, which is what Composer does with those of torch unless it is told otherwise; '
        '`"batch"` is the default here',
    ),
    "eval_dataloader": _ours(
        "eval_dataloader",
        "a loader, an `Evaluator`, or a mapping from names to these; of Composer's `Evaluator` "
        "one, or several in a list",
    ),
    "eval_interval": _ours("eval_interval", 'text with a unit: `"1ep"`, `"100ba"`'),
    "eval_subset_num_batches": _ours("eval_dataloader", "`Evaluator(max_batches=…)`"),
    "callbacks": _ours("callbacks", "instances of subclasses of `automicro.Callback`"),
    "loggers": _ours("loggers", "those of `automicro.loggers`, or your own"),
    "run_name": _none("name the folders of the checkpoints and of the loggers"),
    "progress_bar": _ours("progress", "True or False"),
    "log_to_console": _ours("loggers", "`ConsoleLogger()` prints every value"),
    "console_stream": _ours("loggers", "`ConsoleLogger(file=…)`; progress goes to stdout"),
    "console_log_interval": _ours("loggers", "`ConsoleLogger(interval_seconds=…)`"),
    "log_traces": _none("decisions are logged through `logging`, as automicro"),
    "auto_log_hparams": _ours("loggers", "each is told the settings of the run when it starts"),
    "load_path": _ours("checkpoint", "`CheckpointConfig(folder=…, resume=path)`"),
    "load_object_store": _none("checkpoints lie in folders; copy them there first"),
    "load_weights_only": _LOAD_YOURSELF,
    "load_strict_model_weights": _LOAD_YOURSELF,
    "load_progress_bar": _ours("progress", "says what a run was resumed from"),
    "load_ignore_keys": _LOAD_YOURSELF,
    "load_exclude_algorithms": _LOAD_YOURSELF,
    "save_folder": _ours("checkpoint", "`CheckpointConfig(folder=…)`"),
    "save_filename": _none("a checkpoint is a folder, named after its number and its batch"),
    "save_latest_filename": _none("the newest good checkpoint is found without a link to it"),
    "save_overwrite": _none("checkpoints count up, and none is overwritten"),
    "save_interval": _ours("checkpoint", '`CheckpointConfig(interval="500ba")`'),
    "save_weights_only": _none("save `model.state_dict()` when training has ended"),
    "save_ignore_keys": _none("a checkpoint has all that a run needs to go on"),
    "save_num_checkpoints_to_keep": _ours(
        "checkpoint", "`CheckpointConfig(keep_last=…)`, and `keep_best` besides"
    ),
    "save_metrics": _ours("checkpoint", "the values of the evaluation are always saved with it"),
    "autoresume": _ours("checkpoint", '`CheckpointConfig(resume="auto")`, which is the default'),
    "parallelism_config": _ours(
        "parallel",
        '`"ddp"` or `"fsdp"` (`fully_shard`), started by torchrun; a model that is wrapped already '
        "is taken as it is",
    ),
    "fsdp_config": _ours(
        "parallel", '`"fsdp"` shards repeated blocks; for anything else call `fully_shard` yourself'
    ),
    "deepspeed_config": _none('use `parallel="fsdp"`'),
    "dist_timeout": _none("votes have a timeout of their own; errors reach all ranks in seconds"),
    "ddp_sync_strategy": _none("gradients are reduced once per batch"),
    "device": _ours("device", '`"gpu"` is `"cuda"`, or leave it `"auto"`'),
    "precision": _ours("precision", '`"amp_bf16"` is `"bf16"`, `"amp_fp16"` is `"fp16"`'),
    "precision_config": _none("there is no 8-bit precision"),
    "device_train_microbatch_size": _ours(
        "microbatch_size", 'rows, or `"auto"`, which is the default and never changes a gradient'
    ),
    "grad_accum": _ours(
        "microbatch_size", "how many rows a microbatch has, not how many microbatches there are"
    ),
    "accumulate_train_batch_on_tokens": _ours(
        "loss_average", '`"tokens"`; `"auto"` reads it off most losses'
    ),
    "grad_clip_norm": _ours("grad_clip_norm", "None for none, where Composer has -1"),
    "seed": _ours("seed", "the same"),
    "deterministic_mode": _ours("deterministic", "True or False; it does not seed"),
    "profiler": _none("run `fit()` inside of `torch.profiler.profile()`"),
    "python_log_level": _none('`logging.getLogger("automicro").setLevel(…)`'),
    "compile_config": _ours("compile", "True, or the keyword arguments of `torch.compile`"),
}
"""By name, each argument of Composer's Trainer, some of older versions among them."""

_RUN_OPTIONS = (
    "train_dataloader",
    "train_dataloader_label",
    "train_subset_num_batches",
    "spin_dataloaders",
    "schedulers",
    "scale_schedule_ratio",
    "step_schedulers_every_batch",
    "eval_dataloader",
    "eval_subset_num_batches",
    "eval_interval",
    "device_train_microbatch_size",
    "precision",
)

METHODS: Mapping[str, Mapping[str, Counterpart]] = {
    "fit": {
        "reset_time": _none("a second run is a second `Trainer`, of the same model and optimizer"),
        **{name: _of_trainer(COUNTERPARTS[name]) for name in _RUN_OPTIONS},
    },
    "eval": {
        "eval_dataloader": _ours("dataloader", "the same things, also without a name"),
        "subset_num_batches": _ours("max_batches", "None for all, where Composer has -1"),
    },
    "predict": {
        "subset_num_batches": _none("give a loader that has fewer batches"),
        "return_outputs": _none("they are always returned"),
    },
}
"""By the method and the name, each argument that Composer's has and ours has not."""

ATTRIBUTES: Mapping[str, str] = {
    "close": "nothing is left open after fit() and eval()",
    "engine": "events go to the callbacks that the Trainer was given",
    "logger": "a Callback hands values to the loggers with run.log({…})",
    "save_checkpoint": "checkpoint=CheckpointConfig(folder=…, interval=…) saves, and a Callback "
    "asks for one with run.save_checkpoint()",
    "saved_checkpoints": "they are the folders in that of CheckpointConfig(folder=…)",
}
"""What stands here for attributes and methods of Composer's Trainer."""

ELSEWHERE: Mapping[str, str] = {
    "evaluate": "eval",
    "test": "eval",
    "train": "fit",
    "validate": "eval",
}
"""What other trainers call methods of ours."""

_SHIPPED = "automicro.callbacks."

OBJECTS: Mapping[str, Mapping[str, str]] = {
    "Algorithm": {
        "": "what changes the model is applied to it before, as composer.functional.apply_…(model) "
        "does; what changes batches is a Callback with transform(run, batch)",
        "ChannelsLast": "channels_last=True",
        "EMA": f"callbacks=[{_SHIPPED}ExponentialMovingAverage(…)]",
        "GradientClipping": "grad_clip_norm=…, of the norm; other kinds are a Callback with "
        "gradients_ready(run, result)",
        "LabelSmoothing": "torch.nn.CrossEntropyLoss(label_smoothing=…)",
        "LayerFreezing": f"callbacks=[{_SHIPPED}FreezeSchedule(…)]",
        "ProgressiveResizing": f"callbacks=[{_SHIPPED}ImageSizeSchedule(…)]",
        "SeqLengthWarmup": f"callbacks=[{_SHIPPED}SequenceLengthSchedule(…)]",
    },
    "LoggerDestination": {
        "": "loggers=[…] takes those of automicro.loggers, or a subclass of Logger that hands the "
        "values on",
        "ConsoleLogger": "loggers=[automicro.loggers.ConsoleLogger()]",
        "FileLogger": "loggers=[automicro.loggers.JSONLinesLogger(…)] or CSVLogger",
        "InMemoryLogger": "Run.values has the latest of every value, for a Callback to keep",
        "ProgressBarLogger": "progress=True",
        "TensorboardLogger": "loggers=[automicro.loggers.TensorBoardLogger(…)]",
    },
    "Callback": {
        "": "write it as an automicro.Callback: its events are called fit_start, batch_end, "
        "eval_end, …, and get a run and no state",
        "CheckpointSaver": "checkpoint=CheckpointConfig(folder=…, interval=…)",
        "EarlyStopper": f"{_SHIPPED}EarlyStopping(…)",
        "LRMonitor": f"{_SHIPPED}LearningRateMonitor()",
        "MemoryMonitor": f"{_SHIPPED}MemoryMonitor()",
        "NaNMonitor": "non_finite='stop', which is the default",
        "OOMObserver": f"{_SHIPPED}OutOfMemoryReport(…)",
        "RuntimeEstimator": "progress=True",
        "SpeedMonitor": f"{_SHIPPED}SpeedMonitor()",
    },
}
"""By the class that they are of, what stands here for Composer's objects of a name; "" for any."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "precision": {"amp_bf16": "bf16", "amp_fp16": "fp16", "amp": "fp16"},
    "device": {"gpu": "cuda"},
}
"""What values are called here that Composer has another name for, by argument."""


def refuse_unknown(arguments: Mapping[str, object], *, kind: type) -> None:
    """Refuse keyword arguments that a class has not got, and values of Composer's.

    Args:
        arguments: by name, as they were given.
        kind: the `Trainer`, or a subclass; one that takes any argument is left alone.

    Raises:
        TypeError: arguments that it has not got, or objects of Composer's, each with what was
            probably meant.
        ValueError: a value that Composer calls otherwise.

    Example:
        >>> class Trainer:
        ...     def __init__(self, *, microbatch_size="auto"):
        ...         pass
        >>> refuse_unknown({"device_train_microbatch_size": 8}, kind=Trainer)
        Traceback (most recent call last):
            ...
        TypeError: Trainer has no argument 'device_train_microbatch_size': Composer's; here it is
        microbatch_size (rows, or "auto", which is the default and never changes a gradient)
    """
    _refuse_values(arguments)
    _refuse_objects(arguments)
    # Not of the class itself: that would be the signature of a __new__ that takes anything.
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    unknown = [name for name in arguments if name not in parameters]
    if not unknown:
        return
    own = [name for name in parameters if name != "self"]
    lines = [f"{name!r}{_describe(name, own, value=arguments[name])}" for name in unknown]
    if len(lines) == 1:
        raise TypeError(f"{kind.__name__} has no argument {lines[0]}")
    raise TypeError(f"{kind.__name__} has no arguments\n  " + "\n  ".join(lines))


def refusing_unknown(kind: type[T]) -> type[T]:
    """Decorate a class so that `refuse_unknown` sees its keyword arguments first.

    For type checkers and for ``help`` the class keeps the arguments that it has.

    Args:
        kind: whose ``__init__`` says what is known.

    Example:
        >>> @refusing_unknown
        ... class Trainer:
        ...     def __init__(self, *, optimizer=None):
        ...         pass
        >>> inspect.signature(Trainer)
        <Signature (*, optimizer=None)>
        >>> Trainer(optimisers=None)
        Traceback (most recent call last):
            ...
        TypeError: Trainer has no argument 'optimisers': did you mean 'optimizer'?
    """

    def init_subclass(cls: type[T], /, **options: Any) -> None:
        super(kind, cls).__init_subclass__(**options)  # type: ignore[misc]
        if "__init__" in vars(cls):
            _refuse_first(cls)

    _refuse_first(kind)
    kind.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    return kind


def _refuse_first(kind: type) -> None:
    # Not in __new__, whose arguments help() would show beside those of __init__.
    init = kind.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def refusing(self: object, *values: object, **arguments: object) -> None:
        if type(self).__init__ is refusing:  # and not called by that of a subclass
            refuse_unknown(arguments, kind=type(self))
        init(self, *values, **arguments)

    kind.__init__ = refusing  # type: ignore[misc]


def refusing_unknown_arguments(method: Callable[Arguments, R]) -> Callable[Arguments, R]:
    """Decorate a method so that arguments of Composer's method of that name are answered.

    Args:
        method: whose signature says what is known; it stays.

    Example:
        >>> class Trainer:
        ...     @refusing_unknown_arguments
        ...     def eval(self, dataloader=None): ...
        >>> Trainer().eval(eval_dataloader=[1])
        Traceback (most recent call last):
            ...
        TypeError: eval() has no argument 'eval_dataloader': Composer's; here it is dataloader
        (the same things, also without a name)
    """
    own = [name for name in inspect.signature(method).parameters if name != "self"]
    counterparts = METHODS.get(method.__name__, {})

    @functools.wraps(method)
    def checked(*given: Arguments.args, **arguments: Arguments.kwargs) -> R:
        for name in arguments:
            if name not in own:
                described = _describe(name, own, counterparts)
                raise TypeError(f"{method.__name__}() has no argument {name!r}{described}")
        return method(*given, **arguments)

    return checked


def missing_attribute(kind: type, name: str) -> AttributeError:
    """The error for an attribute that a class has not got.

    Args:
        kind: the `Trainer`, or a subclass.
        name: of the attribute.

    Example:
        >>> print(missing_attribute(nn.Module, "close"))
        'Module' object has no attribute 'close': Composer's; nothing is left open after fit() and
        eval()
    """
    hint = f": Composer's; {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
    if name in ELSEWHERE:
        hint = f": here it is {ELSEWHERE[name]}()"
    return AttributeError(f"{kind.__name__!r} object has no attribute {name!r}{hint}", name=name)


def read_more(duration: Any) -> Duration:
    """How much more to train.

    Raises:
        TypeError: a loader, or anything else that is no text.
        ValueError: no duration.

    Example:
        >>> read_more("1ep")
        Duration.parse('1ep')
    """
    if isinstance(duration, Iterable) and not isinstance(duration, str):
        raise TypeError(
            "fit() takes how much more to train, such as '1ep', and was given a "
            f"{type(duration).__name__}; give a loader to the Trainer as train_dataloader=, and "
            "for other data make a second Trainer, of the same model and optimizer"
        )
    return read_duration("duration", duration)


def _describe(
    name: str,
    own: Collection[str],
    counterparts: Mapping[str, Counterpart] = COUNTERPARTS,
    *,
    value: object = None,
) -> str:
    counterpart = counterparts.get(name)
    if counterpart is not None:
        hint = counterpart.hint.replace("`", "")
        if counterpart.ours is None:
            return f": Composer's, and not there; {hint}"
        return f": Composer's; here it is {counterpart.ours} ({hint})"
    synonym = synonym_of(name)
    if synonym is not None:
        synonym = synonym.with_value(value)
        return f": here it is {synonym.argument} ({synonym.python})"
    near = difflib.get_close_matches(name.lower(), own, n=1)
    if near:
        return f": did you mean {near[0]!r}?"
    foreign = difflib.get_close_matches(name.lower(), counterparts, n=1, cutoff=0.85)
    if foreign:
        return f": {foreign[0]!r} was meant?" + _describe(
            foreign[0], own, counterparts
        ).removeprefix(":")
    return "; it has " + ", ".join(own)


def _refuse_objects(arguments: Mapping[str, object]) -> None:
    lines = []
    for name in ("algorithms", "callbacks", "loggers"):
        given = arguments.get(name)
        for each in given if isinstance(given, list | tuple) else [given]:
            kind = next((kind for kind in OBJECTS if comes_from(each, f"composer.{kind}")), None)
            if kind is not None:
                called = type(each).__name__
                known = OBJECTS[kind]
                lines.append(f"{called} of {name} is Composer's: {known.get(called, known[''])}")
    if lines:
        raise TypeError("\n  ".join(lines))


def _refuse_values(arguments: Mapping[str, object]) -> None:
    for name, values in VALUES.items():
        given = arguments.get(name)
        if comes_from(given, "composer.Precision"):
            given = getattr(given, "value", given)
        ours = values.get(given.lower()) if isinstance(given, str) else None
        if ours is not None:
            raise ValueError(
                f"{name}={given!r} is Composer's name for {ours!r}; pass {name}={ours!r}"
            )


_SPEC, _EVALUATOR = "composer.DataSpec", "composer.Evaluator"

# What a DataSpec may have of its own, and what stands for it here.
_OF_A_SPEC: Mapping[str, str] = {
    "batch_transforms": "change the rows where they are collated (collate_fn), or in training by a "
    "Callback with transform(run, batch)",
    "microbatch_transforms": "call it in the model's forward, which gets every microbatch on the "
    "device",
    "split_batch": "batches are cut row by row here: say where the rows are with batch_layout=, or "
    "how a class is cut with register_batch_type",
    "get_num_samples_in_batch": "rows are counted here: say where they are with batch_layout=, or "
    "how a class counts them with register_batch_type",
}


@dataclass(frozen=True)
class MatchingMetrics:
    """Those of the trainer's metrics that patterns name, as Composer's Evaluator has them.

    Args:
        patterns: found anywhere in a name, whatever the case.

    >>> MatchingMetrics(["acc"]).among({"Accuracy": 1, "F1": 2})
    {'Accuracy': 1}
    """

    patterns: Sequence[str]

    def among(self, metrics: Any) -> dict[str, Any]:
        """The metrics by name.

        Args:
            metrics: as the `Trainer` takes them, or as the model has them.

        Raises:
            ValueError: a pattern that is in no name.
        """
        named = _by_name(metrics)
        found: dict[str, Any] = {}
        for pattern in self.patterns:
            matching = {
                name: each for name, each in named.items() if re.search(pattern, name, re.I)
            }
            if not matching:
                raise ValueError(
                    f"an Evaluator of Composer's names the metric {pattern!r}, and there is "
                    f"{', '.join(map(repr, named)) or 'no metric'}; pass metrics=… with it, or let "
                    "get_metrics(is_train=False) give it"
                )
            found |= matching
        return {name: each for name, each in named.items() if name in found}


def read_loader(name: str, given: Any) -> Any:
    """The loader in a DataSpec of Composer's; anything else as it is.

    Args:
        name: of the argument, for errors.
        given: a loader, or a DataSpec.

    Raises:
        ValueError: the DataSpec has functions that would change what is trained on.

    >>> read_loader("train_dataloader", [1, 2])
    [1, 2]
    """
    if not comes_from(given, _SPEC):
        return given
    own = [each for each in _OF_A_SPEC if not _is_default(getattr(given, each))]
    if own:
        raise ValueError(
            f"{name} is a DataSpec of Composer's with functions of its own, which nobody would "
            "call here. Pass its dataloader, and\n  "
            + "\n  ".join(f"for {each}: {_OF_A_SPEC[each]}" for each in own)
        )
    return given.dataloader


def read_token_counter(given: Any) -> Callable[[Any], int] | None:
    """How a DataSpec of Composer's counts the tokens of a batch; None where it says nothing.

    Args:
        given: a loader, or a DataSpec.
    """
    if not comes_from(given, _SPEC) or _is_default(given._get_num_tokens_in_batch):
        return None
    count: Callable[[Any], int] = given.get_num_tokens_in_batch
    return count


def read_evaluations(name: str, given: Any) -> Any:
    """Evaluators and DataSpecs of Composer's as ours, by name; anything else as it is.

    Args:
        name: of the argument, for errors.
        given: as the `Trainer` takes it, or a sequence of Composer's Evaluators.

    Raises:
        TypeError: a sequence of loaders, which have no names.
        ValueError: what cannot be taken over as it is.

    >>> read_evaluations("eval_dataloader", {"seen": [1]})
    {'seen': [1]}
    """
    if isinstance(given, Mapping):
        return {key: _read_evaluator(f"{name}[{key!r}]", each) for key, each in given.items()}
    if comes_from(given, _EVALUATOR):
        given = [given]
    if not _are(given, _EVALUATOR):
        return _read_evaluator(name, given)
    labels = [each.label for each in given]
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"{name} has Evaluators of the labels {labels}; give each one of its own, by which its "
            "values are logged"
        )
    return {each.label: _read_evaluator(f"{name}[{each.label!r}]", each) for each in given}


def _read_evaluator(name: str, given: Any) -> Any:
    if not comes_from(given, _EVALUATOR):
        return read_loader(name, given)
    loader = read_loader(name, given.dataloader)
    subset = given.subset_num_batches
    rows: Any = given.device_eval_microbatch_size
    if rows == getattr(loader, "batch_size", None):  # also where none was given
        rows = INHERITED
    return Evaluator(
        dataloader=loader,
        metrics=INHERITED if given.metric_names is None else MatchingMetrics(given.metric_names),
        microbatch_size="auto" if given.auto_microbatching else rows,
        max_batches=None if subset in (None, -1) else subset,
        interval=_read_interval(name, given.eval_interval),
    )


def _read_interval(name: str, function: Any) -> str | Duration | None:
    """The interval that an Evaluator was given, which it keeps in a function alone."""
    if function is None:
        return INHERITED
    every: Any = inspect.getclosurevars(function).nonlocals.get("time_interval")
    if not comes_from(every, "composer.Time"):
        raise ValueError(
            f"{name} is an Evaluator of Composer's whose eval_interval is a function of a state "
            "that is not here; give it an interval such as '100ba', or pass "
            "automicro.Evaluator(dataloader=…, interval=None) and call Trainer.eval() where you "
            "want it"
        )
    return None if every.value <= 0 else Duration.parse(every)


def _are(given: Any, name: str) -> bool:
    # Not of a subclass, which may be a loader that counts its passes.
    is_sequence = type(given) in (list, tuple) and bool(given)
    return is_sequence and all(comes_from(each, name) for each in given)


def _is_default(function: Any) -> bool:
    """Whether a function of a DataSpec is the one that it has where none was given."""
    home = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", "")
    return home.partition(".")[0] == "composer" and name.startswith("_default")


def _by_name(metrics: Any) -> dict[str, Any]:
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping | nn.ModuleDict):  # a MetricCollection is one, too
        return dict(metrics.items())
    return {type(metrics).__name__: metrics}


_TIMES = "composer.core.time"


class ComposerSchedule:
    """Sets learning rates by a schedule of Composer's.

    Composer computes the rate of a batch when the one before is not counted yet, so that the first
    two have the same. So does this, and a schedule goes over as it is.

    Args:
        optimizer: the one to schedule.
        schedule: gives the factor on the base rates, of a state.
        state: where training stands.
        run: knows how long it takes.
        count_batches: gives the optimizer steps of an epoch; None where nobody knows.

    Raises:
        ValueError: Composer, whose times it counts in, was not imported.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Callable[..., float],
        state: LoopState,
        run: Run,
        count_batches: Callable[[], int | None],
    ) -> None:
        times: Any = sys.modules.get(_TIMES)
        if times is None:
            raise ValueError(
                f"{type(schedule).__name__} says that it is of Composer, and {_TIMES} was not "
                "imported; write the schedule with automicro.schedules"
            )
        self._times = times
        self._schedulers = (schedule,)  # by which a checkpoint tells what it is made of
        self._state = state
        self._run = run
        self._count_batches = count_batches
        self._before = {"samples": 0, "tokens": 0}  # of the batch that is done
        self._of_epoch = {"samples": 0, "tokens": 0}  # where it began
        self.optimizer = optimizer
        self._rates = LambdaLR(optimizer, lambda _: float(schedule(self._as_composer(), 1.0)))

    def step(self) -> None:
        """Set the rates of the next batch."""
        if self._state.epoch_batch == 1:
            self._of_epoch = dict(self._before)
        self._rates.step()
        self._before = {"samples": self._state.samples, "tokens": self._state.tokens or 0}

    def get_last_lr(self) -> list[float]:
        """The rates of the next batch, one for each group of parameters."""
        return [float(rate) for rate in self._rates.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; the schedule itself is given anew."""
        return {
            "rates": self._rates.state_dict(),
            "before": dict(self._before),
            "of_epoch": dict(self._of_epoch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._rates.load_state_dict(state["rates"])
        self._before = dict(state["before"])
        self._of_epoch = dict(state["of_epoch"])

    def _as_composer(self) -> SimpleNamespace:
        """What a schedule may read of Composer's state, before the batch that is done."""
        state, times = self._state, self._times
        has_begun = state.batch > 0
        per_epoch = self._count_batches()
        return SimpleNamespace(
            timestamp=times.Timestamp(
                epoch=state.epoch,
                batch=state.batch - has_begun,
                sample=self._before["samples"],
                token=self._before["tokens"],
                batch_in_epoch=state.epoch_batch - has_begun,
                sample_in_epoch=self._before["samples"] - self._of_epoch["samples"],
                token_in_epoch=self._before["tokens"] - self._of_epoch["tokens"],
            ),
            max_duration=times.Time.from_timestring(str(self._run.max_duration)),
            dataloader_len=None if per_epoch is None else times.Time(per_epoch, Unit.BATCHES),
            optimizers=[self.optimizer],
        )


def read_schedule(
    scheduler: Any,
    interval: str,
    *,
    state: LoopState,
    run: Run,
    count_batches: Callable[[], int | None],
) -> Any:
    """A schedule of Composer's as a callable that makes a scheduler; anything else as it is.

    Args:
        scheduler: as the `Trainer` takes it.
        interval: after what it is stepped.
        state: where training stands.
        run: knows how long it takes.
        count_batches: gives the optimizer steps of an epoch; None where nobody knows.

    Raises:
        TypeError: several in a list.
        ValueError: an interval of epochs.
    """
    if isinstance(scheduler, list | tuple):
        raise TypeError(
            f"scheduler is a {type(scheduler).__name__} of {len(scheduler)}: pass one, which may "
            "be made of several: torch.optim.lr_scheduler.SequentialLR or ChainedScheduler"
        )
    if not comes_from(scheduler, "composer.ComposerScheduler"):
        return scheduler
    if interval != "batch":
        raise ValueError(
            f"{type(scheduler).__name__} counts time by itself and is asked for every batch: leave "
            "scheduler_interval='batch', and give the schedule its times in epochs ('2ep')"
        )
    return partial(
        ComposerSchedule, schedule=scheduler, state=state, run=run, count_batches=count_batches
    )
