"""Composer's schedules: asked for every batch what Composer would ask them.

`benchmarks/beside_composer.py` runs the real ones beside Composer's own Trainer.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from automicro import Trainer
from automicro.trainer.composer import ComposerSchedule
from tests.trainer.composer_classes import Time, of_composer
from tests.trainer.resume.runs import check_resumes, linear
from tests.trainer.runs import make_loader, make_model, make_trainer
from tests.trainer.test_scheduler_interval import rates_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timestamp:
    epoch: int
    batch: int
    sample: int
    token: int
    batch_in_epoch: int
    sample_in_epoch: int
    token_in_epoch: int


class FullTime(Time):
    @classmethod
    def from_timestring(cls, text: str) -> "FullTime":
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        return cls(int(digits), text.removeprefix(digits))


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Timestamp=Timestamp, Time=FullTime)
    monkeypatch.setitem(sys.modules, "composer.core.time", module)


@of_composer
class ComposerScheduler:
    def __call__(self, state: Any, ssr: float = 1.0) -> float:
        raise NotImplementedError


class Falling(ComposerScheduler):
    """By half in every epoch, and by the batch; keeps what it was asked with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.constant: set[tuple[float, str, float, str]] = set()

    def __call__(self, state: Any, ssr: float = 1.0) -> float:
        at = state.timestamp
        self.seen.append(tuple(dataclasses.astuple(at)))
        length, duration = state.dataloader_len, state.max_duration
        self.constant.add((length.value, str(length.unit), duration.value, duration.unit))
        assert ssr == 1.0
        return float(0.5**at.epoch * math.exp(-0.1 * at.batch - 0.001 * at.sample_in_epoch))


def test_a_schedule_is_asked_what_composer_asks_it() -> None:
    schedule = Falling()
    rates_of("2ep", scheduler=schedule, count_tokens=lambda batch: 5)  # 4 batches of 16 rows
    assert schedule.seen == [
        # Made, and before the first batch is counted: the second batch has the first one's rate.
        (0, 0, 0, 0, 0, 0, 0),
        (0, 0, 0, 0, 0, 0, 0),
        (0, 1, 16, 5, 1, 16, 5),
        (0, 2, 32, 10, 2, 32, 10),
        (0, 3, 48, 15, 3, 48, 15),
        (1, 4, 64, 20, 0, 0, 0),
        (1, 5, 80, 25, 1, 16, 5),
        (1, 6, 96, 30, 2, 32, 10),
        (1, 7, 112, 35, 3, 48, 15),
    ]
    assert schedule.constant == {(4, "ba", 2, "ep")}


def test_its_factors_are_on_the_base_rate() -> None:
    seen = rates_of("1ep", scheduler=Falling())
    factors = [1, 1, math.exp(-0.116), math.exp(-0.232)]
    assert seen == pytest.approx([0.1 * factor for factor in factors])


def test_a_run_with_one_resumes_between_any_two_batches(tmp_path: Path) -> None:
    def read(trainer: Trainer) -> float:
        assert trainer._run.optimizer is not None
        return float(trainer._run.optimizer.param_groups[0]["lr"])

    check_resumes(linear, tmp_path, options=lambda: {"scheduler": Falling()}, read=read)


Refused = tuple[Callable[[], dict[str, Any]], type[Exception], str]
REFUSED: dict[str, Refused] = {
    "per epoch": (
        lambda: {"scheduler": Falling(), "scheduler_interval": "epoch"},
        ValueError,
        "Falling counts time by itself .* leave scheduler_interval='batch'",
    ),
    "several": (
        lambda: {"scheduler": [Falling(), Falling()]},
        TypeError,
        "scheduler is a list of 2: pass one, which may be made of several: .*SequentialLR",
    ),
    "a function of the state": (
        lambda: {"scheduler": lambda state: 1.0 if state.timestamp.epoch < 2 else 0.5},
        TypeError,
        "reads 'timestamp', as a function of Composer's state does.*LambdaLR",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_with_the_way_to_go_on(name: str) -> None:
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make_trainer(make_model(), make_loader(), **options())


def test_a_mistake_of_a_factory_is_its_own() -> None:
    def make(optimizer: Any) -> Any:
        return optimizer.not_there

    with pytest.raises(AttributeError, match="not_there"):
        make_trainer(make_model(), make_loader(), scheduler=make)


def test_without_composer_nobody_knows_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "composer.core.time")
    with pytest.raises(ValueError, match=r"composer.core.time was not imported; .*schedules"):
        make_trainer(make_model(), make_loader(), scheduler=Falling())


def test_a_schedule_says_its_rates() -> None:
    model = nn.Linear(2, 2)
    trainer = make_trainer(model, make_loader(), scheduler=Falling())
    assert trainer._fit is not None
    scheduler = trainer._fit.loop.step.update._scheduler
    assert isinstance(scheduler, ComposerSchedule)
    assert scheduler.get_last_lr() == [0.01]
