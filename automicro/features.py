"""Features of a run, which a `Microbatcher` takes in ``features=``, and the words for them.

The Trainer, configs and other trainers say each in one word: ``remember_sizes=True`` is
``features=[RememberSizes()]``, and `with_features` reads the words.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from automicro.errors import suggestion
from automicro.loss.averages import LossAverage
from automicro.options import GRADIENT_SUMS, NON_FINITE_MODES, SYNCS, check_choice
from automicro.step.feature import Feature
from automicro.step.setup import Setup
from automicro.units import duration_meant

if TYPE_CHECKING:
    from automicro.carry import Carry
    from automicro.lengths.sorting import MicrobatchUnit
    from automicro.nested.parts import Nested
    from automicro.remembered.recollection import RememberSizes
    from automicro.savers.levels import WhenTooLarge

__all__ = [
    "Carry",
    "CountData",
    "EvalLossAverage",
    "Feature",
    "GradientSums",
    "MicrobatchUnit",
    "Nested",
    "NonFinite",
    "RankReduction",
    "RememberSizes",
    "Repeatable",
    "StepState",
    "StrictDivisible",
    "UpdateMetric",
    "WhenTooLarge",
    "with_features",
]

P = ParamSpec("P")

# Loaded by those alone who use them.
_HOMES = {
    "Carry": "automicro.carry",
    "MicrobatchUnit": "automicro.lengths.sorting",
    "Nested": "automicro.nested.parts",
    "RememberSizes": "automicro.remembered.recollection",
    "WhenTooLarge": "automicro.savers.levels",
}


class EvalLossAverage(Feature):
    """The loss is a mean over something else in evaluation.

    Args:
        average: as ``loss_average`` of a `Microbatcher`.
    """

    def __init__(self, average: LossAverage) -> None:
        self._average = average

    def attach(self, setup: Setup) -> None:
        setup.eval_loss_average = self._average


class GradientSums(Feature):
    """Chooses what gradients of parameters in half precision add up in, where a batch is split.

    Args:
        sums: ``"fp32"``, which rounds once, as a whole batch does, and holds four bytes for each
            number meanwhile; or ``"native"``, the parameters' own type. On several ranks it is
            always their own.

    Raises:
        ValueError: another word.
    """

    def __init__(self, sums: str) -> None:
        self._in_float32 = check_choice("gradient_sums", sums, GRADIENT_SUMS) == "fp32"

    def attach(self, setup: Setup) -> None:
        setup.sums_in_float32 = self._in_float32


class RankReduction(Feature):
    """Chooses how losses and gradients of several ranks come together.

    Args:
        sync: with which microbatch a model that ``fully_shard`` was applied to reduces gradients:
            ``"each"``; or ``"auto"`` for the last one, which holds gradients of whole parameters
            meanwhile: with each again where memory runs out.
        scales: whether losses are divided by what those of all ranks count, so that the gradient
            is that of one batch. False for each rank's own mean, of which the wrapper takes the
            mean, as ``DistributedDataParallel`` does by itself.

    Raises:
        ValueError: another word.
    """

    def __init__(self, sync: str = "each", *, scales: bool = True) -> None:
        self._sync, self._scales = check_choice("sync", sync, SYNCS), scales

    def attach(self, setup: Setup) -> None:
        setup.scales_for_ranks = self._scales
        # Asked of the ranks, as wrappers may not allow it.
        if self._sync == "auto":
            setup.ranks.sync_late()


class Repeatable(Feature):
    """No clock decides sizes, so that the same run has the same each time."""

    def attach(self, setup: Setup) -> None:
        setup.repeatable = True


class StepState(Feature):
    """A step changes further state, which a failed attempt must leave as it was.

    Args:
        values: lists, dicts, modules, objects with attributes, each with all that it holds; or
            objects with ``begin``, ``prepare``, ``commit`` and ``roll_back``, which do it
            themselves.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = list(values)

    def attach(self, setup: Setup) -> None:
        setup.state += self._values


class StrictDivisible(Feature):
    """Refuses a batch that is not a multiple of the microbatch size."""

    def attach(self, setup: Setup) -> None:
        setup.strict_divisible = True


class UpdateMetric(Feature):
    """Updates metrics by a function in place of ``metric.update(outputs, targets)``.

    A check calls it with a few rows of the first batches that are split; what it changed then is
    put back.

    Args:
        update: takes metric, outputs and microbatch; and the metric's name, where it has a fourth
            parameter called ``name``.
    """

    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update

    def attach(self, setup: Setup) -> None:
        setup.functions["update_metric"] = self._update


class TrainerFeature(Feature):
    """A feature of the Trainer's own loop, which a loop around a `Microbatcher` writes itself."""

    def attach(self, setup: Setup) -> None:
        name = type(self).__name__
        raise TypeError(
            f"{name} is a feature of the Trainer's loop, and a Microbatcher has none; do in your "
            f"own loop what {name} says, and leave it out of features"
        )


class CountData(TrainerFeature):
    """Counts what batches hold, for durations in tokens or hours, and for the speed.

    Args:
        tokens: gives the tokens in a batch of the loader. Without it they are the sum of
            ``attention_mask``, or the elements of ``input_ids``.
        seconds: gives the seconds of data in one. Without it they are those that a
            `LengthBatchSampler` knows.
    """

    def __init__(
        self,
        tokens: Callable[[Any], int] | None = None,
        seconds: Callable[[Any], float] | None = None,
    ) -> None:
        self.tokens, self.seconds = tokens, seconds


