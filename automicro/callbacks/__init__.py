"""Callbacks that come along.

::

    early_stopping      ends training when a value no longer gets better
    average             an exponential moving average of the weights
    learning_rate       logs what the optimizer takes
    speed               logs samples, tokens and batches per second, and the wait for data
    memory              logs what is allocated on the device
    oom_report          a JSON file for each time that memory ran out
    freezing            parameters that are frozen for a part of training
    growth              sizes that grow in training; images, sequences: what grows
    arguments           arguments that are refused early
"""

from automicro.callbacks.average import ExponentialMovingAverage
from automicro.callbacks.early_stopping import EarlyStopping
from automicro.callbacks.freezing import FreezeSchedule
from automicro.callbacks.growth import GrowthSchedule
from automicro.callbacks.images import ImageSizeSchedule
from automicro.callbacks.learning_rate import LearningRateMonitor
from automicro.callbacks.memory import MemoryMonitor
from automicro.callbacks.oom_report import OutOfMemoryReport
from automicro.callbacks.sequences import SequenceLengthSchedule
from automicro.callbacks.speed import SpeedMonitor

__all__ = [
    "EarlyStopping",
    "ExponentialMovingAverage",
    "FreezeSchedule",
    "GrowthSchedule",
    "ImageSizeSchedule",
    "LearningRateMonitor",
    "MemoryMonitor",
    "OutOfMemoryReport",
    "SequenceLengthSchedule",
    "SpeedMonitor",
]
