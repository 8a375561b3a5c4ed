"""Callbacks that ship with automicro."""

from automicro.callbacks.average import ExponentialMovingAverage
from automicro.callbacks.early_stopping import EarlyStopping
from automicro.callbacks.growth import GrowthSchedule
from automicro.callbacks.monitors import MemoryMonitor, SpeedMonitor
from automicro.callbacks.oom_report import OutOfMemoryReport

__all__ = [
    "EarlyStopping",
    "ExponentialMovingAverage",
    "GrowthSchedule",
    "MemoryMonitor",
    "OutOfMemoryReport",
    "SpeedMonitor",
]

_REMOVED = {
    "FreezeSchedule": "Set requires_grad in the fit_start and batch_start of a callback of yours",
    "ImageSizeSchedule": "Use GrowthSchedule with a resize of yours, as by F.interpolate",
    "LearningRateMonitor": "Leave it out: every run logs train/lr",
    "SequenceLengthSchedule": "Use GrowthSchedule with a resize that cuts tokens, as [:, :size]",
}


def __getattr__(name: str) -> object:
    if name in _REMOVED:
        # Python would replace the text of an AttributeError in ``from automicro.callbacks import``.
        raise ImportError(f"automicro.callbacks has no {name}. {_REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
