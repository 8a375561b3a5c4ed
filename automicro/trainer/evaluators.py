"""Evaluators: one data set or several, each with a name, metrics and a microbatch size."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from automicro.durations import Duration, read_duration
from automicro.options import read_count
from automicro.policy.policy import Policy
from automicro.trainer.data.loading import check_loader

INHERITED = "inherited"
"""The default: the argument of the `Trainer`."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """One of several evaluations of a `Trainer`: ``eval_dataloader={"name": Evaluator(…)}``.

    Attributes:
        dataloader: an iterable of whole batches that can be iterated over repeatedly.
        metrics: metrics as for the `Trainer`, by default the trainer's; None for no metrics.
        microbatch_size: rows per microbatch: an int, ``"auto"``, None (the whole batch), or a
            policy; by default the trainer's ``eval_microbatch_size``. Sizes are found separately
            for each evaluator.
        max_batches: number of batches to evaluate; None for all.
        interval: duration between evaluations, by default the trainer's ``eval_interval``; None
            to evaluate only on request.

    Raises:
        TypeError, ValueError: a value is invalid.

    >>> Evaluator(dataloader=[1, 2, 3], max_batches=2).max_batches
    2
    """

    dataloader: Iterable[Any]
    metrics: Any = INHERITED
    microbatch_size: int | str | Policy | None = INHERITED
    max_batches: int | None = None
    interval: str | Duration | None = INHERITED

    def __post_init__(self) -> None:
        check_loader("Evaluator(dataloader=…)", self.dataloader)
        if self.dataloader is None:
            raise TypeError("Evaluator(dataloader=None) has no data to evaluate on. Pass a loader")
        if self.max_batches is not None:
            read_count("max_batches", self.max_batches)
        if self.interval is not None and not is_inherited(self.interval):
            read_duration("interval", self.interval)


def is_inherited(value: object) -> bool:
    """Whether an evaluator uses the option of the `Trainer`."""
    return isinstance(value, str) and value == INHERITED


def read_evaluators(name: str, given: Any) -> dict[str, Evaluator]:
    """Read a loader, an `Evaluator`, or a mapping of these; a single one has the name ``""``.

    >>> list(read_evaluators("eval_dataloader", {"seen": [1], "new": [2]}))
    ['seen', 'new']
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {"": _read(name, given)}
    if not given:
        raise ValueError(
            f"{name}={given!r} names no evaluation. Pass {{'name': loader}}, or None for none"
        )
    for each in given:
        if not isinstance(each, str) or not each or "/" in each:
            raise ValueError(
                f"{name} has the name {each!r}, but names cannot contain '/', because values are "
                "logged as eval/name/metric. Rename it"
            )
    return {each: _read(f"{name}[{each!r}]", value) for each, value in given.items()}


def _read(name: str, given: Any) -> Evaluator:
    if isinstance(given, Evaluator):
        return given
    if given is None:
        raise TypeError(f"{name} is None; pass a loader, or leave this name out")
    check_loader(name, given)
    return Evaluator(dataloader=given)
