"""What a run was given: the classes and the options of its optimizer and its scheduler.

A checkpoint restores options with the state, so other ones given at a resume would be overridden
without a word. They are compared as they were given, before schedules changed any.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Counters of a schedule, and what repeats the optimizer's own options.
_NOT_GIVEN = ("last_epoch", "base_lrs")
INNER = "_schedulers"
"""What torch's schedules call those that they are made of."""


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """Classes by what they are for, and options by their names.

    Attributes:
        classes: such as ``{"optimizer": "AdamW", "scheduler": "StepLR"}``; None for none.
        options: plain values, such as ``{"lr": 0.01, "scheduler.step_size": 3}``.
    """

    classes: Mapping[str, str | None]
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, scheduler: object, interval: str = "batch"
    ) -> "GivenOptions":
        """Those of an optimizer and a scheduler that have not stepped yet.

        Args:
            optimizer: the one.
            scheduler: the other; None for none.
            interval: after what the scheduler is stepped.

        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> given = GivenOptions.of(sgd, torch.optim.lr_scheduler.StepLR(sgd, 3))
        >>> dict(given.classes), given.options["lr"], given.options["scheduler.step_size"]
        ({'optimizer': 'SGD', 'scheduler': 'StepLR'}, 0.5, 3)
        """
        stepped = "" if interval == "batch" else f", stepped after every {interval}"
        return cls(
            classes={
                "optimizer": type(optimizer).__qualname__,
                "scheduler": None if scheduler is None else _name_of(scheduler) + stepped,
            },
            options=dict(_options_of(optimizer)) | dict(_schedule_of(scheduler)),
        )

    def state_dict(self) -> dict[str, Any]:
        """As a checkpoint keeps them."""
        return {"classes": dict(self.classes), "options": dict(self.options)}

    def differing(self, saved: Mapping[str, Any]) -> list[str]:
        """The options that were others when a checkpoint was saved, in words.

        Args:
            saved: the options of the checkpoint. What only one of both has is left out: another
                version of torch has more.
        """
        return [
            f"{name}={saved[name]} (here {value})"
            for name, value in self.options.items()
            if name in saved and saved[name] != value
        ]


def _name_of(scheduler: object) -> str:
    """With what it is made of: ``SequentialLR(LinearLR, CosineAnnealingLR)``."""
    inner = vars(scheduler).get(INNER, ()) if hasattr(scheduler, "__dict__") else ()
    made_of = f"({', '.join(map(_name_of, inner))})" if inner else ""
    return type(scheduler).__qualname__ + made_of


def _options_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        of_group = f" of group {index}" if len(groups) > 1 else ""
        # A scheduler has set the first rate by now, and keeps the one that was given.
        rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
        for name, value in (group | rate).items():
            if name not in ("params", "initial_lr"):
                yield from _plain(f"{name}{of_group}", value)


def _schedule_of(scheduler: object) -> Iterator[tuple[str, Any]]:
    if callable(getattr(scheduler, "state_dict", None)):
        yield from _nested("scheduler", scheduler.state_dict())  # type: ignore[attr-defined]


def _nested(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            is_inner = str(key).startswith("_") and key != INNER
            if not is_inner and key not in _NOT_GIVEN:
                yield from _nested(place if key == INNER else f"{place}.{key}", each)
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for index, each in enumerate(value):
            yield from _nested(f"{place}.{index}", each)
    else:
        yield from _plain(place, value)


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    numbers = (bool, int, float, str, type(None))
    if isinstance(value, list | tuple):
        if all(isinstance(each, numbers) for each in value):
            yield name, list(value)
    elif isinstance(value, numbers):
        yield name, value