class NonFinite(TrainerFeature):
    """Chooses what becomes of a batch whose loss or gradient is NaN or infinite.

    Args:
        mode: what to do where the loss of a batch, or the norm of its gradient where that is
            clipped, is NaN or infinite: ``"stop"`` with an error before the optimizer steps,
            ``"skip"`` the batch and say so, or ``"ignore"`` it and step.

    Raises:
        ValueError: another word.
    """

    def __init__(self, mode: str = "stop") -> None:
        self.mode = check_choice("non_finite", mode, NON_FINITE_MODES)


class Word(NamedTuple):
    """The word for a feature, or for one of its arguments, outside of a Microbatcher.

    Attributes:
        feature: its name here.
        argument: of it; None where the word says that the feature is wanted.
        default: at which it says nothing.
    """

    feature: str
    argument: str | None
    default: Any


WORDS = {
    "microbatch_unit": Word("MicrobatchUnit", "unit", "rows"),
    "padding": Word("MicrobatchUnit", "padding", None),
    "cut_padding": Word("MicrobatchUnit", "cut_padding", "auto"),
    "nested": Word("Nested", "parts", None),
    "when_too_large": Word("WhenTooLarge", "savers", "error"),
    "eval_loss_average": Word("EvalLossAverage", "average", None),
    "strict_divisible": Word("StrictDivisible", None, False),
    "gradient_sums": Word("GradientSums", "sums", "fp32"),
    "carry_layout": Word("Carry", "layout", None),
    "update_metric": Word("UpdateMetric", "update", None),
    "count_tokens": Word("CountData", "tokens", None),
    "count_seconds": Word("CountData", "seconds", None),
    "non_finite": Word("NonFinite", "mode", "stop"),
    "state": Word("StepState", "values", ()),
    "scales_for_ranks": Word("RankReduction", "scales", True),
    "sync": Word("RankReduction", "sync", "each"),
    "remember_sizes": Word("RememberSizes", "wanted", None),
    "repeatable": Word("Repeatable", None, False),
}
"""Each word that says something makes a feature; those of one feature make it together."""


def with_features(words: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a `Microbatcher`, from arguments of it and words for features.

    Raises:
        TypeError, ValueError: a word that makes no sense, with its remedy.

    Example:
        >>> made = with_features({"precision": "bf16", "repeatable": True, "sync": "each"})
        >>> made["precision"], [type(each).__name__ for each in made["features"]]
        ('bf16', ['Repeatable'])
    """
    features = list(words.get("features", ()))
    wanted = [w.feature for name, w in WORDS.items() if words.get(name, w.default) != w.default]
    # Words of one feature make it once, with all of them.
    for feature in dict.fromkeys(wanted):
        named = {name: word for name, word in WORDS.items() if word.feature == feature}
        given = {
            word.argument: words.get(name, word.default)
            for name, word in named.items()
            if word.argument is not None
        }
        features.append(class_of(feature)(**given))
    others = {name: value for name, value in words.items() if name not in WORDS}
    return {**others, "features": features} if features else others


def last_of(name: str, features: Iterable[Feature]) -> Any:
    """The last feature of a class of this module, which is the one that counts; None for none."""
    # A feature that is not loaded yet is not among them.
    return next((f for f in reversed([*features]) if type(f).__name__ == name), None)


def exact_batchnorm(microbatch_size: Any) -> Feature:
    """The feature that ``batchnorm="exact"`` stands for."""
    from automicro.nested.parts import ExactBatchNorm

    return ExactBatchNorm(microbatch_size)


def answering_unknown(construct: Callable[P, None]) -> Callable[P, None]:
    """Let a constructor answer an argument that it has not with what to write in its place.

    Args:
        construct: an ``__init__``.
    """
    known = inspect.signature(construct).parameters
    placed = [n for n, p in known.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    cls = construct.__qualname__.partition(".")[0]

    # Through __wrapped__, help() and the config's schema still see the constructor's own signature.
    @functools.wraps(construct)
    def answering(*args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) > len(placed):
            named = next(name for name in known if name not in placed)
            raise TypeError(
                f"{cls} takes {' and '.join(placed[1:])} alone by place; name all others, as in "
                f"{named}=…"
            )
        for name in kwargs:
            if name not in known:
                instead = _in_place(cls, name, kwargs[name], known)
                raise TypeError(f"{cls} has no argument {name}{instead}")
        construct(*args, **kwargs)

    return answering


def _in_place(cls: str, name: str, value: Any, known: Mapping[str, Any]) -> str:
    """The rest of a sentence on an argument that is not there: what to write in its place."""
    if name in WORDS:
        word, shown = WORDS[name], repr(value)
        shown = shown if len(shown) <= 40 else "…"
        argument = "" if word.argument is None else f"{word.argument}={shown}"
        return (
            ": what is beside the path of a batch is a feature. Give "
            f"features=[automicro.features.{word.feature}({argument})]"
        )
    if name in INSTEAD:
        return f"; {INSTEAD[name]}"
    if name == "metrics":
        return "; give them with each batch: backward(batch, metrics) and evaluate(batch, metrics)"
    duration = duration_meant(value, name)
    if duration and "max_duration" in known:
        return f"; give max_duration={duration!r}"
    # Words as well: a misspelt one is answered by how it is spelt first.
    near = suggestion(name, [*known, *WORDS])
    return f"{near}; help(automicro.{cls}) lists those that there are"


INSTEAD = {
    "channels_last": "convert the model: model.to(memory_format=torch.channels_last)",
    "max_time": "give it to fit(max_time='2h30m')",
    "parameter_groups": "give optimizer=automicro.ParameterGroups(torch.optim.AdamW, [{…}])",
}


def class_of(feature: str) -> Callable[..., Feature]:
    """The class of a feature by its name here."""
    found: Callable[..., Feature] = globals().get(feature) or __getattr__(feature)
    return found


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
