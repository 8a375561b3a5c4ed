"""Parameters that are frozen for a part of training."""

import difflib
import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run
from automicro.units import Duration, read_duration

logger = logging.getLogger(__name__)


class FreezeSchedule(Callback):
    """Freezes parameters until some point of training, or from one on.

    A frozen parameter does not require a gradient, so the optimizer leaves it as it is. Buffers,
    dropout and training mode are not touched: a frozen BatchNorm layer goes on updating its
    statistics.

    Training a layer from later on needs more memory from then on: its activations are kept, and
    the optimizer builds state for it. A microbatch size that fitted until then may not fit any
    more; it is found again like the first one.

    Args:
        frozen_until: durations by patterns of parameter names, as in the shell: ``{"encoder.*":
            "100ba"}`` freezes the encoder for the first 100 batches.
        frozen_from: the same for parameters that are trained at first.

    A parameter that several patterns match is frozen while any of them says so.

    Raises:
        TypeError, ValueError: no pattern, or no durations.

    A pattern that no parameter matches is a ``ValueError`` when training begins, and so is a
    parameter to be unfrozen that the optimizer does not have.

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
                "there is nothing to freeze; pass patterns with durations, such as "
                "{'encoder.*': '100ba'}"
            )
        self._now: tuple[nn.Module, list[bool]] | None = None

    def frozen(self, names: list[str], state: LoopState) -> list[str]:
        """Which of some parameters are frozen now.

        Args:
            names: of the parameters.
            state: where training stands.
        """
        patterns = [
            *(each for each, until in self._until.items() if not _is_reached(state, until)),
            *(each for each, since in self._from.items() if _is_reached(state, since)),
        ]
        return [name for name in names if _matches(name, patterns)]

    def fit_start(self, run: Run) -> None:
        """Freeze what is frozen at first."""
        if run.world_size > 1:
            raise ValueError(
                f"{type(self).__name__} changes which parameters take gradients, and "
                f"{run.world_size} ranks have agreed on them when the model was wrapped; freeze "
                "them with requires_grad_(False) before the Trainer is made, for the whole run, "
                "or train in one process"
            )
        parameters = _parameters(run.model)
        for pattern in (*self._until, *self._from):
            _require_match(pattern, list(parameters))
        if run.optimizer is not None:
            known = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
            for name in parameters:
                # Optimizers are often built of what requires a gradient: unfreezing would then
                # change nothing, and nothing would say so.
                if _matches(name, self._until) and id(parameters[name]) not in known:
                    raise ValueError(
                        f"{name!r} is to be unfrozen, and the optimizer does not have it; build "
                        "the optimizer with all parameters, also those that are frozen at first"
                    )
        self._now = None
        self._apply(run)

    def batch_start(self, run: Run, batch: Any) -> None:
        """Freeze and unfreeze what is due."""
        self._apply(run)

    def _apply(self, run: Run) -> None:
        state = run.state
        durations = (*self._until.values(), *self._from.values())
        reached = [_is_reached(state, each) for each in durations]
        # Names are matched only when something is due: there may be thousands, at each batch.
        if self._now is not None and self._now[0] is run.model and self._now[1] == reached:
            return
        self._now = (run.model, reached)
        parameters = _parameters(run.model)
        frozen = set(self.frozen(list(parameters), state))
        changed: dict[bool, list[str]] = {True: [], False: []}
        for name, parameter in parameters.items():
            wants_gradient = name not in frozen
            # What is only frozen from some point on stays as it was until then.
            if wants_gradient and not _matches(name, self._until):
                continue
            if parameter.requires_grad != wants_gradient:
                parameter.requires_grad_(wants_gradient)
                changed[wants_gradient].append(name)
            if not wants_gradient:
                # A gradient that stays would let the optimizer, with its momentum, move what is
                # frozen.
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
            f"{name} is {schedule!r} and no mapping; pass patterns with durations, such as "
            "{'encoder.*': '100ba'}"
        )
    return {
        str(pattern): read_duration(f"{name}[{pattern!r}]", duration)
        for pattern, duration in schedule.items()
    }


def _is_reached(state: LoopState, duration: Duration) -> bool:
    return state.done(duration.unit) >= duration.value


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    # Tied ones under each of their names, so that a pattern finds them by any.
    return dict(model.named_parameters(remove_duplicate=False))


def _matches(name: str, patterns: Any) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_match(pattern: str, names: list[str]) -> None:
    if any(fnmatchcase(name, pattern) for name in names):
        return
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    raise ValueError(
        f"no parameter matches {pattern!r}; there are {len(names)}, such as {', '.join(near)}, and "
        "those of a module are 'module.*'"
    )
