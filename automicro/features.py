"""Features of a run, which a `Microbatcher` takes in ``features=``, and the options for them.

The Trainer, configs and integrations have one option for each feature: ``remember_sizes=True``
stands for ``features=[RememberSizes()]``. `with_features` converts these options.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from automicro.durations import duration_meant
from automicro.errors import suggestion
from automicro.options import (
    GRADIENT_SUMS,
    NON_FINITE_MODES,
    REHEARSALS,
    SCHEDULER_INTERVALS,
    SYNCS,
    check_choice,
    read_amount,
    read_flag,
)
from automicro.step.feature import Feature as Feature
from automicro.step.feature import check_features
from automicro.step.setup import Setup

if TYPE_CHECKING:
    from automicro.carry import Carry as Carry
    from automicro.lengths.sorting import MicrobatchUnit as MicrobatchUnit
    from automicro.nested.parts import Nested as Nested
    from automicro.remembered.recollection import RememberSizes as RememberSizes
    from automicro.savers.levels import WhenTooLarge as WhenTooLarge

# These modules are imported only when their features are used.
_HOMES = {
    "Carry": "automicro.carry",
    "MicrobatchUnit": "automicro.lengths.sorting",
    "Nested": "automicro.nested.parts",
    "RememberSizes": "automicro.remembered.recollection",
    "WhenTooLarge": "automicro.savers.levels",
}
_HERE = """
    Compile CountData Deterministic Feature GradientSums NonFinite Optimization RankReduction
    Rehearse Repeatable StepState StrictDivisible UpdateMetric with_features
"""
__all__ = sorted([*_HOMES, *_HERE.split()])


class GradientSums(Feature):
    """Choose the dtype in which gradients of half-precision parameters add up over microbatches.

    Args:
        sums: the dtype of gradient sums. ``"fp32"`` rounds only once, like a whole batch, and needs
            four bytes per element during the batch. ``"native"`` uses the parameters' own dtype, as
            several ranks always do.

    Raises:
        ValueError: if ``sums`` is neither.
    """

    def __init__(self, sums: str) -> None:
        self._in_float32 = check_choice("gradient_sums", sums, GRADIENT_SUMS) == "fp32"

    def attach(self, setup: Setup) -> None:
        setup.sums_in_float32 = self._in_float32


class RankReduction(Feature):
    """Choose how losses and gradients are combined over several ranks.

    Args:
        sync: when a model with ``fully_shard`` reduces gradients. ``"each"`` reduces them in each
            microbatch. ``"auto"`` reduces them in the last one, which keeps unsharded gradients
            until then, and returns to ``"each"`` if memory runs out.
        scales: whether to divide losses by the count of rows (or tokens) of all ranks, so that the
            gradient is that of one batch. If False, each rank's loss is the mean over its own rows,
            and the wrapper averages gradients over ranks, as ``DistributedDataParallel`` does.

    Raises:
        ValueError: if ``sync`` is neither ``"each"`` nor ``"auto"``.
    """

    def __init__(self, sync: str = "each", *, scales: bool = True) -> None:
        self._sync, self._scales = check_choice("sync", sync, SYNCS), scales

    def attach(self, setup: Setup) -> None:
        setup.scales_for_ranks = self._scales
        # The ranks decide, because a wrapper might not support it.
        if self._sync == "auto":
            setup.ranks.sync_late()


class Repeatable(Feature):
    """Choose sizes without timings, so that a repeated run uses the same sizes."""

    def attach(self, setup: Setup) -> None:
        setup.repeatable = True


class StepState(Feature):
    """Declare additional state that a step changes and a failed attempt must restore.

    Args:
        values: lists, dicts, modules or objects with attributes, each including everything that it
            contains; or objects with methods ``begin``, ``prepare``, ``commit`` and ``roll_back``,
            which roll back their state themselves.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = list(values)

    def attach(self, setup: Setup) -> None:
        setup.state += self._values


class StrictDivisible(Feature):
    """Refuse batches whose number of rows is not a multiple of the microbatch size."""

    def attach(self, setup: Setup) -> None:
        setup.strict_divisible = True


class UpdateMetric(Feature):
    """Update metrics with a function instead of ``metric.update(outputs, targets)``.

    A check also calls the function with a few rows of the first split batches, and then rolls back
    its changes.

    Args:
        update: a function of metric, outputs and microbatch.
    """

    def __init__(self, update: Callable[..., None]) -> None:
        with contextlib.suppress(ValueError):  # some builtins have no signature
            try:
                inspect.signature(update).bind("metric", "outputs", "microbatch")
            except TypeError as error:
                raise TypeError(
                    f"update_metric cannot be called with three arguments ({error}). Pass a "
                    "function (metric, outputs, microbatch) → None"
                ) from None
        self._update = update

    def attach(self, setup: Setup) -> None:
        setup.functions["update_metric"] = self._update


