"""Callbacks that ship with automicro."""

from automicro.callbacks.average import ExponentialMovingAverage
from automicro.callbacks.early_stopping import EarlyStopping
from automicro.callbacks.freezing import FreezeSchedule
from automicro.callbacks.growth import GrowthSchedule, ImageSizeSchedule, SequenceLengthSchedule
from automicro.callbacks.monitors import MemoryMonitor, SpeedMonitor
from automicro.callbacks.oom_report import OutOfMemoryReport

__all__ = [
    "EarlyStopping",
    "ExponentialMovingAverage",
    "FreezeSchedule",
    "GrowthSchedule",
    "ImageSizeSchedule",
    "MemoryMonitor",
    "OutOfMemoryReport",
    "SequenceLengthSchedule",
    "SpeedMonitor",
]


def __getattr__(name: str) -> object:
    if name == "LearningRateMonitor":
        raise ImportError(f"automicro.callbacks has no {name}. Every run logs train/lr")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
