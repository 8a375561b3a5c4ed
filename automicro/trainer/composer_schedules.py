"""Composer's schedules, which are functions of its state: run as its Trainer runs them."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from automicro.duration import Unit
from automicro.events import LoopState, Run
from automicro.origins import comes_from

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