class TrainerFeature(Feature):
    """A feature of the Trainer's loop, which a `Microbatcher` refuses."""

    def attach(self, setup: Setup) -> None:
        name = type(self).__name__
        raise TypeError(
            f"{name} is a feature of the Trainer's loop, and a Microbatcher has none; do in your "
            f"own loop what {name} says, and leave it out of features"
        )


class CountData(TrainerFeature):
    """Count tokens or seconds of batches, for durations in tokens or hours, and for the speed.

    Args:
        tokens: returns the number of tokens in a batch of the loader. The default is the sum of
            ``attention_mask``, or the number of elements of ``input_ids``.
        seconds: returns the duration of a batch's data in seconds. The default is the duration that
            a `LengthBatchSampler` reports.
    """

    def __init__(
        self,
        tokens: Callable[[Any], int] | None = None,
        seconds: Callable[[Any], float] | None = None,
    ) -> None:
        self.tokens, self.seconds = tokens, seconds


class NonFinite(TrainerFeature):
    """Choose how to handle a batch whose loss or gradient is NaN or infinite.

    Args:
        mode: how to handle a batch whose loss, or whose gradient norm if gradients are clipped, is
            NaN or infinite. ``"stop"`` raises an error before the optimizer steps, ``"skip"`` skips
            the batch and reports it, and ``"ignore"`` steps as usual.

    Raises:
        ValueError: if ``mode`` is none of these.
    """

    def __init__(self, mode: str = "stop") -> None:
        self.mode = check_choice("non_finite", mode, NON_FINITE_MODES)


class Optimization(TrainerFeature):
    """Choose how the learning rate changes and how gradients are clipped.

    Args:
        scheduler: a learning rate scheduler, or a callable that builds one from the optimizer.
            ReduceLROnPlateau needs a measured value, so step it in your own callback.
        scheduler_interval: ``"batch"`` to step the scheduler after each optimizer step, or
            ``"epoch"`` after each pass over the data. Required for schedulers of torch, which do
            not define it; those of `automicro.schedules` do.
        grad_clip_norm: maximum norm of the gradient over all parameters of the optimizer; larger
            gradients are scaled down to it.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer], Any] | None = None,
        scheduler_interval: str | None = None,
        grad_clip_norm: float | None = None,
    ) -> None:
        if scheduler_interval is not None:
            check_choice("scheduler_interval", scheduler_interval, SCHEDULER_INTERVALS)
        self.scheduler, self.scheduler_interval = scheduler, scheduler_interval
        self.grad_clip_norm = read_amount("grad_clip_norm", grad_clip_norm)


class Rehearse(TrainerFeature):
    """Run the costliest batches before the first step and roll them back.

    Args:
        mode: ``"worst"`` to run the costliest batches of the data and of each evaluation before
            the first step and roll them back; only the sizes found are kept. See
            ``docs/plan.md``.

    Raises:
        ValueError: if ``mode`` is another.
    """

    def __init__(self, mode: str = "worst") -> None:
        self.mode = check_choice("rehearse", mode, REHEARSALS)


class Deterministic(TrainerFeature):
    """Whether to refuse operations whose results can differ between runs."""


class Compile(TrainerFeature):
    """Compile the model when the Trainer is constructed.

    Args:
        options: whether to compile the model, or the keyword arguments of ``torch.compile``.
            A second microbatch size compiles it once more. CUDA graphs are refused if sizes change.
    """

    def __init__(self, options: bool | Mapping[str, Any] = True) -> None:
        self.options = options


class _Word(NamedTuple):
    """An option that stands for a feature, or for one of its arguments."""

    feature: str  # the name of its class in this module
    argument: str | None  # None: the option only switches the feature on
    default: Any  # the value at which the option adds no feature


WORDS = {
    "microbatch_unit": _Word("MicrobatchUnit", "unit", "rows"),
    "padding": _Word("MicrobatchUnit", "padding", None),
    "cut_padding": _Word("MicrobatchUnit", "cut_padding", "auto"),
    "nested": _Word("Nested", "parts", None),
    "when_too_large": _Word("WhenTooLarge", "savers", "error"),
    "strict_divisible": _Word("StrictDivisible", None, False),
    "gradient_sums": _Word("GradientSums", "sums", "fp32"),
    "carry_layout": _Word("Carry", "layout", None),
    "update_metric": _Word("UpdateMetric", "update", None),
    "count_tokens": _Word("CountData", "tokens", None),
    "count_seconds": _Word("CountData", "seconds", None),
    "non_finite": _Word("NonFinite", "mode", "stop"),
    "scheduler": _Word("Optimization", "scheduler", None),
    "scheduler_interval": _Word("Optimization", "scheduler_interval", None),
    "grad_clip_norm": _Word("Optimization", "grad_clip_norm", None),
    "rehearse": _Word("Rehearse", "mode", None),
    "deterministic": _Word("Deterministic", None, False),
    "compile": _Word("Compile", "options", False),
    "state": _Word("StepState", "values", ()),
    "scales_for_ranks": _Word("RankReduction", "scales", True),
    "sync": _Word("RankReduction", "sync", "each"),
    "remember_sizes": _Word("RememberSizes", "wanted", None),
    "repeatable": _Word("Repeatable", None, False),
}
"""Each word that says something makes a feature; those of one feature make it together."""

P = ParamSpec("P")


# Hosts have options for these, which add to a user's feature; others switch something on.
_BESIDE_OPTIONS = ("RankReduction", "Repeatable", "StepState", "StrictDivisible")


def with_features(words: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options for features, among arguments of `Microbatcher`, into ``features``.

    Args:
        words: arguments of `Microbatcher`, and options such as ``remember_sizes=True``.

    Returns:
        Arguments of `Microbatcher`, with the features of all options in ``features``.

    Raises:
        TypeError, ValueError: if an option has a wrong value; the message names the remedy.

    Example:
        >>> made = with_features({"precision": "bf16", "repeatable": True, "sync": "each"})
        >>> made["precision"], [type(each).__name__ for each in made["features"]]
        ('bf16', ['Repeatable'])
    """
    features = check_features(words.get("features", ()))
    wanted = [w.feature for name, w in WORDS.items() if words.get(name, w.default) != w.default]
    # All options of one feature together create one instance of it.
    for feature in dict.fromkeys(wanted):
        named = {name: word for name, word in WORDS.items() if word.feature == feature}
        if last_of(feature, features) is not None and feature not in _BESIDE_OPTIONS:
            given_twice = " and ".join(name for name in named if name in words)
            raise ValueError(
                f"{given_twice} and features=[{feature}(…)] are both given, and one would replace "
                f"the other. Leave out the option, and give all of it in {feature}(…)"
            )
        given = {}
        for name, word in named.items():
            value = words.get(name, word.default)
            if word.argument is not None:
                given[word.argument] = value
            else:
                read_flag(name, value)
        features.append(class_of(feature)(**given))
    others = {name: value for name, value in words.items() if name not in WORDS}
    return {**others, "features": features} if features else others


