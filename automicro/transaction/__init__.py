"""A step that leaves no trace unless it succeeds.

A `Transaction` holds parts, one restorable thing each: gradients, buffers, random number
generators, metrics. All parts begin together, and then either all commit or all roll back.
"""

from automicro.transaction.buffers import BufferMemory, Buffers
from automicro.transaction.gradient_memory import GradientMemory, TouchedGradientsError
from automicro.transaction.gradients import Gradients
from automicro.transaction.metrics import Metrics, flatten_metrics
from automicro.transaction.parameters import Parameters
from automicro.transaction.remembering import CannotRememberError, Growth, Remembered
from automicro.transaction.rng import (
    OwnGenerators,
    RandomState,
    devices_of,
    find_generators,
    state_of,
)
from automicro.transaction.tensors import TensorCopy
from automicro.transaction.transaction import Part, Transaction

__all__ = [
    "BufferMemory",
    "Buffers",
    "CannotRememberError",
    "GradientMemory",
    "Gradients",
    "Growth",
    "Metrics",
    "OwnGenerators",
    "Parameters",
    "Part",
    "RandomState",
    "Remembered",
    "TensorCopy",
    "TouchedGradientsError",
    "Transaction",
    "devices_of",
    "find_generators",
    "flatten_metrics",
    "state_of",
]
