"""Composer's ways to hand over data: a DataSpec, an Evaluator, several of them in a list."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from automicro.duration import Duration
from automicro.origins import comes_from
from automicro.trainer.evaluators import INHERITED, Evaluator

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
