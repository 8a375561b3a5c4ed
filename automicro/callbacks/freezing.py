"""Freezing of parameters for a part of training."""

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from automicro.durations import Duration, read_duration
from automicro.errors import suggestion
from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run

logger = logging.getLogger(__name__)


class FreezeSchedule(Callback):
    """Freezes parameters up to a point of training, or from a point on.

    A frozen parameter does not require a gradient, so the optimizer leaves it unchanged. Buffers,
    dropout and training mode are not affected: a frozen BatchNorm layer still updates its
    statistics.

    Unfreezing a layer increases memory use, because its activations are kept and the optimizer
    creates state for it. If the microbatch size no longer fits, a new one is found as at the start.

    Args:
        frozen_until: durations by shell-style patterns of parameter names: ``{"encoder.*":
            "100ba"}`` freezes the encoder for the first 100 batches.
        frozen_from: the same for parameters that are frozen after a duration.

    A parameter that matches several patterns is frozen while any of them applies.

    Raises:
        TypeError, ValueError: there is no pattern, or a duration is invalid.

    When training starts, a ``ValueError`` is raised for a pattern that matches no parameter, and
    for a parameter to be unfrozen that is not in the optimizer.

    Example:
        >>> schedule = FreezeSchedule({"0.*": "2ba"}, frozen_from={"1.bias": "1ep"})
        >>> names = ["0.weight", "1.weight", "1.bias"]
        >>> schedule.frozen(names, LoopState(batch=1))
        ['0.weight']
        >>> schedule.frozen(names, LoopState(batch=8, epoch=1))
        ['1.bias']
    """

    def __init__(
        self,
        frozen_until: Mapping[str, str | Duration] | None = None,
        *,
        frozen_from: Mapping[str, str | Duration] | None = None,
    ) -> None:
        self._until = _read("frozen_until", frozen_until)
        self._from = _read("frozen_from", frozen_from)
        if not self._until and not self._from:
            raise ValueError(
                "there is nothing to freeze. Pass patterns with durations, such as "
                "{'encoder.*': '100ba'}"
            )
        self._now: tuple[nn.Module, list[bool]] | None = None

    def frozen(self, names: list[str], state: LoopState) -> list[str]:
        """Return the names of parameters that are frozen now.

        Args:
            names: names of the parameters.
            state: progress of training.
        """
        patterns = [
            *(each for each, until in self._until.items() if not _is_reached(state, until)),
            *(each for each, since in self._from.items() if _is_reached(state, since)),
        ]
        return [name for name in names if _matches(name, patterns)]

    def fit_start(self, run: Run) -> None:
        """Check the patterns, and freeze parameters for the start."""
        if run.world_size > 1:
            raise ValueError(
                f"{type(self).__name__} changes which parameters take gradients, but "
                f"{run.world_size} ranks fixed them when the model was wrapped. Freeze them with "
                "requires_grad_(False) before the Trainer is made, or train in one process"
            )
        parameters = _parameters(run.model)
        for pattern in (*self._until, *self._from):
            if not any(_matches(name, [pattern]) for name in parameters):
                raise ValueError(
                    f"no parameter matches {pattern!r}{suggestion(pattern, parameters)}. There are "
                    f"{len(parameters)}, such as {next(iter(parameters), None)}; use 'module.*' "
                    "for those of a module"
                )
        if run.optimizer is not None:
            known = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
            for name in parameters:
                # Optimizers are often built from parameters that require a gradient. Unfreezing
                # another one would silently have no effect.
                if _matches(name, self._until) and id(parameters[name]) not in known:
                    raise ValueError(
                        f"{name!r} is to be unfrozen, but the optimizer does not have it. Build "
                        "the optimizer with all parameters, including those frozen at first"
                    )
        self._now = None
        self._apply(run)

    def batch_start(self, run: Run, batch: Any) -> None:
        """Freeze and unfreeze parameters that are due."""
        self._apply(run)

    def _apply(self, run: Run) -> None:
        state = run.state
        durations = (*self._until.values(), *self._from.values())
        reached = [_is_reached(state, each) for each in durations]
        # Names are matched only when a duration is reached, because a batch might have to match
        # thousands.
        if self._now is not None and self._now[0] is run.model and self._now[1] == reached:
            return
        self._now = (run.model, reached)
        parameters = _parameters(run.model)
        frozen = set(self.frozen(list(parameters), state))
        changed: dict[bool, list[str]] = {True: [], False: []}
        for name, parameter in parameters.items():
            wants_gradient = name not in frozen
            # Parameters in frozen_from only are left unchanged until they are frozen.
            if wants_gradient and not _matches(name, self._until):
                continue
            if parameter.requires_grad != wants_gradient:
                parameter.requires_grad_(wants_gradient)
                changed[wants_gradient].append(name)
            if not wants_gradient:
                # With a remaining gradient, an optimizer with momentum would still change the
                # frozen parameter.
                parameter.grad = None
        for wants_gradient, names in changed.items():
            done, shown = "unfroze" if wants_gradient else "froze", ", ".join(names[:5])
            if names:
                logger.info("batch %d: %s %d: %s", state.batch + 1, done, len(names), shown)


def _read(name: str, schedule: Mapping[str, str | Duration] | None) -> dict[str, Duration]:
    if schedule is None:
        return {}
    if not isinstance(schedule, Mapping):
        raise TypeError(
            f"{name} is {schedule!r} and not a mapping. Pass patterns with durations, such as "
            "{'encoder.*': '100ba'}"
        )
    return {
        str(pattern): read_duration(f"{name}[{pattern!r}]", duration)
        for pattern, duration in schedule.items()
    }


def _is_reached(state: LoopState, duration: Duration) -> bool:
    return state.done(duration.unit) >= duration.value


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    # Tied parameters are listed under each of their names, so that a pattern can match any of them.
    return dict(model.named_parameters(remove_duplicate=False))


def _matches(name: str, patterns: Any) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