def taking_words(construct: Callable[P, None]) -> Callable[P, None]:
    """Let an ``__init__`` take the options that stand for features, as configs do."""

    # `functools.wraps` keeps the constructor's own signature for help() and the config's schema.
    @functools.wraps(construct)
    def taking(*args: P.args, **kwargs: P.kwargs) -> None:
        given: Any = kwargs if WORDS.keys().isdisjoint(kwargs) else with_features(kwargs)
        construct(*args, **given)

    return taking


def last_of(name: str, features: Iterable[Feature]) -> Any:
    """The last feature of a class or a subclass, which takes precedence; None if there is none."""
    # Compare names: a feature whose module is not imported cannot be in the list.
    kinds = ((f, type(f).__mro__) for f in reversed([*features]))
    return next((f for f, kind in kinds if name in (each.__name__ for each in kind)), None)


def exact_batchnorm(microbatch_size: Any) -> Feature:
    """The feature that ``batchnorm="exact"`` stands for."""
    from automicro.nested.parts import ExactBatchNorm

    return ExactBatchNorm(microbatch_size)


def refuse_unknown(
    cls: str, given: Mapping[str, Any], known: Mapping[str, Any], placed: Sequence[str]
) -> NoReturn:
    """Refuse arguments that a constructor does not have, with what to write instead."""
    for name in given:
        if name not in known:
            instead = _in_place(cls, name, given[name], known)
            raise TypeError(f"{cls} has no argument {name}{instead}")
    named = next(name for name in known if name not in placed)
    raise TypeError(
        f"{cls} takes {' and '.join(placed[1:])} alone by place; name all others, as in {named}=…"
    )


def _in_place(cls: str, name: str, value: Any, known: Mapping[str, Any]) -> str:
    """The rest of an error message about an unknown argument: what to write instead."""
    if name in WORDS:
        word, shown = WORDS[name], repr(value)
        shown = shown if len(shown) <= 40 and not shown.startswith("<") else "…"
        argument = "" if word.argument is None else f"{word.argument}={shown}"
        return f". Give features=[automicro.features.{word.feature}({argument})]"
    if name in INSTEAD:
        return f"; {INSTEAD[name]}"
    if name == "metrics":
        return "; give them with each batch: backward(batch, metrics) and evaluate(batch, metrics)"
    duration = duration_meant(value, name)
    if duration and "max_duration" in known:
        return f"; give max_duration={duration!r}"
    # Include options for features: a misspelled one is first answered with its correct spelling.
    near = suggestion(name, [*known, *WORDS])
    return f"{near}; help(automicro.{cls}) lists those that there are"


INSTEAD = {
    "eval_loss_average": "give loss_average a function of the microbatch, or evaluate elsewhere",
    "channels_last": "convert the model: model.to(memory_format=torch.channels_last)",
    "max_time": "give it to fit(max_time='2h30m') of the Trainer",
    "parameter_groups": "give optimizer=automicro.ParameterGroups(torch.optim.AdamW, [{…}])",
}


def class_of(feature: str) -> Callable[..., Feature]:
    """The class of a feature, by its name in this module."""
    found: Callable[..., Feature] = globals().get(feature) or __getattr__(feature)
    return found


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
