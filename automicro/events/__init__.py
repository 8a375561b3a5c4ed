"""What happens in a run, and how others take part: events, callbacks, the state of the run."""

from automicro.events.callback import Callback
from automicro.events.dispatch import EVENTS, STEP_EVENTS, Callbacks
from automicro.events.expected import ExpectedValues
from automicro.events.run import Run
from automicro.events.state import Cut, GlobalBatch, LoopState, PhaseState

__all__ = [
    "EVENTS",
    "STEP_EVENTS",
    "Callback",
    "Callbacks",
    "Cut",
    "ExpectedValues",
    "GlobalBatch",
    "LoopState",
    "PhaseState",
    "Run",
]
