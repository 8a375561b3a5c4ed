"""Schedules whose numbers count epochs, where they are stepped after every batch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from automicro.duration import Duration, Unit
from automicro.errors import SchedulerWarning
from automicro.trainer.given_options import INNER
from automicro.warn import warn

# If no more than this is left of a learning rate, its schedule was made for fewer steps.
_LEFT_AFTER_AN_EPOCH = 1e-3
_LEFT_AT_THE_END = 1e-6


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many optimizer steps a run takes.

    Attributes:
        per_epoch: of a pass over the data.
        epochs: of the run; None where its duration counts something else.
        total: of the run; None where nobody knows.
    """

    per_epoch: int
    epochs: int | None = None
    total: int | None = None

    @classmethod
    def of(cls, per_epoch: int, duration: Duration) -> "Pace":
        """That of a run of so many steps in an epoch.

        >>> Pace.of(8, Duration.parse("3ep"))
        Pace(per_epoch=8, epochs=3, total=24)
        """
        if duration.unit is Unit.EPOCHS:
            epochs = duration.value
            return cls(per_epoch=per_epoch, epochs=epochs, total=per_epoch * epochs)
        return cls(
            per_epoch=per_epoch, total=duration.value if duration.unit is Unit.BATCHES else None
        )

    @property
    def first(self) -> int:
        """Steps of the first epoch, which may not be complete."""
        return self.per_epoch if self.total is None else min(self.per_epoch, self.total)

    def is_cycle(self, steps: int) -> bool:
        """Whether so many steps come several times where they can hardly be meant to."""
        fits_epochs = self.epochs is not None and self.epochs > 1 and steps <= self.epochs
        return 2 * steps <= (self.first if not fits_epochs else self.total or self.first)


def warn_of_haste(scheduler: object, pace: Pace) -> None:
    """Warn of a schedule that counts epochs, where it is stepped after every batch.

    Args:
        scheduler: that is stepped once per optimizer step.
        pace: of the run.

    Warns:
        SchedulerWarning: with what becomes of the learning rate.
    """
    found = describe_haste(scheduler, pace)
    if found is not None:
        warn(
            f"the scheduler is stepped after every batch, and {found}. If it counts epochs, pass "
            "scheduler_interval='epoch'; if it counts batches, give it numbers for "
            f"{pace.per_epoch} of them in an epoch",
            SchedulerWarning,
        )


def describe_haste(scheduler: object, pace: Pace) -> str | None:
    """What becomes of the learning rate of a schedule that surely counts epochs; else None.

    Only schedules of torch are looked at, and only for what makes no sense in optimizer steps:
    rates that all but vanish, or that go down and up again within an epoch. Warm-ups, functions
    of the caller's and schedules over the whole run are left alone.

    Args:
        scheduler: that is stepped once per optimizer step.
        pace: of the run.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    >>> describe_haste(torch.optim.lr_scheduler.StepLR(optimizer, 1), Pace(per_epoch=8))
    'with StepLR(step_size=1, gamma=0.1) the learning rate falls from 0.1 to 1e-09 in 8 batches'
    """
    if pace.per_epoch < 2:
        return None  # epochs are batches
    for each in _parts(scheduler):
        look = _LOOKS.get(type(each).__name__)
        if look is not None and type(each).__module__ == "torch.optim.lr_scheduler":
            options, told = look(each, pace)
            if told is not None:
                return f"with {type(each).__name__}({options}) the learning rate {told}"
    return None


def _parts(scheduler: object) -> Iterator[Any]:
    inner = vars(scheduler).get(INNER) if hasattr(scheduler, "__dict__") else None
    if not inner:
        yield scheduler
        return
    for each in inner:
        yield from _parts(each)


Told = tuple[str, str | None]


def _look_at_steps(scheduler: Any, pace: Pace) -> Told:
    size, gamma = scheduler.step_size, scheduler.gamma
    options = f"step_size={size}, gamma={gamma:g}"
    return options, _falling(scheduler, pace, lambda step: gamma ** (step // size))


def _look_at_milestones(scheduler: Any, pace: Pace) -> Told:
    milestones, gamma = sorted(scheduler.milestones.elements()), scheduler.gamma
    options = f"milestones={milestones}, gamma={gamma:g}"

    def factor(step: int) -> float:
        return float(gamma ** sum(each <= step for each in milestones))

    last = milestones[-1] if milestones else 0
    if gamma < 1 and len(milestones) > 1 and last < pace.first and pace.is_cycle(last):
        told = f"is lowered for the last time after {last} of the {pace.per_epoch} batches of"
        return options, f"{told} the first epoch"
    return options, _falling(scheduler, pace, factor)


def _look_at_exponent(scheduler: Any, pace: Pace) -> Told:
    gamma = scheduler.gamma
    return f"gamma={gamma:g}", _falling(scheduler, pace, lambda step: float(gamma**step))


def _look_at_cosine(scheduler: Any, pace: Pace) -> Told:
    steps = scheduler.T_max
    told = f"is at its lowest after {steps} batches and rises again, over and over"
    return f"T_max={steps}", told if pace.is_cycle(steps) else None


def _look_at_restarts(scheduler: Any, pace: Pace) -> Told:
    steps = scheduler.T_0
    is_meant = not (pace.is_cycle(steps) and 2 * steps <= pace.first) or scheduler.T_mult > 1
    told = f"starts over every {steps} of the {pace.per_epoch} batches of an epoch"
    return f"T_0={steps}", None if is_meant else told


def _look_at_line(scheduler: Any, pace: Pace) -> Told:
    start, end, steps = scheduler.start_factor, scheduler.end_factor, scheduler.total_iters
    options = f"start_factor={start:g}, end_factor={end:g}, total_iters={steps}"
    return options, _ending(scheduler, pace, steps, end) if end < start else None


def _look_at_power(scheduler: Any, pace: Pace) -> Told:
    return f"total_iters={scheduler.total_iters}", _ending(
        scheduler, pace, scheduler.total_iters, 0.0
    )


def _falling(scheduler: Any, pace: Pace, factor: Callable[[int], float]) -> str | None:
    """Of rates that fall by a factor time and again."""
    steps = pace.first
    if factor(steps) > _LEFT_AFTER_AN_EPOCH:
        is_meant_for_epochs = pace.epochs is not None and factor(pace.epochs) > _LEFT_AT_THE_END
        steps = pace.total or pace.first
        if not is_meant_for_epochs or factor(steps) > _LEFT_AT_THE_END:
            return None
    rate = _rate(scheduler)
    return f"falls from {rate:g} to {rate * factor(steps):.1g} in {steps} batches"


def _ending(scheduler: Any, pace: Pace, steps: int, end: float) -> str | None:
    """Of rates that fall once and stay there."""
    if not pace.is_cycle(steps):
        return None
    rate = _rate(scheduler)
    return f"falls from {rate:g} to {rate * end:g} in {steps} batches, and stays there"


def _rate(scheduler: Any) -> float:
    return float(max(scheduler.base_lrs))


_LOOKS: Mapping[str, Callable[[Any, Pace], Told]] = {
    "StepLR": _look_at_steps,
    "MultiStepLR": _look_at_milestones,
    "ExponentialLR": _look_at_exponent,
    "CosineAnnealingLR": _look_at_cosine,
    "CosineAnnealingWarmRestarts": _look_at_restarts,
    "LinearLR": _look_at_line,
    "PolynomialLR": _look_at_power,
}
