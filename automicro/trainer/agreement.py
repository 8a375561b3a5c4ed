"""Whether a checkpoint is of this run: what is refused, and what is only said.

All of it is decided from the structure of the checkpoint, before anything is overwritten.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from automicro.errors import CheckpointError, CheckpointWarning
from automicro.events import LoopState
from automicro.trainer.given_options import GivenOptions
from automicro.trainer.metric_set import MetricSet
from automicro.trainer.module_state import MODEL_KEYS
from automicro.warn import warn

KEYS = (
    *MODEL_KEYS,
    "optimizer",
    "parts",
    "callbacks",
    "given",
    "progress",
    "stop_reason",
    "rng",
)

_REMEDY = "Use the options of the run that saved it, or start anew with resume='never'"


def refuse_another_version(saved: Mapping[str, Any], state: LoopState) -> None:
    """Refuse a checkpoint with other keys than this automicro writes.

    Raises:
        CheckpointError: keys are missing, or are not known.
    """
    progress = saved.get("progress", {})
    here = dataclasses.asdict(state)
    expected = [*KEYS, *(f"progress.{name}" for name in here)]
    found = [*saved, *(f"progress.{name}" for name in progress)]
    for phase in ("train", "eval"):
        expected += [f"progress.{phase}.{name}" for name in here[phase]]
        found += [f"progress.{phase}.{name}" for name in progress.get(phase, {})]
    differing = _words(_missing(expected, found), _missing(found, expected))
    if differing:
        raise CheckpointError(
            f"the checkpoint is of another version of automicro: {differing}. Go on with the "
            "version that saved it, or start anew with resume='never'"
        )


def refuse_other_classes(saved: Mapping[str, Any], given: GivenOptions) -> None:
    """Refuse the checkpoint of another optimizer or scheduler.

    Raises:
        CheckpointError: names both.
    """
    for what, name in given.classes.items():
        was = saved["classes"].get(what)
        if was != name:
            raise CheckpointError(
                f"the checkpoint is of a run with {_class(what, was)}, and this one has "
                f"{_class(what, name)}. {_REMEDY}"
            )


def warn_of_other_options(saved: Mapping[str, Any], given: GivenOptions) -> None:
    """Say which options were others when the checkpoint was saved."""
    differing = given.differing(saved["options"])
    if differing:
        warn(
            f"the checkpoint was saved with {'; '.join(differing)}: the run goes on with the "
            "values of the checkpoint. For others, load only its weights, or set them in a "
            "callback's fit_start",
            CheckpointWarning,
        )


def refuse_other_parts(
    saved: Mapping[str, Any], parts: Mapping[str, Any], *, optional: Sequence[str]
) -> None:
    """Refuse the checkpoint of a run of other parts. Some may come and go, and start fresh.

    Args:
        saved: the states of the parts of the checkpoint, by name.
        parts: of this run.
        optional: what the names of those begin with that a run may have or not.

    Raises:
        CheckpointError: says what differs.
    """

    def needed(names: Iterable[str]) -> list[str]:
        return [name for name in names if not name.startswith(tuple(optional))]

    differing = _words(_missing(needed(parts), saved), _missing(needed(saved), parts))
    if differing:
        raise CheckpointError(
            f"the checkpoint is of other parts of the run: {differing}. {_REMEDY}"
        )
    if ("scaler" in parts) != ("scaler" in saved):
        warn(
            "the checkpoint is of a run with another precision: "
            + (
                "the scale of the loss starts fresh"
                if "scaler" in parts
                else "its scale of the loss is dropped"
            ),
            CheckpointWarning,
        )


def warn_of_other_callbacks(saved: Mapping[str, Any], callbacks: Mapping[str, Any]) -> None:
    """Say which callbacks start fresh, and whose state is dropped."""
    for name in _missing(saved, callbacks):
        warn(
            f"the checkpoint has the state of the callback {name}, which this run has not: it is "
            "dropped",
            CheckpointWarning,
        )
    for name in _missing([name for name, each in callbacks.items() if each.state_dict()], saved):
        warn(
            f"the checkpoint has no state of the callback {name}, which starts fresh",
            CheckpointWarning,
        )


def compare_metrics(saved: Mapping[str, Any], metrics: MetricSet, *, is_within_epoch: bool) -> None:
    """At the end of an epoch metrics may come and go; within one their counts would be wrong.

    Raises:
        CheckpointError: the checkpoint lacks what a metric has counted in this epoch.
    """
    lacks, extra = metrics.differences(saved)
    if not is_within_epoch:
        return
    if lacks:
        raise CheckpointError(
            f"the checkpoint is from within an epoch and lacks what these metrics have counted in "
            f"it: {', '.join(lacks)}. Pass the metrics of the run that saved it, or add others "
            "when going on from the end of an epoch"
        )
    if extra:
        warn(
            f"the checkpoint has the counts of the metrics {', '.join(extra)}, which this run has "
            "not: they are dropped",
            CheckpointWarning,
        )


def sizes_for(name: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Found sizes to load: of a policy of another kind none are. They change no result.

    Args:
        name: of the part, for the warning.
        saved: what `Microbatcher.state_dict` gave.
        here: what it gives now.
    """
    others: list[str] = []
    taken = _of_same_policies(saved, here, others)
    if others:
        warn(
            f"the {name} in the checkpoint are of another policy ({'; '.join(others)}): they are "
            "dropped, and start fresh, which changes no result",
            CheckpointWarning,
        )
    return taken


def _of_same_policies(
    saved: Mapping[str, Any], here: Mapping[str, Any], others: list[str]
) -> dict[str, Any]:
    """The saved state, with that of here wherever the kind of a policy differs."""
    taken = dict(saved)
    for key, now in here.items():
        was = saved.get(key)
        if not isinstance(was, Mapping) or not isinstance(now, Mapping):
            continue
        if was.get("kind") != now.get("kind"):
            others.append(f"{was.get('kind')}, here {now.get('kind')}")
            taken[key] = now
        elif "kind" not in now:
            taken[key] = _of_same_policies(was, now, others)
    return taken


def _class(what: str, name: str | None) -> str:
    return f"no {what}" if name is None else f"the {what} {name}"


def _missing(names: Iterable[str], among: Iterable[str]) -> list[str]:
    return sorted(set(names) - set(among))


def _words(lacks: Sequence[str], extra: Sequence[str]) -> str:
    found = [f"it lacks {', '.join(lacks)}"] if lacks else []
    found += [f"only it has {', '.join(extra)}"] if extra else []
    return "; ".join(found)
