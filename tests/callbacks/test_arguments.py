"""Arguments of callbacks that mean nothing are refused, and those that went are answered."""

from typing import Any

import pytest

from automicro import callbacks
from automicro.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    GrowthSchedule,
    OutOfMemoryReport,
)

GROWTH = {"start": 2, "end": 4, "over": "4ba", "resize": lambda batch, size: batch}


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (EarlyStopping, {"patience": 0}, "patience=0 must be at least 1"),
        (EarlyStopping, {"mode": "mim"}, "did you mean 'min'"),
        (EarlyStopping, {"min_delta": -1.0}, "mode sets the direction"),
        (EarlyStopping, {"min_delta": "1"}, "mode sets the direction"),
        (EarlyStopping, {"monitor": ""}, "is not a name"),
        (ExponentialMovingAverage, {"decay": 1.0}, "decay=1.0 .* below 1"),
        (ExponentialMovingAverage, {"decay": None}, "decay=None .* below 1"),
        (ExponentialMovingAverage, {"update_interval": "5"}, "update_interval='5'"),
        (ExponentialMovingAverage, {"half_life": "5ba"}, "no argument half_life. Pass decay="),
        (GrowthSchedule, {**GROWTH, "resize": 3}, "resize=3 cannot be called"),
        (GrowthSchedule, {**GROWTH, "start": 8}, "Swap them"),
        (GrowthSchedule, {**GROWTH, "start": 0}, "start=0 must be at least 1"),
        (GrowthSchedule, {**GROWTH, "over": "0ba"}, "over='0ba'"),
        (GrowthSchedule, {**GROWTH, "steps": 0}, "steps=0"),
        (OutOfMemoryReport, {"folder": "a", "history": 3}, "no argument history. Call torch"),
    ],
)
def test_what_means_nothing_is_refused(callback: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        callback(**options)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("FreezeSchedule", "Set requires_grad"),
        ("ImageSizeSchedule", "Use GrowthSchedule"),
        ("LearningRateMonitor", "every run logs train/lr"),
        ("SequenceLengthSchedule", "Use GrowthSchedule"),
    ],
)
def test_removed_callbacks_name_what_to_use(name: str, remedy: str) -> None:
    with pytest.raises(ImportError, match=f"has no {name}. .*{remedy}"):
        getattr(callbacks, name)
